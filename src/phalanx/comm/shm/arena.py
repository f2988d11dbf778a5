"""Tensors in the memory that this process shows to its peers: a collective on them needs no copy on its way."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.shm import _core
from phalanx.comm.shm.bootstrap import segment


def empty(*shape: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Like torch.empty(*shape) or torch.empty(shape) on the CPU, in this process's shared memory. Freed with the last tensor that views it.

    MemoryError if the segment is full, OSError if there can be none.
    """
    sizes = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    dtype = dtype if dtype is not None else torch.get_default_dtype()
    nbytes = sizes.numel() * dtype.itemsize
    if nbytes == 0:
        return torch.empty(sizes, dtype=dtype)
    segment()
    address = _core.allocate(nbytes)
    block = (ctypes.c_uint8 * nbytes).from_address(address)
    # The storage holds the block. At exit the memory goes with the process, whatever still uses it.
    weakref.finalize(block, _core.free, address).atexit = False
    return torch.frombuffer(block, dtype=torch.uint8).view(dtype).view(sizes)


def empty_like(x: Tensor) -> Tensor:
    """A contiguous tensor of x's shape and dtype in shared memory."""
    return empty(x.shape, dtype=x.dtype)


def is_resident(x: Tensor) -> bool:
    """True if x's memory is this process's shared memory."""
    return _core.started() and _core.is_resident(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
