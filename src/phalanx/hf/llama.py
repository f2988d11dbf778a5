"""Our Llama as transformers knows it: the same modules under other names, the same numbers in the settings. Both ways."""

from __future__ import annotations

from dataclasses import replace
from shlex import quote
from typing import Any

from torch import Tensor

from phalanx.comm.world import World
from phalanx.derive.program import Parameter
from phalanx.hf.folder import Folder, differences

HEAD = "lm_head."
SAME = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "hidden_act", "attention_bias", "mlp_bias",
)  # fmt: skip
"""Settings of transformers' Llama that decide which function it is. What is left says how it is trained and used."""


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


class LlamaFolder:
    """A folder of transformers' Llama for a Llama of ours with these sizes.

    Raises ValueError, with both numbers, for a folder whose Llama would compute something else.
    """

    def __init__(self, folder: Folder, sizes: Any) -> None:
        self.folder = folder
        wrong = differences(folder.config, hf_config(sizes, 1), SAME)
        if wrong:
            raise ValueError(
                f"{folder.path} is of another model:\n  "
                + "\n  ".join(wrong)
                + f"\nto train that one: --model {quote(f'hf:{folder.path}')}"
            )

    def values(self, parameter: Parameter, world: World) -> Tensor:
        """What Folder.values says of the tensor that has our name there."""
        there = replace(parameter, name=hf_name(parameter.name), aliases=tuple(map(hf_name, parameter.aliases)))
        return self.folder.values(there, world)
