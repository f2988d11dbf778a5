"""Orders and stages before communication."""

from __future__ import annotations

import pytest

from phalanx.schedule.pipeline import SCHEDULES, Step, compute_order, stages, times


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "m"), [(2, 1), (2, 2), (4, 2), (4, 8), (8, 3), (8, 32)])
def test_span_and_peak_are_the_closed_forms(name: str, pp: int, m: int) -> None:
    order = compute_order(name, pp, m)
    spans = times(order.ranks)
    assert len(spans) == 2 * pp * m
    # Integer costs F=1, B=2 in floating point: exact.
    assert max(end for _, end in spans.values()) == 3 * (m + pp - 1)
    for r, steps in enumerate(order.ranks):
        live = [sum(1 if step.kind == "F" else -1 for step in steps[:n]) for n in range(len(steps) + 1)]
        assert max(live) == (m if name == "gpipe" else min(m, pp - r))
        assert live[-1] == 0


def test_1f1b_by_hand() -> None:
    """Narayanan et al. 2021, figure 3, with 3 stages and 4 microbatches."""
    text = [" ".join(f"{step.kind}{step.microbatch}" for step in steps) for steps in compute_order("1f1b", 3, 4).ranks]
    assert text == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_stage_is_gradient_accumulation(name: str) -> None:
    assert [str(step) for step in compute_order(name, 1, 3).ranks[0]] == ["F0.0", "B0.0", "F0.1", "B0.1", "F0.2", "B0.2"]


def test_unknown_name_gets_the_closest() -> None:
    with pytest.raises(ValueError, match=r"'1fb1'; did you mean '1f1b'\? Known: gpipe, 1f1b"):
        compute_order("1fb1", 2, 2)
    with pytest.raises(ValueError, match=r"pp=2 and microbatches=0"):
        compute_order("gpipe", 2, 0)


def test_stages_share_blocks_and_the_ends_join() -> None:
    assert stages(6, 2) == ((0, 1, 2), (3, 4, 5))
    assert stages(9, 3) == ((0, 1, 2, 3), (4, 5), (6, 7, 8))  # 7 blocks: 3, 2, 2
    assert stages(12, 4) == ((0, 1, 2, 3), (4, 5, 6), (7, 8), (9, 10, 11))  # 10 blocks: 3, 3, 2, 2
    assert stages(1, 1) == ((0,),)
    with pytest.raises(ValueError, match=r"4 pipeline stages need at least 4 blocks, but the model has 3"):
        stages(5, 4)


def test_lists_that_wait_for_each_other_have_no_times() -> None:
    with pytest.raises(ValueError, match=r"B0\.0, F1\.0 wait|cannot run: B0\.0"):
        times([[Step("B", 0, 0), Step("F", 0, 0)], [Step("F", 1, 0), Step("B", 1, 0)]])
