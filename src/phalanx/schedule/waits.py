"""Who waits for whom in a schedule, as a graph. A schedule cannot deadlock if and only if the graph has no cycle.

The model is "issue": a rank walks its list in order; an action starts when its needs are complete; compute is complete before
the next action starts; communication queues first in, first out in its channel and is complete when it and all its counterparts
are at the head of theirs. Which message meets which is fixed by order alone, so the graph is static and a run has no other
freedom than speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.schedule.actions import Action, Schedule
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


def queue(action: Action, at: int, channel: str) -> str:
    """Name of the first-in-first-out queue that a communication of coordinate `at` joins."""
    if channel in ("host", "rank"):
        return "all"
    if action.peer is None:
        return action.lane
    return action.kind[-1] if channel == "direction" else edge(action, at)


def edge(action: Action, at: int) -> str:
    """The directed pair of ranks that a SEND or RECV of coordinate `at` uses."""
    return f"{at}>{action.peer}" if action.kind.startswith("SEND") else f"{action.peer}>{at}"


def meetings(schedule: Schedule, reductions: Mapping[int, Reduction]) -> Iterator[tuple[str, dict[int, list[tuple[str, int]]]]]:
    """Everything that several coordinates must do in one order: (where, {coordinate: [(what, index), ...]}).

    Messages of a directed edge, sums over the hosts of tied parameters, and collectives of the world.
    """
    places: dict[str, dict[int, list[tuple[str, int]]]] = {"world": {at: [] for at in range(len(schedule.ranks))}}
    for at, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            if action.peer is not None:
                ends = places.setdefault(f"edge {edge(action, at)}", {at: [], action.peer: []})
                what = f"{action.kind[-1]}{action.segment}.{action.microbatch}"
                ends.setdefault(at, []).append((what, index))
            elif action.kind == "REDUCE" and action.segment is not None and action.segment in reductions:
                for part in reductions[action.segment].tied:
                    hosts = places.setdefault(f"hosts {part.coordinates}", {host: [] for host in part.coordinates})
                    hosts.setdefault(at, []).append((f"sum of {', '.join(part.parameters)}", index))
            elif action.kind == "NORM":
                places["world"][at].append((str(action), index))
    yield from places.items()


@dataclass(frozen=True)
class Waits:
    """Action n of all lists has three nodes: 3n its start, 3n+1 its arrival at the head of its queue, 3n+2 its completion."""

    schedule: Schedule
    offsets: tuple[int, ...]
    waits_for: list[list[int]]

    @classmethod
    def of(cls, schedule: Schedule, reductions: Mapping[int, Reduction], channel: str, rendezvous: bool) -> Waits:
        """The graph for a channel model, with unbuffered (rendezvous) or buffered sends. Meetings must be in one order."""
        if channel not in CHANNELS:
            raise ValueError(f"there is no channel model {channel!r}; known: {', '.join(CHANNELS)}")
        offsets = [0]
        for actions in schedule.ranks:
            offsets.append(offsets[-1] + len(actions))
        graph = cls(schedule, tuple(offsets), [[] for _ in range(3 * offsets[-1])])
        for at in range(len(schedule.ranks)):
            graph._add_rank(at, channel)
        for _, ends in meetings(schedule, reductions):
            for together in zip(*([(at, index) for _, index in met] for at, met in ends.items()), strict=True):
                graph._add_meeting(together, rendezvous)
        return graph

    def node(self, place: At, event: int) -> int:
        return 3 * (self.offsets[place[0]] + place[1]) + event

    def _add_rank(self, at: int, channel: str) -> None:
        actions = self.schedule.ranks[at]
        tail: dict[str, int] = {}
        for index, action in enumerate(actions):
            start, head, done = (self.node((at, index), event) for event in range(3))
            if index:
                issued = actions[index - 1].communicates and channel != "host"
                self.waits_for[start].append(self.node((at, index - 1), 0 if issued else 2))
            self.waits_for[start].extend(self.node((at, need), 2) for need in action.needs)
            self.waits_for[head].append(start)
            self.waits_for[done].append(head)
            if action.communicates:
                name = queue(action, at, channel)
                if name in tail:
                    self.waits_for[head].append(tail[name])
                tail[name] = done

    def _add_meeting(self, together: Sequence[At], rendezvous: bool) -> None:
        for mine in together:
            for other in together:
                kind = self.schedule.ranks[mine[0]][mine[1]].kind
                if other == mine or (kind.startswith("SEND") and not rendezvous):
                    continue
                # A buffered send is complete on its own; what it sent is there once it is complete.
                sent = kind.startswith("RECV") and not rendezvous
                self.waits_for[self.node(mine, 2)].append(self.node(other, 2 if sent else 1))

    def done_before(self, first: At, second: At, event: Literal["start", "done"]) -> bool:
        """True if `first` is complete before `second` starts, or is done itself, in every run."""
        goal, seen = self.node(first, 2), set[int]()
        frontier = [self.node(second, 0 if event == "start" else 2)]
        while frontier:
            node = frontier.pop()
            if node == goal:
                return True
            if node not in seen:
                seen.add(node)
                frontier.extend(self.waits_for[node])
        return False

    def cycle(self) -> tuple[At, ...]:
        """A cycle of the fewest actions, each waiting for the next, or () if there is none."""
        stuck = self._stuck(self.waits_for, range(len(self.waits_for)))
        stuck = self._stuck(self._reversed(stuck), stuck)
        best: tuple[int, ...] = ()
        for start in sorted(stuck):
            found = self._shortest(start, stuck, len(best) or len(stuck) + 1)
            if found and (not best or len(found) < len(best)):
                best = found
        return tuple(self._place(action) for action in best)

    def _stuck(self, waits_for: Sequence[Sequence[int]] | Mapping[int, Sequence[int]], nodes: Iterable[int]) -> set[int]:
        """Nodes that can never be reached by removing, again and again, the nodes that wait for nothing."""
        waiting = {node: len(waits_for[node]) for node in nodes}
        waiters: dict[int, list[int]] = {}
        for node in waiting:
            for other in waits_for[node]:
                waiters.setdefault(other, []).append(node)
        free = [node for node, count in waiting.items() if not count]
        while free:
            node = free.pop()
            del waiting[node]
            for waiter in waiters.get(node, ()):
                waiting[waiter] -= 1
                if not waiting[waiter]:
                    free.append(waiter)
        return set(waiting)

    def _reversed(self, nodes: set[int]) -> dict[int, list[int]]:
        backwards: dict[int, list[int]] = {node: [] for node in nodes}
        for node in nodes:
            for other in self.waits_for[node]:
                if other in nodes:
                    backwards[other].append(node)
        return backwards

    def _shortest(self, start: int, within: set[int], limit: int) -> tuple[int, ...]:
        """Actions of the shortest cycle through a node, if it has fewer than `limit`; steps within one action are free."""
        came: dict[int, tuple[int, int | None]] = {start: (0, None)}
        frontier = deque([start])
        while frontier:
            node = frontier.popleft()
            length = came[node][0]
            for other in self.waits_for[node]:
                if other not in within:
                    continue
                if other == start:
                    return self._path(came, node)
                step = length + (other // 3 != node // 3)
                if step < limit and (other not in came or step < came[other][0]):
                    came[other] = (step, node)
                    frontier.appendleft(other) if step == length else frontier.append(other)
        return ()

    def _path(self, came: Mapping[int, tuple[int, int | None]], node: int | None) -> tuple[int, ...]:
        path: list[int] = []
        while node is not None:
            if not path or path[-1] != node // 3:
                path.append(node // 3)
            node = came[node][1]
        if len(path) > 1 and path[0] == path[-1]:
            path.pop()
        return tuple(reversed(path))

    def _place(self, action: int) -> At:
        at = next(at for at in range(len(self.schedule.ranks)) if action < self.offsets[at + 1])
        return at, action - self.offsets[at]
