"""An order that cannot run is told with a circle that is one, and no order that can run is refused."""

from __future__ import annotations

import random
import re

import pytest

from phalanx.schedule.check import ScheduleError
from phalanx.schedule.circle import check_runs
from phalanx.schedule.pipeline import Order, Step, compute_order, times
from phalanx.schedule.study import Prices, study


def shuffled(order: Order, swaps: int, seed: int) -> Order:
    """Some neighbours on some ranks in the other order."""
    choose = random.Random(seed)
    ranks = [list(steps) for steps in order.ranks]
    for _ in range(swaps):
        steps = choose.choice(ranks)
        at = choose.randrange(len(steps) - 1)
        steps[at], steps[at + 1] = steps[at + 1], steps[at]
    return Order(order.host, tuple(map(tuple, ranks)), order.copies)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe"])
def test_refused_are_exactly_the_orders_that_stop(name: str) -> None:
    outcomes = set()
    for seed in range(40):
        order = shuffled(compute_order(name, 2, 4), swaps=1 + seed % 4, seed=seed)
        try:
            times(order.ranks, copies=order.copies)
            runs = True
        except ValueError:
            runs = False
        if runs:
            check_runs(order)
        else:
            with pytest.raises(ScheduleError, match="deadlock") as caught:
                check_runs(order)
            assert is_circle(order, caught.value.cycle)
        outcomes.add(runs)
    assert outcomes == {True, False}


def is_circle(order: Order, cycle: tuple[str, ...]) -> bool:
    """Whether each waits for the next: because its rank does that one just before it, or because it reads what that one makes."""
    length = len(order.host) // order.copies
    named: dict[str, tuple[int, int, Step]] = {}
    for at, steps in enumerate(order.ranks):
        for place, step in enumerate(steps):
            named[f"pp {at} {step._replace(stage=step.stage % length)}"] = (at, place, step)
    found = [named[name] for name in cycle]
    return len(cycle) == len(set(cycle)) and all(waits(a, b) for a, b in zip(found, [*found[1:], found[0]], strict=True))


def waits(a: tuple[int, int, Step], b: tuple[int, int, Step]) -> bool:
    (at, place, step), (other_at, other_place, other) = a, b
    if at == other_at and place == other_place + 1:
        return True
    if step.microbatch != other.microbatch:
        return False
    return {
        "F": other.kind == "F" and other.stage == step.stage - 1,
        "W": other.kind == "I" and other.stage == step.stage,
    }.get(
        step.kind, (other.kind == "F" and other.stage == step.stage) or (other.kind in "BI" and other.stage == step.stage + 1)
    )


def test_the_circle_is_the_shortest() -> None:
    steps = [Step("F", 0, 0), Step("B", 0, 0)]
    backward_first = Order((0,), ((steps[1], steps[0]),))
    with pytest.raises(ScheduleError) as caught:
        check_runs(backward_first)
    assert set(caught.value.cycle) == {"pp 0 B0.0", "pp 0 F0.0"}


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (((Step("F", 0, 0), Step("B", 0, 0)), (Step("B", 1, 0),)), "pp 1 B1.0 waits for F1.0, which no rank lists"),
        (((Step("F", 0, 0), Step("F", 0, 0)), ()), "pp 0 F0.0 is listed more than once"),
        (((Step("F", 1, 0),), ()), "pp 0 lists F1.0, but has the stages [0]"),
    ],
)
def test_a_list_that_is_no_step_is_told(ranks: tuple[tuple[Step, ...], ...], said: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(said)) as caught:
        check_runs(Order((0, 1), ranks))
    assert caught.value.cycle == ()


def test_costs_are_of_all_layers_of_a_rank() -> None:
    prices = Prices.parse("2, 3, 1, 0.5")
    assert prices == Prices(2, 3, 1, 0.5)
    for name in ("1f1b", "interleaved", "zb-v", "dualpipe"):
        found = study(compute_order(name, 2, 4), 4, prices, name)
        busy = sum(event.end - event.start for event in found.events if event.lane == "compute" and event.rank == 0)
        assert busy == pytest.approx(4 * (2 + 3 + 1))
    sent = [e for e in found.events if e.name.startswith("SEND")]
    assert {e.end - e.start for e in sent} == {0.5} and all(e.bytes == 1 for e in sent)
