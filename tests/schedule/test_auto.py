"""Planning by cost: the evaluator against longest paths, the plans against every order there is and every named schedule."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest
from tests.schedule.toys import toy

from phalanx.schedule.check import check
from phalanx.schedule.lower import lower
from phalanx.schedule.pipeline import SCHEDULES, Order, Step, compute_order, times
from phalanx.schedule.pipeline.auto import auto
from phalanx.schedule.pipeline.evaluate import Costs, bound, evaluate
from phalanx.schedule.pipeline.improve import fuse, improve, split
from phalanx.schedule.pipeline.list_scheduling import CHOICES, Rules, list_schedule
from phalanx.schedule.pipeline.order import loop, vee

TRIPLES = ((1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (1.0, 0.8, 0.6), (2.0, 1.0, 1.0))


def prices(triple: Sequence[float]) -> dict[str, float]:
    return dict(zip("FIW", triple, strict=True))


def longest_path(order: Order, costs: Costs) -> float:
    """The span by definition: no step starts before all that it needs, found by relaxing every edge until nothing changes."""
    chain = len(order.host) // order.copies
    steps = [step for rank in order.ranks for step in rank]
    there = set(steps)
    edges = [(a, b, 0.0) for rank in order.ranks for a, b in itertools.pairwise(rank)]
    for kind, s, j in steps:
        if kind == "F" and s % chain:
            hop = costs.communication * (order.host[s] != order.host[s - 1])
            edges.append((Step("F", s - 1, j), Step("F", s, j), hop))
        if kind in "IB" and (s + 1) % chain:
            above = Step("I", s + 1, j) if Step("I", s + 1, j) in there else Step("B", s + 1, j)
            edges.append((above, Step(kind, s, j), costs.communication * (order.host[s] != order.host[s + 1])))
    start = dict.fromkeys(steps, 0.0)
    changed = True
    while changed:
        changed = False
        for a, b, hop in edges:
            if start[a] + costs.seconds(a) + hop > start[b]:
                start[b] = start[a] + costs.seconds(a) + hop
                changed = True
    return max(start[step] + costs.seconds(step) for step in steps)


def held(order: Order) -> list[int]:
    """By rank: most activations, counted anew at each F."""
    most = []
    for rank in order.ranks:
        counts = [
            sum(step.kind == "F" for step in rank[: at + 1]) - sum(step.kind in "WB" for step in rank[: at + 1])
            for at in range(len(rank))
        ]
        most.append(max(counts))
    return most


def assert_complete(order: Order, microbatches: int) -> None:
    """Every F, and every B or I with W, of every stage and microbatch, once, on the stage's rank."""
    steps = [step for rank in split(order).ranks for step in rank]
    assert sorted(steps) == sorted(Step(k, s, j) for k in "FIW" for s in range(len(order.host)) for j in range(microbatches))  # type: ignore[arg-type]
    assert all(order.host[step.stage] == at for at, rank in enumerate(order.ranks) for step in rank)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("communication", [0.0, 0.3])
def test_the_span_is_the_longest_path_and_the_peak_is_what_is_held(name: str, communication: float) -> None:
    for triple in TRIPLES[:2]:
        order = compute_order(name, 4, 8)
        costs = Costs.of(prices(triple), 1, len(order.host), communication)
        found = evaluate(order, costs)
        assert found.span == pytest.approx(longest_path(order, costs), rel=1e-12)  # sums in another order
        assert list(found.peak) == held(order)
        assert sum(found.busy) == pytest.approx(8 * sum(triple) / order.copies)
        assert all(own <= found.span + 1e-9 for own in found.own)


def test_without_latency_the_span_is_that_of_times() -> None:
    order = compute_order("zb-v", 4, 8)
    ends = times(order.ranks, {"F": 0.5, "I": 0.5, "W": 0.5, "B": 1.0})
    assert evaluate(order, Costs.of(prices((1, 1, 1)), 4, 2)).span == max(end for _, end in ends.values()) == 25.5


def test_gpipe_with_latency_is_its_closed_form() -> None:
    # m + p - 1 forwards and backwards one after the other, and 2 (p - 1) messages on the way
    found = evaluate(compute_order("gpipe", 4, 8), Costs.of(prices((1, 1.5, 0.5)), 4, 1, 0.25))
    assert found.span == 11 * 3.0 + 6 * 0.25
    assert found.bubble == pytest.approx(1 - 8 * 3.0 / found.span)


def test_lists_that_wait_for_each_other_are_named() -> None:
    ranks = ((Step("F", 0, 0), Step("B", 0, 0)), (Step("B", 1, 0), Step("F", 1, 0)))
    with pytest.raises(ValueError, match=r"B0.0, B1.0 wait for steps that come later"):
        evaluate(Order((0, 1), ranks), Costs.of(prices((1, 1, 1)), 2, 1))


def every_rank(stages: Sequence[int], microbatches: int) -> list[tuple[Step, ...]]:
    """All lists of one rank in which W is after I and I after F of the same stage and microbatch."""
    chains = [[Step(k, s, j) for k in "FIW"] for s in stages for j in range(microbatches)]  # type: ignore[arg-type]

    def merged(left: list[list[Step]]) -> Iterator[tuple[Step, ...]]:
        if not any(left):
            yield ()
        for at, chain in enumerate(left):
            if chain:
                for rest in merged([*left[:at], chain[1:], *left[at + 1 :]]):
                    yield (chain[0], *rest)

    return list(merged(chains))


@pytest.mark.parametrize(
    ("host", "microbatches"), [((0, 1), 2), ((0, 1, 1, 0), 1), ((0, 1, 0, 1), 1)], ids=["chain", "v", "loop"]
)
@pytest.mark.parametrize("triple", [*TRIPLES, (1.0, 2.0, 0.25)])
def test_a_small_plan_is_the_best_of_all_orders(host: tuple[int, ...], microbatches: int, triple: Sequence[float]) -> None:
    pp, chunks = 2, len(host) // 2
    lists = [every_rank([s for s, at in enumerate(host) if at == rank], microbatches) for rank in range(pp)]
    for communication, memory in itertools.product((0.0, 0.1, 0.5, 3.0), (None, 1)):
        costs = Costs.of(prices(triple), pp, chunks, communication)
        limit = chunks * (memory or microbatches)
        fitting = [[steps for steps in some if held(Order(host, (steps,)))[0] <= limit] for some in lists]
        best = float("inf")
        for ranks in itertools.product(*fitting):
            try:
                best = min(best, evaluate(Order(host, ranks), costs).span)
            except ValueError:
                continue  # the lists wait for each other
        assert bound(host, microbatches, costs, limit) <= best + 1e-9
        plan = auto(pp, microbatches, costs=prices(triple), communication=communication, memory=memory, chunks=(chunks,))
        # The plan may use the other placement of two stages a rank.
        found = evaluate(plan, costs).span
        assert found == pytest.approx(best) if plan.host == host else found <= best + 1e-9


def best_named(pp: int, microbatches: int, triple: Sequence[float], communication: float, memory: float | None) -> float:
    """The least span of the schedules of one copy with at most two stages a rank whose activations fit."""
    spans = [float("inf")]
    for name, row in SCHEDULES.items():
        for chunks in (1, 2) if row.any_chunks else (row.chunks,):
            if row.copies == 1:
                order = compute_order(name, pp, microbatches, chunks)
                found = evaluate(order, Costs.of(prices(triple), pp, chunks, communication))
                if memory is None or max(found.peak) <= memory * chunks:
                    spans.append(found.span)
    return min(spans)


def compare(pp: int, microbatches: int, triple: Sequence[float], communication: float, memory: float | None) -> float:
    """The plan's span over that of the best named schedule; 0 if none of them fits. The plan is complete and fits."""
    plan = auto(pp, microbatches, costs=prices(triple), communication=communication, memory=memory)
    assert_complete(plan, microbatches)
    chunks = len(plan.host) // pp
    costs = Costs.of(prices(triple), pp, chunks, communication)
    assert memory is None or max(held(plan)) <= memory * chunks
    span = longest_path(plan, costs) if pp * microbatches <= 32 else evaluate(plan, costs).span
    named = best_named(pp, microbatches, triple, communication, memory)
    assert span <= named + 1e-9, (pp, microbatches, triple, communication, memory)
    return span / named


def grid(sizes: Sequence[int], rounds: Sequence[int]) -> Iterator[tuple[int, int, Sequence[float], float, float | None]]:
    for pp, each, triple, communication in itertools.product(sizes, rounds, TRIPLES, (0.0, 0.1, 0.5)):
        for memory in (None, pp, pp / 2):
            yield pp, each * pp, triple, communication, memory


def test_a_plan_is_never_longer_than_a_named_schedule_and_often_shorter() -> None:
    ratios = [compare(*case) for case in grid((2,), (2,))]
    ratios += [compare(4, 8, triple, 0.1, memory) for triple in TRIPLES for memory in (None, 4, 2)]
    assert sum(ratio < 1 - 1e-9 for ratio in ratios) > len(ratios) // 2


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_plan_is_never_longer_than_a_named_schedule_on_the_whole_grid() -> None:
    ratios = [compare(*case) for case in grid((2, 4, 8), (1, 2, 4))]
    shorter = [1 - ratio for ratio in ratios if 0 < ratio < 1 - 1e-9]
    alone = sum(ratio == 0 for ratio in ratios)
    mean, most = sum(shorter) / len(shorter), max(shorter)
    said = f"{len(shorter)} shorter, by {mean:.1%} in the mean and {most:.1%} at most; {alone} where no named one fits"
    print(f"{len(ratios)} cases: {said}")  # noqa: T201 - what docs/benchmarks.md quotes
    assert len(ratios) == 324
    assert len(shorter) + alone > 200


def test_without_a_limit_and_with_equal_costs_a_plan_reaches_the_bound_that_nothing_beats() -> None:
    for communication in (0.0, 0.1, 0.5):
        costs = Costs.of(prices((1, 1, 1)), 4, 2, communication)
        plan = auto(4, 16, costs=prices((1, 1, 1)), communication=communication)
        assert evaluate(plan, costs).span == pytest.approx(bound(vee(4), 16, costs)) == 49.5 + 3 * communication


def test_of_equal_spans_the_lower_peak_wins() -> None:
    # ZB-H2 is as long as ZB-H1 for equal costs (span counted over all ranks), with 7 activations for its 4.
    plan = auto(4, 8, costs=prices((1, 1, 1)), chunks=(1,))
    found = evaluate(plan, Costs.of(prices((1, 1, 1)), 4, 1))
    assert (found.span, max(found.peak)) == (27.0, 4)


def test_unequal_stages_are_planned_with_their_own_costs() -> None:
    # The head makes the last of four ranks twice as slow: what counts is to feed it early and drain it late.
    uneven: Mapping[str, Sequence[float]] = dict.fromkeys("FIW", (1.0, 1.0, 1.0, 2.0))
    costs = Costs.of(uneven, 4, 1)
    plan = auto(4, 8, costs=uneven, chunks=(1, 2))  # four costs cannot be cut into eight stages: 2 is left out
    assert plan.host == loop(4, 1)
    found = evaluate(plan, costs).span
    assert found == bound(plan.host, 8, costs) == 3 + 8 * 6
    assert found < evaluate(compute_order("1f1b", 4, 8), costs).span == 57


def test_parts_are_summed_into_stages() -> None:
    assert Costs.of({"F": (1, 2, 3, 4), "I": 8, "W": (0.5, 0.5)}, 2, 1) == Costs((3, 7), (8, 8), (0.5, 0.5))
    assert Costs.of({"F": (1, 2, 3, 4), "I": 8, "W": (1, 2, 0, 0)}, 2, 2, 0.5) == Costs(
        (1, 2, 3, 4), (4,) * 4, (1, 2, 0, 0), 0.5
    )


@pytest.mark.parametrize("seed", range(40))
def test_any_rules_end_within_any_memory_that_holds_one_microbatch(seed: int) -> None:
    chance = random.Random(seed)
    pp, microbatches = chance.randint(1, 4), chance.randint(1, 9)
    chunks = chance.randint(1, 3)
    host = vee(pp) if chunks == 2 and seed % 2 else loop(pp, chunks)
    uneven = {kind: [chance.choice((0.5, 1.0, 1.7)) for _ in host] for kind in "FIW"}
    costs = Costs.of(uneven, pp, chunks, chance.choice((0.0, 0.2, 2.0)))
    for limit in (chunks, chunks + 1, 2 * chunks):
        rules = Rules(**{name: chance.choice(choices) for name, choices in CHOICES.items()})
        listed = list_schedule(host, microbatches, costs, limit, rules)
        assert_complete(listed.order, microbatches)
        assert max(held(listed.order)) == listed.held <= limit
        span = evaluate(listed.order, costs).span
        # The rules may let a rank wait where the order alone would not.
        assert bound(host, microbatches, costs, limit) - 1e-9 <= span <= listed.span + 1e-9


def test_improvement_moves_weight_gradients_out_of_the_way_within_the_memory() -> None:
    costs = Costs.of(prices((1, 1, 1)), 4, 1)
    slow = split(compute_order("1f1b", 4, 8))  # W at once after I: 33 with B, and less since I sends before W
    before = evaluate(slow, costs)
    better = improve(slow, costs, 4, 200)
    assert_complete(better, 8)
    assert evaluate(better, costs).span < before.span and max(held(better)) == 4
    assert improve(slow, costs, 4, 0) == slow


@pytest.mark.parametrize("communication", [0.0, 0.5])
def test_fusing_joins_what_is_next_to_each_other_and_lengthens_nothing(communication: float) -> None:
    costs = Costs.of(prices((1, 1.3, 0.7)), 4, 1, communication)
    joined = compute_order("1f1b", 4, 8)
    order = split(joined)
    fused = fuse(order, costs)
    assert split(fused) == order
    assert any(step.kind == "B" for rank in fused.ranks for step in rank)
    # Not every pair may be: 1F1B is what joining them all comes to, and longer.
    span = evaluate(fused, costs).span
    assert span == pytest.approx(evaluate(order, costs).span)
    assert span < evaluate(joined, costs).span - 1e-9


def test_a_plan_lowers_to_a_list_that_is_proved() -> None:
    for chunks in (1, 2):
        view = toy(pp=2, blocks=2 * chunks, dp=2, tied=True)
        plan = auto(2, 4, costs=prices((1, 1.3, 0.7)), communication=0.1, memory=2, chunks=(chunks,))
        placed = [[k + 1 for k in (s,)] for s in range(2 * chunks)]
        placed[0].insert(0, 0)
        placed[-1].append(2 * chunks + 1)
        check(lower(view, plan, placed, 4, "auto"), view)


def test_costs_of_nothing_still_make_an_order() -> None:
    assert_complete(auto(2, 3, costs=prices((0, 0, 0)), memory=1), 3)


def test_the_same_question_has_the_same_answer() -> None:
    ask = {"costs": prices((1, 1.3, 0.7)), "communication": 0.1, "memory": 2}
    assert auto(3, 6, **ask) == auto(3, 6, **ask)  # type: ignore[arg-type]


def test_without_a_pipeline_it_is_accumulation() -> None:
    assert auto(1, 3, costs=prices((1, 1, 1)), memory=1) == compute_order("1f1b", 1, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"memory": 0.5}, "a memory of 0.5 is infeasible: the least is 1"),
        ({"memory": float("nan")}, "infeasible"),
        ({"communication": -1.0}, "not communication=-1.0"),
        ({"costs": {"F": 1.0, "I": 1.0}}, "W is missing"),
        ({"costs": {"F": 1.0, "I": 1.0, "W": -2.0}}, "the cost of W is 0 or more and finite, not -2.0"),
        ({"costs": {"F": [1.0] * 3, "I": 1.0, "W": 1.0}}, r"3 costs of F cannot be cut into 2 stages \(pp=2, chunks=1\)"),
        ({"chunks": ()}, "chunks are the numbers of stages"),
        ({"microbatches": 0}, "at least 1 stage and 1 microbatch, not pp=2 and microbatches=0"),
    ],
)
def test_wrong_input_is_refused_with_its_numbers(wrong: dict[str, object], message: str) -> None:
    asked: dict[str, object] = {"pp": 2, "microbatches": 4, "costs": prices((1, 1, 1)), **wrong}
    with pytest.raises(ValueError, match=message):
        auto(**asked)  # type: ignore[arg-type]


@pytest.mark.nightly
@pytest.mark.parametrize(("pp", "microbatches", "seconds"), [(8, 32, 2), (32, 128, 20)])
def test_planning_takes_bounded_time(pp: int, microbatches: int, seconds: float) -> None:
    for memory in (None, pp, pp / 2):
        before = time.process_time()
        auto(pp, microbatches, costs=prices((1, 1.3, 0.7)), communication=0.1, memory=memory)
        assert time.process_time() - before < seconds
