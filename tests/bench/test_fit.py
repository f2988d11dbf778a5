"""Fits of planted latencies and bandwidths: exact without noise, within the stated interval with it, and no bend where there is none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from phalanx.bench.fit import bend, design, fit, solve
from phalanx.hardware import ALGORITHMS, BACKENDS, Point

ALPHA, BETA = 2e-5, 1e-9
SIZES = [256 * 4**i for i in range(8)]
FINE = [64 * 2**i for i in range(20)]


def planted(
    op: str, algorithm: str, ranks: int, sizes: Sequence[int], *, noise: float = 0.0, seed: int = 0, alpha: float = ALPHA
) -> list[Point]:
    """Seven timings of each size, with lognormal noise of that relative size, whose median is the planted time."""
    rng = np.random.default_rng(seed)
    k, f = ALGORITHMS[op, algorithm]
    return [
        Point(size, tuple((k(ranks) * alpha + f(ranks) * BETA * size) * np.exp(noise * rng.standard_normal(7))))
        for size in sizes
    ]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("backend", "op"), [(backend, op) for backend in ("gloo", "nccl") for op in BACKENDS["gloo"]])
def test_without_noise_the_link_is_found_exactly(backend: str, op: str, ranks: int) -> None:
    """alpha and beta are the link's, whatever the operation and the number of ranks. The linear algebra is in float64."""
    algorithm = BACKENDS.get(backend, BACKENDS[""])[op][1]
    found = fit(op, "tp", backend, ranks, planted(op, algorithm, ranks, SIZES))
    assert found.above is None
    assert found.below.latency_seconds == pytest.approx(ALPHA, rel=1e-9)
    assert found.below.seconds_per_byte == pytest.approx(BETA, rel=1e-9)
    assert found.below.half_bytes == pytest.approx(ALPHA / BETA, rel=1e-8)
    assert set(found.error_by_decade) == {"2", "3", "4", "5", "6"}
    assert max(found.error_by_decade.values()) < 1e-9


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_with_noise_the_link_lies_in_the_interval(noise: float) -> None:
    """Of 60 draws a 95% interval misses 3 on average; it errs on the wide side, and 8 misses would be a chance of 1 in 100."""
    missed = {"latency": 0, "bytes": 0}
    widths = []
    for seed in range(60):
        line = fit("all_reduce", "dp", "gloo", 4, planted("all_reduce", "ring", 4, FINE, noise=noise, seed=seed)).below
        missed["latency"] += not line.latency_interval[0] <= ALPHA <= line.latency_interval[1]
        missed["bytes"] += not line.seconds_per_byte_interval[0] <= BETA <= line.seconds_per_byte_interval[1]
        widths.append(line.latency_interval[1] / line.latency_interval[0])
    assert max(missed.values()) <= 7
    # An interval that holds everything would never miss: it must be as narrow as the noise of 20 sizes allows, twice over.
    assert np.median(widths) < np.exp(4 * noise)


def test_every_size_counts_the_same() -> None:
    """One large size that is 30% off moves alpha by a few percent. Unweighted, its error in seconds goes into alpha."""
    points = planted("all_reduce", "ring", 2, SIZES)
    points[-2] = Point(points[-2].bytes, tuple(1.3 * seconds for seconds in points[-2].seconds))
    found = fit("all_reduce", "dp", "gloo", 2, points).below
    assert found.latency_seconds == pytest.approx(ALPHA, rel=0.05)
    times = np.array([np.median(point.seconds) for point in points])
    unweighted = np.linalg.lstsq(design("all_reduce", "ring", 2, points), times, rcond=None)[0]
    assert unweighted[0] > 1.5 * ALPHA


def test_the_minimum_is_a_minimum() -> None:
    """Karush, Kuhn and Tucker: the gradient vanishes where the variable is positive, and points inwards where it is 0.

    Times that grow as other powers than 0 to 1 of the size drive one of the two to the edge.
    """
    rng = np.random.default_rng(0)
    edges = [0, 0, 0]
    for power in np.linspace(-0.5, 2.0, 51):
        size = np.sort(rng.random(6)) + 0.1
        x, seconds = np.stack([np.ones(6), size], axis=1), size**power * np.exp(0.05 * rng.standard_normal(6))
        best = solve(x[None], seconds[None])[0]
        rows = x / seconds[:, None]
        gradient = 2 * rows.T @ (rows @ best - 1)
        assert (best >= 0).all()
        for value, slope in zip(best, gradient, strict=True):
            assert abs(slope) < 1e-9 if value > 0 else slope > -1e-9
        edges[0 if best.all() else 1 + int(best[1] == 0)] += 1
    assert min(edges) > 5  # inside, no latency, no bytes: each was there


def test_latency_is_never_negative() -> None:
    """Timings that grow faster than the size pull a free line's intercept below zero."""
    points = [Point(size, (1e-12 * size**1.2,)) for size in SIZES[-5:]]
    free = np.linalg.lstsq(design("send", "direct", 2, points), [p.seconds[0] for p in points], rcond=None)[0]
    assert free[0] < 0
    found = fit("send", "dp", "gloo", 2, points).below
    assert found.latency_seconds == 0.0
    assert found.seconds_per_byte > 0


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("sizes", [SIZES, FINE])
def test_a_bend_is_found_where_it_is(sizes: list[int], noise: float) -> None:
    """One-shot up to 16 KiB, two-shot with ten times the latency above."""
    knee = 16 << 10
    below = planted("all_reduce", "one_shot", 4, [size for size in sizes if size <= knee], noise=noise)
    above = planted("all_reduce", "two_shot", 4, [size for size in sizes if size > knee], noise=noise, seed=1, alpha=10 * ALPHA)
    found = fit("all_reduce", "tp", "shm", 4, below + above)
    assert found.above is not None and found.knee_bytes is not None
    assert knee < found.knee_bytes < above[0].bytes
    assert (found.below.algorithm, found.above.algorithm) == ("one_shot", "two_shot")
    close = 1e-6 if noise == 0 else 4 * noise
    assert found.below.latency_seconds == pytest.approx(ALPHA, rel=close)
    assert found.above.latency_seconds == pytest.approx(10 * ALPHA, rel=close)
    assert found.above.seconds_per_byte == pytest.approx(BETA, rel=close)


@pytest.mark.parametrize("sizes", [SIZES, FINE])
def test_noise_is_not_a_bend(sizes: list[int]) -> None:
    """At most 2 of 100, as BEND_GAIN was chosen for."""
    found = 0
    for seed in range(100):
        points = planted("all_reduce", "ring", 4, sizes, noise=0.1, seed=seed)
        found += bend(points, design("all_reduce", "ring", 4, points)) is not None
    assert found <= 2


@pytest.mark.parametrize(
    ("op", "points", "message"),
    [
        ("allreduce", [Point(1, (1.0,)), Point(2, (1.0,))], "no operation 'allreduce'"),
        ("all_reduce", [Point(1, (1.0,))], r"at sizes \[1\]"),
        ("all_reduce", [Point(1, (1.0,)), Point(1, (1.0,)), Point(2, (1.0,))], r"\[1, 1, 2\]"),
        ("all_reduce", [Point(1, ()), Point(2, (1.0,))], "without timings"),
        ("all_reduce", [Point(1, (0.0,)), Point(2, (1.0,))], "took no time"),
    ],
)
def test_what_cannot_be_fitted_is_refused(op: str, points: list[Point], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(op, "dp", "gloo", 2, points)
