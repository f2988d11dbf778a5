"""Comparing two ways of doing a thing on a noisy machine: alternate them in one run, compare neighbours, bootstrap the pairs."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """How fast `ours` is relative to `theirs`: their seconds over ours, above 1 where ours is faster."""

    median: float
    low: float
    """Lower end of the 95% interval of the median, from the paired bootstrap."""
    high: float
    ours_seconds: float
    theirs_seconds: float
    pairs: int

    def __str__(self) -> str:
        return (
            f"{self.median:.3f} (95% {self.low:.3f} to {self.high:.3f}, {self.pairs} pairs; "
            f"medians {self.ours_seconds * 1e3:.1f} ms against {self.theirs_seconds * 1e3:.1f} ms)"
        )


def alternated(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    pairs: int,
    *,
    warm_up: int = 3,
    before: Callable[[], object] = lambda: None,
) -> list[tuple[float, float]]:
    """(our seconds, their seconds) of neighbouring runs; which goes first alternates too. `before` each one, off the clock."""
    for _ in range(warm_up):
        ours()
        theirs()
    times = []
    for at in range(pairs):
        first, second = (ours, theirs) if at % 2 == 0 else (theirs, ours)
        a, b = _seconds(first, before), _seconds(second, before)
        times.append((a, b) if at % 2 == 0 else (b, a))
    return times


def ratio(times: Sequence[tuple[float, float]], resamples: int = 2000, seed: int = 0) -> Ratio:
    """The median of the pairwise ratios with its bootstrap interval (Efron 1979): pairs are drawn with replacement."""
    ratios = [theirs / ours for ours, theirs in times]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return Ratio(
        statistics.median(ratios),
        medians[int(0.025 * resamples)],
        medians[int(0.975 * resamples) - 1],
        statistics.median(ours for ours, _ in times),
        statistics.median(theirs for _, theirs in times),
        len(times),
    )


def _seconds(way: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    start = time.perf_counter()
    way()
    return time.perf_counter() - start
