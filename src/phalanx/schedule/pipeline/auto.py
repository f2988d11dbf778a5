"""Plans a pipeline schedule by cost: the best of the named schedules, of what rules of list scheduling make, and of changes to both.

No formula knows the best order for unequal costs, slow messages and little memory, so many orders are made and timed, by
`evaluate`. The search is a function of its arguments alone: no clock and no chance, so every rank finds the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.schedule import pipeline
from phalanx.schedule.pipeline.evaluate import Costs, Prices, bound, evaluate
from phalanx.schedule.pipeline.improve import fuse, improve, split
from phalanx.schedule.pipeline.list_scheduling import CHOICES, SEEDS, Rules, list_schedule
from phalanx.schedule.pipeline.order import Order, loop, vee

SLIP = 1e-9
"""Relative difference below which two spans are one."""

TRIALS = 40
"""Rules that are tried on each placement."""

REHEARSAL = 2
"""Microbatches with which rules are compared, in units of pp: what more of them add is one period after another."""

FINALISTS = 3
"""Of the rules, how many are compared with all microbatches."""

IMPROVED = 3
"""Orders that are improved step by step, the best first."""

EVALUATIONS, LEAST_TRIES = 300_000, 30
"""Steps that are timed to improve one order, and how many orders that is at least."""


def auto(
    pp: int,
    microbatches: int,
    *,
    costs: Prices,
    communication: float = 0.0,
    memory: float | None = None,
    chunks: Sequence[int] = (1, 2),
) -> Order:
    """The order with the smallest span that was found; never a larger one than that of a named schedule within the limits.

    costs          F, I and W, in any one unit: of a rank's whole layer set, or of equal runs of the model in order (`Prices`)
    communication  time of one message between two ranks, in the same unit
    memory         most activations of a rank, in units of one microbatch over its whole layer set; None for no limit. They are
                   held from the start of F to the end of W or B
    chunks         stages of a rank that may be used: as loops, and for 2 as a V. Each gets an equal share of the rank's layers

    The span is global: from the first step of any rank to the last of any. Of equal spans the order with the lower peak wins.
    All stages' activations count alike, 1/chunks each, also where their costs differ.
    Schedules of two copies of the model (DualPipe) are not considered. Raises ValueError for a memory below 1, the activations
    that every rank holds when one microbatch's backward begins, and for costs that cannot be cut into pp x chunks stages.
    """
    if pp < 1 or microbatches < 1:
        raise ValueError(f"a step needs at least 1 stage and 1 microbatch, not pp={pp} and microbatches={microbatches}")
    if not chunks or min(chunks) < 1:
        raise ValueError(f"chunks are the numbers of stages that a rank may have, each at least 1, not {tuple(chunks)}")
    if memory is not None and not memory >= 1 - SLIP:
        raise ValueError(f"a memory of {memory} is infeasible: the least is 1, one microbatch over a rank's whole layer set")
    problems = list(_problems(pp, microbatches, costs, communication, memory, sorted(set(chunks))))
    if pp == 1:
        return pipeline.compute_order("1f1b", 1, microbatches)
    found: list[_Found] = []
    for problem in problems:
        found += [named for named in map(problem.found, _named(problem)) if named.held <= problem.limit]
        if not found or problem.bound < min(each.span for each in found) * (1 - SLIP):
            found.append(_scheduled(problem))
    found.sort(key=_Found.rank)
    for each in found[:IMPROVED]:
        if each.span > each.problem.bound * (1 + SLIP):
            found.append(each.problem.found(_improved(each)))
    best = min(found, key=_Found.rank)
    return fuse(best.order, best.problem.costs)


@dataclass(frozen=True)
class _Problem:
    """One placement of the stages, with what they cost and how many of their activations fit on a rank."""

    host: tuple[int, ...]
    microbatches: int
    costs: Costs
    limit: float
    chunks: int

    @property
    def pp(self) -> int:
        return len(self.host) // self.chunks

    @property
    def most(self) -> int:
        return self.microbatches * self.chunks

    def schedule(self, rules: Rules) -> _Found:
        listed = list_schedule(self.host, self.microbatches, self.costs, self.limit, rules)
        # Paced forwards wait although they could start; without that the same order can be shorter.
        return self.found(listed.order) if rules.pace else _Found(self, *listed)

    @property
    def bound(self) -> float:
        return bound(self.host, self.microbatches, self.costs, self.limit)

    def found(self, order: Order) -> _Found:
        result = evaluate(order, self.costs)
        return _Found(self, order, result.span, max(result.peak))


@dataclass(frozen=True)
class _Found:
    problem: _Problem
    order: Order
    span: float
    held: int

    def rank(self) -> tuple[float, float, int]:
        """What is less is better: the span, then the activations held, then the stages."""
        return (float(f"{self.span:.9e}"), self.held / self.problem.chunks, self.problem.chunks)


def _problems(
    pp: int, microbatches: int, prices: Prices, communication: float, memory: float | None, chunks: Sequence[int]
) -> Iterator[_Problem]:
    parts = {len(price) for price in prices.values() if not isinstance(price, (int, float))}
    fitting = [count for count in chunks if not any(part % (pp * count) for part in parts)] or chunks
    for count in fitting:
        costs = Costs.of(prices, pp, count, communication)
        most = microbatches * count
        limit = most if memory is None else min(most, math.floor(memory * count * (1 + SLIP)))
        for host in (loop(pp, count), vee(pp))[: 1 + (count == 2)]:
            yield _Problem(host, microbatches, costs, limit, count)


def _named(problem: _Problem) -> Iterator[Order]:
    for name, row in pipeline.SCHEDULES.items():
        if row.copies == 1 and (row.any_chunks or row.chunks == problem.chunks):
            order = pipeline.compute_order(name, problem.pp, problem.microbatches, problem.chunks)
            if order.host == problem.host:
                yield split(order)


def _scheduled(problem: _Problem) -> _Found:
    """What the best rules make: of the seeds, and of changing one rule of the best at a time as long as that helps."""
    rehearsal = replace(problem, microbatches=min(problem.microbatches, REHEARSAL * problem.pp))
    tried: dict[Rules, tuple[float, float, int]] = {}

    def rank(rules: Rules) -> tuple[float, float, int]:
        if rules not in tried:
            tried[rules] = rehearsal.schedule(rules).rank()
        return tried[rules]

    best = min(SEEDS, key=rank)
    idle = {"F", "I", "split"} if problem.chunks == 1 else {"split"} if problem.limit == problem.most else set()
    before = None
    while best != before and len(tried) < TRIALS:
        before = best
        for name, choices in CHOICES.items():
            if name not in idle and len(tried) < TRIALS and rank(best)[0] > rehearsal.bound * (1 + SLIP):
                best = min((best, *(replace(best, **{name: choice}) for choice in choices)), key=rank)
    finalists = sorted(tried, key=rank)[:FINALISTS]
    return min((problem.schedule(rules) for rules in finalists), key=_Found.rank)


def _improved(found: _Found) -> Order:
    steps = 3 * len(found.order.host) * found.problem.microbatches
    return improve(found.order, found.problem.costs, found.problem.limit, max(LEAST_TRIES, EVALUATIONS // steps))
