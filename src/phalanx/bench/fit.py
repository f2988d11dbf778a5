"""Latency and bandwidth out of timings: t(S) = k(n) alpha + f(n) beta S, fitted so that every size counts the same.

Weights are 1/t², since plain least squares would be decided by the largest size alone; alpha and beta are not negative. A second
line is taken where the timings bend, as between an eager and a chunked protocol, if it explains far more than chance would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from phalanx.hardware import ALGORITHMS, BACKENDS, OPERATIONS, Fit, Line, Point

Floats = NDArray[np.float64]

RESAMPLES = 400
FEWEST_SIZES = 3
"""Sizes on each side of a bend: a line through two would fit anything."""
BEND_GAIN = 12.0
"""(sizes - 5) log(squares left by one line / by two) that two lines must exceed: both lines and the place of the bend are five
parameters. The place is searched for, so the usual 8 (a likelihood ratio of three more parameters at 5%) would find bends in noise;
with 12, straight timings of 8 or 20 sizes show one in fewer than 2 of 100 cases."""


def fit(op: str, axis: str, backend: str, ranks: int, points: Sequence[Point], seed: int = 0) -> Fit:
    """The Fit of one operation's timings. Raises ValueError for fewer than two sizes, or timings that are not positive."""
    if op not in OPERATIONS:
        raise ValueError(f"there is no operation {op!r}; there are {', '.join(OPERATIONS)}")
    points = tuple(sorted(points, key=lambda point: point.bytes))
    if len({point.bytes for point in points}) < 2 or any(a.bytes == b.bytes for a, b in pairwise(points)):
        raise ValueError(
            f"{op} along {axis} was timed at sizes {[p.bytes for p in points]}; latency and bandwidth need two, each once"
        )
    if any(not point.seconds or min(point.seconds) <= 0 for point in points):
        raise ValueError(f"{op} along {axis} has a size without timings, or one that took no time")
    rng = np.random.default_rng(seed)
    below, above = BACKENDS.get(backend, BACKENDS[""])[op]
    at = bend(points, design(op, above, ranks, points))
    if at is None:
        only = line(op, above, ranks, points, rng)
        return Fit(op, axis, backend, ranks, only, None, None, errors(op, ranks, points, [only] * len(points)), points)
    low, high = line(op, below, ranks, points[:at], rng), line(op, above, ranks, points[at:], rng)
    # between the last size of the one and the first of the other, in the middle of their ratio
    knee = math.sqrt(points[at - 1].bytes * points[at].bytes)
    lines = [low] * at + [high] * (len(points) - at)
    return Fit(op, axis, backend, ranks, low, high, knee, errors(op, ranks, points, lines), points)


def line(op: str, algorithm: str, ranks: int, points: Sequence[Point], rng: np.random.Generator) -> Line:
    """One line with its 95% intervals: sizes are drawn with replacement, and repetitions within each (Efron 1979).

    Drawing both errs on the wide side; sizes alone would miss a planted value in 1 of 6 cases when there are only 8 of them.
    """
    x = design(op, algorithm, ranks, points)
    medians = np.array([np.median(point.seconds) for point in points])
    alpha, beta = solve(x[None], medians[None])[0]
    resampled = np.stack([_medians(np.array(point.seconds), rng) for point in points], axis=1)  # (resamples, sizes)
    picks = rng.integers(len(points), size=(RESAMPLES, len(points)))
    alike = (picks == picks[:, :1]).all(axis=1)
    picks[alike] = np.arange(len(points))  # one size alone fixes no line
    draws = solve(x[picks], np.take_along_axis(resampled, picks, axis=1))
    (alpha_low, beta_low), (alpha_high, beta_high) = np.quantile(draws, (0.025, 0.975), axis=0).tolist()
    return Line(algorithm, float(alpha), float(beta), (alpha_low, alpha_high), (beta_low, beta_high))


def design(op: str, algorithm: str, ranks: int, points: Sequence[Point]) -> Floats:
    """(sizes, 2): what alpha and beta are multiplied by."""
    latencies, volume = ALGORITHMS[op, algorithm]
    return np.array([(latencies(ranks), volume(ranks) * point.bytes) for point in points], dtype=np.float64)


def solve(x: Floats, seconds: Floats) -> Floats:
    """(draws, 2) that minimise sum (1 - x @ (alpha, beta) / t)² over alpha, beta >= 0, for x (draws, sizes, 2), t (draws, sizes).

    x is not negative. With two unknowns the constrained minimum is the free one if that is feasible, else the better one of the two edges.
    """
    a, b = x[..., 0] / seconds, x[..., 1] / seconds
    aa, ab, bb, a1, b1 = (a * a).sum(1), (a * b).sum(1), (b * b).sum(1), a.sum(1), b.sum(1)
    determinant = aa * bb - ab * ab
    regular = determinant > 1e-12 * aa * bb
    safe = np.where(regular, determinant, 1.0)
    free = np.stack([(bb * a1 - ab * b1) / safe, (aa * b1 - ab * a1) / safe], axis=1)
    only_alpha, only_beta = a1 / np.where(aa > 0, aa, 1.0), b1 / np.where(bb > 0, bb, 1.0)
    # the sum that an edge leaves is sizes - gain
    alpha_is_better = a1 * only_alpha >= b1 * only_beta
    zero = np.zeros_like(only_alpha)
    edge = np.where(alpha_is_better[:, None], np.stack([only_alpha, zero], 1), np.stack([zero, only_beta], 1))
    feasible = regular & (free >= 0).all(axis=1)
    solved: Floats = np.where(feasible[:, None], free, edge)
    return solved


def bend(points: Sequence[Point], x: Floats) -> int | None:
    """The first size of a second line, if two lines are better than one by BEND_GAIN."""
    seconds = np.array([np.median(point.seconds) for point in points])
    one = _left(x, seconds)
    places = range(FEWEST_SIZES, len(points) - FEWEST_SIZES + 1)
    if not places:
        return None
    two, at = min((_left(x[:k], seconds[:k]) + _left(x[k:], seconds[k:]), k) for k in places)
    floor = 1e-8 * len(points)  # timings are not good to better than 1e-4
    gain = (len(points) - 5) * math.log((one + floor) / (two + floor))
    return at if gain > BEND_GAIN else None


def errors(op: str, ranks: int, points: Sequence[Point], lines: Sequence[Line]) -> dict[str, float]:
    """By decade of the size, the median of |predicted - measured| / measured, measured being the median at each size."""
    decades: dict[str, list[float]] = {}
    for point, own in zip(points, lines, strict=True):
        measured = float(np.median(point.seconds))
        decade = str(int(math.log10(max(point.bytes, 1)) + 1e-9))
        decades.setdefault(decade, []).append(abs(own.seconds(op, ranks, point.bytes) - measured) / measured)
    return {decade: float(np.median(found)) for decade, found in decades.items()}


def _left(x: Floats, seconds: Floats) -> float:
    """The sum of squared relative errors of the best line."""
    return float(((1 - (x @ solve(x[None], seconds[None])[0]) / seconds) ** 2).sum())


def _medians(seconds: Floats, rng: np.random.Generator) -> Floats:
    return np.asarray(np.median(rng.choice(seconds, size=(RESAMPLES, len(seconds))), axis=1))
