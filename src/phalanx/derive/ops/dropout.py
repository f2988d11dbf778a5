"""Dropout whose mask does not depend on the layout.

`phx::dropout_mask` gives a rank the scaled keep mask of its own shard. An element is kept or not by a hash of (salt, number,
step, global sample, global element), where microbatch j of B samples holds the global samples jB to (j+1)B, so neither the mesh
nor the number of microbatches changes it. Seed and segment are in the salt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx import random
from phalanx.comm.world import find_world
from phalanx.mesh import Mesh
from phalanx.spec import Spec

CPU_BLOCK = 1 << 14
"""Elements hashed at once: the two 128 kB temporaries stay in the second-level cache."""
CUDA_BLOCK = 1 << 24

_library = torch.library.Library("phx", "FRAGMENT")  # type: ignore[no-untyped-call]
# number: which dropout of its segment; shape: global, of one microbatch; axes: those of each dimension, as in "dp,cp+tp,"
_library.define(  # type: ignore[no-untyped-call]
    "dropout_mask(Tensor like, float p, str world, int step, int microbatch, int salt, int number, "
    "int[] shape, str axes) -> Tensor"
)


def keep_mask(
    p: float,
    key: int,
    microbatch: int,
    spec: Spec,
    shape: Sequence[int],
    mesh: Mesh,
    rank: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The mask of one rank's shard of a global `shape`, whose dimension 0 is the batch of one microbatch: 0 or 1/(1-p)."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability {p} is not in [0, 1]")
    mask = torch.empty(spec.local_shape(shape, mesh), dtype=dtype, device=device)
    if p in (0.0, 1.0):
        return mask.fill_(1.0 - p)
    rows, columns = random.index_factors(spec, shape, mesh, rank, device)
    rows += microbatch * math.prod(shape)
    threshold = min(round(p * 2.0**64), 2**64 - 1) - 2**63  # hashes are signed: the lowest fraction p of them is dropped
    box = mask.view(len(rows), len(columns))
    for r, c in random.blocks(len(rows), len(columns), CPU_BLOCK if mask.device.type == "cpu" else CUDA_BLOCK):
        torch.ge(random.leading_bits(key, rows[r, None] + columns[c]), threshold, out=box[r, c])
    return mask.mul_(1.0 / (1.0 - p))


def _dropout_mask(
    like: Tensor, p: float, world: str, step: int, microbatch: int, salt: int, number: int, shape: list[int], axes: str
) -> Tensor:
    spec = Spec(tuple(tuple(filter(None, dim.split("+"))) for dim in axes.split(",")) if shape else ())
    mesh, rank = Mesh(), 0
    if spec.sharded:
        here = find_world(world)
        mesh, rank = here.mesh, here.rank
    mask = keep_mask(p, random.key(salt, number, step), microbatch, spec, shape, mesh, rank, like.dtype, like.device)
    assert mask.shape == like.shape, f"dropout of a shard of shape {tuple(like.shape)}, placed as {tuple(mask.shape)}"
    return mask


def _meta(
    like: Tensor, p: float, world: str, step: int, microbatch: int, salt: int, number: int, shape: list[int], axes: str
) -> Tensor:
    return like.new_empty(like.shape)


def _no_gradient(
    like: Tensor, p: float, world: str, step: int, microbatch: int, salt: int, number: int, shape: list[int], axes: str
) -> Tensor:
    """The mask is a constant to autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        mask: Tensor = torch.ops.phx.dropout_mask(like, p, world, step, microbatch, salt, number, shape, axes)
    return mask


_library.impl("dropout_mask", _dropout_mask, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("dropout_mask", _meta, "Meta")  # type: ignore[no-untyped-call]
_library.impl("dropout_mask", _no_gradient, "Autograd")  # type: ignore[no-untyped-call]
