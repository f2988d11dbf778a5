"""A vocabulary that its axes do not divide: the captured graph on padded shapes, before anything is placed or lowered.

Parameters whose `valid` is set get rows (or columns) of zeros at the end. What is computed with them carries the padding on: such a
value has its true shape as meta "valid". Every operator is one of three kinds. Those in KEEPS treat entries of the padded dimension
apart from each other, with finite values and derivatives; cross entropy and look-ups (ABSORBS) know the true size themselves; before
any other the padding is cut off, so that nothing is ever computed from it. Hence no result depends on the padding and its
gradients are exactly zero: they start as zeros where it is cut off or left out, and operators in KEEPS hand zeros on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Form, Label, argument, dim_index, shape_of, tensors, valid_shape
from phalanx.derive.ops import rule_for
from phalanx.derive.ops.embedding import ROWS
from phalanx.derive.ops.loss import CLASSES
from phalanx.derive.program import Captured, Parameter, Piece, Source

aten = torch.ops.aten

Shapes = Mapping[Source, tuple[int, ...]]
Lengths = dict[Label, tuple[int, int]]
"""Of labels that are padded: the true size and the padded one."""

VIEWS = frozenset((aten.view, aten.reshape, aten._unsafe_view))
KEEPS = VIEWS | {
    aten.linear, aten.mm, aten.addmm, aten.bmm, aten.matmul, aten.einsum,
    aten.t, aten.numpy_T, aten.mT, aten.transpose, aten.permute, aten.movedim, aten.unsqueeze, aten.squeeze, aten.flatten,
    aten.slice, aten.select,
    aten.add, aten.sub, aten.mul, aten.div, aten.neg, aten.tanh, aten.sigmoid, aten.clamp, aten.clamp_min, aten.clamp_max,
    aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.alias, aten.detach,
}  # fmt: skip
"""Operators through which padding may go. Logarithms, roots and powers are not among them: their derivative at zero is infinite."""
ABSORBS: dict[object, Label] = {aten.cross_entropy_loss: CLASSES, aten.embedding: ROWS}
"""Operators whose rule reads the true size of one label."""


def padded(
    captured: Captured, parameters: Mapping[str, Parameter], buffers: Mapping[str, Parameter]
) -> tuple[Captured, list[dict[str, Any]]]:
    """The pieces on the shapes that placed parameters have, and where padding was cut off, as in `SegmentClass.notes` with "segment".

    `captured` itself if nothing is padded; then no piece is touched.
    """
    placed = {**buffers, **parameters}
    if all(p.valid is None for p in placed.values()):
        return captured, []
    shapes: dict[Source, tuple[int, ...]] = {}
    notes: list[dict[str, Any]] = []

    def pad(piece: Piece) -> Piece:
        padding = _Padding(piece, placed, shapes)
        made = padding.run()
        for name, shape in padding.leaving.items():
            shapes[Source("table" if piece is captured.tables else "cut", name)] = shape
        notes.extend({**note, "segment": piece.name} for note in padding.notes)
        return made

    tables = None if captured.tables is None else pad(captured.tables)
    pieces = tuple(pad(piece) for piece in captured.pieces)
    return replace(captured, pieces=pieces, tables=tables), notes


def cut_off(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The value without its padding, made right behind it."""
    here = node
    for dim, (true, held) in enumerate(zip(valid_shape(node), shape_of(node), strict=True)):
        if true != held:
            with graph.inserting_after(here):
                meta = {**here.meta, "val": here.meta["val"].narrow(dim, 0, true)}
                here = graph.call_function(aten.slice.Tensor, (here, dim, 0, true))
            here.meta = meta
    here.meta.pop("valid", None)
    return here


class _Padding:
    """One piece, operator by operator, from the captured graph to a copy on padded shapes."""

    def __init__(self, piece: Piece, placed: Mapping[str, Parameter], shapes: Shapes) -> None:
        self.piece, self.placed, self.shapes = piece, placed, shapes
        self.graph = fx.Graph()
        self.twins: dict[fx.Node, fx.Node] = {}
        self.short: dict[fx.Node, fx.Node] = {}
        """Values without their padding, by what they are cut from."""
        self.leaving: dict[str, tuple[int, ...]] = {}
        """Padded shapes of outputs."""
        self.notes: list[dict[str, Any]] = []

    def run(self) -> Piece:
        piece = self.piece
        sources: list[tuple[int, ...] | None] = [self.placed[name].shape for name in (*piece.params, *piece.buffers)]
        given = iter([*sources, *(self.shapes.get(source) for source in piece.inputs)])
        for node in piece.graph.graph.nodes:
            if node.op == "placeholder":
                self._copy(node, next(given))
            elif node.op == "output":
                self._copy(node).meta["val"] = tuple(self.twins[value].meta["val"] for value in node.args[0])
                for name, value in zip(piece.outputs, node.args[0], strict=True):
                    if self._is_padded(value):
                        self.leaving[name] = shape_of(self.twins[value])
            else:
                self._operator(node)
        if not any("valid" in twin.meta for twin in self.twins.values()):
            return piece
        return replace(piece, graph=fx.GraphModule(piece.graph, self.graph), key=f"{piece.key} padded")

    def _copy(self, node: fx.Node, shape: tuple[int, ...] | None = None) -> fx.Node:
        """A copy on the twins of its operands, of `shape` where that differs from the captured one."""
        twin = self.twins[node] = self.graph.node_copy(node, self.twins.__getitem__)
        if shape is not None and shape != shape_of(node):
            self._set_shape(twin, node, shape)
        return twin

    def _set_shape(self, twin: fx.Node, node: fx.Node, shape: tuple[int, ...]) -> None:
        dtype = node.meta["val"].dtype
        twin.meta = {**node.meta, "val": torch.empty(shape, dtype=dtype, device="meta"), "valid": shape_of(node)}

    def _is_padded(self, node: fx.Node) -> bool:
        return "valid" in self.twins[node].meta

    def _operator(self, node: fx.Node) -> None:
        if not any(self._is_padded(operand) for operand in tensors(node)):
            self._copy(node)
            return
        form = self._form(node)
        lengths = None if form is None else self._lengths(node, form)
        if form is None or lengths is None:
            self._on_short(node)
        else:
            self._on_padded(node, form, lengths)

    def _form(self, node: fx.Node) -> Form | None:
        """What the operator does to dimensions, if it is known to let padding through or to leave it out."""
        packet, rule = _packet(node), rule_for(node)
        if rule is None or (packet not in KEEPS and packet not in ABSORBS):
            return None
        if packet is aten.div and any(self._is_padded(divisor) for divisor in tensors(node)[1:]):
            return None  # 0 / 0 is no number
        node.meta["parts"] = {}  # a padded dimension is never fused, and no other layout's parts are meant
        return rule(node)

    def _lengths(self, node: fx.Node, form: Form) -> Lengths | None:
        """The padded labels of an operator; None if one of them may not be padded here."""
        found: Lengths = {}
        for operand, labels in zip(tensors(node), form.operands, strict=True):
            for label, true, held in zip(labels, shape_of(operand), shape_of(self.twins[operand]), strict=True):
                if true != held and (label is WHOLE or found.setdefault(label, (true, held)) != (true, held)):
                    return None
        [results] = form.results
        for labels, value in zip((*form.operands, results), (*tensors(node), node), strict=True):
            for label, size in zip(labels, shape_of(value), strict=True):
                if label in found and size != found[label][0]:
                    return None  # merged with a neighbour, or taken apart
        summed = {label for label in found if label not in results}
        return found if summed <= {ABSORBS.get(_packet(node))} else None

    def _on_padded(self, node: fx.Node, form: Form, lengths: Lengths) -> None:
        operands = iter(
            [self._long(operand, labels, lengths, node) for operand, labels in zip(tensors(node), form.operands, strict=True)]
        )
        [labels] = form.results
        shape = tuple(
            lengths[label][1] if label in lengths else size for label, size in zip(labels, shape_of(node), strict=True)
        )
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: next(operands))
        target, packet = node.target, _packet(node)
        if packet in VIEWS:
            target, args, kwargs = aten.reshape.default, (args[0], list(shape)), {}
        elif packet is aten.slice and labels[dim_index(argument(node, "dim", 0), len(shape))] in lengths:
            target, args, kwargs = aten.alias.default, (args[0],), {}  # of everything, whose end may be given as a number
        twin = self.twins[node] = self.graph.create_node("call_function", target, args, kwargs, node.name)
        twin.meta = dict(node.meta)
        if shape != shape_of(node):
            self._set_shape(twin, node, shape)

    def _long(self, operand: fx.Node, labels: tuple[Label, ...], lengths: Lengths, node: fx.Node) -> fx.Node:
        """An operand with zeros wherever its labels are padded and it is not."""
        twin = self.twins[operand]
        shape = tuple(
            lengths[label][1] if label in lengths else size for label, size in zip(labels, shape_of(operand), strict=True)
        )
        missing = [want - has for want, has in zip(shape, shape_of(twin), strict=True)]
        if not any(missing):
            return twin
        widths = [width for amount in reversed(missing) for width in (0, amount)]
        longer = self.graph.call_function(aten.constant_pad_nd.default, (twin, widths, 0))
        longer.meta = {**node.meta, "requires_grad": operand.meta.get("requires_grad", False)}
        longer.meta["val"] = torch.empty(shape, dtype=operand.meta["val"].dtype, device="meta")
        longer.meta["valid"] = shape_of(operand)
        return longer

    def _on_short(self, node: fx.Node) -> None:
        def without(operand: fx.Node) -> fx.Node:
            twin = self.twins[operand]
            if not self._is_padded(operand):
                return twin
            if operand not in self.short:
                self.short[operand] = cut_off(self.graph, twin)
                # what is read outside a module still leaves it as it was
                for key in ("module", "modules", "calls", "source"):
                    if key in node.meta:
                        self.short[operand].meta[key] = node.meta[key]
                self._note(node, operand)
            return self.short[operand]

        self.twins[node] = self.graph.node_copy(node, without)

    def _note(self, node: fx.Node, operand: fx.Node) -> None:
        true, held = shape_of(operand), shape_of(self.twins[operand])
        sizes = ", ".join(f"{a} of {b}" for a, b in zip(true, held, strict=True) if a != b)
        self.notes.append(
            {
                "node": str(node),
                "module": node.meta.get("module", "") or self.piece.name,
                "source": node.meta.get("source", ""),
                "bytes": math.prod(true) * operand.meta["val"].element_size(),
                "why": f"it may not see padding, so it reads {sizes} entries of a padded vocabulary, gathered",
            }
        )


def _packet(node: fx.Node) -> object:
    """The operator, of whichever overload."""
    return getattr(node.target, "overloadpacket", None)
