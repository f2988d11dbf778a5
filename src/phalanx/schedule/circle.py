"""Whether a compute order can run at all, before there is a message: every step needs what its rank did before and what others make.

`check` proves the list that an order is lowered to; but an order whose steps wait for each other cannot be lowered, and here is who
waits for whom in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.schedule.check import ScheduleError
from phalanx.schedule.pipeline import Order, Step


def check_runs(order: Order) -> None:
    """Raise ScheduleError if steps wait for each other in a circle, or for a step that is in no list.

    The circle has the fewest steps that there are: each waits for the next, because its rank does that one first or because it
    needs what that one makes.
    """
    waits_for, names = _waits(order)
    stuck = _stuck(waits_for)
    best: list[Step] = []
    for step in waits_for:
        if step in stuck:
            best = _circle(step, waits_for, stuck, len(best) - 1 if best else len(stuck)) or best
    if best:
        words = [names[step] for step in best]
        raise ScheduleError(f"deadlock: {' waits for '.join([*words, words[0]])}", words)


def _waits(order: Order) -> tuple[dict[Step, list[Step]], dict[Step, str]]:
    """What each step waits for, and its name with its rank; stages of a second copy have the names of the first."""
    length = len(order.host) // order.copies
    names = {
        step: f"pp {at} {step._replace(stage=step.stage % length)}" for at, steps in enumerate(order.ranks) for step in steps
    }
    waits_for: dict[Step, list[Step]] = {}
    for at, steps in enumerate(order.ranks):
        for before, step in zip([None, *steps], steps, strict=False):
            if not 0 <= step.stage < len(order.host) or order.host[step.stage] != at:
                raise ScheduleError(
                    f"pp {at} lists {step}, but has the stages {[s for s, h in enumerate(order.host) if h == at]}"
                )
            if step in waits_for:
                raise ScheduleError(f"{names[step]} is listed more than once")
            waits_for[step] = ([] if before is None else [before]) + _inputs(step, length, names)
    return waits_for, names


def _inputs(step: Step, length: int, names: Mapping[Step, str]) -> list[Step]:
    kind, stage, microbatch = step
    if kind == "W":
        wanted = [[Step("I", stage, microbatch)]]
    elif kind == "F":
        wanted = [[Step("F", stage - 1, microbatch)]] if stage % length else []
    else:
        above = [[Step("B", stage + 1, microbatch), Step("I", stage + 1, microbatch)]] if (stage + 1) % length else []
        wanted = [[Step("F", stage, microbatch)], *above]
    found = []
    for choices in wanted:
        there = [choice for choice in choices if choice in names]
        if not there:
            raise ScheduleError(f"{names[step]} waits for {' or '.join(map(str, choices))}, which no rank lists")
        found.append(there[0])
    return found


def _stuck(waits_for: Mapping[Step, Sequence[Step]]) -> set[Step]:
    """Steps that wait, directly or through others, for a circle."""
    waiters: dict[Step, list[Step]] = {}
    for step, others in waits_for.items():
        for other in others:
            waiters.setdefault(other, []).append(step)
    left = {step: len(others) for step, others in waits_for.items()}
    free = [step for step, count in left.items() if not count]
    while free:
        step = free.pop()
        del left[step]
        for waiter in waiters.get(step, ()):
            left[waiter] -= 1
            if not left[waiter]:
                free.append(waiter)
    return set(left)


def _circle(start: Step, waits_for: Mapping[Step, Sequence[Step]], stuck: set[Step], limit: int) -> list[Step]:
    """The shortest way from a step back to itself over at most `limit` steps, or []."""
    came: dict[Step, Step] = {}
    frontier = [start]
    for _ in range(limit):
        reached = []
        for step in frontier:
            for other in waits_for[step]:
                if other == start:
                    path = [step]
                    while path[-1] != start:
                        path.append(came[path[-1]])
                    return path[::-1]
                if other in stuck and other not in came:
                    came[other] = step
                    reached.append(other)
        frontier = reached
    return []
