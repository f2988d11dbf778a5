"""What each collective moves: how many elements a rank sends and receives, and the factors that make bandwidths comparable.

The conventions are those of nccl-tests (doc/PERFORMANCE.md). `algbw` is size over time; `busbw` multiplies it by the share of the
size that has to cross a rank's link, so that it can be held against the link's peak whatever the operation and number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Form = Literal["out_of_place", "in_place"]
FORMS: tuple[Form, ...] = ("out_of_place", "in_place")

ELEMENT_BYTES = {
    "int8": 1, "uint8": 1, "int32": 4, "int64": 8, "half": 2, "bfloat16": 2, "float": 4, "double": 8,
}  # fmt: skip
"""By nccl-tests' names, which the table prints."""
REDOPS = ("sum", "prod", "min", "max", "avg")


@dataclass(frozen=True)
class Op:
    """One collective among n ranks.

    sends, receives  blocks of `count` elements on each rank: one, or one per rank ("n")
    factor           busbw over algbw
    usual            the form that callers of torch.distributed use most; the other may not exist
    """

    sends: Literal["1", "n"]
    receives: Literal["1", "n"]
    factor: Callable[[int], float]
    reduces: bool = False
    rooted: bool = False
    forms: tuple[Form, ...] = FORMS
    usual: Form = "out_of_place"

    @property
    def wide(self) -> bool:
        return "n" in (self.sends, self.receives)


def _twice(n: int) -> float:
    return 2 * (n - 1) / n


def _others(n: int) -> float:
    return (n - 1) / n


def _all(n: int) -> float:
    return 1.0


OPS = {
    "all_reduce": Op("1", "1", _twice, reduces=True, usual="in_place"),
    "all_gather": Op("1", "n", _others),
    "reduce_scatter": Op("n", "1", _others, reduces=True),
    "all_to_all": Op("n", "n", _others, forms=("out_of_place",)),
    "broadcast": Op("1", "1", _all, rooted=True, usual="in_place"),
    "reduce": Op("1", "1", _all, reduces=True, rooted=True, usual="in_place"),
    "gather": Op("1", "n", _others, rooted=True),
    "scatter": Op("n", "1", _others, rooted=True),
    "sendrecv": Op("1", "1", _all, forms=("out_of_place",)),
}
"""sendrecv: each rank sends to the next and receives from the one before."""


def count(op: str, size: int, n: int, element_bytes: int) -> int:
    """Elements of one block: what `size` bytes hold, shared among n ranks in whole 16-byte pieces where there is a block per rank."""
    elements = size // element_bytes
    if not OPS[op].wide:
        return elements
    piece = 16 // element_bytes
    return elements // n // piece * piece


def actual_size(op: str, count: int, n: int, element_bytes: int) -> int:
    """Bytes of the larger of what a rank sends and receives, the `size` of the table."""
    return count * element_bytes * (n if OPS[op].wide else 1)


def smallest_size(op: str, n: int, element_bytes: int) -> int:
    """The least size at which every rank has something to send."""
    return 16 * n if OPS[op].wide else element_bytes


def bandwidths(op: str, size: int, seconds: float, n: int) -> tuple[float, float]:
    """(algbw, busbw) in GB/s of 1e9 bytes, for `size` as `actual_size` gives it."""
    algbw = size / seconds / 1e9
    return algbw, algbw * OPS[op].factor(n)
