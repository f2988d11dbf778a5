"""What ranks give and expect in the cases of the shm backend, and the list of the cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.shm.group import DTYPES, KERNELS

Case = Callable[[int, int], None]
"""Of a rank and the number of ranks."""
CASES: dict[str, Case] = {}
SIZES = (0, 1, 7, 1000)
LARGE = 300_001  # more than a megabyte of float32, and no multiple of anything
REDUCE = dist.ReduceOp
FOLD: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    REDUCE.SUM: torch.add,
    REDUCE.AVG: torch.add,
    REDUCE.PRODUCT: torch.mul,
    REDUCE.MIN: torch.minimum,
    REDUCE.MAX: torch.maximum,
    REDUCE.BAND: torch.bitwise_and,
    REDUCE.BOR: torch.bitwise_or,
    REDUCE.BXOR: torch.bitwise_xor,
}
REDUCIBLE = [(dtype, op) for dtype in DTYPES for op in FOLD if (dtype, hash(REDUCE(op))) in KERNELS]


def case(fn: Case) -> Case:
    CASES[fn.__name__] = fn
    return fn


def number(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank gives to a reduction: 0 to 3, so that sums and products of four are exact in every type."""
    return ((torch.arange(count) * (rank + 3) + rank) % 4).to(dtype)


def reduced(dtype: torch.dtype, op: Any, tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for x in tensors[1:]:
        if dtype is torch.bool and op in (REDUCE.SUM, REDUCE.MAX, REDUCE.PRODUCT, REDUCE.MIN):
            total = total | x if op in (REDUCE.SUM, REDUCE.MAX) else total & x
        else:
            total = FOLD[op](total, x)
    return total / len(tensors) if op == REDUCE.AVG else total


def anything(seed: int, count: int, dtype: torch.dtype) -> Tensor:
    """Random bytes as a type, for what is only moved."""
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), generator=torch.manual_seed(seed))
    return raw.to(torch.uint8).view(dtype)


def same(got: Tensor, want: Tensor) -> None:
    """The same bits: NaN and types without comparison too."""
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert got.shape == want.shape, (got.shape, want.shape)
    # An own copy: one element counts as contiguous whatever its strides are.
    bits = [torch.empty(x.shape, dtype=x.dtype).copy_(x).view(-1).view(torch.uint8) for x in (got, want)]
    assert torch.equal(*bits), (got, want)


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


def modes(size: int, turn: int) -> tuple[bool, ...]:
    """Whether to call asynchronously: both with two ranks; in turn with four, which share the cores of small machines."""
    return (False, True) if size == 2 else (turn % 2 == 1,)


def run(call: Callable[..., Any], *arguments: Any, asynchronous: bool, **options: Any) -> None:
    work = call(*arguments, async_op=asynchronous, **options)
    assert (work is not None) is asynchronous
    finish(work)


# By the new names; torch 2.11 has the old ones.
single = {
    name: getattr(dist, name, None) or getattr(dist, old)
    for name, old in {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}.items()
}
