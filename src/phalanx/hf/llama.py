"""Our Llama as transformers knows it: the same modules under other names, the same numbers in the settings."""

from __future__ import annotations

from typing import Any

HEAD = "lm_head."


def hf_config(sizes: Any, positions: int) -> Any:
    """The transformers configuration of a model with these sizes (vocab, hidden, inner, layers, heads, kv_heads, theta, eps, tied).

    positions   the longest sequence it was trained on
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        rms_norm_eps=sizes.eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.theta},
        tie_word_embeddings=sizes.tied,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
    )


def hf_name(name: str) -> str:
    """embed_tokens.weight is model.embed_tokens.weight there; the head alone is outside of `model`."""
    return name if name.startswith(HEAD) else f"model.{name}"
