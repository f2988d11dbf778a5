"""The guard on curves that are made: what is a spike, what is not, and when it gives up. Every expected step is known beforehand."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from phalanx.train.config import TrainConfig
from phalanx.train.guard import ENOUGH, REWINDS, SKIPS, WINDOW, Guard


def guard(**settings: Any) -> Guard:
    return Guard(TrainConfig(**{"on_spike": "skip", "on_non_finite": "skip", **settings}))


def refused(curve: Sequence[float], judge: Guard) -> list[int]:
    """Steps, from 0, that do not go."""
    return [step for step, loss in enumerate(curve) if judge.verdict(loss, 1.0).action != "go"]


def noise(seed: int, steps: int, sigma: float) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(0.0, sigma) for _ in range(steps)]


CURVES: dict[str, Callable[[int], float]] = {
    "falls like a power": lambda step: 2.0 + 9.0 * (step + 1) ** -0.5,
    "falls exponentially": lambda step: 1.5 + 9.5 * math.exp(-step / 100),
    "plateau": lambda step: 2.5,
    "rises slowly": lambda step: 2.0 + 0.0005 * step,
    "is negative": lambda step: -3.0 - 0.001 * step,
    "is zero": lambda step: 0.0,
}


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_without_spikes_always_goes(name: str) -> None:
    assert refused([CURVES[name](step) for step in range(600)], guard()) == []


@pytest.mark.parametrize("name", [name for name in CURVES if name != "is zero"])
def test_the_same_with_noise_below_the_floor(name: str) -> None:
    """Noise of 1 %, of which the largest of 600 is some 3.2 times as much, under a bound of at least 6 %."""
    curve = [CURVES[name](step) * (1 + x) for step, x in enumerate(noise(0, 600, 0.01))]
    assert refused(curve, guard()) == []


@pytest.mark.parametrize("name", ["falls like a power", "plateau", "rises slowly", "is negative"])
@pytest.mark.parametrize("at", [ENOUGH, 40, 500])
def test_one_spike_is_refused_and_nothing_else(name: str, at: int) -> None:
    curve = [CURVES[name](step) * (1 + x) for step, x in enumerate(noise(1, 600, 0.01))]
    before = curve[max(0, at - WINDOW) : at]
    curve[at] = max(before) + 2 * (max(before) - min(before)) + 0.3 * abs(max(before))
    assert refused(curve, guard()) == [at]


def test_the_bound_is_the_median_and_so_many_deviations() -> None:
    """Losses 1, 2, ..., 64: the median is 32.5, the median deviation 16, and 6 of them are 96."""
    losses = [float(n) for n in range(1, WINDOW + 1)]

    def after(loss: float) -> str:
        judge = guard()
        judge.load_state_dict({"losses": losses, "skips": 0, "checkpoint": None, "rewinds": 0})
        return judge.verdict(loss, 1.0).action

    assert after(32.5 + 6 * 16.0) == "go"
    assert after(math.nextafter(32.5 + 6 * 16.0, math.inf)) == "skip"


def test_the_floor_is_one_percent_of_the_median() -> None:
    for loss, action in ((4.0 * 1.06, "go"), (4.0 * 1.0601, "skip")):
        judge = guard()
        assert refused([4.0] * WINDOW, judge) == []
        assert judge.verdict(loss, 1.0).action == action


def test_before_there_are_enough_losses_none_is_a_spike() -> None:
    assert refused([2.0] * (ENOUGH - 1) + [1e38], guard()) == []
    assert refused([2.0] * ENOUGH + [1e38], guard()) == [ENOUGH]


def test_ignored_spikes_go() -> None:
    assert refused([2.0] * 40 + [1e38, 2.0], guard(on_spike="ignore")) == []


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)]
)
@pytest.mark.parametrize("wanted", ["stop", "skip", "rewind"])
def test_what_is_not_finite_is_refused_from_the_first_step_on(loss: float, norm: float, wanted: str) -> None:
    judge = guard(on_non_finite=wanted, on_spike="ignore")
    verdict = judge.verdict(loss, norm)
    assert verdict.action == wanted
    assert str(norm if math.isfinite(loss) else loss) in verdict.reason
    assert judge.state_dict()["losses"] == []


def test_the_reason_has_the_numbers() -> None:
    judge = guard(on_spike="stop")
    refused([4.0] * 20, judge)
    assert judge.verdict(1e38, 1.0).reason.startswith(
        "the loss is 1e+38, above 4.24: the median 4 of the last 20 losses by 6 times 0.04, their deviation"
    )


def test_a_level_that_stays_is_skipped_so_often_and_then_stops() -> None:
    judge = guard()
    assert refused([2.0] * 64, judge) == []
    verdicts = [judge.verdict(5.0, 1.0) for _ in range(SKIPS + 1)]
    assert [verdict.action for verdict in verdicts] == ["skip"] * SKIPS + ["stop"]
    assert "raise spike_factor" in verdicts[-1].reason


def test_a_good_step_begins_the_count_of_skips_anew() -> None:
    judge = guard()
    assert refused([2.0] * 64, judge) == []
    for _ in range(5):
        assert {judge.verdict(math.nan, 1.0).action for _ in range(SKIPS)} == {"skip"}
        assert judge.verdict(2.0, 1.0).action == "go"


def test_what_was_refused_moves_no_bound() -> None:
    judge, calm = guard(), guard()
    curve = [2.0 + x for x in noise(2, 100, 0.02)]
    for loss in curve:
        judge.verdict(9.0, 1.0)
        assert judge.verdict(loss, 1.0).action == calm.verdict(loss, 1.0).action == "go"
        if len(judge.state_dict()["losses"]) < ENOUGH:
            judge.load_state_dict(calm.state_dict())  # so early the 9 was no spike yet
    assert judge.state_dict()["losses"] == calm.state_dict()["losses"]


def test_it_goes_back_to_one_checkpoint_so_often() -> None:
    judge = guard(on_spike="rewind")
    refused([2.0] * 30, judge)
    saved = judge.state_dict()
    for time in range(1, REWINDS + 1):
        assert refused([2.0] * 10, judge) == []
        assert judge.verdict(50.0, 1.0).action == "rewind"
        verdict = judge.rewind(30, saved)
        assert (verdict.action, f"time {time} of at most" in verdict.reason) == ("go", True)
        assert judge.state_dict()["losses"] == [2.0] * 30
    assert judge.verdict(50.0, 1.0).action == "rewind"
    assert judge.rewind(30, saved).action == "stop"
    assert judge.rewind(40, saved).action == "go"  # another checkpoint is progress
    assert judge.state_dict()["rewinds"] == 1


def test_without_a_checkpoint_there_is_nothing_to_go_back_to() -> None:
    verdict = guard(on_non_finite="rewind").rewind(None)
    assert verdict.action == "stop"
    assert "checkpoint_every" in verdict.reason


@pytest.mark.parametrize("at", [0, 7, 100, 299])
def test_a_run_that_is_continued_judges_as_one_that_was_not_stopped(at: int) -> None:
    generator = random.Random(3)
    curve = [2.0 + generator.gauss(0, 0.05) + (generator.random() < 0.1) * generator.random() for _ in range(400)]
    whole = guard()
    before, after = curve[:at], curve[at:]
    first = [whole.verdict(loss, 1.0) for loss in before]
    text = json.dumps(whole.state_dict(), allow_nan=False)
    continued = guard()
    continued.load_state_dict(json.loads(text))
    rest = [whole.verdict(loss, 1.0) for loss in after]
    assert [continued.verdict(loss, 1.0) for loss in after] == rest
    assert continued.state_dict() == whole.state_dict()
    assert {verdict.action for verdict in (*first, *rest)} == {"go", "skip"}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "has no 'losses'; it has nothing"),
        ({"losses": [], "skips": 0, "checkpoint": None}, "has no 'rewinds'"),
        ({"losses": [1.0] * 65, "skips": 0, "checkpoint": None, "rewinds": 0}, "has 65 losses"),
        ({"losses": [math.nan], "skips": 0, "checkpoint": None, "rewinds": 0}, "all of them finite"),
    ],
)
def test_a_state_that_is_none_is_refused(state: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        guard().load_state_dict(state)
