"""ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 2): 1F1B whose weight gradients wait, to fill the bubble at the end.

Idle time (p-1)(tF+tI-tW) while neither tF nor tI is more, a third of 1F1B's at equal costs. Every rank holds the activations of
p microbatches, as 1F1B's first.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.schedule.pipeline.order import Compute, Order, numbered, turns


def zb_h1(pp: int, microbatches: int) -> Order:
    """Stage r on coordinate r. Any number of microbatches works; fewer than pp leave no steady state on the first ranks."""
    return Order(tuple(range(pp)), tuple(numbered(_rank(r, pp, microbatches)) for r in range(pp)))


def _rank(r: int, pp: int, microbatches: int) -> Iterator[tuple[Compute, int]]:
    warm_up = min(microbatches, pp - 1 - r)
    yield from turns(warm_up, ("F", r))
    for j in range(microbatches):
        if warm_up + j < microbatches:
            yield "F", r
        yield "I", r
        # Rank r frees r microbatches later what 1F1B would free at once: with its shorter warm-up that makes p everywhere.
        if j >= r:
            yield "W", r
    yield from turns(min(r, microbatches), ("W", r))
