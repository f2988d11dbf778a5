"""ZB-V (Qi et al. 2023, arXiv 2401.10241, section 6): no bubble in the memory of 1F1B, by two stages a rank laid out as a V.

A microbatch goes from rank 0 to the last and back, so the loss is where the batch is and its backward can start at once. Idle
time of a rank between its own first and last step is 0 if tF=tI=tW, and not otherwise. Every rank holds the activations of p
microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.schedule.pipeline.order import Compute, Order, numbered, turns, vee


def zb_v(pp: int, microbatches: int) -> Order:
    """Stages r and 2 pp - 1 - r on coordinate r. Any number of microbatches works: fewer than the warm-up's 2 pp - 1 are run as
    the first of those."""
    whole = max(microbatches, 2 * pp - 1)
    return Order(vee(pp), tuple(numbered(_rank(r, pp, whole)) for r in range(pp))).first(microbatches)


def _rank(r: int, pp: int, microbatches: int) -> Iterator[tuple[Compute, int]]:
    down, up = r, 2 * pp - 1 - r
    to_turn = pp - r
    # Warm-up: the activations of 2 pp stages in all, however they are shared between the two.
    yield from turns(2 * to_turn - 1, ("F", down))
    yield from turns(r, ("F", up), ("F", down))
    yield from turns(to_turn, ("F", up), ("I", up), ("W", up))
    # Steady state: one microbatch down and one up. The last turns have no forward down any more.
    forwards = 2 * pp - 1 - r  # down, so far; `up` has done pp
    for turn in range(microbatches - pp):
        if forwards + turn < microbatches:
            yield "F", down
        yield from turns(1, ("I", down), ("W", down), ("F", up), ("I", up), ("W", up))
    # Cool-down: gradients that others wait for come first.
    yield from turns(r, ("I", down), ("I", up))
    yield from turns(to_turn, ("I", down), ("W", down))
    yield from turns(r, ("W", up))
    yield from turns(r, ("W", down))
