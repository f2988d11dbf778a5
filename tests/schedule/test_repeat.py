"""Steps in a row: what a barrier before the optimizer costs, in closed form, and what the proof knows of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from phalanx.schedule import build
from phalanx.schedule.account import account
from phalanx.schedule.check import ScheduleError, check
from phalanx.schedule.repeat import repeated
from phalanx.schedule.simulate import Costs, Link, simulate

from .test_simulate import even
from .toys import toy


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 12), (8, 24)])
def test_a_zero_bubble_schedule_has_none_without_a_barrier(pp: int, m: int) -> None:
    """Qi et al. 2023: steps of ZB-H2 follow each other by m (tF + tI + tW) and the optimizer; with a barrier p-1 more, and its time."""
    update, latency = 0.5, 0.0625
    periods, shares = {}, {}
    for late in (False, True):
        view = replace(toy(pp), late=late)
        schedule = build(view, "zb-h2", pp, m)
        for channel in ("edge", "host"):
            check(schedule, view, channel)
        costs = Costs({**even(view), ("OPT", None): update}, {"wire": Link(latency)}, {"world": "wire"})
        spans = []
        for steps in (1, 2, 3):
            row = repeated(schedule, steps)
            found = account(row, view, simulate(row, view, costs))
            spans.append(found.span_seconds)
            if steps == 1:
                shares[late] = found.idle["barrier"]
        periods[late] = [spans[1] - spans[0], spans[2] - spans[1]]
    assert periods[True] == [3 * m + update] * 2
    assert periods[False] == [3 * m + (pp - 1) + update + 2 * math.ceil(math.log2(pp)) * latency] * 2
    assert shares[False] > 0 == shares[True]


def test_the_proof_knows_whether_there_is_a_barrier() -> None:
    view = toy(4)
    late = replace(view, late=True)
    schedule = build(late, "zb-h2", 4, 8)
    needs = {schedule.ranks[0][need].kind for need in next(a for a in schedule.ranks[0] if a.kind == "OPT").needs}
    assert schedule.late and "NORM" not in needs and "COUNT" in needs
    with pytest.raises(ScheduleError, match="OPT does not wait for NORM, although both use norm"):
        check(schedule, view)
    check(build(view, "zb-h2", 4, 8), late)  # waiting longer is no mistake


def test_repeating_needs_a_step() -> None:
    with pytest.raises(ValueError, match="0 steps cannot be put in a row"):
        repeated(build(toy(2), "1f1b", 2, 2), 0)
