"""Llama: a decoder-only transformer with RMSNorm, rotary positions, grouped-query attention and SwiGLU. Plain PyTorch.

Modules have Hugging Face's names, so its checkpoints and one table of dimension names serve both. Positions are plain rotary;
the rescaling by which Llama 3.1 and later stretch their context is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama."""

    vocab: int = 256
    hidden: int = 128
    inner: int = 512
    """Width of the SwiGLU."""
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    theta: float = 10000.0
    """Base of the rotary frequencies."""
    eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied: bool = False
    """Whether the output projection is the embedding."""
    dropout: float = 0.0
    """On what attention and SwiGLU add to the residual stream."""

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(f"hidden {self.hidden} over {self.heads} heads is not an even whole width")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads do not divide over {self.kv_heads} key and value heads")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> LlamaConfig:
        """A size by name: tiny (bytes, 1M parameters), 1b, 8b or 70b."""
        if name not in PRESETS:
            raise ValueError(f"there is no Llama {name!r}; choose one of {', '.join(PRESETS)}")
        return replace(PRESETS[name], **changes)


# Meta's published configurations of Llama 3.2 1B, Llama 3 8B and Llama 3 70B.
PRESETS = {
    "tiny": LlamaConfig(),
    "1b": LlamaConfig(vocab=128256, hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, theta=500000.0, tied=True),
    "8b": LlamaConfig(vocab=128256, hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, theta=500000.0),
    "70b": LlamaConfig(vocab=128256, hidden=8192, inner=28672, layers=80, heads=64, kv_heads=8, theta=500000.0),
}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary_table(seq: int, width: int, theta: float, like: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines (seq, width) of the angles of Su et al. 2021, section 3.4, each angle in both halves of the width.

    positions  (*, seq) integers, for tables (*, seq, width) of the dtype of `like`; left out: 0 to seq - 1
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    frequency = theta ** (-torch.arange(0, width, 2, device=like.device, dtype=wide) / width)  # (width / 2,)
    places = torch.arange(seq, device=like.device, dtype=wide) if positions is None else positions.to(wide)
    angle = places[..., None] * frequency  # (*, seq, width / 2)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def document_mask(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores so that a token sees those before it in its own document: 0, or -inf for all others.

    positions (batch, seq) are those inside documents, 0 where one begins; the mask is (batch, 1, seq, seq). Additive and of the
    scores' dtype: attention would make such a copy of a boolean mask in every layer and keep it for the backward.
    """
    seq = positions.shape[1]
    document = (positions == 0).cumsum(-1)  # (batch, seq)
    same = document[:, :, None] == document[:, None, :]  # (batch, seq, seq)
    causal = torch.ones(seq, seq, dtype=torch.bool, device=positions.device).tril()
    seen = torch.zeros((), dtype=dtype, device=positions.device)
    return torch.where(same & causal, seen, -math.inf)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + width/2) of x (batch, heads, seq, width) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.width = config.hidden // config.heads
        self.q_proj = nn.Linear(config.hidden, config.heads * self.width, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(config.heads * self.width, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:  # x (batch, seq, hidden)
        q, k, v = (
            project(x).unflatten(-1, (-1, self.width)).transpose(1, 2)  # (batch, heads, seq, width)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        result: Tensor = self.o_proj(y.transpose(1, 2).flatten(-2))
        return result


class SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.inner, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.inner, bias=False)
        self.down_proj = nn.Linear(config.inner, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin, mask))
        x = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return x


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal of deviation 0.02, over sqrt(2 layers) in residual projections (Radford et al. 2019, section 2.3)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.layers) if adds else 0.02)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits (batch, seq, vocab) of tokens (batch, seq).

        positions (batch, seq), integers, are those inside documents, 0 where one begins: several documents in a row do not see one
        another. Without them a row is one document.
        """
        x = self.embed_tokens(tokens)
        width = self.config.hidden // self.config.heads
        every_head = None if positions is None else positions[:, None]  # (batch, 1, seq)
        cos, sin = rotary_table(tokens.shape[1], width, self.config.theta, x, every_head)
        mask = None if positions is None else document_mask(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy summed over the tokens whose target is not -100, and their number."""
    targets = batch["targets"]  # (batch, seq)
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()
