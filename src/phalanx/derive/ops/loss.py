"""Losses. A summed loss over split samples is a partial scalar; cross entropy over a split vocabulary finishes its own sums."""

from __future__ import annotations

import math

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Emit, Form, Labels, Rule, argument, shape_of, tensors, valid_shape
from phalanx.derive.ops.embedding import local_rows
from phalanx.derive.ops.pointwise import broadcast_labels, broadcast_shape

aten = torch.ops.aten
CLASSES = "classes"
NONE, MEAN, SUM = 0, 1, 2


def cross_entropy(node: fx.Node) -> Form:
    """logits (n, classes, *d) or (classes,), target (n, *d) of class indices."""
    operands = tensors(node)
    logits, target = shape_of(operands[0]), shape_of(operands[1])
    reduction = argument(node, "reduction", MEAN)
    smoothing = argument(node, "label_smoothing", 0.0)
    weighted = argument(node, "weight") is not None
    class_dim = 1 if len(logits) > 1 else 0
    samples: Labels = tuple(WHOLE if reduction == MEAN else ("sample", dim) for dim in range(len(logits) - 1))
    plain = not weighted and smoothing == 0.0 and len(target) == len(logits) - 1
    classes = CLASSES if plain else WHOLE
    left = (*samples[:class_dim], classes, *samples[class_dim:])
    right = samples if len(target) == len(logits) - 1 else (*samples[:class_dim], WHOLE, *samples[class_dim:])
    rest = tuple((WHOLE,) * len(shape_of(operand)) for operand in operands[2:])
    result = samples if reduction == NONE else ()
    ignore = argument(node, "ignore_index", -100)
    held, valid = logits[class_dim], valid_shape(operands[0])[class_dim]

    def emit(e: Emit) -> fx.Node:
        if not e.axes(CLASSES):
            if valid < held:
                e.operands[0] = e.call(aten.slice.Tensor, e.operands[0], class_dim, 0, valid)
            return e.again()
        return _split_vocabulary(e, len(logits), class_dim, held, valid, ignore, reduction)

    return Form((left, right, *rest), (result,), "none", emit, finished=frozenset({CLASSES}))


def _split_vocabulary(e: Emit, ndim: int, class_dim: int, classes: int, valid: int, ignore: int, reduction: int) -> fx.Node:
    """log(sum exp) - picked logit from one max and one sum over ranks (Megatron-LM, Shoeybi et al. 2019, section 3).

    Only the first `valid` classes count; the others are padding.
    """
    logits, target = e.operands[:2]
    dtype = logits.meta["val"].dtype
    if class_dim != ndim - 1:
        logits = e.call(aten.movedim.int, logits, class_dim, -1)
    if dtype in (torch.bfloat16, torch.float16):
        logits = e.call(aten.to.dtype, logits, torch.float32)
    if valid < classes:
        logits = e.call(aten.add.Tensor, logits, _penalty(e, logits, classes, valid))
    peak = e.call(aten.amax.default, e.call(aten.detach.default, logits), [-1], True)
    for axis in reversed(e.axes(CLASSES)):
        peak = e.call(torch.ops.phx.all_reduce.default, peak, e.world, axis, "max")
        peak.meta["why"] = f"cross_entropy over a vocabulary split over {axis} needs the largest logit"
    shifted = e.call(aten.sub.Tensor, logits, peak)
    total = e.call(aten.sum.dim_IntList, e.call(aten.exp.default, shifted), [-1])
    local, outside = local_rows(e, target, CLASSES, classes)
    picked = e.call(aten.gather.default, shifted, -1, e.call(aten.unsqueeze.default, local, -1))
    picked = e.call(aten.masked_fill.Scalar, e.call(aten.squeeze.dim, picked, -1), outside, 0)
    # one message for both sums
    both = e.reduce(e.call(aten.stack.default, [total, picked]), CLASSES)
    loss = e.call(
        aten.sub.Tensor, e.call(aten.log.default, e.call(aten.select.int, both, 0, 0)), e.call(aten.select.int, both, 0, 1)
    )
    loss = e.call(aten.masked_fill.Scalar, loss, e.call(aten.eq.Scalar, target, ignore), 0)
    if reduction != NONE:
        loss = e.call(aten.sum.default, loss)
        if reduction == MEAN:
            count = e.call(aten.sum.default, e.call(aten.ne.Scalar, target, ignore))
            loss = e.call(aten.div.Tensor, loss, count)
    return loss if loss.meta["val"].dtype == dtype else e.call(aten.to.dtype, loss, dtype)


def _penalty(e: Emit, logits: fx.Node, classes: int, valid: int) -> fx.Node:
    """What is added to the logits of this rank's classes: 0, and minus infinity for padding, which so has no part in peak or sum."""
    held = classes // e.ranks(CLASSES)
    limit = e.offset(e.call(aten.full.default, [1], valid, dtype=torch.int64), CLASSES, classes)
    beyond = e.call(aten.ge.Tensor, e.call(aten.arange.default, held, dtype=torch.int64), limit)
    zeros = e.call(aten.full.default, [held], 0.0, dtype=logits.meta["val"].dtype)
    return e.call(aten.masked_fill.Scalar, zeros, beyond, -math.inf)


def elementwise_loss(node: fx.Node) -> Form:
    """mse and relatives: operands broadcast; then none, a sum, or a mean over the global count."""
    shapes = [shape_of(operand) for operand in tensors(node)]
    full = broadcast_shape(shapes)
    reduction = argument(node, "reduction")
    labels: Labels = tuple(range(len(full)))
    operands = tuple(broadcast_labels(shape, full) for shape in shapes)
    if reduction == NONE:
        return Form(operands, (labels,))

    def emit(e: Emit) -> fx.Node:
        if reduction != MEAN or not any(e.axes(label) for label in labels):
            return e.again()
        return e.call(aten.div.Tensor, e.again(reduction=SUM), math.prod(full))

    return Form(operands, ((),), "none", emit, averaged=frozenset(labels) if reduction == MEAN else frozenset())


def nll_loss(node: fx.Node) -> Form:
    """log probabilities (n, classes, *d): the classes are whole."""
    operands = [shape_of(operand) for operand in tensors(node)]
    reduction = argument(node, "reduction", MEAN)
    samples: Labels = tuple(WHOLE if reduction == MEAN else ("sample", dim) for dim in range(len(operands[0]) - 1))
    left = (*samples[:1], WHOLE, *samples[1:]) if len(operands[0]) > 1 else (WHOLE,)
    rest = tuple((WHOLE,) * len(shape) for shape in operands[2:])
    return Form((left, samples, *rest), (samples if reduction == NONE else (),))


_ELEMENTWISE = (
    aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy, aten.soft_margin_loss,
    aten.binary_cross_entropy_with_logits, aten.kl_div, aten.hinge_embedding_loss, aten.poisson_nll_loss, aten.margin_ranking_loss,
)  # fmt: skip

RULES: dict[object, Rule] = {
    aten.cross_entropy_loss: cross_entropy,
    aten.nll_loss: nll_loss,
    aten.nll_loss_nd: nll_loss,
    aten.nll_loss2d: nll_loss,
    **dict.fromkeys(_ELEMENTWISE, elementwise_loss),
}
