"""Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2): 1F1B with several stages a rank, in turns of p microbatches.

Bubble (p-1)/(v m+p-1) with v stages a rank, for v times the messages. Rank r holds the activations of 2 (p-1-r) + (v-1) p + 1
stages, on rank 0 those of p + (p-1)/v microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.schedule.pipeline.one_f_one_b import one_f_one_b
from phalanx.schedule.pipeline.order import Compute, Order, loop, numbered


def interleaved(pp: int, microbatches: int, chunks: int) -> Order:
    """Stage s on coordinate s mod pp. Any number of microbatches works: if it is no multiple of pp, the order is that of the
    next multiple without the steps that are too many. One chunk is 1F1B, whose warm-up is half as long."""
    if chunks == 1:
        return one_f_one_b(pp, microbatches)
    turns = -(-microbatches // pp)
    ranks = tuple(numbered(_rank(r, pp, turns * pp, chunks)) for r in range(pp))
    return Order(loop(pp, chunks), ranks).first(microbatches)


def _rank(r: int, pp: int, microbatches: int, chunks: int) -> Iterator[tuple[Compute, int]]:
    # The n-th forward of a rank is of chunk (n div pp) mod chunks; its n-th backward of the chunk as far from the end.
    stages = [r + pp * (n // pp % chunks) for n in range(chunks * microbatches)]
    ends = [r + pp * (chunks - 1 - n // pp % chunks) for n in range(chunks * microbatches)]
    warm_up = min(len(stages), 2 * (pp - 1 - r) + (chunks - 1) * pp)
    steady = len(stages) - warm_up
    for n in range(warm_up):
        yield "F", stages[n]
    for n in range(steady):
        yield "F", stages[warm_up + n]
        yield "B", ends[n]
    for n in range(steady, len(stages)):
        yield "B", ends[n]
