"""Hugging Face models: the captured graph, with its own masks, against the untouched eager model with stock attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.derive.capture import capture, check_capture
from phalanx.derive.program import Captured
from phalanx.hf.capture import IMPLEMENTATION, capture_context, is_hf_model

transformers = pytest.importorskip("transformers")

# Hugging Face computes norms and the loss in float32 inside a float64 model. Captured operators are the eager ones, so most
# models agree exactly; a mask in another form may change the order of a float32 sum.
FLOAT32_INSIDE = 1e-6

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5, "head_dim": 8}
GPT2 = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def config(family: str) -> Any:
    configs = {
        "llama": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
        "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=8),
        "gpt2": lambda: transformers.GPT2Config(**GPT2),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL),
        "phi3": lambda: transformers.Phi3Config(**SMALL),
        "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=5),
        "mistral_wide": lambda: transformers.MistralConfig(**SMALL, sliding_window=64),
        "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, **ALTERNATING),
        "gemma2": lambda: transformers.Gemma2Config(**SMALL, sliding_window=5, head_dim=8),
    }
    return configs[family]()


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config(family)).double()  # type: ignore[no-any-return]


def batch_of(sequences: int = 2, length: int = 9) -> dict[str, Tensor]:
    tokens = torch.randint(3, 64, (sequences, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def attention(captured: Captured) -> list[tuple[bool, bool]]:
    """(is_causal, has a mask) of every attention."""
    found = []
    for piece in captured.pieces:
        for node in piece.graph.graph.nodes:
            if node.target is torch.ops.aten.scaled_dot_product_attention.default:
                mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
                causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
                found.append((bool(causal), mask is not None))
    return found


CAUSAL, MASKED = (True, False), (False, True)
FAMILIES = {
    "llama": [CAUSAL] * 4,
    "qwen3": [CAUSAL] * 4,
    "gpt2": [CAUSAL] * 4,
    "gpt_neox": [CAUSAL] * 4,
    "phi3": [CAUSAL] * 4,
    "mistral": [MASKED] * 4,
    "mistral_wide": [CAUSAL] * 4,
    "gemma3": [MASKED, CAUSAL] * 2,
    "gemma2": [],  # soft-capped scores: eager attention, captured as it is
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_stock_eager(family: str) -> None:
    model, batch = model_of(family), batch_of()
    implementation = model.config._attn_implementation
    captured = capture(model, batch, prepare=capture_context)
    assert model.config._attn_implementation == implementation != IMPLEMENTATION
    assert attention(captured) == FAMILIES[family]
    assert check_capture(model, captured, batch) <= FLOAT32_INSIDE
    blocks = captured.pieces[1:-1]
    assert [piece.name.rpartition(".")[2] for piece in blocks] == ["0", "1", "2", "3"]
    assert blocks[0].key == blocks[2].key
    assert blocks[1].key == blocks[3].key
    assert (blocks[0].key == blocks[1].key) == (family != "gemma3")
    assert all(len(piece.outputs) == 1 for piece in captured.pieces)
    assert not captured.tables_read_batch


def test_logits_equal_stock_eager() -> None:
    model, batch = model_of("mistral"), batch_of()

    def loss(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (outputs.logits * batch["weights"]).sum(), torch.ones_like(batch["input_ids"]).sum()

    batch = {"input_ids": batch["input_ids"], "weights": torch.randn(2, 9, 64, dtype=torch.float64)}
    captured = capture(model, batch, loss, prepare=capture_context)
    assert check_capture(model, captured, batch, loss) <= FLOAT32_INSIDE


def test_a_window_mask_has_no_batch_dimension() -> None:
    captured = capture(model_of("mistral"), batch_of(sequences=8), prepare=capture_context)
    assert captured.tables is not None
    masks = [n.meta["val"] for n in captured.tables.graph.graph.output_node().args[0] if n.meta["val"].dtype is torch.bool]
    assert [tuple(mask.shape) for mask in masks] == [(1, 1, 9, 9)]


def test_an_eager_mask_has_no_batch_dimension() -> None:
    """Soft-capped attention adds its mask to the scores; one for each sample would not divide into microbatches."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    stock = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    captured = capture(model_of("gemma2"), batch_of(sequences=8), prepare=capture_context)
    assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is stock
    assert captured.tables is not None
    masks = [value for n in captured.tables.graph.graph.output_node().args[0] if (value := n.meta["val"]).shape[-2:] == (9, 9)]
    assert [tuple(mask.shape) for mask in masks] == [(1, 1, 9, 9)] * 2


def test_padding_is_kept() -> None:
    model, batch = model_of("llama"), batch_of()
    batch["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
    batch["attention_mask"][0, :4] = 0
    captured = capture(model, batch, prepare=capture_context)
    assert attention(captured) == [MASKED] * 4
    assert captured.tables_read_batch
    assert check_capture(model, captured, batch) <= FLOAT32_INSIDE
    unmasked = {**batch, "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    with pytest.raises(ValueError, match="differs from the module"):
        check_capture(model, captured, batch | {"labels": batch["labels"].roll(1, 0)}, wrong_mask(model, unmasked))


def wrong_mask(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """A loss that ignores the outputs it is given: the eager side then sees another mask than the captured side."""
    return lambda outputs, own: model(**batch).loss


def test_packed_positions_are_kept() -> None:
    model, batch = model_of("llama"), batch_of()
    batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
    captured = capture(model, batch, prepare=capture_context)
    assert attention(captured) == [MASKED] * 4
    assert check_capture(model, captured, batch) <= FLOAT32_INSIDE


def test_without_the_context_masks_are_explicit_and_right() -> None:
    model, batch = model_of("llama"), batch_of()
    captured = capture(model, batch)
    assert attention(captured) == [MASKED] * 4
    assert check_capture(model, captured, batch) <= FLOAT32_INSIDE


def test_eager_attention_is_captured_as_it_is() -> None:
    model, batch = model_of("llama"), batch_of()
    model.set_attn_implementation("eager")
    captured = capture(model, batch, prepare=capture_context)
    assert attention(captured) == []
    assert check_capture(model, captured, batch) <= FLOAT32_INSIDE


def test_kernels_that_cannot_be_traced_are_refused() -> None:
    model = model_of("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"'flex_attention'.*set_attn_implementation\('sdpa'\)"):
        capture(model, batch_of(), prepare=capture_context)


def test_attention_is_restored_when_capture_fails() -> None:
    model = model_of("llama")
    with pytest.raises(ValueError, match="without a loss"):
        capture(model, {"input_ids": batch_of()["input_ids"]}, prepare=capture_context)
    assert model.config._attn_implementation == "sdpa"


def test_tells_hugging_face_models_apart() -> None:
    assert is_hf_model(model_of("gpt2"))
    assert not is_hf_model(nn.Linear(2, 2))


@pytest.mark.nightly
def test_seventy_billion_parameters_are_captured_without_memory() -> None:
    import resource
    import time

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    large = transformers.LlamaConfig(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(large, dtype=torch.bfloat16)
    batch = {name: torch.empty(16, 4096, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    start = time.process_time()
    captured = capture(model, batch, prepare=capture_context)
    assert len(captured.pieces) == 82
    assert len({piece.key for piece in captured.pieces}) == 3
    # measured 11 s of processor time and 0.5 GB on a busy 2-core machine; nearly twice that leaves room for a slower one
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1.5e6
