"""Tensors made from nothing: the same on every rank."""

from __future__ import annotations

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Form, Rule, shape_of, tensors

aten = torch.ops.aten


def factory(node: fx.Node) -> Form:
    """arange, zeros, new_ones: a tensor operand lends only its dtype and device."""
    operands = tuple(tuple(("lent", at, dim) for dim in range(len(shape_of(x)))) for at, x in enumerate(tensors(node)))
    lent = frozenset(label for labels in operands for label in labels)
    return Form(operands, ((WHOLE,) * len(shape_of(node)),), finished=lent)


_FACTORIES = (
    aten.arange, aten.zeros, aten.ones, aten.full, aten.empty, aten.eye, aten.linspace, aten.scalar_tensor, aten.tril_indices,
    aten.triu_indices, aten.new_ones, aten.new_zeros, aten.new_full, aten.new_empty,
)  # fmt: skip
RULES: dict[object, Rule] = dict.fromkeys(_FACTORIES, factory)

RANDOM = frozenset(
    (aten.rand, aten.randn, aten.randint, aten.randperm, aten.rand_like, aten.randn_like, aten.randint_like, aten.bernoulli,
     aten.normal, aten.multinomial, aten.poisson, aten.rrelu, aten.feature_dropout, aten.alpha_dropout)
)  # fmt: skip
"""Operators whose values would depend on the layout."""
