"""Whether the samples of a batch are computed apart, so that microbatches add up to what one process computes.

The batch is split over an axis with a rank for every sample, on paper only: the rules of the operators then say where a sample's
value needs another's. A loss may be summed over samples, and what is linear in it may follow; all else is coupling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from phalanx.derive.form import Form, shape_of, tensors
from phalanx.derive.move import steps
from phalanx.derive.ops import is_random, rule_for
from phalanx.derive.program import Captured, Piece, Source
from phalanx.derive.propagate import Placed, place
from phalanx.derive.reject import where
from phalanx.mesh import Mesh
from phalanx.spec import Spec

aten = torch.ops.aten
AXIS = "samples"
FILLS = frozenset(
    (aten.zeros, aten.ones, aten.full, aten.scalar_tensor, aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like,
     aten.ones_like, aten.full_like)
)  # fmt: skip
STRETCHES = frozenset((aten.expand, aten.expand_as, aten.broadcast_to))


@dataclass(frozen=True)
class State:
    """Of one value: its Spec on the axis of samples, and the dimensions along which it is the same everywhere."""

    spec: Spec
    weight: bool = False
    uniform: frozenset[int] = frozenset()


def samples(captured: Captured) -> int:
    """How many equal parts the batch entries of one microbatch have along dimension 0."""
    return math.gcd(*(shape[0] for shape, _ in captured.batch.values()))


def refuse_coupling(captured: Captured, microbatches: int) -> None:
    """Raise ValueError, with operator, module and source line, for the first operator that couples samples.

    captured has two samples or more: along a dimension of size 1 nothing can be told apart.
    """
    mesh = Mesh(**{AXIS: samples(captured)})
    assert mesh.size > 1, "one sample cannot be told from a batch"
    states: dict[Source, State] = {
        Source("batch", name): State(Spec(((AXIS,), *((),) * (len(shape) - 1)))) for name, (shape, _) in captured.batch.items()
    }
    known: dict[object, list[State]] = {}
    for kind, piece in (("table", captured.tables), *(("cut", piece) for piece in captured.pieces), ("count", captured.count)):
        if piece is None:
            continue
        given = [states[source] for source in piece.inputs]
        key = (piece.key, tuple(given))
        if key not in known:
            known[key] = _Walk(piece, given, mesh, microbatches).outputs()
        if kind != "count":
            states.update((Source(kind, n), s) for n, s in zip(piece.outputs, known[key], strict=True))  # type: ignore[arg-type]


class _Walk:
    def __init__(self, piece: Piece, inputs: Sequence[State], mesh: Mesh, microbatches: int) -> None:
        self.piece, self.mesh, self.microbatches = piece, mesh, microbatches
        self.states: dict[fx.Node, State | list[State]] = {}
        placeholders = piece.graph.graph.find_nodes(op="placeholder")
        own = len(piece.params) + len(piece.buffers)
        for at, node in enumerate(placeholders):
            whole = State(Spec.replicated(len(shape_of(node))), weight=at < len(piece.params))
            self.states[node] = whole if at < own else inputs[at - own]

    def outputs(self) -> list[State]:
        for node in self.piece.graph.graph.nodes:
            if node.op == "get_attr":
                self.states[node] = State(Spec.replicated(len(shape_of(node))))
            elif node.op == "call_function":
                self.states[node] = self._operator(node)
        result = self.piece.graph.graph.output_node().args[0]
        return [self._state(node) for node in result]  # type: ignore[union-attr]

    def _state(self, node: object) -> State:
        state = self.states[node]  # type: ignore[index]
        assert isinstance(state, State)
        return state

    def _operator(self, node: fx.Node) -> State | list[State]:
        if getattr(node.target, "__name__", "") == "getitem":
            several, index = self.states[node.args[0]], node.args[1]  # type: ignore[index]
            assert isinstance(several, list) and isinstance(index, int)
            return several[index]
        operands = [self._state(operand) for operand in tensors(node)]
        value = node.meta["val"]
        shapes = [tuple(v.shape) for v in value] if isinstance(value, (tuple, list)) else [tuple(value.shape)]
        weight = bool(operands) and all(state.weight for state in operands)
        rule = rule_for(node)
        if rule is None or is_random(node):
            if any(state.spec.varying for state in operands):
                raise self._refusal(node, "has no rule, so it may mix them")
            results = [State(Spec.replicated(len(shape)), weight) for shape in shapes]
            return results if isinstance(value, (tuple, list)) else results[0]
        node.meta["parts"] = {}
        try:
            form = rule(node)
        except ValueError as error:
            raise ValueError(f"{where(node)}: {error}") from error
        specs = self._specs(node, form, operands, shapes)
        results = [
            State(spec, weight, self._uniform(node, labels, shape, form, operands))
            for spec, labels, shape in zip(specs, form.results, shapes, strict=True)
        ]
        return results if isinstance(value, (tuple, list)) else results[0]

    def _specs(
        self, node: fx.Node, form: Form, operands: Sequence[State], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Spec, ...]:
        placed = [
            Placed(operand, state.spec, shape_of(operand), False, state.weight, False)
            for operand, state in zip(tensors(node), operands, strict=True)
        ]
        placement = place(form, placed, shapes, self.mesh)
        if any(placement.axes.get(label) for label in form.averaged):
            raise self._refusal(node, "divides by their number, so the sums of microbatches would not add up; sum instead")
        if form.emit is not None and any(placement.axes.get(label) for label in form.finished):
            raise self._refusal(node, "needs all of them")
        for operand, state, want in zip(placed, operands, placement.operands, strict=True):
            for step in steps(state.spec, want, frozenset(), self.mesh, differentiable=False):
                if step.pair == "keep_first":
                    raise self._refusal(
                        node,
                        "adds to a sum over them a value that does not depend on them, which every microbatch would add again",
                    )
                if step.pair == "shard" and step.dim not in state.uniform:
                    raise self._refusal(node, f"gives each of them its own slice of {operand.node}, by its place in the batch")
                if step.pair != "shard":
                    raise self._refusal(node, "needs all of them")
        return placement.results

    def _uniform(
        self, node: fx.Node, labels: Sequence[object], shape: tuple[int, ...], form: Form, operands: Sequence[State]
    ) -> frozenset[int]:
        """The dimensions of a result along which it repeats: of size 1, filled, stretched, or so in every operand they come from."""
        packet = getattr(node.target, "overloadpacket", None)
        if packet in FILLS:
            return frozenset(range(len(shape)))
        found = {dim for dim, size in enumerate(shape) if size == 1}
        if packet in STRETCHES:
            before = shape_of(tensors(node)[0])
            lead = len(shape) - len(before)
            found |= {dim for dim in range(len(shape)) if dim < lead or before[dim - lead] != shape[dim]}
        for dim, label in enumerate(labels):
            if label is not None:
                sources = [
                    state.uniform.issuperset(at for at, other in enumerate(mine) if other == label)
                    for mine, state in zip(form.operands, operands, strict=True)
                    if label in mine
                ]
                if sources and all(sources):
                    found.add(dim)
        return frozenset(found)

    def _refusal(self, node: fx.Node, why: str) -> ValueError:
        return ValueError(
            f"{where(node)} couples the samples of a batch: it {why}. In {self.microbatches} microbatches that differs from one "
            'process. Use microbatches=1, or say batch_coupling="microbatch" to have it within each microbatch'
        )
