"""Tensors as the core wants them: contiguous memory of a known element type. Checks that say what does not fit."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm.shm.group import DTYPES

Copies = list[tuple[Tensor, Tensor]]
"""(tensor of the caller, contiguous tensor whose content it is to have in the end)."""

_STRIDED = torch.strided


def is_plain(x: Tensor) -> bool:
    """True if x's memory is its content: on the CPU, dense, in order, not conjugated or negated lazily."""
    return x.is_cpu and x.layout is _STRIDED and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def source(x: Tensor) -> Tensor:
    """x, or a plain copy of it."""
    return x if is_plain(x) else _dense(x).contiguous()


def target(x: Tensor, copies: Copies) -> Tensor:
    """x, or a plain tensor of its shape whose content is to be copied into it."""
    if is_plain(x):
        return x
    y = torch.empty(x.shape, dtype=_dense(x).dtype)
    copies.append((x, y))
    return y


def both(x: Tensor, copies: Copies) -> Tensor:
    """x, or a plain copy of it whose later content is to be copied back."""
    y = source(x)
    if y is not x:
        copies.append((x, y))
    return y


def copy_back(copies: Copies) -> None:
    for x, y in copies:
        x.detach().copy_(y)


def _dense(x: Tensor) -> Tensor:
    if not x.is_cpu:
        raise ValueError(f"the shm backend moves tensors of the CPU; this one of shape {tuple(x.shape)} is on {x.device}")
    if x.layout is not _STRIDED:
        raise ValueError(
            f"the shm backend moves dense tensors; this one of shape {tuple(x.shape)} is {x.layout}: use to_dense()"
        )
    return x.detach().resolve_conj().resolve_neg()


def code_of(call: str, *tensors: Tensor) -> tuple[int, int]:
    """The core's code of the tensors' one element type, and how many of the core's elements an element is."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        raise ValueError(f"{call}: the shm backend cannot move {dtype}; send its bytes with view(torch.uint8)")
    for x in tensors:
        if x.dtype is not dtype:
            raise ValueError(f"{call}: tensors of {dtype} and {x.dtype} in one call; they must be of one type")
    return DTYPES[dtype]


def why_no_kernel(call: str, x: Tensor, op: object) -> str:
    return f"{call}: the shm backend cannot reduce {x.dtype} with {getattr(op, 'op', op)}; convert it, or reduce otherwise"


def require(call: str, name: str, whole: Tensor | list[Tensor], part: Tensor, size: int) -> None:
    """Check that `whole`, a tensor or a list of `size`, consists of as many tensors like `part`."""
    tensors = [whole] if isinstance(whole, Tensor) else whole
    wanted = part.numel() * size if isinstance(whole, Tensor) else part.numel()
    if not isinstance(whole, Tensor) and len(whole) != size:
        raise ValueError(f"{call}: {len(whole)} {name}s in a group of {size}; one per rank is needed")
    for x in tensors:
        if x.numel() != wanted:
            raise ValueError(f"{call}: the {name} has {x.numel()} elements, but {wanted} are needed in a group of {size}")
        if x.dtype is not part.dtype:
            raise ValueError(f"{call}: the {name} is {x.dtype}, but the tensor of this rank is {part.dtype}")


def addresses(tensors: list[Tensor]) -> tuple[int, ...]:
    return tuple([x.data_ptr() for x in tensors])


def sizes(tensors: list[Tensor]) -> tuple[int, ...]:
    """Bytes of each."""
    return tuple([x.nbytes for x in tensors])


def pieces(name: str, x: Tensor, splits: list[int], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Addresses and bytes of the parts of x along dimension 0: `splits` long, or equal ones if there are none."""
    rows = x.shape[0]
    if not splits:
        if rows % size:
            raise ValueError(f"all_to_all_single: {rows} rows of the {name} do not divide into {size} ranks; give split sizes")
        splits = [rows // size] * size
    elif len(splits) != size or sum(splits) != rows:
        raise ValueError(f"all_to_all_single: {name} split sizes {splits} are not {size} that add up to its {rows} rows")
    nbytes = x.nbytes // rows if rows else 0
    address, starts = x.data_ptr(), []
    for split in splits:
        starts.append(address)
        address += split * nbytes
    return tuple(starts), tuple([split * nbytes for split in splits])
