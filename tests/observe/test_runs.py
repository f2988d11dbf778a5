"""Runs are listed as they stand, compared number by number, and no damaged folder ends the list."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.cli import main
from phalanx.observe import curves
from phalanx.observe.curves import positions
from phalanx.observe.runs import (
    age,
    compare,
    find_runs,
    named_runs,
    number,
    read_run,
    spread,
)
from phalanx.train.config import OptimizerConfig, TrainConfig
from phalanx.train.folder import RunFolder
from phalanx.train.metrics import Recorder, StepMetrics

Losses = Sequence[float]


def make(
    path: Path, losses: Losses, *, held_out: dict[int, float] | None = None, speed: float = 1000.0, **settings: Any
) -> RunFolder:
    """A run whose step k has losses[k-1], 64 tokens a step at that speed; its first step is ten times as slow."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.write_config(TrainConfig(**{"model": "mlp", "steps": len(losses), **settings}))
    folder.event("start", 0)
    with Recorder(len(losses), path, None) as recorder:
        for step, loss in enumerate(losses, start=1):
            rate = speed / 10 if step == 1 else speed
            recorder.record(
                StepMetrics(step=step, loss=loss, grad_norm=1.0, lr=0.1, tokens=64, tokens_per_second=rate, seconds=64 / rate)
            )
            if held_out and step in held_out:
                recorder.record_evaluation(step, held_out[step], 10)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Reading


def test_a_run_as_it_stands(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", [4.0, 3.0, 2.0], held_out={2: 2.5, 3: 2.75}, mesh="dp=2", steps=5)
    folder.event("checkpoint", 2)
    folder.event("restart", 3)
    folder.event("resume", 2)
    run = read_run(tmp_path / "a")
    assert (run.steps, run.asked, run.loss, run.best_held_out) == (3, 5, 2.0, 2.5)
    assert run.speeds == [1000.0]  # steps 1 and 3 are the first of their processes
    assert (run.state, run.count("restart"), run.checkpoint) == ("interrupted", 1, 2)
    assert run.settings["mesh"] == "dp=2"
    assert run.problems == ()
    with folder.lock():
        assert read_run(tmp_path / "a").state == "running"
    assert read_run(make(tmp_path / "b", [1.0]).path).state == "finished"


def test_only_the_events_of_this_start_count(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", [4.0])
    folder.event("restart", 1)
    folder.event("checkpoint", 40)
    folder.event("start", 0)
    folder.event("checkpoint", 4)
    folder.event("checkpoint", 8)
    run = read_run(folder.path)
    assert (run.count("restart"), run.checkpoint) == (0, 8)
    folder.event("rewind", 4)
    assert read_run(folder.path).checkpoint == 4


def test_of_a_step_that_came_again_the_last_line_counts(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", [4.0, 3.0])
    with folder.metrics.open("a") as file:
        file.write('{"step": 2, "loss": 2.5}\n')
    run = read_run(folder.path)
    assert [(row["step"], row["loss"]) for row in run.rows] == [(1, 4.0), (2, 2.5)]


def test_values_that_are_null_or_nonsense() -> None:
    assert math.isnan(number({"loss": None}, "loss"))
    assert math.isnan(number({"loss": "x"}, "loss"))
    assert math.isnan(number({"loss": True}, "loss"))
    assert math.isnan(number({}, "loss"))
    assert number({"loss": 2}, "loss") == 2.0


def cut(folder: RunFolder) -> None:
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 3, "lo')


def garbled(folder: RunFolder) -> None:
    with folder.metrics.open("ab") as file:
        file.write(b'\x00\xff\n[1, 2]\n{"loss": 1}\n{"step": "x", "loss": 1}\n')


def of_tomorrow(folder: RunFolder) -> None:
    folder.config.write_text(folder.config.read_text() + "hyperspeed: 9\n")


DAMAGES: dict[str, tuple[Callable[[RunFolder], object], str, int]] = {
    "half a line": (cut, "metrics.jsonl ends in a line that was cut off", 2),
    "garbage": (garbled, "metrics.jsonl has 2 lines that are not JSON objects: line 3, 4", 2),
    "lines of nothing": (garbled, "metrics.jsonl has 2 lines without a step, or without a loss", 2),
    "no metrics": (lambda folder: folder.metrics.unlink(), "metrics.jsonl cannot be read: No such file or directory", 0),
    "a folder": (
        lambda folder: (folder.metrics.unlink(), folder.metrics.mkdir()),
        "metrics.jsonl cannot be read: Is a directory",
        0,
    ),
    "empty": (lambda folder: folder.metrics.write_bytes(b""), "metrics.jsonl has no step", 0),
    "no config": (lambda folder: folder.config.unlink(), "config.yaml cannot be read: No such file or directory", 2),
    "no YAML": (lambda folder: folder.config.write_text("a: ["), "config.yaml cannot be read: while parsing a flow node", 2),
    "newer": (of_tomorrow, "config.yaml has the setting 'hyperspeed', which this version does not know", 2),
    "events": (
        lambda folder: folder.events.write_bytes(b"\x00\n"),
        "events.jsonl has 1 lines that are not JSON objects: line 1",
        2,
    ),
    "environment": (lambda folder: folder.environment.write_text("["), "environment.json is not a JSON object", 2),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_listed_with_what_is_wrong(damage: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the run beside it is untouched by that."""
    harm, problem, steps = DAMAGES[damage]
    make(here / "runs" / "good", [3.0, 2.0])
    bad = make(here / "runs" / "bad", [3.0, 2.0])
    harm(bad)
    found = {run.name: run for run in find_runs([Path("runs")])}
    assert set(found) == {"good", "bad"}
    assert problem in found["bad"].problems
    assert found["bad"].steps == steps
    assert found["good"].problems == ()
    assert main(["runs"]) == 0
    assert f"bad: {problem}" in capsys.readouterr().out
    assert main(["runs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert problem in listed[0]["problems"]
    assert main(["runs", "--compare", "bad", "good"]) == 0
    assert len(positions(found["bad"], "tokens")) == steps + 1


def test_a_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", [3.0])
    cut(folder)
    with folder.lock():
        assert read_run(folder.path).problems == ()


# Which runs


def test_runs_are_found_below_a_folder(here: Path) -> None:
    make(here / "runs" / "a", [1.0])
    make(here / "runs" / "sweep" / "lr1", [1.0])
    make(here / "runs" / "sweep" / "lr2", [1.0])
    (here / "runs" / "a" / "checkpoints").mkdir()
    (here / "runs" / "empty").mkdir()
    (here / "runs" / ".hidden").mkdir()
    runs = {run.name: run.problems for run in find_runs([Path("runs")])}
    assert list(runs) == ["a", "empty", "sweep/lr1", "sweep/lr2"]
    assert runs["empty"] == ("no run folder: it has none of config.yaml, metrics.jsonl, events.jsonl, lock, launcher",)
    assert [run.name for run in find_runs([Path("runs/sweep"), Path("runs/a"), Path("runs/sweep/lr1")])] == [
        "lr1",
        "lr2",
        "runs/a",
    ]
    assert [run.path for run in named_runs(["sweep/lr2", "runs/a"], [Path("runs")])] == [Path("runs/sweep/lr2"), Path("runs/a")]


@pytest.mark.parametrize("mark", ["lock", "launcher"])
def test_a_run_that_has_written_nothing_yet_is_one(mark: str, here: Path) -> None:
    (here / "runs" / "begun" / "logs").mkdir(parents=True)
    (here / "runs" / "begun" / mark).touch()
    assert [run.name for run in find_runs([Path("runs")])] == ["begun"]
    assert [(run.name, run.state) for run in find_runs([Path("runs/begun")])] == [("runs/begun", "unknown")]


def test_a_name_with_a_typo(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(here / "runs" / "llama-tiny-dp2", [1.0])
    make(here / "runs" / "mlp", [1.0])
    (here / "runs" / "empty").mkdir()
    for args, said in (
        (["--compare", "mlp", "lama-tiny-dp2"], "there is no run 'lama-tiny-dp2'; did you mean 'llama-tiny-dp2'?"),
        (["--compare", "mlp", "zzz"], "there is no run 'zzz'; there are empty, llama-tiny-dp2, mlp"),
        (["--compare", "mlp", "mlp"], "mlp mlp names a run twice"),
        (["--compare", "mlp"], "1 run is nothing to compare; name two or more, as in --compare a b"),
        (["--compare", "mlp", "runs/empty"], "runs/empty is no run folder: it has none of"),
        (["runs/mpl"], "there is no run 'runs/mpl'; did you mean 'runs/mlp'?"),
        (["--against", "tokens"], "--against tokens is for --plot, which draws"),
        (["--sort", "loss", "--compare", "mlp", "llama-tiny-dp2"], "--sort loss is for the list"),
        (["--plot", "x.gif"], "--plot x.gif ends in .gif; there are .png, .svg, .pdf"),
        (["--plot", "no/x.png"], "--plot no/x.png: there is no folder no"),
    ):
        assert main(["runs", *args]) == 2
        assert capsys.readouterr().err.startswith(f"phalanx: {said}")
    shutil.rmtree(here / "runs")
    (here / "runs").mkdir()
    assert main(["runs"]) == 2
    assert "there are no runs in runs/" in capsys.readouterr().err
    (here / "runs").rmdir()
    assert main(["runs"]) == 2
    assert "there is no folder runs/ here" in capsys.readouterr().err


# The list


def test_the_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(here / "runs" / "b", [4.0, 3.0, 2.0], held_out={2: 2.5}, mesh="dp=2", speed=12345.0, steps=9).event("checkpoint", 2)
    make(here / "runs" / "a", [math.nan], speed=1.5)
    assert main(["runs"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    titles = ["name", "model", "mesh", "steps", "loss", "held-out", "tokens/s", "state", "restarts", "started", "checkpoint"]
    assert lines == [
        titles,
        ["a", "mlp", "one", "rank", "1/1", "nan", "–", "0.15", "finished", "0", "just", "now", "–"],
        ["b", "mlp", "dp=2", "3/9", "2.0000", "2.5000", "12,345", "interrupted", "0", "just", "now", "step", "2"],
    ]


@pytest.mark.parametrize(
    ("key", "names"),
    [("name", "abcd"), ("loss", "bcad"), ("held-out", "cbad"), ("speed", "cbad"), ("steps", "bcad"), ("started", "cabd")],
)
def test_sorting_has_what_is_missing_last(key: str, names: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(here / "runs" / "c", [2.0, 2.0], held_out={1: 1.0}, speed=300.0)
    make(here / "runs" / "a", [math.nan], speed=200.0)
    make(here / "runs" / "b", [4.0, 3.0, 1.0], held_out={1: 2.0}, speed=100.0)
    make(here / "runs" / "d", [])
    for at, name in enumerate("cabd"):
        path = here / "runs" / name / "events.jsonl"
        path.write_text(json.dumps({"order": 1, "kind": "start", "step": 0, "time": f"2026-01-0{at + 1}T00:00:00.000Z"}) + "\n")
    assert main(["runs", "--sort", key, "--json"]) == 0
    assert "".join(run["name"] for run in json.loads(capsys.readouterr().out)) == names


def test_ages() -> None:
    at = datetime(2026, 1, 10, 12, 0, tzinfo=UTC)
    for started, said in (
        ("2026-01-10T11:59:01Z", "just now"),
        ("2026-01-10T11:59:00.000Z", "1 min ago"),
        ("2026-01-10T10:00:00Z", "2 h ago"),
        ("2026-01-08T12:00:00Z", "2 days ago"),
        ("2026-01-08T12:00:01Z", "47 h ago"),
        ("2026-01-11T00:00:00Z", "just now"),  # another host's clock
        ("yesterday", "–"),
        (None, "–"),
    ):
        assert age(started, at) == said


# Comparing


def test_what_differs_and_where_the_losses_part(tmp_path: Path) -> None:
    first = make(tmp_path / "a", [4.0, 3.0, 2.0, 1.0], speed=1000.0, held_out={4: 1.5})
    other = make(
        tmp_path / "b",
        [4.0, 3.0, 2.5],
        speed=2500.0,
        steps=4,
        mesh="dp=2",
        optimizer=OptimizerConfig(lr=0.5),
        out=tmp_path / "b",
    )
    for folder, threads in ((first, "1"), (other, "2")):
        folder.write_environment(
            {"git": {"commit": "abc"}, "machine": {"host": "h", "gpus": []}, "variables": {"OMP_NUM_THREADS": threads}}
        )
    found = compare([read_run(tmp_path / "a", "a"), read_run(tmp_path / "b", "b")])
    assert found.settings == {"mesh": ("", "dp=2"), "optimizer.lr": (0.003, 0.5)}
    assert found.environment == {"OMP_NUM_THREADS": ("1", "2")}
    assert found.losses == {1: (4.0, 4.0), 2: (3.0, 3.0), 3: (2.0, 2.5)}
    assert (found.common, found.first_apart, found.tokens_alike) == (3, (3, "b"), True)
    assert found.relative_speeds == (1.0, 2.5)
    assert found.held_out == (1.5, None)


def test_equal_runs_are_said_to_be_equal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        make(here / "runs" / name, [4.0, math.nan, 2.0])
    assert main(["runs", "--compare", "a", "b"]) == 0
    shown = capsys.readouterr().out
    assert "no setting differs" in shown
    assert "equal to the bit in all 3 common steps" in shown
    assert main(["runs", "--compare", "a", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["losses"] == {"1": [4.0, 4.0], "2": [None, None], "3": [2.0, 2.0]}
    assert found["first_apart"] is None


def test_the_smallest_difference_is_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(here / "runs" / "a", [4.0, 3.0])
    make(here / "runs" / "b", [4.0, math.nextafter(3.0, 4.0)])
    make(here / "runs" / "c", [4.0, 3.0], batch=8)
    assert main(["runs", "--compare", "a", "c", "b"]) == 0
    shown = capsys.readouterr().out
    assert "2 common steps; the first that is not equal to the bit is step 2, in b" in shown
    assert "3.0000 (+4.4e-16)" in shown
    assert shown.splitlines()[1].split() == ["batch", "–", "8", "–"]


def test_steps_of_other_sizes_are_pointed_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(here / "runs" / "a", [4.0])
    folder = make(here / "runs" / "b", [4.0])
    folder.metrics.write_text(folder.metrics.read_text().replace('"tokens": 64', '"tokens": 128'))
    make(here / "runs" / "c", [])
    assert main(["runs", "--compare", "a", "b"]) == 0
    assert "a step is not as many tokens in each run: --plot FILE --against tokens" in capsys.readouterr().out
    assert main(["runs", "--compare", "a", "c"]) == 0
    assert "no step is common to all runs" in capsys.readouterr().out


def test_steps_that_are_shown_are_spread_out() -> None:
    assert spread([1, 2, 3], 8) == [1, 2, 3]
    assert spread(range(1, 101), 5) == [1, 26, 51, 75, 100]
    assert spread([], 8) == []


# Curves


def test_positions_add_up(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", [4.0, 3.0, 2.0], speed=128.0)
    assert positions(read_run(folder.path), "steps") == {1: 1.0, 2: 2.0, 3: 3.0}
    assert positions(read_run(folder.path), "tokens") == {0: 0.0, 1: 64.0, 2: 128.0, 3: 192.0}
    assert positions(read_run(folder.path), "seconds") == {0: 0.0, 1: 5.0, 2: 5.5, 3: 6.0}
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text(lines[0] + lines[2])
    assert positions(read_run(folder.path), "tokens") == {0: 0.0, 1: 64.0, 3: 192.0}


def test_the_mean_that_is_drawn() -> None:
    assert curves.running_mean([4.0, 2.0, 6.0, 0.0], 2) == [4.0, 3.0, 4.0, 3.0]
    found = curves.running_mean([1.0, math.nan, 3.0, math.inf, 5.0], 3)
    np.testing.assert_array_equal(found, [1.0, math.nan, 2.0, math.nan, 4.0])


@pytest.mark.parametrize("against", ["steps", "tokens", "seconds"])
def test_curves_are_drawn(against: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    make(here / "runs" / "a", [4 / step for step in range(1, 301)], held_out={100: 0.5, 300: 0.25})
    make(here / "runs" / "b", [3.0, math.nan, 1.0])
    make(here / "runs" / "none", [])
    garbled(make(here / "runs" / "bad", [2.0]))
    assert main(["runs", "--plot", "out.svg", "--against", against]) == 0
    assert capsys.readouterr().out.endswith("\ndrawn in out.svg\n")
    drawn = (here / "out.svg").read_text()
    for text in (
        "<!-- a -->",
        "<!-- a, held-out -->",
        "<!-- b -->",
        "<!-- bad -->",
        "lines: training loss, mean of the last 3 steps; dots: held-out loss",
    ):
        assert text in drawn
    assert "<!-- none -->" not in drawn
    os.chdir(here / "runs" / "none")
    assert main(["runs", ".", "--plot", "x.svg"]) == 2
    assert "none of . has a step" in capsys.readouterr().err
