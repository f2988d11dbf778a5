"""A deep residual multilayer perceptron, for classification or regression. Plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Sizes of an MLP."""

    inputs: int = 32
    hidden: int = 64
    inner: int = 256
    """Width between the two projections of a block."""
    layers: int = 8
    outputs: int = 10
    """Classes, or regressed values."""
    dropout: float = 0.0


class Block(nn.Module):
    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.up_proj = nn.Linear(config.hidden, config.inner)
        self.down_proj = nn.Linear(config.inner, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (batch, hidden)
        x = x + self.dropout(self.down_proj(F.gelu(self.up_proj(self.norm(x)))))
        return x


class MLP(nn.Module):
    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        self.in_proj = nn.Linear(config.inputs, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.outputs)

    def forward(self, x: Tensor) -> Tensor:  # (batch, inputs) -> (batch, outputs)
        x = self.in_proj(x)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x))
        return result


def loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy summed over the samples whose target is not -100, and their number."""
    targets = batch["targets"]  # (batch,)
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    return F.cross_entropy(wide, targets, ignore_index=-100, reduction="sum"), (targets != -100).sum()


def squared_error(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Squared distance to the targets summed over the samples, and their number."""
    targets = batch["targets"]  # (batch, outputs)
    return (outputs - targets).square().sum(), torch.ones_like(targets[:, 0]).sum()
