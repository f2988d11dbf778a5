"""Rank processes that outlive a question: started once, asked many times, ended for certain.

The parent asks all ranks one thing and gets every rank's answer, or where the ranks stand that gave none. A rank file is a script
that is run with `JOB` set, calls `stand_by` and answers through the connection until it closes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE_SECONDS = 3.0
"""What the other ranks get once one has ended or raised: most wait for it in vain."""


@dataclass(frozen=True)
class Raised:
    """An answer: what the rank was asked raised this."""

    text: str


@dataclass(frozen=True)
class Answers:
    told: dict[int, Any]
    """By rank. A process that ended instead has answered Raised."""
    late: dict[int, str]
    """Where the ranks stand that gave none, as a stack."""
    seconds: float

    @property
    def complete(self) -> bool:
        return not self.late and not any(isinstance(told, Raised) for told in self.told.values())

    @property
    def complaint(self) -> str:
        raised = [f"rank {rank}: {told.text}" for rank, told in sorted(self.told.items()) if isinstance(told, Raised)]
        return "\n".join(raised + [f"rank {rank} gave no answer; it stands in\n{text}" for rank, text in self.late.items()])


@dataclass
class RankSet:
    """Started processes with a pipe to each."""

    folder: Path
    processes: list[Any] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    def ask(self, question: object, limit: float) -> Answers:
        for connection in self.connections:
            with contextlib.suppress(ConnectionError):
                connection.send(question)
        return self.answers(limit)

    def answers(self, limit: float, grace: float = GRACE_SECONDS) -> Answers:
        """One from every rank within `limit` seconds, or `grace` once one rank has failed."""
        start = time.monotonic()
        until = start + limit
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        told: dict[int, Any] = {}
        while waiting and (left := until - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    told[rank] = ready.recv()
                except (EOFError, ConnectionError):
                    self.processes[rank].join(1.0)
                    told[rank] = Raised(f"the process ended, exit code {self.processes[rank].exitcode}")
                if isinstance(told[rank], Raised):
                    until = min(until, time.monotonic() + grace)
        seconds = time.monotonic() - start
        return Answers(told, {rank: self._stack(rank) for rank in sorted(waiting.values())}, seconds)

    def _stack(self, rank: int) -> str:
        """A late rank writes it itself on a signal, whatever its interpreter is doing."""
        process, path = self.processes[rank], self.folder / f"stack.{rank}"
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            process.join(0.3)
        stack = path.read_text().partition('  File "<frozen runpy>"')[0] if path.exists() else "an unknown place"
        log = self.folder / f"log.{rank}"
        said = log.read_text().splitlines()[-2:] if log.exists() else []
        return stack + "".join(f"  last words: {line}\n" for line in said)


@contextlib.contextmanager
def rank_set(file: Path, folder: Path, size: int, **job: Any) -> Iterator[RankSet]:
    """`size` processes that run `file` with JOB = {rank, size, folder, connection, meeting, **job}; ended at the end.

    They are forked from a server that has torch imported already: a start costs a tenth of a second, not three.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch.testing._internal.common_distributed", "pytest"])
    started = RankSet(folder)
    meeting = context.Barrier(size)
    for rank in range(size):
        ours, theirs = context.Pipe()
        told = {"rank": rank, "size": size, "folder": str(folder), "connection": theirs, "meeting": meeting, **job}
        process = context.Process(target=runpy.run_path, args=(str(file), {"JOB": told}, "__rank__"), daemon=True)
        process.start()
        theirs.close()
        started.processes.append(process)
        started.connections.append(ours)
    try:
        yield started
    finally:
        for connection in started.connections:
            connection.close()  # a rank that waits for a question ends by itself
        for process in started.processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()


def stand_by(rank: int, folder: str) -> None:
    """The first call of a rank: its output goes to a log, its stack to a file on SIGUSR1, and it keeps to one thread."""
    import torch

    place = Path(folder)
    log = (place / f"log.{rank}").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=(place / f"stack.{rank}").open("w"))
    torch.set_num_threads(1)
