"""Flat storage: which parameters lie together, where, which slice of them is this rank's own, and the memory of their gradients.

Data types of this room. A unit is what is stored, gathered and summed as one range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.comm.transport import Handle
from phalanx.derive.program import Parameter
from phalanx.schedule.view import stored_numel


@dataclass(frozen=True)
class Place:
    """One parameter of this rank: where it lies in its unit and what its gradient needs."""

    parameter: Parameter
    shape: tuple[int, ...]
    """Local shape."""
    start: int
    hosts: tuple[int, ...]
    """Segments of this rank that use it."""
    axes: tuple[str, ...]
    """Axes its gradient is summed over, in mesh order."""
    split: tuple[str, ...]
    """Axes whose ranks store a slice of it each, in mesh order."""
    stages: tuple[int, ...]
    """pp coordinates that share it, if more than one."""
    alone: str
    """Its name if it is a unit of its own, because segments that lie apart or are gathered apart share it."""
    counted: bool
    """True on the one rank, of those that store these elements, that adds them to the global norm."""
    group: Hashable
    """Optimizer group."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stored(self) -> int:
        """Elements until the next parameter."""
        return stored_numel(self.numel, self.parameter.dtype.itemsize)

    def of(self, buffer: Tensor) -> Tensor:
        """The parameter in a buffer that is laid out like its whole unit."""
        return buffer[self.start : self.start + self.numel].view(self.shape)


@dataclass(eq=False)
class Gradients:
    """Accumulators with memory only while a step needs it; views of `data` stay views.

    Memory that the transport shares between ranks cannot be given back and taken again under the same views: it stays.
    """

    data: Tensor
    gaps: list[Tensor]
    """What lies behind parameters: it is summed and updated with them, and must stay zero."""
    shared: bool = False
    held: bool = True

    def hold(self) -> None:
        """Take memory if there is none; the parameters' values are undefined."""
        if not self.held:
            self.data.untyped_storage().resize_(self.data.numel() * self.data.itemsize)
            self.held = True
            if self.gaps:
                torch._foreach_zero_(self.gaps)

    def release(self) -> None:
        if not self.shared:
            self.data.untyped_storage().resize_(0)
            self.held = False


@dataclass(eq=False)
class Unit:
    """Parameters of one dtype and one first segment that are stored, gathered and summed as one range.

    split, ranks, index  axes whose ranks store a slice each, how many they are, and which of them this is; (), 1 and 0 if whole
    numel                of all of it: what `ranks` divide into slices of whole cache lines
    values               the whole unit, or its own slice alone if `sliced`
    master               own slice in the gradients' dtype, which is what the optimizer updates; None if that is the values' own
    gradient             accumulators: of the whole unit, or of the own slice if `scattered`
    """

    segment: int
    dtype: torch.dtype
    trainable: bool
    places: tuple[Place, ...]
    split: tuple[str, ...]
    ranks: int
    index: int
    sliced: bool
    scattered: bool
    numel: int
    values: Tensor = field(init=False)
    master: Tensor | None = None
    gradient: Gradients = field(init=False)
    whole: Tensor | None = None
    """The gathered parameters of a sliced unit, while they are there."""
    gathering: Handle | None = None
    """What fills `whole`."""
    holders: set[int] = field(default_factory=set)
    """Segments that have gathered it in this list."""
    summed: Tensor | None = None
    """Accumulators of the whole of a scattered unit, from its first backward to its sum."""

    @property
    def name(self) -> str:
        return self.places[0].parameter.name

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator(self.dtype)

    @property
    def slice_numel(self) -> int:
        return self.numel // self.ranks

    @property
    def start(self) -> int:
        """First element of the own slice."""
        return self.index * self.slice_numel

    def own(self, buffer: Tensor) -> Tensor:
        """The own slice of a buffer of the whole unit."""
        return buffer[self.start : self.start + self.slice_numel]

    @property
    def own_values(self) -> Tensor:
        return self.values if self.sliced else self.own(self.values)

    @property
    def own_gradient(self) -> Tensor:
        return self.gradient.data if self.scattered else self.own(self.gradient.data)

    def gaps(self, buffer: Tensor) -> list[Tensor]:
        """What lies behind parameters in a buffer of the whole unit."""
        ends = [place.start + place.numel for place in self.places]
        starts = [*(place.start for place in self.places[1:]), self.numel]
        return [buffer[end:start] for end, start in zip(ends, starts, strict=True) if end < start]

    def pieces(self) -> list[tuple[Place, slice, slice]]:
        """(parameter, where in the own slice, where in the flattened parameter) of all that this rank stores."""
        found = []
        for place in self.places:
            first, last = max(place.start, self.start), min(place.start + place.numel, self.start + self.slice_numel)
            if first < last:
                found.append(
                    (place, slice(first - self.start, last - self.start), slice(first - place.start, last - place.start))
                )
        return found


@dataclass(eq=False)
class Range:
    """Neighbours in the own slice of a unit that are alike in some respect."""

    unit: Unit
    places: tuple[Place, ...]
    start: int
    """In the own slice, as `stop`."""
    stop: int

    @property
    def group(self) -> Hashable:
        return self.places[0].group

    def of(self, own: Tensor) -> Tensor:
        """Its part of a buffer that is laid out like the own slice."""
        return own[self.start : self.stop]

    @property
    def gradient(self) -> Tensor:
        return self.of(self.unit.own_gradient)

    @property
    def weights(self) -> Tensor:
        """What the optimizer updates: the parameters, or their wider master copy."""
        return self.of(self.unit.own_values if self.unit.master is None else self.unit.master)


def runs(unit: Unit, key: Callable[[Place], Hashable]) -> Iterator[tuple[tuple[Place, ...], int, int]]:
    """(neighbours with equal keys, where they start and stop in the whole unit), without those whose key is None."""
    for found, run in itertools.groupby(unit.places, key):
        places = tuple(run)
        if found is not None:
            yield places, places[0].start, places[-1].start + places[-1].stored


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of a parameter are summed: the wider of float32 and its own."""
    return torch.promote_types(dtype, torch.float32)
