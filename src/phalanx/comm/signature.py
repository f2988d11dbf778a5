"""What a communication call looks like: the sizes it must have, and the signature that the ranks of a group must agree on.

Every transport checks its arguments here before it sends anything, so that all of them refuse the same calls in the same words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.comm.transport import Group, ReduceOp

REDUCE_OPS: tuple[ReduceOp, ...] = ("sum", "mean", "min", "max")


class Call(NamedTuple):
    """One call, as every rank of the group must make it: two ranks whose Calls differ at one position have diverged."""

    op: str
    shape: tuple[int, ...] | None = None
    """Of the tensor that has the same shape on all ranks: the input, or the slice of a gather or scatter."""
    dtype: torch.dtype | None = None
    reduce: str | None = None
    root: int | None = None

    def __str__(self) -> str:
        text = self.op if self.reduce is None else f"{self.op}({self.reduce})"
        if self.dtype is not None:
            text += f" of {'' if self.shape is None else f'{self.shape} '}{str(self.dtype).removeprefix('torch.')}"
        return text if self.root is None else f"{text} with root {self.root}"

    def on(self, group: Group) -> str:
        """The call with its group and ranks, for messages."""
        return f"{self} on group {group.name!r} (ranks {', '.join(map(str, group.ranks))})"


def all_reduce(x: Tensor, group: Group, op: ReduceOp) -> Call:
    _contiguous("all_reduce", x)
    _reducible("all_reduce", x, op)
    return Call("all_reduce", tuple(x.shape), x.dtype, op)


def all_gather(out: Tensor, x: Tensor, group: Group) -> Call:
    _slices("all_gather", "out", out, "x", x, group)
    return Call("all_gather", tuple(x.shape), x.dtype)


def reduce_scatter(out: Tensor, x: Tensor, group: Group, op: ReduceOp) -> Call:
    _slices("reduce_scatter", "x", x, "out", out, group)
    _reducible("reduce_scatter", x, op)
    return Call("reduce_scatter", tuple(x.shape), x.dtype, op)


def all_to_all(outs: Sequence[Tensor], ins: Sequence[Tensor], group: Group) -> Call:
    for name, tensors in (("outs", outs), ("ins", ins)):
        if len(tensors) != group.size:
            raise ValueError(f"all_to_all has {len(tensors)} {name}, but group {group.name!r} has {group.size} ranks")
    _contiguous("all_to_all", *outs, *ins)
    _one_dtype("all_to_all", *outs, *ins)
    return Call("all_to_all", None, ins[0].dtype)


def broadcast(x: Tensor, root: int, group: Group) -> Call:
    _position("broadcast root", root, group)
    _contiguous("broadcast", x)
    return Call("broadcast", tuple(x.shape), x.dtype, None, root)


def reduce(x: Tensor, root: int, group: Group, op: ReduceOp) -> Call:
    _position("reduce root", root, group)
    _contiguous("reduce", x)
    _reducible("reduce", x, op)
    return Call("reduce", tuple(x.shape), x.dtype, op, root)


def gather(out: Tensor | None, x: Tensor, root: int, group: Group, rank: int) -> Call:
    _rooted("gather", "out", out, "x", x, root, group, rank)
    return Call("gather", tuple(x.shape), x.dtype, None, root)


def scatter(out: Tensor, x: Tensor | None, root: int, group: Group, rank: int) -> Call:
    _rooted("scatter", "x", x, "out", out, root, group, rank)
    return Call("scatter", tuple(out.shape), out.dtype, None, root)


def message(op: str, x: Tensor, peer: int, group: Group, rank: int) -> Call:
    """A send or a recv; both ends must agree, so both are the same Call."""
    _position(f"{op} peer", peer, group)
    if group.ranks[peer] == rank:
        raise ValueError(f"rank {rank} cannot {op} to itself (position {peer} of group {group.name!r})")
    _contiguous(op, x)
    return Call("send/recv", tuple(x.shape), x.dtype)


def barrier() -> Call:
    return Call("barrier")


def divide(what: str, size: int, parts: int, where: str) -> int:
    """size / parts, or ValueError with both numbers."""
    if size % parts:
        raise ValueError(f"{what} of size {size} does not divide over {where}, which has {parts} ranks")
    return size // parts


def numbytes(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def _contiguous(op: str, *tensors: Tensor) -> None:
    for x in tensors:
        if not x.is_contiguous():
            raise ValueError(f"{op} needs contiguous tensors; one of shape {tuple(x.shape)} has strides {x.stride()}")


def _one_dtype(op: str, *tensors: Tensor) -> None:
    first = tensors[0].dtype
    for x in tensors:
        if x.dtype != first:
            raise ValueError(f"{op} was given both {first} and {x.dtype}; all tensors of a call have one dtype")


def _reducible(op: str, x: Tensor, reduce: str) -> None:
    if reduce not in REDUCE_OPS:
        raise ValueError(f"{op} knows {', '.join(REDUCE_OPS)}, not {reduce!r}")
    if x.dtype == torch.bool:
        raise ValueError(f"{op}({reduce}) of bool is undefined; convert to an integer type first")
    if reduce == "mean" and not x.dtype.is_floating_point:
        raise ValueError(f"{op}(mean) of {x.dtype} would round; use sum, or convert to a floating point type first")


def _slices(op: str, whole_name: str, whole: Tensor, slice_name: str, piece: Tensor, group: Group) -> None:
    """`whole` must be group.size pieces along dimension 0."""
    _contiguous(op, whole, piece)
    _one_dtype(op, whole, piece)
    if not piece.dim() or not whole.dim():
        raise ValueError(f"{op} needs a dimension 0 to join or cut; {slice_name} has shape {tuple(piece.shape)}")
    if whole.shape[0] != group.size * piece.shape[0] or whole.shape[1:] != piece.shape[1:]:
        wanted = (group.size * piece.shape[0], *piece.shape[1:])
        raise ValueError(
            f"{op} on group {group.name!r} of {group.size} ranks: {whole_name} has shape {tuple(whole.shape)} "
            f"({math.prod(whole.shape)} elements), but {group.size} times {slice_name} {tuple(piece.shape)} is {wanted}"
        )


def _rooted(
    op: str, whole_name: str, whole: Tensor | None, slice_name: str, piece: Tensor, root: int, group: Group, rank: int
) -> None:
    _position(f"{op} root", root, group)
    if group.ranks[root] != rank:
        if whole is not None:
            raise ValueError(f"{op}: {whole_name} must be None on rank {rank}; only the root, rank {group.ranks[root]}, has it")
        _contiguous(op, piece)
    elif whole is None:
        raise ValueError(f"{op}: rank {rank} is the root and needs {whole_name}")
    else:
        _slices(op, whole_name, whole, slice_name, piece, group)


def _position(what: str, position: int, group: Group) -> None:
    if not 0 <= position < group.size:
        raise ValueError(f"{what} {position} is outside group {group.name!r}, which has positions 0 to {group.size - 1}")
