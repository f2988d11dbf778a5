"""From shards to global tensors, and the proof that ranks started from the same ones. Every function is collective."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx.comm.world import World
from phalanx.spec import Spec, unshard


def gather(local: Tensor, spec: Spec, world: World) -> Tensor:
    """The global value, on every rank of the stage, from the shards of its ranks."""
    mesh, transport = world.mesh, world.transport
    if any(mesh.shape.get(axis, 1) > 1 for axis in spec.partial):
        local = local.clone(memory_format=torch.contiguous_format)
        for axis in mesh.names:
            if axis in spec.partial and mesh.shape[axis] > 1:
                transport.all_reduce(local, world.group(axis)).wait()
    axes = [axis for axis in mesh.names if axis in spec.sharded and mesh.shape[axis] > 1]
    stack = local.detach().contiguous().unsqueeze(0)
    for axis in reversed(axes):
        out = stack.new_empty((mesh.shape[axis] * stack.shape[0], *stack.shape[1:]))
        transport.all_gather(out, stack, world.group(axis)).wait()
        stack = out
    places = itertools.product(*(range(mesh.shape[axis]) for axis in axes))
    shards = {mesh.rank(dict(zip(axes, place, strict=True))): shard for place, shard in zip(places, stack, strict=True)}
    return unshard(shards, spec.with_partial(()), mesh)


def from_stage(value: Tensor | None, shape: Sequence[int], dtype: torch.dtype, stage: int, world: World) -> Tensor:
    """A value that only the ranks at pp coordinate `stage` need to have, on all of them."""
    if world.mesh.shape.get("pp", 1) == 1:
        assert value is not None
        return value
    if world.coordinates["pp"] != stage or value is None:
        value = torch.empty(tuple(shape), dtype=dtype, device=world.device)
    value = value.contiguous()
    world.transport.broadcast(value, stage, world.group("pp")).wait()
    return value


def check_equal(tensors: Mapping[str, Tensor], world: World) -> None:
    """Raise ValueError, on every rank, naming the first tensor whose name, shape, dtype or value ranks disagree on."""
    if world.mesh.size == 1:
        return
    described = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors.items()]
    outline = torch.tensor([len(described), zlib.crc32("\n".join(described).encode())], device=world.device)
    if not _agree(outline, world).all():
        raise ValueError(
            f"ranks built different models: this one has {len(described)} tensors, first {described[0] if described else '-'}; "
            "names, shapes and dtypes must be the same on every rank"
        )
    equal = _agree(torch.tensor([_checksum(x) for x in tensors.values()], device=world.device), world)
    if not equal.all():
        first = list(tensors)[int((~equal).nonzero()[0])]
        raise ValueError(
            f"ranks hold different values of {first!r} ({int((~equal).sum())} of {len(tensors)} tensors differ): "
            "seed every rank alike before building the model, or load the same checkpoint"
        )


def _agree(numbers: Tensor, world: World) -> Tensor:
    """Elementwise, whether every rank of the world has the same integer."""
    group = world.group(world.mesh.names)
    low, high = numbers.clone(), numbers.clone()
    world.transport.all_reduce(low, group, "min").wait()
    world.transport.all_reduce(high, group, "max").wait()
    return low == high


def _checksum(x: Tensor) -> int:
    return zlib.crc32(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def exclusive(x: Tensor) -> bool:
    """True if no other tensor shares the memory of x."""
    # Two: x's own reference and the one that untyped_storage() takes for the length of this call.
    return bool(torch._C._storage_Use_Count(x.untyped_storage()._cdata) == 2)
