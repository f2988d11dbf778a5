"""Where GATHER and FREE stand in a rank's list when parameters are stored in slices (ZeRO). Pure.

A segment's parameters are whole from a GATHER to the next FREE. What is still whole is not gathered again: of the segments that may
be whole at once, the one whose next use is farthest makes room (Belady 1966), which is optimal since the list is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.view import Gathered, View

USES = ("F", "B", "I", "W")


def place_storage(view: View, actions: Sequence[Action]) -> list[Action]:
    """The list of one coordinate with GATHER and FREE put in; as it is where parameters are not divided.

    A GATHER stands before the use that is `prefetch` segments ahead of the one that needs it, a FREE right after the last use before
    the parameters make room. Levels 1 and 2 keep whole parameters, of which the optimizer updates slices: there each segment is
    gathered once, before its first use, and never freed.
    """
    storage = view.storage
    uses = [(at, a.segment) for at, a in enumerate(actions) if a.kind in USES and _divided(view, a.segment)]
    if storage is None or not uses:
        return list(actions)
    segments = [segment for _, segment in uses if segment is not None]
    room = len(set(segments))
    if storage.level == 3:
        room = storage.keep or (room if view.pp > 1 else storage.prefetch + 1)
    gathers, frees = residency(segments, storage.prefetch, room)
    lane = f"gather:{'+'.join(axis for axis in view.mesh.names if axis in storage.axes and view.mesh.shape[axis] > 1)}"
    before = {uses[at][0]: found for at, found in gathers.items()}
    after = {uses[at][0]: found for at, found in frees.items()} if storage.level == 3 else {}
    placed: list[Action] = []
    for at, action in enumerate(actions):
        placed += [Action("GATHER", segment, lane=lane) for segment in before.get(at, ())]
        placed.append(action)
        placed += [Action("FREE", segment) for segment in after.get(at, ())]
    return placed


def gathers_of(view: View, schedule: Schedule) -> dict[int, list[tuple[Gathered, int]]]:
    """By segment, what its GATHERs make whole and how many times on one rank in a step that follows another.

    What several segments use is gathered by the first of them and stays while one of them holds it.
    """
    counts: dict[int, dict[Gathered, int]] = {}
    for at, actions in enumerate(schedule.ranks):
        holders: dict[Gathered, set[int]] = {}
        for action in actions:
            k = action.segment
            if k is None or action.kind not in ("GATHER", "FREE"):
                continue
            for gathered in view.segments[k].gathers:
                held = holders.setdefault(gathered, set())
                if action.kind == "FREE":
                    held.discard(k)
                    continue
                # Two copies of a model gather alike: one of them is counted.
                if not held and at == schedule.places[k][0]:
                    mine = counts.setdefault(k, {})
                    mine[gathered] = mine.get(gathered, 0) + 1
                held.add(k)
    return {segment: list(mine.items()) for segment, mine in counts.items()}


def residency(uses: Sequence[int], prefetch: int, room: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """(what to gather before each position, what to free after it) for a list of uses, with at most `room` held at once."""
    later: list[int] = [len(uses)] * len(uses)
    seen: dict[int, int] = {}
    for at in reversed(range(len(uses))):
        later[at] = seen.get(uses[at], len(uses))
        seen[uses[at]] = at
    first = dict(seen)  # of what was never used, its first use
    last: dict[int, int] = {}  # held -> position of its latest use, -1 before its first
    upcoming = dict(first)  # held or not -> position of its next use
    gathers: dict[int, list[int]] = {}
    frees: dict[int, list[int]] = {}
    ahead: dict[int, int] = {}  # of the segments in the window that starts here, how many of its uses are theirs
    end = 0  # of the window: the longest run that uses at most prefetch + 1 segments
    for at, use in enumerate(uses):
        while end < len(uses) and (uses[end] in ahead or len(ahead) <= prefetch):
            wanted = uses[end]
            ahead[wanted] = ahead.get(wanted, 0) + 1
            end += 1
            if wanted in last:
                continue
            if len(last) >= room:
                victim = max((held for held in last if held not in ahead), key=lambda held: upcoming[held])
                frees.setdefault(last.pop(victim), []).append(victim)
            gathers.setdefault(at, []).append(wanted)
            last[wanted] = -1
        last[use] = at
        upcoming[use] = later[at]
        ahead[use] -= 1
        if not ahead[use]:
            del ahead[use]
    for held, at in last.items():
        frees.setdefault(at, []).append(held)
    return gathers, frees


def _divided(view: View, segment: int | None) -> bool:
    return segment is not None and view.segments[segment].gather_bytes > 0
