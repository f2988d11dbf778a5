"""Predicted times against closed forms and hand arithmetic; idle time explained."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from phalanx.schedule import build
from phalanx.schedule.account import REASONS, account
from phalanx.schedule.check import ScheduleError, check
from phalanx.schedule.lower import lower
from phalanx.schedule.simulate import Costs, Link, simulate
from phalanx.schedule.values import Values, link
from phalanx.schedule.view import Gathered, View

from .test_check import gathered, late_receives, mutate, split, variants
from .toys import toy


def even(view: View, f: float = 1.0, b: float = 2.0, i: float = 1.0, w: float = 1.0) -> dict:
    """Costs with which all stages of one block are equal: the prologue and the epilogue take no time."""
    ends = (0, view.last)
    return {
        (kind, k): 0.0 if k in ends else cost
        for kind, cost in zip("FBIW", (f, b, i, w), strict=True)
        for k in range(view.last + 1)
    }


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "m"), [(1, 4), (2, 1), (4, 2), (4, 8), (8, 32)])
def test_bubble_is_the_closed_form(name: str, pp: int, m: int) -> None:
    view = toy(pp, dp=2)
    schedule = build(view, name, pp, m)
    found = account(schedule, view, simulate(schedule, view, Costs(even(view))))
    assert found.span_seconds == 3 * (m + pp - 1)
    assert found.bubble_global == pytest.approx((pp - 1) / (m + pp - 1), rel=1e-12)  # sums of small integers in float64
    # Rank 0 begins first and ends last, so its own bubble is the whole one; the last rank of 1F1B is never idle.
    assert found.bubble_own[0] == pytest.approx((pp - 1) / (m + pp - 1), rel=1e-12)
    assert name == "gpipe" or found.bubble_own[-1] == 0
    if pp > 1:
        # Half of the bubble on each side of the middle for 1F1B; all of it is filling and emptying the pipeline.
        assert found.idle["warm-up"] + found.idle["drain"] == pytest.approx(1, rel=1e-12)


def test_zero_bubble_is_the_closed_form() -> None:
    """Qi et al. 2023: ZB-H1 has a bubble of (p-1)(tF + tI - tW)."""
    for pp, m, f, i, w in ((4, 8, 1, 1, 1), (4, 12, 2, 3, 2)):
        view = toy(pp)
        schedule = lower(
            view, split("zero bubble", pp, m), [(0, 1), *((r + 1,) for r in range(1, pp - 1)), (pp, pp + 1)], m, "zb"
        )
        check(schedule, view, "host")
        found = account(schedule, view, simulate(schedule, view, Costs(even(view, f, 0, i, w))))
        assert found.span_seconds == m * (f + i + w) + (pp - 1) * (f + i - w)


def test_message_time_is_latency_and_bytes() -> None:
    view = toy(2)  # a cut of 64 bytes
    costs = Costs(even(view), {"wire": Link(0.5, 256)}, {"pp": "wire"})
    schedule = build(view, "1f1b", 2, 1)
    events = {event.name + f"@{event.rank}": event for event in simulate(schedule, view, costs)}
    # F1 ends at 1, its message takes 0.5 + 64/256; F2 and B2 take 1 and 2; then the gradient takes as long again.
    assert (events["SEND_F1.0@0"].start, events["SEND_F1.0@0"].end) == (1.0, 1.75)
    assert events["F2.0@1"].start == 1.75 and events["B1.0@0"].start == 1.75 + 3 + 0.75
    assert events["SEND_F1.0@0"].bytes == 64 and events["SEND_F1.0@0"].axis == "pp"


def test_collective_time_is_that_of_an_all_reduce() -> None:
    view = toy(1, blocks=1, dp=4)
    costs = Costs(even(view), {"net": Link(0.25, 100)}, {"reduce": "net"})
    events = {event.name: event for event in simulate(build(view, "1f1b", 1, 1), view, costs)}
    # Over 4 ranks 2 x 3/4 of the bytes leave each rank, after 2 log2(4) latencies. REDUCE2 (300 bytes) begins at 1, when B2 is
    # done, and ends 4 x 0.25 + 450/100 later. REDUCE1 queues behind it in the lane of dp.
    assert (events["REDUCE2"].start, events["REDUCE2"].end) == (1.0, 1 + 1 + 4.5)
    assert events["REDUCE1"].start == 6.5 and events["REDUCE1"].end == pytest.approx(6.5 + 1 + 3, abs=1e-12)
    assert events["OPT"].start == events["NORM"].end == events["REDUCE0"].end == pytest.approx(10.5 + 1 + 1.5, abs=1e-12)


def test_lanes_on_one_link_share_its_bandwidth() -> None:
    """A REDUCE of the first stage's block and the last message back use the same outgoing wire of rank 1 or not."""
    view = toy(2, blocks=2, dp=2, width=100)  # 800 bytes a cut
    schedule = build(view, "1f1b", 2, 1)
    alone = Costs(even(view), {"a": Link(0, 800), "b": Link(0, 400)}, {"pp": "a", "reduce": "b"})
    shared = replace(alone, links={"a": Link(0, 800)}, routes={"pp": "a", "reduce": "a"})
    ends = []
    for costs in (alone, shared):
        events = {(event.rank, event.name): event for event in simulate(schedule, view, costs)}
        ends.append((events[2, "SEND_B2.0"].end, events[2, "REDUCE3"].start, events[2, "REDUCE3"].end))
    # B2 ends at 5 and sends 800 bytes. REDUCE3, 400 bytes since 3, is over by then; REDUCE2 (300 bytes, 2 x 1/2 of them out)
    # starts at 5 too. On its own wire the message takes 800/800.
    assert ends[0][0] == 6.0
    # On one wire each has half: the 300 bytes of REDUCE2 last 0.75 s, in which 300 of the message go; the other 500 take 5/8.
    assert ends[1][0] == pytest.approx(5 + 0.75 + 0.625, abs=1e-12)


def test_compute_slows_while_bytes_move() -> None:
    view = toy(1, blocks=1, dp=2)
    costs = Costs({**even(view), ("B", 1): 2.0}, {"net": Link(0, 300)}, {"reduce": "net"}, slowdown=1.0)
    events = {event.name: event for event in simulate(build(view, "1f1b", 1, 1), view, costs)}
    # REDUCE2 moves 300 bytes for 1 s beside B1, which does half of its work then: 0.5 + 1.5 remaining seconds.
    assert (events["B1.0"].start, events["B1.0"].end) == (1.0, 1 + 1 + 1.5)


def test_every_idle_moment_has_a_reason() -> None:
    view = toy(4, dp=2, tied=True)
    schedule = build(view, "1f1b", 4, 6)
    slow = {key: cost * (3 if key[1] == 2 else 1) for key, cost in even(view).items()}
    links = {"wire": Link(0.1, 1000)}
    routes = dict.fromkeys(("pp", "reduce", "world", "count"), "wire")
    costs = Costs({**slow, ("OPT", None): 0.5}, links, routes)
    events = simulate(schedule, view, costs)
    found = account(schedule, view, events)
    assert sum(found.idle.values()) == pytest.approx(1, rel=1e-12)
    assert all(found.idle[reason] > 0 for reason in REASONS), found.idle
    busy = sum(event.end - event.start for event in events if event.lane == "compute")
    assert found.bubble_global == pytest.approx(1 - busy / (4 * found.span_seconds), rel=1e-12)
    # Without the slow stage imbalance is gone, without costs of communication so are waiting and barrier.
    fair = account(schedule, view, simulate(schedule, view, Costs(even(view), {"wire": Link(0, math.inf)}, routes)))
    assert fair.idle["imbalance"] == fair.idle["waiting"] == fair.idle["barrier"] == 0
    unfair = account(schedule, view, simulate(schedule, view, Costs(slow)))
    assert unfair.idle["imbalance"] > 0 and unfair.idle["waiting"] == 0
    assert "imbalance" in str(unfair)


def test_a_gather_that_comes_late_is_waiting() -> None:
    view = toy(1, blocks=2, dp=2)
    view = replace(
        view, segments=tuple(replace(segment, gathers=(Gathered((segment.name,), 200, ("dp",)),)) for segment in view.segments)
    )
    schedule = gathered(build(view, "1f1b", 1, 1), view)
    costs = Costs(Costs.units(view).seconds, {"net": Link(0, 100)}, {"gather": "net"})
    found = account(schedule, view, simulate(schedule, view, costs))
    # 8 gathers of half of 200 bytes at 100 bytes a second, none ahead of time, and 4 x (1 + 2) seconds of compute.
    assert found.span_seconds == 8 + 12 and found.idle["waiting"] == 1.0
    early = [a for a in schedule.ranks[0] if a.kind != "GATHER" and a.kind != "FREE"]
    position = {str(a): i for i, a in enumerate(early)}
    ahead = list(early)
    for k, before in ((3, "F1.0"), (2, "COUNT"), (1, "COUNT"), (0, "COUNT")):
        gather = next(a for a in schedule.ranks[0] if a.kind == "GATHER" and a.segment == k)
        ahead.insert(ahead.index(early[position[before]]) + 1, gather)
    for k in range(4):
        free = next(a for a in schedule.ranks[0] if a.kind == "FREE" and a.segment == k)
        ahead.insert(next(i for i, a in enumerate(ahead) if str(a) == f"B{k}.0") + 1, free)
    prefetched = replace(schedule, ranks=(link(Values.of(view, schedule.chains, 1), 0, ahead),))
    check(prefetched, view)
    # Gathered ahead, all but the first hide behind the forward before them, and nothing is gathered twice.
    assert account(prefetched, view, simulate(prefetched, view, costs)).span_seconds == 1 + 12


def test_simulation_stops_where_the_proof_says_deadlock() -> None:
    view = toy(2)
    schedule = late_receives(build(view, "1f1b", 2, 2))
    with pytest.raises(ValueError, match="cannot go on"):
        simulate(schedule, view, Costs.units(view), "host")
    simulate(schedule, view, Costs.units(view), "edge")


def test_simulation_ends_whenever_the_proof_holds() -> None:
    rng = random.Random(5)
    bases = variants()
    proved = 0
    for _ in range(300):
        schedule, view = rng.choice(bases)
        changed = mutate(schedule, rng)
        try:
            check(changed, view, "rank")
        except ScheduleError:
            continue
        proved += 1
        assert simulate(changed, view, Costs.units(view), "rank")
    assert proved > 30


def test_missing_cost_is_named() -> None:
    view = toy(2)
    with pytest.raises(ValueError, match="no cost is given for B of segment 3"):
        simulate(build(view, "1f1b", 2, 1), view, Costs({key: 1.0 for key in even(view) if key != ("B", 3)}))


def test_account_needs_every_event() -> None:
    view = toy(2)
    schedule = build(view, "1f1b", 2, 1)
    with pytest.raises(ValueError, match=r"1 actions of pp 1 have no event on rank 1, the first RECV_F1\.0"):
        account(schedule, view, [e for e in simulate(schedule, view, Costs.units(view)) if e.name != "RECV_F1.0"])
