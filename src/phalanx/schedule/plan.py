"""A schedule made for one model: stages balanced by cost, and the order that `pipeline.auto` finds for what they cost."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.schedule.balance import Stages, costs_of, stages
from phalanx.schedule.pipeline.auto import auto
from phalanx.schedule.pipeline.evaluate import Costs, evaluate
from phalanx.schedule.pipeline.order import Order
from phalanx.schedule.view import View


def planned(
    view: View,
    pp: int,
    microbatches: int,
    chunks: int | None = None,
    seconds: Mapping[int, float] | None = None,
    memory: float | None = None,
) -> tuple[Order, Stages]:
    """The order with the smallest simulated span over one or two stages a rank, and the segments of each stage.

    A segment's cost is divided over F, I and W as its flops are; without any, as 1, 1 and 0. Messages take no time here: their
    latency depends on the machine, which a View does not know. Raises ValueError as `auto` and `stages` do.
    """
    found = []
    for count in (1, 2) if chunks is None else (chunks,):
        if pp * count > len(view.segments) and count > 1 and chunks is None:
            continue
        placed = stages(view, pp * count, seconds)
        prices = _prices(view, placed, seconds)
        order = auto(pp, microbatches, costs=prices, memory=memory, chunks=(count,))
        found.append((evaluate(order, Costs.of(prices, pp, count)).span, count, order, placed))
    _, _, order, placed = min(found, key=lambda each: each[:2])
    return order, placed


def _prices(view: View, placed: Stages, seconds: Mapping[int, float] | None) -> dict[str, list[float]]:
    """F, I and W of each stage."""
    costs = costs_of(view) if seconds is None else [seconds[k] for k in range(len(view.segments))]
    prices: dict[str, list[float]] = {kind: [] for kind in "FIW"}
    for stage in placed:
        for kind in prices:
            prices[kind].append(sum(costs[k] * _share(view.segments[k].flops, kind) for k in stage))
    return prices


def _share(flops: Mapping[str, float], kind: str) -> float:
    total = sum(flops.get(each, 0.0) for each in "FIW")
    return flops.get(kind, 0.0) / total if total else {"F": 0.5, "I": 0.5, "W": 0.0}[kind]
