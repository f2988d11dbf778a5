"""Names of dimensions, a table per model family. Data, and the one function that picks a table for a model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from phalanx.rules import gpt2, gpt_neox, llama, mlp, phi3

TABLES = {
    "Llama": llama,
    "Mistral": llama,
    "Ministral": llama,
    "Qwen2": llama,
    "Qwen3": llama,
    "Gemma": llama,
    "Gemma2": llama,
    "Gemma3": llama,
    "SmolLM3": llama,
    "Phi3": phi3,
    "GPT2": gpt2,
    "GPTNeoX": gpt_neox,
    "MLP": mlp,
}
"""By family: the model's class name without the role it ends in."""
ROLES = re.compile(r"(?:(?:Text)?(?:ForCausalLM|Model|LMHeadModel|ForSequenceClassification|ForTokenClassification))?$")


def table_for(model: nn.Module, batch: Iterable[str] = ()) -> dict[str, str]:
    """The names that apply to `model`, and to the entries `batch` of its batch; an entry that no table names has none here.

    Patterns of a family's table that match nothing in this member of it (biases, say) are left out. Raises ValueError for a
    class that no table is written for, and for a parameter of more than one dimension that the table leaves unnamed.
    """
    family = ROLES.sub("", type(model).__name__, count=1)
    if family not in TABLES:
        raise ValueError(
            f"no table of dimension names for {type(model).__name__}; there are tables for {', '.join(TABLES)}. "
            "Pass names={pattern: dimensions} of your own"
        )
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    modules = [name for name, _ in model.named_modules()]
    table = TABLES[family]
    used = {
        pattern: dimensions
        for pattern, dimensions in table.NAMES.items()
        if any(
            fnmatchcase(name, pattern.removesuffix(":out")) for name in (modules if pattern.endswith(":out") else parameters)
        )
    }
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not any(fnmatchcase(name, pattern) for pattern in used):
            raise ValueError(f"the {family} table names no dimensions of {name} {tuple(parameter.shape)}; add a pattern for it")
    return used | {key: table.INPUTS[key] for key in batch if key in table.INPUTS}
