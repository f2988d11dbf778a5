"""Times a schedule without running it: the model of `waits` with durations, and lanes that share links.

A rank computes one action at a time. A message or collective starts when it and its counterparts are at the head of their
queues, waits the latency of its link, and then moves its bytes; transfers that use one end of a link at once share its
bandwidth equally. One rank stands for all ranks at its pp coordinate. The Events are those that a run of the same list emits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from phalanx.event import Event
from phalanx.mesh import Mesh
from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.data import COUNT_BYTES, NORM_BYTES, Part
from phalanx.schedule.pipeline import COSTS
from phalanx.schedule.values import Values
from phalanx.schedule.view import View
from phalanx.schedule.waits import LOCAL, SENDS, At, Channel, Meeting, meetings, queues


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
    clock = _Clock(schedule, Values.of(view, schedule.chains, schedule.microbatches), costs, channel)
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


class _Clock:
    def __init__(self, schedule: Schedule, values: Values, costs: Costs, channel: str) -> None:
        self.schedule, self.values, self.costs, self.channel = schedule, values, costs, channel
        ranks = range(len(schedule.ranks))
        self.events: list[Event] = []
        self.now = 0.0
        self.ends: list[tuple[float, int, _Task]] = []
        """A heap of what goes on, by end and then by when it was put in. Where the rate has changed since, the task says
        another end and comes up once more."""
        self.pushed = 0
        self.next = [0 for _ in ranks]
        self.computing: list[_Task | None] = [None for _ in ranks]
        self.blocked = [False for _ in ranks]
        """By a communication, on channel "host"."""
        self.done = [bytearray(len(actions)) for actions in schedule.ranks]
        self.queues: list[dict[Hashable, deque[int]]] = [{} for _ in ranks]
        self.meets = _partners(meetings(schedule, values.reductions, channel))
        self.awake = deque(ranks)
        """Coordinates that may go on."""
        self.heads: deque[At] = deque()
        """Communication that has just come to the head of its queues."""
        self.arrived = set[At]()
        """All that has."""
        self.begun = set[At]()
        """Of these, what goes on or is complete."""
        self.load: dict[tuple[str | None, int, str], dict[_Task, None]] = {}
        """Transfers that move bytes, by the end of a link that they use."""
        self.stirred = [0 for _ in ranks]
        """How many ends of a coordinate move bytes."""
        self.changed: dict[_Task, None] = {}
        """What may go on at another rate."""

    def advance(self) -> bool:
        """Start what can start now, then go to the next end. False once nothing is going on."""
        while self.awake or self.heads:
            while self.awake:
                self._issue(self.awake.popleft())
            if self.heads:
                self._meet(self.heads.popleft())
        self._share()
        while self.ends and self.ends[0][2].end != self.ends[0][0]:
            heappop(self.ends)
        if not self.ends:
            return False
        self.now = self.ends[0][0]
        while self.ends and self.ends[0][0] <= self.now:
            end, _, task = heappop(self.ends)
            if task.end == end:
                self._end(task)
        return True

    def finish(self) -> None:
        left = [(at, i) for at, done in enumerate(self.done) for i, complete in enumerate(done) if not complete]
        if left:
            at, index = left[0]
            raise ValueError(
                f"the schedule cannot go on: pp {at} {self.schedule.ranks[at][index]} and {len(left) - 1} others wait"
            )

    def _issue(self, at: int) -> None:
        """Walk the list of a coordinate as far as it goes."""
        actions, done = self.schedule.ranks[at], self.done[at]
        while self.next[at] < len(actions) and not self.computing[at] and not self.blocked[at]:
            index = self.next[at]
            action = actions[index]
            if not all(done[need] for need in action.needs):
                return
            self.next[at] += 1
            if action.kind in LOCAL:
                self._compute(at, index, action)
                continue
            self.blocked[at] = self.channel == "host"
            waiting = [self.queues[at].setdefault(name, deque()) for name in self._queues(action)]
            for line in waiting:
                line.append(index)
            if all(line[0] == index for line in waiting):
                self.heads.append((at, index))

    def _queues(self, action: Action) -> tuple[Hashable, ...]:
        return queues(action, self.channel, self.values.reductions)

    def _compute(self, at: int, index: int, action: Action) -> None:
        seconds = 0.0 if action.kind == "FREE" else self._seconds(action)
        task = _Task(((at, index),), self.now, self.now + seconds)
        if seconds:
            self.computing[at] = task
            self.changed[task] = None
            self._push(task)
        else:
            self._record(task)

    def _push(self, task: _Task) -> None:
        self.pushed += 1
        heappush(self.ends, (task.end, self.pushed, task))

    def _seconds(self, action: Action) -> float:
        key = (action.kind, action.segment)
        if key not in self.costs.seconds and action.kind != "OPT":
            raise ValueError(f"no cost is given for {action.kind} of segment {action.segment}")
        return self.costs.seconds.get(key, 0.0)

    def _meet(self, place: At) -> None:
        """A communication has come to the head of its queues: start it, and what has waited for it, if nothing else is missing."""
        self.arrived.add(place)
        for at, index in self.meets.get(place, {place}):
            together = self.meets.get((at, index), {(at, index)})
            if (at, index) in self.begun or not together <= self.arrived:
                continue
            # A message is one transfer. Each coordinate's end of a collective is its own: a REDUCE may meet others in each sum.
            message = self.schedule.ranks[at][index].peer is not None
            self._transfer(tuple(sorted(together)) if message else ((at, index),))

    def _transfer(self, places: tuple[At, ...]) -> None:
        self.begun.update(places)
        at, index = places[0]
        action = self.schedule.ranks[at][index]
        route = self.costs.routes.get(action.lane.partition(":")[0])
        link = Link() if route is None else self.costs.links[route]
        size, hops = max(_wire(self.values, self.schedule.ranks[a][i]) for a, i in places)
        if action.peer is None:
            ends = tuple((a, side) for a, _ in places for side in ("out", "in"))
        else:
            source, target = (at, action.peer) if action.kind in SENDS else (action.peer, at)
            ends = ((source, "out"), (target, "in"))
        task = _Task(places, self.now, self.now + hops * link.latency_seconds, size=size, link=route, ends=ends)
        if task.end > self.now:
            self._push(task)
        elif size and link.bytes_per_second < math.inf:
            self._move(task)
        else:
            self._complete(task)

    def _move(self, task: _Task) -> None:
        """The latency has passed: the bytes begin to move."""
        assert task.link is not None, "only a routed transfer takes time"
        task.moving = True
        task.end = self.now + task.size / self.costs.links[task.link].bytes_per_second
        self._push(task)
        self.changed[task] = None
        for at, side in task.ends:
            self.load.setdefault((task.link, at, side), {})[task] = None
            self.stirred[at] += 1
            self._stir(task.link, at, side)

    def _stir(self, link: str | None, at: int, side: str) -> None:
        self.changed.update(self.load[link, at, side])
        computing = self.computing[at]
        if computing:
            self.changed[computing] = None

    def _share(self) -> None:
        """Set the rate of what may have changed, by who moves bytes now."""
        for task in self.changed:
            if task.ends:
                rate = 1.0 / max(len(self.load[task.link, at, side]) for at, side in task.ends)
            else:
                rate = 1.0 / (1.0 + self.costs.slowdown if self.stirred[task.places[0][0]] else 1.0)
            if rate != task.rate:
                task.end = self.now + (task.end - self.now) * task.rate / rate
                task.rate = rate
                self._push(task)
        self.changed.clear()

    def _end(self, task: _Task) -> None:
        if not task.ends:
            at = task.places[0][0]
            self.computing[at] = None
            self._record(task)
        elif task.moving:
            for at, side in task.ends:
                del self.load[task.link, at, side][task]
                self.stirred[at] -= 1
                self._stir(task.link, at, side)
            self._complete(task)
        elif task.size and self.costs.links[str(task.link)].bytes_per_second < math.inf:
            self._move(task)
        else:
            self._complete(task)
        self.changed.pop(task, None)

    def _complete(self, task: _Task) -> None:
        for at, index in task.places:
            waiting = [self.queues[at][name] for name in self._queues(self.schedule.ranks[at][index])]
            for line in waiting:
                assert line.popleft() == index, "a communication ended that was not at the head of its queue"
            for first in dict.fromkeys(line[0] for line in waiting if line):
                names = self._queues(self.schedule.ranks[at][first])
                if all(self.queues[at][name][0] == first for name in names):
                    self.heads.append((at, first))
            self.blocked[at] = False
        self._record(task)

    def _record(self, task: _Task) -> None:
        mesh = self.values.view.mesh
        for at, index in task.places:
            action = self.schedule.ranks[at][index]
            self.done[at][index] = True
            self.awake.append(at)
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


def _partners(met: Sequence[Meeting]) -> dict[At, set[At]]:
    """By communication, all that take part in a meeting with it, itself too."""
    partners: dict[At, set[At]] = {}
    for meeting in met:
        for together in zip(*([(at, index) for index in ends[1]] for at, ends in meeting.ends.items()), strict=True):
            for place in together:
                partners.setdefault(place, set()).update(together)
    return partners


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
            return values.view.segments[k].gather_bytes
        case "REDUCE":
            return sum(part.bytes for part in values.reductions[k].parts)
    return 0


def _wire(values: Values, action: Action) -> tuple[float, int]:
    """(bytes that leave one rank, latencies) of an action.

    Of an all_reduce over n ranks 2(n-1)/n of the payload and 2 log2 n, of a reduce_scatter or all_gather half of that. Latencies
    by the depth of a tree are what tree algorithms need, which libraries choose where latency matters.
    """
    view, mesh = values.view, values.view.mesh
    if action.peer is not None:
        return float(_payload(values, action)), 1
    if action.kind == "REDUCE":
        assert action.segment is not None
        calls = [call for part in values.reductions[action.segment].parts for call in _calls(part, mesh)]
    elif action.kind == "GATHER":
        calls = [(1, mesh.extent(action.lane.partition(":")[2].split("+")), _payload(values, action))]
    else:
        calls = [(2, mesh.size if action.kind == "NORM" else mesh.extent(view.batch_axes), _payload(values, action))]
    return sum(ways * (n - 1) / n * size for ways, n, size in calls), sum(
        ways * math.ceil(math.log2(n)) for ways, n, _ in calls
    )


def _calls(part: Part, mesh: Mesh) -> list[tuple[int, int, int]]:
    """(2 for an all_reduce, 1 for a reduce_scatter; ranks, payload bytes) of each call of a sum."""
    if part.coordinates:
        return [(2, len(part.coordinates), part.bytes // mesh.extent(part.split))]
    return [(2 if call == "all_reduce" else 1, mesh.extent(axes), size) for call, axes, size in part.calls(mesh)]
