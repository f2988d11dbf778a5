"""One rank of a bigger world that is not there: moves nothing, fills outputs with zeros of the right shape, and counts.

For shapes, memory and byte counts of layouts on machines one does not have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.comm import signature
from phalanx.comm.signature import Call
from phalanx.comm.transport import Done, Group, Handle, ReduceOp, Transport


class DryTransport(Transport):
    """counts: {(group name, op): (calls, bytes)}, bytes being the larger of local input and output of each call.

    Calls in place leave their tensor as it is. A group of one rank does what it does everywhere, and is not counted.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside a world of {world_size} ranks")
        self.rank = rank
        self.world_size = world_size
        self.counts: dict[tuple[str, str], tuple[int, int]] = {}

    def group(self, name: str, ranks: Sequence[int], *, p2p: bool = False) -> Group:
        return Group(name, tuple(ranks))

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        return self._count(signature.all_reduce(x, group, op), group, signature.numbytes(x))

    def all_gather(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        return self._count(signature.all_gather(out, x, group), group, signature.numbytes(out), [out], [x])

    def reduce_scatter(self, out: Tensor, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        return self._count(signature.reduce_scatter(out, x, group, op), group, signature.numbytes(x), [out], [x])

    def all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor], group: Group) -> Handle:
        bytes = max(signature.numbytes(*outs), signature.numbytes(*ins))
        return self._count(signature.all_to_all(outs, ins, group), group, bytes, outs, ins)

    def broadcast(self, x: Tensor, root: int, group: Group) -> Handle:
        return self._count(signature.broadcast(x, root, group), group, signature.numbytes(x))

    def reduce(self, x: Tensor, root: int, group: Group, op: ReduceOp = "sum") -> Handle:
        return self._count(signature.reduce(x, root, group, op), group, signature.numbytes(x))

    def gather(self, out: Tensor | None, x: Tensor, root: int, group: Group) -> Handle:
        call = signature.gather(out, x, root, group, self.rank)
        return self._count(call, group, signature.numbytes(x if out is None else out), [] if out is None else [out], [x])

    def scatter(self, out: Tensor, x: Tensor | None, root: int, group: Group) -> Handle:
        call = signature.scatter(out, x, root, group, self.rank)
        return self._count(call, group, signature.numbytes(out if x is None else x), [out], [] if x is None else [x])

    def send(self, x: Tensor, peer: int, group: Group) -> Handle:
        call = signature.message("send", x, peer, group, self.rank)
        return self._count(call._replace(op="send"), group, signature.numbytes(x))

    def recv(self, x: Tensor, peer: int, group: Group) -> Handle:
        call = signature.message("recv", x, peer, group, self.rank)
        return self._count(call._replace(op="recv"), group, signature.numbytes(x), [x])

    def barrier(self, group: Group) -> Handle:
        return self._count(signature.barrier(), group, 0)

    def close(self) -> None: ...

    def _count(self, call: Call, group: Group, bytes: int, outs: Sequence[Tensor] = (), ins: Sequence[Tensor] = ()) -> Handle:
        with torch.no_grad():
            if group.size == 1:
                for out, x in zip(outs, ins, strict=True):
                    out.copy_(x)
                return Done()
            for out in outs:
                out.zero_()
        calls, total = self.counts.get((group.name, call.op), (0, 0))
        self.counts[group.name, call.op] = (calls + 1, total + bytes)
        return Done()
