"""Builds a compute order by simulating a step: whenever a rank is free, rules choose what it does next of what it could do.

The rules are those of Qi et al. 2023 (Zero Bubble, section 3.1: how deep to warm up, whether to fill a gap with W although
something else arrives soon, whether F or I goes first) with what more than one stage per rank needs: which of them goes first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from phalanx.schedule.pipeline.evaluate import Costs
from phalanx.schedule.pipeline.order import Order, Step


@dataclass(frozen=True)
class Rules:
    """What a free rank does next. Numbers are in units of pp microbatches over a rank's whole layer set unless they say another.

    prefer   what goes first if both could: I, F, or whichever the rank did not do last
    depth    most forwards of a rank whose I has not been
    split    memory is divided among the stages of a rank, by how long each must hold an activation
    taper    the depth falls from that on the first rank to 1/pp of it on the last, as in 1F1B
    pace     forwards of the first stage start no closer than that, in units of a rank's work for one microbatch
    backlog  W goes first when more than that are outstanding: 0 is W after each I
    patience a gap is filled with W if that delays what arrives next by at most that share of W
    F, I     order of the rank's stages: the deepest first, the shallowest first, or pp microbatches of each in turn
    """

    prefer: Literal["I", "F", "turns"] = "I"
    split: bool = False
    depth: float = 2.0
    taper: bool = False
    pace: float = 0.0
    backlog: float = math.inf
    patience: float = 0.0
    F: Literal["deep", "shallow", "groups"] = "groups"
    I: Literal["deep", "shallow", "groups"] = "groups"  # noqa: E741 (the name of the field)


SEEDS = (
    Rules(),
    Rules(prefer="turns", split=True, F="deep"),
    Rules(prefer="F", split=True, F="deep"),
    Rules(prefer="F", pace=1.0),
    Rules(prefer="F", pace=1.1),
    Rules(prefer="F", pace=1.2, F="shallow"),
)
"""Where to begin the search for rules: what was best for some costs, latencies and limits among 200 rules drawn by chance."""

CHOICES: Mapping[str, Sequence[Any]] = {
    "prefer": ("I", "F", "turns"),
    "patience": (0.0, 0.5, 1.0),
    "depth": (1.0, 1.25, 0.5, 0.75, 1.5, 2.0, 3.0, math.inf),
    "F": ("deep", "shallow", "groups"),
    "I": ("deep", "shallow", "groups"),
    "split": (False, True),
    "pace": (0.0, 1.0, 1.05, 1.1, 1.2),
    "taper": (False, True),
    "backlog": (0.0, 0.25, 0.5, 1.0, math.inf),
}
"""What is worth trying for each rule, in the order in which to try them."""

_FIRST: Mapping[str, Callable[[int, int, int], tuple[int, ...]]] = {
    # (stage counted in the direction of the pass, microbatch, pp) -> what is least goes first
    "deep": lambda s, j, pp: (-s, j),
    "shallow": lambda s, j, pp: (s, j),
    "groups": lambda s, j, pp: (j // pp, s, j),
}


class Listed(NamedTuple):
    order: Order
    span: float
    held: int
    """Most activations of a rank, each of one stage."""


def list_schedule(host: Sequence[int], microbatches: int, costs: Costs, limit: float, rules: Rules) -> Listed:
    """The order that the rules make on this placement. No rank holds more than `limit` activations, each of one stage.

    It always ends if the limit is at least the stages of a rank: `_admits` keeps what the oldest microbatch needs.
    """
    clock = _Clock(host, microbatches, costs, limit, rules)
    while clock.events:
        now, rank = heapq.heappop(clock.events)
        if clock.free[rank] <= now + clock.epsilon:
            clock.choose(rank, now)
    assert sum(map(len, clock.ranks)) == 3 * len(host) * microbatches, "list scheduling stopped before the end"
    return Listed(Order(tuple(host), tuple(map(tuple, clock.ranks))), max(clock.free), max(clock.most))


class _Clock:
    """nf, ni and nw count by stage the F, I and W that have begun; a stage takes its microbatches in turn."""

    def __init__(self, host: Sequence[int], microbatches: int, costs: Costs, limit: float, rules: Rules) -> None:
        self.host, self.m, self.costs, self.limit, self.rules = host, microbatches, costs, limit, rules
        self.pp = max(host) + 1
        self.mine = [[s for s, at in enumerate(host) if at == rank] for rank in range(self.pp)]
        self.chunks = len(host) // self.pp
        self.epsilon = 1e-9 * (max(costs.F) + max(costs.I) + max(costs.W) + costs.communication)
        work = max(sum(costs.F[s] + costs.I[s] + costs.W[s] for s in mine) for mine in self.mine)
        self.ready_f = [[rules.pace * work * j for j in range(microbatches)]]
        self.ready_f += [[math.inf] * microbatches for _ in host[1:]]
        self.ready_i = [[math.inf] * microbatches for _ in host]
        self.nf, self.ni, self.nw = ([0] * len(host) for _ in range(3))
        self.held, self.most = [0] * self.pp, [0] * self.pp
        self.free = [0.0] * self.pp
        self.last = ["I"] * self.pp
        self.ranks: list[list[Step]] = [[] for _ in range(self.pp)]
        whole = self.pp * self.chunks
        self.depth = [
            max(float(self.chunks), rules.depth * whole * ((self.pp - rank) / self.pp if rules.taper else 1.0))
            for rank in range(self.pp)
        ]
        self.share = _shares(self.mine, limit, _life(host, costs)) if rules.split else [math.inf] * len(host)
        self.backlog = rules.backlog * whole
        self.first_f, self.first_i = _FIRST[rules.F], _FIRST[rules.I]
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(self.pp)]
        self.events += [(at, host[0]) for at in self.ready_f[0] if rules.pace]

    def choose(self, rank: int, now: float) -> None:
        """Start a step, or none if waiting is better: what is waited for is an event already."""
        mine, m, nf, ni, nw = self.mine[rank], self.m, self.nf, self.ni, self.nw
        soon = now + self.epsilon
        weights = [s for s in mine if nw[s] < ni[s]]
        if weights and sum(ni[s] - nw[s] for s in weights) > self.backlog:
            return self._start_w(rank, weights, now)
        gradients = [s for s in mine if ni[s] < m and self.ready_i[s][ni[s]] <= soon]
        forward = self.rules.prefer == "F" or (self.rules.prefer == "turns" and self.last[rank] != "F")
        if gradients and not forward:
            return self._start_i(rank, gradients, now)
        ready = [s for s in mine if nf[s] < m and self.ready_f[s][nf[s]] <= soon]
        admitted = [s for s in ready if self._admits(rank, s)]
        if admitted:
            return self._start_f(rank, admitted, now)
        # F is due and only memory is missing, which W frees.
        if weights and ready and self.held[rank] >= self.limit:
            return self._start_w(rank, weights, now)
        if gradients:
            return self._start_i(rank, gradients, now)
        if weights and now + self.costs.W[weights[0]] * (1 - self.rules.patience) <= self._arrival(rank, soon) + self.epsilon:
            self._start_w(rank, weights, now)
        return None

    def _arrival(self, rank: int, soon: float) -> float:
        """When the next input comes that the rank could use, as far as that is known."""
        mine, m, nf, ni = self.mine[rank], self.m, self.nf, self.ni
        gradients = [self.ready_i[s][ni[s]] for s in mine if ni[s] < m]
        forwards = [
            self.ready_f[s][nf[s]] for s in mine if nf[s] < m and self.ready_f[s][nf[s]] > soon and self._admits(rank, s)
        ]
        return min(*gradients, *forwards, math.inf, math.inf)

    def _admits(self, rank: int, s: int) -> bool:
        """F of that stage fits, in memory and in depth, and leaves every microbatch in flight able to finish, oldest first.

        When those are done that need no more F here, what the next one and all after it hold, and what that one still needs,
        must fit: of each stage what it is ahead of the last stage, and at least 1.
        """
        nf, mine = self.nf, self.mine[rank]
        held, depth = self.held[rank] + 1, self.depth[rank]
        if held > self.limit or nf[s] - self.nw[s] >= self.share[s]:
            return False
        in_flight = 1
        for k in mine:
            in_flight += nf[k] - self.ni[k]
        if in_flight > depth:
            return False
        if len(mine) == 1:
            return True
        ahead = [nf[k] + (k == s) for k in mine]
        last = min(ahead)
        return sum([max(done - last, 1) for done in ahead]) <= min(self.limit, depth)

    def _start_f(self, rank: int, stages: Sequence[int], now: float) -> None:
        s = min(stages, key=lambda s: self.first_f(s, self.nf[s], self.pp)) if len(stages) > 1 else stages[0]
        end = self._start(rank, Step("F", s, self.nf[s]), now + self.costs.F[s])
        self.held[rank] += 1
        self.most[rank] = max(self.most[rank], self.held[rank])
        self.last[rank] = "F"
        if s + 1 < len(self.host):
            self._send(self.ready_f, s, s + 1, self.nf[s], end)
        else:
            self.ready_i[s][self.nf[s]] = end
        self.nf[s] += 1

    def _start_i(self, rank: int, stages: Sequence[int], now: float) -> None:
        last = len(self.host) - 1
        s = min(stages, key=lambda s: self.first_i(last - s, self.ni[s], self.pp)) if len(stages) > 1 else stages[0]
        end = self._start(rank, Step("I", s, self.ni[s]), now + self.costs.I[s])
        self.last[rank] = "I"
        if s:
            self._send(self.ready_i, s, s - 1, self.ni[s], end)
        self.ni[s] += 1

    def _start_w(self, rank: int, stages: Sequence[int], now: float) -> None:
        s = min(stages, key=lambda s: self.nw[s])
        self._start(rank, Step("W", s, self.nw[s]), now + self.costs.W[s])
        self.held[rank] -= 1
        self.nw[s] += 1

    def _start(self, rank: int, step: Step, end: float) -> float:
        self.ranks[rank].append(step)
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))
        return end

    def _send(self, ready: list[list[float]], source: int, target: int, j: int, end: float) -> None:
        at = self.host[target]
        ready[target][j] = arrives = end + (self.costs.communication if at != self.host[source] else 0.0)
        heapq.heappush(self.events, (arrives, at))


def _life(host: Sequence[int], costs: Costs) -> list[float]:
    """The least time for which each stage must hold an activation: until its gradient is back, and I and W are done."""
    held = [0.0] * len(host)
    for s in reversed(range(len(host))):
        above = 0.0
        if s + 1 < len(host):
            hop = costs.communication if host[s] != host[s + 1] else 0.0
            above = held[s + 1] - costs.W[s + 1] + 2 * hop
        held[s] = costs.F[s] + above + costs.I[s] + costs.W[s]
    return held


def _shares(mine: Sequence[Sequence[int]], limit: float, held: Sequence[float]) -> list[float]:
    """Activations of each stage, in proportion to `held`, that add up to the limit on each rank; at least one each."""
    shares = [0.0] * len(held)
    for stages in mine:
        left, total = int(limit) - len(stages), sum(held[s] for s in stages) or 1.0
        exact = {s: left * held[s] / total for s in stages}
        for s in stages:
            shares[s] = 1 + int(exact[s])
        rest = int(limit) - int(sum(shares[s] for s in stages))
        for s in sorted(stages, key=lambda s: int(exact[s]) - exact[s])[:rest]:
            shares[s] += 1
    return shares
