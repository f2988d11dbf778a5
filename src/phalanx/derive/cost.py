"""What a graph costs: floating-point operations and bytes moved, by the shapes on its nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from phalanx.derive.clean import is_view

# Read rows of their first tensor, not all of it.
GATHERS = {torch.ops.aten.embedding.default, torch.ops.aten.index_select.default, torch.ops.aten.gather.default}


def flops(graph: fx.Graph) -> float:
    """2 per multiply-add of matrix products, convolutions and attention (causal in full). Pointwise work counts nothing."""
    return float(sum(_node_flops(node) for node in graph.nodes if node.op == "call_function"))


def bytes_moved(graph: fx.Graph) -> int:
    """Read plus written by every node that is not a view, without cache reuse."""
    total = 0
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or is_view(node):
            continue
        written = _nbytes(node.meta.get("val"))
        read = sum(_nbytes(a.meta.get("val")) for a in node.all_input_nodes)
        if node.target in GATHERS:
            read += written - _nbytes(node.all_input_nodes[0].meta.get("val"))
        total += written + read
    return total


def stored_bytes(nodes: list[fx.Node]) -> int:
    """Memory that keeping these values keeps: the storages behind them, each once."""
    storages = [v.untyped_storage() for n in nodes if isinstance(v := n.meta.get("val"), Tensor)]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, (tuple, list)) else 0


def _node_flops(node: fx.Node) -> float:
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    packet = node.target.overloadpacket
    values: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    args, kwargs = values
    name = node.target._schema.name.split("::")[1]
    if name.startswith("_scaled_dot_product") and name.endswith("backward"):
        return _attention_flops(args[1:4], products=(3, 2))
    if name.startswith("_scaled_dot_product"):
        return _attention_flops(args[:3], products=(1, 1))
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=node.meta.get("val")))
    return 0.0


def _attention_flops(qkv: Any, products: tuple[int, int]) -> float:
    """`products`: how many matrix products contract or produce the query-key width, and how many the value width.

    Forward: q k^T, p v. Backward (Dao et al. 2022, algorithm 4): q k^T again, dq, dk; dp, dv.
    """
    query, key, value = qkv
    scores = query.shape[0] * query.shape[1] * query.shape[-2] * key.shape[-2]
    return float(2 * scores * (products[0] * query.shape[-1] + products[1] * value.shape[-1]))
