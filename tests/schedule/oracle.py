"""Judges a schedule by running it with real queues and tokens instead of values: the independent second opinion on `check`.

It knows nothing of graphs. It runs the lists in many orders: at random, and once for each start of an action and each end of a
communication with that one held back until nothing else can move, which brings out whatever does not wait for it.
"""

from __future__ import annotations

import random
from collections import Counter, deque

from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.view import View


class Wrong(Exception):
    """The run went wrong, and how."""


def judge(schedule: Schedule, view: View, channel: str, rendezvous: bool, seed: int) -> str | None:
    """None if every run ends well, else what went wrong in one of them."""
    moves = [(what, r, i) for r, actions in enumerate(schedule.ranks) for i in range(len(actions)) for what in ("step", "end")]
    # Compute ends with its step.
    moves = [(what, r, i) for what, r, i in moves if what == "step" or schedule.ranks[r][i].lane != "compute"]
    try:
        for held in (None, None, *moves):
            _Run(schedule, view, channel, rendezvous, held).go(random.Random(seed))
    except Wrong as wrong:
        return str(wrong)
    return None


class _Run:
    def __init__(
        self, schedule: Schedule, view: View, channel: str, rendezvous: bool, held: tuple[str, int, int] | None
    ) -> None:
        self.lists, self.view, self.channel, self.rendezvous, self.held = schedule.ranks, view, channel, rendezvous, held
        self.place = schedule.coordinates
        self.m = schedule.microbatches
        n = len(self.lists)
        self.counter = [0] * n
        self.complete = [set[int]() for _ in range(n)]
        self.buffers = [set[str]() for _ in range(n)]
        self.did: list[Counter[str]] = [Counter() for _ in range(n)]
        self.queues: list[dict[str, deque[int]]] = [{} for _ in range(n)]
        self.met = set[tuple[int, int]]()
        self.wire: dict[tuple[int, int], deque[tuple]] = {}
        self.tickets: dict[tuple, dict[int, list[tuple]]] = {}
        self.arrived: dict[tuple[int, int], list[tuple[tuple, int]]] = {}

    def go(self, rng: random.Random) -> None:
        ranks = list(range(len(self.lists)))
        while True:
            rng.shuffle(ranks)
            moved = False
            for r in ranks:
                while self._can_step(r) and self.held != ("step", r, self.counter[r]):
                    moved = True
                    self._step(r, self.counter[r])
                    if rng.random() < 0.3:
                        break
                for i in self._heads(r):
                    if self.held != ("end", r, i) and self._can_end(r, i):
                        moved = True
                        self._end(r, i)
            if not moved:
                if self.held is None:
                    break
                self.held = None
        self._at_the_end()

    def _meets(self, r: int, i: int) -> bool:
        """True once both ends have been at the head of their queues; each end then completes in its own time."""
        peer, action = self.lists[r][i].peer, self.lists[r][i]
        assert peer is not None
        for j in [] if (r, i) in self.met else self._heads(peer):
            if not self._same_wire(r, i, peer, j) or (peer, j) in self.met:
                continue
            other = self.lists[peer][j]
            if (action.kind[-1], action.segment, action.microbatch) != (other.kind[-1], other.segment, other.microbatch):
                raise Wrong(f"{action} meets {other}")
            self.met |= {(r, i), (peer, j)}
        return (r, i) in self.met

    def _wire(self, r: int, action: Action) -> tuple[int, int]:
        assert action.peer is not None
        return (r, action.peer) if action.kind.startswith("SEND") else (action.peer, r)

    def _same_wire(self, r: int, i: int, s: int, j: int) -> bool:
        a, b = self.lists[r][i], self.lists[s][j]
        return b.peer is not None and a.kind[:4] != b.kind[:4] and self._wire(r, a) == self._wire(s, b)

    def _heads(self, r: int) -> list[int]:
        return [waiting[0] for waiting in self.queues[r].values() if waiting]

    def _queue(self, r: int, action: Action) -> str:
        if self.channel in ("host", "rank"):
            return "one"
        if action.peer is None:
            return action.lane
        return action.kind[-1] if self.channel == "direction" else str(self._wire(r, action))

    def _can_step(self, r: int) -> bool:
        i = self.counter[r]
        if i == len(self.lists[r]):
            return False
        blocked = self.channel == "host" and any(self.queues[r].values())
        return not blocked and set(self.lists[r][i].needs) <= self.complete[r]

    def _can_end(self, r: int, i: int) -> bool:
        action = self.lists[r][i]
        if action.kind in ("SEND_F", "SEND_B"):
            return not self.rendezvous or self._meets(r, i)
        if action.kind in ("RECV_F", "RECV_B"):
            return self._meets(r, i) if self.rendezvous else bool(self.wire.get(self._wire(r, action)))
        if (r, i) not in self.arrived:
            self._arrive(r, i)
        return all(
            len(self.tickets[group].get(member, [])) > number for group, number in self.arrived[r, i] for member in group[1]
        )

    def _arrive(self, r: int, i: int) -> None:
        action = self.lists[r][i]
        mine = self.arrived[r, i] = []
        for group, name in self._collectives(r, action):
            line = self.tickets.setdefault(group, {}).setdefault(r, [])
            line.append(name)
            for other in self.tickets[group].values():
                if len(other) >= len(line) and other[len(line) - 1] != name:
                    raise Wrong(f"{group} does {name} and {other[len(line) - 1]} at once")
            mine.append((group, len(line) - 1))

    def _collectives(self, r: int, action: Action) -> list[tuple[tuple, tuple]]:
        if action.kind == "NORM":
            return [(("world", tuple(range(len(self.lists)))), ("NORM",))]
        if action.kind != "REDUCE":
            return []
        assert action.segment is not None
        found = []
        for weight in self.view.segments[action.segment].weights:
            hosts = self.view.hosts(weight.name)
            ranks = tuple(sorted({self.place[k] for k in hosts}))
            if len(ranks) > 1 and action.segment == min(k for k in hosts if self.place[k] == r):
                found.append((hosts, weight.name, ranks))
        return [(("hosts", ranks), (hosts, name)) for hosts, name, ranks in sorted(found)]

    def _step(self, r: int, i: int) -> None:
        action = self.lists[r][i]
        self.counter[r] += 1
        self._use(r, action)
        if action.kind in ("F", "B", "I", "W", "OPT", "FREE"):
            self._finish(r, i)
        else:
            self.queues[r].setdefault(self._queue(r, action), deque()).append(i)

    def _end(self, r: int, i: int) -> None:
        action = self.lists[r][i]
        token = (action.kind[-1], action.segment, action.microbatch)
        if action.peer is None or self.rendezvous:
            self._finish(r, i)
        elif action.kind.startswith("SEND"):
            self.wire.setdefault(self._wire(r, action), deque()).append(token)
            self._finish(r, i)
        else:
            came = self.wire[self._wire(r, action)].popleft()
            if came != token:
                raise Wrong(f"{action} gets {came}")
            self._finish(r, i)

    def _use(self, r: int, action: Action) -> None:
        """What must be there when the action starts."""
        k, j = action.segment, action.microbatch
        did, last = self.did[r], len(self.view.segments) - 1
        here = [segment for segment, place in enumerate(self.place) if place == r]
        if did[f"{action} {action.peer}"] and action.kind not in ("GATHER", "FREE"):
            raise Wrong(f"{action} twice")
        did[f"{action} {action.peer}"] += 1
        if (
            k is not None
            and action.kind in ("F", "B", "I", "W", "FREE")
            and any(a.kind == "GATHER" and a.segment == k for a in self.lists[r])
        ):
            self._must_have(r, action, f"params:{k}")
        match action.kind:
            case "F":
                if k not in here:
                    raise Wrong(f"{action} is not of rank {r}")
                if k:
                    self._must_have(r, action, f"cut:{k - 1}:F:{j}")
            case "B" | "I" | "W":
                self._must_have(r, action, f"saved:{k}:{j}")
                if action.kind == "W":
                    self._must_have(r, action, f"pending:{k}:{j}")
                    return
                if k == last and "COUNT done" not in did:
                    raise Wrong(f"{action} before the count")
                if k != last and self.view.segments[k].output_grads:
                    self._must_have(r, action, f"cut:{k + 1}:B:{j}")
                if did[f"backward {k}.{j}"]:
                    raise Wrong(f"{action} twice")
                did[f"backward {k}.{j}"] += 1
            case "SEND_F" | "SEND_B":
                self._must_have(r, action, f"cut:{k}:{action.kind[-1]}:{j}")
            case "REDUCE":
                for weight in self.view.segments[k].weights:
                    mine = [h for h in self.view.hosts(weight.name) if self.place[h] == r]
                    # A weight of several segments here is summed by the first of them.
                    self._must_be_summed(r, action, mine if k == mine[0] else [k])
            case "NORM":
                self._must_be_summed(r, action, here)
                reduces = [a.segment for a in self.lists[r] if a.kind == "REDUCE"]
                if any(f"REDUCE{segment} done" not in did for segment in reduces) or "COUNT done" not in did:
                    raise Wrong("NORM before REDUCE or COUNT is complete")
            case "OPT":
                if "NORM done" not in did:
                    raise Wrong("OPT before NORM is complete")
            case "GATHER":
                if f"params:{k}" in self.buffers[r] or f"gathering {k}" in did:
                    raise Wrong(f"{action} twice")
                did[f"gathering {k}"] += 1

    def _must_be_summed(self, r: int, action: Action, segments: list[int]) -> None:
        for k in segments:
            if any(f"gradient {k}.{j}" not in self.did[r] for j in range(self.m)):
                raise Wrong(f"{action} before the gradients of segment {k} are whole")

    def _must_have(self, r: int, action: Action, name: str) -> None:
        if name not in self.buffers[r]:
            raise Wrong(f"rank {r} {action} finds no {name}")

    def _finish(self, r: int, i: int) -> None:
        action = self.lists[r][i]
        k, j = action.segment, action.microbatch
        if action.lane != "compute":
            assert self.queues[r][self._queue(r, action)].popleft() == i
        self.complete[r].add(i)
        self.did[r][f"{action} done"] += 1
        makes = []
        if action.kind in ("SEND_F", "SEND_B"):
            # The transport reads the buffer until the send is complete.
            self._must_have(r, action, f"cut:{k}:{action.kind[-1]}:{j}")
        match action.kind:
            case "F":
                makes = [f"saved:{k}:{j}", *([f"cut:{k}:F:{j}"] if k != len(self.view.segments) - 1 else [])]
            case "B" | "I":
                makes = [f"cut:{k}:B:{j}"] if self.view.segments[k].input_grads else []
                makes += [f"pending:{k}:{j}"] if action.kind == "I" else []
            case "RECV_F" | "RECV_B":
                makes = [f"cut:{k}:{action.kind[-1]}:{j}"]
            case "GATHER":
                makes = [f"params:{k}"]
                del self.did[r][f"gathering {k}"]
        if action.kind in ("B", "W"):
            self.did[r][f"gradient {k}.{j}"] += 1
        for name in makes:
            if name in self.buffers[r]:
                raise Wrong(f"{action} overwrites {name}")
            self.buffers[r].add(name)
        if [name for name in action.releases if name.startswith("params")] != (
            [f"params:{k}"] if action.kind == "FREE" else []
        ):
            raise Wrong(f"{action} releases {action.releases}: parameters are what FREE frees, and only FREE")
        for name in action.releases:
            if name not in self.buffers[r]:
                raise Wrong(f"{action} releases {name}, which is not there")
            self.buffers[r].remove(name)

    def _at_the_end(self) -> None:
        for r, actions in enumerate(self.lists):
            if self.counter[r] < len(actions) or len(self.complete[r]) < len(actions):
                raise Wrong(f"deadlock: rank {r} stops at {self.counter[r]} of {len(actions)}")
            if self.buffers[r]:
                raise Wrong(f"rank {r} keeps {self.buffers[r]}")
            for once in ("COUNT", "NORM", "OPT"):
                if not self.did[r][f"{once} done"]:
                    raise Wrong(f"rank {r} never does {once}")
        if any(self.wire.values()):
            raise Wrong("a message is never received")
        for k, segment in enumerate(self.view.segments):
            r = self.place[k]
            if any(f"gradient {k}.{j}" not in self.did[r] for j in range(self.m)):
                raise Wrong(f"segment {k} has no gradient")
            for weight in segment.weights:
                hosts = self.view.hosts(weight.name)
                here = [h for h in hosts if self.place[h] == r]
                if (weight.axes or len(here) < len(hosts)) and f"REDUCE{here[0]} done" not in self.did[r]:
                    raise Wrong(f"{weight.name} is never reduced")
