"""The soak: random programs of collectives on four ranks, with and without the end of one of them.

A rank issues the operations of a program in order, some of them asynchronously, and waits for those whenever chance says. A failure
says the seed and the number of the operation:

    python tests/comm/shm/soak.py --seed 7 --operations 1000
    python tests/comm/shm/soak.py --seed 7 --operations 60 --kill
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.comm.shm.rank_set import Raised, rank_set, stand_by
from tests.comm.shm.soak_player import Player
from tests.comm.shm.soak_program import GROUPS, SIZE, Operation, program

TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Kill:
    """Which rank ends, in front of which operation its end is set off, and how long after that it comes."""

    victim: int
    number: int
    delay_seconds: float
    others_leave: bool
    """Survivors end their process as soon as they have raised: nobody may mistake their end for the first."""


def kill(seed: int, operations: int) -> Kill:
    rng = random.Random(f"kill {seed}")
    return Kill(rng.randrange(SIZE), rng.randrange(operations // 4, operations), rng.uniform(0, 2e-3), rng.random() < 0.5)


def groups_with(rank: int) -> list[int]:
    """Only here does everybody depend on the rank, so everybody must name it and nobody another survivor."""
    return [at for at, ranks in enumerate(GROUPS) if rank in ranks]


def serve(rank: int, size: int, folder: str, connection: Connection, meeting: Any, backend: str) -> None:
    """A rank: plays the programs that it is asked for, `(seed, operations, kill or not)`, until the parent closes the pipe."""
    stand_by(rank, folder)
    if backend == "shm":
        import phalanx.shm  # noqa: F401 - registers the backend
    with contextlib.suppress(EOFError):
        while True:
            seed, operations, with_kill = connection.recv()
            store = Path(folder) / f"store.{seed}.{with_kill}"
            dist.init_process_group(
                backend, f"file://{store}", world_size=size, rank=rank, timeout=timedelta(seconds=TIMEOUT_SECONDS)
            )
            player = Player(rank, seed, backend)
            meeting.wait(TIMEOUT_SECONDS)
            if with_kill:
                end = kill(seed, operations)
                made = program(seed, operations, groups_with(end.victim), backend=backend)
                connection.send(until_the_end(player, made, end, Path(folder) / "killed"))
                if not end.others_leave:
                    connection.recv()  # until the parent has all answers this process is there for others to look at
                os._exit(0)
            else:
                connection.send(_played(player, program(seed, operations, backend=backend)))
                dist.destroy_process_group()


def _played(player: Player, operations: Sequence[Operation]) -> Raised | None:
    try:
        player.play(operations)
        dist.barrier()
    except Exception:  # noqa: BLE001 - whatever it is, the parent says so
        return Raised(traceback.format_exc())
    return None


def until_the_end(player: Player, operations: Sequence[Operation], end: Kill, note: Path) -> tuple[str, float]:
    """The victim is killed while it goes on, and notes when; a survivor returns what it raised, and when.

    Times are seconds of the machine's monotonic clock, which all its processes share.
    """

    def die() -> None:
        note.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    operations = [operation for operation in operations if operation.kind != "regroup"]
    try:
        if player.rank == end.victim:
            player.play([operation for operation in operations if operation.number < end.number])
            threading.Timer(end.delay_seconds, die).start()
            while True:
                player.play([operation for operation in operations if operation.number >= end.number])
        player.play(operations)
        while True:
            dist.barrier()
    except Exception as error:  # noqa: BLE001 - this is what we wait for
        return str(error), time.monotonic()


@dataclass(frozen=True)
class Survived:
    victim: int
    message: dict[int, str]
    seconds: dict[int, float]
    """From the victim's end to the survivor's error."""


def survivors(backend: str, seed: int, operations: int, folder: Path) -> Survived:
    """Plays a program with a kill; raises if any survivor hangs."""
    end = kill(seed, operations)
    with rank_set(Path(__file__), folder, SIZE, backend=backend) as started:
        for connection in started.connections:
            connection.send((seed, operations, True))
        answers = started.answers(TIMEOUT_SECONDS, grace=15.0)
        raised = {rank: told for rank, told in answers.told.items() if not isinstance(told, Raised)}
        missing = set(range(SIZE)) - {end.victim} - set(raised)
        if missing:
            raise AssertionError(f"seed {seed}, {end}: ranks {sorted(missing)} did not raise\n{answers.complaint}")
    died = float((folder / "killed").read_text())
    return Survived(end.victim, {r: told[0] for r, told in raised.items()}, {r: told[1] - died for r, told in raised.items()})


def soak(backend: str, seed: int, operations: int, folder: Path, limit: float) -> None:
    """Plays one program on four ranks; AssertionError with the seed and the operation."""
    with rank_set(Path(__file__), folder, SIZE, backend=backend) as started:
        answers = started.ask((seed, operations, False), limit)
        if not answers.complete:
            raise AssertionError(f"seed {seed} of {operations} operations over {backend}\n{answers.complaint}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python tests/comm/shm/soak.py", description=__doc__)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--kill", action="store_true", help="a program with a kill")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        if options.kill:
            print(survivors(options.backend, options.seed, options.operations, Path(folder)))  # noqa: T201
        else:
            soak(options.backend, options.seed, options.operations, Path(folder), options.limit)
        print(f"seed {options.seed}: {time.monotonic() - start:.1f} s")  # noqa: T201


if __name__ == "__rank__":
    serve(**JOB)  # type: ignore[name-defined]  # noqa: F821 - put there by the parent
elif __name__ == "__main__":
    main()
