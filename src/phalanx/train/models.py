"""The models that the command line knows by name: how each is built, what names its dimensions, and what a batch looks like.

A table, not a framework: your own model needs none of this, only `phx.parallelize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import rules
from phalanx.models import llama, mlp
from phalanx.train.config import closest

Loss = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that can be trained by name."""

    name: str
    factory: Callable[[], nn.Module]
    """Builds it, in the dtype that was asked for."""
    names: Mapping[str, str]
    """Names of the dimensions of parameters, outputs and inputs."""
    loss: Loss
    example: Callable[[int, int, int], dict[str, Tensor]]
    """(batch, seq, seed) to a random global batch."""
    batch: int
    seq: int
    """Default sizes of a step."""
    token_key: str | None
    """The entry of a batch that takes tokens, or None for a model that is not a language model; targets are under "targets"."""

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Every dimension name that the names table uses."""
        return tuple(dict.fromkeys(word for names in self.names.values() for word in names.split()))
