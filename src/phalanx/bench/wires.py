"""The calls that are timed on torch.distributed: for each operation, what a user would write, bound to its tensors beforehand.

torch has all_reduce, broadcast and reduce in place only. Out of place they are a copy and then the operation, both on the clock,
since that is what a caller pays for keeping the input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.bench.busbw import Form
from phalanx.bench.sweep import Case

Call = Callable[[], object]
TIMEOUT = timedelta(minutes=5)

_REDOPS = {
    "sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG, "none": None,
}  # fmt: skip
# The first name is torch 2.13's, which warns at every call of the second.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Wires(Protocol):
    """One backend's groups, this rank in one of them."""

    def call(self, case: Case, form: Form, send: Tensor, recv: Tensor) -> Call:
        """The operation on these tensors, flat and of the case's dtype; when it returns, or CUDA is synchronised, it is done."""
        ...

    def refusal(self, case: Case, form: Form) -> str | None:
        """Why this backend does not have the operation at all, if that is known beforehand."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Member:
    """This rank in its group."""

    group: Any
    ranks: tuple[int, ...]
    rank: int

    def neighbour(self, step: int) -> int:
        """Global rank of the one `step` further along the ring."""
        return self.ranks[(self.rank + step) % len(self.ranks)]


class TorchWires:
    """Groups of a backend of torch.distributed. Every rank must open every group: `groups` is the same everywhere."""

    def __init__(self, backend: str, groups: list[tuple[int, ...]]) -> None:
        if backend == "shm":
            register_shm()
        me = dist.get_rank()
        opened = [(ranks, _open(ranks, backend)) for ranks in groups]
        ranks, group = next((ranks, group) for ranks, group in opened if me in ranks)
        self.member = Member(group, ranks, ranks.index(me))

    def call(self, case: Case, form: Form, send: Tensor, recv: Tensor) -> Call:
        copies = form == "out_of_place" and case.op in ("all_reduce", "reduce")
        # Only the root has something to keep.
        copies = copies or (form == "out_of_place" and case.op == "broadcast" and case.root == self.member.rank)
        operation = _OPERATIONS[case.op](self.member, case, send, recv)
        return _after_copy(operation, send, recv) if copies else operation

    def refusal(self, case: Case, form: Form) -> str | None:
        return None

    def close(self) -> None:
        dist.destroy_process_group(self.member.group)


def register_shm() -> None:
    """Make torch.distributed know the backend "shm"; ValueError with the reason where it cannot work."""
    import phalanx.shm

    reason = phalanx.shm.available()
    if reason is not None:
        raise ValueError(f"the backend shm does not work here: {reason}")


def resident_bytes(nbytes: int) -> Tensor:
    """Memory that the other ranks of this host can reach."""
    import phalanx.shm

    return phalanx.shm.empty(nbytes, dtype=torch.uint8)


def _open(ranks: tuple[int, ...], backend: str) -> Any:
    if backend != "shm":
        return dist.new_group(list(ranks), backend=backend, timeout=TIMEOUT)
    import phalanx.shm

    try:
        return dist.new_group(list(ranks), backend=backend, timeout=TIMEOUT)
    except phalanx.shm.Unavailable as error:
        raise ValueError(f"the backend shm cannot connect ranks {', '.join(map(str, ranks))}: {error}") from error


def _after_copy(operation: Call, send: Tensor, recv: Tensor) -> Call:
    def run() -> None:
        recv.copy_(send)
        operation()

    return run


def _all_reduce(me: Member, case: Case, send: Tensor, recv: Tensor) -> Call:
    op, group = _REDOPS[case.redop], me.group
    return lambda: dist.all_reduce(recv, op, group=group)


def _reduce(me: Member, case: Case, send: Tensor, recv: Tensor) -> Call:
    op, group, root = _REDOPS[case.redop], me.group, me.ranks[case.root]
    return lambda: dist.reduce(recv, root, op, group=group)


def _broadcast(me: Member, case: Case, send: Tensor, recv: Tensor) -> Call:
    group, root = me.group, me.ranks[case.root]
    return lambda: dist.broadcast(recv, root, group=group)


def _gather_all(me: Member, case: Case, send: Tensor, recv: Tensor) -> Call:
    group = me.group
    return lambda: _all_gather(recv, send, group=group)


def _scatter_sums(me: Member, case: Case, send: Tensor, recv: Tensor) -> Call:
    op, group = _REDOPS[case.redop], me.group
    return lambda: _reduce_scatter(recv, send, op, group=group)


def _all_to_all(me: Member, case: Case, send: Tensor, recv: Tensor) -> Call:
    group = me.group
    return lambda: dist.all_to_all_single(recv, send, group=group)


def _gather(me: Member, case: Case, send: Tensor, recv: Tensor) -> Call:
    group, root = me.group, me.ranks[case.root]
    blocks = list(recv.chunk(case.group)) if me.rank == case.root else None
    return lambda: dist.gather(send, blocks, root, group=group)


def _scatter(me: Member, case: Case, send: Tensor, recv: Tensor) -> Call:
    group, root = me.group, me.ranks[case.root]
    blocks = list(send.chunk(case.group)) if me.rank == case.root else None
    return lambda: dist.scatter(recv, blocks, root, group=group)


def _sendrecv(me: Member, case: Case, send: Tensor, recv: Tensor) -> Call:
    both = [
        dist.P2POp(dist.isend, send, me.neighbour(1), group=me.group),
        dist.P2POp(dist.irecv, recv, me.neighbour(-1), group=me.group),
    ]

    def run() -> None:
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return run


_OPERATIONS: dict[str, Callable[[Member, Case, Tensor, Tensor], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _gather_all,
    "reduce_scatter": _scatter_sums,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "sendrecv": _sendrecv,
}
