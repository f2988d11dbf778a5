"""The model, the data and the truth of every lecture: a deep MLP in plain PyTorch, trained by one process in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, DEPTH, BATCH, LR = 16, 8, 32, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, width)
        y: Tensor = self.down(F.gelu(self.up(x)))
        return x + y


class MLP(nn.Module):
    """Its values come from a generator of their own, so that every rank that builds it has the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.1, generator=generator)

    def forward(self, x: Tensor) -> Tensor:  # (batch, width) -> (batch, width)
        for layer in self.layers:
            x = layer(x)
        return x


def batch_of(step: int) -> dict[str, Tensor]:
    """The global batch of a step, the same for whoever asks."""
    generator = torch.Generator().manual_seed(1 + step)
    x, targets = torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=generator).unbind(0)
    return {"x": x.contiguous(), "targets": targets.contiguous()}


def squared_error(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum over the samples, and their number: what can be added up over ranks, which a mean cannot."""
    targets = batch["targets"]
    return (outputs - targets).square().sum(), torch.ones_like(targets[:, 0]).sum()


@dataclass(frozen=True)
class Truth:
    losses: list[float]
    gradients: dict[str, Tensor]
    """Of the last step."""
    weights: dict[str, Tensor]
    """After the last step."""


def one_process(steps: int = 1) -> Truth:
    """What every strategy must compute."""
    model, losses = MLP(), []
    for step in range(steps):
        model.zero_grad()
        total, count = squared_error(model(batch_of(step)["x"]), batch_of(step))
        (total / count).backward()
        losses.append((total / count).item())
        descend(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Truth(losses, gradients, {name: p.detach() for name, p in model.named_parameters()})


@torch.no_grad()
def descend(model: nn.Module) -> None:
    """One step of gradient descent."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.sub_(LR * parameter.grad)


def worst_error(mine: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """max |a - b| / max |b| over all the tensors that I have."""
    return max(float((mine[name] - truth[name]).abs().max() / truth[name].abs().max()) for name in mine)
