"""Ranks that die, raise, hang or never come: real processes, since the process is what fails.

Each run ends within seconds with a message that names the rank, an exit code that is not 0, and no process left. `phalanx train` and
exit codes of a script are in train/test_loop and train/test_launch, the operation in flight in comm/test_transports.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import phalanx as phx

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("faulty_rank.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
# A loaded machine may take this long to start Python and torch; a run that hangs takes the minute of a communication's timeout.
START_SECONDS, END_SECONDS = 90, 30
NIGHTLY = pytest.mark.nightly  # each costs ten seconds of two cores


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**ENVIRONMENT, **environment}
    )


def plain(mesh: str, folder: Path, fault: str = "none") -> list[subprocess.Popen[str]]:
    """Two ranks as a cluster's launcher would start them: nobody watches, each has to find out by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(SCRIPT), mesh, str(folder), fault]
    return [start(command, **place, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]


def launched(launcher: list[str], mesh: str, folder: Path, fault: str = "none") -> subprocess.Popen[str]:
    return start([sys.executable, "-m", *launcher, str(SCRIPT), mesh, str(folder), fault])


def under_way(folder: Path, *processes: subprocess.Popen[str]) -> list[int]:
    """Process ids of both ranks, once both are in the middle of steps."""
    files = [folder / f"{rank}.pid" for rank in range(2)]
    deadline = time.monotonic() + START_SECONDS
    while not all(file.exists() for file in files):
        for process in processes:
            assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"the ranks did not start within {START_SECONDS} s"
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever a failing test leaves running is ended with it."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("mesh", "victim"),
    [("tp=2", 1), ("pp=2", 0), pytest.param("dp=2", 1, marks=NIGHTLY), pytest.param("dp=2", 0, marks=NIGHTLY)],
)
def test_a_survivor_names_the_rank_that_was_killed(mesh: str, victim: int, tmp_path: Path) -> None:
    ranks = plain(mesh, tmp_path)
    with ended(*ranks):
        pids = under_way(tmp_path, *ranks)
        os.kill(pids[victim], signal.SIGKILL)
        _, said = ranks[1 - victim].communicate(timeout=END_SECONDS)
        assert ranks[1 - victim].returncode not in (0, -signal.SIGKILL)
        told = rf"CommError: rank {1 - victim}: .* on group '{mesh[:2]}@0' \(ranks 0, 1\) at .* failed: "
        assert re.search(rf"{told}rank {victim} \(process {pids[victim]}\) died", said), said


def test_torchrun_names_the_rank_that_was_killed_and_ends_the_others(tmp_path: Path) -> None:
    process = launched(["torch.distributed.run", "--standalone", "--nproc-per-node", "2"], "dp=2", tmp_path)
    with ended(process):
        pids = under_way(tmp_path, process)
        os.kill(pids[1], signal.SIGKILL)
        _, said = process.communicate(timeout=END_SECONDS)
    assert process.returncode != 0
    assert re.search(rf"Root Cause.*rank +: 1 .*exitcode +: -9 \(pid: {pids[1]}\)", said, re.DOTALL)
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("never comes", r"rank 0 of 2 waited 3 s for rank 1, which did not come to phx\.init"),
        pytest.param("raises", r"rank 0: .* failed: rank 1 gave up with LookupError\('my own mistake'\)", marks=NIGHTLY),
        pytest.param("exits", r"rank 0: .* failed: rank 1 gave up with SystemExit\(3\)", marks=NIGHTLY),
    ],
)
def test_a_rank_that_fails_in_a_script_is_named(fault: str, said: str, tmp_path: Path) -> None:
    """Without a launcher that would end the survivor before it can say anything."""
    ranks = plain("dp=2", tmp_path, fault)
    with ended(*ranks):
        _, told = ranks[0].communicate(timeout=START_SECONDS)
        assert ranks[0].returncode == 1
        assert re.search(said, told), told
        if fault in ("raises", "exits"):
            assert ranks[1].wait(timeout=END_SECONDS) == (1 if fault == "raises" else 3)


def test_a_rank_that_hangs_ends_a_local_run(tmp_path: Path) -> None:
    process = launched(["phalanx", "run", "--ranks", "2"], "dp=2", tmp_path, "hangs")
    with ended(process):
        pids = under_way(tmp_path, process)
        _, said = process.communicate(timeout=END_SECONDS)
    assert process.returncode == 1
    assert re.search(
        r"rank 0: .* failed: timed out: rank 0 waited 3 s for rank 1 \(its last collective here, number \d+, was ", said
    ), said
    assert re.search(r"phalanx: rank 0 of 2 \(process \d+\) ended with exit code 1", said)
    assert not any(map(is_running, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    process = launched(["phalanx", "run", "--ranks", "2"], "pp=2", tmp_path)
    with ended(process):
        pids = under_way(tmp_path, process)
        process.kill()
        process.wait(timeout=END_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        while any(map(is_running, pids)):
            assert time.monotonic() < deadline, "ranks outlived their launcher"
            time.sleep(0.05)


def test_a_leash_refuses_a_launcher_that_is_gone() -> None:
    """It may die between starting a rank and the rank's asking to end with it."""
    leash = ROOT / "src/phalanx/train/leash.py"
    gone = subprocess.run(
        [sys.executable, "-I", "-S", str(leash), "1", sys.executable, "-c", "print('ran')"], capture_output=True, text=True
    )
    kept = subprocess.run(
        [sys.executable, "-I", "-S", str(leash), str(os.getpid()), sys.executable, "-c", "print('ran')"],
        capture_output=True,
        text=True,
    )
    assert (kept.returncode, kept.stdout) == (0, "ran\n")
    assert gone.returncode == 1 and gone.stderr == "the launcher, process 1, is gone\n"


def test_an_interrupt_ends_every_thread_and_the_world_goes_on() -> None:
    """Control-C in a notebook: the ranks are in the middle of a call whose partner never comes."""
    returned: list[int] = []
    with phx.local(phx.Mesh(dp=2), timeout=60) as world:

        def interrupted(w: phx.World) -> None:
            try:
                waits(w)
            finally:
                returned.append(w.rank)

        def waits(w: phx.World) -> None:
            w.transport.recv(torch.zeros(1), 1 - w.group("dp").index(w.rank), w.group("dp")).wait()

        over = threading.Event()

        def press() -> None:
            """Again after a while, as a person would: Python drops an interrupt that comes while it runs a finaliser."""
            while not over.is_set():
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # which waits for the ranks
                over.wait(10)

        def first_of_all(w: phx.World) -> None:
            if w.rank == 1:
                threading.Thread(target=press, daemon=True).start()
            try:
                interrupted(w)
            finally:
                over.set()

        with pytest.raises(KeyboardInterrupt):
            world.run(first_of_all)
        assert sorted(returned) == [0, 1]
        assert world.run(lambda w: w.rank) == [0, 1]


def test_an_exception_in_one_rank_ends_a_step_and_the_next_one_works() -> None:
    import tests.test_bad_input as small

    with phx.local(phx.Mesh(pp=2, dp=2), timeout=20) as world:
        step = phx.parallelize(small.Model(), world, example=small.batch(), loss=small.loss, microbatches=2)
        expected = step.evaluate(small.batch()).loss
        begin = step.executors[3].parameters.begin

        def broken() -> None:
            raise LookupError("of rank 3 alone")

        step.executors[3].parameters.begin = broken  # type: ignore[method-assign]
        with pytest.raises(LookupError, match="of rank 3 alone") as caught:
            step(small.batch())
        assert caught.value.__notes__ == ["raised on rank 3"]
        step.executors[3].parameters.begin = begin  # type: ignore[method-assign]
        assert step(small.batch()).loss == pytest.approx(expected, rel=1e-6)  # float32, the same sums in the same order
