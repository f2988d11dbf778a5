"""The C core under the sanitizers: ranks as threads run random programs, and every result is checked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORE = Path(__file__).parents[3] / "src" / "phalanx" / "comm" / "shm" / "core"
SOURCES = ("collectives.c", "engine.c", "groups.c", "kernels.c", "messages.c", "segment.c")
# The sanitizers see compiled-in checks only, and ThreadSanitizer cannot run resolvers of function clones.
FLAGS = ("-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-ffp-contract=off", "-DPHX_NO_CLONES", f"-I{CORE}")
SANITIZERS = {
    "thread": ("-fsanitize=thread", "-Wno-tsan"),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture(scope="module", params=SANITIZERS)
def stress(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("stress") / request.param
    command = ["gcc", *FLAGS, *SANITIZERS[request.param], "-o", str(program), str(HERE / "stress.c")]
    built = subprocess.run([*command, *(str(CORE / name) for name in SOURCES), "-lpthread"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "warning" not in built.stderr, built.stderr
    return program


@pytest.mark.parametrize(("ranks", "operations", "seed"), [(2, 400, 1), (3, 400, 2), (4, 300, 3)])
def test_random_programs(stress: Path, ranks: int, operations: int, seed: int) -> None:
    run(stress, ranks, operations, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10, 20))
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_long_random_programs(stress: Path, ranks: int, seed: int) -> None:
    run(stress, ranks, 3000, seed)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("failures") / "failures"
    command = [
        "gcc",
        *FLAGS,
        "-o",
        str(program),
        str(HERE / "failures.c"),
        *(str(CORE / name) for name in SOURCES),
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize("iterations", [120, pytest.param(3000, marks=pytest.mark.nightly)])
def test_failures_leave_memory_alone(failures: Path, iterations: int) -> None:
    """Without the meeting of who fails and who is inside a tensor, one in ten of what has failed is written to later."""
    told = json.loads(subprocess.run([failures, "fuzz", str(iterations)], check=True, capture_output=True, text=True).stdout)
    assert (told["wrong"], told["overwritten"]) == (0, 0)
    assert min(told["done"], told["failed"]) > iterations / 5, "too few of one kind to say anything"


def test_a_killed_peer_is_noticed_at_once(failures: Path) -> None:
    """It is looked for every 0.1 s; a second is what we promise."""
    told = json.loads(subprocess.run([failures, "dead", "8"], check=True, capture_output=True, text=True).stdout)
    assert told["mean"] < 0.3
    assert told["worst"] < 1


def test_a_race_would_be_found(tmp_path: Path) -> None:
    """The same program with the counters' order taken away: ThreadSanitizer must object."""
    for source in CORE.iterdir():
        text = source.read_text()
        if source.name == "collectives.c":
            assert "memory_order_release" in text
            text = text.replace("memory_order_release", "memory_order_relaxed").replace(
                "memory_order_acquire", "memory_order_relaxed"
            )
        (tmp_path / source.name).write_text(text)
    program = tmp_path / "racy"
    command = ["gcc", *FLAGS, "-w", "-fsanitize=thread", f"-I{tmp_path}", "-o", str(program), str(HERE / "stress.c")]
    command.remove(f"-I{CORE}")
    subprocess.run([*command, *(str(tmp_path / name) for name in SOURCES), "-lpthread"], check=True)
    ended = subprocess.run([program, "3", "400", "1"], capture_output=True, text=True, timeout=100, env=environment())
    assert "ThreadSanitizer: data race" in ended.stderr


def run(program: Path, ranks: int, operations: int, seed: int) -> None:
    words = [str(program), str(ranks), str(operations), str(seed)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=900, env=environment())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert ended.stdout == f"{ranks} ranks, {operations} operations, seed {seed}: right\n"


def environment() -> dict[str, str]:
    """Handles and closed groups live as long as their process, which leak detection would report."""
    return {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
