"""Operators that rearrange dimensions without arithmetic. All are linear in their one tensor operand."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Emit, Form, Label, Labels, Rule, argument, dim_index, shape_of, tensors
from phalanx.derive.ops.pointwise import broadcast_labels

aten = torch.ops.aten

Groups = list[tuple[tuple[int, ...], tuple[int, ...]]]


def regroup(before: tuple[int, ...], after: tuple[int, ...]) -> Groups:
    """The finest groups of adjacent dimensions whose products agree: (dimensions before, dimensions after).

    regroup((4, 6), (2, 2, 6)) == [((0,), (0, 1)), ((1,), (2,))]
    """
    if 0 in before or 0 in after:
        return [(tuple(range(len(before))), tuple(range(len(after))))]
    groups: Groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = [], []
        a = b = 1
        if i < len(before):
            a, left, i = before[i], [i], i + 1
        if j < len(after):
            b, right, j = after[j], [j], j + 1
        while a != b:
            if a < b:
                a, i = a * before[i], i + 1
                left.append(i - 1)
            else:
                b, j = b * after[j], j + 1
                right.append(j - 1)
        # a size-1 dimension belongs to the group before it rather than opening one that a later dimension must share
        groups.append((tuple(left), tuple(right)))
    return groups


def _leading(dims: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """The first dimension of a group that is not of size 1: the one whose contiguous slices survive the regrouping."""
    return next((dim for dim in dims if shape[dim] != 1), None)


def view(node: fx.Node) -> Form:
    """A split or merge keeps the slices of the leading dimension of each group.

    A fused dimension viewed as (parts, size, ...) with one entry of the first for each part keeps the slices of the second.
    """
    before, after = shape_of(tensors(node)[0]), shape_of(node)
    left: list[Label] = [WHOLE] * len(before)
    right: list[Label] = [WHOLE] * len(after)
    parts: list[tuple[Label, tuple[int, ...]]] = []
    fused = node.meta.get("parts", {})
    for group, (source, target) in enumerate(regroup(before, after)):
        a, b = _leading(source, before), _leading(target, after)
        if a is None or b is None:
            continue
        sizes = fused.get(a)
        if sizes and len(source) == 1 and len(target) > 1 and after[target[0]] == len(sizes) and len(set(sizes)) == 1:
            left[a] = right[target[1]] = group
            parts.append((group, sizes))
        else:
            left[a] = right[b] = group
    return Form((tuple(left),), (tuple(right),), "first", _emit_view, parts=tuple(parts))


def _emit_view(e: Emit) -> fx.Node:
    # a view of a shard may need a copy where the whole did not: reshape does either
    return e.call(aten.reshape.default, e.operands[0], e.shape())


def view_as(node: fx.Node) -> Form:
    """The second operand lends its shape, and its places go with those of the result."""
    form = view(node)
    return replace(form, operands=(*form.operands, form.results[0]))


def permute(node: fx.Node) -> Form:
    before = len(shape_of(tensors(node)[0]))
    order = [dim_index(dim, before) for dim in argument(node, "dims")]
    return Form((tuple(range(before)),), (tuple(order),), "first")


def transpose(node: fx.Node) -> Form:
    ndim = len(shape_of(node))
    order = list(range(ndim))
    a, b = (dim_index(argument(node, f"dim{at}", argument(node, f"axis{at}")), ndim) for at in (0, 1))
    order[a], order[b] = order[b], order[a]
    return Form((tuple(range(ndim)),), (tuple(order),), "first")


def matrix_transpose(node: fx.Node) -> Form:
    ndim = len(shape_of(node))
    return Form((tuple(range(ndim)),), ((*range(ndim - 2), ndim - 1, ndim - 2),), "first")


def t(node: fx.Node) -> Form:
    ndim = len(shape_of(node))
    return Form((tuple(range(ndim)),), (tuple(reversed(range(ndim))),), "first")


def unsqueeze(node: fx.Node) -> Form:
    after = len(shape_of(node))
    new = dim_index(argument(node, "dim"), after)
    return Form((tuple(range(after - 1)),), (tuple(WHOLE if d == new else d - (d > new) for d in range(after)),), "first")


def squeeze(node: fx.Node) -> Form:
    """The squeezed dimensions are of size 1 and stay whole."""
    before = shape_of(tensors(node)[0])
    dims = argument(node, "dim")
    wanted = range(len(before)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim_index(dim, len(before)) for dim in wanted if before[dim] == 1}
    return Form(
        (tuple(WHOLE if dim in gone else dim for dim in range(len(before))),),
        (tuple(dim for dim in range(len(before)) if dim not in gone),),
        "first",
        lambda e: e.call(aten.squeeze.dims, e.operands[0], sorted(gone)),
    )


def expand(node: fx.Node) -> Form:
    """A stretched dimension is new: whole on every rank."""
    before, after = shape_of(tensors(node)[0]), shape_of(node)
    lead = len(after) - len(before)
    kept = {dim + lead: dim for dim, size in enumerate(before) if size == after[dim + lead]}
    left = tuple(dim if dim + lead in kept else WHOLE for dim in range(len(before)))
    grows = math.prod(after) > math.prod(before)
    return Form(
        (left,), (tuple(kept.get(dim, WHOLE) for dim in range(len(after))),), "none" if grows else "first",
        lambda e: e.call(aten.expand.default, e.operands[0], e.shape()),
    )  # fmt: skip


def expand_as(node: fx.Node) -> Form:
    """The second operand lends its shape, and its places go with those of the result."""
    x, other = (shape_of(operand) for operand in tensors(node))
    labels: Labels = tuple(range(len(other)))
    return replace(expand(node), operands=(broadcast_labels(x, other), labels), results=(labels,))


def whole_dims(name: str) -> Rule:
    """Result and operand have the same number of dimensions; the named ones are whole, the others untouched."""

    def rule(node: fx.Node) -> Form:
        ndim = len(shape_of(tensors(node)[0]))
        dims = argument(node, name)
        whole = {dim_index(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims or range(ndim))}
        labels = tuple(WHOLE if dim in whole else dim for dim in range(ndim))
        return Form((labels,), (labels,), "first")

    return rule


def last_two(node: fx.Node) -> Form:
    """tril, triu: rows and columns are whole."""
    labels: Labels = (*range(len(shape_of(node)) - 2), WHOLE, WHOLE)
    return Form((labels,), (labels,), "first")


def slice_(node: fx.Node) -> Form:
    """A slice of a whole dimension; a slice that takes everything, or exactly one part of a fused dimension, keeps the split."""
    operand = tensors(node)[0]
    before, after = shape_of(operand), shape_of(node)
    dim = dim_index(argument(node, "dim", 0), len(before))
    labels: Labels = tuple(range(len(before)))
    if before[dim] == after[dim]:
        return Form((labels,), (labels,), "first", lambda e: e.call(aten.alias.default, e.operands[0]))
    sizes = node.meta.get("parts", {}).get(dim)
    start = argument(node, "start") or 0
    start = start + before[dim] if start < 0 else start
    if sizes and argument(node, "step", 1) == 1:
        offset = 0
        for size in sizes:
            if (start, after[dim]) == (offset, size):
                return Form((labels,), (labels,), "first", _emit_part(dim, offset, size), parts=((dim, sizes),))
            offset += size
    labels = tuple(WHOLE if at == dim else at for at in labels)
    return Form((labels,), (labels,), "first")


def _emit_part(dim: int, offset: int, size: int):  # type: ignore[no-untyped-def]
    def emit(e: Emit) -> fx.Node:
        ranks = e.ranks(dim)
        return e.call(aten.slice.Tensor, e.operands[0], dim, offset // ranks, (offset + size) // ranks)

    return emit


def select(node: fx.Node) -> Form:
    ndim = len(shape_of(tensors(node)[0]))
    dim = dim_index(argument(node, "dim"), ndim)
    labels: Labels = tuple(WHOLE if at == dim else at for at in range(ndim))
    return Form((labels,), (tuple(at for at in range(ndim) if at != dim),), "first")


def split_sizes(node: fx.Node) -> tuple[int, tuple[int, ...]]:
    """Dimension and global sizes of a split, chunk or unbind-like node's results."""
    operand = tensors(node)[0]
    ndim = len(shape_of(operand))
    dim = dim_index(argument(node, "dim", 0), ndim)
    return dim, tuple(int(value.shape[dim]) for value in node.meta["val"])


def split(node: fx.Node) -> Form:
    """Along a whole dimension, or along a fused dimension exactly at its parts."""
    ndim = len(shape_of(tensors(node)[0]))
    dim, sizes = split_sizes(node)
    if node.meta.get("parts", {}).get(dim) == sizes:
        labels: Labels = tuple(range(ndim))
        return Form(
            (labels,), (labels,) * len(sizes), "first",
            lambda e: e.call(aten.split_with_sizes.default, e.operands[0], [size // e.ranks(dim) for size in sizes], dim),
            parts=((dim, sizes),),
        )  # fmt: skip
    labels = tuple(WHOLE if at == dim else at for at in range(ndim))
    return Form(
        (labels,), (labels,) * len(sizes), "first",
        lambda e: e.call(aten.split_with_sizes.default, e.operands[0], list(sizes), dim),
    )  # fmt: skip


def unbind(node: fx.Node) -> Form:
    ndim = len(shape_of(tensors(node)[0]))
    dim = dim_index(argument(node, "dim", 0), ndim)
    labels: Labels = tuple(WHOLE if at == dim else at for at in range(ndim))
    return Form((labels,), (tuple(at for at in range(ndim) if at != dim),) * len(node.meta["val"]), "first")


def cat(node: fx.Node) -> Form:
    return _joined(node, dim_index(argument(node, "dim", 0), len(shape_of(node))))


def hstack(node: fx.Node) -> Form:
    return _joined(node, min(1, len(shape_of(node)) - 1))


def _joined(node: fx.Node, dim: int) -> Form:
    """Operands of no dimension (which count as of one) are whole."""
    ndim = len(shape_of(node))
    labels: Labels = tuple(WHOLE if at == dim else at for at in range(ndim))
    return Form(tuple(labels if shape_of(x) else () for x in tensors(node)), (labels,), "sum")


def stack(node: fx.Node) -> Form:
    operands = tensors(node)
    ndim = len(shape_of(node))
    dim = dim_index(argument(node, "dim", 0), ndim)
    return Form(
        (tuple(range(ndim - 1)),) * len(operands), (tuple(WHOLE if d == dim else d - (d > dim) for d in range(ndim)),), "sum"
    )


def pad(node: fx.Node) -> Form:
    ndim = len(shape_of(node))
    padded = len(argument(node, "pad")) // 2
    labels: Labels = tuple(WHOLE if at >= ndim - padded else at for at in range(ndim))
    return Form((labels,), (labels,))


def repeat(node: fx.Node) -> Form:
    before, after = shape_of(tensors(node)[0]), shape_of(node)
    lead = len(after) - len(before)
    same = [size == after[dim + lead] for dim, size in enumerate(before)]
    left: Labels = tuple(dim + lead if same[dim] else WHOLE for dim in range(len(before)))
    return Form((left,), ((WHOLE,) * lead + left,))


def repeat_interleave(node: fx.Node) -> Form:
    """Each entry several times in place: the slices of the operand become those of the result (few key-value heads made many)."""
    before = shape_of(tensors(node)[0])
    dim, times = argument(node, "dim"), argument(node, "repeats")
    if dim is None or not isinstance(times, int):
        raise ValueError("repeat_interleave has a rule for a number of repeats along one dimension only")
    labels: Labels = tuple(range(len(before)))
    return Form((labels,), (labels,), "none", lambda e: e.again(output_size=None))


def diagonal(node: fx.Node) -> Form:
    ndim = len(shape_of(tensors(node)[0]))
    gone = {dim_index(argument(node, name), ndim) for name in ("dim1", "dim2")}
    kept: Labels = tuple(dim for dim in range(ndim) if dim not in gone)
    return Form((tuple(WHOLE if dim in gone else dim for dim in range(ndim)),), ((*kept, WHOLE),), "first")


def unfold(node: fx.Node) -> Form:
    """Windows along one whole dimension."""
    ndim = len(shape_of(tensors(node)[0]))
    dim = dim_index(argument(node, "dimension"), ndim)
    labels: Labels = tuple(WHOLE if at == dim else at for at in range(ndim))
    return Form((labels,), ((*labels, WHOLE),), "none")


def written(node: fx.Node) -> Form:
    """select_scatter, slice_scatter: a value with one place, along a whole dimension, taken from another."""
    x, part = (shape_of(operand) for operand in tensors(node))
    dim = dim_index(argument(node, "dim", 0), len(x))
    labels: Labels = tuple(WHOLE if at == dim else at for at in range(len(x)))
    mine = labels if len(part) == len(x) else (*labels[:dim], *labels[dim + 1 :])
    return Form((labels, mine), (labels,), "sum")


def movedim(node: fx.Node) -> Form:
    before = len(shape_of(tensors(node)[0]))
    source, target = (argument(node, name) for name in ("source", "destination"))
    sources = [dim_index(dim, before) for dim in ([source] if isinstance(source, int) else source)]
    targets = [dim_index(dim, before) for dim in ([target] if isinstance(target, int) else target)]
    order: list[int] = [dim for dim in range(before) if dim not in sources]
    for to, dim in sorted(zip(targets, sources, strict=True)):
        order.insert(to, dim)
    return Form((tuple(range(before)),), (tuple(order),), "first")


RULES: dict[object, Rule] = {
    **dict.fromkeys((aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten, aten.ravel), view),
    **dict.fromkeys((aten.view_as, aten.reshape_as), view_as),
    aten.permute: permute,
    aten.transpose: transpose,
    aten.swapaxes: transpose,
    aten.swapdims: transpose,
    aten.mT: matrix_transpose,
    aten.movedim: movedim,
    aten.moveaxis: movedim,
    aten.t: t,
    aten.numpy_T: t,
    aten.unsqueeze: unsqueeze,
    aten.squeeze: squeeze,
    aten.expand: expand,
    aten.expand_as: expand_as,
    aten.broadcast_to: expand,
    aten.slice: slice_,
    aten.narrow: whole_dims("dim"),
    aten.select: select,
    aten.split: split,
    aten.split_with_sizes: split,
    aten.chunk: split,
    aten.tensor_split: split,
    aten.unsafe_chunk: split,
    aten.unsafe_split: split,
    aten.unsafe_split_with_sizes: split,
    aten.unbind: unbind,
    aten.cat: cat,
    aten.concat: cat,
    aten.concatenate: cat,
    aten.hstack: hstack,
    aten.stack: stack,
    aten.pad: pad,
    aten.constant_pad_nd: pad,
    aten.repeat: repeat,
    aten.tile: repeat,
    aten.repeat_interleave: repeat_interleave,
    aten.flip: whole_dims("dims"),
    aten.roll: whole_dims("dims"),
    aten.tril: last_two,
    aten.triu: last_two,
    aten.diagonal: diagonal,
    aten.unfold: unfold,
    aten.select_scatter: written,
    aten.slice_scatter: written,
}
