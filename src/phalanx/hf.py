"""Hugging Face models in: what capture needs to know about their attention masks. Their internals are named here only.

While a model is traced, transformers cannot see that its sequences are not packed and writes out a (batch, 1, seq, seq) mask
for every model. Here a mask that is exactly causal is left to `sdpa(is_causal=True)`; every other mask stays an explicit one.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

IMPLEMENTATION = "phalanx_sdpa"
"""The name under which transformers finds stock sdpa attention with our masks."""

PLAIN_INPUTS = frozenset({"input_ids", "inputs_embeds", "labels"})
"""With no other input the positions of a text model are 0..seq-1, so that one sequence fills each row."""

Mask = Callable[..., Any]


def is_hf_model(module: nn.Module) -> bool:
    """True for a transformers PreTrainedModel, without importing transformers for other modules."""
    return any(
        base.__module__.startswith("transformers.") and base.__name__ == "PreTrainedModel" for base in type(module).__mro__
    )


@contextlib.contextmanager
def capture_context(model: nn.Module, example: Mapping[str, Tensor]) -> Iterator[None]:
    """The context in which to capture a Hugging Face `model` on `example`; its attention is as before afterwards.

    Only models with stock sdpa attention and PLAIN_INPUTS are touched. Eager attention, padding masks, packed positions and
    image inputs are captured as transformers computes them, with explicit masks. Raises ValueError for attention that cannot
    be traced.
    """
    from transformers import PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    models = [child for child in model.modules() if isinstance(child, PreTrainedModel)]
    before = list({id(child.config): (child.config, child.config._attn_implementation) for child in models}.values())
    for config, implementation in before:
        if implementation not in ("sdpa", "eager", None):
            raise ValueError(
                f"{type(config).__name__} uses attention {implementation!r}, which is not made of ATen ops: call "
                "model.set_attn_implementation('sdpa') (fast kernels are chosen when the graph runs)"
            )
    accepted = inspect.signature(model.forward).parameters
    plain = all(key in PLAIN_INPUTS for key in example if key in accepted)
    if not plain or any(implementation != "sdpa" for _, implementation in before):
        yield
        return
    AttentionInterface.register(IMPLEMENTATION, sdpa_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_of_one_sequence)
    try:
        for child in models:
            child.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def mask_of_one_sequence(*, mask_function: Mask, q_length: int, kv_length: int, **rest: Any) -> Tensor | None:
    """transformers' mask interface for rows that hold one sequence each: None if sdpa's is_causal says it all.

    A causal window gets a mask without a batch dimension; a mask that is not recognised is made by transformers unchanged.
    """
    from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

    parts = dict(_parts(mask_function))
    # Tracing always adds the packed-sequence part, which is true everywhere when a row is one sequence.
    parts.pop("packed_sequence_mask_function", None)
    square = q_length == kv_length and rest.get("q_offset", 0) == 0 and rest.get("kv_offset", 0) == 0
    recognised = parts.keys() <= {"causal_mask_function", "sliding_window_overlay"} and "causal_mask_function" in parts
    if not square or not recognised or rest.get("attention_mask") is not None:
        return sdpa_mask(mask_function=mask_function, q_length=q_length, kv_length=kv_length, **rest)
    overlay = parts.get("sliding_window_overlay")
    window = kv_length if overlay is None else inspect.getclosurevars(overlay).nonlocals["sliding_window"]
    if window >= kv_length:
        return None
    causal_window = sliding_window_causal_mask_function(window)
    fixed = {**rest, "batch_size": 1, "allow_is_causal_skip": False}
    return sdpa_mask(mask_function=causal_window, q_length=q_length, kv_length=kv_length, **fixed)


def _parts(mask: Mask) -> Iterator[tuple[str, Mask]]:
    """The mask functions whose intersection `mask` is, by the name of what made them; "unknown" for anything else."""
    name = mask.__qualname__.partition(".")[0]
    inner = inspect.getclosurevars(mask).nonlocals
    if mask.__module__ != "transformers.masking_utils":
        yield "unknown", mask
    elif name == "and_masks":
        for part in inner["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":
        yield from _parts(inner["mask_function"])
    else:
        yield name, mask
