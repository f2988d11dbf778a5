"""The values that leave a module, on request: the segment that makes them is lowered once more, forward only, with these outputs too.

Nothing is added to what trains, so a value that nobody asks for costs nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from phalanx.derive.hints import hints_within
from phalanx.derive.lower import lower
from phalanx.derive.padding import cut_off, padded
from phalanx.derive.program import Origin, Piece, Program, Segment, Value
from phalanx.derive.split import split


@dataclass(frozen=True)
class Exit:
    """A tensor that leaves a module."""

    segment: int | None
    """Where it is made; None for the tables."""
    value: Value
    by_microbatch: bool
    """False if the batch does not decide it, so that it is the same in every microbatch."""


@dataclass(frozen=True)
class Watched:
    """A Program, forward only, whose segments output the values that leave one module as well."""

    path: str
    program: Program
    exits: tuple[Exit, ...]
    """In the order in which they are made: one for a module that returns one tensor and runs once."""


def watch(program: Program, path: str) -> Watched:
    """Make the values that leave the module `path`, as in "layers.3.mlp", outputs of a forward-only twin of `program`.

    Runs in the calling thread, as every derivation. Raises ValueError, with the closest match, for a path that computes nothing.
    """
    origin = program.origin
    assert origin is not None, "a Program that was not derived holds nothing to lower again"
    captured, _ = padded(origin.captured, program.parameters, program.buffers)
    pieces: list[tuple[int | None, Piece]] = list(enumerate(captured.pieces))
    if captured.tables is not None:
        pieces.insert(0, (None, captured.tables))
    leaving = {index: nodes for index, piece in pieces if (nodes := tuple(_leaving(piece.graph.graph, path)))}
    leaving = {index: tuple(cut_off(node.graph, node) for node in nodes) for index, nodes in leaving.items()}
    if not leaving:
        raise ValueError(_unknown(path, {p for _, piece in pieces for node in piece.graph.graph.nodes for p in _paths(node)}))

    segments, tables, exits = list(program.segments), program.tables, list[Exit]()
    for index, piece in pieces:
        if index not in leaving:
            continue
        original = tables if index is None else segments[index]
        assert original is not None
        twin, values = _twin(program, origin, original, piece, leaving[index])
        if index is None:
            tables = twin
        else:
            segments[index] = twin
        varies = _follows_batch(piece, program.tables_read_batch)
        exits += [Exit(index, value, node in varies) for value, node in zip(values, leaving[index], strict=True)]
    return Watched(path, replace(program, segments=tuple(segments), tables=tables), tuple(exits))


def _twin(
    program: Program, origin: Origin, segment: Segment, piece: Piece, nodes: tuple[fx.Node, ...]
) -> tuple[Segment, tuple[Value, ...]]:
    """The segment without gradients, with the values of `nodes` behind its own outputs; and these values."""
    cls, mesh, device = segment.cls, program.mesh, origin.device
    params, buffers, inputs = (
        tuple(replace(value, requires_grad=False) for value in values) for values in (cls.params, cls.buffers, cls.inputs)
    )
    keep_partial = any(value.spec.partial for value in cls.outputs)
    hints = hints_within(piece, origin.outputs)
    lowered = lower(piece, mesh, params, buffers, inputs, hints, keep_partial=keep_partial, device=device, extra=nodes)
    graphs = split(lowered.lowered, params, buffers, inputs, lowered.outputs, mesh, device)
    values = tuple(replace(value, name=f"{value.name} leaving a module") for value in lowered.outputs[len(segment.outputs) :])
    names = (*segment.outputs, *(value.name for value in values))
    return replace(segment, cls=replace(lowered, graphs=graphs), outputs=names), values


def _leaving(graph: fx.Graph, path: str) -> Iterator[fx.Node]:
    """Tensors made inside a call of the module and read outside it."""
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            for call in _calls(node):
                if call[0] == path and any(call not in _calls(user) for user in node.users):
                    yield node
                    break


def _calls(node: fx.Node) -> tuple[tuple[str, int], ...]:
    """(path, which call of it) of every module that was running."""
    return tuple((path, call) for path, call, _ in node.meta.get("calls", ()))


def _paths(node: fx.Node) -> tuple[str, ...]:
    return tuple(path for path, _ in _calls(node))


def _follows_batch(piece: Piece, tables_read_batch: bool) -> set[fx.Node]:
    """Nodes that depend on the batch, if only by what other segments made of it."""
    nodes = list(piece.graph.graph.nodes)
    first = len(piece.params) + len(piece.buffers)
    inputs = zip(nodes[first : first + len(piece.inputs)], piece.inputs, strict=True)
    found = {node for node, source in inputs if source.kind != "table" or tables_read_batch}
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _unknown(path: str, known: set[str]) -> str:
    close = difflib.get_close_matches(path, sorted(known), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(p for p in known if p.count('.') <= 1))}"
    return f"no module {path!r} computes anything in this model (one that hands its input through does not); {hint}"
