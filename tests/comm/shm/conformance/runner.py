"""Runs the stock suite in one set of rank processes: the ranks wait for names, run each test together and report.

The suite starts its processes anew for every test, which takes most of its time. Here a set lives until a test fails or hangs; then
its ranks are ended, the test is named, and the next set goes on behind it. Every test has its own process groups and folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4]))
from tests.comm.shm.conformance import stock
from tests.comm.shm.rank_set import Raised, rank_set, stand_by

SIZE = 4
LIMIT_SECONDS = 60.0
"""A test that takes longer hangs; the slowest one that passes takes a tenth."""


@dataclass(frozen=True)
class Result:
    name: str
    outcome: str  # passed, failed or hung
    seconds: float
    text: str = ""
    """Tracebacks of the ranks that failed, and the stacks of those that hung."""

    def __str__(self) -> str:
        return f"{self.name} {self.outcome} after {self.seconds:.2f} s\n{self.text}".rstrip()


def names(backend: str, folder: Path) -> list[str]:
    """Every test of the suite in its own order, as a rank sees it."""
    with rank_set(Path(__file__), folder / "names", 1, backend=backend, code=stock.compiled()) as started:
        (told,) = started.answers(LIMIT_SECONDS).told.values()
        return list(told)


def run(
    backend: str, tests: Sequence[str], folder: Path, *, size: int = SIZE, limit: float = LIMIT_SECONDS
) -> Iterator[Result]:
    """Each test's result, in order. `folder` must be empty."""
    done, code = 0, stock.compiled()
    while done < len(tests):
        with rank_set(Path(__file__), folder / f"from{done}", size, backend=backend, code=code) as started:
            started.answers(LIMIT_SECONDS)  # their lists of tests
            for name in tests[done:]:
                answers = started.ask(name, limit)
                raised = any(isinstance(told, Raised) for told in answers.told.values())
                outcome = "passed" if answers.complete else "failed" if raised else "hung"
                done += 1
                yield Result(name, outcome, answers.seconds, answers.complaint)
                if outcome != "passed":
                    break


def serve(rank: int, size: int, folder: str, connection: Connection, meeting: Any, backend: str, code: bytes) -> None:
    """A rank: say which tests there are, then run those that are named until the parent closes the pipe."""
    stand_by(rank, folder)
    if backend == "shm":
        import phalanx.shm  # noqa: F401 - registers the backend
    suite = stock.load(code, backend, size)

    class Rank(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def _barrier(self, timeout: float = 30.0, wait_for: int = size) -> None:
            """The suite's own goes through files and sleeps of 0.1 s."""
            assert wait_for == size
            meeting.wait(timeout)

    connection.send([name for name in vars(suite.DistributedTest._DistTestBase) if name.startswith("test_")])
    with contextlib.suppress(EOFError):
        while True:
            name = connection.recv()
            print(f"--- {name}", flush=True)  # noqa: T201 - the log of this rank
            connection.send(outcome(Rank(name), name, rank, suite, Path(folder) / name))


def outcome(test: Any, name: str, rank: int, suite: Any, folder: Path) -> Raised | None:
    """Runs one test on this rank as the suite's own processes would; None if it passed."""
    import torch.distributed as dist
    from torch.testing._internal.common_utils import set_rng_seed

    environment = dict(os.environ)
    for each in ("barrier", "test_dir", "init_dir"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    os.environ |= {"TEMP_DIR": str(folder), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    test.rank, test.file_name = rank, str(folder / "store")
    suite.INIT_METHOD = f"file://{folder / 'later_store'}"  # of tests that start the world a second time
    seconds = suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)
    try:
        dist.init_process_group(
            suite.BACKEND, test.init_method, world_size=int(test.world_size), rank=rank, timeout=timedelta(seconds=seconds)
        )
        test._barrier()
        set_rng_seed()
        getattr(test, name)()
        test._barrier()
        dist.destroy_process_group()
    except unittest.SkipTest as reason:
        return Raised(f"skipped itself: {reason}")
    except SystemExit as end:
        return Raised(f"skipped itself with exit code {end.code}")
    except BaseException:  # noqa: BLE001 - whatever a test raises is its result
        return Raised(traceback.format_exc())
    finally:
        os.environ.clear()
        os.environ |= environment
        dist.set_debug_level(dist.DebugLevel.OFF)
    return None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python tests/comm/shm/conformance/runner.py", description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("folder", type=Path, help="for logs and stores; a new one")
    parser.add_argument("tests", nargs="*", help="all without")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS)
    options = parser.parse_intermixed_args(argv)
    for result in run(
        options.backend, options.tests or names(options.backend, options.folder), options.folder, limit=options.limit
    ):
        print(result, flush=True)  # noqa: T201


if __name__ == "__rank__":
    serve(**JOB)  # type: ignore[name-defined]  # noqa: F821 - put there by the parent
elif __name__ == "__main__":
    main()
