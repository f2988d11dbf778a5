"""RMS norms that compute in their input's type, in place of those that always compute in float32.

Hugging Face's RMS norms cast to float32 inside. In a float64 comparison that rounding is amplified differently on each side and
hides errors below 1e-7, so `verify` replaces them, on both sides, and says so.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CleanRMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * (offset + weight), in x's own type. Gemma's offset is 1, everybody else's 0."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normal * (self.weight + self.offset if self.offset else self.weight)


def rewrite_norms(module: nn.Module) -> list[str]:
    """Replace, in place, every RMS norm that rounds to float32; returns a note per class of norm that was or could not be."""
    replaced: dict[str, int] = {}
    odd: dict[str, int] = {}
    for path, child in list(module.named_modules()):
        kind = type(child).__name__
        if not kind.endswith("RMSNorm") or isinstance(child, CleanRMSNorm):
            continue
        twin = _twin(child)
        if twin is None:
            odd[kind] = odd.get(kind, 0) + 1
        elif twin is not child:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, twin)
            replaced[kind] = replaced.get(kind, 0) + 1
    notes = [
        f"{count} {kind} compute in float32; replaced by twins in the input's type on both sides"
        for kind, count in replaced.items()
    ]
    return notes + [f"{count} {kind} could not be rewritten and may round to float32" for kind, count in odd.items()]


def _twin(norm: nn.Module) -> nn.Module | None:
    """The norm itself if it keeps float64, its twin if that agrees to float32's rounding, None if neither."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, nn.Parameter) or not isinstance(eps, float) or weight.is_meta:
        return None
    x = torch.randn(4, weight.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stock = norm(x)
        for offset in (0.0, 1.0):
            twin = CleanRMSNorm(weight, eps, offset)
            error = (twin(x) - stock).abs().max().item() / stock.abs().max().clamp_min(1e-30).item()
            if error < 1e-13:
                return norm
            if error < 1e-5:
                return twin
    return None
