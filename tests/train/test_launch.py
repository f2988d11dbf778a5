"""Real processes: a rank that dies ends the run in seconds, is named with its signal, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from phalanx.train.launch import RankFailure, Stopped, launch, write_failure

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


# In this process, with ranks that import nothing: what they do when they are told to stop.

PATIENT = """
import os, pathlib, signal, sys
folder, rank, ended = pathlib.Path(sys.argv[1]), os.environ["RANK"], []
signal.signal(signal.SIGTERM, lambda *_: ended.append(rank))
(folder / f"{rank}.ready").touch()
while len(list(folder.glob("*.ready"))) < 2: pass
"""
CHECKPOINTS = "(folder / f'{rank}.saved').touch()\nsys.exit(143)\n"
WAITS = "while not ended: signal.sigtimedwait([], 0.01)\n"
TELLS_THE_LAUNCHER = "if rank == '0': os.kill(os.getppid(), signal.SIGTERM)\n"


def run(tmp_path: Path, script: str, **options: Any) -> None:
    launch(2, [*rank_python(script), str(tmp_path)], **options)


@pytest.fixture(autouse=True)
def no_signal_of_ours() -> Iterator[None]:
    """A signal that the launcher does not take fails the test instead of ending pytest; and the launcher gives handlers back."""

    def refuse(number: int, frame: object) -> None:
        raise AssertionError(f"signal {number} was not the launcher's")

    before = signal.signal(signal.SIGTERM, refuse)
    yield
    assert signal.signal(signal.SIGTERM, before) is refuse


def test_ranks_that_are_told_to_stop_have_time_to_and_it_is_no_crash(tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="the launcher was stopped by SIGTERM; its 2 ranks ended by themselves") as stopped:
        run(tmp_path, PATIENT + TELLS_THE_LAUNCHER + WAITS + CHECKPOINTS)
    assert (stopped.value.exit_code, stopped.value.signal, stopped.value.is_final) == (143, signal.SIGTERM, False)
    assert sorted(path.name for path in tmp_path.glob("*.saved")) == ["0.saved", "1.saved"]


def test_a_rank_that_stops_by_itself_gives_the_others_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 only begins to save when rank 0 has ended: were that taken for a crash, it would be killed at once."""
    monkeypatch.setattr("phalanx.train.launch.ORPHANED_SECONDS", 0.0)
    late = "if rank == '0': sys.exit(143)\n" + WAITS + CHECKPOINTS
    with pytest.raises(Stopped, match=r"rank [01] of 2 was told to stop by SIGTERM, and the others followed") as stopped:
        run(tmp_path, PATIENT + late)
    assert stopped.value.exit_code == 143
    assert (tmp_path / "1.saved").exists()


def test_ranks_that_do_not_stop_in_time_are_killed_and_named(tmp_path: Path) -> None:
    stubborn = "if rank == '1': signal.pause(); signal.pause()\n" + WAITS + CHECKPOINTS
    with pytest.raises(Stopped, match="of its 2 ranks 1 did not end in time and had to be killed") as stopped:
        run(tmp_path, PATIENT + TELLS_THE_LAUNCHER + stubborn, grace_seconds=0.5)
    assert stopped.value.exit_code == 143


def test_a_second_signal_ends_the_ranks_at_once(tmp_path: Path) -> None:
    again = "while not ended: pass\nif rank == '1': os.kill(os.getppid(), signal.SIGTERM)\nsignal.pause()\n"
    with pytest.raises(Stopped, match="of its 2 ranks 0, 1 did not end in time"):
        run(tmp_path, PATIENT + TELLS_THE_LAUNCHER + again, grace_seconds=100)


def test_survivors_of_a_crash_do_not_get_the_time_of_those_that_are_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 takes SIGTERM for a wish and waits for a peer that is gone."""
    monkeypatch.setattr("phalanx.train.launch.ORPHANED_SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 of 2 \(process \d+\) was ended by SIGKILL") as failure:
        run(tmp_path, PATIENT + "if rank == '1': os.kill(os.getpid(), signal.SIGKILL)\nwhile True: signal.pause()\n")
    assert time.monotonic() - began < 60  # the grace is 120 s
    assert not isinstance(failure.value, Stopped)
    assert (failure.value.rank, failure.value.signal, failure.value.exit_code) == (1, signal.SIGKILL, 137)


def test_an_error_while_stopping_is_an_error(tmp_path: Path) -> None:
    fails = """
import json
said = {"py_callstack": "no space left on device", "timestamp": "0"}
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file: json.dump({"message": {"message": "", "extraInfo": said}}, file)
sys.exit(1)
"""
    with pytest.raises(RankFailure, match="rank 1 of 2: no space left on device") as failure:
        run(tmp_path, PATIENT + TELLS_THE_LAUNCHER + WAITS + "if rank == '0': sys.exit(143)\n" + fails)
    assert not isinstance(failure.value, Stopped)


def test_a_mistake_of_the_user_is_known_by_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run(tmp_path, PATIENT + "if rank == '0': sys.exit(2)\nsignal.pause()\n")
    assert (failure.value.is_final, failure.value.rank) == (True, 0)


# What ranks print.

PRINTS = """
import os, sys
print(f"out {os.environ['RANK']} of start {os.environ['TORCHELASTIC_RESTART_COUNT']}")
print(f"err {os.environ['RANK']}", file=sys.stderr)
"""


def test_what_ranks_print_goes_on_in_a_file_each_and_to_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for attempt in range(2):
        run(tmp_path, PRINTS, logs=tmp_path / "logs", attempt=attempt)
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == sorted(f"out {rank} of start {start}" for rank in range(2) for start in range(2))
    assert sorted(said.err.splitlines()) == ["err 0", "err 0", "err 1", "err 1"]
    for rank in range(2):
        lines = (tmp_path / "logs" / f"rank_{rank}.txt").read_text().splitlines()
        assert re.fullmatch(rf"--- \d+-\d+-\d+ .*, start 1: rank {rank} of 2", lines[0])
        assert sorted(lines[1:3]) == [f"err {rank}", f"out {rank} of start 0"]
        assert re.fullmatch(rf"--- .*, start 2: rank {rank} of 2", lines[3])
        assert sorted(lines[4:]) == [f"err {rank}", f"out {rank} of start 1"]


def test_all_of_a_long_output_arrives_before_a_failure_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    long = "import os, sys\nfor at in range(30000): print(os.environ['RANK'], at)\nsys.stdout.flush(); sys.exit(3)\n"
    with pytest.raises(RankFailure):
        run(tmp_path, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + long, logs=tmp_path)
    said = capfd.readouterr().out.splitlines()
    for rank in range(2):
        expected = [f"{rank} {at}" for at in range(30000)]
        assert (tmp_path / f"rank_{rank}.txt").read_text().splitlines()[1:] == expected
    assert len(said) == 60000


def test_what_a_rank_leaves_running_does_not_keep_the_launcher(tmp_path: Path) -> None:
    """A child that holds the rank's output open: its end is not waited for."""
    leaves = "import os, signal\nif os.fork() == 0:\n    os.setsid(); signal.alarm(60); signal.pause()\n"
    began = time.monotonic()
    run(tmp_path, leaves, logs=tmp_path)
    assert time.monotonic() - began < 30


def test_on_a_terminal_ranks_have_one_and_the_file_has_what_was_left_on_it(tmp_path: Path) -> None:
    """A line that is drawn anew is one line of the file, without colours; the terminal gets every byte."""
    draws = """
import os, sys
assert sys.stdout.isatty() and not sys.stderr.isatty()
for step in range(1000): sys.stdout.write(f"\\r\\x1b[2K\\x1b[32mstep {step}\\x1b[0m")
print("\\nwidth", os.get_terminal_size(1).columns)
sys.stdout.write("no end")
"""
    script = (
        f"from pathlib import Path; from phalanx.train.launch import launch; launch(1, {rank_python(draws)!r}, logs=Path.cwd())"
    )
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (20, 123))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=theirs, stderr=subprocess.PIPE, cwd=tmp_path, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the terminal's other side is closed
            while data := os.read(ours, 1 << 16):
                shown += data
        assert process.stderr is not None
        assert process.wait() == 0, process.stderr.read()
    os.close(ours)
    assert shown.count(b"\x1b[2K") == 1000
    assert b"\r\x1b[2K\x1b[32mstep 500\x1b[0m" in shown
    assert (tmp_path / "rank_0.txt").read_text().splitlines()[1:] == ["step 999", "width 123", "no end"]


def rank_python(script: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", script]


def test_a_rank_that_is_ended_while_it_tells_its_failure_has_told_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file would be an error of the launcher's own."""

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.train.launch.json.dump", cut)
    with pytest.raises(KeyboardInterrupt):
        write_failure(str(tmp_path / "error.json"), ValueError("wrong"), with_traceback=False, lost_a_peer=False)
    assert not (tmp_path / "error.json").exists()
