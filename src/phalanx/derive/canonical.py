"""A traced graph made plain: pure ATen calls without device, region, assertion or mutation, one op where a model wrote three.

Every pass keeps the values and the gradients, or raises with op, module and line. Factories carry no device: run the graph
under `torch.device(device)`. Passes work on one `fx.Graph` in place; constants are `get_attr` nodes with the tensor in
meta["constant"].
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from phalanx.derive.reject import refuse_data_dependent, where

aten = torch.ops.aten

ASSERTIONS = frozenset(
    f"aten::{name}"
    for name in (
        "_assert_tensor_metadata",
        "_assert_async",
        "_assert_scalar",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    )
)
VIEWS = frozenset(["aten::view", "aten::reshape", "aten::_unsafe_view"])
CASTS = frozenset(["aten::to", "aten::_to_copy", "aten::type_as"])
NO_GRADIENT = frozenset(
    ["aten::detach"]
    + [f"aten::{kind}_like" for kind in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")]
    + [f"aten::new_{kind}" for kind in ("zeros", "ones", "full", "empty")]
)
"""Ops whose result has no gradient although it is a float made from a float."""


def canonicalise(graph: fx.Graph, regions: torch.nn.Module) -> None:
    """Run every pass. `regions` owns the submodules of higher-order ops that `graph` calls."""
    inline_regions(graph, regions)
    drop_assertions(graph)
    refuse_data_dependent(graph)
    expand_each(graph)
    functionalise(graph)
    drop_devices(graph)
    drop_identities(graph)
    unflatten_linear(graph)
    split_before_permuting(graph)
    mark_requires_grad(graph)
    eliminate_dead(graph)


def schema_name(node: fx.Node) -> str:
    """`aten::linear` for a call of an ATen overload, "" for anything else."""
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else ""


def emit(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any) -> fx.Node:
    """A new call at the insertion point, with the place of `like` and its own meta value."""
    node = graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    node.meta["val"] = target(*value_of(args), **value_of(kwargs))
    return node


def value_of(arguments: Any) -> Any:
    """Arguments with every node replaced by its meta value."""
    return map_aggregate(arguments, lambda item: item.meta["val"] if isinstance(item, fx.Node) else item)


def argument(node: fx.Node, name: str) -> Any:
    """The argument called `name` in the op's schema, or its default."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return list(node.args)[position] if position < len(node.args) else declared.default_value
    raise AssertionError(f"{node.target} has no argument {name}")


def inline_regions(graph: fx.Graph, regions: torch.nn.Module) -> None:
    """no_grad regions become their nodes with detached results; autocast regions that do nothing become their nodes."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        name = str(node.target)
        if name == "wrap_with_set_grad_enabled":
            grad, body, operands = bool(node.args[0]), node.args[1], node.args[2:]
        elif name == "wrap_with_autocast":
            enabled, body, operands, grad = node.args[2], node.args[4], node.args[5:], True
            if enabled:
                first = next(inner for inner in getattr(regions, body.target).graph.nodes if inner.op == "call_function")
                raise ValueError(
                    f"{where(first)} runs under torch.autocast. What that casts is decided as ops run, so a captured graph "
                    "cannot keep it: cast the parameters (model.to(torch.bfloat16)) or activations with .to(dtype)"
                )
        else:
            raise ValueError(f"{where(node)}: a graph cannot contain the higher-order op {name}; write it with plain ops")
        if grad and node.meta.get("no_grad"):
            raise ValueError(f"{where(node)}: an enable_grad region inside a no_grad region; detach values instead")
        region = getattr(regions, body.target)
        for inner in region.graph.nodes:
            inner.meta["no_grad"] = not grad or node.meta.get("no_grad", False)
        inline_regions(region.graph, region)
        _splice(graph, node, region.graph, operands, detach=not grad)


def _splice(graph: fx.Graph, node: fx.Node, body: fx.Graph, operands: tuple[Any, ...], detach: bool) -> None:
    env: dict[fx.Node, Any] = {}
    supplied = iter(operands)
    with graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op == "placeholder":
                env[inner] = next(supplied)
            elif inner.op == "output":
                results = [env[result] if isinstance(result, fx.Node) else result for result in inner.args[0]]
            else:
                env[inner] = graph.node_copy(inner, lambda old: env[old])
        if detach:
            results = [emit(graph, aten.detach.default, (r,), r) if isinstance(r, fx.Node) else r for r in results]
    for user in list(node.users):
        assert user.target is operator.getitem, f"region result used by {user.format_node()}"
        user.replace_all_uses_with(results[int(user.args[1])])  # type: ignore[arg-type]
        graph.erase_node(user)
    graph.erase_node(node)


def drop_assertions(graph: fx.Graph) -> None:
    """Run-time assertions of export, the sizes that only they read, and the bodies of inlined regions."""
    for node in list(graph.nodes):
        if schema_name(node) in ASSERTIONS:
            graph.erase_node(node)
    eliminate_dead(graph)


def expand_each(graph: fx.Graph) -> None:
    """broadcast_tensors, as in mse_loss, becomes an expand of each operand, or the operand where that has the shape already.

    Export names everything that later reads such an operand by the common call, so a count of targets would read the model.
    """
    for node in list(graph.nodes):
        if schema_name(node) != "aten::broadcast_tensors":
            continue
        for item in list(node.users):
            operand = node.args[0][item.args[1]]
            shape = item.meta["val"].shape
            with graph.inserting_before(item):
                same = operand.meta["val"].shape == shape
                item.replace_all_uses_with(operand if same else emit(graph, aten.expand.default, (operand, list(shape)), item))
            graph.erase_node(item)
        graph.erase_node(node)


def functionalise(graph: fx.Graph) -> None:
    """In-place ops on temporaries become their functional twins. Any other mutation raises ValueError."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    root: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        root[node] = node
        name = schema_name(node)
        if node.target is operator.getitem:
            root[node] = root[node.args[0]]
        elif name in ("aten::batch_norm", "aten::instance_norm"):
            _check_norm(node, "training" if name == "aten::batch_norm" else "use_input_stats")
        elif name == "aten::detach_":
            node.target = aten.detach.default
            root[node] = root[node.args[0]]
        elif name and node.target._schema.is_mutable:
            _make_functional(graph, node, root, order)
        elif name and (viewed := _viewed(node)) is not None:
            root[node] = root[viewed]


def _viewed(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the result may share, if any."""
    schema = node.target._schema  # type: ignore[union-attr]
    if any(returned.alias_info is not None for returned in schema.returns):
        for declared in schema.arguments:
            if declared.alias_info is not None:
                operand = argument(node, declared.name)
                return operand if isinstance(operand, fx.Node) else None
    # These return their input when they have nothing to do; the schema does not say so.
    if schema.name in ("aten::dropout", "aten::type_as"):
        return node.args[0]  # type: ignore[return-value]
    return None


def _check_norm(node: fx.Node, training: str) -> None:
    if argument(node, training) and argument(node, "running_mean") is not None:
        raise ValueError(
            f"{where(node)} updates its running statistics in the forward, which a Program does not do: use "
            "track_running_stats=False, put the layer in eval mode, or use LayerNorm, RMSNorm or GroupNorm"
        )


def _make_functional(graph: fx.Graph, node: fx.Node, root: dict[fx.Node, fx.Node], order: dict[fx.Node, int]) -> None:
    schema = node.target._schema  # type: ignore[union-attr]
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    operand = argument(node, written[0])
    twin = _functional_twin(node.target)
    if len(written) != 1 or twin is None or not isinstance(operand, fx.Node):
        raise ValueError(f"{where(node)} writes to its arguments and has no functional form: use an op that does not")
    base = root[operand]
    if base.op != "call_function":
        what = f"{base.meta.get('kind', 'tensor')} {base.meta.get('name', base.name)!r}"
        raise ValueError(
            f"{where(node)} changes the {what} in place during the forward, which a Program does not do: return the new value "
            "instead, or leave it out (BatchNorm: eval mode, or track_running_stats=False)"
        )
    if node.meta.get("no_grad") and not base.meta.get("no_grad"):
        raise ValueError(f"{where(node)} changes, under no_grad, a tensor made outside: its gradient would not see the change")
    for other, other_root in root.items():
        shares = other_root is base and other not in (operand, node)
        if shares and any(order[user] > order[node] for user in other.users):
            raise ValueError(
                f"{where(node)} writes to memory that is used later through another view: build the result with torch.where, "
                "torch.cat or select_scatter, or call .clone() first"
            )
    with graph.inserting_before(node):
        result = emit(graph, twin, node.args, node, **node.kwargs)
        order[result] = order[node]
        if result.meta["val"].dtype != operand.meta["val"].dtype:  # an in-place op keeps the dtype of what it writes to
            result = emit(graph, aten.to.dtype, (result, operand.meta["val"].dtype), node)
            order[result] = order[node]
    operand.replace_all_uses_with(result, delete_user_cb=lambda user: order[user] > order[node])
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    del root[node]
    root[result] = result


def _functional_twin(target: Any) -> Any:
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None) if name.endswith("_") else None
    overload = getattr(packet, target._overloadname, None) if packet is not None else None
    return None if overload is None or overload._schema.is_mutable else overload


def drop_devices(graph: fx.Graph) -> None:
    """Take device, layout and pinning out of every call; a factory states its dtype, so that no default decides it."""
    for node in list(graph.nodes):
        name = schema_name(node)
        if not name:
            continue
        if name in CASTS:
            node.args, node.kwargs, node.target = (node.args[0], node.meta["val"].dtype), {}, aten.to.dtype
            continue
        declared = {a.name for a in node.target._schema.arguments}
        if "device" in declared and "dtype" in declared:
            kept = {key: value for key, value in node.kwargs.items() if key not in ("device", "layout", "pin_memory")}
            node.kwargs = {**kept, "dtype": node.meta["val"].dtype}


def drop_identities(graph: fx.Graph) -> None:
    """Ops that return their input: casts to the same dtype, dropout that is off, aliases, copies of constants, sums with zero.

    The last are how people start a sum of losses. They would hide that it is linear.
    """
    for node in list(graph.nodes):
        name = schema_name(node)
        if name == "aten::add" and isinstance(node.args[1], fx.Node) and _is_zero(node.args[0]) and not node.kwargs:
            node.args = (node.args[1], node.args[0])
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        idle = name in ("aten::alias", "aten::lift_fresh_copy", "aten::lift_fresh")
        idle |= name == "aten::to" and source.meta["val"].dtype == node.meta["val"].dtype
        idle |= name == "aten::add" and _adds_nothing(node)
        idle |= name == "aten::dropout" and (not argument(node, "train") or argument(node, "p") == 0)
        if idle:
            # a module that does nothing still has an output that can be named: what went in
            source.meta["modules"] = tuple(dict.fromkeys((*source.meta.get("modules", ()), *node.meta.get("modules", ()))))
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "get_attr" and node.meta["constant"].dim() == 0 and not node.meta["constant"].is_complex():
            with graph.inserting_before(node):
                value = node.meta["constant"]
                node.replace_all_uses_with(emit(graph, aten.full.default, ([], value.item()), node, dtype=value.dtype))
            graph.erase_node(node)


def _adds_nothing(node: fx.Node) -> bool:
    x, value = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(_is_zero(node.args[1]) and x.shape == value.shape and x.dtype == value.dtype)


def _is_zero(value: Any) -> bool:
    """The number, or a tensor filled with it."""
    if isinstance(value, fx.Node):
        if value.op == "get_attr":
            constant: Tensor = value.meta["constant"]
            return constant.dim() == 0 and bool(constant == 0)
        name = schema_name(value)
        return name in ("aten::zeros", "aten::zeros_like") or (name == "aten::full" and bool(value.args[1] == 0))
    return isinstance(value, int | float) and value == 0


def unflatten_linear(graph: fx.Graph) -> None:
    """view(-1, K) → addmm or linear → view, as GPT-2's Conv1D and nn.MultiheadAttention write it, keeps the leading dimensions apart."""
    for product in list(graph.nodes):
        if product.target not in (aten.addmm.default, aten.linear.default) or len(product.users) != 1 or product.kwargs:
            continue
        unflatten = next(iter(product.users))
        if product.target is aten.addmm.default:
            bias, flat, weight = product.args
            if bias.meta["val"].dim() != 1:
                continue
        else:
            flat, weight, bias = (*product.args, None)[:3]
        if not all(schema_name(node) in VIEWS for node in (flat, unflatten)) or flat.meta["val"].dim() != 2:
            continue
        leading, outer = unflatten.meta["val"].shape[:-1], product.meta["val"].shape[-1]
        if unflatten.meta["val"].shape[-1] != outer:
            continue
        with graph.inserting_before(unflatten):
            x = flat.args[0]
            if x.meta["val"].shape[:-1] != leading:
                x = emit(graph, aten.reshape.default, (x, [*leading, flat.meta["val"].shape[-1]]), flat)
            if product.target is aten.addmm.default:
                weight = emit(graph, aten.t.default, (weight,), product)
            unflatten.replace_all_uses_with(emit(graph, aten.linear.default, (x, weight, bias), product))
    eliminate_dead(graph)


def split_before_permuting(graph: fx.Graph) -> None:
    """view → transpose → view, whose second view splits what the first merged, becomes view → permute.

    nn.MultiheadAttention merges batch and heads so: (L, B, H d) → (L, B H, d) → (B H, L, d) → (B, H, L, d). Merged, only the batch
    could stay split.
    """
    for last in list(graph.nodes):
        turn = last.args[0] if last.args else None
        first = turn.args[0] if isinstance(turn, fx.Node) and turn.args else None
        if schema_name(last) not in VIEWS or not isinstance(turn, fx.Node) or not isinstance(first, fx.Node):
            continue
        if schema_name(turn) != "aten::transpose" or schema_name(first) not in VIEWS or len(turn.users) != 1:
            continue
        pieces = _split_dimensions(tuple(turn.meta["val"].shape), tuple(last.meta["val"].shape))
        if pieces is None:
            continue
        order = list(range(len(pieces)))
        a, b = (argument(turn, name) % len(order) for name in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
        # dimension d of `first` is dimension order[d] of `turn`
        sizes = [pieces[order[dim]] for dim in range(len(order))]
        starts = {order[dim]: sum(map(len, sizes[:dim])) for dim in range(len(order))}
        permutation = [starts[dim] + at for dim in range(len(order)) for at in range(len(pieces[dim]))]
        with graph.inserting_before(last):
            apart = emit(graph, aten.reshape.default, (first.args[0], [size for group in sizes for size in group]), first)
            last.replace_all_uses_with(emit(graph, aten.permute.default, (apart, permutation), last))
    eliminate_dead(graph)


def _split_dimensions(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """For each dimension before, the dimensions after that it is split into; None if a dimension is merged."""
    groups: list[tuple[int, ...]] = []
    at = 0
    for size in before:
        group = [after[at]] if at < len(after) else []
        at += 1
        while at < len(after) and math.prod(group) < size:
            group.append(after[at])
            at += 1
        if math.prod(group) != size or not group:
            return None
        groups.append(tuple(group))
    return groups if at == len(after) else None


def mark_requires_grad(graph: fx.Graph) -> None:
    """Set meta["requires_grad"] on every node, and drop the detach of a value that has no gradient."""
    for node in list(graph.nodes):
        if node.op == "placeholder":
            node.meta["requires_grad"] = node.meta.get("trainable", False)
            continue
        name = schema_name(node)
        differentiable = name not in NO_GRADIENT and any(_is_float(value) for value in values(node))
        incoming = any(source.meta.get("requires_grad") for source in node.all_input_nodes)
        node.meta["requires_grad"] = differentiable and incoming
        if name == "aten::detach" and not incoming:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def values(node: fx.Node) -> Iterator[Tensor]:
    """The meta tensors that a node yields."""
    value = node.meta.get("val")
    yield from (v for v in (value if isinstance(value, list | tuple) else (value,)) if isinstance(v, Tensor))


def _is_float(value: Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def eliminate_dead(graph: fx.Graph) -> None:
    """Erase calls that nothing reads. After functionalise no call has a side effect."""
    for node in reversed(list(graph.nodes)):
        mutates = bool(schema_name(node)) and node.target._schema.is_mutable
        if node.op not in ("placeholder", "output") and not node.users and not mutates:
            graph.erase_node(node)
