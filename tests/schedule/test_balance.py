"""Partitions into stages against all partitions there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from phalanx.mesh import Mesh
from phalanx.schedule import balance as room
from phalanx.schedule.balance import balance, costs_of, stages
from phalanx.schedule.view import Message, SegmentView, View

Stages = tuple[tuple[int, ...], ...]


def every(segments: int, count: int) -> Iterator[Stages]:
    """All partitions into runs, those with the longer earlier stages first."""
    for first in range(segments - count + 1, 0, -1):
        head = tuple(range(first))
        if count == 1:
            if first == segments:
                yield (head,)
        else:
            for rest in every(segments - first, count - 1):
                yield (head, *(tuple(k + first for k in stage) for stage in rest))


def key(costs: Sequence[int], placed: Stages, host: Sequence[int]) -> tuple[int, int, int]:
    stages = [sum(costs[k] for k in stage) for stage in placed]
    loads = [sum(costs[k] for at, stage in zip(host, placed, strict=True) if at == rank for k in stage) for rank in set(host)]
    return max(loads), sum(load * load for load in loads), sum(stage * stage for stage in stages)


def test_all_partitions_are_looked_at() -> None:
    assert list(every(4, 2)) == [((0, 1, 2), (3,)), ((0, 1), (2, 3)), ((0,), (1, 2, 3))]
    assert len(list(every(9, 4))) == 56  # 8 choose 3


@pytest.mark.parametrize("seed", range(60))
def test_one_stage_a_rank_is_the_best_of_all_partitions(seed: int) -> None:
    chance = random.Random(seed)
    segments = chance.randint(1, 10)
    count = chance.randint(1, segments)
    # Few different costs make ties, of the maximum and of the squares.
    costs = [chance.randint(0 if seed % 3 else 1, 4 if seed % 2 else 50) for _ in range(segments)]
    best = min(every(segments, count), key=lambda placed: key(costs, placed, range(count)))
    assert balance(costs, count) == best


@pytest.mark.parametrize("seed", range(60))
def test_a_v_is_the_best_of_all_partitions(seed: int) -> None:
    chance = random.Random(seed)
    pp = chance.randint(1, 3)
    host = (*range(pp), *reversed(range(pp))) if seed % 2 else (*range(pp), *range(pp))
    costs = [chance.randint(1, 9) for _ in range(chance.randint(2 * pp, 10))]
    best = min(every(len(costs), 2 * pp), key=lambda placed: key(costs, placed, host))
    assert balance(costs, 2 * pp, host) == best


@pytest.mark.parametrize("seed", range(20))
def test_where_partitions_are_too_many_a_v_costs_no_more_either_and_never_more_than_stage_by_stage(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    host = (0, 1, 2, 2, 1, 0)
    costs = [chance.randint(1, 5), *[chance.randint(8, 10)] * chance.randint(8, 12), chance.randint(10, 40)]
    exact = key(costs, balance(costs, 6, host), host)
    monkeypatch.setattr(room, "EXACT_STATES", 0)
    found = key(costs, balance(costs, 6, host), host)
    assert exact <= found <= key(costs, balance(costs, 6), host)
    assert found[0] == exact[0]


def test_ten_blocks_on_four_stages() -> None:
    assert balance([1] * 10, 4) == ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))


def test_a_heavy_head_stands_alone_and_the_blocks_share_the_other_ranks() -> None:
    # embedding, 10 blocks, head: the head as heavy as 4 blocks
    placed = balance([0.5, *[1.0] * 10, 4.0], 4)
    assert placed == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10), (11,))


def test_a_v_gives_the_first_rank_less_of_the_start_when_its_end_is_heavy() -> None:
    # The head costs 3 blocks and is on rank 0 with the first stage: 12 blocks and head are 15, so 7 or 8 a rank.
    placed = balance([*[1.0] * 12, 3.0], 4, (0, 1, 1, 0))
    loads = [sum(3.0 if k == 12 else 1.0 for k in stage) for stage in placed]
    assert sorted((loads[0] + loads[3], loads[1] + loads[2])) == [7.0, 8.0]


def test_every_stage_has_a_segment_even_if_they_cost_nothing() -> None:
    assert balance([0, 0, 0, 5], 4) == ((0,), (1,), (2,), (3,))


def test_a_v_of_32_ranks_gives_the_rank_of_the_head_nothing_else() -> None:
    # 5.3 is what embedding and head cost, which the first rank must have; the blocks, 126 on 31 ranks, need 5 somewhere.
    host = (*range(32), *reversed(range(32)))
    costs = [0.3, *[1.0] * 126, 5.0]
    loads = dict.fromkeys(host, 0.0)
    for at, stage in zip(host, balance(costs, 64, host), strict=True):
        loads[at] += sum(costs[k] for k in stage)
    assert max(loads.values()) == 5.3


def test_a_hundred_and_thirty_segments_on_64_stages_are_exact_too() -> None:
    assert max(map(len, balance([1.0] * 130, 64))) == 3


@pytest.mark.parametrize(
    ("costs", "count", "host", "message"),
    [
        ([1.0, 2.0], 3, None, "3 pipeline stages need at least as many segments and at least 1 stage; there are 2"),
        ([1.0], 0, None, "0 pipeline stages"),
        ([1.0, -2.0], 1, None, r"segments 1 \(-2.0\) are not"),
        ([1.0, float("nan")], 1, None, r"segments 1 \(nan\) are not"),
        ([1.0] * 8, 4, (0, 1, 0), "host places 3 stages, but there are 4"),
    ],
)
def test_wrong_input_is_refused_with_its_numbers(costs: list[float], count: int, host: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance(costs, count, host)  # type: ignore[arg-type]


def view() -> View:
    """An embedding of no flops, four blocks and a head."""
    h = (Message("h", (2, 8), "float32", 64),)
    embedding = SegmentView("embedding", outputs=h, output_grads=h, saved_bytes=32)
    blocks = [SegmentView(f"b{k}", h, h, h, h, saved_bytes=10, flops={"F": 1e5, "B": 2e5}) for k in range(4)]
    head = SegmentView("head", inputs=h, input_grads=h, flops={"F": 3e5, "I": 3e5, "W": 3e5})
    return View(Mesh(pp=2), (embedding, *blocks, head))


def test_a_segment_costs_its_flops_or_its_bytes_whichever_is_more() -> None:
    # embedding: h and its gradient leave, and what it saves is written and read
    assert costs_of(view()) == [view().flops_per_byte * (2 * 64 + 2 * 32), *[3e5] * 4, 9e5]


def test_stages_follow_the_estimate_unless_times_were_measured() -> None:
    assert stages(view(), 2) == ((0, 1, 2, 3), (4, 5))
    assert stages(view(), 2, measured=dict(enumerate([5.0, 1, 1, 1, 1, 1]))) == ((0,), (1, 2, 3, 4, 5))
    with pytest.raises(ValueError, match="1 of 6 segments were not measured: head"):
        stages(view(), 2, measured=dict.fromkeys(range(5), 1.0))
