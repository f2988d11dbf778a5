"""Proves a schedule before it runs, for a model of the channels (`waits`).

Proved here, for each pp coordinate's list:
- it has every action that the placement calls for once and no other, and gathers whatever is stored in slices;
- the two ends of every cut agree on shapes, and of every directed pair of coordinates on which message comes when; sums over the
  hosts of a shared parameter and collectives of the world come in one order on all who take part;
- no cycle of waits, so in every run every action completes and nothing is pending at the end;
- every value is made, completely, before it is read; a buffer is free only when all its readers are complete, and once; gathered
  parameters are used between a GATHER and the FREE that follows it, and gathered again only after that;
- how many activations live at once, at most.

By construction: ranks at one pp coordinate run one list, so the collectives inside segments, and every group that lies within a
coordinate (GATHER, REDUCE over axes, COUNT), see one order. Values have names of their own, so a receive buffer is refilled only
by taking memory that an action has released, and what releases it is proved to come after its readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.schedule.actions import Action, Kind, Schedule
from phalanx.schedule.values import BUFFERS, Values
from phalanx.schedule.view import View
from phalanx.schedule.waits import LOCAL, At, Batches, Meeting, Waits, meetings

Key = tuple[Kind, int | None, int | None, int | None]
"""kind, segment, microbatch and peer of an action."""


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


def check(
    schedule: Schedule, view: View, channel: str = "edge", rendezvous: bool = True, batches: Batches | None = None
) -> Report:
    """Prove a schedule for one channel model (a key of waits.CHANNELS), sends unbuffered or buffered.

    batches  by pp coordinate, indices of neighbouring communications that are issued as one and complete as one

    Raises ScheduleError with the names of the actions that are wrong.
    """
    values = _placement(schedule, view)
    _check_cuts(view)
    for at, actions in enumerate(schedule.ranks):
        _check_complete(values, at, actions)
    met = meetings(schedule, values.reductions, channel)
    for meeting in met:
        _check_meeting(schedule, meeting)
    waits = Waits.of(schedule, values.reductions, met, channel, rendezvous, batches)
    cycle = waits.cycle()
    if cycle:
        names = [_name(schedule, place) for place in cycle]
        raise ScheduleError(f"deadlock under channel model {channel!r}: {' waits for '.join([*names, names[0]])}", names)
    for at, actions in enumerate(schedule.ranks):
        order = _Order(at, actions, waits)
        _check_values(values, order)
        _check_gathered(view, order)
    return report(schedule, view)


def report(schedule: Schedule, view: View) -> Report:
    """Peaks of a list that `check` accepts; exact, because compute on one rank runs in list order."""
    peaks = [_peaks(actions, view) for actions in schedule.ranks]
    live, saved, flight = zip(*peaks, strict=True)
    return Report(tuple(live), tuple(saved), tuple(flight))


def _peaks(actions: Sequence[Action], view: View) -> tuple[int, int, int]:
    live = saved = flight = 0
    peak_live = peak_saved = peak_flight = 0
    posted = set[str]()
    saved_bytes = [segment.saved_bytes for segment in view.segments]
    for action in actions:
        kind, k = action.kind, action.segment
        if kind == "F" and k is not None:
            live, saved = live + 1, saved + saved_bytes[k]
            peak_live, peak_saved = max(peak_live, live), max(peak_saved, saved)
        elif kind in ("B", "W") and k is not None:
            live, saved = live - 1, saved - saved_bytes[k]
        elif kind in ("RECV_F", "RECV_B"):
            posted.add(f"cut:{k}:{kind[-1]}:{action.microbatch}")
            flight += 1
            peak_flight = max(peak_flight, flight)
        flight -= len(posted.intersection(action.releases))
    return peak_live, peak_saved, peak_flight


def _name(schedule: Schedule, place: At) -> str:
    return f"pp {place[0]} {schedule.ranks[place[0]][place[1]]}"


def _placement(schedule: Schedule, view: View) -> Values:
    placed = [segment for stage in schedule.stages for segment in stage]
    if placed != list(range(len(view.segments))) * schedule.copies:
        copies = "" if schedule.copies == 1 else f"{schedule.copies} times "
        raise ScheduleError(f"the stages hold segments {placed}, but the Program has {copies}{len(view.segments)} segments")
    if len(schedule.ranks) != view.pp or any(not 0 <= at < view.pp for at in schedule.host):
        raise ScheduleError(f"{len(schedule.ranks)} lists with stages on {schedule.host}, but the mesh has pp={view.pp}")
    return Values.of(view, schedule.chains, schedule.microbatches)


def _check_cuts(view: View) -> None:
    for k in range(view.last):
        for direction, producer in (("F", k), ("B", k + 1)):
            sent, received = (
                [(m.shape, m.dtype) for m in view.cut(f"{end}_{direction}", producer)] for end in ("SEND", "RECV")
            )
            if sent != received:
                raise ScheduleError(f"segments {k} and {k + 1}, direction {direction}: {sent} is sent, {received} is received")


def _check_complete(values: Values, at: int, actions: Sequence[Action]) -> None:
    """Every action that the placement calls for is in the list of its coordinate exactly once, and nothing else is."""
    wanted = _wanted(values, at, {(a.segment, a.microbatch) for a in actions if a.kind == "I" or a.kind == "W"})
    listed: list[Key] = [(a.kind, a.segment, a.microbatch, a.peer) for a in actions if a.kind != "GATHER" and a.kind != "FREE"]
    if len(wanted) != len(listed) or set(wanted) != set(listed):
        _complain(at, Counter(wanted), Counter(listed))
    for action in actions:
        if action.kind in ("GATHER", "FREE") and at not in values.places[action.segment or 0]:
            raise ScheduleError(f"pp {at} lists {action} which is not its to do")
        for need in action.needs:
            if not 0 <= need < len(actions):
                raise ScheduleError(f"pp {at} {action} needs action {need}, but the list has {len(actions)}")


def _complain(at: int, wanted: Counter[Key], listed: Counter[Key]) -> None:
    for key, number in (wanted - listed).items():
        raise ScheduleError(f"pp {at} lacks {_called(key)}" + (f" {number} times" if number > 1 else ""))
    for key, number in (listed - wanted).items():
        why = "more than once" if key in wanted else "which is not its to do"
        raise ScheduleError(f"pp {at} lists {_called(key)} {why} ({number + wanted[key]} times)")


def _called(key: Key) -> str:
    kind, segment, microbatch, peer = key
    return str(Action(kind, segment, microbatch)) + ("" if peer is None else f" with pp {peer}")


def _wanted(values: Values, at: int, split: set[tuple[int | None, int | None]]) -> list[Key]:
    view = values.view
    wanted: list[Key] = [("COUNT", None, None, None), ("NORM", None, None, None), ("OPT", None, None, None)]
    wanted += [("REDUCE", k, j, None) for k in values.reductions if at in values.places[k] for j in values.reduced_at(k, at)]
    for copy, place in enumerate(values.chains):
        mine = [j for j in range(values.microbatches) if j * len(values.chains) // values.microbatches == copy]
        for k in [k for k, host in enumerate(place) if host == at]:
            for j in mine:
                wanted.append(("F", k, j, None))
                if (k, j) in split:
                    wanted += [("I", k, j, None), ("W", k, j, None)]
                else:
                    wanted.append(("B", k, j, None))
            before, after = place[k - 1] if k else at, place[k + 1] if k < view.last else at
            if before != at and view.segments[k].inputs:
                wanted += [("RECV_F", k - 1, j, before) for j in mine]
            if before != at and view.segments[k].input_grads:
                wanted += [("SEND_B", k, j, before) for j in mine]
            if after != at and view.segments[k].outputs:
                wanted += [("SEND_F", k, j, after) for j in mine]
            if after != at and view.segments[k].output_grads:
                wanted += [("RECV_B", k + 1, j, after) for j in mine]
    return wanted


def _check_meeting(schedule: Schedule, meeting: Meeting) -> None:
    (first, (expected, indices)), *others = meeting.ends.items()
    for at, (met, its) in others:
        if met == expected:
            continue
        for position, (mine, theirs) in enumerate(zip(expected, met, strict=False)):
            if mine != theirs:
                raise ScheduleError(
                    f"{meeting.where}: number {position} is {_said(mine)} on pp {first} "
                    f"({schedule.ranks[first][indices[position]]}) but {_said(theirs)} on pp {at} "
                    f"({schedule.ranks[at][its[position]]})"
                )
        raise ScheduleError(f"{meeting.where}: pp {first} takes part {len(expected)} times, pp {at} {len(met)} times")


def _said(what: object) -> str:
    """A message as F1.0, a sum by its parameters."""
    match what:
        case (str(direction), int(segment), int(microbatch)):
            return f"{direction}{segment}.{microbatch}"
        case (*names,):
            return f"sum of {', '.join(map(str, names))}"
    return str(what)


class _Order:
    """What comes before what in the list of one coordinate. Most is seen from the list itself, the rest from the graph."""

    def __init__(self, at: int, actions: Sequence[Action], waits: Waits) -> None:
        self.at, self.actions, self.waits = at, actions, waits
        self.local = [action.kind in LOCAL for action in actions]
        self.settled: dict[int, int] = {}
        """By communication: the first action that needs it. Whatever starts later starts after it is complete."""
        for index, action in enumerate(actions):
            for need in action.needs:
                if need not in self.settled:
                    self.settled[need] = index

    def known(self, first: int, second: int) -> bool:
        """True if the list shows that `first` is complete before `second` starts."""
        return first < second if self.local[first] else self.settled.get(first, len(self.actions)) <= second

    def require(self, first: int, second: int, name: str, event: Literal["start", "done"] = "start") -> None:
        if not self.known(first, second) and not self.waits.done_before((self.at, first), (self.at, second), event):
            one, other = self.actions[first], self.actions[second]
            raise ScheduleError(f"pp {self.at} {other} does not wait for {one}, although both use {name}")


def _check_values(values: Values, order: _Order) -> None:
    """Every value is made before it is read, read before it is released, and released once."""
    at, actions = order.at, order.actions
    maker = {name: i for i, action in enumerate(actions) if action.kind != "GATHER" for name in values.produced(action)}
    freed = _freed(order, maker)
    for index, action in enumerate(actions):
        for name in values.consumed(action, at):
            made = maker.get(name)
            if made is None:
                raise ScheduleError(f"pp {at} {action} reads {name}, which nothing on its rank makes")
            order.require(made, index, name)
            releaser = freed.get(name, index)
            if releaser != index:
                # A buffer is free when its releaser is complete, so that is what has to come after its readers.
                order.require(index, releaser, name, "done")
    for name, made in maker.items():
        if name in freed:
            if made != freed[name]:
                order.require(made, freed[name], name, "done")
        elif name.startswith(BUFFERS):
            raise ScheduleError(f"pp {at}: nothing releases {name}, made by {actions[made]}")


def _freed(order: _Order, maker: Mapping[str, int]) -> dict[str, int]:
    """By buffer, the action that releases it; parameters are left to `_check_gathered`."""
    freed: dict[str, int] = {}
    for index, action in enumerate(order.actions):
        if not action.releases and action.kind != "FREE":
            continue
        params = [name for name in action.releases if name.startswith("params")]
        if params != ([f"params:{action.segment}"] if action.kind == "FREE" else []):
            raise ScheduleError(
                f"pp {order.at} {action} at {index} releases {params}: FREE alone frees parameters, its own segment's"
            )
        for name in action.releases:
            if name in params:
                continue
            if name not in maker or not name.startswith(BUFFERS) or name in freed:
                why = "free already" if name in freed else "not there"
                raise ScheduleError(f"pp {order.at} {action} releases {name}, which is {why}")
            freed[name] = index
    return freed


def _check_gathered(view: View, order: _Order) -> None:
    """Where the list gathers a segment's parameters, every use lies between a GATHER and the FREE that follows it, or, if it
    never frees them, the one GATHER renews what was there before: all uses follow it, or it follows them and the optimizer."""
    touches: dict[int, list[int]] = {a.segment: [] for a in order.actions if a.segment is not None}
    for index, action in enumerate(order.actions):
        if action.segment is not None and action.kind in ("F", "B", "I", "W", "GATHER", "FREE"):
            touches[action.segment].append(index)
    for segment, indices in touches.items():
        kinds = {order.actions[index].kind for index in indices}
        if "FREE" in kinds:
            _check_periods(order, segment, indices)
        elif "GATHER" in kinds:
            _check_renewed(order, segment, indices)
        elif kinds and view.storage is not None and view.segments[segment].gather_bytes:
            raise ScheduleError(f"pp {order.at} never gathers the parameters of segment {segment}, which are stored in slices")


def _check_periods(order: _Order, segment: int, indices: Sequence[int]) -> None:
    at, actions = order.at, order.actions
    held: int | None = None
    for index in indices:
        action = actions[index]
        if action.kind == "GATHER":
            if held is not None:
                raise ScheduleError(f"pp {at} {action} gathers what {actions[held]} at {held} has gathered already")
            held = index
            continue
        if held is None:
            raise ScheduleError(f"pp {at} {action} at {index} finds no gathered parameters")
        order.require(held, index, f"params:{segment}")
        if action.kind == "FREE":
            held = None
    if held is not None:
        raise ScheduleError(
            f"pp {at}: nothing frees the parameters that {actions[held]} at {held} gathered for segment {segment}"
        )


def _check_renewed(order: _Order, segment: int, indices: Sequence[int]) -> None:
    at, actions = order.at, order.actions
    first, *again = [index for index in indices if actions[index].kind == "GATHER"]
    if again:
        raise ScheduleError(f"pp {at} {actions[again[0]]} gathers what {actions[first]} at {first} has gathered already")
    uses = [index for index in indices if index != first]
    if uses and uses[0] < first:
        updated = next(index for index, action in enumerate(actions) if action.kind == "OPT")
        if max(*uses, updated) > first:
            raise ScheduleError(
                f"pp {at} {actions[first]} at {first} renews parameters that are in use: it belongs before their first use, or after "
                f"the last and OPT"
            )
        return
    for index in uses:
        order.require(first, index, f"params:{segment}")
