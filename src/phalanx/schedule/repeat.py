"""Several steps in a row as one list. What a barrier between steps costs, or what its absence saves, shows there alone.

Pure, and for `simulate` and `account`: a repeated list is not one that a rank could be given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.schedule.actions import Action, Schedule

WRITES_GRADIENTS = ("B", "W", "REDUCE", "NORM")
"""Kinds of action that the gradients of the step before do not outlive."""


def repeated(schedule: Schedule, steps: int) -> Schedule:
    """`steps` steps, microbatches numbered through. Raises ValueError if there is none.

    Without a barrier a step's first gradient is written once the NORM of the step before is complete, as `run.late` does.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps cannot be put in a row; it is a number of at least 1")
    ranks = tuple(tuple(_row(schedule, actions, steps)) for actions in schedule.ranks)
    return replace(schedule, ranks=ranks, microbatches=schedule.microbatches * steps)


def _row(schedule: Schedule, actions: Sequence[Action], steps: int) -> Iterator[Action]:
    first = next(index for index, action in enumerate(actions) if action.kind in WRITES_GRADIENTS)
    norm = next(index for index, action in enumerate(actions) if action.kind == "NORM")
    for step in range(steps):
        before, later = step * len(actions), step * schedule.microbatches
        for index, action in enumerate(actions):
            needs = [need + before for need in action.needs]
            if schedule.late and step and index == first:
                needs.append(norm + before - len(actions))
            yield replace(
                action,
                microbatch=None if action.microbatch is None else action.microbatch + later,
                needs=tuple(sorted(needs)),
                releases=tuple(_renumbered(name, later) for name in action.releases),
            )


def _renumbered(buffer: str, later: int) -> str:
    """A buffer's name ends in its microbatch, unless it holds parameters."""
    if buffer.startswith("params"):
        return buffer
    start, _, microbatch = buffer.rpartition(":")
    return f"{start}:{int(microbatch) + later}"
