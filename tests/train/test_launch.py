"""Real processes: a rank that dies ends the run in seconds, is named with its signal, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

FOREVER = """
import os, pathlib, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), pathlib.Path(sys.argv[1])
dist.all_reduce(torch.ones(1))
(folder / f"{rank}.new").write_text(str(os.getpid()))
(folder / f"{rank}.new").rename(folder / f"{rank}.pid")  # so that nobody reads half a number
while True:
    dist.all_reduce(torch.ones(1))
"""

FAILS = """
import os, sys
if os.environ["RANK"] == "1":
    sys.exit(7)
import signal; signal.pause()
"""

SUCCEEDS = """
import os, pathlib, sys
said = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")]
(pathlib.Path(sys.argv[1]) / os.environ["RANK"]).write_text(" ".join([*said, *sys.argv[2:]]))
"""


def start(tmp_path: Path, script: str, *args: str, **environment: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "phalanx", "run", "--ranks", "2", str(path), str(tmp_path), *args]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
    )


def pids(tmp_path: Path, process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the two ranks, once both have communicated."""
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the ranks did not start within 60 s"
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    process = start(tmp_path, FOREVER)
    ranks = pids(tmp_path, process)
    killed = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    # The launcher looks at its ranks every 0.1 s; the rest is Python ending on a busy machine.
    assert time.monotonic() - killed < 15
    assert process.returncode == 128 + signal.SIGKILL
    assert f"rank 1 of 2 (process {ranks[1]}) was ended by SIGKILL" in err
    assert not [pid for pid in ranks if alive(pid)]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGTERM, "phalanx: the launcher was stopped by SIGTERM; its 2 ranks"),
        (signal.SIGINT, "phalanx: interrupted; its 2 ranks"),
    ],
)
def test_a_stopped_launcher_ends_its_ranks(number: signal.Signals, said: str, tmp_path: Path) -> None:
    process = start(tmp_path, FOREVER)
    ranks = pids(tmp_path, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err.endswith(f"{said} were ended\n")
    assert "death signal" not in err  # torch elastic's own account
    assert not [pid for pid in ranks if alive(pid)]


def test_a_rank_that_fails_is_named_with_its_exit_code(tmp_path: Path) -> None:
    process = start(tmp_path, FAILS)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "rank 1 of 2" in err
    assert "ended with exit code 7" in err
    assert "Traceback" not in err


def test_ranks_get_their_place_the_arguments_and_their_share_of_the_cores(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = tmp_path / "script.py"
    path.write_text(SUCCEEDS)
    command = [sys.executable, "-m", "phalanx", "run", "--ranks=2", str(path), str(tmp_path), "--lr", "3", "--traceback"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**environment, "PYTHONPATH": str(SOURCE)})
    assert ended.returncode == 0, ended.stderr
    threads = max(1, (os.cpu_count() or 1) // 2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [
        f"{r} 2 {r} {threads} --lr 3 --traceback" for r in range(2)
    ]
