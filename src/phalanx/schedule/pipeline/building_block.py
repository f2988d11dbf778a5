"""Schedules from a building block (Qi et al. 2024, arXiv 2405.15362): the steps of one microbatch, repeated every six units.

On a V of two stages a rank, a microbatch makes six steps on each rank, of a unit each. When the block is repeated every six
units the pipeline is full, and a rank holds in activations what the block takes from a forward to its W, over six. So the block
decides the memory. The beginning and the end, where the pipeline is not full, are then tightened within that memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

from phalanx.schedule.pipeline.order import Compute, Order, Step, vee

UNITS = 6


class Block(NamedTuple):
    """How a microbatch travels: down the V it starts on the next rank after `stride` units, up after one, its forward and its
    backward alike. At a turn it goes on at once, except for these units of waiting, which keep any rank from having two steps
    to do in one unit, whatever microbatches they are of."""

    stride: int
    before_forward_up: int
    before_backward_down: int
    before_backward_up: int

    def rank(self, r: int, pp: int) -> list[tuple[int, Compute, int]]:
        """(start, kind, stage) of the six steps of microbatch 0 on rank r, by start."""
        down, up = r, 2 * pp - 1 - r
        way_down, way_up = self.stride * (pp - 1) + 1, pp
        forward_up = way_down + self.before_forward_up
        backward_down = forward_up + way_up + self.before_backward_down
        backward_up = backward_down + way_down + self.before_backward_up
        gradients: list[tuple[int, Compute, int]] = [
            (backward_down + self.stride * r, "I", up),
            (backward_up + pp - 1 - r, "I", down),
        ]
        block: list[tuple[int, Compute, int]] = [
            (self.stride * r, "F", down),
            (forward_up + pp - 1 - r, "F", up),
            *gradients,
        ]
        # Weight gradients take the two units that are left, each the first after its I.
        for start, _, stage in gradients:
            taken = {at % UNITS for at, _, _ in block}
            block.append((next(at for at in range(start + 1, start + UNITS) if at % UNITS not in taken), "W", stage))
        return sorted(block)


def repeated(pp: int, microbatches: int, block: Block) -> Order:
    """Stages r and 2 pp - 1 - r on coordinate r."""
    lists = []
    for r in range(pp):
        starts = [
            (start + UNITS * j, Step(kind, stage, j)) for start, kind, stage in block.rank(r, pp) for j in range(microbatches)
        ]
        lists.append([step for _, step in sorted(starts)])
    return Order(vee(pp), tuple(tuple(steps) for steps in _tightened(lists, 2 * pp)))


def _tightened(lists: Sequence[Sequence[Step]], stages: int) -> list[list[Step]]:
    """The lists with steps moved forward into idle units, where they can run already and no rank then holds more activations
    than the fullest one does as it is."""
    limit = max(max(accumulate(map(_held, steps))) for steps in lists)
    left = [list(steps) for steps in lists]
    made: list[list[Step]] = [[] for _ in lists]
    held = [0] * len(lists)
    done = set[Step]()
    while any(left):
        now = list[Step]()
        for rank, steps in enumerate(left):
            index = _next(steps, limit - held[rank], done, stages)
            if index is not None:
                step = steps.pop(index)
                held[rank] += _held(step)
                made[rank].append(step)
                now.append(step)
        assert now, "the first step of some list can always run"
        done.update(now)
    return made


def _next(steps: Sequence[Step], room: int, done: set[Step], stages: int) -> int | None:
    """Index of the step to run now, if any can. `room` is how many more activations the rank may hold."""
    # An input gradient first, if that delays no forward: the next rank waits for it, and it holds no more than its forward did.
    for index, step in enumerate(takewhile(lambda step: step.kind != "F", steps)):
        if step.kind == "I" and _can_run(step, done, stages):
            return index
    peak = held = 0
    seen = set[tuple[str, int]]()
    for index, step in enumerate(steps):
        of = step[:2]
        # Where the first step of a kind on a stage cannot run, no later one can. A forward that goes before others adds to what
        # is held at each step that it overtakes.
        if of not in seen and (index == 0 or step.kind != "F" or peak < room) and _can_run(step, done, stages):
            return index
        seen.add(of)
        if len(seen) == UNITS:
            return None
        held += _held(step)
        peak = max(peak, held)
    return None


def _held(step: Step) -> int:
    """Change in the activations that a rank holds, in stages."""
    return {"F": 1, "W": -1}.get(step.kind, 0)


def _can_run(step: Step, done: set[Step], stages: int) -> bool:
    kind, stage, j = step
    if kind == "F":
        return stage == 0 or Step("F", stage - 1, j) in done
    if kind == "W":
        return Step("I", stage, j) in done
    return Step("F", stage, j) in done and (stage == stages - 1 or Step("I", stage + 1, j) in done)
