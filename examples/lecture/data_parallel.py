"""Data parallelism: every rank has the whole model and a slice of the batch; one all_reduce of the gradients keeps them one model.

    python examples/lecture/data_parallel.py
    phalanx run --ranks 4 examples/lecture/data_parallel.py --processes

The local losses differ, since the samples do. The hash of the parameters is the same on every rank after every step, and the
loss is that of one process.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from launch import say, start
from mlp import MLP, batch_of, descend, one_process, squared_error, worst_error
from torch import Tensor, nn

import phalanx as phx
from phalanx import comm

MESH = phx.Mesh(dp=4)
STEPS = 3


@dataclass(frozen=True)
class Step:
    local_loss: float
    """Mean over the samples of this rank."""
    loss: float
    """Mean over the global batch."""
    hash: str
    """Of all parameters after the step."""


def train(world: phx.World, steps: int = STEPS) -> tuple[list[Step], nn.Module]:
    model = MLP()  # the same values on every rank
    seen = []
    for step in range(steps):
        mine = {key: comm.shard(value, world, "dp") for key, value in batch_of(step).items()}  # (batch/dp, width)
        model.zero_grad()
        total, count = squared_error(model(mine["x"]), mine)
        local_loss = (total / count).item()

        # Divide by the number of samples of all ranks, not of this one: mistakes/mean_of_means.py.
        count = comm.all_reduce(count, world, "dp")
        (total / count).backward()
        sum_gradients(model, world)  # before the step: mistakes/forgotten_all_reduce.py
        descend(model)

        loss = comm.all_reduce(total.detach(), world, "dp") / count  # only to print it
        seen.append(Step(local_loss, loss.item(), hash_of(model)))
    return seen, model


def sum_gradients(model: nn.Module, world: phx.World) -> None:
    """Each gradient is the sum of what the ranks hold, because the loss is the sum of what their samples give.

    All calls are issued before the first is waited for; every rank issues them in the same order.
    """
    gradients: list[Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
    handles = [world.transport.all_reduce(gradient, world.group("dp")) for gradient in gradients]
    for handle in handles:
        handle.wait()


def hash_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:12]


def lecture(world: phx.World) -> None:
    steps, model = train(world)
    truth = one_process(STEPS)
    for number, (step, expected) in enumerate(zip(steps, truth.losses, strict=True)):
        title = f"step {number}: loss {step.loss:.6f}, in one process {expected:.6f}"
        say(world, title, f"local loss {step.local_loss:.6f}   parameters {step.hash}")
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    exact = worst_error(gradients, truth.gradients) < 1e-12
    say(world, "every gradient equals that of one process to 1e-12:", str(exact))


def main() -> None:
    start(lecture, MESH)


if __name__ == "__main__":
    main()
