"""From a module, the names of its dimensions and a layout to a Program: capture, place, lower, split.

Everything here is decided before any rank computes, in the calling thread, and is the same for every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

import phalanx.comm.collectives  # noqa: F401 - registers the operators that lowered graphs contain
from phalanx.derive.bounds import index_bounds
from phalanx.derive.capture import Loss, Prepare, capture, check_capture, is_checkable
from phalanx.derive.coupling import refuse_coupling, samples
from phalanx.derive.hints import hints_by_node, hints_within
from phalanx.derive.lower import lower
from phalanx.derive.names import Layout, Placements, compile_names
from phalanx.derive.padding import padded
from phalanx.derive.precision import Precision
from phalanx.derive.program import Captured, Origin, Parameter, Piece, Program, Segment, SegmentClass, Source, Value
from phalanx.derive.recompute import Choice, Recompute, choices
from phalanx.derive.split import split
from phalanx.mesh import Mesh

__all__ = ["Layout", "Program", "Recompute", "capture", "derive", "derive_captured", "derive_placed"]


def derive(
    model: nn.Module,
    mesh: Mesh,
    *,
    example: Mapping[str, Tensor],
    names: Mapping[str, str] | None = None,
    layout: Layout | None = None,
    loss: Loss | None = None,
    microbatches: int = 1,
    blocks: str | None = None,
    train: bool = True,
    device: torch.device | str = "cpu",
    prepare: Prepare | None = None,
    recompute: Recompute = "none",
    batch_coupling: Literal["microbatch"] | None = None,
    precision: Precision | None = None,
) -> Program:
    """The Program of one training step of `model` on `mesh`.

    example is the global step batch. names and layout are described in `derive.names`, loss and prepare in `derive.capture`,
    precision in `derive.precision`, recompute in `derive.recompute`.
    What mixes samples is computed over the whole batch; with several microbatches that is refused, unless batch_coupling says
    that each microbatch is to be mixed alone. A small real model is run once on `example`, if it holds valid values, to see that the
    captured graph computes what the module does.
    Raises ValueError for everything that is wrong with them, before anything is computed.
    """

    def traced(microbatch_of: int) -> Captured:
        return capture(
            model, example, loss, microbatch_of=microbatch_of, blocks=blocks, train=train, prepare=prepare, precision=precision
        )

    captured = traced(microbatches)
    if microbatches > 1 and batch_coupling is None:
        # of a microbatch of one sample nothing can be told, so the whole batch is looked at
        refuse_coupling(captured if samples(captured) > 1 else traced(1), microbatches)
    if is_checkable(model, captured, example):
        alone = batch_coupling == "microbatch"
        check_capture(
            model, captured, example, loss, microbatch_of=microbatches, train=train, first_only=alone, precision=precision
        )
    return derive_captured(
        captured, mesh, names=names, layout=layout, microbatches=microbatches, device=device, recompute=recompute
    )


def derive_captured(
    captured: Captured,
    mesh: Mesh,
    *,
    names: Mapping[str, str] | None = None,
    layout: Layout | None = None,
    microbatches: int = 1,
    device: torch.device | str = "cpu",
    recompute: Recompute = "none",
    graphs: bool = True,
) -> Program:
    """The Program of an already captured model. With `graphs=False` the classes are lowered but not traced."""
    placed = compile_names(captured, mesh, names, layout)
    return derive_placed(captured, mesh, placed, microbatches=microbatches, device=device, recompute=recompute, graphs=graphs)


def derive_placed(
    captured: Captured,
    mesh: Mesh,
    placed: Placements,
    *,
    microbatches: int = 1,
    device: torch.device | str = "cpu",
    recompute: Recompute = "none",
    graphs: bool = True,
) -> Program:
    """The Program of a captured model whose parameters, batch entries and module outputs have Specs: any that divide are legal."""
    chosen = choices(recompute, [piece.name for piece in captured.pieces])
    long, cuts = padded(captured, placed.parameters, placed.buffers)
    deriving = _Deriving(long, mesh, placed, torch.device(device), chosen if graphs else None)
    tables = deriving.segment(long.tables, -1) if long.tables is not None else None
    segments = tuple(deriving.segment(piece, index) for index, piece in enumerate(long.pieces))
    count = deriving.segment(long.count, -1, keep_partial=True)
    batch_axes = tuple(axis for axis in mesh.names if axis in count.cls.outputs[0].spec.partial)
    report = [*({**note, "segment": s.name} for s in segments for note in s.cls.notes), *cuts]
    return Program(
        mesh, microbatches, segments, placed.parameters, placed.buffers, placed.batch, tables, captured.tables_read_batch, count,
        batch_axes, captured.warnings + placed.warnings, report, index_bounds(captured.pieces),
        Origin(captured, placed.outputs, torch.device(device)),
    )  # fmt: skip


class _Deriving:
    """Lowers pieces in order; equal pieces in equal surroundings share one class."""

    def __init__(
        self,
        captured: Captured,
        mesh: Mesh,
        placed: Placements,
        device: torch.device,
        recompute: Mapping[str, Choice] | None,
    ) -> None:
        self.captured, self.mesh, self.placed, self.device, self.recompute = captured, mesh, placed, device, recompute
        self.values: dict[tuple[str, str], Value] = {("batch", key): value for key, value in placed.batch.items()}
        self.classes: dict[object, SegmentClass] = {}

    def segment(self, piece: Piece, index: int, keep_partial: bool = False) -> Segment:
        last = index == len(self.captured.pieces) - 1
        cls = self._class(piece, keep_partial or last)
        kind = "table" if piece is self.captured.tables else "cut"
        for name, value in zip(piece.outputs, cls.outputs, strict=True):
            self.values[kind, name] = replace(value, name=name)
        return Segment(index, piece.name, cls, piece.params, piece.buffers, piece.inputs, piece.outputs)

    def _class(self, piece: Piece, keep_partial: bool) -> SegmentClass:
        params = tuple(_parameter_value(self.placed.parameters[name]) for name in piece.params)
        buffers = tuple(_parameter_value(self.placed.buffers[name]) for name in piece.buffers)
        inputs = tuple(self._input(source) for source in piece.inputs)
        hints = hints_within(piece, self.placed.outputs)
        anonymous = tuple(replace(value, name=str(at)) for at, value in enumerate((*params, *buffers, *inputs)))
        exits = hints_by_node(piece.graph.graph, hints)
        declared = tuple((at, exits[node]) for at, node in enumerate(piece.graph.graph.nodes) if node in exits)
        # tables and count have no backward
        choice = None if self.recompute is None else self.recompute.get(piece.name, "none")
        key = (piece.key, anonymous, declared, keep_partial, choice)
        if key not in self.classes:
            lowered = lower(piece, self.mesh, params, buffers, inputs, hints, keep_partial=keep_partial, device=self.device)
            if choice is not None:
                graphs = split(
                    lowered.lowered, lowered.params, lowered.buffers, lowered.inputs, lowered.outputs, self.mesh, self.device,
                    recompute=choice, accumulate=True, segment=piece.name,
                )  # fmt: skip
                lowered = replace(lowered, graphs=graphs)
            self.classes[key] = lowered
        return self.classes[key]

    def _input(self, source: Source) -> Value:
        return self.values[source.kind, source.name]


def _parameter_value(p: Parameter) -> Value:
    return Value(p.name, p.shape, p.dtype, p.spec, p.trainable)
