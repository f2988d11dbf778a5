"""One rule per operator: how its dimensions go together. A file per family; adding an operator touches one file."""

from __future__ import annotations

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Form, Rule, shape_of, tensors
from phalanx.derive.ops import (
    attention,
    create,
    embedding,
    indexing,
    loss,
    matmul,
    pointwise,
    reduce,
    regularize,
    spatial,
    view,
)

aten = torch.ops.aten

RULES: dict[object, Rule] = {
    **pointwise.RULES,
    **matmul.RULES,
    **view.RULES,
    **reduce.RULES,
    **attention.RULES,
    **embedding.RULES,
    **indexing.RULES,
    **spatial.RULES,
    **loss.RULES,
    **create.RULES,
    **regularize.RULES,
    # overloads that mean something else than their namesakes
    aten.max.other: pointwise.pointwise(),
    aten.min.other: pointwise.pointwise(),
}


def rule_for(node: fx.Node) -> Rule | None:
    """The rule of a node's operator, by overload and then by name; None if there is none."""
    return RULES.get(node.target) or RULES.get(getattr(node.target, "overloadpacket", None))


def is_random(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in create.RANDOM


def replicated(node: fx.Node) -> Form:
    """The form of an operator nothing is known about: every operand whole, every result whole."""
    value = node.meta["val"]
    results = value if isinstance(value, (tuple, list)) else (value,)
    return Form(
        tuple((WHOLE,) * len(shape_of(operand)) for operand in tensors(node)),
        tuple((WHOLE,) * len(result.shape) for result in results),
    )
