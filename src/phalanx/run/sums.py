"""Communications of one tensor that need each other: one call after another, each when the one before is complete.

A sum over several mesh axes is such a row: one all_reduce per axis, the last axis first. One call over the joint group would take slow
and fast links alike; so the fast ones, which the last axes have, do their part of the sum first, and each message belongs to one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from phalanx.comm.transport import Done, Handle
from phalanx.comm.world import World

Call = Callable[[], Handle | None]
"""Issues one communication, or does what lies between two."""


def sum_over(world: World, x: Tensor, axes: Sequence[str]) -> Handle:
    """Issue the in-place sum of x over `axes`. Every rank must wait for its handles in the order in which it got them."""
    wanted = [axis for axis in reversed(world.mesh.names) if axis in axes and world.mesh.shape[axis] > 1]
    return in_turn(world, [partial(world.transport.all_reduce, x, world.group(axis)) for axis in wanted])


def in_turn(world: World, calls: Sequence[Call]) -> Handle:
    """Issue calls that need each other. On the CPU all but the first are issued by `wait`, so only the first overlaps with what
    follows; on CUDA all are issued at once, and a stream of their own waits between them."""
    if not calls:
        return Done()
    if len(calls) > 1 and world.device.type == "cuda":
        return _queued(world, calls)
    row = _InTurn(calls)
    return row.current if not row.left else row


def _queued(world: World, calls: Sequence[Call]) -> Handle:
    stream = torch.cuda.Stream(world.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(world.device))
    with torch.cuda.stream(stream):
        handle: Handle = Done()
        for call in calls:
            handle.wait()
            handle = call() or Done()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        handle.wait()
        done.record(stream)
    return _Recorded(world, done, handle, calls)


class _Recorded:
    """The end of a row of calls on a stream of its own."""

    def __init__(self, world: World, event: torch.cuda.Event, last: Handle, calls: Sequence[Call]) -> None:
        self.world, self.event, self.last = world, event, last
        self.calls = calls
        """They hold what they read: freed before the event, it would be the memory of what the current stream makes next."""

    def wait(self) -> None:
        torch.cuda.current_stream(self.world.device).wait_event(self.event)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self.last.synchronize()
        self.event.synchronize()

    def finished(self) -> float | None:
        return self.last.finished() if self.done() else None


class _InTurn:
    """The handle of several calls; those after the first are issued by `wait`."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.left = list(calls)
        self.current = self._issue()

    def _issue(self) -> Handle:
        return self.left.pop(0)() or Done()

    def wait(self) -> None:
        self.current.wait()
        while self.left:
            self.current = self._issue()
            self.current.wait()

    def done(self) -> bool:
        return not self.left and self.current.done()

    def synchronize(self) -> None:
        self.wait()
        self.current.synchronize()

    def finished(self) -> float | None:
        return self.current.finished() if not self.left else None
