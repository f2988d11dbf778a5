"""The conformance suite: what every transport must do, as functions of one rank's transport in a world of four ranks.

Run in threads by test_transports.py, and in processes by starting this file with `JOB` set (see the end).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phalanx.comm.transport import Group, Handle, Transport

SIZE = 4
DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64, torch.bfloat16, torch.float16)
CASES: dict[str, Callable[[Transport, Group], None]] = {}


def case(fn: Callable[[Transport, Group], None]) -> Callable[[Transport, Group], None]:
    CASES[fn.__name__] = fn
    return fn


def values(rank: int, *shape: int) -> Tensor:
    """What `rank` holds, in float64: every rank can compute everybody's."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)


def whole(rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """The same as small whole numbers, whose sums are exact in every type."""
    return (values(rank, *shape) * 3).round().abs().to(dtype)


def everybody(group: Group, *shape: int) -> list[Tensor]:
    return [values(rank, *shape) for rank in group.ranks]


def close(got: Tensor, want: Tensor) -> None:
    """Equal but for the order in which four float64 numbers of size about 1 are added: 4 ulp."""
    torch.testing.assert_close(got, want, rtol=0, atol=4 * 4.5e-16)


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def refused(what: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=what):
        call()


@case
def all_reduce_of_every_op(t: Transport, g: Group) -> None:
    stack = torch.stack(everybody(g, 3, 5))
    wanted = {"sum": stack.sum(0), "mean": stack.mean(0), "min": stack.amin(0), "max": stack.amax(0)}
    for op, want in wanted.items():
        x = values(t.rank, 3, 5)
        t.all_reduce(x, g, op).wait()
        close(x, want)


@case
def all_reduce_has_the_same_bits_everywhere(t: Transport, g: Group) -> None:
    x = values(t.rank, 1000).to(torch.float32)
    t.all_reduce(x, g).wait()
    out = torch.empty(g.size, 1000)
    t.all_gather(out.view(-1), x, g).wait()
    for other in out:
        assert torch.equal(other, x)


@case
def all_reduce_is_reduce_scatter_then_all_gather(t: Transport, g: Group) -> None:
    whole = values(t.rank, 8, 3)
    piece, joined = torch.empty(2, 3, dtype=whole.dtype), torch.empty_like(whole)
    t.reduce_scatter(piece, whole, g).wait()
    t.all_gather(joined, piece, g).wait()
    t.all_reduce(whole, g).wait()
    close(joined, whole)


@case
def slice_i_belongs_to_position_i(t: Transport, g: Group) -> None:
    mine = g.index(t.rank)
    out = torch.empty(4, 2, dtype=torch.int64)
    t.all_gather(out, torch.full((1, 2), t.rank), g).wait()
    same(out, torch.tensor(g.ranks).unsqueeze(1).expand(4, 2))
    piece = torch.empty(1, dtype=torch.int64)
    t.reduce_scatter(piece, torch.arange(4) * 10, g).wait()
    assert piece.item() == 4 * 10 * mine


@case
def reduce_scatter_of_every_op(t: Transport, g: Group) -> None:
    stack = torch.stack(everybody(g, 4, 6))
    wanted = {"sum": stack.sum(0), "mean": stack.mean(0), "min": stack.amin(0), "max": stack.amax(0)}
    for op, want in wanted.items():
        out = torch.empty(1, 6, dtype=torch.float64)
        t.reduce_scatter(out, values(t.rank, 4, 6), g, op).wait()
        close(out[0], want[g.index(t.rank)])


@case
def every_dtype_moves(t: Transport, g: Group) -> None:
    mine, n = g.index(t.rank), g.size
    for dtype in DTYPES:
        x, want = whole(t.rank, n, 3, dtype=dtype), [whole(rank, n, 3, dtype=dtype) for rank in g.ranks]
        out = torch.empty(n * n, 3, dtype=dtype)
        t.all_gather(out, x, g).wait()
        same(out, torch.cat(want))
        swapped = torch.empty_like(x)
        t.all_to_all(swapped.unbind(0), x.unbind(0), g).wait()
        same(swapped, torch.stack([other[mine] for other in want]))
        t.broadcast(x, 2, g).wait()
        same(x, want[2])
        if dtype != torch.bool:
            x = whole(t.rank, n, 3, dtype=dtype)
            piece = torch.empty(1, 3, dtype=dtype)
            t.reduce_scatter(piece, x, g).wait()
            t.all_reduce(x, g).wait()
            total = torch.stack(want).to(torch.float64).sum(0).to(dtype)
            same(x, total)
            same(piece[0], total[mine])


@case
def uneven_all_to_all(t: Transport, g: Group) -> None:
    """Position i sends i + 2j numbers to position j: all sizes differ, and 0 to 0 is nothing."""
    mine = g.index(t.rank)
    ins = [torch.full((mine + 2 * j,), 10 * mine + j, dtype=torch.float64) for j in range(4)]
    for adjacent in (False, True):
        outs = [torch.empty(j + 2 * mine, dtype=torch.float64) for j in range(4)]
        sent = ins
        if adjacent:  # views of one buffer, which a transport may use as it is
            outs = list(torch.empty(sum(len(out) for out in outs), dtype=torch.float64).split([len(out) for out in outs]))
            sent = list(torch.cat(ins).split([len(x) for x in ins]))
        t.all_to_all(outs, sent, g).wait()
        for j, out in enumerate(outs):
            same(out, torch.full((j + 2 * mine,), 10 * j + mine, dtype=torch.float64))


@case
def all_to_all_where_one_rank_has_nothing(t: Transport, g: Group) -> None:
    """Position 0 sends and receives nothing; the others 2 numbers to one another."""
    mine = g.index(t.rank)
    sizes = [0 if mine == 0 or j == 0 else 2 for j in range(4)]
    outs = [torch.empty(size) for size in sizes]
    t.all_to_all(outs, [torch.full((size,), float(mine)) for size in sizes], g).wait()
    for j, out in enumerate(outs):
        same(out, torch.full((sizes[j],), float(j)))


@case
def rooted_collectives(t: Transport, g: Group) -> None:
    for root in range(g.size):
        at_root, want = g.ranks[root] == t.rank, everybody(g, 2, 3)
        out = torch.empty(8, 3, dtype=torch.float64) if at_root else None
        t.gather(out, values(t.rank, 2, 3), root, g).wait()
        if out is not None:
            same(out, torch.cat(want))
        piece = torch.empty(2, 3, dtype=torch.float64)
        t.scatter(piece, torch.cat(want) + root if at_root else None, root, g).wait()
        same(piece, want[g.index(t.rank)] + root)
        for op in ("sum", "mean", "max"):
            x = values(t.rank, 2, 3)
            t.reduce(x, root, g, op).wait()
            if at_root:
                stack = torch.stack(want)
                close(x, {"sum": stack.sum(0), "mean": stack.mean(0), "max": stack.amax(0)}[op])


@case
def messages_arrive_in_order_in_both_directions(t: Transport, g: Group) -> None:
    mine, n = g.index(t.rank), g.size
    after, before = (mine + 1) % n, (mine - 1) % n
    handles: list[Handle] = []
    got_before, got_after = torch.empty(3, 2), torch.empty(3, 2)
    for k in range(3):
        handles.append(t.send(torch.full((2,), 100.0 * mine + k), after, g))
        handles.append(t.send(torch.full((2,), -100.0 * mine - k), before, g))
    for k in range(3):
        handles.append(t.recv(got_before[k], before, g))
        handles.append(t.recv(got_after[k], after, g))
    for handle in handles:
        handle.wait()
    order = torch.arange(3.0).unsqueeze(1).expand(3, 2)
    same(got_before, 100.0 * before + order)
    same(got_after, -100.0 * after - order)


@case
def a_message_of_every_dtype(t: Transport, g: Group) -> None:
    mine = g.index(t.rank)
    for dtype in DTYPES:
        if mine == 0:
            t.send(whole(7, 5, dtype=dtype), 3, g).wait()
        elif mine == 3:
            x = torch.empty(5, dtype=dtype)
            t.recv(x, 0, g).wait()
            same(x, whole(7, 5, dtype=dtype))


@case
def two_handles_in_flight_waited_in_reverse(t: Transport, g: Group) -> None:
    x, y = values(t.rank, 64), values(t.rank, 16)
    gathered = torch.empty(64, dtype=torch.float64)
    first, second = t.all_reduce(x, g), t.all_gather(gathered, y, g)
    second.wait()
    same(gathered, torch.cat(everybody(g, 16)))
    first.wait()
    close(x, torch.stack(everybody(g, 64)).sum(0))
    for handle in (first, second):
        handle.wait()  # again is harmless
        handle.synchronize()
        assert handle.done()
        assert handle.finished() is not None


@case
def groups_are_independent(t: Transport, g: Group) -> None:
    """Pairs (0, 2) and (1, 3) work while the whole does; the pair calls are issued in a different order on each."""
    pairs = [t.group(f"pair@{first}", (g.ranks[first], g.ranks[first + 2])) for first in (0, 1)]
    pair = next(p for p in pairs if t.rank in p.ranks)
    x, y, z = values(t.rank, 5), values(t.rank, 5), values(t.rank, 5)
    if pair is pairs[0]:
        handles = [t.all_reduce(x, pair), t.all_reduce(y, g), t.all_reduce(z, pair, "max")]
    else:
        handles = [t.all_reduce(y, g), t.all_reduce(x, pair), t.all_reduce(z, pair, "max")]
    for handle in handles:
        handle.wait()
    close(x, torch.stack(everybody(pair, 5)).sum(0))
    close(y, torch.stack(everybody(g, 5)).sum(0))
    same(z, torch.stack(everybody(pair, 5)).amax(0))


@case
def a_group_of_one_moves_nothing(t: Transport, g: Group) -> None:
    alone = Group(f"alone@{t.rank}", (t.rank,))
    want = values(t.rank, 2, 3)
    for op in ("sum", "mean", "min", "max"):
        x = want.clone()
        t.all_reduce(x, alone, op).wait()
        same(x, want)
    for issue in (
        lambda out: t.all_gather(out, want, alone),
        lambda out: t.reduce_scatter(out, want, alone, "mean"),
        lambda out: t.all_to_all([out], [want], alone),
        lambda out: t.gather(out, want, 0, alone),
        lambda out: t.scatter(out, want, 0, alone),
    ):
        out = torch.zeros_like(want)
        issue(out).wait()
        same(out, want)
    t.broadcast(want, 0, alone).wait()
    t.barrier(alone).wait()


@case
def tensors_without_elements(t: Transport, g: Group) -> None:
    x = torch.empty(0, 3)
    t.all_reduce(x, g).wait()
    t.all_gather(torch.empty(0, 3), x, g).wait()
    t.reduce_scatter(torch.empty(0, 3), x, g).wait()
    t.all_to_all([torch.empty(0)] * 4, [torch.empty(0)] * 4, g).wait()
    t.broadcast(x, 1, g).wait()
    y = torch.tensor(float(t.rank))  # no dimension, one element
    t.all_reduce(y, g).wait()
    assert y.item() == sum(g.ranks)


@case
def an_input_may_be_a_slice_of_the_output(t: Transport, g: Group) -> None:
    mine = g.index(t.rank)
    flat = torch.zeros(8, dtype=torch.float64)
    flat[2 * mine : 2 * mine + 2] = values(t.rank, 2)
    t.all_gather(flat, flat[2 * mine : 2 * mine + 2], g).wait()
    same(flat, torch.cat(everybody(g, 2)))
    full = values(t.rank, 8)
    t.reduce_scatter(full[2 * mine : 2 * mine + 2], full, g).wait()
    close(full[2 * mine : 2 * mine + 2], torch.stack(everybody(g, 8)).sum(0)[2 * mine : 2 * mine + 2])


@case
def leaves_that_require_grad_may_be_written(t: Transport, g: Group) -> None:
    x = values(t.rank, 3).requires_grad_()
    t.all_reduce(x, g).wait()
    close(x.detach(), torch.stack(everybody(g, 3)).sum(0))


@case
def barrier_waits_for_all(t: Transport, g: Group) -> None:
    """Before the barrier everybody sends to position 0; after it nobody has anything left to say."""
    mine = g.index(t.rank)
    x = torch.zeros(1)
    handle = t.recv(x, 1, g) if mine == 0 else t.send(torch.ones(1), 0, g) if mine == 1 else None
    t.barrier(g).wait()
    if handle is not None:
        handle.wait()
    assert mine or x.item() == 1


@case
def what_does_not_fit_is_refused(t: Transport, g: Group) -> None:
    """On every rank, before anything is sent, with both numbers: the next case would see what was sent."""
    a, b = torch.zeros(7, 3), torch.zeros(2, 3)
    mine = g.index(t.rank)
    refused(r"\(7, 3\).*4 times.*\(8, 3\)", lambda: t.all_gather(a, b, g))
    refused(r"\(7, 3\).*4 times.*\(8, 3\)", lambda: t.reduce_scatter(b, a, g))
    refused(r"3 outs.*4 ranks", lambda: t.all_to_all([b] * 3, [b] * 4, g))
    refused(r"float64 and torch.float32", lambda: t.all_gather(torch.zeros(8, 3, dtype=torch.float64), b, g))
    refused(r"positions 0 to 3", lambda: t.broadcast(b, 4, g))
    refused(r"positions 0 to 3", lambda: t.send(b, -1, g))
    refused(r"to itself", lambda: t.send(b, mine, g))
    refused(r"contiguous.*\(3, 2\).*\(1, 3\)", lambda: t.all_reduce(b.t(), g))
    refused(r"bool", lambda: t.all_reduce(torch.zeros(2, dtype=torch.bool), g))
    refused(r"int64", lambda: t.all_reduce(torch.zeros(2, dtype=torch.int64), g, "mean"))
    refused(r"not 'median'", lambda: t.all_reduce(b, g, "median"))  # type: ignore[arg-type]
    refused(r"dimension 0", lambda: t.all_gather(torch.zeros(4), torch.tensor(1.0), g))
    if mine == 1:
        refused(r"needs out", lambda: t.gather(None, b, 1, g))
        refused(r"\(7, 3\).*\(8, 3\)", lambda: t.scatter(b, a, 1, g))
    else:
        refused(r"only the root", lambda: t.gather(torch.zeros(8, 3), b, 1, g))


def _main(rank: int, store: str, report: str, backend: str) -> None:
    """All cases in one process of a real process group; stops at the first that fails, since its peers may wait for it."""
    import json
    import traceback
    from datetime import timedelta
    from pathlib import Path

    import torch.distributed as dist

    from phalanx.comm import init
    from phalanx.mesh import Mesh

    results: dict[str, str] = {}
    try:
        dist.init_process_group(
            backend, store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE, timeout=timedelta(seconds=20)
        )
        world = init(Mesh(dp=2, tp=2), timeout=20.0)
        assert world.transport.inner.backend == backend
        for name, run in CASES.items():
            run(world.transport, world.group(("dp", "tp")))
            results[name] = "passed"
        world.close()
        assert dist.is_initialized(), "closed a process group that is not its own"
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - reported to the parent, which fails
        results["failure"] = traceback.format_exc()
    Path(f"{report}.{rank}").write_text(json.dumps(results))


if "JOB" in globals():
    _main(*globals()["JOB"])
