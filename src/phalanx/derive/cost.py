"""What a graph costs: floating-point operations and bytes moved, by the shapes on its nodes; and what it is to make a value again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from phalanx.derive.clean import is_view

# Read rows of their first tensor, not all of it.
GATHERS = {torch.ops.aten.embedding.default, torch.ops.aten.index_select.default, torch.ops.aten.gather.default}
COLLECTIVES = ("phx::all_reduce", "phx::all_gather", "phx::reduce_scatter", "phx::all_to_all")

# Flops in the time of moving one byte, of an H100 SXM by its data sheet: 989 Tflop/s in bfloat16 to 3.35 TB/s of memory, and to
# 450 GB/s of NVLink each way. They order what to make again; they are no prediction.
FLOPS_PER_BYTE = 295
FLOPS_PER_WIRE_BYTE = 2198
HASH_PASSES = 64
"""Times that making a dropout mask takes as long as copying it: 6.7 ms to 0.1 ms for 4 MiB on one core."""


def flops(graph: fx.Graph) -> float:
    """2 per multiply-add of matrix products, convolutions and attention (causal in full). Pointwise work counts nothing."""
    return float(sum(map(flops_of, graph.nodes)))


def bytes_moved(graph: fx.Graph) -> int:
    """Read plus written by every node that is not a view, without cache reuse."""
    return sum(map(bytes_of, graph.nodes))


def stored_bytes(nodes: list[fx.Node]) -> int:
    """Memory that keeping these values keeps: the storages behind them, each once."""
    storages = [v.untyped_storage() for n in nodes if isinstance(v := n.meta.get("val"), Tensor)]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def recompute_price(node: fx.Node) -> float:
    """Time to make a value again, in flops: the longer of computing and moving bytes (the roofline), or the wire's."""
    if is_collective(node):
        return FLOPS_PER_WIRE_BYTE * bytes_of(node)
    passes = HASH_PASSES if node.target is torch.ops.phx.dropout_mask.default else 1
    return max(flops_of(node), FLOPS_PER_BYTE * passes * bytes_of(node))


def is_collective(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in COLLECTIVES


def bytes_of(node: fx.Node) -> int:
    """Read plus written by one node."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or is_view(node):
        return 0
    written = _nbytes(node.meta.get("val"))
    read = sum(_nbytes(a.meta.get("val")) for a in node.all_input_nodes)
    if node.target in GATHERS:
        read += written - _nbytes(node.all_input_nodes[0].meta.get("val"))
    return written + read


def flops_of(node: fx.Node) -> float:
    """2 per multiply-add of one node."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
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


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, (tuple, list)) else 0


def _attention_flops(qkv: Any, products: tuple[int, int]) -> float:
    """`products`: how many matrix products contract or produce the query-key width, and how many the value width.

    Forward: q k^T, p v. Backward (Dao et al. 2022, algorithm 4): q k^T again, dq, dk; dp, dv.
    """
    query, key, value = qkv
    scores = query.shape[0] * query.shape[1] * query.shape[-2] * key.shape[-2]
    return float(2 * scores * (products[0] * query.shape[-1] + products[1] * value.shape[-1]))
