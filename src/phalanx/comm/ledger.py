"""What was sent, when, and for whom: one Event per communication call, off unless asked for.

`Recorded` stands before a rank's transport and writes into that rank's Ledger. Switched off it costs one comparison a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.comm.signature import numbytes
from phalanx.comm.transport import Group, Handle, ReduceOp, Transport
from phalanx.event import Event


@dataclass(frozen=True)
class Origin:
    """What a call is made for; set by whoever runs the schedule."""

    lane: str | None = None
    segment: str | None = None
    microbatch: int | None = None
    source: str | None = None


class Ledger:
    """The communication of one rank. Counts calls when they are issued; an Event is complete when its call is."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self._transport = transport
        self.enabled = False
        self._origin = Origin()
        self._calls: list[tuple[Event, Handle]] = []

    def start(self) -> None:
        self.enabled = self._transport.timed = True

    def stop(self) -> None:
        self.enabled = self._transport.timed = False

    def clear(self) -> None:
        self._calls.clear()

    @contextmanager
    def recording(self) -> Iterator[Ledger]:
        """Record what is called inside the block, after forgetting what came before."""
        self.clear()
        self.start()
        try:
            yield self
        finally:
            self.stop()

    @contextmanager
    def origin(
        self,
        *,
        lane: str | None = None,
        segment: str | None = None,
        microbatch: int | None = None,
        source: str | None = None,
    ) -> Iterator[None]:
        """Mark the calls issued inside the block."""
        before, self._origin = self._origin, Origin(lane, segment, microbatch, source)
        try:
            yield
        finally:
            self._origin = before

    @property
    def events(self) -> list[Event]:
        """The calls that have completed, in the order in which they were issued."""
        ends = ((event, handle.finished()) for event, handle in self._calls)
        return [replace(event, end=end) for event, end in ends if end is not None]

    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """{(axis, op): (calls, bytes)} of everything issued, complete or not."""
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for event, _ in self._calls:
            assert event.axis is not None
            calls, total = totals.get((event.axis, event.name), (0, 0))
            totals[event.axis, event.name] = (calls + 1, total + event.bytes)
        return totals

    def issue(self, op: str, group: Group, bytes: int, call: Callable[[], Handle]) -> Handle:
        """Make the call and record it; a group of one rank moves nothing and is not recorded."""
        if group.size == 1:
            return call()
        origin = self._origin
        axis = axis_of(group)
        start = time.perf_counter()
        handle = call()
        event = Event(
            rank=self.rank,
            lane=origin.lane or axis,
            name=op,
            start=start,
            end=start,
            axis=axis,
            bytes=bytes,
            segment=origin.segment,
            microbatch=origin.microbatch,
            source=origin.source,
        )
        self._calls.append((event, handle))
        return handle


def axis_of(group: Group) -> str:
    """The axes or stages of a group: its name without the `@first_rank` that makes it unique."""
    return group.name.partition("@")[0]


class Recorded(Transport):
    """A transport whose calls are written into a ledger while that is enabled."""

    def __init__(self, inner: Transport, ledger: Ledger) -> None:
        self.inner = inner
        self.ledger = ledger
        self.rank = inner.rank
        self.world_size = inner.world_size

    def group(self, name: str, ranks: Sequence[int], *, p2p: bool = False) -> Group:
        return self.inner.group(name, ranks, p2p=p2p)

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        if not self.ledger.enabled:
            return self.inner.all_reduce(x, group, op)
        return self.ledger.issue("all_reduce", group, numbytes(x), lambda: self.inner.all_reduce(x, group, op))

    def all_gather(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        if not self.ledger.enabled:
            return self.inner.all_gather(out, x, group)
        return self.ledger.issue("all_gather", group, numbytes(out), lambda: self.inner.all_gather(out, x, group))

    def reduce_scatter(self, out: Tensor, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        if not self.ledger.enabled:
            return self.inner.reduce_scatter(out, x, group, op)
        return self.ledger.issue("reduce_scatter", group, numbytes(x), lambda: self.inner.reduce_scatter(out, x, group, op))

    def all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor], group: Group) -> Handle:
        if not self.ledger.enabled:
            return self.inner.all_to_all(outs, ins, group)
        bytes = max(numbytes(*outs), numbytes(*ins))
        return self.ledger.issue("all_to_all", group, bytes, lambda: self.inner.all_to_all(outs, ins, group))

    def broadcast(self, x: Tensor, root: int, group: Group) -> Handle:
        if not self.ledger.enabled:
            return self.inner.broadcast(x, root, group)
        return self.ledger.issue("broadcast", group, numbytes(x), lambda: self.inner.broadcast(x, root, group))

    def reduce(self, x: Tensor, root: int, group: Group, op: ReduceOp = "sum") -> Handle:
        if not self.ledger.enabled:
            return self.inner.reduce(x, root, group, op)
        return self.ledger.issue("reduce", group, numbytes(x), lambda: self.inner.reduce(x, root, group, op))

    def gather(self, out: Tensor | None, x: Tensor, root: int, group: Group) -> Handle:
        if not self.ledger.enabled:
            return self.inner.gather(out, x, root, group)
        bytes = max(numbytes(out), numbytes(x))
        return self.ledger.issue("gather", group, bytes, lambda: self.inner.gather(out, x, root, group))

    def scatter(self, out: Tensor, x: Tensor | None, root: int, group: Group) -> Handle:
        if not self.ledger.enabled:
            return self.inner.scatter(out, x, root, group)
        bytes = max(numbytes(out), numbytes(x))
        return self.ledger.issue("scatter", group, bytes, lambda: self.inner.scatter(out, x, root, group))

    def send(self, x: Tensor, peer: int, group: Group) -> Handle:
        if not self.ledger.enabled:
            return self.inner.send(x, peer, group)
        return self.ledger.issue("send", group, numbytes(x), lambda: self.inner.send(x, peer, group))

    def recv(self, x: Tensor, peer: int, group: Group) -> Handle:
        if not self.ledger.enabled:
            return self.inner.recv(x, peer, group)
        return self.ledger.issue("recv", group, numbytes(x), lambda: self.inner.recv(x, peer, group))

    def barrier(self, group: Group) -> Handle:
        if not self.ledger.enabled:
            return self.inner.barrier(group)
        return self.ledger.issue("barrier", group, 0, lambda: self.inner.barrier(group))

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self.inner.shared(numel, dtype)

    def close(self) -> None:
        self.inner.close()

    def abort(self, reason: BaseException) -> None:
        self.inner.abort(reason)
