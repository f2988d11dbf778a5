"""A step that ran, as a file, and the same list of actions predicted from its own durations.

Pure: a file that a run left behind is read without torch, on any machine.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

from phalanx.event import Event
from phalanx.mesh import Mesh
from phalanx.schedule.account import account
from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.simulate import Costs, Link, simulate
from phalanx.schedule.study import Study
from phalanx.schedule.view import View

T = TypeVar("T")
FORMAT = 1
WAITED = 0.1
"""A rank that waited for less than this part of a communication's time found it complete."""
COMPUTE = ("F", "B", "I", "W", "OPT")
Times = dict[tuple[int, str], tuple[float, float]]
"""(pp coordinate, name of an action) -> start and end."""


@dataclass(frozen=True)
class Trace:
    """One recorded step of all ranks."""

    step: int
    """Counted from 1."""
    schedule: Schedule
    view: View
    """With the mesh, the names of segments, and the bytes of what crosses cuts."""
    events: tuple[Event, ...]
    """Of every rank, in seconds on the clock of rank 0, from the first start."""
    clock_error_seconds: float
    """Each rank's clock is known to within this; 0 where all ranks read one clock."""

    @property
    def study(self) -> Study:
        """Bubble, idle time and peaks, as of a simulated step. The first rank of each pp coordinate speaks for it."""
        return Study(self.schedule, self.view, self.events, account(self.schedule, self.view, self.events))


@dataclass(frozen=True)
class Difference:
    """Prediction and measurement of one kind of action: durations, and when it started after the step began."""

    kind: str
    number: int
    measured_seconds: float
    """Mean duration; of a message or collective from when the last of its ends was ready."""
    predicted_seconds: float
    error: float
    """Mean absolute difference of durations, as a fraction of the mean measured one."""
    start_error_seconds: float
    """Mean absolute difference of starts."""


def write(trace: Trace, path: Path) -> None:
    path.write_text(json.dumps({"format": FORMAT, **_plain(trace)}, separators=(",", ":")))


def read(path: Path) -> Trace:
    """The trace in a file, or in `trace.json` of a run folder. Raises ValueError for a file that is none."""
    path = path / "trace.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `phalanx train --trace N` writes it for step N")
    try:
        content = json.loads(path.read_text())
        if content.get("format") != FORMAT:
            raise ValueError(f"format is {content.get('format')!r}, this version reads {FORMAT}")
        return _revived(Trace, content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace of `phalanx train --trace`: {error}") from None


def segment_seconds(trace: Trace) -> dict[str, float]:
    """By name, the mean time that a segment's forward and backward took together for one microbatch."""
    total: dict[tuple[int, str], list[float]] = {}
    durations = times(trace.schedule, trace.view, trace.events)
    for at, action in _actions(trace.schedule):
        if action.kind in ("F", "B", "I", "W") and action.segment is not None:
            start, end = durations[at, str(action)]
            total.setdefault((action.segment, action.kind), []).append(end - start)
    found: dict[str, float] = {}
    for (segment, _), each in total.items():
        name = trace.view.segments[segment].name
        found[name] = found.get(name, 0.0) + fmean(each)
    return found


def predict(trace: Trace) -> Study:
    """The same list simulated at the mean measured durations of each (kind, segment), and of each class of communication."""
    measured = times(trace.schedule, trace.view, trace.events)
    seconds: dict[tuple[str, int | None], list[float]] = {}
    waits: dict[str, dict[bool, list[float]]] = {}
    for at, action in _actions(trace.schedule):
        start, end = measured[at, str(action)]
        if action.kind in COMPUTE:
            seconds.setdefault((action.kind, action.segment), []).append(end - start)
    seen = observed(trace.schedule, trace.view, trace.events)
    for at, action in _received(trace.schedule):
        start, end = measured[at, str(action)]
        waits.setdefault(_class(action), {}).setdefault((at, str(action)) in seen, []).append(end - start)
    computed = {key: fmean(values) for key, values in seconds.items()}
    # Where no rank ever waited, all that is known is that none took longer than the quickest seems to have.
    waited = {name: found[True] if True in found else [min(found[False])] for name, found in waits.items()}
    costs = Costs(computed, *_wires(trace, computed, {name: fmean(values) for name, values in waited.items()}))
    events = simulate(trace.schedule, trace.view, costs)
    return Study(trace.schedule, trace.view, events, account(trace.schedule, trace.view, events))


def differences(trace: Trace, predicted: Study) -> list[Difference]:
    """By kind, in the order in which kinds first start; of communication, of what was `observed`."""
    mine = times(trace.schedule, trace.view, trace.events)
    other = times(trace.schedule, trace.view, predicted.events)
    seen = observed(trace.schedule, trace.view, trace.events)
    by_kind: dict[str, list[tuple[int, str]]] = {}
    for at, action in _actions(trace.schedule):
        if action.kind in COMPUTE or (not action.kind.startswith("SEND") and (at, str(action)) in seen):
            by_kind.setdefault(action.kind, []).append((at, str(action)))
    found = []
    for kind, keys in sorted(by_kind.items(), key=lambda item: min(mine[key][0] for key in item[1])):
        lengths = [(mine[key][1] - mine[key][0], other[key][1] - other[key][0]) for key in keys]
        mean = fmean(ran for ran, _ in lengths)
        off = fmean(abs(ran - said) for ran, said in lengths)
        found.append(
            Difference(
                kind=kind,
                number=len(keys),
                measured_seconds=mean,
                predicted_seconds=fmean(said for _, said in lengths),
                error=off / mean if mean else 0.0,
                start_error_seconds=fmean(abs(mine[key][0] - other[key][0]) for key in keys),
            )
        )
    return found


def times(schedule: Schedule, view: View, events: Sequence[Event]) -> Times:
    """Start and end of each action on the first rank of its coordinate, from the first start of all.

    A communication starts when the last rank that takes part has issued it: what a rank waits before that is not its own time.
    """
    begin = min(event.start for event in events)
    places = {rank: view.mesh.coordinates(rank).get("pp", 0) for rank in {event.rank for event in events}}
    first = {view.mesh.rank({"pp": at}): at for at in range(len(schedule.ranks))}
    own = {(first[e.rank], e.name): (e.start - begin, e.end - begin) for e in events if e.rank in first}
    ready: dict[tuple[int | None, str], float] = {}
    for event in events:
        for at in (places[event.rank], None):
            key = (at, event.name)
            ready[key] = max(ready.get(key, 0.0), event.start - begin)
    found = {}
    for at, action in _actions(schedule):
        start, end = own[at, str(action)]
        if action.peer is not None:
            other = ("SEND_" if action.kind.startswith("RECV") else "RECV_") + str(action).partition("_")[2]
            start = max(start, own.get((action.peer, other), (start, end))[0])
        elif action.communicates:
            start = max(start, ready[None if action.kind == "NORM" else at, str(action)])
        found[at, str(action)] = (min(start, end), end)
    return found


def observed(schedule: Schedule, view: View, events: Sequence[Event]) -> set[tuple[int, str]]:
    """Communication whose end was seen when it came: its rank did nothing but wait for it just before.

    What arrives while its rank computes is noticed at the next wait, which may be much later.
    """
    found = set()
    own = times(schedule, view, events)
    for at, actions in enumerate(schedule.ranks):
        ends = sorted(own[at, str(action)][1] for action in actions if not action.kind.startswith("SEND"))
        for action in actions:
            if action.communicates:
                start, end = own[at, str(action)]
                place = bisect_left(ends, end)
                if place == 0 or end - ends[place - 1] >= WAITED * (end - start):
                    found.add((at, str(action)))
    return found


def _wires(
    trace: Trace, computed: Mapping[tuple[str, int | None], float], waits: Mapping[str, float]
) -> tuple[dict[str, Link], dict[str, str]]:
    """A link of its own for each class of communication, with the latency that gives the mean measured time.

    How many latencies a message or collective of a class takes is the simulator's to say: it is asked with a latency of 1.
    """
    routes = {name: name for name in waits}
    asked = simulate(trace.schedule, trace.view, Costs(computed, {name: Link(1.0) for name in waits}, routes))
    said = times(trace.schedule, trace.view, asked)
    hops: dict[str, list[float]] = {}
    for at, action in _received(trace.schedule):
        start, end = said[at, str(action)]
        hops.setdefault(_class(action), []).append(end - start)
    links = {name: Link(waits[name] / fmean(found) if any(found) else 0.0) for name, found in hops.items()}
    return links, routes


def _received(schedule: Schedule) -> Iterable[tuple[int, Action]]:
    """Communication, of messages the end that waits for them."""
    return ((at, a) for at, a in _actions(schedule) if a.communicates and not a.kind.startswith("SEND"))


def _class(action: Action) -> str:
    return action.lane.partition(":")[0]


def _actions(schedule: Schedule) -> Iterable[tuple[int, Action]]:
    return ((at, action) for at, actions in enumerate(schedule.ranks) for action in actions)


def with_bytes(trace: Trace, predicted: Study) -> list[Event]:
    """The Events with the bytes and axes that the simulator knows of their actions; runs do not record them."""
    first = {trace.view.mesh.rank({"pp": at}): at for at in range(len(trace.schedule.ranks))}
    known = {(first[event.rank], event.name): event for event in predicted.events}
    found = []
    for event in trace.events:
        other = known.get((trace.view.mesh.coordinates(event.rank).get("pp", 0), event.name))
        found.append(event if other is None else replace(event, bytes=other.bytes, axis=other.axis))
    return found


def _plain(value: Any) -> Any:
    """As JSON can hold it; what a dataclass has by default is left out."""
    if isinstance(value, Mesh):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return {f.name: _plain(own) for f, own in fields if f.default is dataclasses.MISSING or own != f.default}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value


def _revived(kind: type[T], value: Any) -> T:
    """What `_plain` made of a value of that type."""
    made: Any = _value(kind, value)
    return made  # type: ignore[no-any-return]


def _value(kind: Any, value: Any) -> Any:
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if kind is Mesh:
        return Mesh.parse(value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{f.name: _value(hints[f.name], value[f.name]) for f in dataclasses.fields(kind) if f.name in value})  # type: ignore[operator]
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _value(next(option for option in options if option is not type(None)), value)
    if origin is tuple:
        each = options[:1] * len(value) if options[1:] == (...,) else options
        return tuple(_value(option, part) for option, part in zip(each, value, strict=True))
    if origin is not None and origin is not Literal and issubclass(origin, Mapping):
        return {key: _value(options[1], part) for key, part in value.items()}
    if origin is Literal:
        if value not in options:
            raise ValueError(f"{value!r} is none of {', '.join(map(str, options))}")
        return value
    if kind is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
