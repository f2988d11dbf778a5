"""Products: a label shared by both operands and absent from the result is contracted, and leaves a partial sum where it is split."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Emit, Form, Label, Labels, Rule, argument, shape_of, tensors
from phalanx.derive.ops.pointwise import broadcast_labels, pointwise

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
    """beta bias + alpha a (m, k) @ b (k, n): linear in bias and product together."""
    bias = shape_of(node.args[0])  # type: ignore[arg-type]
    labels: Labels = ("m", "n")[2 - len(bias) :]
    return Form((tuple(WHOLE if size == 1 else at for size, at in zip(bias, labels, strict=True)), ("m", "k"), ("k", "n")),
                (("m", "n"),), addend=0)  # fmt: skip


def baddbmm(node: fx.Node) -> Form:
    """addmm for every matrix of a batch."""
    labels = broadcast_labels(shape_of(node.args[0]), shape_of(node))  # type: ignore[arg-type]
    names = {0: "b", 1: "m", 2: "n", WHOLE: WHOLE}
    bias: Labels = tuple(names[label] for label in labels)
    return Form((bias, ("b", "m", "k"), ("b", "k", "n")), (("b", "m", "n"),), addend=0)


def addmv(node: fx.Node) -> Form:
    bias = shape_of(node.args[0])  # type: ignore[arg-type]
    return Form((tuple(WHOLE if size == 1 else "m" for size in bias), ("m", "k"), ("k",)), (("m",),), addend=0)


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
    """One label for each letter; those of an ellipsis are counted from the back; a letter twice in one term (a diagonal) is whole."""
    left, arrow, right = str(node.args[0]).replace(" ", "").partition("->")
    terms = left.split(",")
    shapes = [shape_of(operand) for operand in tensors(node)]
    letters = [_letters(term, len(shape)) for term, shape in zip(terms, shapes, strict=True)]
    flat = [label for term in letters for label in term]
    if arrow:
        result = _letters(right, len(shape_of(node)))
    else:
        # implicit: the ellipsis, then, in alphabetical order, the letters that occur once
        hidden = sorted({label for label in flat if isinstance(label, int)})
        result = (*hidden, *sorted(label for label in set(flat) - set(hidden) if flat.count(label) == 1))
    twice = {label for term in letters for label in term if term.count(label) > 1}
    # a dimension of size 1 may stretch
    stretched = {
        label for term, shape in zip(letters, shapes, strict=True) for label, size in zip(term, shape, strict=True) if size == 1
    }

    def whole(labels: Labels) -> Labels:
        return tuple(WHOLE if label in twice or label in stretched else label for label in labels)

    return Form(tuple(whole(term) for term in letters), (whole(result),), "each")


def _letters(term: str, ndim: int) -> tuple[Any, ...]:
    """Labels of one term of an equation: letters, and negative numbers for the dimensions of an ellipsis."""
    before, dots, after = term.partition("...")
    hidden = ndim - len(before) - len(after)
    return (*before, *range(-hidden, 0), *after) if dots else tuple(term)


def outer(node: fx.Node) -> Form:
    return Form((("m",), ("n",)), (("m", "n"),), "each")


def inner(node: fx.Node) -> Form:
    """Sums over the last dimension of both."""
    a, b = (shape_of(operand) for operand in tensors(node))
    left: Labels = tuple(("a", dim) for dim in range(len(a) - 1))
    right: Labels = tuple(("b", dim) for dim in range(len(b) - 1))
    if not a or not b:
        return pointwise("each")(node)
    return Form(((*left, "k"), (*right, "k")), ((*left, *right),), "each")


def tensordot(node: fx.Node) -> Form:
    a, b = (list(range(len(shape_of(operand)))) for operand in tensors(node))
    left: list[Label] = [("a", dim) for dim in a]
    right: list[Label] = [("b", dim) for dim in b]
    for number, (i, j) in enumerate(zip(argument(node, "dims_self"), argument(node, "dims_other"), strict=True)):
        left[i] = right[j] = number
    result = tuple(label for label in (*left, *right) if isinstance(label, tuple))
    return Form((tuple(left), tuple(right)), (result,), "each")


def bilinear(node: fx.Node) -> Form:
    """a (..., i), b (..., j), weight (o, i, j), bias (o)."""
    shapes = [shape_of(operand) for operand in tensors(node)]
    lead: Labels = tuple(("lead", dim) for dim in range(len(shapes[0]) - 1))
    operands: tuple[Labels, ...] = ((*lead, "i"), (*lead, "j"), ("o", "i", "j"))
    if len(shapes) == 3:
        return Form(operands, ((*lead, "o"),), "each")
    return Form((*operands, ("o",)), ((*lead, "o"),), addend=3)


def cdist(node: fx.Node) -> Form:
    """Distances of (*batch, m, width) and (*batch, n, width)."""
    a, b = (shape_of(operand) for operand in tensors(node))
    result = shape_of(node)
    lead = len(result) - 2
    batch = [broadcast_labels(shape[:-2], result[:-2]) for shape in (a, b)]
    return Form(((*batch[0], "m", WHOLE), (*batch[1], "n", WHOLE)), ((*range(lead), "m", "n"),))


RULES: dict[object, Rule] = {
    aten.linear: linear,
    aten.addmm: addmm,
    aten.mm: mm,
    aten.bmm: bmm,
    aten.matmul: matmul,
    aten.einsum: einsum,
    aten.outer: outer,
    aten.dot: lambda node: Form((("k",), ("k",)), ((),), "each"),
    aten.vdot: lambda node: Form((("k",), ("k",)), ((),), "each"),
    aten.baddbmm: baddbmm,
    aten.mv: lambda node: Form((("m", "k"), ("k",)), (("m",),), "each"),
    aten.addmv: addmv,
    aten.ger: outer,
    aten.inner: inner,
    aten.tensordot: tensordot,
    aten.bilinear: bilinear,
    aten.cdist: cdist,
}
