"""Dropout: the mask comes from the counter-based generator, so it is the same on every layout."""

from __future__ import annotations

import torch
from torch import fx

import phalanx.derive.ops.dropout  # noqa: F401 - registers the operator
from phalanx.derive.form import Emit, Form, Rule, argument, shape_of, tensors

aten = torch.ops.aten


def dropout(node: fx.Node) -> Form:
    shape = shape_of(tensors(node)[0])
    probability, training = argument(node, "p"), argument(node, "train")
    labels = tuple(range(len(shape)))
    if not training or probability == 0.0:
        return Form((labels,), (labels,), "first", lambda e: e.call(aten.alias.default, e.operands[0]))

    def emit(e: Emit) -> fx.Node:
        (x,) = e.operands
        return e.call(aten.mul.Tensor, x, e.dropout_mask(x, probability, labels, shape))

    return Form((labels,), (labels,), "none", emit)


RULES: dict[object, Rule] = {aten.dropout: dropout}
