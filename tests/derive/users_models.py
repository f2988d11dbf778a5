"""Models as people write them, with a batch, a loss and names for each, and what one process computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.derive import capture
from phalanx.derive.program import Captured
from phalanx.mesh import Mesh

from .parity import one_process, values

B, S, D, H, V = 4, 8, 16, 4, 32
Batch = Mapping[str, Tensor]
Loss = Callable[[Any, Batch], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Model:
    """A module, a batch for it, its loss, and names for tensor parallelism (`layout` places batch over dp besides)."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    loss: Loss
    names: dict[str, str] = field(default_factory=dict)
    layout: dict[str, str] = field(default_factory=dict)
    pipelines: bool = False
    """It has blocks to cut at."""


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def sequence() -> dict[str, Tensor]:
    return {"x": floats(B, S, D), "y": floats(B, S, D)}


def tokens() -> dict[str, Tensor]:
    labels = torch.randint(V, (B, S))
    labels[0, :3] = -100
    return {"tokens": torch.randint(V, (B, S)), "labels": labels}


def images() -> dict[str, Tensor]:
    return {"x": floats(B, 3, 8, 8), "labels": torch.randint(8, (B,))}


def square(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return ((outputs - batch["y"]) ** 2).sum(), torch.ones_like(batch["y"][:, 0, 0]).sum()


def cross_entropy(outputs: Tensor, batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    summed = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="sum", **options)
    return summed, (labels != -100).sum()


def smoothed(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return cross_entropy(outputs, batch, label_smoothing=0.1)


def weighted(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return cross_entropy(outputs, batch, weight=torch.linspace(0.5, 2, V, dtype=torch.float64))


def with_z_loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    summed, count = cross_entropy(outputs, batch)
    z = outputs.logsumexp(-1)
    return summed + 1e-2 * (z**2 * (batch["labels"] != -100)).sum(), count


def log_probability(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    picked = outputs.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    valid = labels != -100
    return -(picked * valid).sum(), valid.sum()


def binary(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    target = (batch["y"] > 0).to(outputs.dtype)
    positive = torch.linspace(1, 2, D, dtype=torch.float64)
    summed = F.binary_cross_entropy_with_logits(outputs, target, pos_weight=positive, reduction="sum")
    return summed, torch.ones_like(batch["y"]).sum()


def mse(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return F.mse_loss(outputs, batch["y"], reduction="sum"), torch.ones_like(batch["y"]).sum()


# Multi-layer perceptrons


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Gated(nn.Module):
    """gate and up in one projection, taken apart by chunk or by slices."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate_up = nn.Linear(D, 8 * D, bias=False)
        self.down = nn.Linear(4 * D, D, bias=False)
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate_up(F.rms_norm(x, (D,), self.scale))
        gate, up = y.chunk(2, -1) if self.how == "chunk" else (y[..., : 4 * D], y[..., 4 * D :])
        return x + self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """A soft mixture of dense experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.up = nn.Parameter(torch.randn(4, D, 2 * D) / 4)
        self.down = nn.Parameter(torch.randn(4, 2 * D, D) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        hidden = F.gelu(torch.einsum("bsd,edf->bsef", x, self.up))
        return x + torch.einsum("bsef,efd,bse->bsd", hidden, self.down, weights)


class TopExperts(Experts):
    """Only the best two of the experts count, which a scatter marks."""

    def forward(self, x: Tensor) -> Tensor:
        best, places = self.router(x).topk(2, -1)
        weights = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype).scatter(-1, places, best.softmax(-1))
        hidden = F.gelu(torch.einsum("...d,edf->...ef", x, self.up))
        return x + (torch.einsum("...ef,efd->...ed", hidden, self.down) * weights[..., None]).sum(-2)


# Attention


class Attention(nn.Module):
    """As many ways to write it as people have: how queries, keys and values are made, and how they are used."""

    def __init__(self, qkv: str = "split", core: str = "sdpa", rotary: str = "", kv_heads: int = H) -> None:
        super().__init__()
        self.qkv, self.core, self.rotary, self.kv_heads = qkv, core, rotary, kv_heads
        width = D // H
        if qkv == "separate":
            self.q, self.k, self.v = (nn.Linear(D, n * width, bias=False) for n in (H, kv_heads, kv_heads))
        else:
            self.in_proj = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        if core == "alibi":
            self.register_buffer("slopes", 2.0 ** -torch.arange(1, H + 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        width = D // H
        if self.qkv == "separate":
            q, k, v = (p(x).view(b, s, -1, width).transpose(1, 2) for p in (self.q, self.k, self.v))
        elif self.qkv == "split":
            q, k, v = (y.view(b, s, H, width).transpose(1, 2) for y in self.in_proj(x).split(D, dim=2))
        elif self.qkv == "unbind":
            q, k, v = self.in_proj(x).view(b, s, 3, H, width).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            fused = self.in_proj(x).reshape(b, s, 3, H, width)
            q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
        if self.rotary:
            q, k = (rotate(y, self.rotary) for y in (q, k))
        if self.kv_heads != H and self.core == "repeat":
            k, v = (y.repeat_interleave(H // self.kv_heads, dim=1) for y in (k, v))
        if self.kv_heads != H and self.core == "expand":
            k, v = (
                y[:, :, None].expand(b, self.kv_heads, H // self.kv_heads, s, width).reshape(b, H, s, width) for y in (k, v)
            )
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, s, D))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, scale = q.shape[-2], 1 / math.sqrt(q.shape[-1])
        hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
        if self.core == "matmul":
            scores = (q @ k.transpose(-2, -1) * scale).masked_fill(hidden, float("-inf"))
            return scores.softmax(-1) @ v
        if self.core == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale + torch.where(hidden, -1e9, 0.0)
            return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
        if self.core == "alibi":
            distance = (torch.arange(s)[None] - torch.arange(s)[:, None]).to(q.dtype)
            scores = q @ k.mT * scale + self.slopes[:, None, None] * distance
            return torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), dim=-1) @ v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.core == "gqa")


def rotate(x: Tensor, how: str) -> Tensor:
    s, width = x.shape[-2:]
    frequency = 1.0 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(s, dtype=torch.float64), frequency)
    if how == "complex":
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(turned).flatten(3)
    cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Parallel(nn.Module):
    """Attention and MLP read the same normalised value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.mlp(y)


class Torch(nn.Module):
    """nn.MultiheadAttention."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.attention = nn.MultiheadAttention(D, H, batch_first=mask != "time first")

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        if self.mask == "time first":
            return self.attention(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1), need_weights=False)[0].transpose(
                0, 1
            )
        if self.mask == "causal":
            hidden = nn.Transformer.generate_square_subsequent_mask(S, dtype=x.dtype)
            return self.attention(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]
        if self.mask == "padding":
            return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        y, weights = self.attention(x, x, x)
        return y + weights.sum(-1, keepdim=True)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


def padded() -> dict[str, Tensor]:
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1, 5:] = padding[3, 2:] = True
    return {**sequence(), "padding": padding}


# Language models


class Block(nn.Module):
    def __init__(self, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attention = attention or Attention("unbind")
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(self.norm(x)))


class NanoGPT(nn.Module):
    """Learned positions, token types, tied head."""

    def __init__(self, tied: bool = True, frozen: bool = False, blocks: int = 3, **attention: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.position = nn.Embedding(S, D)
        self.types = nn.Embedding(2, D, padding_idx=0)
        self.blocks = nn.ModuleList(Block(Attention(**attention)) for _ in range(blocks))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.position.requires_grad_(False)
            self.blocks[0].requires_grad_(False)
            self.blocks[1].mlp.up.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1])) + self.types((tokens > V // 2).long())
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Auxiliary(NanoGPT):
    """Every block's output feeds a loss of its own."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.embed(tokens)
        extra = torch.zeros((), dtype=x.dtype)
        for block in self.blocks:
            x = block(x)
            extra = extra + (x.square().mean(-1)).sum()
        return self.head(self.norm(x)), extra


def with_auxiliary(outputs: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    summed, count = cross_entropy(outputs[0], batch)
    return summed + 0.1 * outputs[1], count


class Skips(nn.Module):
    """What goes down comes up again: values that pass through several cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(4))
        self.joins = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        y = self.joins[0](torch.cat([self.blocks[2](second), second], -1))
        return self.joins[1](torch.cat([self.blocks[3](y), first], -1))


class TwoInputs(nn.Module):
    """A text tower reads an image vector, with cross attention over both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.mix = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        a, b = self.left(x), self.right(other)
        return self.mix(a, b, b, need_weights=False)[0] + F.cosine_similarity(a.mean(1), b.mean(1), dim=-1)[:, None, None]


# Images


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.Conv2d(8, 16, 1)
        self.down = nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        x = x + self.down(F.gelu(self.up(self.depth(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.leave = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.silu(self.enter(x))
        low = F.silu(self.down(high))
        wide = F.interpolate(self.down(high), scale_factor=2, mode="nearest")[:, :8]
        return self.leave(torch.cat([self.up(low) + wide, high], 1)).mean((2, 3))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, D, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, D))
        self.position = nn.Parameter(torch.randn(1, 5, D))
        self.blocks = nn.ModuleList(Block(Attention("split", "matmul")) for _ in range(2))
        self.head = nn.Linear(D, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Windows(nn.Module):
    """Shifted windows, as Swin has them, with a table of relative positions that is read by index."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention("split", "matmul")
        self.table = nn.Parameter(torch.randn(2 * S - 1, D))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        distance = torch.arange(s)[:, None] - torch.arange(s)[None] + s - 1
        x = x + self.table[distance].mean(1)
        shifted = torch.roll(x, 2, dims=1).view(b, 2, s // 2, d).flatten(0, 1)
        return torch.roll(self.attention(shifted).view(b, s, d), -2, dims=1)


HEADS = {"*attention.in_proj.weight": "heads embed", "*attention.in_proj.bias": "heads", "*attention.out.weight": "embed heads"}
WIDE = {"*up.weight": "mlp embed", "*up.bias": "mlp", "*down.weight": "embed mlp"}
MODEL = {**HEADS, **WIDE, "embed.weight": "vocab embed"}
MODEL_LAYOUT = {"heads": "tp", "mlp": "tp", "vocab": "tp"}
SEPARATE = {"q.weight": "heads embed", "k.weight": "kv_heads embed", "v.weight": "kv_heads embed", "out.weight": "embed heads"}
TORCH = {"*in_proj_weight": "heads embed", "*in_proj_bias": "heads", "*out_proj.weight": "embed heads"}


def alone(names: dict[str, str]) -> dict[str, str]:
    """For a model that is one attention."""
    return {pattern.replace("*attention.", ""): dims for pattern, dims in names.items()}


def attention(*how: Any, **options: Any) -> Model:
    return Model(lambda: Attention(*how, **options), sequence, square, alone(HEADS), {"heads": "tp"})


def grouped(core: str, kv_heads: int, rotary: str = "") -> Model:
    return Model(lambda: Attention("separate", core, rotary, kv_heads), sequence, square, SEPARATE, {"heads": "tp"})


def gpt(loss: Loss = cross_entropy, **options: Any) -> Model:
    return Model(lambda: NanoGPT(**options), tokens, loss, MODEL, MODEL_LAYOUT, pipelines=True)


EXPERTS = {"up": "expert embed mlp", "down": "expert mlp embed"}
MODELS: dict[str, Model] = {
    "mlp": Model(MLP, sequence, square, WIDE, {"mlp": "tp"}),
    "mlp, mse": Model(MLP, sequence, mse, WIDE, {"mlp": "tp"}),
    "mlp, bce": Model(MLP, sequence, binary, WIDE, {"mlp": "tp"}),
    **{
        f"gate_up by {how}": Model(
            lambda how=how: Gated(how), sequence, square, {"gate_up.weight": "mlp embed", "down.weight": "embed mlp"}, {"mlp": "tp"}
        )
        for how in ("chunk", "slices")
    },
    "experts, split inside": Model(Experts, sequence, square, EXPERTS, {"mlp": "tp"}),
    "experts, split among ranks": Model(Experts, sequence, square, EXPERTS, {"expert": "tp"}),
    "top experts": Model(TopExperts, sequence, square, EXPERTS, {"expert": "tp"}),
    **{f"qkv by {how}": attention(how) for how in ("split", "unbind", "select")},
    **{f"attention by {core}": attention("unbind", core) for core in ("matmul", "einsum", "alibi")},
    "rotary by complex numbers": attention("split", "sdpa", "complex"),
    "rotary by halves": attention("unbind", "matmul", "halves"),
    **{f"grouped by {core}, {n} kv heads": grouped(core, n) for core in ("repeat", "expand", "gqa") for n in (2, 1)},
    "grouped, complex rotary": grouped("gqa", 1, "complex"),
    "parallel": Model(
        Parallel, sequence, square, {**HEADS, "mlp.0.weight": "mlp embed", "mlp.0.bias": "mlp", "mlp.2.weight": "embed mlp"},
        {"heads": "tp", "mlp": "tp"},
    ),
    **{
        f"nn.MultiheadAttention, {mask}": Model(lambda mask=mask: Torch(mask), padded, square, TORCH, {"heads": "tp"})
        for mask in ("self", "causal", "padding", "time first")
    },
    "nn.TransformerEncoder": Model(
        Encoder, padded, square,
        {**TORCH, "*linear1.weight": "mlp embed", "*linear1.bias": "mlp", "*linear2.weight": "embed mlp"},
        {"heads": "tp", "mlp": "tp"}, pipelines=True,
    ),
    "gpt": gpt(),
    "gpt, untied": gpt(tied=False),
    "gpt, frozen": gpt(frozen=True),
    "gpt, smoothed": gpt(smoothed),
    "gpt, class weights": gpt(weighted),
    "gpt, z-loss": gpt(with_z_loss),
    "gpt, gathered log probabilities": gpt(log_probability),
    "gpt, auxiliary losses": Model(Auxiliary, tokens, with_auxiliary, MODEL, MODEL_LAYOUT, pipelines=True),
    "skips": Model(Skips, sequence, square, {"blocks." + k: v for k, v in WIDE.items()}, {"mlp": "tp"}, pipelines=True),
    "two inputs": Model(TwoInputs, lambda: {**sequence(), "other": floats(B, 4, D)}, square, TORCH, {"heads": "tp"}),
    "convolutions": Model(
        ConvNet, images, cross_entropy,
        {"up.weight": "mlp in h w", "up.bias": "mlp", "down.weight": "out mlp h w"}, {"mlp": "tp"},
    ),
    "u-net": Model(UNet, images, cross_entropy, {"enter.weight": "wide in h w", "enter.bias": "wide"}, {"wide": "tp"}),
    "vit": Model(ViT, images, cross_entropy, {**HEADS, **WIDE}, {"heads": "tp", "mlp": "tp"}, pipelines=True),
    "shifted windows": Model(Windows, sequence, square, HEADS, {"heads": "tp"}),
}  # fmt: skip


class Prepared:
    """A model with values, captured, and what one process computes, eagerly."""

    def __init__(self, model: Model) -> None:
        torch.manual_seed(0)
        self.model = model
        self.module = model.make().double()
        self.batch = model.batch()
        self.captured: Captured = capture(self.module, self.batch, model.loss)
        self.params, self.buffers = values(self.module, self.captured)
        self.reference = one_process(self.captured, self.params, self.buffers, self.batch)
        self.module.zero_grad()
        inputs = {k: v for k, v in self.batch.items() if k not in ("y", "labels")}
        total, _ = model.loss(self.module(**inputs), self.batch)
        total.backward()
        eager = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in self.module.named_parameters()}
        captured = self.reference.grads
        self.eager = {name: float((captured[name] - eager[name]).abs().max()) for name in captured}

    def layout(self, mesh: Mesh) -> dict[str, str]:
        return {name: axis for name, axis in {"batch": "dp", **self.model.layout}.items() if axis in mesh.names}
