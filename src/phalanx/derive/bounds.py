"""Which batch entries are indices, and into how many rows or classes.

A rank that holds some of the rows takes an id that it does not hold for another rank's, and an id that nobody holds would become
zeros in silence. So ids are checked where a batch comes in.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from phalanx.derive.form import argument, shape_of, tensors
from phalanx.derive.ops.view import RULES as VIEWS
from phalanx.derive.program import IndexBound, Piece

aten = torch.ops.aten

KEEPING = frozenset(VIEWS) - {aten.cat, aten.concat, aten.stack, aten.pad, aten.constant_pad_nd, aten.tril, aten.triu} | {
    aten.to,
    aten._to_copy,
    aten.clone,
    aten.contiguous,
    aten.alias,
}
"""Operators whose result holds only values of their operand."""


def index_bounds(pieces: Iterable[Piece]) -> dict[str, IndexBound]:
    """The tightest bound of every batch entry that indexes an embedding or names the classes of a cross entropy."""
    found: dict[str, IndexBound] = {}
    for piece in pieces:
        placeholders = list(piece.graph.graph.find_nodes(op="placeholder"))
        entries = dict(zip(placeholders[len(piece.params) + len(piece.buffers) :], piece.inputs, strict=True))
        for node in piece.graph.graph.nodes:
            use = _use(node)
            source = entries.get(_origin(use[0])) if use else None
            if use and source is not None and source.kind == "batch":
                bound = use[1]
                known = found.get(source.name, bound)
                # an entry that is both read and predicted must be valid as both
                ignored = bound.ignored if bound.ignored == known.ignored else None
                found[source.name] = IndexBound(min(bound.size, known.size), ignored)
    return found


def _use(node: fx.Node) -> tuple[fx.Node, IndexBound] | None:
    packet = getattr(node.target, "overloadpacket", None)
    if packet is aten.embedding:
        weight, ids = tensors(node)[:2]
        return ids, IndexBound(shape_of(weight)[0])
    if packet is aten.cross_entropy_loss:
        logits, target = tensors(node)[:2]
        if not target.meta["val"].is_floating_point():
            classes = shape_of(logits)[1 if len(shape_of(logits)) > 1 else 0]
            return target, IndexBound(classes, argument(node, "ignore_index", -100))
    return None


def _origin(node: fx.Node) -> fx.Node:
    """The node behind a chain of operators that keep ids what they are."""
    while getattr(node.target, "overloadpacket", None) in KEEPING and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
