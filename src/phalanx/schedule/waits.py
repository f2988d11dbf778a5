"""Who waits for whom in a schedule, as a graph. A schedule cannot deadlock if and only if the graph has no cycle.

The model is "issue": a rank walks its list in order; an action starts when its needs are complete; compute is complete before
the next action starts; communication queues first in, first out in its channel and is complete when it and all its counterparts
are at the head of theirs. Neighbouring communications may be issued as one batch, which starts when all of them can, comes to the
head when it is first in all of its queues, and completes as a whole. Which message meets which is fixed by order alone, so the
graph is static and a run has no other freedom than speed: if one run comes to its end, all do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from phalanx.schedule.actions import COMPUTE, Action, Schedule
from phalanx.schedule.data import Reduction

Channel = Literal["host", "rank", "direction", "edge"]
CHANNELS: Mapping[str, str] = {
    "host": "every communication blocks its rank",
    "rank": "one queue per rank",
    "direction": "a queue for forward messages, one for backward messages, one per communicator of collectives",
    "edge": "a queue per directed pair of ranks, one per communicator of collectives",
}
At = tuple[int, int]
"""(pp coordinate, index in its list)."""
Batches = Mapping[int, Sequence[tuple[int, ...]]]
"""By pp coordinate, the indices of neighbouring communications that are issued as one."""
LOCAL = COMPUTE | {"FREE"}
"""Kinds of action that are complete before the next action of their rank starts."""
SENDS = frozenset({"SEND_F", "SEND_B"})

START, HEAD, DONE = range(3)
"""What happens to an action: it starts, it comes to the head of its queues, it is complete."""


def queues(action: Action, channel: str, reductions: Mapping[int, Reduction]) -> tuple[Hashable, ...]:
    """The first-in-first-out queues of its rank that a communication joins; it comes to the head once it is first in all.

    A REDUCE joins that of its lane and that of each group of coordinates that it sums over.
    """
    if channel in ("host", "rank"):
        return ("all",)
    if action.peer is not None:
        return (action.kind[-1],) if channel == "direction" else (("to" if action.kind in SENDS else "from", action.peer),)
    if action.kind == "REDUCE" and action.segment is not None and action.segment in reductions:
        return (action.lane, *dict.fromkeys(part.coordinates for part in reductions[action.segment].tied))
    return (action.lane,)


@dataclass(frozen=True)
class Meeting:
    """What several coordinates must do in one order: by coordinate (what it does, the index of the action that does it)."""

    where: str
    ends: Mapping[int, tuple[list[Hashable], list[int]]]


def meetings(schedule: Schedule, reductions: Mapping[int, Reduction], channel: str) -> list[Meeting]:
    """Messages of each directed edge, sums over the hosts of shared parameters, and collectives of the world.

    Forward and backward messages of an edge have an order each on channel "direction", otherwise one between them. Raises
    ValueError for an unknown channel model.
    """
    if channel not in CHANNELS:
        raise ValueError(f"there is no channel model {channel!r}; known: {', '.join(CHANNELS)}")
    ways = channel == "direction"
    edges: dict[tuple[int, int, str], dict[int, tuple[list[Hashable], list[int]]]] = {}
    sums: dict[tuple[int, ...], dict[int, tuple[list[Hashable], list[int]]]] = {}
    world: dict[int, tuple[list[Hashable], list[int]]] = {at: ([], []) for at in range(len(schedule.ranks))}
    for at, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            kind, peer = action.kind, action.peer
            if kind in LOCAL:
                continue
            if peer is not None:
                edge = (*((at, peer) if kind in SENDS else (peer, at)), kind[-1] if ways else "")
                ends = edges.get(edge)
                if ends is None:
                    ends = edges[edge] = {at: ([], []), peer: ([], [])}
                what, indices = ends[at]
                what.append((kind[-1], action.segment, action.microbatch))
                indices.append(index)
            elif kind == "REDUCE" and action.segment is not None and action.segment in reductions:
                for part in reductions[action.segment].tied:
                    ends = sums.setdefault(part.coordinates, {host: ([], []) for host in part.coordinates})
                    what, indices = ends.setdefault(at, ([], []))
                    what.append(part.parameters)
                    indices.append(index)
            elif kind == "NORM":
                world[at][0].append("NORM")
                world[at][1].append(index)
    return [
        *(Meeting(f"edge {source}>{target} {way}".rstrip(), ends) for (source, target, way), ends in edges.items()),
        *(Meeting(f"hosts {coordinates}", ends) for coordinates, ends in sums.items()),
        Meeting("world", world),
    ]


@dataclass(frozen=True)
class Waits:
    """The graph. Actions of all lists are numbered in one row; a batch goes by the number of its first.

    A node is 3 n + START, HEAD or DONE. Nodes are not stored: what a node waits for follows from the lists and three tables.
    """

    schedule: Schedule
    blocking: bool
    """Every communication is complete before the next action of its rank starts: channel "host"."""
    buffered: bool
    offsets: tuple[int, ...]
    """Number of each coordinate's first action, and of all actions."""
    actions: list[Action]
    batch: list[int]
    """By action: its number, or that of its batch."""
    sizes: Mapping[int, int]
    """By batch: how many it has."""
    ahead: Mapping[int, list[int]]
    """By communication: those directly before it in its queues."""
    awaits: Mapping[int, list[int]]
    """By communication: counterparts that have to come to their heads before it is complete."""
    awaited: Mapping[int, list[int]]
    """The reverse of `awaits`."""

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        reductions: Mapping[int, Reduction],
        met: Sequence[Meeting],
        channel: str,
        rendezvous: bool,
        batches: Batches | None = None,
    ) -> Waits:
        """The graph for a channel model, with unbuffered (rendezvous) or buffered sends. Meetings must be in one order.

        Raises ValueError for a batch of anything but neighbouring communications.
        """
        offsets = (0, *accumulate(len(actions) for actions in schedule.ranks))
        actions = [action for actions in schedule.ranks for action in actions]
        batch = _batches(schedule, offsets, batches or {})
        awaits, awaited = _awaits(actions, offsets, met, batch, rendezvous)
        sizes = {n: size for n, size in Counter(batch).items() if size > 1} if batches else {}
        ahead = _ahead(schedule, batch, channel, reductions)
        return cls(schedule, channel == "host", not rendezvous, offsets, actions, batch, sizes, ahead, awaits, awaited)

    def waits_for(self, node: int) -> Iterator[int]:
        """Nodes that come before a node, directly."""
        n, event = divmod(node, 3)
        if event == START:
            yield from self._before_start(n)
        elif event == HEAD:
            yield 3 * n + START
            yield from (3 * other + DONE for other in self.ahead.get(n, ()))
        else:
            yield 3 * n + HEAD
            for other in self.awaits.get(n, ()):
                # A buffered send is complete on its own, and what it sent is there once it is; a batch completes later.
                sent = self.buffered and self.actions[other].kind in SENDS and other not in self.sizes
                yield 3 * other + (DONE if sent else HEAD)

    def _before_start(self, n: int) -> Iterator[int]:
        at = self._place(n)[0]
        base = self.offsets[at]
        if n > base:
            issued = self.actions[n - 1].kind not in LOCAL and not self.blocking
            yield 3 * self.batch[n - 1] + (START if issued else DONE)
        for member in range(n, n + self.sizes.get(n, 1)):
            yield from (3 * self.batch[base + need] + DONE for need in self.actions[member].needs)

    def done_before(self, first: At, second: At, event: Literal["start", "done"]) -> bool:
        """True if `first` is complete before `second` starts, or is done itself, in every run."""
        goal = 3 * self.batch[self.offsets[first[0]] + first[1]] + DONE
        origin = 3 * self.batch[self.offsets[second[0]] + second[1]] + (START if event == "start" else DONE)
        frontier, seen = [origin], {origin}
        while frontier:
            node = frontier.pop()
            if node == goal:
                return True
            for other in self.waits_for(node):
                if other not in seen:
                    seen.add(other)
                    frontier.append(other)
        return False

    def stuck(self) -> list[int]:
        """Nodes that no run comes to; none if there is no cycle. Takes time in proportion to the lists: it is a run."""
        run = _Run(self)
        run.go()
        if all(run.done):
            return []
        happened = (run.started, run.here, run.done)
        return [3 * n + event for n in sorted(set(self.batch)) for event in range(3) if not happened[event][n]]

    def cycle(self) -> tuple[At, ...]:
        """A cycle of the fewest actions, each waiting for the next, or () if there is none."""
        nodes = set(self.stuck())
        graph = {node: [other for other in self.waits_for(node) if other in nodes] for node in nodes}
        graph = _core(graph)
        best: tuple[int, ...] = ()
        for start in sorted(graph):
            found = _shortest(graph, start, len(best) or len(graph) + 1)
            if found and (not best or len(found) < len(best)):
                best = found
        return tuple(self._place(n) for n in best)

    def _place(self, n: int) -> At:
        at = bisect_right(self.offsets, n) - 1
        return at, n - self.offsets[at]


class _Run:
    """Walks all lists as far as they go, each as far as it can before the next: the order makes no difference to what happens."""

    def __init__(self, graph: Waits) -> None:
        self.graph = graph
        self.started, self.here, self.done = (bytearray(len(graph.actions)) for _ in range(3))
        self.owner = [at for at, actions in enumerate(graph.schedule.ranks) for _ in actions]
        self.behind: dict[int, list[int]] = {}
        for n, others in graph.ahead.items():
            for other in others:
                self.behind.setdefault(other, []).append(n)
        self.queued = {n: len(others) for n, others in graph.ahead.items()}
        """By communication: those directly before it in its queues that are not complete."""
        self.position = list(graph.offsets[:-1])
        self.asleep = [-1] * len(graph.schedule.ranks)
        """By coordinate: what it waits for before it goes on."""
        self.awake = list(range(len(graph.schedule.ranks)))

    def go(self) -> None:
        while self.awake:
            at = self.awake.pop()
            self.position[at] = self.walk(at, self.position[at])

    def walk(self, at: int, n: int) -> int:
        """Start what a coordinate can from action n on; returns where it stops."""
        graph, actions, sizes, done = self.graph, self.graph.actions, self.graph.sizes, self.done
        base, end = graph.offsets[at], graph.offsets[at + 1]
        while n < end:
            size = sizes.get(n, 1)
            for need in actions[n].needs if size == 1 else [need for a in actions[n : n + size] for need in a.needs]:
                if not done[base + need]:
                    self.asleep[at] = graph.batch[base + need]
                    return n
            self.started[n] = 1
            if actions[n].kind in LOCAL:
                self.here[n] = done[n] = 1
            else:
                if not self.queued.get(n):
                    self.come(n)
                if graph.blocking and not done[n]:
                    self.asleep[at] = n
                    return n + size
            n += size
        return n

    def come(self, n: int) -> None:
        """A communication is at the head of its queues: what completes by that, what then comes to the head, and so on."""
        here, done, awaits = self.here, self.done, self.graph.awaits
        heads = [n]
        while heads:
            n = heads.pop()
            here[n] = 1
            for m in (n, *self.graph.awaited.get(n, ())):
                if done[m] or not here[m]:
                    continue
                for other in awaits.get(m, ()):
                    if not here[other]:
                        break
                else:
                    self.complete(m, heads)

    def complete(self, n: int, heads: list[int]) -> None:
        for member in range(n, n + self.graph.sizes.get(n, 1)):
            self.done[member] = 1
        for other in self.behind.get(n, ()):
            self.queued[other] -= 1
            if self.started[other] and not self.queued[other]:
                heads.append(other)
        at = self.owner[n]
        if self.asleep[at] == n:
            self.asleep[at] = -1
            self.awake.append(at)


def _batches(schedule: Schedule, offsets: Sequence[int], batches: Batches) -> list[int]:
    batch = list(range(offsets[-1]))
    for at, groups in batches.items():
        for members in groups:
            actions = schedule.ranks[at]
            run = range(members[0], members[0] + len(members)) if members else range(0)
            taken = [i for i in members if not 0 <= i < len(actions) or batch[offsets[at] + i] != offsets[at] + i]
            if tuple(run) != tuple(members) or taken or any(actions[i].kind in LOCAL for i in members):
                raise ValueError(
                    f"batch {tuple(members)} of pp {at} is not a run of neighbouring communications, in one batch each"
                )
            for i in members:
                batch[offsets[at] + i] = offsets[at] + members[0]
    return batch


def _ahead(schedule: Schedule, batch: Sequence[int], channel: str, reductions: Mapping[int, Reduction]) -> dict[int, list[int]]:
    ahead: dict[int, list[int]] = {}
    n = -1
    for actions in schedule.ranks:
        tail: dict[Hashable, int] = {}
        for action in actions:
            n += 1
            if action.kind in LOCAL:
                continue
            me = batch[n]
            for name in queues(action, channel, reductions):
                before = tail.get(name, me)
                if before != me:
                    ahead.setdefault(me, []).append(before)
                tail[name] = me
    return ahead


def _awaits(
    actions: Sequence[Action], offsets: Sequence[int], met: Sequence[Meeting], batch: Sequence[int], rendezvous: bool
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    awaits: dict[int, list[int]] = {}
    for meeting in met:
        for together in zip(*([offsets[at] + index for index in ends[1]] for at, ends in meeting.ends.items()), strict=True):
            ends = [batch[n] for n in together]
            for position, mine in enumerate(together):
                if rendezvous or actions[mine].kind not in SENDS:
                    awaits.setdefault(ends[position], []).extend(ends[:position] + ends[position + 1 :])
    if rendezvous:
        return awaits, awaits  # counterparts wait for each other
    awaited: dict[int, list[int]] = {}
    for n, others in awaits.items():
        for other in others:
            awaited.setdefault(other, []).append(n)
    return awaits, awaited


def _core(graph: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Without the nodes that lie on no cycle because nothing on one waits for them."""
    waiters = dict.fromkeys(graph, 0)
    for others in graph.values():
        for other in others:
            waiters[other] += 1
    free = [node for node, count in waiters.items() if not count]
    while free:
        node = free.pop()
        del waiters[node]
        for other in graph[node]:
            waiters[other] -= 1
            if not waiters[other]:
                free.append(other)
    return {node: [other for other in graph[node] if other in waiters] for node in waiters}


def _shortest(graph: Mapping[int, list[int]], start: int, limit: int) -> tuple[int, ...]:
    """Actions of the shortest cycle through a node, if it has fewer than `limit`; steps within one action are free."""
    came: dict[int, tuple[int, int | None]] = {start: (0, None)}
    frontier = deque([start])
    while frontier:
        node = frontier.popleft()
        length = came[node][0]
        for other in graph[node]:
            if other == start:
                return _path(came, node)
            step = length + (other // 3 != node // 3)
            if step < limit and (other not in came or step < came[other][0]):
                came[other] = (step, node)
                frontier.appendleft(other) if step == length else frontier.append(other)
    return ()


def _path(came: Mapping[int, tuple[int, int | None]], node: int | None) -> tuple[int, ...]:
    path: list[int] = []
    while node is not None:
        if not path or path[-1] != node // 3:
            path.append(node // 3)
        node = came[node][1]
    if len(path) > 1 and path[0] == path[-1]:
        path.pop()
    return tuple(reversed(path))
