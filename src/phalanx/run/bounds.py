"""Which batch entries index an embedding, and how many rows it has.

A rank that holds some of the rows takes an id that it does not hold for another rank's, and one that nobody holds would become
zeros in silence. So ids are checked where a batch comes in.
"""

from __future__ import annotations

import torch
from torch import fx

import phalanx.comm.collectives  # noqa: F401 - registers the operators named below
from phalanx.derive.program import Program, Segment

aten = torch.ops.aten

# Views and casts of ids, and what a shard of the rows does to them.
KEEPING = frozenset({
    aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.slice.Tensor,
    aten.clone.default, aten.alias.default, aten.to.dtype, aten._to_copy.default, aten.masked_fill.Scalar,
    torch.ops.phx.offset.default,
})  # fmt: skip


def embedding_rows(program: Program) -> dict[str, int]:
    """Number of rows by batch entry that is an index of an embedding, the smallest if there are several."""
    rows: dict[str, int] = {}
    for segment in program.segments:
        if isinstance(segment.cls.lowered, fx.GraphModule):
            for entry, count in _in_segment(program, segment):
                rows[entry] = min(count, rows.get(entry, count))
    return rows


def _in_segment(program: Program, segment: Segment) -> list[tuple[str, int]]:
    graph = segment.cls.lowered.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"][4:]  # after world, step, microbatch, salt
    params = dict(zip(placeholders, segment.params, strict=False))
    inputs = dict(zip(placeholders[len(segment.params) + len(segment.buffers) :], segment.inputs, strict=True))
    found = []
    for node in graph.nodes:
        if node.target is aten.embedding.default:
            weight, index = _origin(node.args[0]), _origin(node.args[1])
            if weight in params and index in inputs and inputs[index].kind == "batch":
                found.append((inputs[index].name, program.parameters[params[weight]].shape[0]))
    return found


def _origin(node: fx.Node) -> fx.Node:
    """The placeholder behind a chain of operators that keep ids what they are."""
    while node.op == "call_function" and node.target in KEEPING and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
