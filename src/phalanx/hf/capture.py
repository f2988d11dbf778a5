"""What the capture of Hugging Face models needs to know about their attention masks.

While a model is traced, transformers cannot see that its sequences are not packed and writes out a (batch, 1, seq, seq) mask
for every model. Here a mask that is exactly causal is left to `sdpa(is_causal=True)`; every other mask stays an explicit one, and
is one for all samples.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

IMPLEMENTATION = "phalanx_sdpa"
"""The name under which transformers finds stock sdpa attention with our masks."""

PLAIN_INPUTS = frozenset({"input_ids", "inputs_embeds", "labels"})
"""With no other input the positions of a text model are 0..seq-1, so that one sequence fills each row."""

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers in which tokens meet under the attention mask only."""

Mask = Callable[..., Any]


def is_hf_model(module: nn.Module) -> bool:
    """True for a transformers PreTrainedModel, without importing transformers for other modules."""
    return any(
        base.__module__.startswith("transformers.") and base.__name__ == "PreTrainedModel" for base in type(module).__mro__
    )


@contextlib.contextmanager
def capture_context(model: nn.Module, example: Mapping[str, Tensor]) -> Iterator[None]:
    """The context in which to capture a Hugging Face `model` on `example`; its attention is as before afterwards.

    Only models with stock attention (all sdpa, or all eager) and PLAIN_INPUTS are touched, and if these come with position_ids
    they are captured with masks of `Documents`. Padding masks and image inputs are captured as transformers computes them, with
    explicit masks. Raises ValueError for attention that cannot be traced, and for a model that would ignore where documents begin.
    """
    from transformers import PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
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
    other = {key for key in example if key in accepted and key not in PLAIN_INPUTS}
    implementations = {implementation for _, implementation in before}
    if not (other <= {"position_ids"} and implementations in ({"sdpa"}, {"eager"})):
        yield
        return
    documents = Documents(model) if other else None
    if implementations == {"eager"}:
        # A model finds its own eager attention under this name only.
        stock = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
        AttentionMaskInterface.register("eager", documents.eager_mask if documents else eager_mask_of_one_sequence)
        try:
            yield
        finally:
            AttentionMaskInterface.register("eager", stock)
    else:
        AttentionInterface.register(IMPLEMENTATION, sdpa_attention_forward)
        AttentionMaskInterface.register(IMPLEMENTATION, documents.sdpa_mask if documents else mask_of_one_sequence)
        try:
            for child in models:
                child.set_attn_implementation(IMPLEMENTATION)
            yield
        finally:
            for config, implementation in before:
                config._attn_implementation = implementation
    if documents and not documents.masks:
        raise documents.unmasked("asks for no attention mask")


def mask_of_one_sequence(*, mask_function: Mask, q_length: int, kv_length: int, **rest: Any) -> Tensor | None:
    """transformers' mask interface for rows that hold one sequence each: None if sdpa's is_causal says it all.

    A causal window gets a mask without a batch dimension; a mask that is not recognised is made by transformers unchanged.
    """
    from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

    window = _causal_window(mask_function, q_length, kv_length, rest)
    if window is None:
        return sdpa_mask(mask_function=mask_function, q_length=q_length, kv_length=kv_length, **rest)
    if window >= kv_length:
        return None
    causal_window = sliding_window_causal_mask_function(window)
    fixed = {**rest, "batch_size": 1, "allow_is_causal_skip": False}
    return sdpa_mask(mask_function=causal_window, q_length=q_length, kv_length=kv_length, **fixed)


def eager_mask_of_one_sequence(*, mask_function: Mask, q_length: int, kv_length: int, **rest: Any) -> Tensor | None:
    """The same for eager attention, which adds its mask to the scores and always has one."""
    from transformers.masking_utils import eager_mask, sliding_window_causal_mask_function

    window = _causal_window(mask_function, q_length, kv_length, rest)
    if window is None:
        return eager_mask(mask_function=mask_function, q_length=q_length, kv_length=kv_length, **rest)
    causal_window = sliding_window_causal_mask_function(window)
    return eager_mask(mask_function=causal_window, q_length=q_length, kv_length=kv_length, **{**rest, "batch_size": 1})


class Documents:
    """Masks for rows of several documents, whose position_ids start over where one begins.

    transformers compares the documents of every pair of tokens through indices into the batch. Here they are compared by
    broadcasting, which a batch that is split over ranks allows. A model that would let documents see one another is refused.
    """

    def __init__(self, model: nn.Module) -> None:
        self.name, self.masks = type(model).__name__, 0
        kinds = set(getattr(model.config, "layer_types", None) or ()) - ATTENTION_LAYERS
        if kinds:
            raise self.unmasked(f"has layers that no mask keeps apart ({', '.join(sorted(kinds))})")

    def unmasked(self, why: str) -> ValueError:
        return ValueError(
            f"position_ids tell documents apart, but {self.name} {why}, so that they would see one another: leave position_ids out "
            "if every row is one document, else train a model that masks by them"
        )

    def sdpa_mask(self, *, dtype: torch.dtype, **rest: Any) -> Tensor:
        """Additive, of the scores' dtype: attention would make such a copy of a boolean mask in every layer and keep it."""
        from transformers.masking_utils import sdpa_mask

        mask = sdpa_mask(**{**rest, "mask_function": self._together(**rest), "allow_is_causal_skip": False})
        assert mask is not None, "a mask that may not be skipped was"
        return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), -math.inf)

    def eager_mask(self, **rest: Any) -> Tensor:
        from transformers.masking_utils import eager_mask

        mask: Tensor = eager_mask(**{**rest, "mask_function": self._together(**rest)})
        return mask

    def _together(self, *, mask_function: Mask, q_length: int, kv_length: int, **rest: Any) -> Mask:
        """`mask_function`, by broadcasting if it is a causal window inside documents."""
        from transformers.masking_utils import sliding_window_causal_mask_function

        packed = dict(_parts(mask_function)).get("packed_sequence_mask_function")
        if packed is None:
            raise self.unmasked("makes its attention mask without them")
        self.masks += 1
        window = _causal_window(mask_function, q_length, kv_length, rest)
        if window is None:
            return mask_function
        document = inspect.getclosurevars(packed).nonlocals["packed_sequence_mask"]  # (batch, seq)
        inside = sliding_window_causal_mask_function(window)

        def together(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return inside(batch, head, query, key) & (document[:, None, :, None] == document[:, None, None, :])  # type: ignore[no-any-return]

        return together


def _causal_window(mask: Mask, q_length: int, kv_length: int, rest: Mapping[str, Any]) -> int | None:
    """How many positions, its own included, a token sees under `mask` (all of them: kv_length); None if it is no causal window."""
    parts = dict(_parts(mask))
    # Tracing always adds the packed-sequence part, which is true everywhere when a row is one sequence.
    parts.pop("packed_sequence_mask_function", None)
    square = q_length == kv_length and rest.get("q_offset", 0) == 0 and rest.get("kv_offset", 0) == 0
    recognised = parts.keys() <= {"causal_mask_function", "sliding_window_overlay"} and "causal_mask_function" in parts
    if not square or not recognised or rest.get("attention_mask") is not None:
        return None
    overlay = parts.get("sliding_window_overlay")
    return kv_length if overlay is None else int(inspect.getclosurevars(overlay).nonlocals["sliding_window"])


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
