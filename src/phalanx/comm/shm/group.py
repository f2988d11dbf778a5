"""One open group of the core: its codes for element types and reductions, and its calls with failures as CommError.

Nothing here knows of torch.distributed. Positions are places in the group; addresses are those of contiguous memory.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from phalanx.comm.shm import _core
from phalanx.comm.shm.sites import call_site
from phalanx.comm.transport import CommError

_NUMBERS = {
    torch.float32: _core.F32,
    torch.float64: _core.F64,
    torch.float16: _core.F16,
    torch.bfloat16: _core.BF16,
    torch.int8: _core.I8,
    torch.uint8: _core.U8,
    torch.int16: _core.I16,
    torch.int32: _core.I32,
    torch.int64: _core.I64,
    torch.bool: _core.BOOL,
    torch.complex64: _core.C64,
    torch.complex128: _core.C128,
}
# Moved but not reduced. The order is part of the signature that ranks compare; not every torch has them all.
_OPAQUE = (
    *("uint16", "uint32", "uint64", "complex32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
DTYPES: dict[torch.dtype, tuple[int, int]] = {dtype: (code, 1) for dtype, code in _NUMBERS.items()}
"""The core's code of an element type, and how many of the core's elements one is: its bytes, where the core knows only bytes."""
DTYPES |= {
    getattr(torch, name): (_core.OPAQUE + k, getattr(torch, name).itemsize)
    for k, name in enumerate(_OPAQUE)
    if hasattr(torch, name)
}
_REDUCTIONS = {
    dist.ReduceOp.SUM: _core.SUM,
    dist.ReduceOp.AVG: _core.AVG,
    dist.ReduceOp.PRODUCT: _core.PRODUCT,
    dist.ReduceOp.MIN: _core.MIN,
    dist.ReduceOp.MAX: _core.MAX,
    dist.ReduceOp.BAND: _core.BAND,
    dist.ReduceOp.BOR: _core.BOR,
    dist.ReduceOp.BXOR: _core.BXOR,
}
# By hash: reading the kind out of a ReduceOp and hashing that takes four times as long.
KERNELS: dict[tuple[torch.dtype, int], tuple[int, int]] = {
    (dtype, hash(dist.ReduceOp(kind))): (code, reduce)
    for dtype, code in _NUMBERS.items()
    for kind, reduce in _REDUCTIONS.items()
    if _core.reducible(code, reduce)
}
"""Codes of (element type, reduction) by (torch's dtype, hash of torch's ReduceOp); what is missing cannot be reduced."""
assert len({hash(dist.ReduceOp(kind)) for kind in _REDUCTIONS}) == len(_REDUCTIONS)


class _Refusal:
    """Stands for the core where it may not be called any more."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def refuse(self, *_: object) -> NoReturn:
        raise _core.Error(self.reason)

    collective = all_to_all = send = recv = wait = refuse

    def test(self, op: int) -> int:
        return 2

    def error(self, op: int) -> str:
        return self.reason

    def finished(self, op: int) -> float:
        return 0.0

    def release(self, op: int) -> None: ...


class SharedGroup:
    """A group of ranks that see each other's memory. Calls take seconds until they fail; those that wait return when complete."""

    def __init__(self, handle: int, rank: int, ranks: tuple[int, ...], name: str) -> None:
        self.rank, self.ranks, self.name = rank, ranks, name
        self._handle = handle
        self._calls: Any = _core  # what new operations go to
        self.handles: Any = _core  # what operations in flight are asked through
        _live.add(self)

    def collective(
        self,
        op: int,
        reduce: int,
        dtype: int,
        root: int,
        src: int | tuple[int, ...],
        dst: int | tuple[int, ...],
        count: int,
        seconds: float,
        wait: bool,
    ) -> int:
        """`_core.collective`: 0 when complete with `wait`, else a handle."""
        try:
            return self._calls.collective(  # type: ignore[no-any-return]
                self._handle, op, reduce, dtype, root, src, dst, count, call_site(), seconds, wait
            )
        except _core.Error as error:
            raise CommError(str(error)) from None

    def all_to_all(
        self,
        dtype: int,
        src: tuple[int, ...],
        dst: tuple[int, ...],
        send_bytes: tuple[int, ...],
        recv_bytes: tuple[int, ...],
        seconds: float,
        wait: bool,
    ) -> int:
        """`_core.all_to_all`: piece i of src goes to position i; 0 when complete with `wait`, else a handle."""
        try:
            return self._calls.all_to_all(  # type: ignore[no-any-return]
                self._handle, dtype, src, dst, send_bytes, recv_bytes, call_site(), seconds, wait
            )
        except _core.Error as error:
            raise CommError(str(error)) from None

    def send(self, peer: int, tag: int, address: int, nbytes: int, dtype: int, seconds: float) -> int:
        """A handle of a message to position `peer`."""
        try:
            return self._calls.send(  # type: ignore[no-any-return]
                self._handle, peer, tag, address, nbytes, dtype, call_site(), seconds, False
            )
        except _core.Error as error:
            raise CommError(str(error)) from None

    def recv(self, peer: int, tag: int, address: int, nbytes: int, dtype: int, seconds: float) -> int:
        """A handle of a message from position `peer`, or from anybody if that is -1."""
        try:
            return self._calls.recv(  # type: ignore[no-any-return]
                self._handle, peer, tag, address, nbytes, dtype, call_site(), seconds, False
            )
        except _core.Error as error:
            raise CommError(str(error)) from None

    def close(self, reason: str = "was destroyed on this rank") -> None:
        """Leave the group: what is in flight fails here, and for the ranks that wait for this one. Idempotent."""
        if self._calls is _core:
            self._calls = _Refusal(f"group {self.name!r} {reason}: no communication is possible")
            _core.close_group(self._handle)

    def abort(self, reason: str) -> None:
        """Make what is pending and what comes later fail on every rank of the group."""
        if self._calls is _core:
            _core.abort(self._handle, reason)

    def __del__(self) -> None:
        self.close()


_live: weakref.WeakSet[SharedGroup] = weakref.WeakSet()


def close_all() -> None:
    """Leave every group: after this no operation touches the memory of a tensor."""
    for group in list(_live):
        group.close("was left because the interpreter exits")


def _in_forked_child() -> None:
    reason = (
        f"process {os.getpid()} is a fork of the rank and no rank itself: communicate in process {os.getppid()}, "
        "or start processes with spawn or forkserver"
    )
    for group in list(_live):
        group._calls = group.handles = _Refusal(f"group {group.name!r}: {reason}")


os.register_at_fork(after_in_child=_in_forked_child)
