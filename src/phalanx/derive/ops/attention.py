"""Scaled dot-product attention: split over batch and heads; queries, keys and head width are whole."""

from __future__ import annotations

import math

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Emit, Form, Label, Labels, Rule, argument, shape_of, tensors

aten = torch.ops.aten
HEADS: Label = "heads"


def attention(node: fx.Node) -> Form:
    """q (*batch, heads, s, d), k and v (*batch, kv heads, t, d), mask broadcastable to (*batch, heads, s, t).

    With fewer kv heads than ranks the keys and values stay whole and each rank takes the one its query heads read.
    """
    q, k = (shape_of(operand) for operand in tensors(node)[:2])
    batch: Labels = tuple(("batch", dim) for dim in range(len(q) - 3))
    heads: Labels = (HEADS,) if len(q) > 2 else ()
    labels: Labels = (*batch, *heads, WHOLE, WHOLE)
    operands: list[Labels] = [labels, labels, labels]
    mask = argument(node, "attn_mask")
    if mask is not None:
        shape, full = shape_of(mask), (*q[:-1], k[-2])
        lead = len(full) - len(shape)
        whole_labels = (*batch, *heads, WHOLE, WHOLE)
        operands.append(tuple(whole_labels[at + lead] if size == full[at + lead] else WHOLE for at, size in enumerate(shape)))
    grouped = len(q) > 2 and k[-3] != q[-3]
    return Form(tuple(operands), (labels,), "none", _emit_attention(node, q, k), may_stay_whole=(1, 2) if grouped else ())


def _emit_attention(node: fx.Node, q_shape: tuple[int, ...], k_shape: tuple[int, ...]):  # type: ignore[no-untyped-def]
    dropout = argument(node, "dropout_p", 0.0)
    causal = argument(node, "is_causal", False)
    scale = argument(node, "scale")
    gqa = argument(node, "enable_gqa", False)

    def emit(e: Emit) -> fx.Node:
        q, k, v, *rest = e.operands
        mask = rest[0] if rest else None
        if len(q_shape) > 2 and e.ranks(HEADS) > 1 and k_shape[-3] % e.ranks(HEADS):
            k, v = (_take_kv_head(e, x, k_shape) for x in (k, v))
        if dropout == 0.0:
            kwargs = {"scale": scale, **({"enable_gqa": True} if gqa else {})}
            return e.call(aten.scaled_dot_product_attention.default, q, k, v, mask, 0.0, causal, **kwargs)
        return _attention_with_dropout(e, q, k, v, mask, q_shape, k_shape, dropout, causal, scale)

    return emit


def _take_kv_head(e: Emit, x: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """Of whole keys or values, the heads that this rank's query heads read; axis by axis until one head is left."""
    heads = shape[-3]
    # x is the mark that the replicated operand of a varying operator gets
    x.meta["few_heads"] = True
    for axis in e.axes(HEADS):
        ranks = e.sizes[axis]
        if heads > 1 and ranks > 1:
            length = max(1, heads // ranks)
            x = e.call(torch.ops.phx.take.default, x, e.world, axis, ranks, len(shape) - 3, length, max(1, ranks // heads))
            heads = length
    return x


def _attention_with_dropout(
    e: Emit, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, q_shape: tuple[int, ...], k_shape: tuple[int, ...],
    dropout: float, causal: bool, scale: float | None,
) -> fx.Node:  # fmt: skip
    """The textbook formula, so that the mask can come from the counter-based generator and be the same on every layout."""
    ndim = len(q_shape)
    heads = q_shape[-3] // e.ranks(HEADS) if ndim > 2 else 1
    local_kv = max(1, k_shape[-3] // e.ranks(HEADS)) if ndim > 2 else 1
    if heads != local_kv:
        k, v = (e.call(aten.repeat_interleave.self_int, x, heads // local_kv, ndim - 3) for x in (k, v))
    factor = scale if scale is not None else 1.0 / math.sqrt(q_shape[-1])
    scores = e.call(aten.mul.Tensor, e.call(aten.matmul.default, q, e.call(aten.transpose.int, k, -2, -1)), factor)
    if causal:
        keep = e.call(aten.tril.default, e.call(aten.ones.default, [q_shape[-2], k_shape[-2]], dtype=torch.bool))
        scores = e.call(aten.masked_fill.Scalar, scores, e.call(aten.logical_not.default, keep), -math.inf)
    if mask is not None:
        if mask.meta["val"].dtype == torch.bool:
            scores = e.call(aten.masked_fill.Scalar, scores, e.call(aten.logical_not.default, mask), -math.inf)
        else:
            scores = e.call(aten.add.Tensor, scores, mask)
    weights = e.call(aten.softmax.int, scores, -1)
    labels: Labels = (*(("batch", dim) for dim in range(ndim - 3)), *((HEADS,) if ndim > 2 else ()), WHOLE, WHOLE)
    keep_scaled = e.dropout_mask(weights, dropout, labels, (*q_shape[:-1], k_shape[-2]))
    return e.call(aten.matmul.default, e.call(aten.mul.Tensor, weights, keep_scaled), v)


RULES: dict[object, Rule] = {aten.scaled_dot_product_attention: attention}
