"""Launch recipes: what they say, what they refuse, and what their scripts do with every way in which ranks end."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.cli import main
from phalanx.cli.launch import RECIPES

TRAIN = "train --mesh dp=4 --batch 16 --checkpoint-every 5 --out runs/mine --optimizer.lr 1e-3"
OPTIONS = {"jobset": "--image registry/phalanx:1 --claim training --mount runs"}


def recipe(launcher: str, options: str, train: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["launch", launcher, *OPTIONS.get(launcher, "").split(), *options.split(), "--", *train.split()]) == 0
    return capsys.readouterr().out


# What is refused.


@pytest.mark.parametrize("launcher", RECIPES)
@pytest.mark.parametrize(
    ("options", "change", "said"),
    [
        ("--per-node 3", (), "mesh dp=4 has 4 ranks, which do not divide into hosts of 3; --per-node may be 1, 2, 4"),
        ("--per-node 0", (), "per-node is 0"),
        ("--name My_Run", (), "name is 'My_Run'; it is at most 40 lower-case letters"),
        ("", ("--out runs/mine", ""), "say which, as in --out runs/mine"),
        ("", ("--checkpoint-every 5", ""), "checkpoint_every is None, and a job that is started again goes on from"),
        ("", ("--checkpoint-every 5", "--checkpoint-every 0"), "checkpoint_every is 0"),
        ("", ("--batch 16", "--resume runs/other"), "weights to begin with are --init-from runs/other"),
        ("", ("--batch 16", "--restarts 2"), "restarts is 2, but local ranks alone"),
        ("", ("--batch 16", "--batch 15"), "batch 15 does not divide"),
        ("", ("train ", "trian "), "behind `--` stands what is to be launched"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    launcher: str, options: str, change: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train = TRAIN.replace(*change) if change else TRAIN
    assert not change or train != TRAIN
    assert main(["launch", launcher, *OPTIONS.get(launcher, "").split(), *options.split(), "--", *train.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("launcher", "options", "train", "said"),
    [
        ("slurm", "--time tomorrow", TRAIN, "time is 'tomorrow'"),
        ("slurm", "--options Exclusive", TRAIN, "options has 'Exclusive'"),
        ("slurm", "", TRAIN.replace("runs/mine", "runs/%j"), "reads percent signs"),
        ("slurm", "--restarts -1", TRAIN, "restarts is -1"),
        ("torchrun", "--per-node 2 --hosts one", TRAIN, "hosts are one, 1 of them, but the job has 2"),
        ("mpirun", "--per-node 2 --hosts one two;rm", TRAIN, "hosts has 'two;rm'"),
        ("jobset", "", TRAIN.replace("runs/mine", "/elsewhere/mine"), "Use --out runs/mine"),
        ("jobset", "", TRAIN.replace("runs/mine", "runs/../mine"), "not below runs"),
        ("jobset", "--memory lots", TRAIN, "memory is 'lots'; it is a quantity"),
        ("jobset", "--claim Mine", TRAIN, "claim is 'Mine'"),
    ],
)
def test_what_a_launcher_would_not_take_is_refused(
    launcher: str, options: str, train: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["launch", launcher, *OPTIONS.get(launcher, "").split(), *options.split(), "--", *train.split()]
    assert main(args) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in RECIPES)
    assert main(["launch", "slum"]) == 2
    assert "did you mean 'slurm'?" in capsys.readouterr().err


# What the scripts do.

RANK = """#!{python} -IS
import os, sys
code = open("codes").read().split()
rank = os.environ["RANK_BY_LAUNCHER"]
with open(f"said.{{rank}}", "a") as said: print(*sys.argv[1:], file=said)
start = len(open(f"said.{{rank}}").readlines())
sys.exit(int(code[min(start, len(code)) - 1]))
"""

SRUN = """#!{python} -IS
import os, signal, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[sys.argv.index("phalanx"):]
with open("options", "a") as file: print(*sys.argv[1:sys.argv.index("phalanx")], file=file)
ranks = [subprocess.Popen(command, env={{**os.environ, "RANK_BY_LAUNCHER": str(rank)}}) for rank in range(2)]
codes = [rank.wait() for rank in ranks]
if os.path.exists("cancelled"): os.kill(os.getppid(), signal.SIGTERM)
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


def around(tmp_path: Path, launcher: str) -> dict[str, str]:
    """A folder of commands that stand for the launcher and the ranks, first in the path."""
    commands = tmp_path / "commands"
    commands.mkdir()
    written = {"phalanx": RANK, launcher: SRUN, "scontrol": '#!/bin/sh\necho "$@" >> scontrol\n'}
    for name, text in written.items():
        (commands / name).write_text(text.format(python=sys.executable) if "{python}" in text else text)
        (commands / name).chmod(0o755)
    return {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize("launcher", ["slurm", "mpirun"])
@pytest.mark.parametrize(
    ("codes", "starts", "ended"),
    [
        ("0", 1, 0),
        ("2", 1, 2),  # a mistake ends the same way every time
        ("1 0", 2, 0),
        ("137 1 0", 3, 0),
        ("1", 4, 1),  # 3 restarts are over
        ("143", 1, 143),
    ],
)
def test_ranks_are_started_again_if_that_may_help(
    launcher: str, codes: str, starts: int, ended: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(recipe(launcher, "--per-node 2", TRAIN.replace("dp=4", "dp=2"), capsys))
    (tmp_path / "codes").write_text(codes)
    env = around(tmp_path, "srun" if launcher == "slurm" else "mpirun")
    done = subprocess.run(["bash", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == ended, done.stderr
    said = (tmp_path / "said.1").read_text().splitlines()
    assert said == [f"{TRAIN.replace('dp=4', 'dp=2')} --resume auto"] * starts
    assert done.stderr.count("the ranks are started again") == starts - 1
    assert (tmp_path / "runs" / "mine" / "logs").is_dir()
    # Slurm's job is queued again when its time is up, and then alone.
    requeued = tmp_path / "scontrol"
    assert (requeued.read_text() if requeued.exists() else "") == (
        "requeue 7\n" if launcher == "slurm" and codes == "143" else ""
    )


def test_a_job_that_is_cancelled_or_preempted_is_left_to_slurm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.sh").write_text(recipe("slurm", "", TRAIN, capsys))
    (tmp_path / "codes").write_text("143")
    (tmp_path / "cancelled").touch()
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=around(tmp_path, "srun"), capture_output=True, timeout=60)
    assert done.returncode == 143
    assert not (tmp_path / "scontrol").exists()


def test_the_options_of_a_batch_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--per-node 2 --cpus 6 --time 2-12 --seconds 90 --partition big --options constraint=h100 exclusive"
    script = recipe("slurm", options, TRAIN, capsys)
    assert {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")} == {
        *("job-name=phalanx", "partition=big", "nodes=2", "ntasks-per-node=2", "gpus-per-node=2", "cpus-per-task=6"),
        *(
            "time=2-12",
            "signal=TERM@90",
            "output=phalanx-%j.txt",
            "open-mode=append",
            "requeue",
            "constraint=h100",
            "exclusive",
        ),
    }
    assert "gpus" not in recipe("slurm", "", TRAIN + " --device cpu", capsys)
    path = tmp_path / "job.sh"
    path.write_text(script)
    subprocess.run(["bash", "-n", path], check=True, timeout=60)
    if shutil.which("sbatch") and subprocess.run(["sinfo"], capture_output=True, timeout=60).returncode == 0:
        path.write_text(recipe("slurm", "--per-node 1", TRAIN.replace("dp=4", "dp=1") + " --device cpu", capsys))
        subprocess.run(["sbatch", "--test-only", path], check=True, timeout=60)


def test_words_arrive_as_they_were_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spaces, quotes, dollars and lines of any length."""
    words = ["--data", "my wiki=0.7", "it's $HOME=0.3", "--wandb", "x" * 200, "--layout", "batch=dp"]
    assert main(["launch", "slurm", "--", *TRAIN.split(), *words]) == 0
    (tmp_path / "job.sh").write_text(capsys.readouterr().out)
    (tmp_path / "codes").write_text("0")
    env = around(tmp_path, "srun")
    (tmp_path / "commands" / "phalanx").write_text(
        f"#!{sys.executable} -IS\nimport os, sys\nopen('said.' + os.environ['RANK_BY_LAUNCHER'], 'w').write('\\n'.join(sys.argv[1:]))\n"
    )
    subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=env, check=True, timeout=60)
    assert (tmp_path / "said.0").read_text().split("\n") == [*TRAIN.split(), *words, "--resume", "auto"]


def test_a_recipe_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts.sh"
    assert recipe("torchrun", f"--out {path}", TRAIN, capsys) == ""
    assert path.read_text() == recipe("torchrun", "", TRAIN, capsys)


# The JobSet, by the models of its own schema.


def test_a_jobset_is_one_by_its_schema_and_keeps_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """The models that Kubeflow generates from the schemas of JobSet, Job and Pod; they drop what they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    options = "--per-node 2 --memory 64Gi --cpu 8 --namespace team"
    said = yaml.safe_load(recipe("jobset", options, TRAIN, capsys))
    read = models.JobsetV1alpha2JobSet.from_dict(said)
    assert read.to_dict() == said
    said["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    assert models.JobsetV1alpha2JobSet.from_dict(said).to_dict() != said, "a field that does not exist is noticed"


def test_a_jobset_finds_its_first_pod_and_does_not_expand_the_users_words(capsys: pytest.CaptureFixture[str]) -> None:
    said = yaml.safe_load(recipe("jobset", "--per-node 2 --name mine", TRAIN + " --wandb $(HOME)", capsys))
    jobs = said["spec"]["replicatedJobs"][0]
    pods = jobs["template"]["spec"]
    container = pods["template"]["spec"]["containers"][0]
    # <jobset>-<replicated job>-<job>-<pod>.<subdomain>, by the documentation of JobSet's network
    assert f"--master-addr=mine-{jobs['name']}-0-0.{said['spec']['network']['subdomain']}" in container["command"]
    assert "--node-rank=$(JOB_COMPLETION_INDEX)" in container["command"]
    assert container["command"][-3:] == ["$$(HOME)", "--resume", "auto"]
    assert (pods["parallelism"], pods["completions"], container["resources"]["limits"]) == (2, 2, {"nvidia.com/gpu": "2"})
    assert int(container["env"][0]["value"]) < pods["template"]["spec"]["terminationGracePeriodSeconds"]


def test_every_option_has_its_sentence() -> None:
    """What --help says of it."""
    for kind, _, _ in RECIPES.values():
        source = Path(sys.modules[kind.__module__].__file__ or "").read_text()
        for name in (field.name for field in dataclasses.fields(kind) if field.name in vars(kind).get("__annotations__", {})):
            after: Any = source.partition(f"\n    {name}: ")[2].split("\n")
            assert after[1].strip().startswith('"""'), (kind, name)
