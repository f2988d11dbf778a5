"""Random programs of collectives: one seed makes the same list of operations on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

SIZE = 4
MAX_BYTES = 2 << 20
GROUPS = [ranks for size in (4, 2, 3) for ranks in combinations(range(SIZE), size)] + [(0, 1, 2, 3)]
"""Every set of two or more, and all of them twice: two groups of one membership must not be confused."""
MODULUS = 31
"""Values are below it: the sum of four fits int8 and is exact in bfloat16."""

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
DTYPES = FLOATS + INTEGERS
BITWISE = ("band", "bor", "bxor")
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "product": lambda stack: stack.prod(0),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
    "avg": lambda stack: stack.sum(0) / len(stack),
    "band": lambda stack: _fold(torch.bitwise_and, stack),
    "bor": lambda stack: _fold(torch.bitwise_or, stack),
    "bxor": lambda stack: _fold(torch.bitwise_xor, stack),
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list", "coalesced")
KINDS = (
    *REDUCING, "broadcast", "all_gather", "all_gather_list", "gather", "scatter",
    "all_to_all", "all_to_all_uneven", "all_to_all_list", "send", "any_source", "exchange", "barrier", "objects", "regroup",
)  # fmt: skip
SYNCHRONOUS = ("barrier", "objects", "regroup", "coalesced", "exchange")


@dataclass(frozen=True)
class Operation:
    """One entry of a program, the same on all ranks."""

    number: int
    kind: str
    group: int  # of GROUPS
    dtype: torch.dtype
    count: int  # elements of the smallest piece
    reduction: str
    root: int  # position in the group
    asynchronous: bool
    resident: bool  # tensors in shared memory, where the backend has that

    def __str__(self) -> str:
        how = "async " if self.asynchronous else ""
        extra = f" {self.reduction}" if self.kind in REDUCING else ""
        return (
            f"operation {self.number}: {how}{self.kind}{extra} of {self.count} {self.dtype} on ranks {GROUPS[self.group]}, "
            f"root {self.root}"
        )


def program(seed: int, operations: int, groups: Sequence[int] = range(len(GROUPS)), *, backend: str = "shm") -> list[Operation]:
    """The operations of a seed. Gloo, which shows that a program is sound, has no average and no empty messages."""
    rng = random.Random(seed)
    average, fewest = backend != "gloo", 1 if backend == "gloo" else 0
    made = []
    for number in range(operations):
        kind = rng.choice(KINDS)
        group = rng.choice(groups)
        dtype = rng.choice(DTYPES)
        # Sizes of all magnitudes, none at all and a power of two included; the whole result stays below the limit.
        most = MAX_BYTES // dtype.itemsize // SIZE
        count = rng.choice((0, 1, int(2 ** rng.uniform(0, most.bit_length() - 1)), 1 << rng.randrange(most.bit_length() - 1)))
        count = max(count, fewest)
        legal = ["sum", "product", "min", "max"]
        if dtype in INTEGERS:
            legal += BITWISE
        elif average and len(GROUPS[group]) != 3:  # a third is not exact
            legal += ["avg"]
        asynchronous = kind not in SYNCHRONOUS and rng.random() < 0.5
        root = rng.randrange(len(GROUPS[group]))
        made.append(Operation(number, kind, group, dtype, count, rng.choice(legal), root, asynchronous, rng.random() < 0.25))
    return made


def _fold(op: Callable[[Tensor, Tensor], Tensor], stack: Tensor) -> Tensor:
    total = stack[0]
    for each in stack[1:]:
        total = op(total, each)
    return total
