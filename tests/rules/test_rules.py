"""Every table fits every model it is for: one name per dimension, no parameter unnamed, no pattern that matches nothing."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
from torch import nn

from phalanx import rules
from phalanx.models.llama import Llama, LlamaConfig
from phalanx.models.mlp import MLP, MLPConfig
from phalanx.run.initialize import deferred_init

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def hugging_face(family: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        stock = transformers.AutoConfig.for_model(family)
        sizes = {name: value for name, value in SIZES.items() if hasattr(stock, name)}
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **sizes))  # type: ignore[no-any-return]

    return make


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "gpt2", "gpt_neox", "phi3")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: Llama(LlamaConfig()),
    "tied Llama": lambda: Llama(LlamaConfig(tied=True)),
    "MLP": lambda: MLP(MLPConfig()),
    **{family: hugging_face(family) for family in FAMILIES},
}


@pytest.mark.parametrize("name", MODELS)
def test_tables_fit(name: str) -> None:
    module = deferred_init(MODELS[name])
    keys = ("x", "targets") if name == "MLP" else ("tokens", "targets") if "Llama" in name else ("input_ids", "labels")
    table = rules.table_for(module, keys)
    assert set(keys) <= set(table)
    for parameter, value in module.named_parameters(remove_duplicate=False):
        names = {dims for pattern, dims in table.items() if fnmatchcase(parameter, pattern)}
        assert len(names) == 1, f"{parameter}: {names}"
        assert len(names.pop().split()) == value.dim(), parameter
    paths = [path for path, _ in module.named_modules()]
    everything = [*keys, *(n for n, _ in module.named_parameters(remove_duplicate=False)), *(f"{path}:out" for path in paths)]
    for pattern in table:
        assert any(fnmatchcase(candidate, pattern) for candidate in everything), pattern
    assert "batch" in {word for dims in table.values() for word in dims.split()}


def test_equal_names_mean_equal_sizes() -> None:
    """A dimension named twice in one model has one size, but for heads and kv_heads of fused or grouped projections."""
    for name in MODELS:
        module = deferred_init(MODELS[name])
        table = rules.table_for(module)
        sizes: dict[str, set[int]] = {}
        for parameter, value in module.named_parameters():
            dims = next(dims for pattern, dims in table.items() if fnmatchcase(parameter, pattern))
            for word, size in zip(dims.split(), value.shape, strict=True):
                sizes.setdefault(word, set()).add(size)
        fused = {"gpt2": {"heads"}, "gpt_neox": {"heads"}, "phi3": {"heads", "mlp"}}.get(name, set())
        assert {word: found for word, found in sizes.items() if len(found) > 1 and word not in fused} == {}, name


def test_unknown_models_and_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no table.*Linear.*Llama"):
        rules.table_for(nn.Linear(2, 2))
    module = MLP(MLPConfig())
    module.extra = nn.Linear(3, 4)
    with pytest.raises(ValueError, match=r"extra\.weight \(4, 3\)"):
        rules.table_for(module)
