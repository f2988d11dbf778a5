"""What `phalanx show` can show: the collectives as a table, and which questions about them make sense.

Needs no torch, so a mistake is told at once. `demonstrate` runs a Case, `picture` draws what it saw.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.comm.transport import ReduceOp

MOST_RANKS = 16
MOST_ELEMENTS = 64
"""More ranks, or more numbers in one tensor, are no picture any more."""

OPS: tuple[ReduceOp, ...] = ("sum", "mean", "min", "max")


@dataclass(frozen=True)
class Kind:
    """What a collective does to tensors that have a slice for every rank.

    cuts     the input has a slice for every rank
    joins    the output has a slice for every rank
    reduces  what comes from several ranks becomes one
    root     who has a root: "in" (only its input counts), "out" (only it has the result), or nobody
    least    bytes that the busiest rank must send or receive, in units of the larger of input and output, for n ranks.
             Of all_reduce: Patarasuk and Yuan 2009, theorem 1. Of the others: all that a rank lacks
    """

    text: str
    least: Callable[[int], Fraction]
    cuts: bool = False
    joins: bool = False
    reduces: bool = False
    root: str | None = None


def _others(n: int) -> Fraction:
    return Fraction(n - 1, n)


def _whole(n: int) -> Fraction:
    return Fraction(1)


KINDS = {
    "all_reduce": Kind("every rank ends with the reduction of all", lambda n: 2 * _others(n), reduces=True),
    "all_gather": Kind("every rank ends with the tensors of all, one behind the other", _others, joins=True),
    "reduce_scatter": Kind("rank i ends with slice i of the reduction of all", _others, cuts=True, reduces=True),
    "all_to_all": Kind("slice i of every rank goes to rank i", _others, cuts=True, joins=True),
    "broadcast": Kind("every rank ends with the root's tensor", _whole, root="in"),
    "reduce": Kind("the root ends with the reduction of all", _whole, reduces=True, root="out"),
    "gather": Kind("the root ends with the tensors of all, one behind the other", _others, joins=True, root="out"),
    "scatter": Kind("slice i of the root's tensor goes to rank i", _others, cuts=True, root="in"),
    "send": Kind("the root sends to the next rank, which receives; nobody else takes part", _whole, root="in"),
    "barrier": Kind("nobody leaves before everybody has arrived; no data moves", lambda n: Fraction(0)),
}


@dataclass(frozen=True)
class Number:
    """A dtype by its limits: whole numbers are exact up to one of them, larger than the other none exists."""

    floating: bool
    exact_to: int
    ends_at: int | None = None


DTYPES = {
    "float64": Number(True, 2**53),
    "float32": Number(True, 2**24),
    "bfloat16": Number(True, 2**8),
    "float16": Number(True, 2**11),
    "int64": Number(False, 2**63 - 1),
    "int32": Number(False, 2**31 - 1),
    "int16": Number(False, 2**15 - 1, 2**15 - 1),
    "uint8": Number(False, 2**8 - 1, 2**8 - 1),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to show. `size` is the number of elements of one rank's input (of the root's, for scatter)."""

    collective: str
    ranks: int = 4
    size: int | None = None
    root: int | None = None
    op: ReduceOp | None = None
    dtype: str = "float32"

    @property
    def kind(self) -> Kind:
        return KINDS[self.collective]

    @property
    def elements(self) -> int:
        """`size` of a complete case; 0 for a barrier."""
        return self.size or 0

    @property
    def pieces(self) -> int:
        """Slices of one rank's input."""
        return self.ranks if self.kind.cuts else 1

    @property
    def title(self) -> str:
        details = ([self.op] if self.op else []) + ([f"root {self.root}"] if self.root is not None else [])
        return f"{self.collective} ({', '.join(details)})" if details else self.collective


def complete(case: Case) -> Case:
    """The case with every default filled in. Raises ValueError for one that makes no sense."""
    name, ranks = case.collective, case.ranks
    if name not in KINDS:
        close = difflib.get_close_matches(name, KINDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(KINDS)}"
        raise ValueError(f"there is no collective {name!r}{hint}")
    kind = KINDS[name]
    if ranks < 2:
        raise ValueError(f"a collective on {ranks} rank{'s' * (ranks != 1)} moves nothing; use --ranks 2 or more")
    if ranks > MOST_RANKS:
        raise ValueError(f"{ranks} ranks are too many to read; use --ranks {MOST_RANKS} or fewer")
    if case.dtype not in DTYPES:
        raise ValueError(f"--dtype {case.dtype!r} is none of {', '.join(DTYPES)}")
    op, root = _op(case, kind), _root(case, kind)
    if name == "barrier":
        if case.size is not None:
            raise ValueError(f"a barrier has no tensor, so --size {case.size} means nothing")
        return case
    size = _size(case, kind)
    _check_range(case.dtype, ranks, size, op)
    return replace(case, op=op, root=root, size=size)


def _op(case: Case, kind: Kind) -> ReduceOp | None:
    if case.op is None:
        return "sum" if kind.reduces else None
    if not kind.reduces:
        takers = ", ".join(name for name, other in KINDS.items() if other.reduces)
        raise ValueError(f"{case.collective} reduces nothing, so --op {case.op} means nothing; {takers} take it")
    if case.op not in OPS:
        raise ValueError(f"--op {case.op!r} is none of {', '.join(OPS)}")
    if case.op == "mean" and not DTYPES[case.dtype].floating:
        raise ValueError(f"the mean of {case.dtype} would round; use --op sum or a floating point --dtype")
    return case.op


def _root(case: Case, kind: Kind) -> int | None:
    if case.root is None:
        return 0 if kind.root else None
    if kind.root is None:
        takers = ", ".join(name for name, other in KINDS.items() if other.root)
        raise ValueError(f"{case.collective} has no root, so --root {case.root} means nothing; {takers} take it")
    if not 0 <= case.root < case.ranks:
        raise ValueError(f"--root {case.root} is not one of the ranks 0 to {case.ranks - 1}")
    return case.root


def _size(case: Case, kind: Kind) -> int:
    name, ranks, size = case.collective, case.ranks, case.size
    if size is None:
        size = ranks if kind.cuts else 2 if kind.joins else 4
    if size < 1:
        raise ValueError(f"--size is {size}; a tensor has at least 1 element")
    if kind.cuts and size % ranks:
        nearest = -(-size // ranks) * ranks
        raise ValueError(
            f"{name} cuts --size {size} into {ranks} equal slices, which leaves {size % ranks}; try --size {nearest}"
        )
    largest = size * ranks if kind.joins and not kind.cuts else size
    if largest > MOST_ELEMENTS:
        raise ValueError(
            f"{name} of --size {size} has a tensor of {largest} elements; more than {MOST_ELEMENTS} cannot be read"
        )
    return size


def _check_range(dtype: str, ranks: int, size: int, op: ReduceOp | None) -> None:
    largest = max(numbers(ranks - 1, size))
    if op == "sum":
        largest = sum(max(numbers(rank, size)) for rank in range(ranks))
    limit = DTYPES[dtype].ends_at
    if limit is not None and largest > limit:
        raise ValueError(f"the numbers would reach {largest}, but {dtype} ends at {limit}; use a wider --dtype or fewer ranks")


def numbers(rank: int, size: int) -> list[int]:
    """What a rank starts with: element i of rank r is 10 (r + 1) + i, or 100 (r + 1) + i and so on for longer tensors.

    So the first digits of a number say where it comes from.
    """
    unit = 10 ** len(str(max(size - 1, 1)))
    return [unit * (rank + 1) + i for i in range(size)]
