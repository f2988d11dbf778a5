"""A run from its first step to its last over everything that can happen between: stopped, gone on with, gone back, begun anew."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

import phalanx as phx
from phalanx.cli.options import defaults
from phalanx.run.executor import Executor
from phalanx.run.initialize import deferred_init
from phalanx.run.replicas import ReplicaError
from phalanx.train.assembly import parallel_step
from phalanx.train.batches import Batches
from phalanx.train.checkpoint import Damaged, Saved, find
from phalanx.train.config import OptimizerConfig, TrainConfig
from phalanx.train.loop import Summary, train
from phalanx.train.models import build

BATCH = 8
CONFIG = TrainConfig(
    model="mlp", mesh="dp=2", batch=BATCH, steps=12, dtype="float64", checkpoint_every=3, optimizer=OptimizerConfig(warmup=2)
)


def run(config: TrainConfig, out: Path, **settings: Any) -> Summary:
    config = replace(config, out=out, **settings)
    config.check()
    with phx.local(config.parsed_mesh(), timeout=60) as world:
        return train(config, world)


def lines(out: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in lines(out) if "loss" in line]


def weights(out: Path) -> dict[str, Tensor]:
    saved = Saved(find(str(out))[0][0])
    return {name: saved.tensor(name) for name in saved.model}


def by_hand(config: TrainConfig, cursors: list[int]) -> list[float]:
    """Losses of a run that takes the batches at these cursors and no others."""
    model = build(config.model, config.dtype)
    config = replace(config, seq=model.seq)
    with phx.local(config.parsed_mesh(), timeout=60) as world:
        step = parallel_step(config, world, model, deferred_init(model.factory))
        batches = Batches(config, model, step)
        return [step(batches.training(cursor)).loss for cursor in cursors]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """What happens when the batch at a cursor is read: a factor on its values, or a function of it."""
    planted: dict[int, Any] = {}
    original = Batches.training

    def training(self: Batches, cursor: int) -> Mapping[str, Tensor]:
        batch = dict(original(self, cursor))
        what = planted.get(cursor, 1.0)
        if callable(what):
            what(batch)
        else:
            batch["x"] = batch["x"] * what
        return batch

    monkeypatch.setattr(Batches, "training", training)
    return planted


def test_a_run_that_is_gone_on_with_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    whole = run(CONFIG, tmp_path / "whole")
    run(CONFIG, tmp_path / "parts", steps=6, optimizer=replace(CONFIG.optimizer, decay="constant"))
    run(CONFIG, tmp_path / "other", optimizer=replace(CONFIG.optimizer, decay="constant"))
    run(CONFIG, tmp_path / "parts", optimizer=replace(CONFIG.optimizer, decay="constant"), resume=str(tmp_path / "parts"))
    assert whole.folder is not None
    assert losses(tmp_path / "parts") == losses(tmp_path / "other")
    mine, theirs = weights(tmp_path / "parts"), weights(tmp_path / "other")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert [line["kind"] for line in lines(tmp_path / "parts", "events")].count("resume") == 1


def test_sigterm_ends_after_the_step_and_nothing_is_lost(tmp_path: Path, plant: dict[int, Any]) -> None:
    run(CONFIG, tmp_path / "whole")
    plant[4 * BATCH] = lambda batch: os.kill(os.getpid(), signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    summary = run(CONFIG, tmp_path / "stopped")
    assert (summary.stopped, summary.last.step) == (signal.SIGTERM, 5)
    assert signal.getsignal(signal.SIGTERM) is before
    plant.clear()
    assert run(CONFIG, tmp_path / "stopped", resume="auto").stopped is None
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_resume_auto_begins_where_there_is_nothing(tmp_path: Path) -> None:
    summary = run(CONFIG, tmp_path / "run", resume="auto", steps=2)
    assert summary.first.step == 1


def test_a_damaged_checkpoint_is_passed_over_loudly_and_the_one_before_it_taken(tmp_path: Path) -> None:
    run(CONFIG, tmp_path / "whole")
    run(CONFIG, tmp_path / "run", steps=9, optimizer=CONFIG.optimizer)
    newest = Path(find(str(tmp_path / "run"))[0][0])
    for file in newest.glob("__*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    with pytest.raises(Damaged, match=r"__0_0\.distcp is damaged: bytes"):
        run(CONFIG, tmp_path / "run", resume=str(newest))
    summary = run(CONFIG, tmp_path / "run", resume=str(tmp_path / "run"))
    assert summary.first.step == 7
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, 13))


def test_a_step_that_is_not_finite_stops_the_run(tmp_path: Path, plant: dict[int, Any]) -> None:
    plant[4 * BATCH] = float("nan")
    with pytest.raises(
        FloatingPointError, match="step 5: the loss is not finite; the first tensor that is not is the batch entry 'x'"
    ):
        run(CONFIG, tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 4


def test_a_step_that_is_not_finite_is_skipped(tmp_path: Path, plant: dict[int, Any]) -> None:
    plant[4 * BATCH] = float("nan")
    run(CONFIG, tmp_path / "run", on_non_finite="skip")
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found if line.get("skipped")] == [5]
    (event,) = [line for line in lines(tmp_path / "run", "events") if line["kind"] == "skip"]
    assert event["step"] == 5 and "the loss is nan" in event["why"]
    plant.clear()
    taken = by_hand(CONFIG, [k * BATCH for k in range(12) if k != 4])
    assert [line["loss"] for line in found if not line.get("skipped")] == taken


def test_a_run_goes_back_and_past_the_samples_that_broke_it(tmp_path: Path, plant: dict[int, Any]) -> None:
    plant[7 * BATCH] = float("inf")
    run(CONFIG, tmp_path / "run", on_non_finite="rewind")
    (event,) = [line for line in lines(tmp_path / "run", "events") if line["kind"] == "rewind"]
    assert (event["step"], event["from_step"]) == (6, 8)
    plant.clear()
    assert losses(tmp_path / "run") == by_hand(CONFIG, [k * BATCH for k in (0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13)])


def test_what_three_ways_do_not_get_past_stops_the_run(tmp_path: Path, plant: dict[int, Any]) -> None:
    plant.update({k * BATCH: float("inf") for k in range(7, 20)})
    with pytest.raises(FloatingPointError, match=r"step 7: .*gone back to the checkpoint of step 6 3 times"):
        run(CONFIG, tmp_path / "run", on_non_finite="rewind")


def spikes(found: list[float], factor: float) -> list[int]:
    """Steps whose loss is above the median of the good ones before by so many times their median absolute deviation."""
    good: list[float] = []
    high = []
    for step, loss in enumerate(found, 1):
        if len(good) >= 16:
            middle = median(good[-64:])
            if loss > middle + factor * median(abs(x - middle) for x in good[-64:]):
                high.append(step)
                continue
        good.append(loss)
    return high


def test_a_spike_is_skipped(tmp_path: Path) -> None:
    run(CONFIG, tmp_path / "run", steps=28, on_spike="skip", spike_factor=0.5, checkpoint_every=0)
    skipped = [line["step"] for line in lines(tmp_path / "run") if line.get("skipped")]
    assert skipped and skipped == spikes(losses(tmp_path / "run"), 0.5)


def test_a_spike_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"step (\d+): the loss is .*, above") as raised:
        run(CONFIG, tmp_path / "run", steps=28, on_spike="stop", spike_factor=0.5, checkpoint_every=0)
    *before, last = losses(tmp_path / "run")
    assert not spikes(before, 0.5)
    assert spikes([*before, last], 0.5) == [len(before) + 1]
    assert f"step {len(before) + 1}: the loss is {last:.6g}" in str(raised.value)


def test_replicas_that_differ_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Executor.step

    def step(self: Executor, *arguments: Any, **options: Any) -> Any:
        out = original(self, *arguments, **options)
        if self.world.rank == 1 and self.step_number == 3:
            self.parameters.views["head.weight"][0, 0] += 1e-9
        return out

    monkeypatch.setattr(Executor, "step", step)
    with pytest.raises(ReplicaError, match=r"head\.weight"):
        run(CONFIG, tmp_path / "run", check_replicas=2, checkpoint_every=0)
    assert len(losses(tmp_path / "run")) == 4


@pytest.mark.parametrize("kept", [False, True])
def test_a_new_run_from_the_weights_of_another(tmp_path: Path, kept: bool) -> None:
    run(CONFIG, tmp_path / "first", steps=4)
    settings = replace(CONFIG, mesh="tp=2", steps=3, init_optimizer="kept" if kept else "fresh", seed=5)
    run(settings, tmp_path / "second", init_from=str(tmp_path / "first"))
    second = lines(tmp_path / "second")
    assert [line["step"] for line in second] == [1, 2, 3]
    # The learning rate begins anew, whatever the moments have seen.
    assert second[0]["lr"] == lines(tmp_path / "first")[0]["lr"]
    run(replace(settings, init_optimizer="fresh"), tmp_path / "fresh", init_from=str(tmp_path / "first"))
    assert losses(tmp_path / "fresh")[0] == losses(tmp_path / "second")[0]
    same = losses(tmp_path / "fresh") == losses(tmp_path / "second")
    assert same != kept


def test_held_out_batches_are_evaluated_on_the_way(tmp_path: Path) -> None:
    run(CONFIG, tmp_path / "run", held_out=2, eval_every=5)
    assert [line["step"] for line in lines(tmp_path / "run") if "held_out_loss" in line] == [5, 10, 12]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 3}, "of a run with seed 0, which --resume goes on with; to begin a new run with 3"),
        ({"model": "llama-tiny", "batch": 4}, "of a run with model 'mlp', which --resume goes on with"),
        ({"dtype": "float32"}, "of a run with dtype 'float64'"),
        ({"steps": 3}, "the run has taken all its 3 steps; ask for more with --steps"),
    ],
)
def test_another_run_is_not_gone_on_with(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    run(CONFIG, tmp_path / "run", steps=3)
    with pytest.raises(ValueError, match=message):
        run(CONFIG, tmp_path / "run", resume=str(tmp_path / "run"), **settings)


def test_nothing_is_written_if_nothing_is_to_be_kept(tmp_path: Path) -> None:
    run(CONFIG, tmp_path / "run", checkpoint_every=0, steps=2)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_newest_stay(tmp_path: Path) -> None:
    run(CONFIG, tmp_path / "two")
    run(CONFIG, tmp_path / "all", keep=0, steps=9)
    steps = [[int(name.split("-")[-2]) for name in find(str(tmp_path / where))[0]] for where in ("two", "all")]
    assert steps == [[12, 9], [9, 6, 3]]


def test_what_a_run_has_left_behind_does_not_count_among_the_newest(tmp_path: Path) -> None:
    run(CONFIG, tmp_path / "run", steps=9, keep=0)
    _, sixth, third = find(str(tmp_path / "run"))[0]
    run(CONFIG, tmp_path / "run", resume=third, steps=7, keep=2)
    found = [(saved.step, saved.address == third) for saved in map(Saved, find(str(tmp_path / "run"))[0])]
    assert found == [(7, False), (6, False)]
    assert not Path(sixth).exists()


def test_checkpoints_by_themselves_have_the_settings_of_their_run(tmp_path: Path) -> None:
    run(CONFIG, tmp_path / "run", steps=3)
    alone = (tmp_path / "run" / "checkpoints").rename(tmp_path / "alone")
    config = defaults(["--resume", str(alone)], TrainConfig())
    assert (config.model, config.mesh, config.batch, config.out) == ("mlp", "dp=2", BATCH, None)


def test_resume_auto_has_the_settings_of_the_run_if_there_is_one(tmp_path: Path) -> None:
    asked = ["--resume", "auto", "--out", str(tmp_path / "run")]
    assert defaults(asked, TrainConfig()) == TrainConfig()
    run(CONFIG, tmp_path / "run", steps=3)
    config = defaults(asked, TrainConfig())
    assert (config.model, config.mesh, config.steps, config.out) == ("mlp", "dp=2", 3, tmp_path / "run")
