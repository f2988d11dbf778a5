"""Initial values without memory: record what a model's constructor writes, replay any shard of it later.

`deferred_init` runs a constructor while its parameters have shapes but no storage; `initial_shard` evaluates the record at the
global positions that one rank holds. Random draws are counter hashes of (seed, parameter name, global position), so the weights
are the same, bit for bit, on every layout. What is not a function of position (a QR decomposition, a permutation) is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import random
from phalanx.mesh import Mesh
from phalanx.run import recipe as rc
from phalanx.run.recipe import Draw, Empty, Failed, Recipe
from phalanx.run.recorder import HINT, NoMetaShortcuts, Recorder
from phalanx.spec import Spec, clipped_ranges, shard

ATTRIBUTE = "phalanx_initial"
"""Where the Record lives on the module that `deferred_init` returns."""
CPU_BLOCK = 1 << 14
"""Elements evaluated at once: the 128 kB of a float64 temporary stay in the second-level cache."""
CUDA_BLOCK = 1 << 24


@dataclass(frozen=True)
class Record:
    """How every parameter (and every buffer with random values) is filled, by first name."""

    recipes: dict[str, Recipe]
    labels: dict[int, str]
    """The name each draw is keyed by: the first parameter that contains it, `name` or `name#k`. Copies share their draws."""


def deferred_init(factory: Callable[[], nn.Module]) -> nn.Module:
    """The module that `factory` builds, with meta parameters and a Record of their initial values as one attribute.

    Whatever is not a parameter is real: buffers and other tensors hold values, on CPU; only a buffer of random values stays on
    meta until `materialize`. Raises ValueError, with name, operation and source line, for an initialiser that is not a function
    of position.
    """
    recorder = Recorder()
    with recorder, NoMetaShortcuts(recorder):
        module = factory()
    recipes = {name: recorder.read(parameter.detach()) for name, parameter in module.named_parameters()}
    for name, buffer in module.named_buffers():
        if recorder.knows(buffer) and not rc.is_settled(recipe := recorder.read(buffer)):
            recipes[name] = recipe
    for name, recipe in recipes.items():
        for node in rc.nodes(recipe):
            if isinstance(node, Failed):
                raise ValueError(f"the initial value of {name} cannot be recorded: {node.operation} at {node.where}; {HINT}")
    _settle(module, recorder)
    labels: dict[int, str] = {}
    for name, recipe in recipes.items():
        new = dict.fromkeys(node.number for node in rc.nodes(recipe) if isinstance(node, Draw) and node.number not in labels)
        labels.update((number, f"{name}#{k}" if k else name) for k, number in enumerate(new))
    setattr(module, ATTRIBUTE, Record(recipes, labels))
    return module


def initial_shard(
    module: nn.Module,
    name: str,
    spec: Spec,
    mesh: Mesh,
    rank: int,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    padded: Sequence[int] | None = None,
) -> Tensor:
    """The initial value of the shard that `rank` holds of the parameter or buffer `name`, which may be any alias of it.

    Evaluated in the dtype the module was built with and then cast to `dtype`, so a float64 copy holds the float32 values.
    Of a value that is stored in a larger shape, `padded`, the rest is zeros.
    """
    record = getattr(module, ATTRIBUTE, None)
    if not isinstance(record, Record):
        raise ValueError(f"this {type(module).__name__} carries no record of its initial values; build it with deferred_init")
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
    if name not in tensors:
        close = difflib.get_close_matches(name, tensors, n=1)
        raise ValueError(f"no parameter or buffer is named {name!r}" + (f"; the closest is {close[0]!r}" if close else ""))
    first = next(other for other, tensor in tensors.items() if tensor is tensors[name])
    if first not in record.recipes:
        value = tensors[name].detach()
        if value.is_meta:
            raise ValueError(f"{name} was added after deferred_init and has no values")
        value = value.to(device, dtype or value.dtype)
        if padded is not None and tuple(padded) != tuple(value.shape):
            long = value.new_zeros(tuple(padded))
            long[tuple(slice(size) for size in value.shape)].copy_(value)
            value = long
        return shard(value, spec, mesh, rank)
    recipe = record.recipes[first]
    kinds = {type(node) for node in rc.nodes(recipe)}
    if Empty in kinds and rc.Write not in kinds:
        raise ValueError(f"{name} is never initialised: it is allocated by torch.empty and nothing writes it; {HINT}")
    whole = recipe.shape if padded is None else tuple(padded)
    held = spec.local_shape(whole, mesh)
    coordinates = mesh.coordinates(rank)
    if any(coordinates.get(axis, 0) for axis in spec.partial):
        return torch.zeros(held, dtype=dtype or recipe.dtype, device=device)
    keys = {number: random.key(seed, label) for number, label in record.labels.items()}
    rows, columns = random.index_factors(spec, recipe.shape, mesh, rank, device, padded=whole)
    box = torch.empty(len(rows), len(columns), dtype=dtype or recipe.dtype, device=device)
    for r, c in random.blocks(len(rows), len(columns), CPU_BLOCK if box.device.type == "cpu" else CUDA_BLOCK):
        index = rows[r, None] + columns[c]
        box[r, c] = recipe.at(index.reshape(-1), keys).view(index.shape)
    if whole == recipe.shape:
        return box.view(held)
    out = torch.zeros(held, dtype=box.dtype, device=device)
    inside = [
        sum(length for _, length in clipped_ranges(spec, recipe.shape, whole, mesh, rank, dim)) for dim in range(len(held))
    ]
    out[tuple(slice(size) for size in inside)].copy_(box.view(inside))
    return out


def materialize(
    module: nn.Module, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> nn.Module:
    """Give a deferred module its values, in place, as one process holds them; tied tensors stay tied. Returns the module.

    `dtype` casts floating-point parameters and buffers once the values are made.
    """
    one = Mesh()
    made: dict[int, Tensor] = {}
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for local, value in table.items():
                if value is not None and id(value) not in made:
                    name = f"{prefix}.{local}" if prefix else local
                    target = dtype if value.is_floating_point() else None
                    data = initial_shard(module, name, Spec.replicated(value.dim()), one, 0, seed, device, target)
                    made[id(value)] = _with_data(value, data)
    _swap(module, made)
    return module


def _settle(module: nn.Module, recorder: Recorder) -> None:
    """Parameters to plain meta tensors, all other tensors that depend on nothing random to real ones."""
    swaps: dict[int, Tensor] = {}
    for parameter in module.parameters():
        if not (recorder.knows(parameter) and parameter.is_contiguous()):
            swaps[id(parameter)] = _with_data(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    for path, owner in module.named_modules():
        for table in (owner._buffers, vars(owner)):
            for local, value in table.items():
                if not recorder.knows(value) or id(value) in swaps or isinstance(value, nn.Parameter):
                    continue
                if rc.is_settled(recipe := recorder.read(value)):
                    swaps[id(value)] = rc.whole(recipe)
                elif table is not owner._buffers:
                    name = f"{path}.{local}" if path else local
                    raise ValueError(f"{name} is a random or unwritten tensor that is no parameter and no buffer; register it")
    _swap(module, swaps)


def _swap(module: nn.Module, replacement: dict[int, Tensor]) -> None:
    """Put the replacement of each tensor, by identity, wherever modules hold it."""
    for owner in module.modules():
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers, vars(owner))
        for table in tables:
            for local, value in list(table.items()):
                if isinstance(value, Tensor) and id(value) in replacement:
                    table[local] = replacement[id(value)]


def _with_data(old: Tensor, data: Tensor) -> Tensor:
    """`data` in the role of `old`: a parameter stays one, with its flags and attributes."""
    if not isinstance(old, nn.Parameter):
        return data
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new
