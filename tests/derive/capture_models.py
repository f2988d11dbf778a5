"""Small models that tests capture: plain PyTorch, one per thing that capture must see."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = self.qkv_proj(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, seq, dim))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp_norm = nn.RMSNorm(dim)
        self.up_proj = nn.Linear(dim, 2 * dim)
        self.down_proj = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), cos, sin)
        return x + self.dropout(self.down_proj(F.silu(self.up_proj(self.mlp_norm(x)), inplace=True)))


class Decoder(nn.Module):
    """Llama in small: rotary tables, repeated blocks, tied embedding."""

    def __init__(self, vocab: int = 20, dim: int = 16, heads: int = 2, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tok.weight
        self.register_buffer("inv_freq", 10.0 ** -torch.arange(0, dim // heads, 2).div(dim // heads), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos(), angles.sin()
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def decoder_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def tokens_and_labels(batch: int = 4, seq: int = 6, vocab: int = 20) -> dict[str, Tensor]:
    labels = torch.randint(vocab, (batch, seq))
    labels[0, :2] = -100
    return {"tokens": torch.randint(vocab, (batch, seq)), "labels": labels}


def square_loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return (outputs - batch["y"]).square().sum(), torch.ones_like(batch["y"][:, 0]).sum()


class Apply(nn.Module):
    """A linear layer followed by any function of (activation, the module): the place to put something odd."""

    def __init__(self, function: object, dim: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.register_buffer("scale", torch.full((dim,), 2.0))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), self)  # type: ignore[operator, no-any-return]


def x_and_y(batch: int = 4, dim: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, dim, dtype=torch.float64), "y": torch.randn(batch, dim, dtype=torch.float64)}
