"""What a pipeline schedule is before communication: for each pp coordinate, the order in which it computes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

COSTS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Relative times of one stage, by which messages are ordered: the two halves of the backward cost as much as the forward."""


class Step(NamedTuple):
    kind: Literal["F", "B", "I", "W"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Order:
    """host: pp coordinate of each stage. ranks: what each coordinate computes, in order."""

    host: tuple[int, ...]
    ranks: tuple[tuple[Step, ...], ...]


def times(
    ranks: Sequence[Sequence[Step]], costs: Mapping[str, float] = COSTS, share: Mapping[int, float] | None = None
) -> dict[Step, tuple[float, float]]:
    """Start and end of every step when each rank runs its list in order and messages take no time.

    Works over stages and over segments alike: both are a chain. `share` scales the costs of a stage, 1 by default. Raises
    ValueError if the lists wait for each other.
    """
    last = max((step.stage for steps in ranks for step in steps), default=0)
    span: dict[Step, tuple[float, float]] = {}
    free = [0.0] * len(ranks)
    position = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(ranks):
            while position[rank] < len(steps):
                step = steps[position[rank]]
                ready = _ready(step, last, span)
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


def _ready(step: Step, last: int, span: Mapping[Step, tuple[float, float]]) -> float | None:
    """When the inputs of a step exist, or None while they do not."""
    kind, stage, microbatch = step
    if kind == "F":
        return span.get(Step("F", stage - 1, microbatch), (0.0, None))[1] if stage else 0.0
    if kind == "W":
        return span.get(Step("I", stage, microbatch), (0.0, None))[1]
    forward = span.get(Step("F", stage, microbatch))
    if stage == last:
        return forward[1] if forward else None
    above = span.get(Step("B", stage + 1, microbatch)) or span.get(Step("I", stage + 1, microbatch))
    return max(forward[1], above[1]) if forward and above else None
