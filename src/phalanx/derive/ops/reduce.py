"""Reductions and operators that read whole lines of a tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Emit, Form, Labels, Rule, argument, dim_index, shape_of, tensors
from phalanx.derive.ops.pointwise import broadcast_labels, broadcast_shape

aten = torch.ops.aten


def _reduced(node: fx.Node) -> tuple[tuple[int, ...], set[int]]:
    before = shape_of(tensors(node)[0])
    dims = argument(node, "dim")
    wanted = [dims] if isinstance(dims, int) else dims
    return before, {dim_index(dim, len(before)) for dim in wanted} if wanted else set(range(len(before)))


def _result(before: tuple[int, ...], reduced: set[int], after: tuple[int, ...]) -> Labels:
    kept = tuple(dim for dim in range(len(before)) if dim not in reduced)
    if len(after) == len(kept):
        return kept
    return tuple(WHOLE if dim in reduced else dim for dim in range(len(before)))


def sum_(node: fx.Node) -> Form:
    before, reduced = _reduced(node)
    return Form((tuple(range(len(before))),), (_result(before, reduced, shape_of(node)),), "first")


def sum_of_each(node: fx.Node) -> Form:
    """The sum of a function of every element (how many are not zero)."""
    return replace(sum_(node), linear="none")


def mean(node: fx.Node) -> Form:
    """Over split dimensions: the sum over the global count."""
    before, reduced = _reduced(node)
    count = math.prod(before[dim] for dim in reduced)
    dims = sorted(reduced)
    keep = len(shape_of(node)) == len(before)

    def emit(e: Emit) -> fx.Node:
        if not any(e.axes(dim) for dim in dims):
            return e.again()
        total = e.call(aten.sum.dim_IntList, e.operands[0], dims, keep, dtype=node.meta["val"].dtype)
        return e.call(aten.div.Tensor, total, count)

    return Form(
        (tuple(range(len(before))),), (_result(before, reduced, shape_of(node)),), "first", emit, averaged=frozenset(reduced)
    )


def whole_reduction(node: fx.Node) -> Form:
    """Not a sum (max, variance, norm, any): the reduced dimensions are whole. All results have the same dimensions."""
    before, reduced = _reduced(node)
    value = node.meta["val"]
    results = value if isinstance(value, (tuple, list)) else (value,)
    labels: Labels = tuple(WHOLE if dim in reduced else dim for dim in range(len(before)))
    return Form((labels,), tuple(_result(before, reduced, tuple(result.shape)) for result in results))


def along(node: fx.Node) -> Form:
    """softmax, cumsum, sort: each line along one dimension is whole."""
    ndim = len(shape_of(tensors(node)[0]))
    dim = dim_index(argument(node, "dim", -1), ndim)
    labels: Labels = tuple(WHOLE if at == dim else at for at in range(ndim))
    value = node.meta["val"]
    return Form((labels,), (labels,) * (len(value) if isinstance(value, (tuple, list)) else 1))


def diff(node: fx.Node) -> Form:
    """Differences along one dimension, which is whole, of a value with others put before and behind it. Linear in all together."""
    ndim = len(shape_of(node))
    dim = dim_index(argument(node, "dim", -1), ndim)
    labels: Labels = tuple(WHOLE if at == dim else at for at in range(ndim))
    return Form((labels,) * len(tensors(node)), (labels,), "sum")


def lines_of_two(node: fx.Node) -> Form:
    """cosine_similarity: one dimension of two values that broadcast is reduced, so it is whole."""
    shapes = [shape_of(operand) for operand in tensors(node)]
    full = broadcast_shape(shapes)
    dim = dim_index(argument(node, "dim", 1), len(full))

    def whole(labels: Labels) -> Labels:
        return tuple(WHOLE if label == dim else label for label in labels)

    result = tuple(at for at in range(len(full)) if at != dim)
    return Form(tuple(whole(broadcast_labels(shape, full)) for shape in shapes), (result,))


def layer_norm(node: fx.Node) -> Form:
    """layer_norm and rms_norm: the normalised dimensions are whole, and so are weight and bias."""
    operands = [shape_of(operand) for operand in tensors(node)]
    normalised = len(argument(node, "normalized_shape"))
    ndim = len(operands[0])
    x: Labels = tuple(WHOLE if dim >= ndim - normalised else dim for dim in range(ndim))
    return Form((x, *((WHOLE,) * len(shape) for shape in operands[1:])), (x,))


_WHOLE = (
    aten.amax, aten.amin, aten.aminmax, aten.max, aten.min, aten.var, aten.std, aten.var_mean, aten.std_mean, aten.any, aten.all,
    aten.prod, aten.argmax, aten.argmin, aten.logsumexp, aten.norm, aten.linalg_vector_norm, aten.median, aten.nanmedian,
)  # fmt: skip
_LINES = (
    aten.softmax, aten._softmax, aten._safe_softmax, aten.log_softmax, aten._log_softmax, aten.sort, aten.argsort, aten.glu,
    aten.topk, aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin,
)  # fmt: skip

RULES: dict[object, Rule] = {
    aten.sum: sum_,
    aten.nansum: sum_of_each,
    aten.count_nonzero: sum_of_each,
    aten.mean: mean,
    **dict.fromkeys(_WHOLE, whole_reduction),
    **dict.fromkeys(_LINES, along),
    aten.diff: diff,
    aten.cosine_similarity: lines_of_two,
    aten.layer_norm: layer_norm,
    aten.rms_norm: layer_norm,
}
