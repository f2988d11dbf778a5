"""Simplify a joint graph without changing one bit of what it computes, apart from the sign of zeros that were added to nothing.

Each pass is a function of the graph; `simplify` names them in order. What may be reused in place is decided later, by `reuse`.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
COPIES = {aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default}
# Share storage with their first argument although their schemas do not say so.
UNDECLARED_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default}
SCALAR = {aten.div.Scalar, aten.mul.Scalar, aten.add.Scalar, aten.sub.Scalar, aten.neg.default}
BROADCASTING = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
LAZY = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}
ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}


def simplify(graph: fx.Graph) -> None:
    """Functional, with no aliases, no-op copies, round trips of views or equal nodes, in the same order."""
    functionalise(graph)
    reject_randomness(graph)
    compute_lazy_bits(graph)
    for node in graph.nodes:
        if node.target in SAME or (node.target in COPIES and _same_layout(node, node.args[0])) or _is_first_power(node):
            _replace(node, node.args[0])
    add_nothing(graph)
    join_slices(graph)
    merge_equal(graph)
    fold_views(graph)
    compute_before_expanding(graph)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    merge_equal(graph)
    assert_functional(graph)


def schema(node: fx.Node) -> torch.FunctionSchema | None:
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def mutated(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes."""
    found = schema(node)
    if found is None or not found.is_mutable:
        return []
    bound: dict[str, Any] = dict(zip((a.name for a in found.arguments), node.args, strict=False)) | dict(node.kwargs)
    written = [bound.get(a.name) for a in found.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [value for value in written if isinstance(value, fx.Node)]


def is_view(node: fx.Node) -> bool:
    """True if a node's value shares the storage of its first argument."""
    if node.target is operator.getitem:
        return is_view(base(node))
    if node.target in UNDECLARED_VIEWS:
        return True
    found = schema(node)
    return found is not None and not found.is_mutable and any(r.alias_info is not None for r in found.returns)


def base(node: fx.Node) -> fx.Node:
    """The first argument of a view."""
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def view_root(node: fx.Node) -> fx.Node:
    """The value that owns the storage of `node`."""
    while is_view(node):
        node = base(node)
    return node


def assert_functional(graph: fx.Graph) -> None:
    for node in graph.nodes:
        plain = node.op in ("placeholder", "get_attr", "output", "call_function")
        assert plain, f"{node.format_node()} is not a plain operator"
        assert not mutated(node), f"{node.format_node()} writes its argument"


def functionalise(graph: fx.Graph) -> None:
    """Rewrite operators that write a value made here, as composite kernels do (rms_norm's add_), to their functional form."""
    for node in list(graph.nodes):
        for target in mutated(node):
            name, overload = node.target._schema.name.split("::")[1], node.target._overloadname
            packet = getattr(getattr(torch.ops, node.target.namespace), name.removesuffix("_"), None)
            functional = getattr(packet, overload, None)
            alive = [n for n in graph.nodes if view_root(n) is view_root(target) and any(node < user for user in n.users)]
            fresh = target.op == "call_function" and not is_view(target)
            if not (name.endswith("_") and functional and fresh and set(alive) <= {target}):
                raise ValueError(
                    f"{node.target} (from {_source(node)}) writes a tensor that is seen elsewhere; use its functional form"
                )
            node.target = functional
            target.replace_all_uses_with(node, delete_user_cb=functools.partial(operator.lt, node))


def compute_lazy_bits(graph: fx.Graph) -> None:
    """Conjugate and negate where the graph says so.

    The lazy forms are views whose memory holds the value before: passes that compare views by their layout would take one for
    its base, and a collective would move what lies in memory.
    """
    for node in graph.nodes:
        if node.target in LAZY:
            node.target = LAZY[node.target]
            node.meta["val"] = node.target(base(node).meta["val"])


def reject_randomness(graph: fx.Graph) -> None:
    for node in graph.nodes:
        found = schema(node)
        if found is None or torch.Tag.nondeterministic_seeded not in node.target.tags:
            continue
        names = [a.name for a in found.arguments]
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        attention_without_dropout = "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0
        if not attention_without_dropout:
            raise ValueError(
                f"{node.target} (from {_source(node)}) draws from torch's generator, "
                "so that its result would depend on the layout and on recomputation"
            )


def add_nothing(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2:
            for zero, other in (node.args, node.args[::-1]):
                if isinstance(zero, fx.Node) and zero.target in ZEROS and _same_layout(node, other):
                    _replace(node, other)
                    break


def join_slices(graph: fx.Graph) -> None:
    """A sum of slice_backwards that tile a dimension is a concatenation, in one pass instead of three for each slice."""
    tiles: dict[fx.Node, tuple[int, list[tuple[int, int, fx.Node]]]] = {}
    for node in list(graph.nodes):
        if node.target is aten.slice_backward.default:
            grad, sizes, dim, start, end, step = node.args
            size = sizes[dim]
            if step == 1 and not _same_layout(node, grad):
                tiles[node] = (dim % len(sizes), [(start, min(end, size), grad)])
        elif node.target is aten.add.Tensor and not node.kwargs and all(a in tiles and len(a.users) == 1 for a in node.args):
            (dim, left), (dim2, right) = (tiles[a] for a in node.args)
            if dim != dim2 or node.args[0] is node.args[1]:
                continue
            joined = sorted(left + right, key=lambda tile: tile[0])
            if any(a[1] > b[0] for a, b in itertools.pairwise(joined)):
                continue
            whole = all(a[1] == b[0] for a, b in itertools.pairwise(joined))
            if whole and joined[0][0] == 0 and joined[-1][1] == node.meta["val"].shape[dim]:
                node.target, node.args = aten.cat.default, ([tile[2] for tile in joined], dim)
            else:
                tiles[node] = (dim, joined)


def merge_equal(graph: fx.Graph) -> None:
    """Of equal nodes of one phase keep the first. Across phases that would save a value instead of computing it again."""
    first: dict[Hashable, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not _mergeable(node):
            continue
        phase = "any" if is_view(node) else node.meta["phase"]
        key = (node.target, _key(node.args), _key(node.kwargs), phase)
        kept = first.setdefault(key, node)
        if kept is not node:
            _replace(node, kept)


def fold_views(graph: fx.Graph) -> None:
    """Replace a view by the earliest value of its storage that looks the same, or chained reshapes by one.

    Two views of a root that agree in shape, strides and offset while tracing map indices alike whatever the root's strides.
    """
    seen: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        root = view_root(node)
        look = (root, value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
        kept = seen.setdefault(look, node)
        if kept is not node:
            _replace(node, kept)
            continue
        if not is_view(node) or node.target is operator.getitem:
            continue
        parent = base(node)
        while is_view(parent) and parent.target is not operator.getitem and _reshapes(base(parent), value):
            parent = base(parent)
        if parent is not base(node):
            node.target, node.args, node.kwargs = aten.view.default, (parent, list(value.shape)), {}


def compute_before_expanding(graph: fx.Graph) -> None:
    """Operate with a scalar before an expand rather than after it, where only broadcasting operators read the result."""
    for node in list(graph.nodes):
        source = node.args[0] if node.target in SCALAR else None
        if source is None or source.target is not aten.expand.default:
            continue
        # The other operand then has the layout that the result would get from this one.
        if not all(
            user.target in BROADCASTING and any(_same_layout(node, a) for a in user.args if a is not node)
            for user in node.users
        ):
            continue
        small = base(source)
        with graph.inserting_before(node):
            result = graph.call_function(node.target, (small, *node.args[1:]), node.kwargs)
        result.meta = {**node.meta, "val": node.target(small.meta["val"], *node.args[1:], **node.kwargs)}
        node.target, node.args, node.kwargs = aten.expand.default, (result, list(source.args[1])), {}
        node.meta["val"] = result.meta["val"].expand(source.args[1])


def _reshapes(node: fx.Node, value: Tensor) -> bool:
    """True if `value` has the elements of `node` in the same order, both contiguous."""
    other = node.meta.get("val")
    return (
        isinstance(other, Tensor)
        and other.is_contiguous()
        and value.is_contiguous()
        and other.dtype == value.dtype
        and other.numel() == value.numel()
        and other.storage_offset() == value.storage_offset()
    )


def _same_layout(node: fx.Node, other: Any) -> bool:
    a = node.meta.get("val")
    b = other.meta.get("val") if isinstance(other, fx.Node) else None
    return isinstance(a, Tensor) and isinstance(b, Tensor) and _layout(a) == _layout(b)


def _layout(x: Tensor) -> Hashable:
    return x.dtype, x.device, x.layout, tuple(x.shape), x.stride()


def _is_first_power(node: fx.Node) -> bool:
    """pow(x, 1) is a copy of x; the backward of a square is full of it."""
    return node.target is aten.pow.Tensor_Scalar and bool(node.args[1] == 1) and _same_layout(node, node.args[0])


def _mergeable(node: fx.Node) -> bool:
    """Communication is left as it was lowered; everything else of ATen is a pure function of its arguments."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"


def _key(value: Any) -> Hashable:
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_key, value))
    if isinstance(value, dict):
        return tuple(sorted((k, _key(v)) for k, v in value.items()))
    return value if isinstance(value, fx.Node) else (type(value), repr(value))


def _source(node: fx.Node) -> str:
    return str(node.meta.get("source", "an unknown line"))


def _replace(node: fx.Node, other: Any) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
