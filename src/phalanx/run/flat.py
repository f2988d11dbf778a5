"""Flat storage: where a parameter lies in the buffer of its dtype, and the memory of its gradient. Data types of this room."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.derive.program import Parameter
from phalanx.schedule.view import stored_numel


@dataclass(frozen=True)
class Place:
    """One parameter of this rank: where it lies in its flat and what its gradient needs."""

    parameter: Parameter
    shape: tuple[int, ...]
    """Local shape."""
    start: int
    hosts: tuple[int, ...]
    """Segments of this rank that use it."""
    axes: tuple[str, ...]
    """Axes its gradient is summed over, in mesh order."""
    stages: tuple[int, ...]
    """pp coordinates that share it, if more than one."""
    counted: bool
    """True on the one rank that adds these elements to the global norm."""
    group: Hashable
    """Optimizer group."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stored(self) -> int:
        """Elements until the next parameter."""
        return stored_numel(self.numel, self.parameter.dtype.itemsize)


@dataclass(eq=False)
class Gradients:
    """The accumulators of one segment's parameters: their place in the flat, and memory only while a step needs it.

    Memory that the transport shares between ranks cannot be given back and taken again under the same views: it stays.
    """

    start: int
    data: Tensor
    gaps: list[Tensor]
    """What lies behind parameters: it is summed and updated with them, and must stay zero."""
    shared: bool = False
    held: bool = True

    def hold(self) -> None:
        """Take memory if there is none; the parameters' values are undefined. Views of `data` stay views."""
        if not self.held:
            self.data.untyped_storage().resize_(self.data.numel() * self.data.itemsize)
            self.held = True
            if self.gaps:
                torch._foreach_zero_(self.gaps)

    def release(self) -> None:
        if not self.shared:
            self.data.untyped_storage().resize_(0)
            self.held = False


@dataclass
class Flat:
    """The storage of all parameters of one dtype that are (or are not) trained."""

    dtype: torch.dtype
    trainable: bool
    places: tuple[Place, ...]
    values: Tensor
    gradients: dict[int, Gradients]
    """Accumulators by the first segment that uses them, laid out like the values; none if they are not trained."""

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator(self.dtype)


@dataclass(eq=False)
class Span:
    """A contiguous range of a flat whose parameters are alike in some respect."""

    flat: Flat
    places: tuple[Place, ...]
    start: int
    stop: int

    def of(self, buffer: Tensor) -> Tensor:
        """Its part of a buffer that is laid out like the flat."""
        return buffer[self.start : self.stop]

    @property
    def gradient(self) -> Tensor:
        """Its accumulators."""
        chunk = self.flat.gradients[self.places[0].hosts[0]]
        return chunk.data[self.start - chunk.start : self.stop - chunk.start]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of a parameter are summed: the wider of float32 and its own."""
    return torch.promote_types(dtype, torch.float32)
