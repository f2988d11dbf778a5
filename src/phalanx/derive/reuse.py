"""Let pointwise operators write over an operand that dies there: fewer allocations and page faults, the same bits.

Runs last, on a finished executable graph. Only storage made in this graph by an operator known to return a fresh tensor is
written, and only when nothing that shares it is used afterwards or returned.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from phalanx.derive.clean import base, view_root

aten = torch.ops.aten

# Functional operator: (form that writes, keyword of the output or None for the first argument, operands that may be written).
# The kernels are elementwise, so reading and writing the same element is safe. Addition and multiplication commute exactly.
FORMS: dict[Any, tuple[Any, str | None, tuple[int, ...]]] = {
    aten.add.Tensor: (aten.add_.Tensor, None, (0, 1)),
    aten.mul.Tensor: (aten.mul_.Tensor, None, (0, 1)),
    aten.sub.Tensor: (aten.sub_.Tensor, None, (0,)),
    aten.div.Tensor: (aten.div_.Tensor, None, (0,)),
    aten.add.Scalar: (aten.add_.Scalar, None, (0,)),
    aten.mul.Scalar: (aten.mul_.Scalar, None, (0,)),
    aten.sub.Scalar: (aten.sub_.Scalar, None, (0,)),
    aten.div.Scalar: (aten.div_.Scalar, None, (0,)),
    aten.pow.Tensor_Scalar: (aten.pow_.Scalar, None, (0,)),
    aten.neg.default: (aten.neg_.default, None, (0,)),
    aten.exp.default: (aten.exp_.default, None, (0,)),
    aten.rsqrt.default: (aten.rsqrt_.default, None, (0,)),
    aten.relu.default: (aten.relu_.default, None, (0,)),
    aten.tanh.default: (aten.tanh_.default, None, (0,)),
    aten.sigmoid.default: (aten.sigmoid_.default, None, (0,)),
    aten.silu.default: (aten.silu_.default, None, (0,)),
    aten.gelu.default: (aten.gelu_.default, None, (0,)),
    aten.masked_fill.Scalar: (aten.masked_fill_.Scalar, None, (0,)),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input", (0, 1)),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input", (0, 1)),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input", (0, 1)),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input", (0, 1)),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input", (0, 1)),
}

FRESH = frozenset(FORMS) | {
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.cat.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.slice_backward.default,
    aten.embedding.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
}


def write_over_the_dead(graph: fx.Graph) -> None:
    """Rewrite, in place, every eligible node of `graph`."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    owner = {node: view_root(node) for node in graph.nodes}
    """The node that made the storage of each value."""
    last: dict[fx.Node, int] = {}
    """Of each owner: the position of the last use of any value that lives there."""
    for node, root in owner.items():
        last[root] = max([last.get(root, 0), *(order[user] for user in node.users)])
    homes: dict[fx.Node, fx.Node] = {}
    """Of each node that was made to write: the owner of what it writes."""
    for node in list(graph.nodes):
        form = FORMS.get(node.target)
        if form is None or _scaled(node):
            continue
        write, keyword, candidates = form
        for position in candidates:
            operand = node.args[position]
            if not isinstance(operand, fx.Node) or not _looks_alike(node, operand):
                continue
            home = _home(owner[operand], homes)
            others = [a for a in node.all_input_nodes if a is not operand]
            if not _is_fresh(home) or last[home] > order[node] or any(_home(owner[a], homes) is home for a in others):
                continue
            if keyword is None:
                rest = tuple(a for i, a in enumerate(node.args) if i != position)
                node.args = (operand, *rest)
            else:
                node.kwargs = {**node.kwargs, keyword: operand}
            node.target = write
            homes[node] = home
            last[home] = max(last[home], last[node])
            break


def _home(node: fx.Node, homes: dict[fx.Node, fx.Node]) -> fx.Node:
    while node in homes:
        node = homes[node]
    return node


def _scaled(node: fx.Node) -> bool:
    """add(a, b, alpha=2) does not commute, and is rare."""
    with_alpha = (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
    return node.target in with_alpha and ("alpha" in node.kwargs or len(node.args) > 2)


def _is_fresh(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        node = base(node)
    return node.op == "call_function" and node.target in FRESH


def _looks_alike(node: fx.Node, operand: fx.Node) -> bool:
    """The result fits over the operand: equal dtype, shape and strides, every element at its own address."""
    a, b = node.meta["val"], operand.meta["val"]
    return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and _is_dense(b)


def _is_dense(x: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
