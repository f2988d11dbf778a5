"""Orders before communication."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations_with_replacement, product

import pytest
from tests.schedule.toys import toy

from phalanx.schedule.balance import stages
from phalanx.schedule.check import check
from phalanx.schedule.lower import lower
from phalanx.schedule.pipeline import SCHEDULES, Order, Step, compute_order, times
from phalanx.schedule.pipeline.bubbles import FORMULAS, RankTimes, Span, idle, idle_fraction, peak
from phalanx.schedule.pipeline.building_block import UNITS, Block
from phalanx.schedule.pipeline.v_half import BLOCKS as V_HALF
from phalanx.schedule.pipeline.v_min import BLOCKS as V_MIN
from phalanx.schedule.simulate import Costs, simulate

EQUAL = RankTimes(1, 1, 1)
# Eighths, so that sums are exact. Among them tI > tF, tW > tI and tF larger than each.
TRIPLES = [EQUAL, *(RankTimes(*t) for t in [(1, 1.25, 0.75), (2, 3, 1), (1, 2, 1.5), (1, 1, 1.5), (2, 1, 1), (1, 0.5, 1.75)])]


def takes(name: str, pp: int, microbatches: int) -> bool:
    """Whether the schedule has an order for these numbers: all have, but for DualPipe's two streams."""
    return name != "dualpipe" or pp == 1 or (pp % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * pp)


def spans(order: Order, chunks: int, costs: RankTimes = EQUAL) -> list[tuple[float, float]]:
    """First start and last end of every rank; `costs` are those of its `chunks` stages together."""
    forward, input_grad, weight_grad = (cost / chunks for cost in costs)
    unit = {"F": forward, "B": input_grad + weight_grad, "I": input_grad, "W": weight_grad}
    span = times(order.ranks, unit, copies=order.copies)
    assert len(span) == sum(map(len, order.ranks))
    return [(span[steps[0]][0], span[steps[-1]][1]) for steps in order.ranks]


def idle_by_running(name: str, pp: int, microbatches: int, costs: RankTimes, chunks: int | None, span: Span) -> float:
    order = compute_order(name, pp, microbatches, chunks)
    ranks = spans(order, chunks or SCHEDULES[name].chunks, costs)
    longest = max(end for _, end in ranks) if span == "step" else max(end - start for start, end in ranks)
    return longest - microbatches * sum(costs)


def held(steps: Sequence[Step]) -> int:
    """Activations that a rank holds at most, in stages; none at the end."""
    live = list(accumulate({"F": 1, "I": 0}.get(step.kind, -1) for step in steps))
    assert live[-1] == 0
    assert min(live) >= 0
    return max(live)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", range(1, 9))
def test_every_number_of_microbatches_runs(name: str, pp: int) -> None:
    """Each microbatch once on each stage of its copy, on the rank that hosts it, in an order that does not wait for itself."""
    row = SCHEDULES[name]
    for m in range(1, 4 * pp + 1):
        if not takes(name, pp, m):
            with pytest.raises(ValueError, match=rf"dualpipe needs an even pp .* not pp={pp} and microbatches={m}"):
                compute_order(name, pp, m)
            continue
        order = compute_order(name, pp, m)
        copies, chunks = (row.copies, row.chunks) if pp > 1 else (1, 1)
        assert (order.copies, len(order.host)) == (copies, pp * chunks * copies)
        halves = {
            stage: range(m) if copies == 1 else (range(m // 2) if stage < pp else range(m // 2, m))
            for stage in range(len(order.host))
        }
        kinds = {(s.stage, s.microbatch): set[str]() for steps in order.ranks for s in steps}
        for rank, steps in enumerate(order.ranks):
            for step in steps:
                assert order.host[step.stage] == rank
                assert step.kind not in kinds[step.stage, step.microbatch]
                kinds[step.stage, step.microbatch].add(step.kind)
        assert set(kinds) == {(stage, j) for stage, js in halves.items() for j in js}
        assert all(done in ({"F", "B"}, {"F", "I", "W"}) for done in kinds.values())
        assert any("W" in done for done in kinds.values()) == (row.splits and pp > 1)
        assert len(times(order.ranks, copies=copies)) == sum(map(len, kinds.values()))


@pytest.mark.parametrize("name", ["looped-bfs", "interleaved"])
@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_any_number_of_chunks_runs(name: str, chunks: int) -> None:
    for pp, m in product((2, 3, 4), (1, 3, 4, 7, 12)):
        order = compute_order(name, pp, m, chunks)
        assert order.host == tuple(range(pp)) * chunks
        assert len(times(order.ranks)) == 2 * pp * chunks * m


def _costs(name: str) -> list[RankTimes]:
    return [EQUAL] if FORMULAS[name].equal else TRIPLES


@pytest.mark.parametrize("span", ["step", "rank"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_idle_time_is_the_closed_form(name: str, span: Span) -> None:
    """Times are eighths and divided by 1, 2 or 4, so they are exact in floating point."""
    checked = 0
    every = (1, 2, 4) if SCHEDULES[name].any_chunks else (None,)
    for pp, rounds, chunks, costs in product((2, 4, 8), (1, 2, 4), every, _costs(name)):
        m = rounds * pp
        # From there on the pattern is whole: p, 2p-1 or 2p microbatches.
        if m < FORMULAS[name].least(pp):
            with pytest.raises(ValueError, match=rf"from {FORMULAS[name].least(pp)} microbatches on with pp={pp}, not for {m}"):
                idle(name, pp, m, costs, chunks, span)
            continue
        assert idle_by_running(name, pp, m, costs, chunks, span) == idle(name, pp, m, costs, chunks, span), (
            pp,
            m,
            chunks,
            costs,
        )
        checked += 1
    assert checked >= 6


def test_idle_times_of_the_literature() -> None:
    """The papers' own comparisons, at equal costs: a fraction of 1F1B's bubble, and for DualPipe half of (p/2-1)(F&B+B-3W)."""
    for pp in (4, 8, 16):
        bubble = {name: idle(name, pp, 4 * pp, EQUAL, span="rank") for name in SCHEDULES}
        assert bubble["1f1b"] == 3 * (pp - 1)
        assert bubble["zb-h1"] == bubble["1f1b"] / 3
        assert bubble["zb-h2"] == bubble["zb-v"] == 0
        assert bubble["v-half"] < bubble["1f1b"] / 2
        assert bubble["v-min"] <= 2 / 3 * bubble["1f1b"]
        assert bubble["dualpipe-v"] == (pp - 1) * (3 + 2 - 3) / 2 / 2  # of a chunk, half a rank's layers
        assert bubble["dualpipe"] == (pp / 2 - 1) * (3 + 2 - 3) / 2
    # (p-1)/(m+p-1), and with v chunks (p-1)/(v m+p-1).
    assert idle_fraction("1f1b", 8, 32, EQUAL) == 7 / 39
    assert idle_fraction("interleaved", 8, 32, EQUAL, chunks=4) == 7 / (4 * 32 + 7)


def test_formulas_know_their_limits() -> None:
    with pytest.raises(ValueError, match=r"formula for tF = tI = tW, not for \(1, 2, 1\)"):
        idle("zb-v", 4, 8, RankTimes(1, 2, 1))
    with pytest.raises(ValueError, match=r"a multiple of pp=4 microbatches, not for 9"):
        idle("interleaved", 4, 9, EQUAL)
    assert idle("zb-v", 1, 1, RankTimes(1, 2, 1)) == 0


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8])
def test_peak_activations_are_the_closed_form(name: str, pp: int) -> None:
    for m in range(1, 4 * pp + 1):
        if not takes(name, pp, m):
            continue
        chunks = SCHEDULES[name].chunks if pp > 1 else 1
        found = [held(steps) / chunks for steps in compute_order(name, pp, m).ranks]
        formula = [peak(name, pp, m, rank) for rank in range(pp)]
        assert all(a <= b for a, b in zip(found, formula, strict=True)), m
        # While the pattern is not whole, a rank of two stages may hold less.
        assert found == formula or (chunks > 1 and m < 2 * pp - 1), m


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_peak_of_interleaved_chunks(chunks: int) -> None:
    """p + (p-1)/v on rank 0 (Narayanan et al. 2021); whole turns only, other numbers hold no more."""
    for pp, m in product((2, 4), range(1, 17)):
        ranks = compute_order("interleaved", pp, m, chunks).ranks
        for rank, steps in enumerate(ranks):
            formula = peak("interleaved", pp, m, rank, chunks)
            assert held(steps) / chunks <= formula + 1e-9
            assert m % pp or held(steps) / chunks == pytest.approx(formula, rel=1e-12)  # thirds
        if chunks > 1 and m == 16:
            assert held(ranks[0]) / chunks == pytest.approx(pp + (pp - 1) / chunks, rel=1e-12)


@pytest.mark.parametrize("blocks", [V_HALF, V_MIN], ids=["v-half", "v-min"])
@pytest.mark.parametrize("pp", range(2, 9))
def test_no_waits_hold_less(blocks: Sequence[Block], pp: int) -> None:
    """Of all the ways to wait at the turns that keep a rank to one step a unit, none needs fewer activations than ours."""

    def most(block: Block) -> int | None:
        return max(peaks) if all(peaks := [_full(block.rank(r, pp)) for r in range(pp)]) else None

    ours = blocks[pp % len(blocks)]
    possible = [most(Block(ours.stride, *waits)) for waits in product(range(UNITS), repeat=3) if _apart(ours.stride, waits, pp)]
    assert most(ours) == min(held for held in possible if held)


def _apart(stride: int, waits: Sequence[int], pp: int) -> bool:
    """Whether the four steps that are not W fall into different units on every rank, so that the block is one."""
    for r in range(pp):
        turn = stride * (pp - 1) + 1
        starts = [0, turn + waits[0], turn + waits[0] + pp + waits[1], 2 * turn + pp + sum(waits)]
        at = [start + (pp - 1 - r if way % 2 else stride * r) for way, start in enumerate(starts)]
        if len({start % UNITS for start in at}) < 4:
            return False
    return True


def _full(block: Sequence[tuple[int, str, int]]) -> int:
    """Activations held in the fullest unit of a pipeline that repeats the block for ever."""
    begins = {stage: start for start, kind, stage in block if kind == "F"}
    ends = {stage: start + 1 for start, kind, stage in block if kind == "W"}
    return max(sum((t - begins[s]) // UNITS - (t - ends[s]) // UNITS for s in begins) for t in range(UNITS))


def test_1f1b_by_hand() -> None:
    """Narayanan et al. 2021, figure 3, with 3 stages and 4 microbatches."""
    assert texts("1f1b", 3, 4) == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_zero_bubble_by_hand() -> None:
    """The pattern of Qi et al. 2023, section 2, with 2 stages and 4 microbatches."""
    assert texts("zb-h1", 2, 4) == ["F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3", "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"]
    assert texts("zb-h2", 2, 4) == ["F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3", "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"]


def test_dualpipe_by_hand() -> None:
    """Its two streams on 2 ranks are each other's mirror: 0 and 1 down the first copy, 2 and 3 down the second."""
    rank0 = ["F0", "F2", "F1", "B2", "F3", "B0", "B3", "I1", "W1"]
    assert texts("dualpipe", 2, 4)[0].split() == rank0
    mirror = [f"{text[0]}{(int(text[1]) + 2) % 4}" for text in rank0]
    assert texts("dualpipe", 2, 4)[1].split() == mirror


def texts(name: str, pp: int, microbatches: int) -> list[str]:
    return [
        " ".join(f"{step.kind}{step.microbatch}" for step in steps) for steps in compute_order(name, pp, microbatches).ranks
    ]


def test_one_chunk_is_the_schedule_without_chunks() -> None:
    for pp, m in combinations_with_replacement(range(1, 7), 2):
        assert compute_order("looped-bfs", pp, m, 1) == compute_order("gpipe", pp, m)
        assert compute_order("interleaved", pp, m, 1) == compute_order("1f1b", pp, m)


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.copies == 1])
@pytest.mark.parametrize(("pp", "m"), [(2, 3), (4, 8), (4, 5)])
def test_the_lowered_schedule_takes_as_long(name: str, pp: int, m: int) -> None:
    """Lowered onto a toy of one block a stage, proved by `check`, timed by `simulate` with messages that take no time. The
    first and the last stage have two segments, each a half, so that all stages are equal."""
    order = compute_order(name, pp, m)
    count = len(order.host)
    view = toy(pp, blocks=count)
    placed = stages(view, count)
    schedule = lower(view, order, placed, m, name)
    check(schedule, view)
    share = {k: 1 / len(stage) for stage in placed for k in stage}
    unit = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    costs = Costs({(kind, k): unit[kind] * share[k] for kind, k in product(unit, share)})
    compute = [event for event in simulate(schedule, view, costs) if event.lane == "compute" and event.name[0] in unit]
    # Whether a stage in two parts sends one of them earlier does not matter: its message is that of the part at its border.
    assert max(event.end for event in compute) == max(end for _, end in spans(order, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_stage_is_gradient_accumulation(name: str) -> None:
    assert [str(step) for step in compute_order(name, 1, 3).ranks[0]] == ["F0.0", "B0.0", "F0.1", "B0.1", "F0.2", "B0.2"]


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'1fb1'; did you mean '1f1b'\? Known: gpipe, 1f1b"):
        compute_order("1fb1", 2, 2)
    with pytest.raises(ValueError, match=r"pp=2 and microbatches=0"):
        compute_order("gpipe", 2, 0)
    with pytest.raises(
        ValueError, match=r"zb-v has exactly 2 stages on each rank, not chunks=1; looped-bfs, interleaved take any"
    ):
        compute_order("zb-v", 2, 4, 1)
    with pytest.raises(ValueError, match=r"1f1b has exactly 1 stage on each rank, not chunks=2"):
        compute_order("1f1b", 2, 4, 2)
    with pytest.raises(ValueError, match=r"interleaved has at least 1 stage on each rank, not chunks=0"):
        compute_order("interleaved", 2, 4, 0)


def test_lists_that_wait_for_each_other_have_no_times() -> None:
    with pytest.raises(ValueError, match=r"B0\.0, F1\.0 wait|cannot run: B0\.0"):
        times([[Step("B", 0, 0), Step("F", 0, 0)], [Step("F", 1, 0), Step("B", 1, 0)]])


def test_two_copies_are_two_chains() -> None:
    """One rank with both copies of a model of one stage: as one chain, the second stage would wait for the first."""
    ranks = [[Step("F", 1, 1), Step("B", 1, 1), Step("F", 0, 0), Step("B", 0, 0)]]
    assert times(ranks, copies=2)[Step("B", 0, 0)] == (4.0, 6.0)
    with pytest.raises(ValueError, match=r"F1\.1 wait"):
        times(ranks)
