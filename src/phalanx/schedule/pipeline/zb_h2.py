"""ZB-H2 (Qi et al. 2023, arXiv 2401.10241, section 2): as ZB-H1, with twice the warm-up, so that no rank waits once it began.

Idle time of a rank from its own first step to its own last: (p-1)(tF+tI-2tW), none at equal costs. The step as a whole is then
as long as ZB-H1's: it pays only if the optimizer does not wait for all ranks, or if tI > tW. Every rank holds the activations
of 2p-1 microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.schedule.pipeline.order import Compute, Order, numbered, turns


def zb_h2(pp: int, microbatches: int) -> Order:
    """Stage r on coordinate r. Any number of microbatches works; fewer than 2 pp - 1 leave the warm-up incomplete."""
    return Order(tuple(range(pp)), tuple(numbered(_rank(r, pp, microbatches)) for r in range(pp)))


def _rank(r: int, pp: int, microbatches: int) -> Iterator[tuple[Compute, int]]:
    warm_up = min(microbatches, 2 * (pp - r) - 1)
    yield from turns(warm_up, ("F", r))
    for j in range(microbatches):
        yield "I", r
        if j >= 2 * r:
            yield "W", r
        if warm_up + j < microbatches:
            yield "F", r
    yield from turns(min(2 * r, microbatches), ("W", r))
