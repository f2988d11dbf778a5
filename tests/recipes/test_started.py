"""The recipes started for real: torchrun on two hosts with a rank killed between, and mpirun where there is one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
from tests.hosts import two_hosts

from phalanx.bench.bed import Host
from phalanx.cli import main

ROOT = Path(__file__).parents[2]
STEPS = 60


def commands(tmp_path: Path) -> dict[str, str]:
    """Where the shell finds this `phalanx` and torchrun, whether they are installed or not."""
    folder = tmp_path / "commands"
    folder.mkdir()
    for name, module in (("phalanx", "phalanx"), ("torchrun", "torch.distributed.run")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -P -W ignore -m {module} "$@"\n')
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def train(ranks: int, steps: int, folder: Path) -> list[str]:
    return f"train --model mlp --mesh dp={ranks} --device cpu --steps {steps} --checkpoint-every 10 --out {folder}".split()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rank_on(host: Host) -> int:
    """The process of a rank on a host: torchrun's child that is told a rank."""
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
    for pid in map(int, listed.stdout.split()):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"phalanx" in command and b"train" in command and b"torch.distributed.run" not in command:
            return pid
    raise AssertionError(f"no rank runs on {host.name}")


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_torchrun_on_two_hosts_starts_again_after_a_rank_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each host runs its line of the recipe. A rank of the second is killed after the first checkpoint: all go on from one."""
    run = tmp_path / "run"
    killed: list[int] = []
    with two_hosts("100mbit") as bed:  # some 0.1 s a step, so that there is a run left to be killed
        addresses = [host.address for host in bed.hosts]
        recipe = ["launch", "torchrun", "--per-node", "2", "--max-restarts", "1", "--hosts", *addresses]
        assert main([*recipe, "--", *train(4, STEPS, run)]) == 0
        of_hosts = capsys.readouterr().out.split("# on ")[1:]
        assert [text.partition("\n")[0] for text in of_hosts] == addresses

        def kill() -> None:
            until = time.monotonic() + 120
            while time.monotonic() < until and not (killed or len(lines(run / "metrics.jsonl")) > 20):
                time.sleep(0.05)
            killed.append(rank_on(bed.hosts[1]))
            os.kill(killed[0], signal.SIGKILL)

        killer = Thread(target=kill)
        killer.start()
        shell = [["bash", "-c", text.partition("\n")[2]] for text in of_hosts]
        ends = bed.run(shell, seconds=240, env=commands(tmp_path))
        killer.join()
    said = "\n".join(path.read_text()[-4000:] for path in (run / "logs").iterdir())
    assert [end.code for end in ends] == [0, 0], said
    resumed = [event for event in lines(run / "events.jsonl") if event["kind"] == "resume"]
    assert [event["step"] >= 10 for event in resumed] == [True], "once, and not from the start"
    assert lines(run / "metrics.jsonl")[-1]["step"] == STEPS
    first = (run / "logs" / f"{addresses[0]}.txt").read_text()
    assert first.count("learning from") == 2, "both starts are in the file of their host, or of rank 0's"
    assert "going on after step" in first


@pytest.mark.nightly
@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_mpirun_starts_ranks_that_stop_with_a_checkpoint_and_go_on(
    flavour: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script is told to stop, as a batch system would; started again, it ends the run."""
    mpirun = shutil.which("mpirun")
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60).stdout if mpirun else ""
    if ("Open MPI" in version) != (flavour == "openmpi") or not version:
        pytest.skip(f"no mpirun of {flavour} is installed")
    run = tmp_path / "run"
    root = {f"{whose}_ALLOW_RUN_AS_ROOT{sure}": "1" for whose in ("OMPI", "PRTE") for sure in ("", "_CONFIRM")}
    env = {**os.environ, **commands(tmp_path), **root}
    recipe = ["launch", "mpirun", "--flavour", flavour, "--hosts", "localhost", "--port", str(free_port())]
    script = tmp_path / "job.sh"
    assert main([*recipe, "--out", str(script), "--", *train(2, 100_000, run)]) == 0
    with (tmp_path / "said").open("wb") as said:
        job = subprocess.Popen(["bash", script], env=env, stdout=said, stderr=said, cwd=tmp_path)
        until = time.monotonic() + 90
        while len(lines(run / "metrics.jsonl")) < 3:
            assert job.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        # Open MPI passes on SIGUSR1 instead.
        ended = 128 + (signal.SIGUSR1 if flavour == "openmpi" else signal.SIGTERM)
        assert job.wait(timeout=60) == ended, (tmp_path / "said").read_text()
    stopped = lines(run / "metrics.jsonl")[-1]["step"]
    assert 3 <= stopped < 100_000
    script.write_text(script.read_text().replace("--steps 100000", f"--steps {stopped + 5}"))
    done = subprocess.run(["bash", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [event["step"] for event in lines(run / "events.jsonl") if event["kind"] == "resume"] == [stopped]
    assert lines(run / "metrics.jsonl")[-1]["step"] == stopped + 5


def free_port() -> int:
    """One that the system chose; mpirun has nowhere to have it chosen for the ranks."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
