"""A rank that opens groups in the ways it is told. Started by test_bootstrap.py, also as a script in a namespace of its own:

python meeting.py RANK SIZE STORE
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __name__ in ("__rank__", "__main__"):
    sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.comm.shm.rank_set import Raised, stand_by

import phalanx.shm
from phalanx.comm.shm import _core, bootstrap


class Counting:
    """A store that counts what a rank asks of it."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.store, name)


class Rank:
    def __init__(self, rank: int, size: int, folder: str) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.opened = 0

    def store(self) -> dist.Store:
        """A new one for every question."""
        self.opened += 1
        return dist.FileStore(f"{self.folder}/store.{self.opened}", self.size)

    def open(self, seconds: float = 30.0, **options: Any) -> str:
        """A default group by these options, used once and destroyed: what came of it."""
        start = time.monotonic()
        try:
            dist.init_process_group(
                "shm",
                store=self.store(),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=seconds),
                pg_options=phalanx.shm.Options(**options),
            )
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__} after {time.monotonic() - start:.0f} s: {error}"
        x = torch.full((1000,), self.rank + 1.0)
        dist.all_reduce(x)
        assert (x == self.size * (self.size + 1) / 2).all()
        dist.destroy_process_group()
        return "works"

    def through(self, *ways: str) -> str:
        return self.open(ways=ways)

    def files_of_ours(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if name.startswith("phalanx-")]

    def file_after_all(self) -> str:
        """A new segment takes nothing from those who use the former: tensors and groups."""
        x = phalanx.shm.empty(100).fill_(3)
        ranks = tuple(range(self.size))
        group = bootstrap.open_group(self.store(), self.rank, ranks, "former", 30.0, ("proc",))
        told = self.open(ways=("file",))
        assert told == "works" or "/dev/shm" in told, told
        assert (x == 3).all()
        address = x.data_ptr()
        group.collective(_core.ALL_REDUCE, _core.SUM, _core.F32, 0, address, address, 100, 30.0, True)
        assert (x == 3 * self.size).all()
        group.close()
        return told

    def on_another_host(self, what: str) -> str:
        host = bootstrap.this_host()
        names = {name: getattr(host, name) for name in ("boot", "processes", "user")}
        if self.rank == 1:
            names[what] = "another" if what != "user" else 12345
        return self.open(host=bootstrap.Host(**names))

    def without_proc_on_rank_1(self) -> str:
        """One rank that is refused makes all turn to the next way, those too that were served."""
        if self.rank == 1:

            class Refused(bootstrap.ThroughProc):
                def reach(self, peer: bootstrap.Offer) -> int:
                    raise PermissionError("not for you")

            bootstrap.WAYS["proc"] = Refused
        try:
            alone = self.open(ways=("proc",))
            return f"{alone} | {self.open(ways=('proc', 'socket'))}"
        finally:
            bootstrap.WAYS["proc"] = bootstrap.ThroughProc

    def late(self, seconds: float) -> str:
        """Rank 1 does not come."""
        return self.open(seconds) if self.rank != 1 else "did not come"

    def dies(self) -> str:
        """Rank 1 says hello and dies."""
        if self.rank == 1:
            bootstrap._meet = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        return self.open(30.0)

    def same_store_again(self) -> str:
        """What was said at the first opening is not taken for what is said at the second."""
        store = self.store()
        for turn in range(3):
            dist.init_process_group("shm", store=store, rank=self.rank, world_size=self.size)
            if turn == 1 and self.rank == 0:
                dist.broadcast(torch.ones(1), 0)  # the ranks leave one after the other
            elif turn == 1:
                dist.broadcast(torch.ones(1), 0)
            x = torch.full((10,), float(turn))
            dist.all_reduce(x)
            assert (x == turn * self.size).all()
            dist.destroy_process_group()
        return "works"

    def traffic(self) -> list[list[str]]:
        """What opening a first and a second group asks of the store."""
        bootstrap._segment = bootstrap._start(None, 1 << 30) if self.opened == 0 else bootstrap._segment
        calls, groups = [], []
        for _ in range(2):
            store = Counting(self.store())
            ranks = tuple(range(self.size))
            groups.append(bootstrap.open_group(store, self.rank, ranks, "counted", 30.0))  # type: ignore[arg-type]
            calls.append(store.calls)
        for group in groups:
            group.close()
        return calls


def serve(job: dict[str, Any]) -> None:
    connection = job["connection"]
    stand_by(job["rank"], job["folder"])
    me = Rank(job["rank"], job["size"], job["folder"])
    with contextlib.suppress(EOFError):
        while True:
            name, *arguments = connection.recv()
            try:
                connection.send(getattr(me, name)(*arguments))
            except BaseException as error:  # noqa: BLE001 - the parent raises it
                connection.send(Raised("".join(traceback.format_exception(error))))


if __name__ == "__rank__":
    serve(JOB)  # noqa: F821 - set by whoever runs this file
elif __name__ == "__main__":
    print(Rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]).open())  # noqa: T201
