"""Times a schedule without running it: the model of `waits` with durations, and lanes that share links.

A rank computes one action at a time. A message or collective starts when it and its counterparts are at the head of their
queues, waits the latency of its link, and then moves its bytes; transfers that use one end of a link at once share its
bandwidth equally. One rank stands for all ranks at its pp coordinate. The Events are those that a run of the same list emits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.event import Event
from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.data import COUNT_BYTES, NORM_BYTES
from phalanx.schedule.pipeline import COSTS
from phalanx.schedule.values import Values
from phalanx.schedule.view import View
from phalanx.schedule.waits import At, Channel, meetings, queue


@dataclass(frozen=True)
class Link:
    """A wire that every rank has one end of: full duplex, so bytes out and bytes in do not contend."""

    latency_seconds: float = 0.0
    bytes_per_second: float = math.inf


@dataclass(frozen=True)
class Costs:
    """What actions cost.

    seconds   of (kind, segment); ("OPT", None) is taken at 0 if absent, a missing kind of a listed compute action is an error
    links     by name, with the link that each class of lane uses in `routes`: pp, reduce, gather, count, world. Classes on one
              link contend. A class without a route moves its bytes in no time
    slowdown  of compute while a transfer of the same rank moves bytes: 0.1 means 10% slower
    """

    seconds: Mapping[tuple[str, int | None], float]
    links: Mapping[str, Link] = field(default_factory=dict)
    routes: Mapping[str, str] = field(default_factory=dict)
    slowdown: float = 0.0

    @classmethod
    def units(cls, view: View) -> Costs:
        """F=1, B=2, I=W=1 for every segment, and communication in no time."""
        return cls({(kind, k): cost for kind, cost in COSTS.items() for k in range(len(view.segments))})


def simulate(schedule: Schedule, view: View, costs: Costs, channel: Channel = "edge") -> list[Event]:
    """The Events of one step, by start. Sends are unbuffered. Raises ValueError if the schedule deadlocks: `check` it first."""
    clock = _Clock(schedule, Values.of(view, schedule.coordinates, schedule.microbatches), costs, channel)
    while clock.advance():
        pass
    clock.finish()
    return sorted(clock.events, key=lambda event: (event.start, event.rank, event.end))


@dataclass(eq=False)
class _Task:
    """Work that goes on: compute of one place, or a transfer between several. `end` holds while `rate` does."""

    places: tuple[At, ...]
    start: float
    end: float
    rate: float = 1.0
    size: float = 0.0
    """Bytes still to move once the latency has passed."""
    link: str | None = None
    ends: tuple[tuple[int, str], ...] = ()
    """(coordinate, out or in) of the link that the transfer occupies."""
    moving: bool = False

    def change(self, now: float, rate: float) -> None:
        if rate != self.rate:
            self.end = now + (self.end - now) * self.rate / rate
            self.rate = rate


class _Clock:
    def __init__(self, schedule: Schedule, values: Values, costs: Costs, channel: str) -> None:
        self.schedule, self.values, self.costs, self.channel = schedule, values, costs, channel
        self.events: list[Event] = []
        self.now = 0.0
        self.tasks: list[_Task] = []
        self.next = [0] * len(schedule.ranks)
        self.busy = [False] * len(schedule.ranks)
        self.done = [[False] * len(actions) for actions in schedule.ranks]
        self.queues: list[dict[str, deque[int]]] = [{} for _ in schedule.ranks]
        self.meets: dict[At, set[At]] = {}
        for _, ends in meetings(schedule, values.reductions):
            for together in zip(*([(at, index) for _, index in met] for at, met in ends.items()), strict=True):
                for place in together:
                    self.meets.setdefault(place, set()).update(together)
        self.arrived = set[At]()
        """Communication that has come to the head of its queue."""
        self.moving = set[At]()
        """Communication whose transfer has begun."""

    def advance(self) -> bool:
        """Start what can start now, then go to the next end. False once nothing is going on."""
        while any([*(self._issue(at) for at in range(len(self.next))), self._meet()]):
            pass
        if not self.tasks:
            return False
        self._share()
        self.now = min(task.end for task in self.tasks)
        for task in [task for task in self.tasks if task.end <= self.now]:
            self._end(task)
        return True

    def finish(self) -> None:
        left = [(at, i) for at, done in enumerate(self.done) for i, complete in enumerate(done) if not complete]
        if left:
            at, index = left[0]
            raise ValueError(
                f"the schedule cannot go on: pp {at} {self.schedule.ranks[at][index]} and {len(left) - 1} others wait"
            )

    def _issue(self, at: int) -> bool:
        """Walk the list of a coordinate as far as it goes; True if it went on."""
        actions, first = self.schedule.ranks[at], self.next[at]
        while self.next[at] < len(actions) and not self.busy[at]:
            index = self.next[at]
            action = actions[index]
            if not all(self.done[at][need] for need in action.needs):
                break
            if action.communicates:
                self.queues[at].setdefault(queue(action, at, self.channel), deque()).append(index)
                self.busy[at] = self.channel == "host"
                self.next[at] += 1
            else:
                self._compute(at, index, action)
        return self.next[at] > first

    def _compute(self, at: int, index: int, action: Action) -> None:
        self.next[at] += 1
        seconds = 0.0 if action.kind == "FREE" else self._seconds(action)
        task = _Task(((at, index),), self.now, self.now + seconds)
        if seconds:
            self.busy[at] = True
            self.tasks.append(task)
        else:
            self._record(task)

    def _seconds(self, action: Action) -> float:
        key = (action.kind, action.segment)
        if key not in self.costs.seconds and action.kind != "OPT":
            raise ValueError(f"no cost is given for {action.kind} of segment {action.segment}")
        return self.costs.seconds.get(key, 0.0)

    def _meet(self) -> bool:
        """Start the communication whose ends are all at the head of their queues; True if some did."""
        heads = [(at, waiting[0]) for at, queues in enumerate(self.queues) for waiting in queues.values() if waiting]
        heads = [place for place in heads if place not in self.moving]
        self.arrived.update(heads)
        met = False
        for at, index in heads:
            together = self.meets.get((at, index), {(at, index)})
            if (at, index) in self.moving or not together <= self.arrived:
                continue
            # A message is one transfer. Each coordinate's end of a collective is its own: a REDUCE may meet others in each sum.
            message = self.schedule.ranks[at][index].peer is not None
            self._transfer(tuple(sorted(together)) if message else ((at, index),))
            met = True
        return met

    def _transfer(self, places: tuple[At, ...]) -> None:
        self.moving.update(places)
        at, index = places[0]
        action = self.schedule.ranks[at][index]
        route = self.costs.routes.get(action.lane.partition(":")[0])
        link = Link() if route is None else self.costs.links[route]
        size, hops = max(_wire(self.values, self.schedule.ranks[a][i]) for a, i in places)
        if action.peer is None:
            ends = tuple((a, side) for a, _ in places for side in ("out", "in"))
        else:
            source, target = (at, action.peer) if action.kind.startswith("SEND") else (action.peer, at)
            ends = ((source, "out"), (target, "in"))
        bandwidth = link.bytes_per_second
        task = _Task(places, self.now, self.now + hops * link.latency_seconds, size=size, link=route, ends=ends)
        if task.end > self.now or (size and bandwidth < math.inf):
            self.tasks.append(task)
            if task.end <= self.now:
                self._move(task)
        else:
            self._complete(task)

    def _move(self, task: _Task) -> None:
        """The latency has passed: the bytes begin to move."""
        assert task.link is not None, "only a routed transfer takes time"
        task.moving = True
        task.end = self.now + task.size / self.costs.links[task.link].bytes_per_second

    def _share(self) -> None:
        """Set the rate of everything that goes on, by who moves bytes now."""
        load: dict[tuple[str | None, int, str], int] = {}
        stirred = set[int]()
        for task in self.tasks:
            if task.moving:
                for at, side in task.ends:
                    load[task.link, at, side] = load.get((task.link, at, side), 0) + 1
                    stirred.add(at)
        for task in self.tasks:
            if task.moving:
                task.change(self.now, 1.0 / max(load[task.link, at, side] for at, side in task.ends))
            elif not task.ends:
                slow = 1.0 + self.costs.slowdown if task.places[0][0] in stirred else 1.0
                task.change(self.now, 1.0 / slow)

    def _end(self, task: _Task) -> None:
        if task.ends and not task.moving and task.size and self.costs.links[str(task.link)].bytes_per_second < math.inf:
            self._move(task)
            return
        self.tasks.remove(task)
        if task.ends:
            self._complete(task)
        else:
            self.busy[task.places[0][0]] = False
            self._record(task)

    def _complete(self, task: _Task) -> None:
        for at, index in task.places:
            waiting = self.queues[at][queue(self.schedule.ranks[at][index], at, self.channel)]
            assert waiting.popleft() == index, "a communication ended that was not at the head of its queue"
            if self.channel == "host":
                self.busy[at] = False
        self._record(task)

    def _record(self, task: _Task) -> None:
        mesh = self.values.view.mesh
        for at, index in task.places:
            action = self.schedule.ranks[at][index]
            self.done[at][index] = True
            self.events.append(
                Event(
                    rank=mesh.rank({"pp": at}),
                    lane=action.lane,
                    name=str(action),
                    start=task.start,
                    end=self.now,
                    axis=_axis(action),
                    bytes=_payload(self.values, action),
                    segment=None if action.segment is None else self.values.view.segments[action.segment].name,
                    microbatch=action.microbatch,
                )
            )


def _axis(action: Action) -> str | None:
    kind, _, axes = action.lane.partition(":")
    return "pp" if action.peer is not None else axes if kind in ("reduce", "count", "gather") and axes else None


def _payload(values: Values, action: Action) -> int:
    """Bytes of the call on one rank."""
    k = action.segment
    if k is None:
        return {"NORM": NORM_BYTES, "COUNT": COUNT_BYTES}.get(action.kind, 0)
    match action.kind:
        case "SEND_F" | "RECV_F" | "SEND_B" | "RECV_B":
            return sum(message.bytes for message in values.view.cut(action.kind, k))
        case "GATHER":
            return values.view.segments[k].param_bytes
        case "REDUCE":
            return sum(part.bytes for part in values.reductions[k].parts)
    return 0


def _wire(values: Values, action: Action) -> tuple[float, int]:
    """(bytes that leave one rank, latencies) of an action; of an all_reduce over n ranks 2(n-1)/n of the payload and 2 log2 n.

    Twice the tree depth in latencies is what tree algorithms need, which libraries choose where latency matters.
    """
    view, mesh = values.view, values.view.mesh
    if action.peer is not None:
        return float(_payload(values, action)), 1
    if action.kind == "REDUCE":
        assert action.segment is not None
        sums = values.reductions[action.segment].parts
        parts = [(part.bytes, len(part.coordinates) or mesh.extent(part.axes)) for part in sums]
    elif action.kind == "GATHER":
        ranks = mesh.extent(action.lane.partition(":")[2].split("+"))
        return _payload(values, action) * (ranks - 1) / ranks, math.ceil(math.log2(ranks))
    else:
        parts = [(_payload(values, action), mesh.size if action.kind == "NORM" else mesh.extent(view.batch_axes))]
    return sum(2 * (n - 1) / n * size for size, n in parts), sum(2 * math.ceil(math.log2(n)) for _, n in parts)
