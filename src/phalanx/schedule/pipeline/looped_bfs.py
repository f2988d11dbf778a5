"""Breadth-first looping (Lamy-Poirier 2022, arXiv 2211.05953): GPipe with several stages a rank.

A rank runs every microbatch through one of its stages before it goes on to the next, so that a stage's parameters are gathered
once for all of them. Bubble (p-1)/(v m+p-1) with v stages a rank; every rank holds the activations of all m microbatches.
"""

from __future__ import annotations

from phalanx.schedule.pipeline.order import Order, Step, loop


def looped_bfs(pp: int, microbatches: int, chunks: int) -> Order:
    """Stage s on coordinate s mod pp. Any number of microbatches works; fewer than pp leave gaps between the loops."""
    return Order(loop(pp, chunks), tuple(_rank(r, pp, microbatches, chunks) for r in range(pp)))


def _rank(r: int, pp: int, microbatches: int, chunks: int) -> tuple[Step, ...]:
    stages = range(r, pp * chunks, pp)
    forward = [Step("F", stage, j) for stage in stages for j in range(microbatches)]
    backward = [Step("B", stage, j) for stage in reversed(stages) for j in range(microbatches)]
    return (*forward, *backward)
