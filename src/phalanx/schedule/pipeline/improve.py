"""Improves a compute order that exists already, by small changes that are kept only if they pay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from phalanx.schedule.pipeline.evaluate import Costs, Numbered
from phalanx.schedule.pipeline.order import Order, Step

NEAR = 4
"""How many places along its block a step is moved at most, besides to the ends of the block."""


def improve(order: Order, costs: Costs, limit: float, tries: int) -> Order:
    """Moves steps along the critical path, as in job shops (Dell'Amico and Trubian 1993), until nothing helps.

    A block is a run of steps of one rank on the critical path. The span can only fall if some block's last step goes before
    another of its steps or its first step goes after one. W is also moved behind its whole block. Kept is what lowers the span
    or, at an equal span, the sum of all ends; nothing that makes a rank hold more than `limit` activations. At most `tries`
    orders are evaluated.
    """
    now = Numbered.of(order, costs)
    span = now.run()
    slip = 1e-9 * span
    total = sum(now.end)
    left = tries
    while left > 0:
        ends = now.end
        for rank, source, target in list(_moves(now, span, slip)):
            if left == 0:
                break
            lane = now.lanes[rank]
            lane.insert(target, lane.pop(source))
            if now.peak(rank) <= limit:
                left -= 1
                tried = now.time()
                if tried is not None:
                    less = sum(now.end)
                    if tried < span - slip or (tried <= span and less < total - slip):
                        span, total = tried, less
                        break
            lane.insert(source, lane.pop(target))
            now.end = ends
        else:
            break
    return now.order()


def _moves(now: Numbered, span: float, slip: float) -> Iterator[tuple[int, int, int]]:
    """(rank, place of a step in its list, where to put it) that could shorten the critical path, its end first."""
    place = {n: at for lane in now.lanes for at, n in enumerate(lane)}
    rank = next(r for r, lane in enumerate(now.lanes) if lane and now.end[lane[-1]] >= span - slip)
    last = len(now.lanes[rank]) - 1
    final = True
    while last >= 0:
        lane, first = now.lanes[rank], last
        while not (arrived := _arrived(now, lane[first], slip)) and first:
            first -= 1
        if not final:
            for at in range(last - 1, first - 1, -1):
                if now.steps[lane[at]].kind == "W":
                    yield rank, at, last
            for at in {first, *range(max(first, last - NEAR), last)}:
                yield rank, last, at
        if arrived:
            for at in {last, *range(first + 1, min(last, first + NEAR) + 1)}:
                if at > first:
                    yield rank, first, at
        else:
            return
        need = now.needs[lane[first]]
        rank, last, final = now.host[now.steps[need].stage], place[need], False


def _arrived(now: Numbered, n: int, slip: float) -> bool:
    """Whether the step started when a message came, rather than when its rank was free."""
    need = now.needs[n]
    if need < 0 or now.host[now.steps[need].stage] == now.host[now.steps[n].stage]:
        return False
    return now.end[need] + now.lag[n] >= now.end[n] - now.seconds[n] - slip


def split(order: Order) -> Order:
    """Every B as its I and W."""
    parts = {"B": ("I", "W")}
    return Order(
        order.host,
        tuple(
            tuple(Step(part, s, j) for kind, s, j in rank for part in parts.get(kind, (kind,)))  # type: ignore[arg-type]
            for rank in order.ranks
        ),
    )


def fuse(order: Order, costs: Costs) -> Order:
    """W that comes right after its I becomes one B with it, wherever that lengthens nothing.

    B sends its gradient at its end, W later than I would have. It may if the reader starts late enough anyway, when all steps
    start as soon as they can, or when all of them start as late as the span allows. Each of the two sets can be fused whole.
    """
    while True:
        now = Numbered.of(order, costs)
        span = now.run()
        before = sum(map(len, order.ranks))
        for end in (now.end, _latest(now, span)):
            order = _fused(now, end, order)
            if sum(map(len, order.ranks)) < before:
                break
        else:
            return order


def _fused(now: Numbered, end: list[float], order: Order) -> Order:
    slip = 1e-9 * max(end)
    ranks = []
    for lane in now.lanes:
        steps: list[Step] = []
        for n in lane:
            kind, s, j = now.steps[n]
            before = steps[-1] if steps else None
            if kind == "W" and before == Step("I", s, j):
                reader = now.reader[now.own[n]]
                if reader < 0 or end[n] + now.lag[reader] <= end[reader] - now.seconds[reader] + slip:
                    steps[-1] = Step("B", s, j)
                    continue
            steps.append(now.steps[n])
        ranks.append(tuple(steps))
    return Order(order.host, tuple(ranks))


def _latest(now: Numbered, span: float) -> list[float]:
    """The latest end of every step that still ends the whole at `span`."""
    end = [span] * len(now.steps)
    following: dict[int, int] = {}
    for lane in now.lanes:
        following.update(itertools.pairwise(lane))
    for n in sorted(range(len(now.steps)), key=lambda n: (now.end[n], now.end[n] - now.seconds[n]), reverse=True):
        if (after := following.get(n)) is not None:
            end[n] = end[after] - now.seconds[after]
        if (reader := now.reader[n]) >= 0:
            end[n] = min(end[n], end[reader] - now.seconds[reader] - now.lag[reader])
    return end
