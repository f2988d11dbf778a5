"""Messages, groups, works and all else that torch.distributed asks of the shm backend, as functions of one rank."""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.shm.values import LARGE, REDUCE, case, same, single
from torch import Tensor

import phalanx.shm
from phalanx.comm.shm import sites


@case
def messages_match_by_pair_and_tag(rank: int, size: int) -> None:
    if rank == 0:
        for value, tag in ((1.0, 5), (2.0, 6), (3.0, 5)):
            dist.send(torch.tensor([value]), 1, tag=tag)
    if rank == 1:
        got = [torch.zeros(1) for _ in range(3)]
        assert dist.recv(got[0], 0, tag=6) == 0
        dist.recv(got[1], 0, tag=5)
        dist.recv(got[2], 0, tag=5)
        assert [x.item() for x in got] == [2.0, 1.0, 3.0]
    dist.barrier()


@case
def messages_from_anybody(rank: int, size: int) -> None:
    for tag, count in enumerate((1, LARGE)):
        if rank:
            dist.send(torch.full((count,), float(rank)), 0, tag=tag)
        else:
            senders = set()
            for _ in range(size - 1):
                x = torch.zeros(count)
                sender = dist.recv(x, tag=tag)
                assert (x == sender).all()
                senders.add(sender)
            assert senders == set(range(1, size))


@case
def many_messages_that_nobody_awaits_yet(rank: int, size: int) -> None:
    peer = rank ^ 1
    works = [dist.isend(torch.full((1000,), float(i)), peer, tag=i % 3) for i in range(500)]
    for tag in (2, 0, 1):
        for i in range(tag, 500, 3):
            x = torch.zeros(1000)
            dist.recv(x, peer, tag=tag)
            assert (x == i).all()
    for work in works:
        work.wait()


@case
def batched_messages(rank: int, size: int) -> None:
    for count in (0, 1, LARGE):
        x, got = torch.full((count,), float(rank)), torch.zeros(count)
        ops = [
            dist.P2POp(dist.isend, x, (rank + 1) % size),
            dist.P2POp(dist.irecv, got, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert (got == (rank - 1) % size).all()


@case
def groups_of_some_ranks_in_any_order(rank: int, size: int) -> None:
    last = size - 1
    group = dist.new_group([last, 0], sort_ranks=False) if size > 2 and _sorts() else dist.new_group([0, last])
    if rank in (0, last):
        x = torch.full((3,), float(rank))
        dist.broadcast(x, last, group=group)
        assert (x == last).all()
        dist.all_reduce(x, group=group)
        assert (x == 2 * last).all()
        if rank == 0:
            dist.send(torch.tensor([4.0]), last, group=group)
        else:
            x = torch.zeros(1)
            assert dist.recv(x, group=group) == 0
            assert x.item() == 4.0
        dist.destroy_process_group(group)
    dist.barrier()


def _sorts() -> bool:
    return "sort_ranks" in dist.new_group.__code__.co_varnames


@case
def a_mesh_of_groups(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("row", "column"))
    for name in ("row", "column"):
        x = torch.tensor([2.0**rank])
        dist.all_reduce(x, group=mesh.get_group(name))
        peers = [i for i in range(size) if (i % 2 == rank % 2 if name == "row" else i // 2 == rank // 2)]
        assert x.item() == sum(2.0**i for i in peers)
        assert dist.get_backend(mesh.get_group(name)) == "shm"


@case
def objects(rank: int, size: int) -> None:
    got: list[Any] = [None] * size
    dist.all_gather_object(got, {"rank": rank, "text": "x" * rank})
    assert [item["rank"] for item in got] == list(range(size))
    shared: list[Any] = [rank, "a"] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared)
    assert shared == [0, "a"]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {i}" for i in range(size)] if rank == 0 else None)
    assert mine == [f"for {rank}"]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank,), gathered)
    assert gathered is None or gathered == [(i,) for i in range(size)]
    if rank == 0:
        dist.send_object_list([1, "b"], 1)
    elif rank == 1:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, 0)
        assert received == [1, "b"]


@case
def works_and_futures(rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    x = torch.full((4,), rank + 1.0)
    work = dist.all_reduce(x, async_op=True)
    seen: list[float] = []
    future = work.get_future().then(lambda f: seen.append(f.value()[0][0].item()))
    future.wait()
    assert seen == [total]
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is x
    assert work.wait(timedelta(seconds=1))
    assert work.get_future().wait()[0].data_ptr() == x.data_ptr()
    # A callback may communicate and wait, in whichever thread it runs.
    y = torch.full((4,), rank + 1.0)

    def again(f: Any) -> Tensor:
        return dist.all_reduce(f.value()[0], async_op=True).get_future().wait()[0]

    assert (dist.all_reduce(y, async_op=True).get_future().then(again).wait() == total * size).all()
    got = torch.zeros(1)
    works = [dist.isend(torch.tensor([float(rank)]), (rank + 1) % size), dist.irecv(got)]
    for work in works:
        work.wait()
    assert works[1]._source_rank() == works[1].source_rank() == (rank - 1) % size


@case
def callers_in_cpp(rank: int, size: int) -> None:
    """Functional collectives call the process group from C++, and by other names than Python does."""
    from torch.distributed import _functional_collectives as functional

    world = dist.group.WORLD
    x = torch.full((2 * size,), rank + 1.0)
    total = size * (size + 1) / 2
    assert (functional.all_reduce(x, "sum", world) == total).all()
    assert (functional.reduce_scatter_tensor(x, "sum", 0, world) == total).all()
    same(functional.all_gather_tensor(x[:1], 0, world) * 1, torch.arange(size) + 1.0)
    assert (functional.broadcast(x, 1, world) == 2).all()
    same(functional.all_to_all_single(x, None, None, world) * 1, (torch.arange(size) + 1.0).repeat_interleave(2))
    for y in functional.all_reduce_coalesced([x, x[:1]], "sum", world):
        assert (y == total).all()
    for y in functional.all_gather_into_tensor_coalesced([x, x[:1]], world):
        assert y.sum() == total * len(y) / size
    for y in functional.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", [0, 0], world):
        assert (y % total == 0).all() and len(y) == 2


@case
def a_call_without_python_says_so(rank: int, size: int) -> None:
    """As from a thread of autograd: there is no line of the user's to name."""
    texts: list[str] = []

    class Listening:
        started = staticmethod(sites._core.started)

        @staticmethod
        def site(text: str) -> int:
            texts.append(text)
            return 0

    real = sites._core
    sites._core = Listening  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            elsewhere = torch.jit.script(_elsewhere)
        assert (elsewhere(torch.ones(3), dist.group.WORLD.group_name) == size).all()
        line = sys._getframe().f_lineno + 1
        dist.barrier()
    finally:
        sites._core = real
    here = f"{__file__}:{line} in a_call_without_python_says_so"
    assert texts == ["C++ without a Python caller (such as a thread of autograd)", here]


def _reduce_and_wait(x: torch.Tensor, name: str):
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", name))


def _elsewhere(x: torch.Tensor, name: str):
    """In a thread of the interpreter of TorchScript."""
    return torch.jit.wait(torch.jit.fork(_reduce_and_wait, x, name))


@case
def gradients_through_ddp(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    alone = torch.nn.Linear(3, 2)
    alone.load_state_dict(model.state_dict())
    data = torch.arange(float(size * 3)).view(size, 3)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parallel(data[rank : rank + 1]).sum().backward()
    alone(data).sum().div(size).backward()
    torch.testing.assert_close(model.weight.grad, alone.weight.grad, rtol=0, atol=1e-6)  # two float32 sums of four, of size 10


@case
def threads_with_groups_of_their_own(rank: int, size: int) -> None:
    groups = [dist.new_group() for _ in range(3)]
    failures: list[BaseException] = []

    def work(group: Any, salt: float) -> None:
        try:
            for i in range(50):
                x = torch.full((200,), rank + salt + i)
                dist.all_reduce(x, group=group)
                assert (x == size * (size - 1) / 2 + size * (salt + i)).all()
        except BaseException as error:  # noqa: BLE001 - told to the test below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(group, 1000.0 * i)) for i, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for group in groups:
        dist.destroy_process_group(group)


@case
def dropped_handles_keep_their_tensors(rank: int, size: int) -> None:
    """Rank 0 drops everything it has of operations that the others have not come to yet."""
    gate = dist.new_group()
    if rank == 0:
        x = torch.full((LARGE,), 1.0)
        kept = weakref.ref(x)
        dist.all_reduce(x, async_op=True)
        dist.all_reduce(torch.full((LARGE,), 1.0), async_op=True)
        del x
        gc.collect()
        assert kept() is not None, "an operation in flight has lost its tensor"
        dist.barrier(group=gate)
        until = time.monotonic() + 20
        while kept() is not None:
            assert time.monotonic() < until, "the tensor outlives its operation"
            time.sleep(0.001)
    else:
        dist.barrier(group=gate)
        for _ in range(2):
            x = torch.full((LARGE,), float(rank + 1))
            dist.all_reduce(x)
            assert (x == size * (size + 1) / 2).all()
    dist.barrier()


@case
def tensors_in_shared_memory(rank: int, size: int) -> None:
    x = phalanx.shm.empty(3, 5, dtype=torch.float64)
    assert x.shape == (3, 5) and x.dtype == torch.float64 and phalanx.shm.is_resident(x)
    assert phalanx.shm.empty((2,)).shape == (2,) and phalanx.shm.empty(0, 3).shape == (0, 3)
    assert phalanx.shm.empty_like(x.t()).shape == (5, 3)
    assert not phalanx.shm.is_resident(torch.empty(3))
    for count in (1, 1000, LARGE):
        y = dist.group.WORLD.allocate_tensor(count, dtype=torch.float32)
        assert phalanx.shm.is_resident(y) and y.data_ptr() % 64 == 0
        y.fill_(rank + 1)
        dist.all_reduce(y)
        assert (y == size * (size + 1) / 2).all()
        out = phalanx.shm.empty(size * count)
        single["all_gather_single"](out, y)
        assert (out == size * (size + 1) / 2).all()
    address = phalanx.shm.empty(12345).data_ptr()
    gc.collect()
    assert phalanx.shm.empty(12345).data_ptr() == address, "a freed block is used again"


@case
def what_c10d_asks_of_a_backend(rank: int, size: int) -> None:
    world = dist.group.WORLD
    assert isinstance(world, phalanx.shm.ProcessGroup)
    assert dist.get_backend() == "shm" and world.name() == "shm"
    assert (world.rank(), world.size()) == (rank, size)
    assert world._get_backend(torch.device("cpu")) is world
    with pytest.raises(RuntimeError, match="not on cuda"):
        world._get_backend(torch.device("cuda"))
    assert world.bound_device_id is None and not world.supports_splitting
    assert world.options._timeout == timedelta(seconds=60)
    assert world.group_name and world.group_desc == "default_pg"
    before = world._get_sequence_number_for_group()
    dist.barrier()
    world.monitored_barrier(timedelta(seconds=30))
    assert world._get_sequence_number_for_group() == before + 2
    for old, new in (
        ("_allgather_base", "all_gather_single"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("alltoall_base", "all_to_all_single"),
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ):
        assert getattr(phalanx.shm.ProcessGroup, old) is getattr(phalanx.shm.ProcessGroup, new)


@case
def nothing_warns(rank: int, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.all_reduce(torch.ones(2))
        if hasattr(dist, "all_gather_single"):
            dist.all_gather_single(torch.ones(2 * size), torch.ones(2))
            dist.reduce_scatter_single(torch.ones(2), torch.ones(2 * size))
        dist.all_to_all_single(torch.ones(size), torch.ones(size))
        dist.barrier()


@case
def what_is_refused_says_why(rank: int, size: int) -> None:
    """On every rank and before anything is sent, so the next operation works."""
    refused: list[tuple[str, Callable[[], object]]] = [
        ("dense tensors", lambda: dist.all_reduce(torch.ones(3).to_sparse())),
        ("cannot reduce torch.bool with .*AVG", lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), REDUCE.AVG)),
        ("cannot reduce torch.float32 with .*BXOR", lambda: dist.all_reduce(torch.ones(3), REDUCE.BXOR)),
        ("cannot reduce torch.uint16", lambda: dist.all_reduce(torch.ones(3).to(torch.uint16))),
        ("on meta", lambda: dist.all_reduce(torch.ones(3, device="meta"))),
        (f"has 5 elements, but {2 * size} are needed", lambda: single["all_gather_single"](torch.ones(5), torch.ones(2))),
        ("do not divide", lambda: dist.all_to_all_single(torch.ones(size + 1), torch.ones(size + 1))),
        ("cannot be the other end", lambda: dist.isend(torch.ones(1), rank)),
        ("split sizes", lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2), [1] * (size + 1), [1] * (size + 1))),
    ]
    for text, call in refused:
        with pytest.raises(ValueError, match=text):
            call()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size
