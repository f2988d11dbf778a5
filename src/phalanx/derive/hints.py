"""Where in a piece the declared states of module outputs apply: the node whose value leaves the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from phalanx.derive.program import Piece
from phalanx.spec import Spec


def hints_within(piece: Piece, outputs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Of the declared states, by module path, those of the modules that run in a piece."""
    modules = {path for node in piece.graph.graph.nodes for path in node.meta.get("modules", ())}
    return {path: spec for path, spec in outputs.items() if path in modules}


def hints_by_node(graph: fx.Graph, hints: Mapping[str, Spec]) -> dict[fx.Node, Spec]:
    """The nodes whose values leave the modules that hints are declared for."""
    found: dict[fx.Node, Spec] = {}
    for path, spec in hints.items():
        exits = [
            node for node in graph.nodes
            if node.op == "call_function" and _inside(node, path) and isinstance(node.meta.get("val"), torch.Tensor)
            and node.meta["val"].dim() == len(spec.dims) and any(not _inside(user, path) for user in node.users)
        ]  # fmt: skip
        for node in exits[-1:]:
            found[node] = spec
    return found


def _inside(node: fx.Node, path: str) -> bool:
    modules: Iterable[str] = node.meta.get("modules", ())
    return path in modules
