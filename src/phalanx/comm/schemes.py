"""How a collective of a group that spans hosts is made of collectives inside hosts and between them.

columns  every rank pairs up with the ranks at its place on the other hosts: reduce_scatter inside, all_reduce in the column on a
         slice, all_gather inside (Horovod's hierarchical all_reduce; BlueConnect, Cho et al. 2019); needs even hosts
leader   the lowest rank of each host does the talking: reduce to it inside, all_reduce between leaders, broadcast inside

Both go chunk by chunk, so that the wires inside and between work at the same time. Each function blocks until all of it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from phalanx.comm.pipeline import Stage, run
from phalanx.comm.reduction import reduced
from phalanx.comm.transport import Done, Group, Handle, ReduceOp, Transport


@dataclass(frozen=True)
class Span:
    """A group that spans hosts, as one of its ranks sees it, and the smaller groups that do its work.

    hosts   its ranks by host, ascending; hosts in the order of their lowest ranks
    inside  its ranks on this rank's host, opened on `near`
    column  the ranks at this rank's place on every host, opened on `far`; of uneven hosts only place 0, the leaders, has one
    """

    rank: int
    whole: Group
    hosts: tuple[tuple[int, ...], ...]
    near: Transport
    far: Transport
    inside: Group
    column: Group | None
    chunk_bytes: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.hosts))

    @property
    def leaders(self) -> Group | None:
        """The leaders' group, if this rank is one."""
        return self.column if self.inside.ranks[0] == self.rank else None

    def rows(self, order: Sequence[Sequence[int]]) -> Tensor:
        """Group positions of the ranks in `order`, as an index."""
        return torch.tensor([self.whole.index(rank) for ranks in order for rank in ranks])

    def cuts(self, whole: Tensor) -> list[slice]:
        """The chunks of whole (n ranks, m) along m."""
        width = max(1, self.chunk_bytes // (whole.element_size() * len(whole)))
        return [slice(start, min(start + width, whole.shape[1])) for start in range(0, whole.shape[1], width)]


# all_reduce of x (n,), cut into chunks where it lies.


def all_reduce_in_columns(x: Tensor, span: Span, op: ReduceOp) -> None:
    local, column = span.inside, span.column
    assert column is not None
    width = max(1, span.chunk_bytes // (x.element_size() * local.size)) * local.size
    chunks = list(torch.split(x, width))
    tail = chunks[-1]
    if len(tail) % local.size:  # the last chunk may need padding, whose reduction nobody reads
        chunks[-1] = x.new_zeros(ceil(len(tail) / local.size) * local.size)
        chunks[-1][: len(tail)] = tail
    mine = [chunk.tensor_split(local.size)[local.index(span.rank)] for chunk in chunks]

    def average_and_gather(k: int) -> Handle:
        _average(mine[k], op, span)
        return span.near.all_gather(chunks[k], mine[k], local)

    run(
        len(chunks),
        [
            lambda k: span.near.reduce_scatter(mine[k], chunks[k], local, _terms(op)),
            lambda k: span.far.all_reduce(mine[k], column, _terms(op)),
            average_and_gather,
        ],
    )
    if chunks[-1] is not tail:
        tail.copy_(chunks[-1][: len(tail)])


def all_reduce_by_leader(x: Tensor, span: Span, op: ReduceOp) -> None:
    chunks = torch.split(x, max(1, span.chunk_bytes // x.element_size()))

    def average_and_broadcast(k: int) -> Handle:
        if span.leaders is not None:
            _average(chunks[k], op, span)
        return span.near.broadcast(chunks[k], 0, span.inside)

    run(
        len(chunks),
        [
            lambda k: span.near.reduce(chunks[k], 0, span.inside, _terms(op)),
            _of_leaders(span, lambda k, leaders: span.far.all_reduce(chunks[k], leaders, _terms(op))),
            average_and_broadcast,
        ],
    )


# reduce_scatter and all_gather. The whole is (n ranks, m), cut along m; each chunk goes through buffers whose rows are in the order
# of hosts or columns rather than of the group.


def reduce_scatter_in_columns(out: Tensor, x: Tensor, span: Span, op: ReduceOp) -> None:
    column = span.column
    assert column is not None
    order, cuts = span.rows(_columns(span)), span.cuts(x)
    whole, mine = _buffers(x, len(order), cuts, 2), _buffers(x, column.size, cuts, 2)

    def inside(k: int) -> Handle:
        torch.index_select(x[:, cuts[k]], 0, order, out=whole[k])
        return span.near.reduce_scatter(mine[k], whole[k], span.inside, _terms(op))

    run(
        len(cuts),
        [inside, lambda k: span.far.reduce_scatter(out[cuts[k]].unsqueeze(0), mine[k], column, _terms(op))],
    )
    _average(out, op, span)


def reduce_scatter_by_leader(out: Tensor, x: Tensor, span: Span, op: ReduceOp) -> None:
    order, cuts = span.rows(span.hosts), span.cuts(x)
    whole, sums = _buffers(x, len(order), cuts, 3), _buffers(x, span.inside.size, cuts, 3)
    parts = _buffers(x, len(span.hosts) * span.inside.size, cuts, 3)

    def inside(k: int) -> Handle:
        torch.index_select(x[:, cuts[k]], 0, order, out=whole[k])
        return span.near.reduce(whole[k], 0, span.inside, _terms(op))

    def between(k: int, leaders: Group) -> Handle:
        return span.far.all_to_all(parts[k].tensor_split(leaders.size), torch.split(whole[k], list(span.sizes)), leaders)

    def outwards(k: int) -> Handle:
        source = None
        if span.leaders is not None:
            source = sums[k].copy_(reduced(parts[k].tensor_split(len(span.hosts)), _terms(op)))
        return span.near.scatter(out[cuts[k]].unsqueeze(0), source, 0, span.inside)

    run(len(cuts), [inside, _of_leaders(span, between), outwards])
    _average(out, op, span)


def all_gather_in_columns(out: Tensor, x: Tensor, span: Span) -> None:
    column = span.column
    assert column is not None
    order, cuts = span.rows(_columns(span)), span.cuts(out)
    mine, whole = _buffers(out, column.size, cuts, 3), _buffers(out, len(order), cuts, 3)
    run(
        len(cuts),
        [
            lambda k: span.far.all_gather(mine[k], x[cuts[k]].unsqueeze(0), column),
            lambda k: span.near.all_gather(whole[k], mine[k], span.inside),
            lambda k: _put_rows(out[:, cuts[k]], order, whole[k]),
        ],
    )


def all_gather_by_leader(out: Tensor, x: Tensor, span: Span) -> None:
    order, cuts = span.rows(span.hosts), span.cuts(out)
    mine, whole = _buffers(out, span.inside.size, cuts, 4), _buffers(out, len(order), cuts, 4)

    def inside(k: int) -> Handle:
        return span.near.gather(mine[k] if span.leaders is not None else None, x[cuts[k]].unsqueeze(0), 0, span.inside)

    def between(k: int, leaders: Group) -> Handle:
        return span.far.all_to_all(torch.split(whole[k], list(span.sizes)), [mine[k]] * leaders.size, leaders)

    run(
        len(cuts),
        [
            inside,
            _of_leaders(span, between),
            lambda k: span.near.broadcast(whole[k], 0, span.inside),
            lambda k: _put_rows(out[:, cuts[k]], order, whole[k]),
        ],
    )


ALL_REDUCE = {"columns": all_reduce_in_columns, "leader": all_reduce_by_leader}
REDUCE_SCATTER = {"columns": reduce_scatter_in_columns, "leader": reduce_scatter_by_leader}
ALL_GATHER = {"columns": all_gather_in_columns, "leader": all_gather_by_leader}


def _columns(span: Span) -> list[list[int]]:
    """The ranks of every column, in the order of its group."""
    return [sorted(ranks) for ranks in zip(*span.hosts, strict=True)]


def _of_leaders(span: Span, stage: Callable[[int, Group], Handle]) -> Stage:
    """A stage that only leaders take part in, in their group."""
    leaders = span.leaders
    return (lambda k: Done()) if leaders is None else (lambda k: stage(k, leaders))


def _terms(op: ReduceOp) -> ReduceOp:
    """How the parts of a reduction are reduced: a mean is their sum, and one division at the end."""
    return "sum" if op == "mean" else op


def _average(x: Tensor, op: ReduceOp, span: Span) -> None:
    if op == "mean":
        x.div_(span.whole.size)


def _buffers(like: Tensor, rows: int, cuts: Sequence[slice], stages: int) -> list[Tensor]:
    """A buffer (rows, width) for each chunk; memory is used again when a chunk has left the last stage."""
    width = cuts[0].stop - cuts[0].start
    memory = [like.new_empty(rows * width) for _ in range(min(len(cuts), stages + 1))]
    return [memory[k % len(memory)][: rows * (cut.stop - cut.start)].view(rows, -1) for k, cut in enumerate(cuts)]


def _put_rows(out: Tensor, order: Tensor, rows: Tensor) -> Handle:
    out.index_copy_(0, order, rows)
    return Done()
