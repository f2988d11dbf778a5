"""A run leaves what it promises, gives the same loss curve on every mesh, and stops when numbers stop being numbers."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.comm.local import local
from phalanx.mesh import Mesh
from phalanx.train.config import OptimizerConfig, TrainConfig
from phalanx.train.folder import run_folder
from phalanx.train.loop import train
from phalanx.train.settings import load

SOURCE = Path(__file__).parents[2] / "src"


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(4000)))
    return path


def run(config: TrainConfig) -> Path:
    with local(config.parsed_mesh()) as world:
        folder = train(config, world).folder
    assert folder is not None
    return folder


def test_the_curve_is_the_same_on_every_mesh(tmp_path: Path, text: Path) -> None:
    curves = {}
    for mesh, microbatches in (("", 1), ("dp=2", 2), ("dp=2,tp=2", 1), ("pp=2,tp=2", 2)):
        config = TrainConfig(mesh=mesh, microbatches=microbatches, steps=4, batch=4, seq=16, dtype="float64", data=(str(text),))
        curves[mesh] = losses(run(TrainConfig(**{**vars(config), "out": tmp_path / f"run-{mesh}"})))
    assert len(curves[""]) == 4
    assert curves[""][0] != curves[""][-1]
    for curve in curves.values():
        assert curve == pytest.approx(curves[""], rel=1e-10)  # float64 sums in another order, through four AdamW steps


def test_a_run_leaves_its_configuration_and_a_line_per_step(tmp_path: Path, text: Path) -> None:
    config = TrainConfig(mesh="dp=2", steps=3, batch=4, seq=16, data=(str(text),), out=tmp_path / "run")
    stream = io.StringIO()
    with local(Mesh(dp=2)) as world:
        summary = train(config, world, Console(file=stream, width=200))
    written = load(tmp_path / "run" / "config.yaml", TrainConfig())
    assert written == replace(config, out=None)  # what is run from this file must not replace this run
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["tokens"] == 4 * 16 for line in lines)
    assert summary.first.loss == lines[0]["loss"]
    shown = stream.getvalue()
    assert f"loss {lines[0]['loss']:.4f} at step 1 → {lines[-1]['loss']:.4f} at step 3" in shown
    assert "  dp: " in shown
    assert (tmp_path / "run").name in shown.splitlines()[-1]


def test_folders_are_not_used_twice_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(model="hf-tiny:gpt2", mesh="dp=2,tp=2")
    assert [run_folder(config).name for _ in range(2)] == ["hf-tiny-gpt2-dp2-tp2", "hf-tiny-gpt2-dp2-tp2.2"]
    assert run_folder(TrainConfig(out=Path("mine"))) == run_folder(TrainConfig(out=Path("mine"))) == Path("mine")


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path, text: Path) -> None:
    settings = OptimizerConfig(lr=1e30, warmup=1, max_norm=None)
    config = TrainConfig(steps=20, batch=2, seq=8, data=(str(text),), out=tmp_path / "run", optimizer=settings)
    with pytest.raises(FloatingPointError, match=r"step \d+: .* not finite"):
        run(config)
    assert 0 < len(losses(tmp_path / "run")) < 20


def command(name: str, *args: str, folder: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "phalanx", name, "--mesh", "dp=2", "--batch", "4", *args],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )


def test_local_ranks_start_by_themselves_and_tell_once(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    # torch looks for modules of this name; a user's file in the current folder must not be taken for one
    (tmp_path / "cuda.py").write_text("raise RuntimeError('this is the file of a user')")
    process = command("train", "--seq", "16", "--steps", "3", "--data", str(text), "--out", str(out), folder=tmp_path)
    said, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert len(losses(out)) == 3
    assert sum(line.startswith("step 3/3") for line in said.splitlines()) == 1
    alone = TrainConfig(batch=4, seq=16, steps=3, data=(str(text),), out=tmp_path / "alone")
    # float32 sums in another order: some 1e3 additions of 6e-8 each
    assert losses(out) == pytest.approx(losses(run(alone)), rel=1e-4)


def test_a_mistake_is_told_once_for_all_ranks(text: Path) -> None:
    process = command("train", "--model", "mlp", "--data", str(text))
    _, err = process.communicate(timeout=110)
    assert process.returncode == 2
    assert re.fullmatch(r"phalanx: rank [01] of 2: --data .*: model mlp does not read text\n", err)


def test_verify_over_processes() -> None:
    process = command("verify", "--model", "mlp", "--steps", "2", "--processes", "--json")
    said, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    comparison = json.loads(said)
    assert comparison["first_divergence"] is None
    assert 0 < comparison["grad"] < 1e-10


def test_a_killed_rank_ends_training_and_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = command("train", "--model", "mlp", "--steps", "1000000", "--out", str(out))
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no step ended within 90 s"
        time.sleep(0.05)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 15  # seconds, not the minute of a communication's time-out
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 of 2" in err
    assert "SIGKILL" in err
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
