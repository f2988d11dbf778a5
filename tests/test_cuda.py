"""On a GPU: the same numbers as on the CPU, through streams, events and NCCL. Skipped where there is none."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from torch import Tensor

import phalanx as phx
from phalanx.models.llama import Llama, LlamaConfig, loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = LlamaConfig(vocab=64, hidden=64, inner=96, layers=3, heads=4, kv_heads=2)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randint(0, 64, (8, 32), generator=generator) for key in ("tokens", "targets")}


def three_steps(world: phx.World, microbatches: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Llama(CONFIG).double().to(world.device)
    step = phx.parallelize(
        model, world, example=batch(), loss=loss, optimizer=phx.adamw(lr=1e-2), microbatches=microbatches, max_norm=1.0
    )
    outs = [step(batch()) for _ in range(3)]
    return [(out.loss, out.grad_norm) for out in outs], {name: x.cpu() for name, x in step.state_dict().items()}


def assert_equal_to_cpu(found: tuple[list[tuple[float, float]], dict[str, Tensor]]) -> None:
    """float64 in other kernels' order of summation, over three AdamW steps."""
    with phx.init(phx.Mesh(), device="cpu") as world:
        rows, weights = three_steps(world, 1)
    for mine, theirs in zip(found[0], rows, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10)
    for name, x in weights.items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_gpu_trains_like_the_cpu(microbatches: int) -> None:
    with phx.init(phx.Mesh(), device="cuda") as world:
        assert_equal_to_cpu(three_steps(world, microbatches))


def test_a_group_of_one_over_nccl_trains_like_the_cpu() -> None:
    """As torchrun would start it with one rank: communicators, lanes and events exist, though no other rank does."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    with mock.patch.dict(os.environ, alone), phx.init(phx.Mesh(dp=1), device="cuda") as world:
        assert_equal_to_cpu(three_steps(world, 2))
