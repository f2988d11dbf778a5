"""Moves receives later: a posted receive occupies its channel, and on some transports more than that, until its message comes.

`lower` posts a RECV where its SEND is issued, which is safe and early. Here each RECV goes to just before the first action that
needs it, or as late as `check` still proves under the channel model in use.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.check import check
from phalanx.schedule.values import Values
from phalanx.schedule.view import View
from phalanx.schedule.waits import LOCAL, Waits, meetings, queues

RECEIVES = ("RECV_F", "RECV_B")
Edge = tuple[int, int | None]
"""(coordinate that receives, coordinate that sends)."""
EARLY, QUEUED, LATE = range(3)
"""How late the receives of an edge are: where they were; as late as leaves the order in which their rank's queues are entered as
it was; just before what needs them, in the order in which they come."""


def defer(schedule: Schedule, view: View, channel: str = "edge", rendezvous: bool = True) -> Schedule:
    """A schedule with its receives as late as is proved for a channel model, which the given one must be.

    First all receives are tried just before what needs them. If that can deadlock, receives stay ahead of the communication that
    follows them in their queue, and edges are then freed from that in halves, as far as the proof goes. Raises ScheduleError if
    the schedule itself is not proved.
    """
    check(schedule, view, channel, rendezvous)
    values = Values.of(view, schedule.chains, schedule.microbatches)

    def proved(levels: Mapping[Edge, int]) -> bool:
        # Moving receives changes the order of waits and no more: everything else was proved above, and once more at the end.
        moved = _at_levels(schedule, values, channel, levels)
        met = meetings(moved, values.reductions, channel)
        return not Waits.of(moved, values.reductions, met, channel, rendezvous).stuck()

    def raised(levels: dict[Edge, int], edges: Sequence[Edge], level: int) -> dict[Edge, int]:
        """Levels with as many of some edges at a higher one as are proved, by halves."""
        trial = {**levels, **dict.fromkeys(edges, level)}
        if not edges or proved(trial):
            return trial
        if len(edges) == 1:
            return levels
        half = len(edges) // 2
        return raised(raised(levels, edges[:half], level), edges[half:], level)

    edges = sorted({(at, a.peer) for at, actions in enumerate(schedule.ranks) for a in actions if a.kind in RECEIVES})
    levels = dict.fromkeys(edges, LATE)
    if not proved(levels):
        levels = raised(dict.fromkeys(edges, EARLY), edges, QUEUED)
        levels = raised(levels, [edge for edge in edges if levels[edge] == QUEUED], LATE)
    found = _at_levels(schedule, values, channel, levels)
    check(found, view, channel, rendezvous)
    return found


def _at_levels(schedule: Schedule, values: Values, channel: str, levels: Mapping[Edge, int]) -> Schedule:
    ranks = [_moved(actions, _targets(at, actions, values, channel, levels)) for at, actions in enumerate(schedule.ranks)]
    return replace(schedule, ranks=tuple(ranks))


def _targets(at: int, actions: Sequence[Action], values: Values, channel: str, levels: Mapping[Edge, int]) -> dict[int, int]:
    """By index of a RECV, the index of the action that it now stands before.

    Never behind the next RECV of its edge: the order in which messages meet is the sender's and stays.
    """
    first_need: dict[int, int] = {}
    for index, action in enumerate(actions):
        for need in action.needs:
            first_need.setdefault(need, index)
    targets: dict[int, int] = {}
    behind: dict[Hashable, int] = {}  # by queue, and by edge: where what comes next in it stands
    for index in reversed(range(len(actions))):
        action = actions[index]
        if action.kind in LOCAL:
            continue
        names = queues(action, channel, values.reductions)
        stands = index
        if action.kind in RECEIVES:
            edge = (at, action.peer)
            level, limits = levels[edge], [first_need.get(index, index), behind.get(edge, len(actions))]
            if level == QUEUED:
                limits += [behind.get(name, len(actions)) for name in names]
            stands = index if level == EARLY else max(index, min(limits))
            targets[index] = behind[edge] = stands
        for name in names:
            behind[name] = min(stands, behind.get(name, len(actions)))
    return targets


def _moved(actions: Sequence[Action], targets: Mapping[int, int]) -> tuple[Action, ...]:
    order = sorted(range(len(actions)), key=lambda i: (targets.get(i, i), i not in targets, i))
    position = [0] * len(actions)
    for new, old in enumerate(order):
        position[old] = new
    return tuple(replace(actions[old], needs=tuple(sorted(position[need] for need in actions[old].needs))) for old in order)
