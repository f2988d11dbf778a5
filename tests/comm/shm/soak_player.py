"""One rank that plays a program: issues the operations in order, waits when chance says, and checks every result by formula.

Values are small whole numbers, so every reduction is exact in every type, in any order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .soak_program import GROUPS, MAX_BYTES, MODULUS, REDUCING, REDUCTIONS, SIZE, Operation

EDGE = 16
"""Elements before and behind every result that nobody may write."""
# As torch 2.13 and later call them, and as those before.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass
class Buffer:
    """A tensor between two edges that must stay as they were."""

    whole: Tensor
    view: Tensor

    def untouched_around(self) -> bool:
        edges = (self.whole[:EDGE], self.whole[EDGE + self.view.numel() :])
        return all(bool((edge == 77).all()) for edge in edges)


@dataclass
class Pending:
    operation: Operation
    works: list[Any]
    check: Callable[[], None]
    kept: list[Buffer] = field(default_factory=list)


class Player:
    """One rank that plays a program."""

    def __init__(self, rank: int, seed: int, backend: str) -> None:
        self.rank, self.backend = rank, backend
        self.rng = random.Random(seed * SIZE + rank)  # delays and waits: of this rank alone
        self.groups = [dist.new_group(list(ranks)) for ranks in GROUPS]
        most = MAX_BYTES + 2048
        at = torch.arange(most)
        self.bases = [((at * at) // 7 + (rank + 3) * at + 5 * rank) % MODULUS for rank in range(SIZE)]
        self.empty = _empty(backend)
        self.pending: list[Pending] = []

    def play(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if self.rank not in GROUPS[operation.group] and operation.kind != "regroup":
                continue
            try:
                print(f"issues {operation}", flush=True)  # noqa: T201 - the last words of a rank that hangs
                self.delay()
                step = getattr(self, operation.kind)(operation)
                if step is not None:
                    self.pending.append(step)
                    if not operation.asynchronous:
                        self.settle(self.pending.pop())
                while self.pending and (len(self.pending) > 8 or self.rng.random() < 0.4):
                    self.settle(self.pending.pop(self.rng.randrange(len(self.pending))))
            except Exception as error:
                raise RuntimeError(f"{operation}: {error}") from error
        while self.pending:
            self.settle(self.pending.pop(0))

    def settle(self, pending: Pending) -> None:
        try:
            print(f"waits for {pending.operation}", flush=True)  # noqa: T201
            for work in pending.works:
                if self.rng.random() < 0.2 and self.backend != "gloo":  # whose sends never say that they are complete
                    while not work.is_completed():
                        time.sleep(0)
                work.wait()
            pending.check()
            assert all(buffer.untouched_around() for buffer in pending.kept), "memory around the result was written"
        except Exception as error:
            raise RuntimeError(f"{pending.operation}: {error}") from error

    def delay(self) -> None:
        chance = self.rng.random()
        if chance < 0.1:
            time.sleep(self.rng.uniform(0, 5e-4))
        elif chance < 0.2:
            until = time.perf_counter() + self.rng.uniform(0, 5e-4)
            while time.perf_counter() < until:
                pass

    # Values: what `rank` puts in at operation `number`, every rank can compute.

    def values(self, operation: Operation, rank: int, count: int, offset: int = 0) -> Tensor:
        start = (operation.number * 13 + offset) % 1024
        made = self.bases[rank][start : start + count]
        # Products of four stay exact in bfloat16: 1 to 3.
        return (made % 3 + 1 if operation.reduction == "product" and operation.kind in REDUCING else made).to(operation.dtype)

    def buffer(self, operation: Operation, count: int, content: Tensor | None = None) -> Buffer:
        empty = self.empty if operation.resident else torch.empty
        whole = empty(count + 2 * EDGE, dtype=operation.dtype).fill_(77)
        view = whole[EDGE : EDGE + count]
        if content is not None:
            view.copy_(content)
        return Buffer(whole, view)

    def reduced(self, operation: Operation, count: int, offset: int = 0) -> Tensor:
        stack = torch.stack([self.values(operation, rank, count, offset).to(torch.int64) for rank in GROUPS[operation.group]])
        return REDUCTIONS[operation.reduction](stack).to(operation.dtype)

    def place(self, operation: Operation) -> tuple[dist.ProcessGroup, tuple[int, ...], int, int]:
        """The group, its ranks, this rank's position and the global rank of the root."""
        ranks = GROUPS[operation.group]
        return self.groups[operation.group], ranks, ranks.index(self.rank), ranks[operation.root]

    # Operations: issue one, and say what must hold when it is done.

    def all_reduce(self, o: Operation) -> Pending:
        group, _, _, _ = self.place(o)
        x = self.buffer(o, o.count, self.values(o, self.rank, o.count))
        work = dist.all_reduce(x.view, _op(o), group=group, async_op=True) if o.asynchronous else None
        if work is None:
            dist.all_reduce(x.view, _op(o), group=group)
        return Pending(o, _works(work), lambda: _same(x.view, self.reduced(o, o.count)), [x])

    def reduce(self, o: Operation) -> Pending:
        group, _, _, root = self.place(o)
        x = self.buffer(o, o.count, self.values(o, self.rank, o.count))
        work = dist.reduce(x.view, root, _op(o), group=group, async_op=o.asynchronous)
        return Pending(o, _works(work), lambda: _same(x.view, self.reduced(o, o.count)) if self.rank == root else None, [x])

    def reduce_scatter(self, o: Operation) -> Pending:
        group, ranks, position, _ = self.place(o)
        mine = self.values(o, self.rank, o.count * len(ranks))
        x, out = self.buffer(o, len(mine), mine), self.buffer(o, o.count)
        work = REDUCE_SCATTER(out.view, x.view, _op(o), group=group, async_op=o.asynchronous)
        return Pending(o, _works(work), lambda: self.scattered(o, out, x, mine, position), [x, out])

    def reduce_scatter_list(self, o: Operation) -> Pending:
        group, ranks, position, _ = self.place(o)
        mine = self.values(o, self.rank, o.count * len(ranks))
        x, out = self.buffer(o, len(mine), mine), self.buffer(o, o.count)
        pieces = list(x.view.split(o.count)) if o.count else [x.view] * len(ranks)
        work = dist.reduce_scatter(out.view, pieces, _op(o), group=group, async_op=o.asynchronous)
        return Pending(o, _works(work), lambda: self.scattered(o, out, x, mine, position), [x, out])

    def scattered(self, o: Operation, out: Buffer, x: Buffer, mine: Tensor, position: int) -> None:
        _same(out.view, self.reduced(o, o.count, offset=0) if position == 0 else self.piece(o, position))
        _same(x.view, mine)

    def piece(self, o: Operation, position: int) -> Tensor:
        whole = self.reduced(o, o.count * len(GROUPS[o.group]))
        return whole[position * o.count : (position + 1) * o.count]

    def coalesced(self, o: Operation) -> Pending:
        group, _, _, _ = self.place(o)
        counts = [o.count // 2, 1, o.count - o.count // 2]
        buffers = [self.buffer(o, count, self.values(o, self.rank, count, at)) for at, count in enumerate(counts)]
        if self.backend == "gloo" or o.number % 2:  # Gloo has no manager
            options = dist.AllreduceCoalescedOptions()
            options.reduceOp = _op(o)
            works = [group.allreduce_coalesced([x.view for x in buffers], options)]
        else:
            with dist._coalescing_manager(group=group, device=torch.device("cpu"), async_ops=True) as manager:
                for x in buffers:
                    dist.all_reduce(x.view, _op(o), group=group)
            works = manager.works

        def check() -> None:
            for at, x in enumerate(buffers):
                _same(x.view, self.reduced(o, len(x.view), at))

        return Pending(o, works, check, buffers)

    def broadcast(self, o: Operation) -> Pending:
        group, _, _, root = self.place(o)
        x = self.buffer(o, o.count, self.values(o, root, o.count) if self.rank == root else None)
        work = dist.broadcast(x.view, root, group=group, async_op=o.asynchronous)
        return Pending(o, _works(work), lambda: _same(x.view, self.values(o, root, o.count)), [x])

    def all_gather(self, o: Operation) -> Pending:
        group, ranks, _, _ = self.place(o)
        x, out = self.buffer(o, o.count, self.values(o, self.rank, o.count)), self.buffer(o, o.count * len(ranks))
        work = ALL_GATHER(out.view, x.view, group=group, async_op=o.asynchronous)
        return Pending(
            o, _works(work), lambda: _same(out.view, torch.cat([self.values(o, r, o.count) for r in ranks])), [x, out]
        )

    def all_gather_list(self, o: Operation) -> Pending:
        group, ranks, _, _ = self.place(o)
        x, outs = self.buffer(o, o.count, self.values(o, self.rank, o.count)), [self.buffer(o, o.count) for _ in ranks]
        work = dist.all_gather([out.view for out in outs], x.view, group=group, async_op=o.asynchronous)
        return Pending(o, _works(work), lambda: self.gathered(o, outs), [x, *outs])

    def gather(self, o: Operation) -> Pending:
        group, ranks, _, root = self.place(o)
        x = self.buffer(o, o.count, self.values(o, self.rank, o.count))
        outs = [self.buffer(o, o.count) for _ in ranks] if self.rank == root else []
        work = dist.gather(x.view, [out.view for out in outs] or None, root, group=group, async_op=o.asynchronous)
        return Pending(o, _works(work), lambda: self.gathered(o, outs) if outs else None, [x, *outs])

    def gathered(self, o: Operation, outs: list[Buffer]) -> None:
        for rank, out in zip(GROUPS[o.group], outs, strict=True):
            _same(out.view, self.values(o, rank, o.count))

    def scatter(self, o: Operation) -> Pending:
        group, ranks, position, root = self.place(o)
        out = self.buffer(o, o.count)
        ins = (
            [self.buffer(o, o.count, self.values(o, root, o.count, at)) for at in range(len(ranks))]
            if self.rank == root
            else []
        )
        work = dist.scatter(out.view, [x.view for x in ins] or None, root, group=group, async_op=o.asynchronous)
        return Pending(o, _works(work), lambda: _same(out.view, self.values(o, root, o.count, position)), [out, *ins])

    def all_to_all(self, o: Operation) -> Pending:
        group, ranks, position, _ = self.place(o)
        x = self.buffer(o, o.count * len(ranks), self.values(o, self.rank, o.count * len(ranks)))
        out = self.buffer(o, o.count * len(ranks))
        work = dist.all_to_all_single(out.view, x.view, group=group, async_op=o.asynchronous)

        def check() -> None:
            for at, rank in enumerate(ranks):
                want = self.values(o, rank, o.count * len(ranks))[position * o.count : (position + 1) * o.count]
                _same(out.view[at * o.count : (at + 1) * o.count], want)

        return Pending(o, _works(work), check, [x, out])

    def splits(self, o: Operation, sender: int) -> list[int]:
        """What a position sends to each: different sizes, some of them nothing."""
        size = len(GROUPS[o.group])
        if o.kind == "all_to_all_list" and self.backend == "gloo":  # which takes equal pieces only
            return [o.count] * size
        return [o.count * ((sender * 3 + receiver + o.number) % 4) // 3 for receiver in range(size)]

    def exchanged(self, o: Operation, outs: Sequence[Tensor]) -> None:
        position = GROUPS[o.group].index(self.rank)
        for at, rank in enumerate(GROUPS[o.group]):
            sent = self.splits(o, at)
            start = sum(sent[:position])
            _same(outs[at], self.values(o, rank, sum(sent))[start : start + sent[position]])

    def all_to_all_uneven(self, o: Operation) -> Pending:
        group, ranks, position, _ = self.place(o)
        sent, received = self.splits(o, position), [self.splits(o, at)[position] for at in range(len(ranks))]
        x = self.buffer(o, sum(sent), self.values(o, self.rank, sum(sent)))
        out = self.buffer(o, sum(received))
        work = dist.all_to_all_single(out.view, x.view, received, sent, group=group, async_op=o.asynchronous)
        return Pending(o, _works(work), lambda: self.exchanged(o, out.view.split(received)), [x, out])

    def all_to_all_list(self, o: Operation) -> Pending:
        group, ranks, position, _ = self.place(o)
        sent, received = self.splits(o, position), [self.splits(o, at)[position] for at in range(len(ranks))]
        x = self.buffer(o, sum(sent), self.values(o, self.rank, sum(sent)))
        outs = [self.buffer(o, count) for count in received]
        work = dist.all_to_all([y.view for y in outs], list(x.view.split(sent)), group=group, async_op=o.asynchronous)
        return Pending(o, _works(work), lambda: self.exchanged(o, [y.view for y in outs]), [x, *outs])

    def send(self, o: Operation) -> Pending | None:
        """From the root to the position behind it."""
        group, ranks, _, root = self.place(o)
        receiver = ranks[(o.root + 1) % len(ranks)]
        if self.rank == root:
            x = self.buffer(o, o.count, self.values(o, root, o.count))
            if o.asynchronous:
                return Pending(o, [dist.isend(x.view, receiver, group=group, tag=o.number)], lambda: None, [x])
            dist.send(x.view, receiver, group=group, tag=o.number)
            return Pending(o, [], lambda: None, [x])
        if self.rank != receiver:
            return None
        out = self.buffer(o, o.count)
        works = [dist.irecv(out.view, root, group=group, tag=o.number)] if o.asynchronous else []
        if not o.asynchronous:
            dist.recv(out.view, root, group=group, tag=o.number)
        return Pending(o, works, lambda: _same(out.view, self.values(o, root, o.count)), [out])

    def any_source(self, o: Operation) -> Pending:
        """Everybody sends to the root, which takes them as they come."""
        group, ranks, _, root = self.place(o)
        if self.rank != root:
            x = self.buffer(o, o.count, self.values(o, self.rank, o.count))
            work = dist.isend(x.view, root, group=group, tag=o.number) if o.asynchronous else None
            if work is None:
                dist.send(x.view, root, group=group, tag=o.number)
            return Pending(o, _works(work), lambda: None, [x])
        outs = [self.buffer(o, o.count) for _ in ranks[1:]]
        sources = [dist.recv(out.view, group=group, tag=o.number) for out in outs]

        def check() -> None:
            assert sorted([*sources, root]) == list(ranks), f"received from {sources}"
            for source, out in zip(sources, outs, strict=True):
                _same(out.view, self.values(o, source, o.count))

        return Pending(o, [], check, outs)

    def exchange(self, o: Operation) -> Pending:
        """Everybody to the right and from the left, as one batch."""
        group, ranks, position, _ = self.place(o)
        right, left = ranks[(position + 1) % len(ranks)], ranks[position - 1]
        x, out = self.buffer(o, o.count, self.values(o, self.rank, o.count)), self.buffer(o, o.count)
        batch = [
            dist.P2POp(dist.isend, x.view, right, group, tag=o.number),
            dist.P2POp(dist.irecv, out.view, left, group, tag=o.number),
        ]
        works = dist.batch_isend_irecv(batch if self.rng.random() < 0.5 else batch[::-1])
        return Pending(o, works, lambda: _same(out.view, self.values(o, left, o.count)), [x, out])

    def barrier(self, o: Operation) -> None:
        dist.barrier(group=self.place(o)[0])

    def objects(self, o: Operation) -> None:
        group, ranks, _, _ = self.place(o)
        got: list[object] = [None] * len(ranks)
        dist.all_gather_object(got, {"rank": self.rank, "number": o.number}, group=group)
        assert got == [{"rank": rank, "number": o.number} for rank in ranks], f"got {got}"

    def regroup(self, o: Operation) -> None:
        """A group goes and another takes its place. All ranks of the world do this together."""
        if self.rank in GROUPS[o.group]:
            while self.pending:
                self.settle(self.pending.pop(0))
            dist.barrier(group=self.groups[o.group])
            dist.destroy_process_group(self.groups[o.group])
        self.groups[o.group] = dist.new_group(list(GROUPS[o.group]))


def _op(operation: Operation) -> Any:
    return getattr(dist.ReduceOp, operation.reduction.upper())


def _works(work: Any) -> list[Any]:
    return [] if work is None else [work]


def _same(got: Tensor, want: Tensor) -> None:
    if not torch.equal(got, want):
        wrong = (got != want).nonzero().flatten()
        at = int(wrong[0])
        raise AssertionError(f"{len(wrong)} of {len(want)} elements are wrong, the first is {at}: {got[at]}, not {want[at]}")


def _empty(backend: str) -> Callable[..., Tensor]:
    if backend != "shm":
        return torch.empty
    from phalanx import shm

    made: Callable[..., Tensor] = shm.empty
    return made
