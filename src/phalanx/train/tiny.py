"""Tiny random Hugging Face models: any causal language model of transformers, small enough to verify in a second.

Sizes divide over small meshes, dropout is off, the vocabulary holds all bytes. Only the sizes are ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from phalanx.train.config import closest

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    # Shorter than the default sequence, so that a window that is ignored shows.
    "sliding_window": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "use_cache": False,
}
"""Of every family that has a setting of this name (gpt2's n_embd and the like have these names too)."""

OF_FAMILY: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": 128},
    "gemma2": {"query_pre_attn_scalar": 16},
    # Both kinds of its layers, which alternate 5 to 1.
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def config(family: str) -> Any:
    """A transformers configuration of `family`, for example llama, qwen3, gpt2 or mistral. ValueError if there is none."""
    try:
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as families
    except ImportError:
        raise ValueError(f"hf-tiny:{family} needs transformers: pip install 'phalanx[hf]'") from None
    family = family.replace("-", "_")
    if family not in families:
        raise ValueError(f"transformers has no causal language model {family!r}; {_closest_family(family, list(families))}")
    stock = AutoConfig.for_model(family)
    # sliding_window=None says that a family has the setting but this model no window.
    known = {
        name: size
        for name, size in SIZES.items()
        if hasattr(stock, name) and (name != "sliding_window" or stock.sliding_window)
    }
    dropout = {name: 0.0 for name in stock.to_dict() if "drop" in name and isinstance(getattr(stock, name), float)}
    return AutoConfig.for_model(family, **known, **dropout, **OF_FAMILY.get(family, {}))


def build(family: str, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    module: nn.Module = AutoModelForCausalLM.from_config(config(family), dtype=dtype)  # type: ignore[no-untyped-call]
    return module.train()


def _closest_family(family: str, families: list[str]) -> str:
    listed = closest(family, families)
    mark = "(did you mean"
    return f"did you mean{listed.split(mark)[1].rstrip(')')}" if mark in listed else "for example llama, qwen3, gpt2, mistral"
