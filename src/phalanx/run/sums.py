"""A sum over several mesh axes: one all_reduce per axis, the last axis first, each when the one before is complete.

One call over the joint group would take slow and fast links alike; so the fast ones, which the last axes have, do their part of the
sum first, and each message belongs to one axis. Only the first overlaps with what follows: the others wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.comm.transport import Done, Handle
from phalanx.comm.world import World


def sum_over(world: World, x: Tensor, axes: Sequence[str]) -> Handle:
    """Issue the in-place sum of x over `axes`. Every rank must wait for its handles in the order in which it got them."""
    wanted = [axis for axis in reversed(world.mesh.names) if axis in axes and world.mesh.shape[axis] > 1]
    if not wanted:
        return Done()
    if len(wanted) == 1:
        return world.transport.all_reduce(x, world.group(wanted[0]))
    return _InTurn(world, x, wanted)


class _InTurn:
    """The handle of several all_reduces of one tensor; those after the first are issued by `wait`."""

    def __init__(self, world: World, x: Tensor, axes: Sequence[str]) -> None:
        self.world, self.x, self.left = world, x, list(axes)
        self.current = self._issue()

    def _issue(self) -> Handle:
        return self.world.transport.all_reduce(self.x, self.world.group(self.left.pop(0)))

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
