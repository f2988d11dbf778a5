"""The contract for moving bytes between ranks. Every transport passes the one conformance suite in tests/comm."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

ReduceOp = Literal["sum", "mean", "min", "max"]


class CommError(RuntimeError):
    """A communication that cannot complete: names the call, the group and, as far as known, the ranks at fault."""


class Handle(Protocol):
    """A communication in flight. The buffers it was given may not be touched before `wait` returns."""

    def wait(self) -> None:
        """Order what follows after the communication: on CPU it blocks, on CUDA it orders the current stream."""

    def done(self) -> bool:
        """True once the communication has completed; never blocks."""

    def synchronize(self) -> None:
        """Block the host until the communication has completed (on CPU the same as `wait`)."""

    def finished(self) -> float | None:
        """When it completed, on the clock of time.perf_counter; None while it is in flight. Never blocks."""


class Done:
    """A handle of a call that completed when it was issued."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...

    def done(self) -> bool:
        return True

    def finished(self) -> float | None:
        return self._at


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other, ascending. `name` is unique in a world."""

    name: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def index(self, rank: int) -> int:
        """Position of a global rank in the group."""
        return self.ranks.index(rank)


class Transport(ABC):
    """One rank's end of the wires. All calls are asynchronous and return a Handle; tensors are contiguous.

    Slice i of a gather or scatter belongs to group position i. Sizes that do not fit raise ValueError with both numbers
    before anything is sent. A group of one rank is legal, moves nothing between ranks and need not be opened. The input of an
    all_gather or reduce_scatter may be, or contain, this rank's slice of the other buffer; buffers overlap in no other way.
    Reductions are for numbers: bool raises ValueError, and so does the mean of integers.
    """

    rank: int
    world_size: int
    timed: bool = False
    """Set it to have handles know when they finished where that costs something (events on CUDA)."""

    @abstractmethod
    def group(self, name: str, ranks: Sequence[int], *, p2p: bool = False) -> Group:
        """Open a communicator. Every rank of the world calls this for every group, in the same order.

        With `p2p` the members also open a one-way channel between every two of them. Where a channel is a resource of its own
        (NCCL), send and recv need it; elsewhere they work on any group.
        """

    @abstractmethod
    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        """Reduce in place; every rank ends with the result."""

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        """out (n * x.shape[0], *rest) is the concatenation along dimension 0 of every rank's x."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        """out is slice `index` of x (n * out.shape[0], *rest), reduced over the group."""

    @abstractmethod
    def all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor], group: Group) -> Handle:
        """outs[i] becomes rank i's ins[mine]. Sizes may differ from pair to pair (uneven splits)."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int, group: Group) -> Handle:
        """x of group position `root` to everybody, in place."""

    @abstractmethod
    def reduce(self, x: Tensor, root: int, group: Group, op: ReduceOp = "sum") -> Handle:
        """Reduce into x of group position `root`, in place; x of the others is unspecified afterwards."""

    @abstractmethod
    def gather(self, out: Tensor | None, x: Tensor, root: int, group: Group) -> Handle:
        """out (n * x.shape[0], *rest) on group position `root`, None elsewhere."""

    @abstractmethod
    def scatter(self, out: Tensor, x: Tensor | None, root: int, group: Group) -> Handle:
        """x (n * out.shape[0], *rest) on group position `root`, None elsewhere."""

    @abstractmethod
    def send(self, x: Tensor, peer: int, group: Group) -> Handle:
        """To group position `peer`. Messages between two ranks of a group match by order alone."""

    @abstractmethod
    def recv(self, x: Tensor, peer: int, group: Group) -> Handle:
        """From group position `peer`, into x."""

    @abstractmethod
    def barrier(self, group: Group) -> Handle: ...

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A new one-dimensional tensor, values undefined, in memory where this transport's collectives need no copies of their
        own; None if no memory is better than any other. Its storage cannot be resized."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release communicators; idempotent."""

    def abort(self, reason: BaseException) -> None:  # noqa: B027 - optional
        """Make every pending and later call on every rank of this world that can be reached fail with `reason`."""
