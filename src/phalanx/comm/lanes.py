"""One communicator of torch.distributed with, on CUDA, its stream; and the handles of what is in flight on it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.signature import Call
from phalanx.comm.transport import Group

Fail = Callable[[Call, Group, RuntimeError], NoReturn]
"""How a handle reports that its call cannot complete."""


@dataclass
class Lane:
    """One communicator and, on CUDA, its stream and the tensors that are in flight on it."""

    pg: Any
    stream: Any  # torch.cuda.Stream, or None on CPU; torch leaves the methods of streams and events untyped
    in_flight: deque[tuple[Any, tuple[Any, ...]]] = field(default_factory=deque)

    def keep(self, event: Any, tensors: tuple[Any, ...]) -> None:
        """Hold the tensors until the event has passed, and let go of those whose event has."""
        while self.in_flight and self.in_flight[0][0].query():
            self.in_flight.popleft()
        self.in_flight.append((event, tensors))


class CpuHandle:
    """A Gloo work. `finish` does what is left to this rank, once, in `wait`."""

    __slots__ = ("_call", "_fail", "_finish", "_finished", "_group", "_tensors", "_work")

    def __init__(
        self,
        fail: Fail,
        call: Call,
        group: Group,
        work: Any,
        finish: Callable[[], None] | None,
        tensors: tuple[Any, ...],
    ) -> None:
        self._fail = fail
        self._call = call
        self._group = group
        self._work = work
        self._finish = finish
        self._tensors = tensors
        self._finished: float | None = None

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            self._fail(self._call, self._group, error)
        if self._finished is None:
            self._finished = time.perf_counter()
        if self._finish is not None:
            with torch.no_grad():
                self._finish()
        self._work = self._finish = None
        self._tensors = ()

    def synchronize(self) -> None:
        self.wait()

    def done(self) -> bool:
        if self._finished is None and self._work.is_completed():
            self._finished = time.perf_counter()
        return self._finished is not None

    def finished(self) -> float | None:
        """Gloo keeps no times: this is when completion was first seen."""
        self.done()
        return self._finished


class CudaHandle:
    """An event on a lane."""

    __slots__ = ("_call", "_clock", "_device", "_event", "_fail", "_group", "_timeout")

    def __init__(
        self,
        fail: Fail,
        call: Call,
        group: Group,
        event: Any,
        clock: tuple[Any, float] | None,
        device: torch.device,
        timeout: float,
    ) -> None:
        self._fail = fail
        self._call = call
        self._group = group
        self._event = event
        self._clock = clock
        self._device = device
        self._timeout = timeout

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        """Polls, because a kernel that waits for a dead peer never ends and must be reported rather than waited for."""
        until = time.monotonic() + self._timeout
        try:
            while not self._event.query():
                if time.monotonic() > until:
                    raise RuntimeError(f"not complete after {self._timeout:g} s")
                time.sleep(5e-5)
        except RuntimeError as error:
            self._fail(self._call, self._group, error)

    def done(self) -> bool:
        return bool(self._event.query())

    def finished(self) -> float | None:
        if self._clock is None or not self.done():
            return None
        zero, at = self._clock
        return at + float(zero.elapsed_time(self._event)) / 1000.0


def new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def new_event(timed: bool) -> Any:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


class Works:
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def exchange(pg: Any, group: Group, sent: Mapping[int, Tensor], came: Mapping[int, Tensor]) -> Works:
    """Messages to and from group positions, all at once."""
    coming = [dist.irecv(x, group.ranks[at], group=pg) for at, x in came.items()]
    return Works([*coming, *(dist.isend(x, group.ranks[at], group=pg) for at, x in sent.items())])
