"""What goes wrong, on three real ranks of `watched:gloo`. Started by test_watched.py with JOB set; every case is one init.

A case that must see a verdict before it goes on waits for the file that the waiting rank's `say` writes.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

BIG = 1 << 24  # elements: 64 MB, more than the sockets hold
SIZE = 3
PATIENCE = 0.3


class Rank:
    """One rank in one case: its number, a tensor, and what it has been told."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.said: list[str] = []
        self.x = torch.ones(4)
        self.when_told: Callable[[], object] = lambda: None

    def say(self, text: str) -> None:
        self.said.append(text)
        self.when_told()
        (self.folder / f"said.{self.rank}").touch()

    def until_told(self, rank: int, step: Callable[[], object] = lambda: time.sleep(0.01)) -> None:
        """Do something until that rank has been told something."""
        until = time.monotonic() + 20
        while not (self.folder / f"said.{rank}").exists():
            assert time.monotonic() < until
            step()


def fine(r: Rank) -> None:
    dist.all_reduce(r.x)
    assert r.x[0] == SIZE
    work = dist.all_reduce(r.x, async_op=True)
    work.wait()
    assert r.x[0] == SIZE**2
    everybody: list[object] = [None] * SIZE
    dist.all_gather_object(everybody, r.rank)
    assert everybody == [0, 1, 2]
    out = torch.empty(4 * SIZE)
    dist.all_gather(list(out.chunk(SIZE)), torch.full((4,), float(r.rank)))
    assert out.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    group = dist.new_group([0, 2])
    if r.rank != 1:
        dist.broadcast(r.x, 2, group=group)
    if r.rank == 0:
        dist.send(torch.full((2,), 7.0), 1, tag=3)
        dist.send(torch.full((2,), 8.0), 1)
        dist.send(torch.full((2,), 9.0), 1)
    elif r.rank == 1:
        received = torch.empty(2)
        dist.recv(received, 0, tag=3)
        assert received[0] == 7
        assert dist.recv(received) == 0
        assert received[0] == 8
        dist.recv(received, 0)
        assert received[0] == 9
    splits = [1 + (r.rank == other) for other in range(SIZE)]
    dist.all_to_all_single(torch.empty(sum(splits)), torch.ones(sum(splits)), splits, splits)
    dist.barrier()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.full((1, 2), float(r.rank))).sum().backward()
    assert model.module.weight.grad is not None
    assert model.module.weight.grad[0, 0] == 1.0


def missing(r: Rank) -> None:
    if r.rank == 2:
        r.until_told(0)
        r.until_told(1)
    dist.all_reduce(r.x)
    assert r.x[0] == SIZE


def missing_elsewhere(r: Rank) -> None:
    """As if every rank were on a host of its own: the rings go through the store."""
    missing(r)


def straggler(r: Rank) -> None:
    group = dist.new_group([1, 2])
    if r.rank:
        done = torch.zeros(1)
        while not done.item():
            done.fill_((r.folder / "said.0").exists())
            dist.all_reduce(done, op=ReduceOp.MIN, group=group)
    dist.all_reduce(r.x)


def operation(r: Rank) -> None:
    if r.rank == 1:
        dist.broadcast(r.x, 0)
    else:
        dist.all_reduce(r.x)


def size(r: Rank) -> None:
    dist.all_reduce(torch.ones(2000 if r.rank == 1 else 1000))


def dtype(r: Rank) -> None:
    dist.all_reduce(r.x.int() if r.rank == 1 else r.x)


def reduction(r: Rank) -> None:
    dist.all_reduce(r.x, op=ReduceOp.MAX if r.rank == 1 else ReduceOp.SUM)


def root(r: Rank) -> None:
    dist.broadcast(r.x, 1 if r.rank == 1 else 0)


def order(r: Rank) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    if r.rank == 2:
        return
    for group in groups if r.rank == 0 else reversed(groups):
        dist.all_reduce(r.x, group=group)


def order_elsewhere(r: Rank) -> None:
    order(r)


def send_without_receive(r: Rank) -> None:
    if r.rank == 0:
        dist.send(torch.ones(BIG), 1)
    dist.all_reduce(r.x)


def receive_without_send(r: Rank) -> None:
    if r.rank == 1:
        dist.recv(r.x, 0)
    dist.all_reduce(r.x)


def ring_of_sends(r: Rank) -> None:
    y = torch.ones(BIG)
    dist.send(y, (r.rank + 1) % SIZE)
    dist.recv(y, (r.rank - 1) % SIZE)


def ring_of_receives(r: Rank) -> None:
    dist.recv(r.x, (r.rank - 1) % SIZE)
    dist.send(r.x, (r.rank + 1) % SIZE)


def tag(r: Rank) -> None:
    if r.rank == 0:
        dist.send(r.x, 1, tag=5)
    if r.rank == 1:
        dist.recv(r.x, 0, tag=6)
    dist.barrier()


def crossed(r: Rank) -> None:
    """Two messages, sent in one order and received in the other."""
    if r.rank == 0:
        dist.send(torch.ones(4), 1)
        dist.send(torch.ones(2), 1)
    if r.rank == 1:
        dist.recv(torch.ones(2), 0)
        dist.recv(torch.ones(4), 0)
    dist.barrier()


def uneven(r: Rank) -> None:
    for _ in range(3 if r.rank == 1 else 4):
        dist.all_reduce(r.x)


def branch(r: Rank) -> None:
    if r.rank == 0:
        dist.all_reduce(r.x)


def new_group(r: Rank) -> None:
    dist.new_group([0, 1] if r.rank == 0 else [1, 2])
    dist.barrier()


def never_waited(r: Rank) -> None:
    work = dist.all_reduce(r.x, async_op=True)
    dist.barrier()
    assert work.is_completed()


def unreceived(r: Rank) -> None:
    if r.rank == 0:
        dist.isend(torch.ones(1), 1)
    dist.barrier()


def destroyed(r: Rank) -> None:
    group = dist.new_group([0, 1])
    if r.rank == 0:
        dist.all_reduce(r.x, group=group)
    if r.rank == 1:
        dist.destroy_process_group(group)
        r.until_told(0)


def store(r: Rank) -> None:
    store = dist.distributed_c10d._get_default_store()
    if r.rank == 0:
        r.when_told = lambda: store.set("a key that comes late", "")
    if r.rank == 1:
        store.get("a key that comes late")
    dist.all_reduce(r.x)


def raised(r: Rank) -> None:
    if r.rank == 1:
        try:
            dist.all_reduce(r.x.to_sparse(), op=ReduceOp.MAX)  # which Gloo refuses
        except RuntimeError:
            r.until_told(0)
            return
    dist.all_reduce(r.x, op=ReduceOp.MAX)


def died(r: Rank) -> None:
    dist.all_reduce(r.x)
    if r.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(r.x)


CASES = (
    fine, missing, missing_elsewhere, straggler, operation, size, dtype, reduction, root, order, order_elsewhere,
    send_without_receive, receive_without_send, ring_of_sends, ring_of_receives, tag, crossed, uneven, branch, new_group,
    never_waited, unreceived, destroyed, store, raised, died,
)  # fmt: skip


def _main(rank: int, folder: str) -> None:
    import phalanx.watched as watched

    torch.set_num_threads(1)
    tempfile.tempdir = folder  # boards of killed ranks stay: here they go with the test's folder
    for case in CASES:
        here = Path(folder) / "cases" / case.__name__
        here.mkdir(parents=True, exist_ok=True)
        r = Rank(rank, here)
        host = f"host-{rank}" if case.__name__.endswith("elsewhere") else None
        options = watched.Options(patience=PATIENCE, run_dir=here, say=r.say, host=host)
        began, error = time.monotonic(), ""
        try:
            store = dist.FileStore(str(here / "store"), SIZE)
            dist.init_process_group(
                "watched:gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=20), pg_options=options
            )
            # Gloo's connections break where a rank ends while another still connects.
            store.set(f"connected/{rank}", "")
            store.wait([f"connected/{other}" for other in range(SIZE)])
            began = time.monotonic()
            case(r)
        except Exception as caught:  # noqa: BLE001 - what is raised is what is tested
            error = f"{type(caught).__name__}: {caught}"
        seconds = time.monotonic() - began
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 0  # an init that failed leaves its name behind
        told = {"error": error, "said": r.said, "seconds": seconds}
        (here / f"told.{rank}").write_text(json.dumps(told))


if "JOB" in globals():
    _main(*globals()["JOB"])
