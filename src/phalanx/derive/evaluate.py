"""A Program in evaluation mode: the forward of the same model on the same mesh, with nothing dropped.

The modules themselves are long gone by then. What their evaluation mode would have changed is the dropout in the captured
graph, so that is switched off there, and the pieces are lowered once more, on request.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from phalanx.derive import derive_placed
from phalanx.derive.canonical import drop_identities
from phalanx.derive.form import argument
from phalanx.derive.names import Placements
from phalanx.derive.program import Captured, Piece, Program

aten = torch.ops.aten

DROPOUTS = {aten.dropout.default: "p", aten.scaled_dot_product_attention.default: "dropout_p"}
"""Operators that drop at random, and the argument that says how much."""


def evaluation(program: Program) -> Program:
    """A twin without dropout and without gradients; `program` itself if it drops nothing."""
    origin = program.origin
    assert origin is not None, "a Program that was not derived holds nothing to lower again"
    captured = origin.captured
    quiet = _quiet(captured)
    if quiet is captured:
        return program
    frozen = {name: replace(parameter, trainable=False) for name, parameter in program.parameters.items()}
    placed = Placements(frozen, program.buffers, program.batch, origin.outputs)
    return derive_placed(
        replace(quiet, parameters=frozen), program.mesh, placed, microbatches=program.microbatches, device=origin.device
    )


def _quiet(captured: Captured) -> Captured:
    """Without dropout, which no table has: they hold nothing random."""
    pieces = tuple(_without_dropout(piece) for piece in captured.pieces)
    changed = any(new is not old for new, old in zip(pieces, captured.pieces, strict=True))
    return replace(captured, pieces=pieces) if changed else captured


def _without_dropout(piece: Piece) -> Piece:
    """A copy in which every probability of dropping is 0; the piece itself if it has none above."""
    if not any(_drops(node) for node in piece.graph.graph.nodes):
        return piece
    graph, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in piece.graph.graph.nodes:
        twins[node] = twin = graph.node_copy(node, twins.__getitem__)
        if _drops(node):
            _set(twin, DROPOUTS[node.target], 0.0)
    drop_identities(graph)
    return replace(piece, graph=fx.GraphModule(piece.graph, graph), key=f"{piece.key} without dropout")


def _drops(node: fx.Node) -> bool:
    return node.target in DROPOUTS and argument(node, DROPOUTS[node.target], 0.0) != 0.0


def _set(node: fx.Node, name: str, value: float) -> None:
    """Give an argument of an ATen call, which may have been passed by place or by name, another value."""
    assert isinstance(node.target, torch._ops.OpOverload)
    place = [declared.name for declared in node.target._schema.arguments].index(name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)
