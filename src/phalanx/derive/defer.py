"""Where the backward all_reduce of the table's second row happens: at the point of use, earlier, or not in the graph at all.

`lower` marks every replicated operand of a varying operator. A mark may move towards the inputs through what depends on parameters
alone and through views, since summing commutes with their backward. A mark that reaches a parameter with all of its uses is deferred:
its gradient stays partial over the mark's axes and the schedule sums it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from phalanx.mesh import Mesh

aten = torch.ops.aten


def MARK(x: Any, axes: frozenset[str]) -> Any:
    raise AssertionError("marks are replaced before the graph runs")


VIEWS = frozenset(
    (aten.reshape.default, aten.view.default, aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default,
     aten.squeeze.dims, aten.alias.default, aten.expand.default, aten.slice.Tensor, aten.view_as_complex.default,
     aten.view_as_real.default)
)  # fmt: skip


PRODUCTS = frozenset((aten.linear.default, aten.mm.default, aten.addmm.default, aten.matmul.default))


def defer(graph: fx.Graph, mesh: Mesh, params: Sequence[fx.Node]) -> tuple[frozenset[str], ...]:
    """Resolve every mark in place; return, for each parameter, the axes over which its gradient is left partial."""
    weights = _weights(graph, params)
    for node in reversed(list(graph.nodes)):
        axes = _common(node)
        if not axes or node.op != "call_function" or _is_mark(node):
            continue
        few_heads = any(mark.meta.get("few_heads") for mark in node.users)
        if _is_gather(node):
            _vary_gather(graph, node, axes)
        elif not _is_move(node) and (node in weights or node.target in VIEWS or few_heads):
            # few heads: what leads from their projection to attention is lifted, so that the projection's weight is deferred and
            # its input shares the mark of the query projection's
            _lift(graph, node, axes, few_heads and node.target not in PRODUCTS)
    deferred = []
    for param in params:
        axes = _common(param)
        _drop(graph, param, axes)
        deferred.append(axes)
    _place(graph, mesh)
    return tuple(deferred)


def _weights(graph: fx.Graph, params: Sequence[fx.Node]) -> set[fx.Node]:
    """Parameters and what is computed from parameters and constants alone."""
    found = set(params)
    placeholders = set(graph.find_nodes(op="placeholder"))
    fixed = {node for node in graph.nodes if node.op == "get_attr"}
    for node in graph.nodes:
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        inputs = node.all_input_nodes
        if all(i in found or i in fixed for i in inputs):
            (found if any(i in found for i in inputs) else fixed).add(node)
    assert not found & (placeholders - set(params))
    return found


def _is_mark(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is MARK


def _is_move(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.phx.move.default


def _is_gather(node: fx.Node) -> bool:
    return _is_move(node) and node.args[1] == "gather"


def _common(node: fx.Node) -> frozenset[str]:
    """Axes that every use of a value is marked with; none if some use is not marked."""
    users = list(node.users)
    if not users or not all(_is_mark(user) for user in users):
        return frozenset()
    common: frozenset[str] = users[0].args[1]  # type: ignore[assignment]
    for user in users[1:]:
        common &= user.args[1]  # type: ignore[operator]
    return common


def _drop(graph: fx.Graph, node: fx.Node, axes: frozenset[str]) -> None:
    """Take axes off every mark on a value."""
    if not axes:
        return
    for mark in list(node.users):
        left = mark.args[1] - axes  # type: ignore[operator]
        if left:
            mark.args = (node, left)
        else:
            mark.replace_all_uses_with(node)
            graph.erase_node(mark)


def _lift(graph: fx.Graph, node: fx.Node, axes: frozenset[str], few_heads: bool) -> None:
    """Move marks from a value's uses to its operator's operands."""
    _drop(graph, node, axes)
    for operand in node.all_input_nodes:
        if operand.meta.get("grad"):
            mark = _marked(graph, operand, axes)
            node.replace_input_with(operand, mark)
            if few_heads:
                mark.meta["few_heads"] = True


def _marked(graph: fx.Graph, x: fx.Node, axes: frozenset[str]) -> fx.Node:
    """The mark on x for these axes, right behind x so that any user of x can read it."""
    mark = next((user for user in x.users if _is_mark(user) and user.args[1] == axes), None)
    last = x
    if x.op == "placeholder":
        last = graph.find_nodes(op="placeholder")[-1]
    if mark is None:
        with graph.inserting_after(last):
            mark = graph.call_function(MARK, (x, axes))  # type: ignore[arg-type]  # replaced before it runs
        mark.meta.update({key: value for key, value in x.meta.items() if key != "few_heads"})
    else:
        last.append(mark)
    return mark


def _vary_gather(graph: fx.Graph, node: fx.Node, axes: frozenset[str]) -> None:
    """all_gather consumed by operators that vary over its axis: its backward is a reduce_scatter, shared with its twin if there is one."""
    axis = node.args[3]
    if axis not in axes:
        return
    _drop(graph, node, frozenset({str(axis)}))
    source = node.args[0]
    assert isinstance(source, fx.Node)
    twins = [
        other
        for other in source.users
        if _is_move(other) and other.args[1] == "gather_vary" and other.args[3:7] == node.args[3:7]
    ]
    if twins:
        node.append(twins[0])
        node.replace_all_uses_with(twins[0])
        graph.erase_node(node)
    else:
        node.args = (source, "gather_vary", *node.args[2:])


def _place(graph: fx.Graph, mesh: Mesh) -> None:
    """Write the remaining marks as collectives, the last mesh axis first, shared by all uses of a value."""
    placed: dict[tuple[fx.Node, str], fx.Node] = {}
    world = next(iter(graph.nodes))
    for mark in list(graph.nodes):
        if not _is_mark(mark):
            continue
        x, axes = mark.args
        for axis in reversed([name for name in mesh.names if name in axes]):
            if (x, axis) not in placed:
                behind = x if x.op != "placeholder" else graph.find_nodes(op="placeholder")[-1]
                with graph.inserting_after(behind):
                    args = (x, "vary", world, axis, mesh.shape[axis], 0, 0)
                    node = graph.call_function(torch.ops.phx.move.default, args)
                node.meta.update({key: value for key, value in mark.meta.items() if key != "few_heads"})
                node.meta["why"] = (
                    f"a value that is the same along {axis} is read by what is not: its gradient is a partial sum"
                )
                placed[x, axis] = node
            x = placed[x, axis]
        mark.replace_all_uses_with(x)
        graph.erase_node(mark)
