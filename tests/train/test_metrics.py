"""Every step leaves its line, at once, and whoever watches sees one line that says how far the run is."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from phalanx.train.config import TrainConfig
from phalanx.train.folder import RunFolder, read_lines
from phalanx.train.metrics import Recorder, StepMetrics, bytes_text, progress_line, traffic_lines
from phalanx.train.sinks import Sink, TensorBoard, WeightsAndBiases, sinks


def metrics(step: int) -> StepMetrics:
    return StepMetrics(step=step, loss=1 / step, grad_norm=0.5, lr=1e-3, tokens=256, tokens_per_second=1024.0, seconds=0.25)


def test_a_line_per_step_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    with Recorder(3, tmp_path, None) as recorder:
        for step in (1, 2, 3):
            recorder.record(metrics(step))
            lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
            assert [line["step"] for line in lines] == list(range(1, step + 1))
            assert list(lines[-1]) == ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "seconds"]
    assert recorder.first == metrics(1)
    assert recorder.last == metrics(3)


def test_plain_lines_when_nobody_watches() -> None:
    stream = io.StringIO()
    with Recorder(100, None, Console(file=stream, force_terminal=False)) as recorder:
        for step in range(1, 101):
            recorder.record(metrics(step))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 21  # the first and every fifth
    assert lines[-1] == "step 100/100 · loss 0.0100 · 1,024 tokens/s · 0:00:00 left"


def test_one_line_on_a_terminal() -> None:
    stream = io.StringIO()
    with Recorder(2, None, Console(file=stream, force_terminal=True, width=80)) as recorder:
        recorder.record(metrics(1))
        recorder.record(metrics(2))
    assert "step 1/2" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_time_left() -> None:
    assert progress_line(metrics(10), 130, 61.0).endswith("2:02:00 left")


def test_traffic_by_axis() -> None:
    totals = {("tp", "all_reduce"): (10, 4096), ("dp", "all_reduce"): (2, 100), ("tp", "all_gather"): (1, 1024)}
    assert traffic_lines(totals, 2) == [
        "  dp: 100 B, 50 B a step (all_reduce 100 B in 2 calls)",
        "  tp: 5.0 KiB, 2.5 KiB a step (all_gather 1.0 KiB in 1 calls, all_reduce 4.0 KiB in 10 calls)",
    ]
    assert bytes_text(3 * 2**40) == "3.0 TiB"


def test_a_resumed_run_goes_on_in_the_same_file_and_counts_its_own_steps(tmp_path: Path) -> None:
    with Recorder(100, tmp_path, None) as recorder:
        for step in range(1, 41):
            recorder.record(metrics(step))
    RunFolder(tmp_path).rewind(30)
    stream = io.StringIO()
    with Recorder(100, tmp_path, Console(file=stream, force_terminal=False), first_step=31) as recorder:
        for step in range(31, 101):
            # The first step of a process is slow and says nothing about those to come.
            recorder.record(replace(metrics(step), seconds=60.0 if step == 31 else 0.5))
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl").rows] == list(range(1, 101))
    assert (recorder.first or metrics(1)).step == 31
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 31/100 · loss 0.0323 · 1,024 tokens/s · 1:09:00 left"
    assert lines[1] == "step 35/100 · loss 0.0286 · 1,024 tokens/s · 0:00:32 left"  # 65 × 0.5 s, rounded to even
    with Recorder(100, tmp_path, None):
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == ""  # a new run replaces what is there


def test_rewinding_while_it_runs(tmp_path: Path) -> None:
    with Recorder(9, tmp_path, None) as recorder:
        for step in (1, 2, 3, 4):
            recorder.record(metrics(step))
        recorder.rewind(2, why="step 5: loss is not finite")
        for step in (3, 4):
            recorder.record(replace(metrics(step), loss=9.0))
    rows = read_lines(tmp_path / "metrics.jsonl").rows
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 0.5), (3, 9.0), (4, 9.0)]
    [event] = read_lines(tmp_path / "events.jsonl").rows
    assert (event["kind"], event["step"], event["dropped"], event["why"]) == ("rewind", 2, 2, "step 5: loss is not finite")
    Recorder(9, None, None).rewind(2)  # on other ranks


def test_evaluations_are_lines_of_their_own(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Recorder(9, tmp_path, Console(file=stream)) as recorder:
        recorder.record(metrics(1))
        recorder.record_evaluation(1, math.log(20.0), 4096)
        recorder.record_evaluation(2, 1e4, 1)
        recorder.record_evaluation(3, math.nan, 0)
    first, second, third = read_lines(tmp_path / "metrics.jsonl").rows[1:]
    assert list(first) == ["step", "held_out_loss", "perplexity", "held_out_tokens"]
    assert (first["step"], first["held_out_tokens"]) == (1, 4096)
    assert first["perplexity"] == pytest.approx(20.0, rel=1e-15)  # one rounding of log, one of exp
    assert (second["perplexity"], second["not_finite"]) == (None, {"perplexity": "inf"})
    assert third["not_finite"] == {"held_out_loss": "nan", "perplexity": "nan"}
    assert "step 1/9 · held-out loss 2.9957 · perplexity 20.00" in stream.getvalue()


def test_lines_of_steps_that_went_wrong(tmp_path: Path) -> None:
    with Recorder(9, tmp_path, None) as recorder:
        recorder.record(replace(metrics(1), loss=math.nan, grad_norm=math.inf, skipped=True))
    [row] = read_lines(tmp_path / "metrics.jsonl").rows
    assert (row["loss"], row["grad_norm"], row["skipped"]) == (None, None, True)
    assert row["not_finite"] == {"loss": "nan", "grad_norm": "inf"}


class Fake:
    """A sink that remembers, and raises when its name says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: list[Any] = []

    def _do(self, what: str, *told: Any) -> None:
        if self.name == what:
            raise ConnectionError("no network")
        self.told.append((what, *told))

    def open(self) -> None:
        self._do("open")

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._do("record", step, dict(values))

    def close(self, *, failed: bool) -> None:
        self._do("close", failed)


def test_a_sink_that_fails_is_told_no_more_and_that_is_said_once(tmp_path: Path) -> None:
    stream = io.StringIO()
    every = [Fake(name) for name in ("open", "record", "close", "good")]
    with Recorder(9, tmp_path, Console(file=stream, width=200), sinks=every) as recorder:
        recorder.record(metrics(1))
        recorder.record(metrics(2))
        recorder.record_evaluation(2, 1.0, 64)
    broken, late, last, good = (each.told for each in every)
    assert not broken
    assert late == [("open",)]
    assert last == good[:-1]
    assert [what for what, *_ in good] == ["open", "record", "record", "record", "close"]
    assert good[1] == ("record", 1, {"loss": 1.0, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_second": 1024.0, "seconds": 0.25})
    assert good[3] == ("record", 2, {"held_out_loss": 1.0, "perplexity": math.e})
    assert good[-1] == ("close", False)
    assert len(read_lines(tmp_path / "metrics.jsonl").rows) == 3
    warnings = [line for line in stream.getvalue().splitlines() if line.startswith("WARNING: ")]
    assert [line.split()[1] for line in warnings] == ["open", "record", "close"]
    assert "ConnectionError: no network; training goes on, and metrics.jsonl has everything" in warnings[0]
    told = read_lines(tmp_path / "events.jsonl").rows
    assert [(row["kind"], row["step"]) for row in told] == [("warning", 0), ("warning", 1), ("warning", 2)]


def test_a_run_that_fails_closes_its_sinks_as_failed(tmp_path: Path) -> None:
    sink = Fake("good")
    with pytest.raises(FloatingPointError), Recorder(9, tmp_path, None, sinks=[sink]):
        raise FloatingPointError
    assert sink.told[-1] == ("close", True)


class WandB(ModuleType):
    """Records what is asked of the package, which is not needed."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []

    def init(self, **settings: Any) -> WandB:
        self.calls.append(("init", settings))
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define_metric", name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.calls.append(("log", values))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


def test_weights_and_biases_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = WandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = TrainConfig(model="mlp", wandb="project")
    for first_step in (1, 3, 1):
        with Recorder(
            4, tmp_path, None, first_step=first_step, sinks=sinks(config, tmp_path, first_step=first_step)
        ) as recorder:
            recorder.record(metrics(first_step))
    starts = [settings for name, *rest in wandb.calls if name == "init" for settings in rest]
    first, resumed, fresh = (settings["id"] for settings in starts)
    assert first == resumed != fresh
    assert starts[0]["project"] == "project"
    assert starts[0]["resume"] == "allow"
    assert starts[0]["config"]["model"] == "mlp"
    assert starts[0]["dir"] == str(tmp_path)
    assert wandb.calls[1:3] == [("define_metric", "step", None), ("define_metric", "*", "step")]
    assert wandb.calls[3][1]["step"] == 1
    assert wandb.calls[3][1]["train/loss"] == 1.0
    assert wandb.calls[4] == ("finish", 0)
    assert not any(name == "log" and "step" not in rest[0] for name, *rest in wandb.calls)


def test_weights_and_biases_without_a_network_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = WandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(wandb, "init", lambda **_: (_ for _ in ()).throw(OSError("no route to host")))
    stream = io.StringIO()
    told: list[Sink] = [WeightsAndBiases("project", TrainConfig(), tmp_path)]
    with Recorder(4, tmp_path, Console(file=stream, width=300), sinks=told) as recorder:
        recorder.record(metrics(1))
    assert "Weights & Biases is told no more: OSError: no route to host. WANDB_MODE=offline keeps" in stream.getvalue()


def test_a_missing_package_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"--wandb needs the package wandb .*pip install 'phalanx\[wandb\]'"):
        sinks(TrainConfig(wandb="x"), tmp_path)
    with pytest.raises(ValueError, match=r"--tensorboard needs the package tensorboard .*'phalanx\[tensorboard\]'"):
        sinks(TrainConfig(tensorboard=True), tmp_path)
    assert sinks(TrainConfig(), tmp_path) == []


def test_tensorboard_has_the_curve_of_a_resumed_run_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def record(first_step: int, last_step: int, loss: float) -> None:
        told: list[Sink] = [TensorBoard(tmp_path, first_step)]
        with Recorder(6, tmp_path, None, first_step=first_step, sinks=told) as recorder:
            for step in range(first_step, last_step + 1):
                recorder.record(replace(metrics(step), loss=loss))
            recorder.record_evaluation(last_step, 2.0, 64)

    record(1, 4, 9.0)  # an older run in this folder
    record(1, 4, 1.0)
    record(3, 6, 0.5)
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("train/loss")] == [
        *((1, 1.0), (2, 1.0)),
        *((3, 0.5), (4, 0.5), (5, 0.5), (6, 0.5)),
    ]
    assert [each.step for each in read.Scalars("held_out/perplexity")] == [6]
