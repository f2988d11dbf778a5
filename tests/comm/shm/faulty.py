"""A rank that errs, dies or leaves as it is told, and says what it saw of the others. Started by test_faults.py."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__rank__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.comm.shm.rank_set import Raised, stand_by

import phalanx.shm
from phalanx.comm import CommError

LARGE = 300_001
Seen = tuple[str, float]
"""What an operation raised, and after how many seconds."""


def seen(call: Callable[[], object]) -> Seen:
    start = time.monotonic()
    try:
        call()
    except CommError as error:
        return str(error), time.monotonic() - start
    return "nothing", time.monotonic() - start


MISMATCHES: dict[str, Callable[[int, Any, bool], Any]] = {
    # By rank: what rank 1 calls is not what the others call.
    "operation": lambda rank, group, later: (
        dist.broadcast(torch.ones(4), 0, group, async_op=later)
        if rank == 1
        else dist.all_reduce(torch.ones(4), group=group, async_op=later)
    ),
    "size": lambda rank, group, later: dist.all_reduce(torch.ones(4 + rank % 2), group=group, async_op=later),
    "dtype": lambda rank, group, later: dist.all_reduce(
        torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32), group=group, async_op=later
    ),
    "reduction": lambda rank, group, later: dist.all_reduce(
        torch.ones(4), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM, group, async_op=later
    ),
    "root": lambda rank, group, later: dist.broadcast(torch.ones(4), rank % 2, group, async_op=later),
    "barrier": lambda rank, group, later: (
        dist.barrier(group, async_op=later) if rank == 1 else dist.all_reduce(torch.ones(4), group=group, async_op=later)
    ),
    "splits": lambda rank, group, later: dist.all_to_all_single(
        torch.zeros(group.size()),
        torch.zeros(group.size() + (rank == 1)),
        [1] * group.size(),
        [1 + (rank == 1)] + [1] * (group.size() - 1),
        group,
        async_op=later,
    ),
    "large size": lambda rank, group, later: dist.all_reduce(torch.ones(LARGE + rank % 2), group=group, async_op=later),
}


class Rank:
    def __init__(self, rank: int, size: int, folder: str) -> None:
        self.rank, self.size, self.folder = rank, size, folder

    def mismatch(self, kind: str, later: bool) -> dict[str, Any]:
        group = dist.new_group(timeout=timedelta(seconds=30))

        def call() -> None:
            work = MISMATCHES[kind](self.rank, group, later)
            if work is not None:
                work.wait()

        first = seen(call)
        again = seen(lambda: dist.barrier(group))
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.destroy_process_group(group)
        return {"first": first, "again": again, "world": x.item()}

    def failed_work(self) -> dict[str, Any]:
        """All that a Work of a failed operation says."""
        group = dist.new_group()
        work = MISMATCHES["size"](self.rank, group, True)
        until = time.monotonic() + 20
        while not work.is_completed():
            assert time.monotonic() < until
            time.sleep(0.001)
        future = work.get_future()
        caught = ""
        try:
            future.wait()
        except RuntimeError as error:
            caught = str(error)
        return {"success": work.is_success(), "exception": str(work.exception()), "future": caught}

    def killed(self, how: str) -> Seen:
        """The last rank kills itself. The others say how long after that they were told."""
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(torch.ones(1000)),
            "large all_reduce": lambda: dist.all_reduce(torch.ones(LARGE)),
            "asynchronous": lambda: dist.all_reduce(torch.ones(1000), async_op=True).wait(),
            "barrier": lambda: dist.barrier(),
            "recv": lambda: dist.recv(torch.ones(1000), self.size - 1),
            "recv from anybody": lambda: dist.recv(torch.ones(1000)),
            "send": lambda: dist.send(torch.ones(LARGE), self.size - 1),
        }
        dist.barrier()
        note = Path(self.folder) / "killed"
        if self.rank == self.size - 1:
            note.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        text, _ = seen(calls[how])
        return text, time.monotonic() - float(note.read_text())

    def missing(self, seconds: float) -> Seen:
        """Rank 1 does not come."""
        group = dist.new_group(timeout=timedelta(seconds=seconds))
        if self.rank == 1:
            return "did not come", 0.0
        return seen(lambda: dist.all_reduce(torch.ones(3), group=group))

    def wait_that_ends_early(self) -> dict[str, Any]:
        """A timeout of wait leaves the operation in flight."""
        gate, group = dist.new_group(), dist.new_group()
        x = torch.full((5,), self.rank + 1.0)
        early: Seen = ("", 0.0)
        if self.rank == 0:
            work = dist.all_reduce(x, group=group, async_op=True)
            early = seen(lambda: work.wait(timedelta(seconds=0.2)))
            pending = not work.is_completed()
            dist.barrier(gate)
            work.wait()
            return {"early": early, "pending": pending, "sum": x[0].item()}
        dist.barrier(gate)
        dist.all_reduce(x, group=group)
        return {"sum": x[0].item()}

    def wrong_message(self, count: int) -> dict[str, Any]:
        """Rank 0 sends three messages to rank 1, which expects another size of the second."""
        told: dict[str, Any] = {}
        if self.rank == 0:
            works = [dist.isend(torch.full((count,), float(i)), 1) for i in range(3)]
            told = {"sent": [seen(work.wait) for work in works]}
        if self.rank == 1:
            xs = [torch.zeros(count), torch.zeros(count + 1), torch.zeros(count)]
            works = [dist.irecv(x, 0) for x in xs]
            told = {"received": [seen(work.wait) for work in works], "values": [x[0].item() for x in xs]}
        dist.barrier()
        return told

    def destroyed(self) -> Seen:
        """Rank 0 leaves a group with an operation in flight."""
        gate, group = dist.new_group(), dist.new_group()
        if self.rank == 0:
            work = dist.all_reduce(torch.ones(LARGE), group=group, async_op=True)
            dist.destroy_process_group(group)
            dist.barrier(gate)
            return seen(work.wait)
        dist.barrier(gate)
        return seen(lambda: dist.all_reduce(torch.ones(LARGE), group=group) or dist.barrier(group))

    def aborted(self) -> dict[str, Seen]:
        group = dist.new_group()
        if self.rank == 1:
            group.abort()
            return {"call": seen(lambda: dist.barrier(group))}
        return {"call": seen(lambda: dist.barrier(group)), "next": seen(lambda: dist.barrier(group))}

    def interrupted(self) -> dict[str, Any]:
        """Rank 0 is interrupted while it waits for the others."""
        gate, group = dist.new_group(), dist.new_group()
        if self.rank != 0:
            dist.barrier(gate)
            # Of the interrupted call itself they may have all they need.
            return {"call": seen(lambda: dist.all_reduce(torch.ones(3), group=group) or dist.barrier(group))}
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        start, interrupted = time.monotonic(), False
        try:
            dist.all_reduce(torch.ones(3), group=group)
        except KeyboardInterrupt:
            interrupted = True
        seconds = time.monotonic() - start
        dist.barrier(gate)
        return {"interrupted": interrupted, "seconds": seconds}

    def forked(self) -> dict[str, Any]:
        """A child that inherits everything may do nothing with it, and nothing it does is felt here."""
        group = dist.new_group()
        pending = dist.all_reduce(torch.full((LARGE,), 1.0), group=group, async_op=True) if self.rank == 0 else None
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            texts = [seen(lambda: dist.all_reduce(torch.ones(3)))[0]]
            if pending is not None:
                texts.append(seen(pending.wait)[0])
            mine = phalanx.shm.empty(1000).fill_(1.0)  # a segment of its own
            texts.append(f"own memory {phalanx.shm.is_resident(mine)}")
            dist.destroy_process_group()
            del pending
            os.write(writer, "\n".join(texts).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            told = pipe.read().splitlines()
        _, status = os.waitpid(child, 0)
        x = torch.full((LARGE,), 1.0)
        if pending is None:
            dist.all_reduce(x, group=group)
        else:
            pending.wait()
            dist.barrier(group)
        if self.rank != 0:
            dist.barrier(group)
        y = torch.ones(1)
        dist.all_reduce(y)
        return {"child": told, "status": status, "world": y.item()}


def serve(job: dict[str, Any]) -> None:
    rank, size, connection = job["rank"], job["size"], job["connection"]
    stand_by(rank, job["folder"])
    store = dist.FileStore(f"{job['folder']}/store", size)
    dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    me = Rank(rank, size, job["folder"])
    with contextlib.suppress(EOFError):
        while True:
            name, *arguments = connection.recv()
            try:
                connection.send(getattr(me, name)(*arguments))
            except BaseException as error:  # noqa: BLE001 - the parent raises it
                connection.send(Raised("".join(traceback.format_exception(error))))


if __name__ == "__rank__":
    serve(JOB)  # noqa: F821 - set by whoever runs this file
