"""Reducing and moving tensors of all types and shapes through the shm backend, as functions of one rank."""

from __future__ import annotations

import itertools
import time
import warnings

import torch
import torch.distributed as dist
from tests.comm.shm.values import LARGE, REDUCE, REDUCIBLE, SIZES, anything, case, modes, number, reduced, run, same, single
from torch import Tensor

from phalanx.comm.shm.group import DTYPES


@case
def all_reduce_of_every_type_and_operation(rank: int, size: int) -> None:
    for turn, ((dtype, op), count) in enumerate(itertools.product(REDUCIBLE, SIZES)):
        if dtype.is_complex and op == REDUCE.PRODUCT:
            continue  # c10d refuses: see complex_products
        for asynchronous in modes(size, turn):
            x = number(rank, count, dtype)
            run(dist.all_reduce, x, op, asynchronous=asynchronous)
            same(x, reduced(dtype, op, [number(i, count, dtype) for i in range(size)]))


@case
def all_reduce_of_more_than_a_megabyte(rank: int, size: int) -> None:
    for dtype, asynchronous in itertools.product((torch.float32, torch.bfloat16, torch.int8), (False, True)):
        x = number(rank, LARGE, dtype)
        run(dist.all_reduce, x, asynchronous=asynchronous)
        same(x, reduced(dtype, REDUCE.SUM, [number(i, LARGE, dtype) for i in range(size)]))


@case
def all_reduce_has_the_same_bits_everywhere(rank: int, size: int) -> None:
    for dtype, count in itertools.product((torch.float32, torch.bfloat16), (1000, LARGE)):
        x = torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)
        dist.all_reduce(x)
        xs = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(xs, x)
        for other in xs:
            same(other, x)


@case
def complex_products(rank: int, size: int) -> None:
    x = torch.tensor([1 + 1j, 2 + 0j]) * (rank + 1)
    opts = dist.AllreduceOptions()
    opts.reduceOp = REDUCE.PRODUCT
    dist.group.WORLD.allreduce([x], opts).wait()
    want = torch.ones(2, dtype=torch.complex64)
    for i in range(size):
        want *= torch.tensor([1 + 1j, 2 + 0j]) * (i + 1)
    same(x, want)


@case
def reduce_and_reduce_scatter(rank: int, size: int) -> None:
    for turn, ((dtype, op), count) in enumerate(itertools.product(REDUCIBLE, (0, 1, 7))):
        for asynchronous in modes(size, turn):
            parts = [[number(i + 10 * j, count, dtype) for j in range(size)] for i in range(size)]
            want = reduced(dtype, op, [parts[i][rank] for i in range(size)])
            out = torch.zeros(count, dtype=dtype)
            if not (dtype.is_complex and op == REDUCE.PRODUCT):
                run(single["reduce_scatter_single"], out, torch.cat(parts[rank]), op, asynchronous=asynchronous)
                same(out, want)
                out.zero_()
                run(dist.reduce_scatter, out, parts[rank], op, asynchronous=asynchronous)
                same(out, want)
            for root in range(size):
                x = parts[rank][0].clone()
                run(dist.reduce, x, root, op, asynchronous=asynchronous)
                if rank == root:
                    same(x, reduced(dtype, op, [parts[i][0] for i in range(size)]))


@case
def large_reduce_and_reduce_scatter(rank: int, size: int) -> None:
    parts = [number(i, LARGE * size, torch.float32) for i in range(size)]
    total = reduced(torch.float32, REDUCE.SUM, parts)
    out = torch.zeros(LARGE)
    single["reduce_scatter_single"](out, parts[rank])
    same(out, total[rank * LARGE : (rank + 1) * LARGE])
    x = parts[rank].clone()
    dist.reduce(x, size - 1)
    if rank == size - 1:
        same(x, total)
    whole = parts[rank].clone()
    single["reduce_scatter_single"](whole[rank * LARGE : (rank + 1) * LARGE], whole)  # in place
    same(whole[rank * LARGE : (rank + 1) * LARGE], total[rank * LARGE : (rank + 1) * LARGE])


@case
def every_type_can_be_moved(rank: int, size: int) -> None:
    for turn, (dtype, count) in enumerate(itertools.product(DTYPES, (0, 1, 7))):
        for asynchronous in modes(size, turn):
            move(rank, size, dtype, count, asynchronous)


@case
def more_than_a_megabyte_can_be_moved(rank: int, size: int) -> None:
    for dtype, asynchronous in itertools.product((torch.float32, torch.uint16), (False, True)):
        move(rank, size, dtype, LARGE, asynchronous)


def move(rank: int, size: int, dtype: torch.dtype, count: int, asynchronous: bool) -> None:
    """All operations that only move: what everybody has is known from the rank's number."""
    have = [anything(i, count, dtype) for i in range(size)]
    pieces = [[anything(100 + 10 * i + j, count, dtype) for j in range(size)] for i in range(size)]

    def blank(n: int = 1) -> Tensor:
        return torch.zeros(n * count * dtype.itemsize, dtype=torch.uint8).view(dtype)

    root = count % size
    x = have[rank].clone()
    run(dist.broadcast, x, root, asynchronous=asynchronous)
    same(x, have[root])
    outs = [blank() for _ in range(size)]
    run(dist.all_gather, outs, have[rank], asynchronous=asynchronous)
    for got, want in zip(outs, have, strict=True):
        same(got, want)
    out = blank(size)
    run(single["all_gather_single"], out, have[rank], asynchronous=asynchronous)
    same(out, torch.cat([x.view(torch.uint8) for x in have]).view(dtype))
    outs = [blank() for _ in range(size)] if rank == root else None
    run(dist.gather, have[rank], outs, root, asynchronous=asynchronous)
    for got, want in zip(outs or [], have, strict=False):
        same(got, want)
    out = blank()
    run(dist.scatter, out, pieces[root] if rank == root else None, root, asynchronous=asynchronous)
    same(out, pieces[root][rank])
    outs = [blank() for _ in range(size)]
    run(dist.all_to_all, outs, pieces[rank], asynchronous=asynchronous)
    for i, got in enumerate(outs):
        same(got, pieces[i][rank])
    out = blank(size)
    mine = torch.cat([x.view(torch.uint8) for x in pieces[rank]]).view(dtype)
    run(dist.all_to_all_single, out, mine, asynchronous=asynchronous)
    same(out, torch.cat([pieces[i][rank].view(torch.uint8) for i in range(size)]).view(dtype))
    got = blank()
    works = [dist.isend(have[rank], (rank + 1) % size), dist.irecv(got, (rank - 1) % size)]
    for work in works:
        work.wait()
    same(got, have[(rank - 1) % size])


@case
def all_to_all_with_uneven_splits(rank: int, size: int) -> None:
    def rows(i: int, j: int) -> int:
        return (2 * i + 3 * j) % 4  # some are empty

    for width, asynchronous in itertools.product((1, 3, 50_000), (False, True)):
        send, recv = [rows(rank, j) for j in range(size)], [rows(i, rank) for i in range(size)]
        x = torch.cat([torch.full((rows(rank, j), width), 10.0 * rank + j) for j in range(size)])
        out = torch.zeros(sum(recv), width)
        run(dist.all_to_all_single, out, x, recv, send, asynchronous=asynchronous)
        same(out, torch.cat([torch.full((rows(i, rank), width), 10.0 * i + rank) for i in range(size)]))
        outs = [torch.zeros(n, width) for n in recv]
        run(dist.all_to_all, outs, list(x.split(send)), asynchronous=asynchronous)
        same(torch.cat(outs), out)


@case
def ranks_may_leave_even_splits_out(rank: int, size: int) -> None:
    """c10d has no rule that all ranks must give splits, or none."""
    x, out = torch.arange(2.0 * size) + 100 * rank, torch.zeros(2 * size)
    splits = [2] * size if rank == 0 else None
    dist.all_to_all_single(out, x, splits, splits)
    same(out, torch.cat([torch.tensor([2.0 * rank, 2.0 * rank + 1]) + 100 * i for i in range(size)]))


@case
def tensors_that_are_not_contiguous(rank: int, size: int) -> None:
    def strided(fill: float) -> Tensor:
        return torch.full((6, 10), float(fill)).t()[::2]  # (5, 6)

    for asynchronous in (False, True):
        x = strided(rank + 1.0)
        run(dist.all_reduce, x, asynchronous=asynchronous)
        assert (x == size * (size + 1) / 2).all() and x.t().is_contiguous() is False
        x = strided(rank)
        run(dist.broadcast, x, 1, asynchronous=asynchronous)
        same(x, strided(1.0))
        x = strided(rank + 1.0)
        run(dist.reduce, x, 0, asynchronous=asynchronous)
        assert rank != 0 or (x == size * (size + 1) / 2).all()
        outs = [strided(-1) for _ in range(size)]
        run(dist.all_gather, outs, strided(rank), asynchronous=asynchronous)
        for i, out in enumerate(outs):
            same(out, strided(i))
        out = torch.zeros(4, 5 * size).t()
        run(single["all_gather_single"], out, torch.full((4, 5), float(rank)).t(), asynchronous=asynchronous)
        same(out, torch.arange(float(size)).repeat_interleave(5)[:, None].expand(-1, 4))
        out = torch.zeros(4, 5).t()
        run(single["reduce_scatter_single"], out, torch.full((4, 5 * size), rank + 1.0).t(), asynchronous=asynchronous)
        same(out, torch.full((5, 4), size * (size + 1) / 2))
        out = torch.zeros(3, 2 * size).t()
        run(dist.all_to_all_single, out, torch.full((3, 2 * size), float(rank)).t(), asynchronous=asynchronous)
        same(out, torch.arange(float(size)).repeat_interleave(2)[:, None].expand(-1, 3))
        out = strided(-1)
        run(dist.scatter, out, [strided(i) for i in range(size)] if rank == 0 else None, 0, asynchronous=asynchronous)
        same(out, strided(rank))
        outs = [strided(-1) for _ in range(size)] if rank == 0 else None
        run(dist.gather, strided(rank), outs, 0, asynchronous=asynchronous)
        for i, out in enumerate(outs or []):
            same(out, strided(i))
    out = strided(-1)
    works = [dist.isend(strided(rank), (rank + 1) % size), dist.irecv(out, (rank - 1) % size)]
    for work in works:
        work.wait()
    same(out, strided((rank - 1) % size))


@case
def lazily_conjugated_and_negated_tensors(rank: int, size: int) -> None:
    x = torch.tensor([1 + 2j]).conj()
    assert x.is_contiguous() and x.is_conj()
    dist.group.WORLD.allreduce([x]).wait()
    same(x.resolve_conj(), torch.tensor([1 - 2j]) * size)
    y = torch.tensor([1 + 2j]).conj().imag
    assert y.is_contiguous() and y.is_neg()
    dist.all_reduce(y)
    same(y.resolve_neg(), torch.tensor([-2.0 * size]))


@case
def results_are_copied_back_before_anybody_asks(rank: int, size: int) -> None:
    x = torch.full((10, 10), rank + 1.0).t()[::2]
    work = dist.all_reduce(x, async_op=True)
    until = time.monotonic() + 20
    while not (x == size * (size + 1) / 2).all():
        assert time.monotonic() < until, "nothing was copied back"
        time.sleep(0.001)
    work.wait()


@case
def several_at_once(rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    for asynchronous in (False, True):
        xs = [torch.full((n,), rank + 1.0) for n in (3, 0, 1000)]
        with dist.distributed_c10d._coalescing_manager(async_ops=asynchronous) as manager:
            for x in xs:
                dist.all_reduce(x)
        manager.wait()
        assert all((x == total).all() for x in xs)
        outs, ins = [torch.zeros(size * n) for n in (2, 5)], [torch.full((n,), float(rank)) for n in (2, 5)]
        with dist.distributed_c10d._coalescing_manager(async_ops=asynchronous) as manager:
            for out, x in zip(outs, ins, strict=True):
                single["all_gather_single"](out, x)
        manager.wait()
        for n, out in zip((2, 5), outs, strict=True):
            same(out, torch.arange(float(size)).repeat_interleave(n))
        outs, ins = [torch.zeros(n) for n in (2, 5)], [torch.full((size * n,), rank + 1.0) for n in (2, 5)]
        with dist.distributed_c10d._coalescing_manager(async_ops=asynchronous) as manager:
            for out, x in zip(outs, ins, strict=True):
                single["reduce_scatter_single"](out, x)
        manager.wait()
        assert all((out == total).all() for out in outs)
    # What c10d does not collect itself; both ranks of a pair send before they receive.
    big, got, x = torch.full((LARGE,), float(rank)), torch.zeros(LARGE), torch.full((2,), float(rank))
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
        dist.send(big, (rank + 1) % size)
        dist.recv(got, (rank - 1) % size)
        dist.broadcast(x, 1)
    assert (got == (rank - 1) % size).all() and (x == 1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        xs = [torch.full((n,), rank + 1.0) for n in (3, 5)]
        dist.all_reduce_coalesced(xs)
        assert all((x == total).all() for x in xs)
        xs = [torch.full((n,), rank + 1.0) for n in (3, 5)]
        dist.all_reduce_coalesced(xs, async_op=True).wait()
        assert all((x == total).all() for x in xs)
        lists = [[torch.zeros(n) for n in (3, 5)] for _ in range(size)]
        dist.all_gather_coalesced(lists, [torch.full((n,), float(rank)) for n in (3, 5)])
    for i, outs in enumerate(lists):
        assert [out.tolist() for out in outs] == [[float(i)] * 3, [float(i)] * 5]
