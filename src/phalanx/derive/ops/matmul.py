"""Products: a label shared by both operands and absent from the result is contracted, and leaves a partial sum where it is split."""

from __future__ import annotations

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Emit, Form, Labels, Rule, argument, shape_of, tensors

aten = torch.ops.aten


def linear(node: fx.Node) -> Form:
    """x (..., k) @ weight (o, k).T + bias (o). With k split, the bias is added once: to the partial sum, on one rank."""
    operands = tensors(node)
    lead: Labels = tuple(("lead", dim) for dim in range(len(shape_of(operands[0])) - 1))
    form: list[Labels] = [(*lead, "k"), ("o", "k")]
    if len(operands) == 3:
        form.append(("o",))
    if len(operands) == 2:
        return Form(tuple(form), ((*lead, "o"),), "each")
    return Form(tuple(form), ((*lead, "o"),), "each", _emit_linear, addend=2)


def _emit_linear(e: Emit) -> fx.Node:
    x, weight, bias = e.operands
    if e.partial:
        return e.call(aten.add.Tensor, e.call(aten.linear.default, x, weight), bias)
    return e.call(aten.linear.default, x, weight, bias)


def addmm(node: fx.Node) -> Form:
    """bias + a (m, k) @ b (k, n), unscaled."""
    if argument(node, "beta", 1) != 1 or argument(node, "alpha", 1) != 1:
        raise ValueError("addmm with alpha or beta other than 1 has no rule; write it as a product and a sum")
    bias = shape_of(node.args[0])  # type: ignore[arg-type]
    labels: Labels = ("m", "n")[2 - len(bias) :]
    return Form((tuple(WHOLE if size == 1 else at for size, at in zip(bias, labels, strict=True)), ("m", "k"), ("k", "n")),
                (("m", "n"),), "none", _emit_addmm, addend=0)  # fmt: skip


def _emit_addmm(e: Emit) -> fx.Node:
    bias, a, b = e.operands
    if e.partial:
        return e.call(aten.add.Tensor, e.call(aten.mm.default, a, b), bias)
    return e.call(aten.addmm.default, bias, a, b)


def mm(node: fx.Node) -> Form:
    return Form((("m", "k"), ("k", "n")), (("m", "n"),), "each")


def bmm(node: fx.Node) -> Form:
    return Form((("b", "m", "k"), ("b", "k", "n")), (("b", "m", "n"),), "each")


def matmul(node: fx.Node) -> Form:
    """Broadcasting product of batches of matrices; vectors on either side."""
    a, b = (shape_of(operand) for operand in tensors(node))
    result = shape_of(node)
    batch = len(result) - (len(a) > 1) - (len(b) > 1)

    def lead(shape: tuple[int, ...]) -> Labels:
        skip = batch - len(shape)
        return tuple(("b", dim + skip) if size == result[dim + skip] else WHOLE for dim, size in enumerate(shape))

    left: Labels = (*lead(a[:-2]), "m", "k") if len(a) > 1 else ("k",)
    right: Labels = (*lead(b[:-2]), "k", "n") if len(b) > 1 else ("k",)
    out: Labels = (*(("b", dim) for dim in range(batch)), *(("m",) if len(a) > 1 else ()), *(("n",) if len(b) > 1 else ()))
    return Form((left, right), (out,), "each")


def einsum(node: fx.Node) -> Form:
    equation = str(node.args[0]).replace(" ", "")
    if "..." in equation or "->" not in equation:
        raise ValueError(f"einsum {equation!r} has no rule: write out every dimension and the result, without '...'")
    left, result = equation.split("->")
    return Form(tuple(tuple(term) for term in left.split(",")), (tuple(result),), "each")


def outer(node: fx.Node) -> Form:
    return Form((("m",), ("n",)), (("m", "n"),), "each")


def convolution(node: fx.Node) -> Form:
    """Split over the batch only; channels and space are whole."""
    operands = [shape_of(operand) for operand in tensors(node)]
    whole = tuple((WHOLE,) * len(shape) for shape in operands[1:])
    x = ("batch",) + (WHOLE,) * (len(operands[0]) - 1)
    return Form((x, *whole), (("batch",) + (WHOLE,) * (len(shape_of(node)) - 1),))


RULES: dict[object, Rule] = {
    aten.linear: linear,
    aten.addmm: addmm,
    aten.mm: mm,
    aten.bmm: bmm,
    aten.matmul: matmul,
    aten.einsum: einsum,
    aten.outer: outer,
    aten.dot: lambda node: Form((("k",), ("k",)), ((),), "each"),
    **dict.fromkeys((aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution), convolution),
}
