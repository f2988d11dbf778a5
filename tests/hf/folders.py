"""Folders of tiny random models, as save_pretrained writes them, for the tests of this room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from phalanx.train import tiny

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "phi3")


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float64, shards: str = "100KB", **changes: Any) -> Any:
    """The model of a family with random weights, those of norms and biases as well; `folder` holds it."""
    torch.manual_seed(0)
    config = tiny.config(family)
    config.update(changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=shards)
    return model.eval()


def logits(model: Any) -> Tensor:
    """On sequences that are longer than the windows of models that have them."""
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: Tensor = model.eval()(tokens).logits
    return found
