"""Inputs whose results are exact in any order of summation, what every rank must then hold, and how many elements differ.

All values are small whole numbers: every partial sum has a representation of its own in the dtype, so a backend may add in any
order, in pieces or in a tree, and a single wrong element is still seen. The values of a block repeat after a prime number of
elements: a chunk, which is a power of two, that lands in the wrong place does not look right by accident.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.bench.busbw import OPS
from phalanx.bench.sweep import LARGEST_EXACT, Case

PERIOD = 1009
LARGEST = 100
UNWRITTEN = 101
"""Receive buffers begin with this, more than any input: what a backend forgot to write is seen."""

TORCH_DTYPES = {
    "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64,
    "half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64,
}  # fmt: skip


def fill_inputs(case: Case, rank: int, send: Tensor, recv: Tensor) -> None:
    """Write what group rank `rank` sends, `(blocks * count,)`, after UNWRITTEN into `recv`, which may be part of it."""
    recv.fill_(UNWRITTEN)
    blocks = case.group if OPS[case.op].sends == "n" else 1
    for at in range(blocks):
        send[at * case.count : (at + 1) * case.count] = _tiled(_values(case, rank, at), case, send)


def expected(case: Case, rank: int, like: Tensor) -> Tensor | None:
    """What group rank `rank` must have received, on the device of `like`; None if its result is not defined."""
    n, root, me = case.group, case.root, rank
    if case.op in ("reduce", "gather") and me != root:
        return None
    sources: list[tuple[int, int]]  # (rank that sends, its block)
    match case.op:
        case "all_reduce" | "reduce" | "all_gather" | "gather":
            sources = [(r, 0) for r in range(n)]
        case "reduce_scatter" | "all_to_all":
            sources = [(r, me) for r in range(n)]
        case "broadcast":
            sources = [(root, 0)]
        case "scatter":
            sources = [(root, me)]
        case "sendrecv":
            sources = [((me - 1) % n, 0)]
        case _:
            raise AssertionError(case.op)
    blocks = [_values(case, source, block) for source, block in sources]
    if OPS[case.op].reduces:
        blocks = [_reduced(torch.stack(blocks), case.redop)]
    return torch.cat([_tiled(block, case, like) for block in blocks])


def wrong_elements(case: Case, got: Tensor, want: Tensor | None) -> int:
    """How many elements differ. An average may be off by two units in the last place, as nccl-tests allows: a backend may
    multiply by the rounded 1/n before it sums."""
    if want is None:
        return 0
    if case.redop != "avg":
        return int((got != want).sum())
    tolerance = 2 * torch.finfo(got.dtype).eps * want.double().abs()
    return int((~((got.double() - want.double()).abs() <= tolerance)).sum())


def _values(case: Case, source: int, block: int) -> Tensor:
    """(PERIOD,) whole numbers, float64, that rank `source` has in its block `block`."""
    if case.redop == "prod":
        # At most four ranks hold a 2 at one place: a product is at most 16.
        stride = max(2, math.ceil(case.group / 4))
        return torch.where((torch.arange(PERIOD) + source + block) % stride == 0, 2.0, 1.0).double()
    largest = LARGEST
    if case.redop in ("sum", "avg"):
        largest = min(LARGEST, LARGEST_EXACT[case.dtype] // case.group)
    generator = torch.Generator().manual_seed(source * 65_537 + block)
    return torch.randint(0, largest + 1, (PERIOD,), generator=generator).double()


def _reduced(blocks: Tensor, redop: str) -> Tensor:
    match redop:
        case "sum":
            return blocks.sum(0)
        case "avg":
            return blocks.mean(0)
        case "prod":
            return blocks.prod(0)
        case "min":
            return blocks.amin(0)
        case "max":
            return blocks.amax(0)
    raise AssertionError(redop)


def _tiled(values: Tensor, case: Case, like: Tensor) -> Tensor:
    """(count,) by repetition, in the dtype and on the device of `like`."""
    return values.to(like.device, like.dtype).repeat(math.ceil(case.count / PERIOD))[: case.count]
