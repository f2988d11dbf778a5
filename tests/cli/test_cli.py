"""The command line: readable help, one clean line for a mistake, exit code 2, and YAML under dotted overrides."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from phalanx.cli import COMMANDS, main
from phalanx.cli.explain import Explained
from phalanx.cli.options import defaults
from phalanx.cli.run import split_at_script
from phalanx.cli.train import Options
from phalanx.hardware import Profile
from phalanx.train.config import OptimizerConfig, TrainConfig
from phalanx.train.settings import dump


def parsed(*args: str) -> TrainConfig:
    return tyro.cli(Options, args=list(args), default=Options(run=defaults(list(args), TrainConfig()))).run


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, "--help") == 0
    assert f"usage: phalanx {command}" in capsys.readouterr().out


def exit_code(*args: str) -> object:
    """What the process would end with; tyro prints the help of a command by leaving."""
    try:
        return main(args)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(
    ("command", "choice"),
    [("bench", "collectives"), ("bench", "hardware"), ("bench", "peers"), ("data", "pack"), ("doctor", "links")],
)
def test_help_of_a_sub_command(command: str, choice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, choice, "--help") == 0
    assert f"usage: phalanx {command} {choice}" in capsys.readouterr().out
    assert exit_code(command, choice[:-1]) == 2
    assert f"{command} has no command '{choice[:-1]}'; did you mean '{choice}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--peer", "fsdp"], "there is no peer 'fsdp'; did you mean 'fsdp2'?"),
        (["--shape", "compute"], "there is no shape 'compute'; did you mean 'compute-bound'?"),
        (["--peer", "jax-dp"], "there is no peer 'jax-dp'"),
        (["--ranks", "1"], "--ranks is 1; peers are compared on at least 2"),
        (["--pairs", "0"], "--pairs is 0; it is a number of at least 1"),
        (["--json", "no/such/folder/rows.json"], "no/such/folder/rows.json cannot be written"),
        (["--plot", "rows.bmp"], "--plot rows.bmp ends in .bmp"),
    ],
)
def test_bench_peers_refuses_before_ranks_start(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", *args]) == 2
    assert capsys.readouterr().err.startswith(f"phalanx: {told}")


def test_unknown_command_offers_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "phalanx: there is no command 'trian'; did you mean 'train'?\n"


def test_command_line_alone() -> None:
    assert parsed() == TrainConfig()
    config = parsed("--model", "mlp", "--mesh", "dp=2,tp=2", "--steps", "5", "--sequence-parallel", "--optimizer.lr", "0.5")
    assert config == TrainConfig(
        model="mlp", mesh="dp=2,tp=2", steps=5, sequence_parallel=True, optimizer=OptimizerConfig(lr=0.5)
    )
    assert parsed("--optimizer.max-norm", "None").optimizer.max_norm is None


@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
def test_the_command_line_overrides_the_file(form: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 9\nbatch: 4\noptimizer: {lr: 0.1, warmup: 3}\n")
    config = parsed(*form.format("--config", path).split(), "--steps", "2", "--optimizer.warmup", "1")
    assert config == TrainConfig(steps=2, batch=4, optimizer=OptimizerConfig(lr=0.1, warmup=1))


@pytest.mark.parametrize(
    "args", [["--mesh", "dp=two"], ["--steps", "0"], ["--config", "no/such/file.yaml"], ["--model", "lama-tiny"]]
)
def test_a_mistake_is_one_line_and_exit_code_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("phalanx: ")
    assert err.count("\n") == 1
    assert main(["train", *args, "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_unknown_option_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--stepz", "3"])
    assert ended.value.code == 2
    assert "--steps" in capsys.readouterr().err  # the suggestion


def test_what_is_behind_the_script_is_its_own() -> None:
    assert split_at_script(["--ranks", "4", "a.py", "--ranks", "9"]) == (["--ranks", "4"], ["a.py", "--ranks", "9"])
    assert split_at_script(["--ranks=4", "a.py", "-h"]) == (["--ranks=4"], ["a.py", "-h"])
    assert split_at_script(["--help"]) == (["--help"], [])
    assert split_at_script(["--watch", "a", "--ranks=2", "b.py", "c"]) == (["--watch", "a", "--ranks=2"], ["b.py", "c"])


def test_run_names_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--ranks", "2", "no_such.py"]) == 2
    assert capsys.readouterr().err == "phalanx: no_such.py is not a file\n"


@pytest.mark.parametrize(
    ("command", "option"), [("explain", "--data"), ("explain", "--steps"), ("verify", "--out"), ("verify", "--held-out")]
)
def test_what_a_command_does_not_read_is_refused(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, option, "3"])
    assert ended.value.code == 2
    assert f"Unrecognized options: {option}" in capsys.readouterr().err


def test_a_file_may_say_what_a_command_does_not_read(tmp_path: Path) -> None:
    """The configuration that a run leaves is one to explain."""
    path = tmp_path / "config.yaml"
    path.write_text(dump(TrainConfig(model="mlp", steps=9, data=("text",), out=Path("runs/a"))))
    read = defaults(["--config", str(path)], Explained())
    assert (type(read), read.model, read.steps, read.data) == (Explained, "mlp", 9, ("text",))


@pytest.mark.parametrize("args", [["--data", "no/such/text"], ["--schedule", "1f2b"], ["--mesh", "ep=2"]])
def test_a_mistake_that_needs_no_model_is_told_before_ranks_start(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--mesh", "dp=2", *args]) == 2
    told = capsys.readouterr()
    assert told.out == ""  # it would say that ranks are started
    assert told.err.startswith("phalanx: ")
    assert "rank 0" not in told.err


def test_a_run_that_is_refused_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is there before the ranks meet, for the watch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("what mlp cannot read")
    assert main(["train", "--model", "mlp", "--data", "text"]) == 2
    assert capsys.readouterr().err == "phalanx: --data text: model mlp does not read text\n"
    assert not (tmp_path / "runs").exists()


def test_a_profile_that_lacks_a_link_is_told_before_ranks_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    Profile("a machine", "cpu", 2, {}, ()).save(path)
    assert main(["train", "--mesh", "dp=2", "--profile", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"phalanx: {path} has no messages inside a host (shm) nor between hosts (gloo): it has no links")


def test_run_hands_its_folder_to_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On one host, so through shared memory, which is watched because it was asked for."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-P", "-m", "phalanx", "run", "--watch", "there", "--ranks", "2", str(script)]
    source = Path(__file__).parents[2] / "src"
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=110, env={**os.environ, "PYTHONPATH": str(source)}
    )
    assert ended.returncode == 0, ended.stderr
    assert main(["doctor", "run", str(tmp_path / "there")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("nothing is wrong")
    assert said.count("closed; 5 operations recorded") == 2  # two groups made and destroyed, and the sum


SCRIPT = """
import torch, phalanx as phx
with phx.init(phx.Mesh(dp=2)) as world:
    world.transport.all_reduce(torch.ones(4), world.group("dp")).wait()
"""
