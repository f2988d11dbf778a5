"""The arithmetic of a reduction, for transports that add up themselves: one fixed order, so all ranks get the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reduced(terms: Sequence[Tensor], op: str | None) -> Tensor:
    """The reduction of the terms in their order, as a new tensor; half precision is accumulated in float32 and may stay so."""
    half = terms[0].dtype in (torch.float16, torch.bfloat16)
    total = terms[0].to(torch.float32) if half else terms[0].clone()
    for term in terms[1:]:
        if op in ("sum", "mean"):
            total += term
        elif op == "max":
            torch.maximum(total, term.to(total.dtype), out=total)
        else:
            torch.minimum(total, term.to(total.dtype), out=total)
    if op == "mean":
        total /= len(terms)
    return total
