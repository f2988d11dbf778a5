"""Tensor parallelism: every rank has a slice of the width of each layer, and the activations are exchanged, forward and backward.

    python examples/lecture/tensor_parallel.py
    phalanx run --ranks 4 examples/lecture/tensor_parallel.py --processes

Twice over: first every linear is split by its outputs and each activation is gathered; then, as Megatron does, the first linear
of a block is split by its outputs (columns) and the second by its inputs (rows), so that the wide activation never travels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from launch import say, start
from mlp import MLP, batch_of, one_process, squared_error, worst_error
from torch import Tensor, nn
from torch.autograd import Function

import phalanx as phx
from phalanx import comm

MESH = phx.Mesh(tp=4)

# A collective in the forward has another one in the backward. Each pair is a function with both written out.


class Enter(Function):
    """f of Shoeybi et al. 2019, section 3: identity forward, all_reduce backward.

    Before a split linear: every rank reads the same x, but its gradient with respect to x lacks what the other slices add.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: phx.World) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return comm.all_reduce(grad, ctx.world, "tp"), None


class Leave(Function):
    """g of Shoeybi et al. 2019, section 3: all_reduce forward, identity backward. After a row-parallel linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: phx.World) -> Tensor:
        return comm.all_reduce(x, world, "tp")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Gather(Function):
    """all_gather forward, my slice backward: what reads the result is computed by every rank alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: phx.World) -> Tensor:  # (batch, width/tp) -> (batch, width)
        ctx.world = world
        return comm.all_gather(x, world, "tp", dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return comm.shard(grad, ctx.world, "tp", dim=1), None


class GatherEnter(Function):
    """Gather then Enter: all_gather forward, reduce_scatter backward (an all_reduce of which only my slice is kept)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: phx.World) -> Tensor:  # (batch, width/tp) -> (batch, width)
        ctx.world = world
        return comm.all_gather(x, world, "tp", dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return comm.reduce_scatter(grad, ctx.world, "tp", dim=1), None


Shards = dict[str, Tensor]
GATHERED = {"up.weight": 0, "up.bias": 0, "down.weight": 0, "down.bias": 0}
"""Dimension of each parameter that is split; a weight is (outputs, inputs)."""
MEGATRON = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def gathered_block(x: Tensor, mine: Shards, world: phx.World) -> Tensor:  # (batch, width)
    h = F.gelu(F.linear(Enter.apply(x, world), mine["up.weight"], mine["up.bias"]))  # (batch, 4 width/tp)
    h = GatherEnter.apply(h, world)  # (batch, 4 width)
    y = F.linear(h, mine["down.weight"], mine["down.bias"])  # (batch, width/tp)
    return x + Gather.apply(y, world)


def megatron_block(x: Tensor, mine: Shards, world: phx.World) -> Tensor:  # (batch, width)
    h = F.gelu(F.linear(Enter.apply(x, world), mine["up.weight"], mine["up.bias"]))  # (batch, 4 width/tp)
    y = F.linear(h, mine["down.weight"])  # (batch, width), a part of the sum
    return x + (Leave.apply(y, world) + mine["down.bias"])  # once, after the sum: mistakes/bias_counted_twice.py


def shards(layer: nn.Module, split: dict[str, int], world: phx.World) -> Shards:
    """My slices of a layer; a parameter that is not split is whole on every rank."""
    whole = {name: p.detach() for name, p in layer.named_parameters()}
    mine = {name: comm.shard(p, world, "tp", split[name]) if name in split else p for name, p in whole.items()}
    return {name: p.requires_grad_() for name, p in mine.items()}


@dataclass(frozen=True)
class Result:
    loss: float
    gradients: dict[str, Tensor]
    """Joined to global tensors."""
    traffic: dict[tuple[str, str], tuple[int, int]]
    """(axis, collective) to (calls, bytes) of one forward and backward of this rank."""


def step(world: phx.World, block: Callable[..., Tensor], split: dict[str, int]) -> Result:
    layers = [shards(layer, split, world) for layer in MLP().layers]
    batch = batch_of(0)  # every rank of a tensor-parallel group has the same samples
    with world.ledger.recording():
        x = batch["x"]
        for mine in layers:
            x = block(x, mine, world)
        total, count = squared_error(x, batch)
        (total / count).backward()
        traffic = world.ledger.totals()
    gradients = {}
    for number, mine in enumerate(layers):
        for name, p in mine.items():
            assert p.grad is not None
            gradients[f"layers.{number}.{name}"] = (
                comm.all_gather(p.grad, world, "tp", split[name]) if name in split else p.grad
            )
    return Result((total / count).item(), gradients, traffic)


def lecture(world: phx.World) -> None:
    truth = one_process()
    for title, block, split in (("gathered", gathered_block, GATHERED), ("Megatron", megatron_block, MEGATRON)):
        result = step(world, block, split)
        calls = ", ".join(f"{calls} {op} {bytes:,} bytes" for (_, op), (calls, bytes) in sorted(result.traffic.items()))
        exact = worst_error(result.gradients, truth.gradients) < 1e-12
        heading = f"{title}: loss {result.loss:.6f}, in one process {truth.losses[0]:.6f}"
        say(world, heading, f"gradients equal to 1e-12: {exact}   {calls}")


def main() -> None:
    start(lecture, MESH)


if __name__ == "__main__":
    main()
