"""What a pipeline schedule is before communication: for each pp coordinate, the order in which it computes. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Compute = Literal["F", "B", "I", "W"]

COSTS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Relative times of one stage, by which messages are ordered: the two halves of the backward cost as much as the forward."""


class Step(NamedTuple):
    kind: Compute
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Order:
    """What each pp coordinate computes, and where the stages are."""

    host: tuple[int, ...]
    """pp coordinate of each stage."""
    ranks: tuple[tuple[Step, ...], ...]
    """Steps of each coordinate, in order."""
    copies: int = 1
    """Of the model, each a chain of len(host) / copies consecutive stages. A microbatch goes through one of them."""

    def first(self, microbatches: int) -> Order:
        """Without the steps of further microbatches. It can run if this order can: nobody waits for what is gone."""
        kept = tuple(tuple(step for step in steps if step.microbatch < microbatches) for steps in self.ranks)
        return Order(self.host, kept, self.copies)


def loop(pp: int, chunks: int) -> tuple[int, ...]:
    """Host of each stage when the stages go around the ranks `chunks` times."""
    return tuple(range(pp)) * chunks


def vee(pp: int) -> tuple[int, ...]:
    """Host of each of 2 pp stages that go from rank 0 to the last and back, so that the turn stays on one rank."""
    return (*range(pp), *reversed(range(pp)))


def turns(count: int, *computes: tuple[Compute, int]) -> Iterator[tuple[Compute, int]]:
    """The same (kind, stage) again and again, `count` times."""
    for _ in range(count):
        yield from computes


def numbered(computes: Iterable[tuple[Compute, int]]) -> tuple[Step, ...]:
    """The Steps of (kind, stage) in order: each is of the first microbatch that its stage has not done, as in every schedule
    that takes microbatches in turn. A B is an I and its W."""
    forward, backward = defaultdict[int, int](int), defaultdict[int, int](int)
    split = defaultdict[int, deque[int]](deque)
    steps = []
    for kind, stage in computes:
        if kind == "W":
            microbatch = split[stage].popleft()
        else:
            done = forward if kind == "F" else backward
            microbatch = done[stage]
            done[stage] += 1
        if kind == "I":
            split[stage].append(microbatch)
        steps.append(Step(kind, stage, microbatch))
    return tuple(steps)


def times(
    ranks: Sequence[Sequence[Step]],
    costs: Mapping[str, float] = COSTS,
    share: Mapping[int, float] | None = None,
    copies: int = 1,
) -> dict[Step, tuple[float, float]]:
    """Start and end of every step when each rank runs its list in order and messages take no time.

    Works over stages and over segments alike: both are `copies` chains of equal length, one after the other. `share` scales the
    costs of a stage, 1 by default. Raises ValueError if the lists wait for each other.
    """
    length = (max((step.stage for steps in ranks for step in steps), default=0) + 1) // copies
    span: dict[Step, tuple[float, float]] = {}
    free = [0.0] * len(ranks)
    position = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(ranks):
            while position[rank] < len(steps):
                step = steps[position[rank]]
                ready = _ready(step, length, span)
                if ready is None:
                    break
                start = max(ready, free[rank])
                free[rank] = start + costs[step.kind] * (share or {}).get(step.stage, 1.0)
                span[step] = (start, free[rank])
                position[rank] += 1
                moved = True
    stuck = [str(steps[at]) for steps, at in zip(ranks, position, strict=True) if at < len(steps)]
    if stuck:
        raise ValueError(f"the compute order cannot run: {', '.join(stuck)} wait for steps that come later")
    return span


def _ready(step: Step, length: int, span: Mapping[Step, tuple[float, float]]) -> float | None:
    """When the inputs of a step exist, or None while they do not. The first stage of a chain of `length` reads the batch, the
    last has the loss."""
    kind, stage, microbatch = step
    if kind == "F":
        return span.get(Step("F", stage - 1, microbatch), (0.0, None))[1] if stage % length else 0.0
    if kind == "W":
        return span.get(Step("I", stage, microbatch), (0.0, None))[1]
    forward = span.get(Step("F", stage, microbatch))
    if stage % length == length - 1:
        return forward[1] if forward else None
    above = span.get(Step("B", stage + 1, microbatch)) or span.get(Step("I", stage + 1, microbatch))
    return max(forward[1], above[1]) if forward and above else None
