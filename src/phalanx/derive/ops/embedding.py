"""Table look-ups. A table split over its rows gives each rank the rows it holds and zeros for the others: a partial sum."""

from __future__ import annotations

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Emit, Form, Labels, Rule, argument, shape_of, tensors, valid_shape

aten = torch.ops.aten
ROWS = "rows"


def embedding(node: fx.Node) -> Form:
    weight, ids = tensors(node)
    if argument(node, "scale_grad_by_freq", False) or argument(node, "sparse", False):
        raise ValueError("embedding with scale_grad_by_freq or sparse gradients has no rule; use the plain form")
    where: Labels = tuple(("id", dim) for dim in range(len(shape_of(ids))))
    padding = argument(node, "padding_idx", -1)
    rows, valid = shape_of(weight)[0], valid_shape(weight)[0]

    def emit(e: Emit) -> fx.Node:
        if not e.axes(ROWS):
            if valid < rows:
                e.operands[0] = e.call(aten.slice.Tensor, e.operands[0], 0, 0, valid)
            return e.again()
        table, ids = e.operands
        local, outside = local_rows(e, ids, ROWS, rows)
        if valid < rows:
            outside = e.call(aten.logical_or.default, outside, e.call(aten.ge.Scalar, ids, valid))
        found = e.call(aten.embedding.default, table, local)
        found = e.call(aten.masked_fill.Scalar, found, e.call(aten.unsqueeze.default, outside, -1), 0)
        if padding >= 0:
            # the padding row is read but never trained
            trained = e.call(aten.unsqueeze.default, e.call(aten.ne.Scalar, ids, padding), -1)
            found = e.call(aten.where.self, trained, found, e.call(aten.detach.default, found))
        return found

    return Form(((ROWS, "width"), where), ((*where, "width"),), "none", emit)


def local_rows(e: Emit, ids: fx.Node, label: str, size: int) -> tuple[fx.Node, fx.Node]:
    """Indices into this rank's slice of a split dimension, with 0 for those outside it, and which are outside."""
    local = e.offset(ids, label, size)
    held = size // e.ranks(label)
    outside = e.call(aten.logical_or.default, e.call(aten.lt.Scalar, local, 0), e.call(aten.ge.Scalar, local, held))
    return e.call(aten.masked_fill.Scalar, local, outside, 0), outside


def one_hot(node: fx.Node) -> Form:
    ndim = len(shape_of(tensors(node)[0]))
    return Form((tuple(range(ndim)),), ((*range(ndim), WHOLE),))


RULES: dict[object, Rule] = {
    aten.embedding: embedding,
    aten.one_hot: one_hot,
}
