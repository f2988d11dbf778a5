"""What the graph itself says about a parameter's dimensions: the parts of a fused one, and how many heads one holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from phalanx.derive.form import Form, argument, shape_of, tensors
from phalanx.derive.ops import rule_for
from phalanx.derive.ops.view import regroup, split_sizes
from phalanx.derive.program import Captured

aten = torch.ops.aten
SPLITS = frozenset((aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split))
ONE_TO_ONE = frozenset((aten.permute, aten.transpose, aten.unsqueeze, aten.squeeze, aten.contiguous, aten.clone))
VIEWS = frozenset((aten.view, aten.reshape, aten.unflatten, aten._unsafe_view))


def infer_parts(captured: Captured) -> dict[str, dict[int, tuple[int, ...]]]:
    """{parameter: {dimension: part sizes}} where a projection's result is taken apart by split, chunk, slices or a view."""
    cuts: dict[tuple[str, int], set[int]] = {}
    for piece in captured.pieces:
        names = dict(zip(_placeholders(piece.graph.graph), piece.params, strict=False))
        for node in piece.graph.graph.nodes:
            for source, dim, sizes in _taken_apart(node):
                for param, at, start in _origins(source, dim):
                    if param in names and len(sizes) > 1:
                        ends = itertools.accumulate(sizes, initial=start)
                        cuts.setdefault((names[param], at), {0, shape_of(param)[at]}).update(ends)
    found: dict[str, dict[int, tuple[int, ...]]] = {}
    for (name, at), places in cuts.items():
        found.setdefault(name, {})[at] = tuple(b - a for a, b in itertools.pairwise(sorted(places)))
    return found


def head_counts(captured: Captured, parts: Mapping[str, Mapping[int, tuple[int, ...]]]) -> dict[tuple[str, int], int]:
    """{(parameter, dimension): heads} where a view splits that dimension of a projection's result into (heads, width).

    Of a fused projection, the fewest heads of its parts. A view into (1, width) is one head, if no other says more.
    """
    found: dict[tuple[str, int], int] = {}
    single: dict[tuple[str, int], int] = {}
    for piece in captured.pieces:
        names = dict(zip(_placeholders(piece.graph.graph), piece.params, strict=False))
        for node in piece.graph.graph.nodes:
            if getattr(node.target, "overloadpacket", None) not in VIEWS:
                continue
            source = tensors(node)[0]
            before, after = shape_of(source), shape_of(node)
            for left, right in regroup(before, after):
                split = [dim for dim in right if after[dim] != 1]
                if len(left) == 1 and len(split) == 1 and split[0] > right[0]:
                    origins = [(names[param], at) for param, at, _ in _origins(source, left[0]) if param in names]
                    single.update(dict.fromkeys(origins, 1))
                if len(left) != 1 or len(split) < 2:
                    continue
                if len(split) == 2 and any(at == left[0] for _, at, _ in _taken_apart(node)):
                    continue
                for param, at, _ in _origins(source, left[0]):
                    if param in names:
                        sizes = parts.get(names[param], {}).get(at)
                        whole = sizes and len(sizes) == after[split[0]] and len(split) > 2
                        count = after[split[1]] if whole else after[split[0]]
                        key = (names[param], at)
                        found[key] = min(count, found.get(key, count))
    return single | found


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def _taken_apart(node: fx.Node) -> Iterator[tuple[fx.Node, int, tuple[int, ...]]]:
    """(value, dimension, part sizes) if a node takes a value apart along a dimension."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in SPLITS:
        dim, sizes = split_sizes(node)
        yield tensors(node)[0], dim, sizes
    elif packet in VIEWS:
        # (..., 3 * heads * width) seen as (..., 3, heads, width) or (..., 3, heads * width)
        source = tensors(node)[0]
        before, after = shape_of(source), shape_of(node)
        for left, right in regroup(before, after):
            split = [dim for dim in right if after[dim] != 1]
            if len(left) == 1 and len(split) in (2, 3) and after[split[0]] in (2, 3) and _read_part_by_part(node, split[0]):
                yield source, left[0], (before[left[0]] // after[split[0]],) * after[split[0]]
    elif node.op == "call_function" or node.op == "placeholder":
        yield from _slices_of(node)


def _read_part_by_part(node: fx.Node, dim: int) -> bool:
    """True if every user takes single entries of a dimension, perhaps after a permutation."""
    at = dim
    for user in node.users:
        packet = getattr(user.target, "overloadpacket", None)
        if packet in ONE_TO_ONE:
            form = _form(user)
            if form is None or at not in form.results[0] or not _read_part_by_part(user, form.results[0].index(at)):
                return False
        elif packet not in (aten.unbind, aten.select, aten.split, aten.chunk):
            return False
    return bool(node.users)


def _slices_of(node: fx.Node) -> Iterator[tuple[fx.Node, int, tuple[int, ...]]]:
    """Slices along one dimension that tile it exactly."""
    slices = [
        user for user in node.users if getattr(user.target, "overloadpacket", None) is aten.slice and user.args[0] is node
    ]
    if len(slices) < 2 or not isinstance(node.meta.get("val"), torch.Tensor):
        return
    shape = shape_of(node)
    by_dim: dict[int, list[tuple[int, int]]] = {}
    for user in slices:
        dim = argument(user, "dim", 0) % len(shape)
        start = argument(user, "start") or 0
        start += shape[dim] if start < 0 else 0
        by_dim.setdefault(dim, []).append((start, start + shape_of(user)[dim]))
    for dim, spans in by_dim.items():
        spans = sorted(set(spans))
        tiles = spans[0][0] == 0 and spans[-1][1] == shape[dim]
        if tiles and all(a[1] == b[0] for a, b in itertools.pairwise(spans)):
            yield node, dim, tuple(stop - start for start, stop in spans)


def _origins(node: fx.Node, dim: int, start: int = 0) -> Iterator[tuple[fx.Node, int, int]]:
    """Parameters' dimensions that a value's dimension comes from, one to one, through the labels of the rules; and where it starts
    there: a piece of a fused projection leads back to the whole of it.
    """
    if node.op == "placeholder":
        yield node, dim, start
        return
    packet = getattr(node.target, "overloadpacket", None)
    if packet in SPLITS or node.op != "call_function":
        return
    if getattr(node.target, "__name__", "") == "getitem":
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        if getattr(source.target, "overloadpacket", None) in SPLITS:
            along, sizes = split_sizes(source)
            yield from _origins(tensors(source)[0], dim, start + sum(sizes[:index]) if dim == along else start)
        return
    if packet in VIEWS:
        # of (..., parts, size), the size leads back to the whole of the fused dimension
        after = shape_of(node)
        for source, at, sizes in _taken_apart(node):
            before = shape_of(source)
            follows = dim > 0 and math.prod(after[:dim]) == len(sizes) * math.prod(before[:at])
            if follows and after[dim - 1 : dim + 1] == (len(sizes), sizes[0]):
                yield from _origins(source, at, start)
                return
    form = _form(node)
    if form is None or len(form.results) != 1:
        return
    label = form.results[0][dim]
    if packet is aten.slice and label is None:
        operand = tensors(node)[0]
        first = argument(node, "start", 0)
        yield from _origins(operand, dim, start + (first + shape_of(operand)[dim] if first < 0 else first))
        return
    if label is None:
        return
    if packet in VIEWS and shape_of(tensors(node)[0])[form.operands[0].index(label)] != shape_of(node)[dim]:
        return
    for operand, labels in zip(tensors(node), form.operands, strict=True):
        if label in labels:
            yield from _origins(operand, labels.index(label), start)


def _form(node: fx.Node) -> Form | None:
    rule = rule_for(node)
    if rule is None:
        return None
    node.meta.setdefault("parts", {})
    try:
        return rule(node)
    except ValueError:
        # the lowering will say so, with the place, if the operator matters
        return None
