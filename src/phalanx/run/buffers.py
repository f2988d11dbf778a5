"""Buffers that many units take turns in: gathered parameters, and gradients on their way to being scattered.

A buffer may still be read by a communication when it is given back; it is taken again once that is complete.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm.transport import Handle
from phalanx.comm.world import World


class Buffers:
    def __init__(self, world: World) -> None:
        self.world = world
        self._idle: list[tuple[Tensor, Handle | None]] = []
        """Oldest first."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A one-dimensional buffer, values undefined, in memory that the transport reads without a copy if there is such."""
        for place, (buffer, handle) in enumerate(self._idle):
            if buffer.numel() == numel and buffer.dtype == dtype and (handle is None or handle.done()):
                if handle is not None:
                    handle.wait()
                del self._idle[place]
                return buffer
        # What has another size would stay beside the new one without being of use to it.
        self._idle = [(x, handle) for x, handle in self._idle if handle is not None and not handle.done()]
        return room(self.world, numel, dtype)

    def give(self, buffer: Tensor, handle: Handle | None = None) -> None:
        """Nobody needs the buffer any more once `handle`, if there is one, is complete."""
        self._idle.append((buffer, handle))

    def clear(self) -> None:
        """Give all memory back; what still waits for a communication has been waited for."""
        self._idle.clear()


def room(world: World, numel: int, dtype: torch.dtype) -> Tensor:
    """New memory for what is communicated."""
    shared = world.transport.shared(numel, dtype)
    return torch.empty(numel, dtype=dtype, device=world.device) if shared is None else shared
