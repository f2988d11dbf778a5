"""Judges a schedule by running it with real queues and tokens instead of values: the independent second opinion on `check`.

It knows nothing of graphs. It runs the lists in many orders: at random, and once for each start of an action and each end of a
communication with that one held back until nothing else can move, which brings out whatever does not wait for it.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.data import reductions
from phalanx.schedule.view import View

AT_ONCE = ("F", "B", "I", "W", "OPT", "FREE")
Unit = tuple[int, ...]
"""Indices of communications that are issued as one, most often a single one."""


class Wrong(Exception):
    """The run went wrong, and how."""


def judge(
    schedule: Schedule,
    view: View,
    channel: str,
    rendezvous: bool,
    seed: int,
    batches: Mapping[int, Sequence[tuple[int, ...]]] | None = None,
) -> str | None:
    """None if every run ends well, else what went wrong in one of them."""
    rng = random.Random(seed)
    try:
        facts = _Facts(schedule, view, channel, rendezvous, batches or {})
        for held in (None, None, *facts.moves()):
            _Run(facts, held).go(rng)
    except Wrong as wrong:
        return str(wrong)
    return None


@dataclass
class _Fact:
    """What one action touches, worked out once for all runs."""

    action: Action
    name: str
    reads: list[str] = field(default_factory=list)
    """Buffers that must be there when it starts, and for a send until it is complete."""
    makes: list[str] = field(default_factory=list)
    after: list[object] = field(default_factory=list)
    """What must have happened on its rank when it starts: ("F0.1", "done"), ("gradient", segment, microbatch), and
    ("over axes", weight), ("over hosts", weight) for a sum."""
    does: list[object] = field(default_factory=list)
    """What has happened once it is complete."""
    unit: Unit = ()
    queues: tuple[object, ...] = ()
    """Which of the rank's queues it joins; it is at the head once it is first in all of them."""
    wire: tuple[object, ...] | None = None
    token: tuple[str, int | None, int | None] | None = None
    sums: list[tuple[object, tuple[int, ...]]] = field(default_factory=list)
    """Of a collective: (what, coordinates that take part; none if only its own does)."""


class _Facts:
    def __init__(
        self,
        schedule: Schedule,
        view: View,
        channel: str,
        rendezvous: bool,
        batches: Mapping[int, Sequence[tuple[int, ...]]],
    ) -> None:
        self.view, self.channel, self.rendezvous, self.m = view, channel, rendezvous, schedule.microbatches
        self.n, segments = len(schedule.ranks), len(view.segments)
        # Who computes (segment, microbatch): each copy of the model has an equal share of the microbatches.
        hosts = [at for stage, at in zip(schedule.stages, schedule.host, strict=True) for _ in stage]
        self.place = {
            (k, j): hosts[j * schedule.copies // self.m * segments + k] for k in range(segments) for j in range(self.m)
        }
        self.here = [sorted({k for (k, _), at in self.place.items() if at == r}) for r in range(self.n)]
        self.reductions = reductions(view, [tuple(sorted({self.place[k, j] for j in range(self.m)})) for k in range(segments)])
        self.lists = [[self._fact(r, action) for action in actions] for r, actions in enumerate(schedule.ranks)]
        for r, facts in enumerate(self.lists):
            for i, fact in enumerate(facts):
                fact.unit = next((unit for unit in batches.get(r, ()) if i in unit), (i,))
        kinds = [{(fact.action.kind, fact.action.segment) for fact in facts} for facts in self.lists]
        self.freed = [{k for k in range(segments) if ("FREE", k) in found} for found in kinds]
        self.gathered = [{k for k in range(segments) if ("GATHER", k) in found} for found in kinds]

    def moves(self) -> list[tuple[str, int, int]]:
        places = [(r, i) for r, facts in enumerate(self.lists) for i, fact in enumerate(facts) if i == fact.unit[0]]
        ends = [(r, i) for r, i in places if self.lists[r][i].action.kind not in AT_ONCE]
        return [*(("step", r, i) for r, i in places), *(("end", r, i) for r, i in ends)]

    def _gradients(self, r: int, weights: Sequence[str]) -> list[object]:
        hosts = {k for k, segment in enumerate(self.view.segments) if any(w.name in weights for w in segment.weights)}
        return [("gradient", k, j) for (k, j), at in self.place.items() if at == r and k in hosts]

    def _summed(self, r: int) -> list[object]:
        """What every gradient of a rank needs before it is the whole one."""
        found: list[object] = []
        for k in self.here[r]:
            for weight in self.view.segments[k].weights:
                hosts = [
                    h for h, segment in enumerate(self.view.segments) if any(w.name == weight.name for w in segment.weights)
                ]
                found += [("over axes", weight.name)] if weight.axes else []
                found += (
                    [("over hosts", weight.name)] if len({at for (h, _), at in self.place.items() if h in hosts}) > 1 else []
                )
            found += [("gradient", k, j) for j in range(self.m) if self.place[k, j] == r]
        return found

    def _sums(self, r: int, k: int, fact: _Fact) -> None:
        """A REDUCE sums each of its parts once it is issued, those over axes first."""
        deferred = {weight.name for segment in self.view.segments for weight in segment.weights if weight.axes}
        for part in self.reductions[k].parts:
            fact.sums.append((part.parameters, part.coordinates))
            fact.after += self._gradients(r, part.parameters)
            if part.coordinates:
                own = {name for other in self.reductions[k].parts if not other.coordinates for name in other.parameters}
                fact.after += [("over axes", name) for name in part.parameters if name in deferred - own]
            fact.does += [("over hosts" if part.coordinates else "over axes", name) for name in part.parameters]

    def _fact(self, r: int, action: Action) -> _Fact:
        k, j, kind, fact = action.segment, action.microbatch, action.kind, _Fact(action, str(action))
        last = len(self.view.segments) - 1
        fact.does = [(fact.name, "done")]
        if [name for name in action.releases if name.startswith("params")] != ([f"params:{k}"] if kind == "FREE" else []):
            raise Wrong(f"{fact.name} releases {action.releases}: parameters are what FREE frees, and only FREE")
        if k is not None and action.peer is None and k not in self.here[r]:
            raise Wrong(f"{fact.name} is not of rank {r}")
        if action.peer is not None:
            way = kind[-1]
            edge = (r, action.peer) if kind in ("SEND_F", "SEND_B") else (action.peer, r)
            fact.wire = (*edge, way) if self.channel == "direction" else edge
            fact.token = (way, k, j)
            (fact.reads if kind in ("SEND_F", "SEND_B") else fact.makes).append(f"cut:{k}:{way}:{j}")
        match kind:
            case "F":
                fact.reads = [f"cut:{k - 1}:F:{j}"] if k else []
                fact.makes = [f"saved:{k}:{j}", *([f"cut:{k}:F:{j}"] if k != last else [])]
            case "B" | "I":
                back = k != last and self.view.segments[k].output_grads
                fact.reads = [f"saved:{k}:{j}", *([f"cut:{k + 1}:B:{j}"] if back else [])]
                fact.makes = [f"cut:{k}:B:{j}"] if self.view.segments[k].input_grads else []
                fact.makes += [f"pending:{k}:{j}"] if kind == "I" else []
                fact.after = [("COUNT", "done")] if k == last else []
            case "GATHER":
                fact.makes = [f"params:{k}"]
            case "W":
                fact.reads = [f"saved:{k}:{j}", f"pending:{k}:{j}"]
            case "NORM":
                fact.sums = [("NORM", tuple(range(self.n)))]
                fact.after = [("COUNT", "done"), *self._summed(r)]
            case "OPT":
                fact.after = [("NORM", "done")]
            case "REDUCE":
                if k is None or k not in self.reductions:
                    raise Wrong(f"{fact.name} has nothing to sum")
                self._sums(r, k, fact)
        if self.channel in ("host", "rank"):
            fact.queues = ("one",)
        elif fact.wire is None:
            # A sum over stages also goes through the communicator of those stages.
            fact.queues = (action.lane, *{("sum", group) for _, group in fact.sums if group and kind == "REDUCE"})
        else:
            fact.queues = (kind[-1],) if self.channel == "direction" else (fact.wire,)
        if kind in ("B", "W"):
            fact.does.append(("gradient", k, j))
        return fact


class _Run:
    def __init__(self, facts: _Facts, held: tuple[str, int, int] | None) -> None:
        self.facts, self.lists, self.held = facts, facts.lists, held
        ranks = range(facts.n)
        self.counter = [0 for _ in ranks]
        self.complete = [set[int]() for _ in ranks]
        self.buffers = [set[str]() for _ in ranks]
        self.did = [set[object]() for _ in ranks]
        """Names of what has started, (name, "done") of what is complete, and what has come of it."""
        self.queues: list[dict[object, deque[Unit]]] = [defaultdict(deque) for _ in ranks]
        self.arrived = set[tuple[int, Unit]]()
        self.met = set[tuple[int, int]]()
        self.wire: dict[tuple[object, ...], deque[object]] = defaultdict(deque)
        self.tickets: dict[tuple[int, ...], dict[int, list[object]]] = defaultdict(lambda: defaultdict(list))
        self.places: dict[tuple[int, int], list[tuple[tuple[int, ...], int]]] = {}
        """Of a collective: for each of its groups, which one of the rank's it is."""
        self.stale = [set[int]() for _ in ranks]
        """Segments whose parameters were last gathered before OPT."""

    def go(self, rng: random.Random) -> None:
        ranks = list(range(self.facts.n))
        while True:
            rng.shuffle(ranks)
            moved = False
            for r in ranks:
                while self._can_step(r) and self.held != ("step", r, self.counter[r]):
                    moved = True
                    self._step(r)
                    if rng.random() < 0.3:
                        break
                for unit in self._heads(r):
                    if (r, unit) not in self.arrived:
                        moved = True
                        self._arrive(r, unit)
                    if self.held != ("end", r, unit[0]) and self._can_end(r, unit):
                        moved = True
                        self._end(r, unit)
            if not moved:
                if self.held is None:
                    break
                self.held = None
        self._at_the_end()

    def _can_step(self, r: int) -> bool:
        i = self.counter[r]
        if i == len(self.lists[r]) or (self.facts.channel == "host" and any(self.queues[r].values())):
            return False
        unit = self.lists[r][i].unit
        return all(need in self.complete[r] for member in unit for need in self.lists[r][member].action.needs)

    def _step(self, r: int) -> None:
        unit = self.lists[r][self.counter[r]].unit
        self.counter[r] = unit[-1] + 1
        for i in unit:
            self._use(r, self.lists[r][i])
        if self.lists[r][unit[0]].action.kind in AT_ONCE:
            self._finish(r, unit)
        else:
            for name in dict.fromkeys(name for i in unit for name in self.lists[r][i].queues):
                self.queues[r][name].append(unit)

    # Communication

    def _heads(self, r: int) -> list[Unit]:
        first = dict.fromkeys(waiting[0] for waiting in self.queues[r].values() if waiting)
        return [
            unit for unit in first if all(self.queues[r][name][0] == unit for i in unit for name in self.lists[r][i].queues)
        ]

    def _arrive(self, r: int, unit: Unit) -> None:
        """At the head of its queues: counterparts can see it."""
        self.arrived.add((r, unit))
        for i in unit:
            fact = self.lists[r][i]
            if fact.action.kind in ("SEND_F", "SEND_B") and not self.facts.rendezvous and len(unit) > 1:
                self.wire[fact.wire].append(fact.token)
            self.places[r, i] = []
            for name, group in fact.sums:
                if not group:
                    continue
                line = self.tickets[group][r]
                line.append(name)
                for other in self.tickets[group].values():
                    if len(other) >= len(line) and other[len(line) - 1] != name:
                        raise Wrong(f"{group} does {name} and {other[len(line) - 1]} at once")
                self.places[r, i].append((group, len(line) - 1))

    def _can_end(self, r: int, unit: Unit) -> bool:
        facts = [self.lists[r][i] for i in unit]
        if not all(
            len(self.tickets[group][member]) > number for i in unit for group, number in self.places[r, i] for member in group
        ):
            return False
        messages = [(i, fact) for i, fact in zip(unit, facts, strict=True) if fact.wire is not None]
        if self.facts.rendezvous:
            met = [self._meets(r, i) for i, _ in messages]  # each is to be tried
            return all(met)
        receives = [fact.wire for _, fact in messages if not fact.action.kind.startswith("SEND")]
        return all(len(self.wire[wire]) >= receives.count(wire) for wire in receives)

    def _meets(self, r: int, i: int) -> bool:
        """True once both ends have been at the head of their queues; each end then completes in its own time."""
        if (r, i) in self.met:
            return True
        mine = self.lists[r][i]
        for earlier in mine.unit[: mine.unit.index(i)]:
            same = self.lists[r][earlier]
            if same.wire == mine.wire and same.action.kind[:4] == mine.action.kind[:4] and (r, earlier) not in self.met:
                return False
        peer = mine.action.peer
        assert peer is not None
        for unit in self._heads(peer):
            for j in unit:
                other = self.lists[peer][j]
                if other.wire != mine.wire or other.action.kind[:4] == mine.action.kind[:4] or (peer, j) in self.met:
                    continue
                if mine.token != other.token:
                    raise Wrong(f"{mine.name} meets {other.name}")
                self.met |= {(r, i), (peer, j)}
                return True
        return False

    def _end(self, r: int, unit: Unit) -> None:
        for i in unit:
            fact = self.lists[r][i]
            if fact.wire is None or self.facts.rendezvous:
                continue
            if fact.action.kind.startswith("SEND"):
                if len(unit) == 1:
                    self.wire[fact.wire].append(fact.token)
            else:
                came = self.wire[fact.wire].popleft()
                if came != fact.token:
                    raise Wrong(f"{fact.name} gets {came}")
        for name in {name for i in unit for name in self.lists[r][i].queues}:
            assert self.queues[r][name].popleft() == unit
        self._finish(r, unit)

    # Values

    def _use(self, r: int, fact: _Fact) -> None:
        """What must be there when the action starts."""
        action, k, j, did = fact.action, fact.action.segment, fact.action.microbatch, self.did[r]
        if action.kind in ("GATHER", "FREE"):
            self._use_whole(r, fact)
            return
        if (fact.name, action.peer) in did:
            raise Wrong(f"{fact.name} twice")
        did.add((fact.name, action.peer))
        self._must_have(r, fact)
        for event in fact.after:
            if event not in did:
                raise Wrong(f"rank {r} {fact.name} before {event}")
        if action.kind in ("F", "B", "I", "W"):
            self._use_whole(r, fact)
        if action.kind in ("F", "B", "I"):
            if self.facts.place.get((k, j)) != r:
                raise Wrong(f"{fact.name} is not of rank {r}")
            if action.kind != "F" and ("backward", k, j) in did:
                raise Wrong(f"{fact.name} twice")
            did.add(("backward" if action.kind != "F" else "forward", k, j))

    def _use_whole(self, r: int, fact: _Fact) -> None:
        """Whole parameters: where they are freed they come from GATHER only, elsewhere they are left from the step before."""
        k, kind, did = fact.action.segment, fact.action.kind, self.did[r]
        held, under_way = f"params:{k}" in self.buffers[r], ("gathering", k) in did
        if kind == "GATHER":
            if held or under_way:
                raise Wrong(f"{fact.name} twice")
            did.add(("gathering", k))
            if ("OPT", "done") not in did:
                self.stale[r].add(k)
        elif k in self.facts.freed[r]:
            if not held:
                raise Wrong(f"rank {r} {fact.name} finds no whole parameters")
        elif under_way:
            raise Wrong(f"rank {r} {fact.name} while its parameters are written")
        elif k not in self.facts.gathered[r] and self.facts.view.storage and self.facts.view.segments[k].gather_bytes:
            raise Wrong(f"rank {r} {fact.name} finds slices")
        elif not held:
            did.add(("leftover", k))

    def _must_have(self, r: int, fact: _Fact) -> None:
        for name in fact.reads:
            if name not in self.buffers[r]:
                raise Wrong(f"rank {r} {fact.name} finds no {name}")

    def _finish(self, r: int, unit: Unit) -> None:
        did, buffers, facts = self.did[r], self.buffers[r], [self.lists[r][i] for i in unit]
        self.complete[r].update(unit)
        for fact in facts:
            kind, k = fact.action.kind, fact.action.segment
            did.update(fact.does)
            if kind in ("SEND_F", "SEND_B"):
                self._must_have(r, fact)  # the transport reads the buffer until the send is complete
            elif kind == "GATHER":
                did.discard(("gathering", k))
            for name in fact.makes:
                if name in buffers:
                    raise Wrong(f"{fact.name} overwrites {name}")
                buffers.add(name)
        for fact in facts:
            for name in fact.action.releases:
                if name not in buffers:
                    raise Wrong(f"{fact.name} releases {name}, which is not there")
                buffers.remove(name)

    def _at_the_end(self) -> None:
        for r, facts in enumerate(self.lists):
            if self.counter[r] < len(facts) or len(self.complete[r]) < len(facts):
                raise Wrong(f"deadlock: rank {r} stops at {self.counter[r]} of {len(facts)}")
            kept = {f"params:{k}" for k in self.facts.gathered[r] - self.facts.freed[r]}
            if self.buffers[r] - kept:
                raise Wrong(f"rank {r} keeps {self.buffers[r] - kept}")
            for k in self.stale[r]:
                if ("leftover", k) in self.did[r]:
                    raise Wrong(f"rank {r} computes segment {k} of the next step with parameters from before the update")
            for once in ("COUNT", "NORM", "OPT"):
                if (once, "done") not in self.did[r]:
                    raise Wrong(f"rank {r} never does {once}")
            for k in self.facts.here[r]:
                mine = [j for j in range(self.facts.m) if self.facts.place[k, j] == r]
                if any(("gradient", k, j) not in self.did[r] for j in mine):
                    raise Wrong(f"rank {r} has no gradient of segment {k}")
        if any(self.wire.values()):
            raise Wrong("a message is never received")
