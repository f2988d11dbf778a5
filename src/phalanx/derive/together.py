"""Which dimensions of a captured model go together: split one of a group and all of it is split, parameters and values alike.

The labels of the operators' Forms are joined through all pieces by union-find. No mesh, no layout and no name is known here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from phalanx.derive.dims import infer_parts
from phalanx.derive.form import WHOLE, Form, Label, shape_of, tensors
from phalanx.derive.lower import differentiable
from phalanx.derive.ops import replicated, rule_for
from phalanx.derive.program import Captured, Piece


@dataclass(eq=False)
class Value:
    """A parameter, a batch entry or what an operator makes, on its global shape."""

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4
    weight: bool = False
    """It depends on parameters and constants only, and on at least one parameter."""
    of_batch: bool = False
    grad: bool = False
    products: int = 0
    """With how many weights, one behind the other, it was multiplied on the longest way from the batch."""
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Sizes of the parts of dimensions that hold several projections in one."""


Dim = tuple[Value, int]
"""A dimension of a value. Groups are named by one of their members."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One call of the captured graph."""

    node: fx.Node
    form: Form
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    ruled: bool
    """False if no rule is known: every dimension is taken to be needed in full."""

    @property
    def packet(self) -> object:
        return getattr(self.node.target, "overloadpacket", None)

    def read(self) -> Iterator[tuple[Value, int, Label]]:
        """Every dimension of every operand, with its label."""
        for value, labels in zip(self.operands, self.form.operands, strict=True):
            for dim, label in enumerate(labels):
                yield value, dim, label

    def is_summed(self, label: Label) -> bool:
        """Whether a sum over the label is left partial in the results, if it is split."""
        return label is not WHOLE and label not in self.form.finished and not any(label in r for r in self.form.results)

    def joins_weight(self) -> bool:
        """Whether a value is multiplied with a weight, or looked up in one."""
        return any(not value.weight for value in self.operands) and any(map(self.is_summed, self.labels(weights=True)))

    def labels(self, *, weights: bool) -> set[Label]:
        """Of the operands that are weights, or of the others."""
        return {label for value, _, label in self.read() if value.weight is weights}


class Together:
    """The groups of a captured model."""

    def __init__(self, captured: Captured) -> None:
        self._above: dict[Dim, Dim] = {}
        self.operations: list[Operation] = []
        self.maker: dict[Value, Operation] = {}
        self.of_node: dict[fx.Node, Value] = {}
        parts = infer_parts(captured)
        self.parameters = {
            n: Value(n, p.shape, p.dtype.itemsize, weight=True, grad=p.trainable, parts=dict(parts.get(n, {})))
            for n, p in captured.parameters.items()
        }
        self.buffers = {n: Value(n, b.shape) for n, b in captured.buffers.items()}
        self.batch = {n: Value(n, shape, of_batch=True, grad=False) for n, (shape, _) in captured.batch.items()}
        self._handed = {("batch", n): value for n, value in self.batch.items()}
        first, *others = self.batch.values() or [None]
        for other in others:
            self._join((first, 0), (other, 0))  # type: ignore[arg-type]  # of all entries dimension 0 is the batch
        if captured.tables is not None:
            self._walk(captured.tables, "table")
        for piece in captured.pieces:
            self._walk(piece, "cut")
        self._walk(captured.count, "count")

    def group(self, dim: Dim) -> Dim:
        """The member that stands for all that go together with `dim`."""
        while (above := self._above.get(dim, dim)) != dim:
            self._above[dim] = self._above.get(above, above)
            dim = above
        return dim

    def groups(self, value: Value) -> tuple[Dim, ...]:
        return tuple(self.group((value, dim)) for dim in range(len(value.shape)))

    def values(self) -> Iterator[Value]:
        yield from (*self.parameters.values(), *self.buffers.values(), *self.batch.values())
        for operation in self.operations:
            yield from operation.results

    def leads_to(self, earlier: Value, later: Value) -> bool:
        """Whether `later` is computed from `earlier`."""
        stack, seen = [later], {later}
        while stack:
            value = stack.pop()
            if value is earlier:
                return True
            made = self.maker.get(value)
            for source in made.operands if made else ():
                if source not in seen and source.products >= earlier.products and source.of_batch:
                    seen.add(source)
                    stack.append(source)
        return False

    def _join(self, a: Dim, b: Dim) -> None:
        self._above[self.group(a)] = self.group(b)

    def _walk(self, piece: Piece, kind: str) -> None:
        values: dict[fx.Node, Value | tuple[Value, ...]] = {}
        given = iter(
            [self.parameters[n] for n in piece.params]
            + [self.buffers[n] for n in piece.buffers]
            + [self._handed[source.kind, source.name] for source in piece.inputs]
        )
        for node in piece.graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = Value(node.name, shape_of(node))
            elif node.op == "output":
                for name, result in zip(piece.outputs, node.args[0], strict=True):
                    self._handed[kind, name] = values[result]  # type: ignore[assignment]
            elif node.target is operator.getitem:
                values[node] = values[node.args[0]][node.args[1]]  # type: ignore[index]
            else:
                results = self._operation(node, tuple(values[operand] for operand in tensors(node)))  # type: ignore[misc]
                values[node] = results if isinstance(node.meta["val"], (tuple, list)) else results[0]
            if isinstance(value := values.get(node), Value):
                self.of_node[node] = value

    def _operation(self, node: fx.Node, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        node.meta["parts"] = operands[0].parts if operands else {}
        rule = rule_for(node)
        try:
            form = rule(node) if rule else replicated(node)
        except ValueError:
            rule, form = None, replicated(node)  # lowering will refuse it, if it matters, with the reason
        made = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        weight = any(v.weight for v in operands) and not any(v.of_batch for v in operands)
        results = tuple(
            Value(
                node.name, tuple(map(int, value.shape)), value.dtype.itemsize, weight, any(v.of_batch for v in operands),
                differentiable(value.dtype) and any(v.grad for v in operands), max((v.products for v in operands), default=0),
            )
            for value in made
        )  # fmt: skip
        operation = Operation(node, form, operands, results, rule is not None)
        if operation.joins_weight():
            for value in results:
                value.products += 1
        self.operations.append(operation)
        self.maker.update(dict.fromkeys(results, operation))
        self._join_labels(operation)
        return results

    def _join_labels(self, operation: Operation) -> None:
        form = operation.form
        first: dict[Label, Dim] = {}
        parts: dict[Label, tuple[int, ...]] = {}
        for value, dim, label in operation.read():
            if label is not WHOLE:
                self._join((value, dim), first.setdefault(label, (value, dim)))
                if dim in value.parts:
                    parts[label] = value.parts[dim]
        for value, labels in zip(operation.results, form.results, strict=True):
            for dim, label in enumerate(labels):
                if label is not WHOLE:
                    self._join((value, dim), first.setdefault(label, (value, dim)))
                    if sum(parts.get(label, ())) == value.shape[dim]:
                        value.parts[dim] = parts[label]
