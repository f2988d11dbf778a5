"""Reads and writes by index. The dimension that is indexed is whole; what goes along with it may be split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Form, Labels, Rule, argument, dim_index, shape_of, tensors
from phalanx.derive.ops.pointwise import broadcast_labels, broadcast_shape

aten = torch.ops.aten


def gather(node: fx.Node) -> Form:
    """x.gather(dim, index): lines along `dim` are whole; other dimensions go together where index covers them."""
    x, index = (shape_of(operand) for operand in tensors(node)[:2])
    dim = dim_index(argument(node, "dim"), len(x))
    labels: Labels = tuple(at if at != dim and x[at] == index[at] else WHOLE for at in range(len(x)))
    return Form((labels, labels), (labels,))


def take_along_dim(node: fx.Node) -> Form:
    """gather whose other dimensions broadcast."""
    dim = argument(node, "dim")
    if dim is None:
        raise ValueError("take_along_dim without a dimension has no rule; flatten the operands and name dimension 0")
    shapes = [list(shape_of(operand)) for operand in tensors(node)]
    result = shape_of(node)
    dim = dim_index(dim, len(result))
    for shape in shapes:
        shape[dim] = result[dim]

    def line(labels: Labels) -> Labels:
        return tuple(WHOLE if label == dim else label for label in labels)

    return Form(tuple(line(broadcast_labels(tuple(shape), result)) for shape in shapes), (line(tuple(range(len(result)))),))


def scatter(node: fx.Node) -> Form:
    """x with values written or added along `dim`; other dimensions go together where index and values cover them."""
    shapes = [shape_of(operand) for operand in tensors(node)]
    x = shapes[0]
    dim = dim_index(argument(node, "dim"), len(x))
    covered = [all(shape[at] == x[at] for shape in shapes) for at in range(len(x))]
    labels: Labels = tuple(at if at != dim and covered[at] else WHOLE for at in range(len(x)))
    return Form((labels,) * len(shapes), (labels,))


def index_select(node: fx.Node) -> Form:
    """index_select, index_add, index_copy, index_fill: slices along `dim` at the places of a list."""
    x, index, *values = (shape_of(operand) for operand in tensors(node))
    dim = dim_index(argument(node, "dim"), len(x))
    labels: Labels = tuple(WHOLE if at == dim else at for at in range(len(x)))
    return Form((labels, (WHOLE,) * len(index), *(labels if value else () for value in values)), (labels,))


def slice_written(node: fx.Node) -> Form:
    """select_scatter, slice_scatter: a value with one place along a whole dimension taken from another. Linear in both together."""
    x, part = (shape_of(operand) for operand in tensors(node))
    dim = dim_index(argument(node, "dim", 0), len(x))
    labels: Labels = tuple(WHOLE if at == dim else at for at in range(len(x)))
    return Form((labels, labels if len(part) == len(x) else (*labels[:dim], *labels[dim + 1 :])), (labels,), "sum")


def index(node: fx.Node) -> Form:
    """x[i, :, j]: the indexed dimensions are whole, those of the indices go to the result, the others are left alone."""
    indices = argument(node, "indices")
    if any(_is_mask(i) for i in indices):
        raise ValueError("indexing by a mask has a shape known only at run time; use torch.where or masked_fill")
    x, at, result = _indexed(len(shape_of(tensors(node)[0])), indices)
    return Form((x, *at), (result,))


def index_put(node: fx.Node) -> Form:
    """x with x[i, :, j] written or added to: every rank writes to the same places of its slices of the other dimensions."""
    indices, values = argument(node, "indices"), argument(node, "values")
    ndim = len(shape_of(tensors(node)[0]))
    if any(_is_mask(i) for i in indices):
        return _masked_put(ndim, indices, values)
    x, at, result = _indexed(ndim, indices)
    kept = tuple(label if label in x else WHOLE for label in result)
    given = shape_of(values)
    # values broadcast to what the index reads; a dimension that stretches has size 1
    mine = tuple(WHOLE if size == 1 else label for size, label in zip(given, kept[len(kept) - len(given) :], strict=True))
    return Form((x, *((WHOLE,) * len(labels) for labels in at), mine), (x,))


def _masked_put(ndim: int, indices: Sequence[Any], values: fx.Node) -> Form:
    masks = [(dim, i) for dim, i in enumerate(indices) if i is not None]
    if len(masks) != 1 or values.meta["val"].numel() != 1:
        raise ValueError("writing by a mask has a rule for one mask and one value; use torch.where")
    ((first, mask),) = masks
    labels: Labels = tuple(range(ndim))
    covered = labels[first : first + len(shape_of(mask))]
    return Form((labels, covered, (WHOLE,) * len(shape_of(values))), (labels,))


def _is_mask(i: Any) -> bool:
    return isinstance(i, fx.Node) and i.meta["val"].dtype in (torch.bool, torch.uint8)


def _indexed(ndim: int, indices: Sequence[Any]) -> tuple[Labels, list[Labels], Labels]:
    """Labels of x, of the indices and of x[indices].

    numpy's rule: the dimensions of the indices stand in the place of the indexed ones if those are adjacent, else in front.
    """
    indexed = [dim for dim, i in enumerate(indices) if i is not None]
    shapes = [shape_of(i) for i in indices if i is not None]
    common = broadcast_shape(shapes)
    x: Labels = tuple(WHOLE if dim in indexed else dim for dim in range(ndim))
    at = [tuple(label if label is WHOLE else ("at", label) for label in broadcast_labels(shape, common)) for shape in shapes]
    new: Labels = tuple(("at", dim) for dim in range(len(common)))
    adjacent = indexed[-1] - indexed[0] == len(indexed) - 1
    before = list(range(indexed[0])) if adjacent else []
    after = [dim for dim in range(ndim) if dim not in indexed and dim not in before]
    return x, at, (*before, *new, *after)


RULES: dict[object, Rule] = {
    aten.gather: gather,
    aten.take_along_dim: take_along_dim,
    **dict.fromkeys((aten.scatter, aten.scatter_add, aten.scatter_reduce), scatter),
    **dict.fromkeys((aten.index_select, aten.index_add, aten.index_copy, aten.index_fill), index_select),
    **dict.fromkeys((aten.select_scatter, aten.slice_scatter), slice_written),
    aten.index: index,
    aten.index_put: index_put,
}
