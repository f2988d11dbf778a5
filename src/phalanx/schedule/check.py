"""Proves a schedule before it runs: nothing missing, nothing twice, nothing used before it is made or after it is freed, every
message met in order by its equal, and no cycle of waits.

Ranks at one pp coordinate run one list, so the collectives inside segments, and every group that lies within a coordinate, see
one order by construction; what several coordinates do together is proved here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.values import BUFFERS, Values
from phalanx.schedule.view import View
from phalanx.schedule.waits import At, Waits, meetings


class ScheduleError(ValueError):
    """A schedule that would deadlock, compute something else or leave something behind.

    cycle: for a deadlock, the actions that wait for each other, as "pp 0 SEND_F1.0".
    """

    def __init__(self, message: str, cycle: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.cycle = tuple(cycle)


@dataclass(frozen=True)
class Report:
    """What a proved schedule holds at most at once, by pp coordinate."""

    peak_live: tuple[int, ...]
    """(segment, microbatch) pairs whose saved values wait for their backward."""
    peak_saved_bytes: tuple[int, ...]
    """Of those, by the saved bytes that the View gives for each segment."""
    in_flight: tuple[int, ...]
    """Messages whose RECV is posted and whose value is not yet used."""


def check(schedule: Schedule, view: View, channel: str = "edge", rendezvous: bool = True) -> Report:
    """Prove a schedule for one channel model (a key of waits.CHANNELS), sends unbuffered or buffered.

    Raises ScheduleError with the names of the actions that are wrong.
    """
    values = _placement(schedule, view)
    _check_cuts(view)
    for at, actions in enumerate(schedule.ranks):
        _check_complete(schedule, values, at, actions)
    _check_meetings(schedule, values)
    waits = Waits.of(schedule, values.reductions, channel, rendezvous)
    cycle = waits.cycle()
    if cycle:
        names = [_name(schedule, place) for place in cycle]
        raise ScheduleError(f"deadlock under channel model {channel!r}: {' waits for '.join([*names, names[0]])}", names)
    for at in range(len(schedule.ranks)):
        _check_values(schedule, values, waits, at)
    return report(schedule, view)


def report(schedule: Schedule, view: View) -> Report:
    """Peaks of a list that `check` accepts; exact, because compute on one rank runs in list order."""
    peaks = [_peaks(actions, view) for actions in schedule.ranks]
    live, saved, flight = zip(*peaks, strict=True)
    return Report(tuple(live), tuple(saved), tuple(flight))


def _peaks(actions: Sequence[Action], view: View) -> tuple[int, int, int]:
    live = saved = flight = 0
    peak = (0, 0, 0)
    posted = set[str]()
    for action in actions:
        k = action.segment
        if action.kind == "F" and k is not None:
            live, saved = live + 1, saved + view.segments[k].saved_bytes
        elif action.kind.startswith("RECV"):
            posted.add(f"cut:{k}:{action.kind[-1]}:{action.microbatch}")
            flight += 1
        peak = (max(peak[0], live), max(peak[1], saved), max(peak[2], flight))
        if action.kind in ("B", "W") and k is not None:
            live, saved = live - 1, saved - view.segments[k].saved_bytes
        flight -= sum(name in posted for name in action.releases)
    return peak


def _name(schedule: Schedule, place: At) -> str:
    return f"pp {place[0]} {schedule.ranks[place[0]][place[1]]}"


def _placement(schedule: Schedule, view: View) -> Values:
    placed = sorted(segment for stage in schedule.stages for segment in stage)
    if placed != list(range(len(view.segments))):
        raise ScheduleError(f"the stages hold segments {placed}, but the Program has {len(view.segments)} segments")
    if len(schedule.ranks) != view.pp or any(not 0 <= at < view.pp for at in schedule.host):
        raise ScheduleError(f"{len(schedule.ranks)} lists with stages on {schedule.host}, but the mesh has pp={view.pp}")
    return Values.of(view, schedule.coordinates, schedule.microbatches)


def _check_cuts(view: View) -> None:
    for k in range(view.last):
        for direction, producer in (("F", k), ("B", k + 1)):
            sent, received = (
                [(m.shape, m.dtype) for m in view.cut(f"{end}_{direction}", producer)] for end in ("SEND", "RECV")
            )
            if sent != received:
                raise ScheduleError(f"segments {k} and {k + 1}, direction {direction}: {sent} is sent, {received} is received")


def _check_complete(schedule: Schedule, values: Values, at: int, actions: Sequence[Action]) -> None:
    """Every action that the placement calls for is in the list of its coordinate exactly once, and nothing else is."""
    split = {(a.segment, a.microbatch) for a in actions if a.kind in ("I", "W")}
    wanted = Counter(_wanted(schedule, values, at, split))
    listed = Counter((str(a), a.peer) for a in actions if a.kind not in ("GATHER", "FREE"))
    for (name, peer), number in (wanted - listed).items():
        raise ScheduleError(f"pp {at} lacks {name}{_to(peer)}" + (f" {number} times" if number > 1 else ""))
    for (name, peer), number in (listed - wanted).items():
        why = "more than once" if (name, peer) in wanted else "which is not its to do"
        raise ScheduleError(f"pp {at} lists {name}{_to(peer)} {why} ({number + wanted[name, peer]} times)")
    for action in actions:
        outside = [need for need in action.needs if not 0 <= need < len(actions)]
        if outside:
            raise ScheduleError(f"pp {at} {action} needs action {outside[0]}, but the list has {len(actions)}")


def _to(peer: int | None) -> str:
    return "" if peer is None else f" with pp {peer}"


def _wanted(
    schedule: Schedule, values: Values, at: int, split: set[tuple[int | None, int | None]]
) -> Iterator[tuple[str, int | None]]:
    place, view = values.coordinates, values.view
    yield from ((kind, None) for kind in ("COUNT", "NORM", "OPT"))
    for k in range(len(place)):
        if place[k] == at and k in values.reductions:
            yield f"REDUCE{k}", None
        for j in range(schedule.microbatches):
            if place[k] == at:
                yield from ((f"{kind}{k}.{j}", None) for kind in ("F", *("IW" if (k, j) in split else "B")))
            if k < view.last and place[k] != place[k + 1]:
                ends = {place[k]: ("SEND_F", "RECV_B"), place[k + 1]: ("RECV_F", "SEND_B")}
                if at not in ends:
                    continue
                other = place[k + 1] if at == place[k] else place[k]
                if view.segments[k].outputs:
                    yield f"{ends[at][0]}{k}.{j}", other
                if view.segments[k].output_grads:
                    yield f"{ends[at][1]}{k + 1}.{j}", other


def _check_meetings(schedule: Schedule, values: Values) -> None:
    for where, ends in meetings(schedule, values.reductions):
        (first, expected), *others = ends.items()
        for at, met in others:
            for position, (mine, theirs) in enumerate(zip(expected, met, strict=False)):
                if mine[0] != theirs[0]:
                    raise ScheduleError(
                        f"{where}: number {position} is {mine[0]} on pp {first} ({schedule.ranks[first][mine[1]]}) "
                        f"but {theirs[0]} on pp {at} ({schedule.ranks[at][theirs[1]]})"
                    )
            if len(expected) != len(met):
                raise ScheduleError(f"{where}: pp {first} takes part {len(expected)} times, pp {at} {len(met)} times")


def _check_values(schedule: Schedule, values: Values, waits: Waits, at: int) -> None:
    """Every value is made before it is read, read before it is released, and released once."""
    actions = schedule.ranks[at]
    maker: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for index, action in enumerate(actions):
        if action.kind != "GATHER":
            maker.update((name, index) for name in values.produced(action))
        for name in values.consumed(action, at):
            readers.setdefault(name, []).append(index)
    for name, indices in readers.items():
        for index in indices:
            if name not in maker:
                raise ScheduleError(f"pp {at} {actions[index]} reads {name}, which nothing on its rank makes")
            _check_before(schedule, waits, at, maker[name], index, name)
    buffers = {name for name in maker if name.startswith(BUFFERS)}
    freed: dict[str, int] = {}
    for index, action in enumerate(actions):
        params = [name for name in action.releases if name.startswith("params")]
        if params != ([f"params:{action.segment}"] if action.kind == "FREE" else []):
            raise ScheduleError(
                f"pp {at} {action} at {index} releases {params}: FREE alone frees parameters, its own segment's"
            )
        for name in [name for name in action.releases if name not in params]:
            if name not in buffers or name in freed:
                raise ScheduleError(
                    f"pp {at} {action} releases {name}, which is {'free already' if name in freed else 'not there'}"
                )
            freed[name] = index
    for name in sorted(buffers):
        if name not in freed:
            raise ScheduleError(f"pp {at}: nothing releases {name}, made by {actions[maker[name]]}")
        for index in {maker[name], *readers.get(name, ())} - {freed[name]}:
            # A buffer is free when its releaser is complete, so that is what has to come after its readers.
            _check_before(schedule, waits, at, index, freed[name], name, "done")
    _check_gathered(schedule, waits, at)


def _check_gathered(schedule: Schedule, waits: Waits, at: int) -> None:
    """Where the list gathers a segment's parameters, every use lies between a GATHER and the FREE that follows it."""
    actions = schedule.ranks[at]
    gathered: dict[int | None, int | None] = {a.segment: None for a in actions if a.kind in ("GATHER", "FREE")}
    for index, action in enumerate(actions):
        if action.segment not in gathered or action.kind not in ("F", "B", "I", "W", "GATHER", "FREE"):
            continue
        held = gathered[action.segment]
        if action.kind == "GATHER":
            if held is not None:
                raise ScheduleError(f"pp {at} {action} gathers what {actions[held]} at {held} has gathered already")
            gathered[action.segment] = index
            continue
        if held is None:
            raise ScheduleError(f"pp {at} {action} at {index} finds no gathered parameters")
        _check_before(schedule, waits, at, held, index, f"params:{action.segment}")
        if action.kind == "FREE":
            gathered[action.segment] = None
    for segment, held in gathered.items():
        if held is not None:
            raise ScheduleError(
                f"pp {at}: nothing frees the parameters that {actions[held]} at {held} gathered for segment {segment}"
            )


def _check_before(
    schedule: Schedule, waits: Waits, at: int, first: int, second: int, name: str, event: Literal["start", "done"] = "start"
) -> None:
    actions = schedule.ranks[at]
    if first in actions[second].needs or (first < second and not actions[first].communicates):
        return
    if not waits.done_before((at, first), (at, second), event):
        raise ScheduleError(f"pp {at} {actions[second]} does not wait for {actions[first]}, although both use {name}")
