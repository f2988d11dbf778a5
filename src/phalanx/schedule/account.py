"""Where the time of a step went: span, bubble and a reason for every idle moment, of a simulation or a run by the same
Events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from phalanx.event import Event
from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.check import Report, report
from phalanx.schedule.view import View
from phalanx.schedule.waits import SENDS, At

REASONS: Mapping[str, str] = {
    "warm-up": "before the first backward, because the stages before or after have not come so far",
    "drain": "after the last forward, because other stages still compute",
    "waiting": "what is needed has been computed and is on its way, or queues behind something else",
    "imbalance": "between first backward and last forward, because a neighbour takes longer",
    "barrier": "after the last backward of all, for REDUCE, NORM and the optimizer of others",
}
BACKWARD = ("B", "I", "W")
RECEIVES = ("RECV_F", "RECV_B")
Message = tuple[str, int | None, int | None]
"""Direction, segment and microbatch."""


@dataclass(frozen=True)
class Account:
    """All fractions are of compute lanes; `idle` gives the share of each reason in all idle time and sums to 1 if there is any.

    span_seconds   from the first start to the last end on any rank; without a barrier to the last OPT, since nobody waits for NORM. A
                   rank is then idle until its own OPT at most: after that it takes its next step
    bubble_global  idle fraction of that span, over all ranks
    bubble_own     by rank: idle fraction between its own first forward and its own last backward
    """

    span_seconds: float
    bubble_global: float
    bubble_own: tuple[float, ...]
    idle: Mapping[str, float]
    peaks: Report

    def __str__(self) -> str:
        reasons = "  ".join(f"{reason} {share:.0%}" for reason, share in self.idle.items() if share)
        return f"step {self.span_seconds:.6g} s  bubble {self.bubble_global:.1%}  of it {reasons or 'nothing'}"


def account(schedule: Schedule, view: View, events: Sequence[Event]) -> Account:
    """Explain the Events of one step; names and lanes are those of the schedule's actions, times of all ranks on one clock.

    The first rank of each pp coordinate speaks for it; Events of others are left out. Raises ValueError if an action has no
    Event.
    """
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        by_rank.setdefault(event.rank, []).append(event)
    timed = [_timed(view, by_rank, at, actions) for at, actions in enumerate(schedule.ranks)]
    sent = _sends(schedule)
    begin = min(event.start for spans in timed for event in spans)
    ends = [_end(schedule, timed, at) for at in range(len(timed))]
    end = max(ends)
    over = max(
        event.end
        for actions, spans in zip(schedule.ranks, timed, strict=True)
        for action, event in zip(actions, spans, strict=True)
        if action.kind in BACKWARD
    )
    idle = dict.fromkeys(REASONS, 0.0)
    own = []
    for at, actions in enumerate(schedule.ranks):
        for reason, start, stop in _idle(schedule, timed, sent, at, begin, ends[at], over):
            idle[reason] += stop - start
        busy = [e for a, e in zip(actions, timed[at], strict=True) if a.kind in ("F", *BACKWARD)]
        length = busy[-1].end - busy[0].start
        own.append(1 - sum(e.end - e.start for e in busy) / length if length else 0.0)
    total, lanes = sum(idle.values()), sum(each - begin for each in ends)
    return Account(
        span_seconds=end - begin,
        bubble_global=total / lanes if lanes else 0.0,
        bubble_own=tuple(own),
        idle={reason: seconds / total if total else 0.0 for reason, seconds in idle.items()},
        peaks=report(schedule, view),
    )


def _end(schedule: Schedule, timed: Sequence[Sequence[Event]], at: int) -> float:
    """When the step is over for a coordinate."""
    if not schedule.late:
        return max(event.end for spans in timed for event in spans)
    return max(event.end for action, event in zip(schedule.ranks[at], timed[at], strict=True) if not action.communicates)


def _timed(view: View, by_rank: Mapping[int, Sequence[Event]], at: int, actions: Sequence[Action]) -> list[Event]:
    """The Event of each action, by lane and name; what is done several times (GATHER, FREE) by the order of its starts."""
    rank = view.mesh.rank({"pp": at})
    mine: dict[tuple[str, str], list[Event]] = {}
    for event in sorted(by_rank.get(rank, ()), key=lambda event: event.start, reverse=True):
        mine.setdefault((event.lane, event.name), []).append(event)
    found, missing = [], []
    for action in actions:
        its = mine.get((action.lane, str(action)))
        if its:
            found.append(its.pop())
        else:
            missing.append(str(action))
    if missing:
        raise ValueError(f"{len(missing)} actions of pp {at} have no event on rank {rank}, the first {missing[0]}")
    return found


def _idle(
    schedule: Schedule,
    timed: Sequence[Sequence[Event]],
    sent: Mapping[Message, At],
    at: int,
    begin: float,
    end: float,
    over: float,
) -> list[tuple[str, float, float]]:
    """(reason, start, end) of every moment in which the compute lane of a coordinate does nothing."""
    actions = schedule.ranks[at]
    compute = [i for i, action in enumerate(actions) if action.lane == "compute" and action.kind != "FREE"]
    first_backward = min(timed[at][i].start for i in compute if actions[i].kind in BACKWARD)
    last_forward = max(timed[at][i].end for i in compute if actions[i].kind == "F")
    cuts = [first_backward, last_forward, over]
    found = []
    free = begin
    for index in [*compute, None]:
        until = end if index is None else timed[at][index].start
        arrivals = [] if index is None else _on_the_way(schedule, timed, sent, at, index)
        edges = sorted({free, until, *(x for x in (*cuts, *(t for span in arrivals for t in span)) if free < x < until)})
        for start, stop in pairwise(edges):
            if start >= over:
                reason = "barrier"
            elif any(made <= start and stop <= arrived for made, arrived in arrivals):
                reason = "waiting"
            elif stop <= first_backward:
                reason = "warm-up"
            else:
                reason = "drain" if start >= last_forward else "imbalance"
            found.append((reason, start, stop))
        free = max(free, until if index is None else timed[at][index].end)
    return found


def _on_the_way(
    schedule: Schedule, timed: Sequence[Sequence[Event]], sent: Mapping[Message, At], at: int, index: int
) -> list[tuple[float, float]]:
    """For each communication that an action needs: from when its value exists to when it has arrived."""
    spans: list[tuple[float, float]] = []
    if schedule.ranks[at][index].kind == "OPT":
        return spans  # what it waits for is the barrier, and before that the stages that still compute
    for need in schedule.ranks[at][index].needs:
        action = schedule.ranks[at][need]
        if action.kind in RECEIVES:
            source, send = sent[action.kind[-1], action.segment, action.microbatch]
            made = max((timed[source][i].end for i in schedule.ranks[source][send].needs), default=float("-inf"))
            spans.append((made, timed[at][need].end))
        elif action.communicates:
            spans.append((float("-inf"), timed[at][need].end))
    return spans


def _sends(schedule: Schedule) -> dict[Message, At]:
    return {
        (action.kind[-1], action.segment, action.microbatch): (at, index)
        for at, actions in enumerate(schedule.ranks)
        for index, action in enumerate(actions)
        if action.kind in SENDS
    }
