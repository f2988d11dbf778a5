"""Where a value lives: the state of a tensor on every axis of a mesh, and cutting and joining by it.

Pure: no communication, no global state. `shard` and `unshard` are the definition that every collective is tested against.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.mesh import Mesh


@dataclass(frozen=True)
class Spec:
    """The state of one value on a mesh: replicated, sharded or partial on each axis.

    dims     for each dimension, the axes that split it, the major (slowest) first; () is whole
    partial  axes over which the true value is the sum of what the ranks hold
    parts    (dimension, global sizes) of a fused dimension, for example the q, k and v of one projection. A rank's shard of a
             fused dimension is the concatenation of its slice of every part
    An axis in neither is replicated.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()
    parts: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        used = [axis for axes in self.dims for axis in axes] + list(self.partial)
        if len(used) != len(set(used)):
            raise ValueError(f"{self} uses one mesh axis twice")

    @classmethod
    def replicated(cls, ndim: int) -> Spec:
        return cls(((),) * ndim)

    def __str__(self) -> str:
        body = ", ".join("+".join(axes) or "·" for axes in self.dims)
        return f"[{body}]" + (f" partial({','.join(sorted(self.partial))})" if self.partial else "")

    @property
    def sharded(self) -> frozenset[str]:
        """Axes that split some dimension."""
        return frozenset(axis for axes in self.dims for axis in axes)

    @property
    def varying(self) -> frozenset[str]:
        """Axes along which ranks hold different data: sharded or partial."""
        return self.sharded | self.partial

    def part_sizes(self, dim: int) -> tuple[int, ...] | None:
        """Global sizes of the parts of a fused dimension, or None."""
        return dict(self.parts).get(dim)

    def with_dim(self, dim: int, axes: Iterable[str]) -> Spec:
        dims = list(self.dims)
        dims[dim] = tuple(axes)
        return replace(self, dims=tuple(dims))

    def with_partial(self, axes: Iterable[str]) -> Spec:
        return replace(self, partial=frozenset(axes))

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Shape of one rank's shard of a global `shape`. Raises ValueError if an axis does not divide."""
        self.check(shape, mesh)
        return tuple(size // mesh.extent(axes) for size, axes in zip(shape, self.dims, strict=True))

    def check(self, shape: Sequence[int], mesh: Mesh) -> None:
        """Raise ValueError, with both numbers, if the shards of `shape` would be uneven."""
        for dim, (size, axes) in enumerate(zip(shape, self.dims, strict=True)):
            ranks = mesh.extent(axes)
            for part in self.part_sizes(dim) or (size,):
                if part % ranks:
                    raise ValueError(
                        f"dimension {dim} of size {part} in shape {tuple(shape)} does not divide over "
                        f"{'+'.join(axes)}, which has {ranks} ranks"
                    )


def dim_ranges(spec: Spec, shape: Sequence[int], mesh: Mesh, rank: int, dim: int) -> tuple[tuple[int, int], ...]:
    """The global (start, length) pieces of dimension `dim` that `rank` holds, in local order; one piece unless fused."""
    position, ranks = 0, 1
    coordinates = mesh.coordinates(rank)
    for axis in spec.dims[dim]:
        position = position * mesh.shape.get(axis, 1) + coordinates.get(axis, 0)
        ranks *= mesh.shape.get(axis, 1)
    pieces, offset = [], 0
    for size in spec.part_sizes(dim) or (shape[dim],):
        pieces.append((offset + position * (size // ranks), size // ranks))
        offset += size
    return tuple(pieces)


def clipped_ranges(
    spec: Spec, shape: Sequence[int], padded: Sequence[int], mesh: Mesh, rank: int, dim: int
) -> tuple[tuple[int, int], ...]:
    """`dim_ranges` of a value that is stored in the larger shape `padded`, without the padding at its end; lengths may be 0."""
    ranges = dim_ranges(spec, padded, mesh, rank, dim)
    return tuple((start, max(0, min(length, shape[dim] - start))) for start, length in ranges)


def shard(value: Tensor, spec: Spec, mesh: Mesh, rank: int) -> Tensor:
    """The piece of a global `value` that `rank` holds.

    A partial value is kept by the first rank of its axes; the others hold zeros.
    """
    spec.check(value.shape, mesh)
    coordinates = mesh.coordinates(rank)
    local = value
    for dim in range(value.dim()):
        pieces = dim_ranges(spec, value.shape, mesh, rank, dim)
        if len(pieces) == 1:
            start, length = pieces[0]
            local = local.narrow(dim, start, length)
        else:
            local = torch.cat([local.narrow(dim, start, length) for start, length in pieces], dim)
    if any(coordinates.get(axis, 0) for axis in spec.partial):
        return torch.zeros_like(local)
    return local.contiguous()


def unshard(shards: Mapping[int, Tensor] | Sequence[Tensor], spec: Spec, mesh: Mesh) -> Tensor:
    """The global value from the shards of every rank; partial shards are summed, replicas are taken from the first."""
    locals_ = dict(enumerate(shards)) if not isinstance(shards, Mapping) else dict(shards)
    first = locals_[0]
    shape = tuple(size * mesh.extent(axes) for size, axes in zip(first.shape, spec.dims, strict=True))
    value = torch.zeros(shape, dtype=first.dtype, device=first.device)
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        if any(place for axis, place in coordinates.items() if axis not in spec.varying):
            continue
        pieces = [dim_ranges(spec, shape, mesh, rank, dim) for dim in range(len(shape))]
        _add_pieces(value, locals_[rank], pieces)
    return value


def _add_pieces(value: Tensor, local: Tensor, pieces: Sequence[Sequence[tuple[int, int]]], dim: int = 0) -> None:
    if dim == len(pieces):
        value += local
        return
    offset = 0
    for start, length in pieces[dim]:
        _add_pieces(value.narrow(dim, start, length), local.narrow(dim, offset, length), pieces, dim + 1)
        offset += length


def owner(spec: Spec, mesh: Mesh, rank: int) -> bool:
    """True on the one rank, of each set that holds the same data, that contributes it to a sum over all ranks."""
    return all(not place for axis, place in mesh.coordinates(rank).items() if axis not in spec.varying)
