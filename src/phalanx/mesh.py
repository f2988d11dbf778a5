"""The shape of the machine: named axes and the ranks along them. Pure; knows nothing of processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """A box of ranks with named axes, the last axis varying fastest.

    `Mesh(pp=2, dp=2, tp=2)` has 8 ranks; rank 3 has coordinates pp=0, dp=1, tp=1.
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, **axes: int) -> None:
        for name, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {name!r} has size {size!r}; a size is a whole number of at least 1")
        object.__setattr__(self, "axes", tuple(axes.items()))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read `pp=2,dp=2,tp=2`; an empty text is the mesh of one rank."""
        axes: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, size = (field.strip() for field in item.partition("="))
            if not equals or not name.isidentifier() or not size.isdecimal():
                raise ValueError(f"mesh {text!r}: {item!r} is not of the form axis=size, as in pp=2,dp=2,tp=2")
            if name in axes:
                raise ValueError(f"mesh {text!r} names the axis {name!r} twice")
            axes[name] = int(size)
        return cls(**axes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes)})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def extent(self, axes: Iterable[str]) -> int:
        """Number of ranks along these axes together; an axis the mesh does not have counts 1."""
        shape = self.shape
        return math.prod(shape.get(axis, 1) for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on every axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside {self!r}, which has {self.size} ranks")
        position: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, position[name] = divmod(rank, size)
        return {name: position[name] for name in self.names}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at a position; an axis that is left out is taken at 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates.get(name, 0)
        return rank

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, in ascending order."""
        wanted = set(axes)
        home = self.coordinates(rank)
        return tuple(
            other
            for other in range(self.size)
            if all(place == home[name] for name, place in self.coordinates(other).items() if name not in wanted)
        )

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """Every group along `axes`, each once, ordered by first rank."""
        wanted = tuple(axes)
        return sorted({self.group(rank, wanted) for rank in range(self.size)})
