"""How long a compute order takes when messages have a latency, and how many activations each rank holds. Pure, and fast.

The model: a rank runs its list in order, one step at a time; a message leaves at the end of the step that makes it and arrives
`communication` later, without occupying either rank; stages of one rank hand over at once. Unlike `simulate` there are no
lanes, bandwidths or data parallelism: this is what an order is searched with. Steps are numbered, so that one evaluation is one
pass over arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.schedule.pipeline.order import Order, Step

Prices = Mapping[str, float | Sequence[float]]
"""F, I and W in seconds or any one unit.

A number is the cost of one rank's whole layer set: each of its `chunks` stages costs 1/chunks of it. A sequence is the cost of
equal runs of the model in order, as many of them as the caller likes as long as every stage is a whole number of them.
"""


@dataclass(frozen=True)
class Costs:
    """What one microbatch costs on each stage, and a message between two ranks."""

    F: tuple[float, ...]
    I: tuple[float, ...]  # noqa: E741 (the name of the field)
    W: tuple[float, ...]
    communication: float = 0.0

    @classmethod
    def of(cls, prices: Prices, pp: int, chunks: int, communication: float = 0.0) -> Costs:
        """Of pp x chunks stages. Raises ValueError for a missing, negative or infinite price, or one that cannot be cut into them."""
        if not 0 <= communication < math.inf:
            raise ValueError(f"a message takes 0 or more and finite time, not communication={communication}")
        missing = [kind for kind in "FIW" if kind not in prices]
        if missing:
            raise ValueError(f"costs need F, I and W; {', '.join(missing)} is missing from {sorted(prices)}")
        forward, inputs, weights = (_split(kind, prices[kind], pp, chunks) for kind in "FIW")
        return cls(forward, inputs, weights, communication)

    def seconds(self, step: Step) -> float:
        s = step.stage
        match step.kind:
            case "F":
                return self.F[s]
            case "I":
                return self.I[s]
            case "W":
                return self.W[s]
            case "B":
                return self.I[s] + self.W[s]


def _split(kind: str, price: float | Sequence[float], pp: int, chunks: int) -> tuple[float, ...]:
    count = pp * chunks
    parts = [price / chunks] * count if isinstance(price, (int, float)) else list(price)
    if any(not 0 <= part < math.inf for part in parts):
        wrong = next(part for part in parts if not 0 <= part < math.inf)
        raise ValueError(f"the cost of {kind} is 0 or more and finite, not {wrong}")
    share, rest = divmod(len(parts), count)
    if rest or not share:
        raise ValueError(f"{len(parts)} costs of {kind} cannot be cut into {count} stages (pp={pp}, chunks={chunks})")
    return tuple(sum(parts[s * share : (s + 1) * share]) for s in range(count))


@dataclass(frozen=True)
class Evaluation:
    """What an order comes to, in the unit of its costs.

    span   from the first step of any rank to the end of the last of any rank
    own    by rank: from its first step to the end of its last
    busy   by rank: time that it computes
    peak   by rank: most activations held, each that of one microbatch on one stage, from the start of F to the end of W or B
    """

    span: float
    own: tuple[float, ...]
    busy: tuple[float, ...]
    peak: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Idle share of all ranks in the span."""
        return 1.0 - sum(self.busy) / (self.span * len(self.busy)) if self.span else 0.0


def evaluate(order: Order, costs: Costs) -> Evaluation:
    """Raises ValueError if the lists wait for each other."""
    numbered = Numbered.of(order, costs)
    span = numbered.run()
    spans = [(numbered.end[lane[0]] - numbered.seconds[lane[0]], numbered.end[lane[-1]]) for lane in numbered.lanes if lane]
    return Evaluation(
        span=span - min((start for start, _ in spans), default=0.0),
        own=tuple(end - start for start, end in spans),
        busy=tuple(sum(numbered.seconds[step] for step in lane) for lane in numbered.lanes),
        peak=tuple(numbered.peak(rank) for rank in range(len(numbered.lanes))),
    )


@dataclass
class Numbered:
    """An order with its steps as numbers; what belongs to a step is at its number in each list."""

    host: tuple[int, ...]
    steps: list[Step]
    lanes: list[list[int]]
    """By rank: the numbers of its steps, in order."""
    seconds: list[float]
    needs: list[int]
    """The step before it in the chain of its microbatch, other than its own forward; -1 for none."""
    lag: list[float]
    """How long what it needs travels."""
    reader: list[int]
    """The inverse of `needs`, which is one to one; -1 for none."""
    own: list[int]
    """What it needs of its own stage and microbatch: the F of an I or B, the I of a W; -1 for an F."""
    grows: list[int]
    """Change of the activations held: +1 for F at its start, -1 for W and B at their end."""
    end: list[float]

    @classmethod
    def of(cls, order: Order, costs: Costs) -> Numbered:
        steps = [step for rank in order.ranks for step in rank]
        number = {step: n for n, step in enumerate(steps)}
        lanes, at = [], 0
        for rank in order.ranks:
            lanes.append(list(range(at, at + len(rank))))
            at += len(rank)
        chain = len(order.host) // order.copies
        needs, own = [-1] * len(steps), [-1] * len(steps)
        for n, (kind, s, j) in enumerate(steps):
            if kind == "F":
                if s % chain:
                    needs[n] = number[Step("F", s - 1, j)]
            elif kind == "W":
                own[n] = number[Step("I", s, j)]
            else:
                own[n] = number[Step("F", s, j)]
                if (s + 1) % chain:
                    above = number.get(Step("I", s + 1, j))
                    needs[n] = number[Step("B", s + 1, j)] if above is None else above
        reader = [-1] * len(steps)
        for n, need in enumerate(needs):
            if need >= 0:
                reader[need] = n
        return cls(
            host=order.host,
            steps=steps,
            lanes=lanes,
            seconds=[costs.seconds(step) for step in steps],
            needs=needs,
            lag=[
                costs.communication if need >= 0 and order.host[steps[need].stage] != order.host[step.stage] else 0.0
                for step, need in zip(steps, needs, strict=True)
            ],
            reader=reader,
            own=own,
            grows=[{"F": 1, "I": 0, "W": -1, "B": -1}[step.kind] for step in steps],
            end=[-1.0] * len(steps),
        )

    def run(self) -> float:
        """Sets `end` of every step and returns the last. Raises ValueError if the lists wait for each other."""
        span = self.time()
        if span is None:
            stuck = [str(self.steps[next(n for n in lane if self.end[n] < 0)]) for lane in self.lanes if self.end[lane[-1]] < 0]
            raise ValueError(f"the compute order cannot run: {', '.join(stuck)} wait for steps that come later")
        return span

    def time(self) -> float | None:
        """As `run`, but None if the lists wait for each other."""
        needs, lag, seconds, reader, own = self.needs, self.lag, self.seconds, self.reader, self.own
        self.end = end = [-1.0] * len(self.steps)
        position, free = [0] * len(self.lanes), [0.0] * len(self.lanes)
        waiting = [-1] * len(self.steps)
        todo = list(range(len(self.lanes)))
        done = 0
        while todo:
            rank = todo.pop()
            lane, at, now = self.lanes[rank], position[rank], free[rank]
            first = at
            while at < len(lane):
                n = lane[at]
                if own[n] >= 0 and end[own[n]] < 0:
                    break  # it comes later in this very list
                need = needs[n]
                if need >= 0:
                    ready = end[need]
                    if ready < 0:
                        waiting[need] = rank
                        break
                    ready += lag[n]
                    if ready > now:
                        now = ready
                now += seconds[n]
                end[n] = now
                at += 1
                if reader[n] >= 0 and waiting[n] >= 0:
                    todo.append(waiting[n])
            done += at - first
            position[rank], free[rank] = at, now
        return max(free) if done == len(self.steps) else None

    def peak(self, rank: int) -> int:
        held = most = 0
        for n in self.lanes[rank]:
            held += self.grows[n]
            if held > most:
                most = held
        return most

    def order(self) -> Order:
        return Order(self.host, tuple(tuple(self.steps[n] for n in lane) for lane in self.lanes))


def bound(host: Sequence[int], microbatches: int, costs: Costs, limit: float | None = None) -> float:
    """A span that no order on this placement beats; `limit` is the most activations of a rank, each of one stage.

    The largest of: a rank's work after the first activation can reach it; its backward work after the first gradient can; all
    backwards of a stage after that, and the way of the last gradient to the first stage; and, under a limit, the time for which
    a rank must hold its activations in all, divided by how many it may hold at once. Each F of a stage is after those before
    it, so the bounds hold for orders that reorder microbatches too.
    """
    stages, m = range(len(host)), microbatches
    hop = [costs.communication if host[s] != host[s + 1] else 0.0 for s in stages[:-1]]
    head = [0.0]  # when the first F of a stage can start
    for s in stages[:-1]:
        head.append(head[-1] + costs.F[s] + hop[s])
    back = [0.0] * len(host)  # how long after F of a stage its I can start
    for s in reversed(stages[:-1]):
        back[s] = hop[s] + costs.F[s + 1] + back[s + 1] + costs.I[s + 1] + hop[s]
    tail = [costs.W[0]]  # what comes after the last I of a stage
    for s in stages[1:]:
        tail.append(max(costs.W[s], hop[s - 1] + costs.I[s - 1] + tail[s - 1]))
    least = [head[s] + costs.F[s] + back[s] + m * costs.I[s] + tail[s] for s in stages]
    # The last I of a stage is also after the last F of every stage before and the way back from there.
    least += [head[s] + m * costs.F[s] + back[s] + costs.I[s] + tail[s] for s in stages]
    for rank in set(host):
        mine = [s for s in stages if host[s] == rank]
        first = min(head[s] for s in mine)
        least.append(first + m * sum(costs.F[s] + costs.I[s] + costs.W[s] for s in mine))
        least.append(min(head[s] + costs.F[s] + back[s] for s in mine) + m * sum(costs.I[s] + costs.W[s] for s in mine))
        if limit is not None:
            held = sum(costs.F[s] + back[s] + costs.I[s] + costs.W[s] for s in mine)
            least.append(first + m * held / limit)
    return max(least)
