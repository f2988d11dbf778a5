"""The dropout mask of a shard is the shard of the dropout mask, whatever the mesh and the number of microbatches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from phalanx import random
from phalanx.comm.local import local
from phalanx.comm.world import World
from phalanx.derive.ops.dropout import keep_mask
from phalanx.mesh import Mesh
from phalanx.spec import Spec, unshard

SHAPE = (8, 6, 4)
LAYOUTS = [
    (Mesh(dp=2), Spec((("dp",), (), ()))),
    (Mesh(dp=2, tp=2), Spec((("dp",), ("tp",), ()))),
    (Mesh(tp=2, dp=2), Spec((("dp", "tp"), (), ()))),
    (Mesh(dp=2, cp=3, tp=2), Spec((("dp",), ("cp",), ("tp",)))),
    (Mesh(tp=3), Spec(((), ("tp",), ()))),
    (Mesh(dp=2), Spec(((), (), ()))),
]


def whole_mask(p: float, step: int, microbatch: int, salt: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    key = random.key(salt, 1, step)
    return keep_mask(p, key, microbatch, Spec.replicated(len(shape)), shape, Mesh(), 0, torch.float64)


@pytest.mark.parametrize(("mesh", "spec"), LAYOUTS, ids=str)
def test_mask_does_not_depend_on_the_layout(mesh: Mesh, spec: Spec) -> None:
    axes = ",".join("+".join(dim) for dim in spec.dims)

    def body(world: World) -> Tensor:
        like = torch.empty(spec.local_shape(SHAPE, mesh), dtype=torch.float64)
        return torch.ops.phx.dropout_mask(like, 0.3, world.name, 5, 2, 11, 1, list(SHAPE), axes)

    world = local(mesh)
    shards = world.run(body)
    world.close()
    assert torch.equal(unshard(shards, spec, mesh), whole_mask(0.3, 5, 2, 11))


def test_mask_does_not_depend_on_the_number_of_microbatches() -> None:
    batch = whole_mask(0.3, 5, 0, 11)
    for count in (2, 4, 8):
        shape = (SHAPE[0] // count, *SHAPE[1:])
        assert torch.equal(torch.cat([whole_mask(0.3, 5, j, 11, shape) for j in range(count)]), batch)


def test_mask_changes_with_step_salt_and_microbatch() -> None:
    masks = [whole_mask(0.5, *run, shape=(64, 64)) for run in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            agreement = (a == b).double().mean().item()
            # independent fair coins agree half the time; 5 standard errors
            assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(64 * 64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_scale_and_dtype(p: float, dtype: torch.dtype) -> None:
    n = 1 << 17
    mask = keep_mask(p, random.key(3), 0, Spec.replicated(2), (512, n // 512), Mesh(), 0, dtype)
    assert mask.dtype == dtype
    kept = torch.tensor(1 / (1 - p), dtype=dtype)
    assert set(mask.unique().tolist()) == {0.0, kept.item()}
    assert abs((mask == 0).double().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_extreme_probabilities() -> None:
    for p, value in ((0.0, 1.0), (1.0, 0.0)):
        mask = keep_mask(p, 1, 0, Spec.replicated(1), (100,), Mesh(), 0, torch.float32)
        assert (mask == value).all()
    with pytest.raises(ValueError, match=r"1\.5"):
        keep_mask(1.5, 1, 0, Spec.replicated(1), (100,), Mesh(), 0, torch.float32)


def test_long_rows_are_hashed_in_blocks_without_a_seam() -> None:
    """More than one block along rows and columns: each element equals the mask of its own index."""
    shape = (3, 40000)
    mask = keep_mask(0.5, 7, 0, Spec.replicated(2), shape, Mesh(), 0, torch.float32)
    drops = random.leading_bits(7, torch.arange(3 * 40000)) < 0
    assert torch.equal(mask.reshape(-1) == 0, drops)


def test_traced_forward_and_backward_hold_the_mask_as_a_node() -> None:
    """Shapes need no world; autograd takes the mask as a constant; eager gradients are exactly the mask."""
    arguments = (0.4, "one", 1, 0, 9, 1, [4, 6], ",")

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * torch.ops.phx.dropout_mask(x, *arguments)
        return y, torch.autograd.grad(y.sum(), x)[0]

    fake = make_fx(step, tracing_mode="fake")(torch.ones(4, 6, requires_grad=True))
    assert sum(node.target is torch.ops.phx.dropout_mask.default for node in fake.graph.nodes) == 1
    meta = torch.ops.phx.dropout_mask(torch.empty(4, 6, device="meta", requires_grad=True), *arguments)
    assert (meta.is_meta, tuple(meta.shape), meta.requires_grad) == (True, (4, 6), False)
    x = torch.ones(4, 6, requires_grad=True)
    y, gradient = step(x)
    assert torch.equal(y, gradient)
    assert {0.0} < set(gradient.tolist()[0] + gradient.tolist()[1])
    assert all(torch.equal(a, b) for a, b in zip(fake(x), (y, gradient), strict=True))
