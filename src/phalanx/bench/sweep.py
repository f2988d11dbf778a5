"""What is measured: a request in a person's words becomes a list of cases, or is refused before any rank starts.

Nothing here needs torch, so a mistake is told at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.bench.busbw import ELEMENT_BYTES, OPS, actual_size, count, smallest_size

Buffers = Literal["cold", "hot"]
BUFFERS: tuple[Buffers, ...] = ("cold", "hot")
BACKENDS = {"gloo": "cpu or cuda", "nccl": "cuda", "shm": "cpu", "mpi": "cpu"}
"""And the tensors that each is measured on."""
DTYPES = {
    "float32": "float", "float64": "double", "float16": "half", "bf16": "bfloat16", "fp16": "half", "fp32": "float",
    **{name: name for name in ELEMENT_BYTES},
}  # fmt: skip
LARGEST_EXACT = {
    "int8": 2**7 - 1, "uint8": 2**8 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1,
    "half": 2**11, "bfloat16": 2**8, "float": 2**24, "double": 2**53,
}  # fmt: skip
"""Up to here every whole number has a representation of its own, so sums are exact in any order."""


@dataclass(frozen=True)
class Case:
    """One row of the table: an operation of one size on one backend, all groups of the mesh at once.

    size     bytes of the larger of what a rank sends and receives
    count    elements of one block, nccl-tests' count
    redop    "none" where nothing is reduced
    root     rank within the group, -1 where there is none
    group    ranks in each group
    buffers  cold: other memory in every iteration, from a pool that no cache holds; hot: the same memory
    again    the same backend a second time: the ratio that means nothing (A/A)
    """

    op: str
    size: int
    count: int
    dtype: str
    redop: str
    root: int
    group: int
    backend: str
    buffers: Buffers
    resident: bool = False
    again: bool = False

    @property
    def label(self) -> str:
        """The backend as the table names it."""
        return self.backend + ("+resident" if self.resident else "") + ("(A/A)" if self.again else "")


@dataclass(frozen=True)
class Request:
    """A whole run.

    baseline  the backend that the others are held against
    again     measure it a second time (A/A); always so if it is the only one
    """

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    group: int
    backends: tuple[str, ...]
    baseline: str
    dtype: str = "float"
    redop: str = "sum"
    root: int = 0
    buffers: tuple[Buffers, ...] = ("cold",)
    resident: bool = False
    again: bool = False

    def rounds(self) -> list[list[Case]]:
        """The cases that are alternated with each other, round after round: one operation of one size on every backend."""
        return [
            [self._case(op, size, buffers, backend, again) for backend, again in self._ways()]
            for op in self.ops
            for buffers in self.buffers
            for size in self.sizes
        ]

    def _ways(self) -> list[tuple[str, bool]]:
        once = [(backend, False) for backend in self.backends]
        return [*once, (self.baseline, True)] if self.again or len(once) == 1 else once

    def _case(self, op: str, size: int, buffers: Buffers, backend: str, again: bool) -> Case:
        element = ELEMENT_BYTES[self.dtype]
        elements = count(op, size, self.group, element)
        return Case(
            op=op,
            size=actual_size(op, elements, self.group, element),
            count=elements,
            dtype=self.dtype,
            redop=self.redop if OPS[op].reduces else "none",
            root=self.root if OPS[op].rooted else -1,
            group=self.group,
            backend=backend,
            buffers=buffers,
            resident=self.resident and backend == "shm",
            again=again,
        )


@dataclass(frozen=True)
class Effort:
    """How long each case is measured.

    warm_up     untimed calls of every operation, size, backend and form before its first timed one
    iterations  samples
    pipelined   calls back to back in one sample, which is their mean; 1 measures latency
    check       compare the result with the exact one, once per operation, size, backend and form
    """

    warm_up: int = 5
    iterations: int = 20
    pipelined: int = 1
    check: bool = True

    def __post_init__(self) -> None:
        for name in ("warm_up", "iterations", "pipelined"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')} is {getattr(self, name)}; it is a number of at least 1")


def check(request: Request, *, validate: bool = True) -> None:
    """Raise ValueError for what would measure nothing, or compute what cannot be checked."""
    n, dtype = request.group, request.dtype
    if n < 2:
        raise ValueError(f"a group of {n} rank moves nothing and its busbw is 0: measure at least 2, as in --ranks 2")
    if not 0 <= request.root < n:
        raise ValueError(f"--root is {request.root}, but a group has the ranks 0 to {n - 1}")
    if request.baseline not in request.backends:
        raise ValueError(f"--baseline is {request.baseline}, which is not measured: --backends is {','.join(request.backends)}")
    if request.resident and "shm" not in request.backends:
        raise ValueError(f"--resident is about tensors of the backend shm, but --backends is {','.join(request.backends)}")
    for op in request.ops:
        least = smallest_size(op, n, ELEMENT_BYTES[dtype])
        if min(request.sizes) < least:
            share = f"16 bytes for each of {n} ranks" if OPS[op].wide else f"one element of {dtype}"
            raise ValueError(
                f"{op} of {min(request.sizes)} bytes is less than {share}: begin at {least} or more, as in -b {least}"
            )
    if any(OPS[op].reduces for op in request.ops):
        if request.redop == "avg" and "int" in dtype:
            raise ValueError(f"an average of {dtype} has no exact result: use --redop sum, or a floating-point --dtype")
        if validate and request.redop in ("sum", "avg") and n > LARGEST_EXACT[dtype]:
            raise ValueError(
                f"{dtype} is exact up to {LARGEST_EXACT[dtype]}, so a sum over {n} ranks overflows or rounds and cannot be checked: "
                "use a wider --dtype, or --check 0"
            )


def sizes(first: int, last: int, factor: int) -> tuple[int, ...]:
    """first, first·factor, first·factor², ... up to last, in bytes."""
    if last < first:
        raise ValueError(f"-e is {last} bytes, less than -b, {first} bytes: no size is left")
    if factor < 2 and last > first:
        raise ValueError(f"-f is {factor}; sizes from {first} to {last} bytes grow by a factor of at least 2")
    found = [first]
    while found[-1] * factor <= last and factor > 1:
        found.append(found[-1] * factor)
    return tuple(found)


def parse_size(text: str) -> int:
    """Bytes, as nccl-tests reads them: K, M and G are powers of 1024, `1.5M` is 1572864."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"size {text!r} is not a number of bytes with an optional K, M or G, as in 64K")
    number, unit = match.groups()
    size = int(float(number) * 1024 ** " KMG".index(unit.upper() or " "))
    if size < 1:
        raise ValueError(f"size {text!r} is {size} bytes; a size is at least 1")
    return size


def op_names(words: Iterable[str]) -> tuple[str, ...]:
    """`all_reduce`, `allreduce` and `all-reduce` are one; `all` is every operation."""
    plain = {name.replace("_", ""): name for name in OPS}
    found: list[str] = []
    for word in listed(words):
        bare = word.lower().replace("_", "").replace("-", "")
        if bare == "all":
            found += OPS
        elif bare in plain:
            found.append(plain[bare])
        else:
            raise ValueError(_unknown("operation", word, OPS))
    return tuple(dict.fromkeys(found))


def names(what: str, words: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Each word once, in the order given; ValueError with the closest match for one that is not known."""
    known, found = tuple(known), listed(words)
    for word in found:
        if word not in known:
            raise ValueError(_unknown(what, word, known))
    return tuple(dict.fromkeys(found))


def listed(words: Iterable[str]) -> list[str]:
    """Words that stand apart or are joined by commas."""
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def _unknown(what: str, word: str, known: Iterable[str]) -> str:
    known = list(known)
    close: Sequence[str] = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"there is no {what} {word!r}; " + (f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}")
