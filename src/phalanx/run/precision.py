"""The factor on the loss that keeps float16 gradients in range. The same on every rank, since NORM tells all whether a step is finite.

Only the seed of the backward is multiplied by it, so it reaches every gradient of every stage and shard; norm and update divide by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
"""The seed is float32: a scale grows no further than it holds."""


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2), with the steps and defaults of torch.amp.GradScaler.

    A step that is not finite is skipped and multiplies the scale by `backoff`; `interval` finite steps in a row by `growth`. Below
    `smallest` it does not fall: a step that is not finite even there is not the scale's fault. Powers of two change no bit of a
    gradient that neither overflows nor vanishes.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    smallest: float = 1.0
    value: float = math.nan
    """What the next step multiplies its loss by; starts as `initial`."""
    finite: int = 0
    """Finite steps in a row since the scale last changed."""
    skipped: int = 0
    """Steps that were not finite so far: the number of a step is that of the optimizer's updates and these."""

    def __post_init__(self) -> None:
        if not self.growth > 1 or not 0 < self.backoff < 1 or self.interval < 1:
            raise ValueError(
                f"loss scale: growth {self.growth} must be above 1, backoff {self.backoff} between 0 and 1, and interval "
                f"{self.interval} at least 1"
            )
        if not 0 < self.smallest <= self.initial <= LARGEST:
            raise ValueError(
                f"loss scale: initial {self.initial} must be between smallest {self.smallest}, above 0, and {LARGEST:g}"
            )
        if math.isnan(self.value):
            object.__setattr__(self, "value", float(self.initial))

    @property
    def is_smallest(self) -> bool:
        """True if a step that is not finite would not lower it."""
        return self.value <= self.smallest

    def update(self, finite: bool) -> LossScale:
        """The scale after a step; `finite` says whether its loss and gradients were."""
        if not finite:
            return replace(self, value=max(self.smallest, self.value * self.backoff), finite=0, skipped=self.skipped + 1)
        if self.finite + 1 < self.interval:
            return replace(self, finite=self.finite + 1)
        grown = self.value * self.growth
        return replace(self, value=grown if grown <= LARGEST else self.value, finite=0)

    def state_dict(self) -> dict[str, Tensor]:
        """What `loaded` continues from, under names that no parameter has."""
        return {
            "loss_scale/value": torch.tensor(self.value, dtype=torch.float64),
            "loss_scale/finite": torch.tensor(self.finite),
            "loss_scale/skipped": torch.tensor(self.skipped),
        }

    def loaded(self, state: Mapping[str, Tensor]) -> LossScale:
        """This configuration at the value that `state_dict` saved; as it is if the state is of a run without a loss scale."""
        if "loss_scale/value" not in state:
            return self
        value, finite, skipped = (state[f"loss_scale/{name}"].item() for name in ("value", "finite", "skipped"))
        return replace(self, value=float(value), finite=int(finite), skipped=int(skipped))


def scale_for(precision: str | None, wanted: LossScale | None) -> LossScale | None:
    """The loss scale of a precision: float16 needs one. Raises ValueError for one that nothing needs."""
    if wanted is not None and precision != "fp16":
        raise ValueError(f"a loss_scale is for precision='fp16'; {precision!r} has the exponents of float32 and needs none")
    return LossScale() if precision == "fp16" and wanted is None else wanted
