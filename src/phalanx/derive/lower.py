"""From a piece of the captured graph, on global shapes, to the forward graph that every rank runs on its own shards.

Operators are visited once, in order. For each one its rule says how dimensions go together (`form`), `place` decides the states it runs
in, `steps` the collectives that bring its operands there. Nothing here mentions a rank.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx

from phalanx.derive.defer import MARK, defer
from phalanx.derive.form import Emit, Form, Label, Labels, shape_of, tensors
from phalanx.derive.hints import hints_by_node
from phalanx.derive.move import Step, after, steps
from phalanx.derive.ops import is_random, replicated, rule_for
from phalanx.derive.program import Piece, SegmentClass, Value
from phalanx.derive.propagate import Placed, Placement, place
from phalanx.mesh import Mesh
from phalanx.spec import Spec

aten = torch.ops.aten
T = TypeVar("T")

REPLICABLE_BYTES = 1 << 26
"""An operator without a rule may run whole on every rank if no gradient flows through it and its values are no larger than this."""


def lower(
    piece: Piece,
    mesh: Mesh,
    params: Sequence[Value],
    buffers: Sequence[Value],
    inputs: Sequence[Value],
    hints: Mapping[str, Spec],
    *,
    keep_partial: bool = False,
    device: torch.device | str = "cpu",
    extra: Sequence[fx.Node] = (),
) -> SegmentClass:
    """Lower one piece. `hints` are the declared states of module outputs, by module path; `keep_partial` leaves the results partial;
    tensors made from nothing are made on `device`; the values of `extra` nodes of the piece become outputs in the states they have.

    Raises ValueError, with operator, module and source line, for what cannot be split correctly.
    """
    return _Lowering(piece, mesh, params, buffers, inputs, hints, keep_partial, torch.device(device), extra).run()


class _Lowering:
    def __init__(
        self, piece: Piece, mesh: Mesh, params: Sequence[Value], buffers: Sequence[Value], inputs: Sequence[Value],
        hints: Mapping[str, Spec], keep_partial: bool, device: torch.device, extra: Sequence[fx.Node],
    ) -> None:  # fmt: skip
        self.device = device
        self.piece, self.mesh, self.keep_partial, self.extra = piece, mesh, keep_partial, extra
        self.params, self.buffers, self.inputs = tuple(params), tuple(buffers), tuple(inputs)
        self.graph = fx.Graph()
        self.attributes: dict[str, torch.Tensor] = {}
        self.placed: dict[fx.Node, Placed | tuple[Placed, ...]] = {}
        self.moved: dict[tuple[fx.Node, Step], fx.Node] = {}
        self.notes: list[dict[str, Any]] = []
        self.dropouts = 0
        self.hints = hints_by_node(piece.graph.graph, hints)
        self.source: fx.Node | None = None
        self.run_args: dict[str, fx.Node] = {}

    def run(self) -> SegmentClass:
        for name in ("world", "step", "microbatch", "salt"):
            self.run_args[name] = self.graph.placeholder(name)
            self.run_args[name].meta["val"] = "" if name == "world" else 0
        values = iter((*self.params, *self.buffers, *self.inputs))
        position = 0
        outputs: tuple[Value, ...] = ()
        for node in self.piece.graph.graph.nodes:
            self.source = node
            if node.op == "placeholder":
                self._placeholder(node, next(values), position)
                position += 1
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._operator(node)
            elif node.op == "output":
                outputs = self._outputs(node)
        deferred = defer(self.graph, self.mesh, self.graph.find_nodes(op="placeholder")[4 : 4 + len(self.params)])
        self.graph.eliminate_dead_code()
        self.graph.lint()
        root = torch.nn.Module()
        for name, value in self.attributes.items():
            root.register_buffer(name, value, persistent=False)
        return SegmentClass(
            self.piece.key, fx.GraphModule(root, self.graph), self.params, self.buffers, self.inputs, outputs,
            deferred, tuple(self.notes),
        )  # fmt: skip

    # -- nodes of the captured graph ----------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node, value: Value, position: int) -> None:
        local = self.graph.placeholder(node.name)
        local.meta["val"] = torch.empty(value.spec.local_shape(value.shape, self.mesh), dtype=value.dtype, device="meta")
        is_param = position < len(self.params)
        is_buffer = not is_param and position < len(self.params) + len(self.buffers)
        local.meta["grad"] = value.requires_grad
        self.placed[node] = Placed(local, value.spec, value.shape, value.requires_grad, is_param, is_buffer)

    def _constant(self, node: fx.Node) -> None:
        value = getattr(self.piece.graph, str(node.target))
        name = str(node.target).replace(".", "_")
        self.attributes[name] = value
        local = self.graph.get_attr(name)
        local.meta["val"] = value.to("meta")
        self.placed[node] = Placed(local, Spec.replicated(value.dim()), tuple(value.shape), False, False, True)

    def _operator(self, node: fx.Node) -> None:
        if node.target is not None and getattr(node.target, "__name__", "") == "getitem":
            several, index = self.placed[node.args[0]], node.args[1]  # type: ignore[index]
            assert isinstance(several, tuple) and isinstance(index, int)
            self.placed[node] = self._settle(node, several[index])
            return
        operands = [self._one(operand) for operand in tensors(node)]
        form = self._form(node, operands)
        value = node.meta["val"]
        shapes = [tuple(v.shape) for v in value] if isinstance(value, (tuple, list)) else [tuple(value.shape)]
        placement = place(form, operands, shapes, self.mesh)
        local = [
            self._move(operand, want, placement.varying, f"{_word(node)} needs it so")
            for operand, want in zip(operands, placement.operands, strict=True)
        ]
        results = self._emit(node, form, placement, local, shapes)
        dtypes = [v.dtype for v in value] if isinstance(value, (tuple, list)) else [value.dtype]
        grad = any(operand.grad for operand in operands) and node.target is not aten.detach.default
        constant = all(operand.constant for operand in operands)
        weight = not constant and all(operand.weight or operand.constant for operand in operands)
        placed = tuple(
            Placed(result, spec, shape, grad and differentiable(dtype), weight, constant)
            for result, spec, shape, dtype in zip(results, placement.results, shapes, dtypes, strict=True)
        )
        self.placed[node] = placed if isinstance(value, (tuple, list)) else self._settle(node, placed[0])

    def _form(self, node: fx.Node, operands: Sequence[Placed]) -> Form:
        if is_random(node):
            raise ValueError(
                f"{self._where(node)}: its values would depend on the layout; use dropout, or make them part of the batch"
            )
        node.meta["parts"] = dict(operands[0].spec.parts) if operands else {}
        rule = rule_for(node)
        try:
            form = rule(node) if rule else replicated(node)
        except ValueError as error:
            raise ValueError(f"{self._where(node)}: {error}") from error
        if rule is None and any(operand.spec.varying for operand in operands):
            size = max(math.prod(shape_of(operand)) * operand.meta["val"].element_size() for operand in tensors(node))
            if any(operand.grad for operand in operands) or size > REPLICABLE_BYTES:
                states = ", ".join(f"{tuple(o.shape)} {o.spec}" for o in operands)
                raise ValueError(
                    f"{self._where(node)}: no rule says how to split it, and its operands are split: {states}. "
                    "Add a rule in derive/ops, or choose a layout that leaves them whole"
                )
            self.notes.append({**self._note(node), "bytes": size, "why": "no rule for this operator"})
        return form

    def _settle(self, node: fx.Node, x: Placed) -> Placed:
        """A result takes the state declared for its module's output; a partial one with several users is summed once, here."""
        want, why = x.spec, "it has several users"
        if node in self.hints:
            want, why = self.hints[node], "its names say so"
            if len(want.dims) != len(x.shape):
                raise ValueError(
                    f"{self._where(node)}: its output has {len(x.shape)} dimensions, the names declared for it say {len(want.dims)}"
                )
            want.check(x.shape, self.mesh)
        elif x.spec.partial and len(node.users) != 1:
            want = x.spec.with_partial(())
        return self._moved(x, want, why)

    def _outputs(self, node: fx.Node) -> tuple[Value, ...]:
        results, values = [], []
        for name, output in zip(self.piece.outputs, node.args[0], strict=True):  # type: ignore[arg-type]
            x = self._one(output)
            if not self.keep_partial:
                x = self._moved(x, x.spec.with_partial(()), "no cut is partial")
            results.append(x.node)
            values.append(Value(name, x.shape, x.node.meta["val"].dtype, x.spec, x.grad))
        for wanted in self.extra:
            x = self._one(wanted)
            results.append(x.node)
            values.append(Value(wanted.name, x.shape, x.node.meta["val"].dtype, x.spec, x.grad))
        self.graph.output(tuple(results))
        return tuple(values)

    def _one(self, node: Any) -> Placed:
        x = self.placed[node]
        assert isinstance(x, Placed), f"{node} has several results; they are read through getitem"
        return x

    # -- moves ------------------------------------------------------------------------------------------------------------------

    def _moved(self, x: Placed, want: Spec, why: str) -> Placed:
        return x if x.spec == want else replace(x, node=self._move(x, want, frozenset(), why), spec=want)

    def _move(self, x: Placed, want: Spec, varying: frozenset[str], why: str) -> fx.Node:
        plan = steps(x.spec, want, varying, self.mesh, x.grad)
        local, state = x.node, x.spec
        marks = [step for step in plan if step.pair == "vary"]
        for step in plan:
            if step.pair == "vary":
                if step is marks[0]:
                    local = self._mark(local, frozenset(mark.axis for mark in marks))
                continue
            if (local, step) not in self.moved:
                self.moved[local, step] = self._collective(local, step, state, after(state, step), why)
            local, state = self.moved[local, step], after(state, step)
        return local

    def _mark(self, x: fx.Node, axes: frozenset[str]) -> fx.Node:
        """Note that x is consumed by an operator that varies over `axes`; `defer` turns the marks into collectives."""
        key = (x, Step("vary", ",".join(sorted(axes))))
        if key not in self.moved:
            node = self.graph.call_function(MARK, (x, axes))  # type: ignore[arg-type]  # replaced before it runs
            node.meta.update(val=x.meta["val"], grad=True)
            if self.source is not None:
                node.meta.update(module=self.source.meta.get("module", ""), source=self.source.meta.get("source", ""))
            self.moved[key] = node
        return self.moved[key]

    def _collective(self, x: fx.Node, step: Step, state: Spec, then: Spec, why: str) -> fx.Node:
        size = self.mesh.shape[step.axis]
        if step.parts and step.pair in ("shard", "reduce_scatter"):
            x = self._interleave(x, step, size, entering=True, others=self.mesh.extent(state.dims[step.dim]))
        world = self.run_args["world"]
        local = self._call(torch.ops.phx.move.default, x, step.pair, world, step.axis, size, step.dim, step.dim2)
        local.meta["why"] = f"{state} to {then}: {why}"
        if step.parts and step.pair in ("gather", "gather_vary"):
            local = self._interleave(local, step, size, entering=False, others=self.mesh.extent(then.dims[step.dim]))
        return local

    def _interleave(self, x: fx.Node, step: Step, size: int, entering: bool, others: int) -> fx.Node:
        return self._call(aten.cat.default, reordered(x, step, size, others, entering, self._slice), step.dim)

    def _slice(self, x: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        return self._call(aten.slice.Tensor, x, dim, start, stop)

    # -- the local operator -----------------------------------------------------------------------------------------------------

    def _emit(
        self, node: fx.Node, form: Form, placement: Placement, local: list[fx.Node], shapes: Sequence[tuple[int, ...]]
    ) -> list[fx.Node]:
        emit = _Emit(self, node, placement, local, shapes)
        result = form.emit(emit) if form.emit else emit.again()
        if isinstance(node.meta["val"], (tuple, list)) and isinstance(result, fx.Node):
            values = result.meta["val"]
            picked = []
            for at in range(len(values)):
                item = self.graph.call_function(operator.getitem, (result, at))
                item.meta.update(
                    val=values[at],
                    grad=result.meta["grad"],
                    module=node.meta.get("module", ""),
                    source=node.meta.get("source", ""),
                )
                picked.append(item)
            results = picked
        else:
            results = [result] if isinstance(result, fx.Node) else list(result)
        dtypes = [v.dtype for v in value] if isinstance(value := node.meta["val"], (tuple, list)) else [value.dtype]
        for item, spec, shape, dtype in zip(results, placement.results, shapes, dtypes, strict=True):
            assert item.meta["val"].dtype == dtype, f"{self._where(node)}: the rule gives {item.meta['val'].dtype}, not {dtype}"
            expected = spec.local_shape(shape, self.mesh)
            if tuple(item.meta["val"].shape) != expected:
                raise AssertionError(
                    f"{self._where(node)}: the rule gives a local shape of {tuple(item.meta['val'].shape)}; "
                    f"{spec} of {shape} is {expected}"
                )
        return results

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        meta_args, meta_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        if _makes_tensor(target):
            kwargs, meta_kwargs = {**kwargs, "device": self.device}, {**meta_kwargs, "device": "meta"}
        node = self.graph.call_function(target, args, kwargs)
        with torch.no_grad():
            value = node.meta["val"] = target(*meta_args, **meta_kwargs)
        first = value[0] if isinstance(value, (tuple, list)) else value
        flows = any(n.meta.get("grad") for n in node.all_input_nodes) and target is not aten.detach.default
        node.meta["grad"] = flows and differentiable(first.dtype)
        if self.source is not None:
            node.meta.update(module=self.source.meta.get("module", ""), source=self.source.meta.get("source", ""))
        return node

    # -- words for people -------------------------------------------------------------------------------------------------------

    def _note(self, node: fx.Node | None) -> dict[str, Any]:
        meta = node.meta if node is not None else {}
        return {"node": str(node), "module": meta.get("module", ""), "source": meta.get("source", "")}

    def _where(self, node: fx.Node) -> str:
        module = node.meta.get("module") or self.piece.name
        source = node.meta.get("source")
        return f"{node.target} in {module}" + (f" ({source})" if source else "")


class _Emit(Emit):
    def __init__(
        self, lowering: _Lowering, node: fx.Node, placement: Placement, local: list[fx.Node], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self._lowering, self._node, self._placement, self._shapes = lowering, node, placement, shapes
        self.operands = local
        self.world = lowering.run_args["world"]
        self.partial = placement.results[0].partial if placement.results else frozenset()
        self.sizes = lowering.mesh.shape

    def axes(self, label: Label) -> tuple[str, ...]:
        return self._placement.axes.get(label, ())

    def ranks(self, label: Label) -> int:
        return self._lowering.mesh.extent(self.axes(label))

    def shape(self, result: int = 0) -> list[int]:
        return list(self._placement.results[result].local_shape(self._shapes[result], self._lowering.mesh))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._lowering._call(target, *args, **kwargs)

    def again(self, **changed: Any) -> fx.Node:
        local = iter(self.operands)
        args, kwargs = fx.node.map_arg(
            (self._node.args, self._node.kwargs),
            lambda n: next(local) if isinstance(n.meta.get("val"), (torch.Tensor, list, tuple)) else n,
        )
        target = self._node.target
        if changed:
            assert isinstance(target, torch._ops.OpOverload)
            declared = target._schema.arguments
            given = {
                a.name: args[at] if at < len(args) else kwargs.get(a.name, a.default_value) for at, a in enumerate(declared)
            }
            assert changed.keys() <= given.keys(), f"{target} has no arguments {changed.keys() - given.keys()}"
            given |= changed
            args = tuple(given[a.name] for a in declared if not a.kwarg_only)
            kwargs = {a.name: given[a.name] for a in declared if a.kwarg_only}
        return self.call(target, *args, **kwargs)

    def reduce(self, x: fx.Node, label: Label) -> fx.Node:
        lowering = self._lowering
        ndim = x.meta["val"].dim()
        state = Spec(((),) * ndim, frozenset(self.axes(label)))
        for axis in reversed(self.axes(label)):
            then = state.with_partial(state.partial - {axis})
            x = lowering._collective(x, Step("reduce", axis), state, then, f"{_word(self._node)} sums over a split dimension")
            state = then
        return x

    def offset(self, x: fx.Node, label: Label, size: int) -> fx.Node:
        for axis in self.axes(label):
            size //= self.sizes[axis]
            x = self.call(torch.ops.phx.offset.default, x, self.world, axis, size)
        return x

    def dropout_mask(self, like: fx.Node, probability: float, labels: Labels, shape: tuple[int, ...]) -> fx.Node:
        lowering = self._lowering
        lowering.dropouts += 1
        axes = ",".join("+".join(self.axes(label)) if label is not None else "" for label in labels)
        run = lowering.run_args
        return self.call(
            torch.ops.phx.dropout_mask.default, like, probability, self.world, run["step"], run["microbatch"], run["salt"],
            lowering.dropouts, list(shape), axes,
        )  # fmt: skip


def differentiable(dtype: torch.dtype) -> bool:
    """True if a gradient can flow through values of this dtype."""
    return dtype.is_floating_point or dtype.is_complex


def _word(node: fx.Node) -> str:
    """The operator's name, without namespace and overload."""
    return str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]


def reordered(
    x: T, step: Step, size: int, others: int, entering: bool, slice_: Callable[[T, int, int, int], T] = aten.slice.Tensor
) -> list[T]:
    """The slices of a fused dimension between its two orders: part by part (a shard's own) and rank by rank (a collective's).

    `entering` goes from the first to the second. `others` is the number of ranks along the axes that split the dimension besides.
    """
    assert step.parts is not None
    lengths = [part // (others * size) for part in step.parts]
    count = len(lengths)
    sizes = [length for length in lengths for _ in range(size)] if entering else lengths * size
    ends = list(itertools.accumulate(sizes))
    pieces = [slice_(x, step.dim, end - length, end) for length, end in zip(sizes, ends, strict=True)]
    if entering:
        return [pieces[part * size + rank] for rank in range(size) for part in range(count)]
    return [pieces[rank * count + part] for part in range(count) for rank in range(size)]


def _makes_tensor(target: Any) -> bool:
    """True for an operator that makes a tensor from no other and so must be told where."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    arguments = target._schema.arguments
    has_tensor = any("Tensor" in str(argument.type) for argument in arguments)
    return not has_tensor and any(argument.name == "device" for argument in arguments)
