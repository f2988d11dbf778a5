"""Forward and backward of a lowered segment as one plain ATen graph, in autograd's own order.

The segment is run once under autograd on fake tensors, below which every operator is recorded, so collectives appear as
primitives in both directions. It knows nothing of what is saved or where the graph is cut; `split` does that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import Argument, map_aggregate

from phalanx.derive.program import Value
from phalanx.mesh import Mesh

RUN = ("world", "step", "microbatch", "salt")
# What stands for each run argument while tracing. No size and no product of sizes comes NEAR these.
SENTINELS: tuple[str | int, ...] = (
    "phx:the-world-at-run-time",
    0x51A7_0000_0000_0003,
    0x3B0C_0000_0000_0005,
    0x6D2E_0000_0000_0009,
)
NEAR = 1 << 32

T = TypeVar("T")


@dataclass(frozen=True)
class Joint:
    """The joint graph. Its output is the three tuples (outputs, grad_inputs, grads), by node below.

    Every operator has meta "val" (fake tensor), "phase" ("forward" or "backward"), and the "module" and "source" of the lowered
    operator that it is or whose gradient it computes.
    """

    graph: fx.Graph
    run: tuple[fx.Node, ...]
    params: tuple[fx.Node, ...]
    buffers: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    grad_outputs: tuple[fx.Node, ...]
    constants: dict[str, Tensor]
    """Tensors that get_attr nodes of the graph name."""

    @property
    def results(self) -> tuple[tuple[fx.Node, ...], tuple[fx.Node | None, ...], tuple[fx.Node | None, ...]]:
        """outputs, grad_inputs (one per input that requires grad), grads (one per trainable parameter)."""
        return self.graph.output_node().args[0]  # type: ignore[return-value]


def trace_joint(
    lowered: fx.GraphModule,
    params: Sequence[Value],
    buffers: Sequence[Value],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    mesh: Mesh,
    device: torch.device,
) -> Joint:
    """Trace `lowered` and its backward. Where no output depends on an input its gradient is zeros, on a parameter None."""
    # Two concurrent traces crash, and once gave a wrong graph silently.
    in_rank = threading.current_thread().name.startswith("phx-rank-")
    assert not in_rank, "derive before the rank threads start, in the calling thread"
    # There autograd aborts the process on the first fake tensor that requires grad.
    if device.type == "cuda" and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise ValueError("this build of torch has no CUDA: derive on a machine that has, or with device='cpu'")
    _check_run_uses(lowered)
    constants = {
        f"constant{i}": (target, _attribute(lowered, target))
        for i, target in enumerate(dict.fromkeys(str(n.target) for n in lowered.graph.nodes if n.op == "get_attr"))
    }
    mode = FakeTensorMode()
    with mode:
        arguments = (
            [_fake(v, mesh, device, v.requires_grad) for v in params],
            [_fake(v, mesh, device, False) for v in buffers],
            [_fake(v, mesh, device, v.requires_grad) for v in inputs],
            [torch.empty_like(mode.from_tensor(t), device=device) for _, t in constants.values()],
            [_fake(v, mesh, device, False) for v in outputs if v.requires_grad],
        )
    targets = [target for target, _ in constants.values()]

    def joint(*flat: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
        p, b, x, c, g = _unflatten(flat, [len(a) for a in arguments])
        mode_ = get_proxy_mode()
        assert mode_ is not None
        origin = _Origin(mode_.tracer.graph)
        with torch.enable_grad():
            values = _Recorder(lowered, dict(zip(targets, c, strict=True)), origin).run(*SENTINELS, *p, *b, *x)
        origin.enter({}, "forward")
        _check_outputs(values, outputs, mesh)
        # What crosses a boundary is contiguous: it may be sent, and the next segment is traced on contiguous inputs.
        emitted = [value if value.is_contiguous() else value.detach().contiguous() for value in values]
        origin.enter({}, "backward")
        wrt = [t for t in (*x, *p) if t.requires_grad]
        declared = [t for t, v in zip(values, outputs, strict=True) if v.requires_grad]
        roots = [(t, grad) for t, grad in zip(declared, g, strict=True) if t.requires_grad]
        grads: list[Tensor | None] = [None] * len(wrt)
        if wrt and roots:
            grads = list(torch.autograd.grad([t for t, _ in roots], wrt, [grad for _, grad in roots], allow_unused=True))
        origin.enter({}, "backward")
        split = sum(t.requires_grad for t in x)
        grad_inputs = [
            torch.zeros_like(t, requires_grad=False) if grad is None else grad.contiguous()
            for t, grad in zip(wrt[:split], grads[:split], strict=True)
        ]
        origin.flush()
        return emitted, grad_inputs, grads[split:]

    flat = [t for group in arguments for t in group]
    with mode, torch.autograd.set_multithreading_enabled(False), torch.no_grad():
        traced = make_fx(joint, _allow_non_fake_inputs=True)(*flat)
    labels = [v.name for v in (*params, *buffers, *inputs)] + list(constants)
    labels += [f"grad_{v.name}" for v in outputs if v.requires_grad]
    return _named(traced, labels, [len(a) for a in arguments], {name: t.to(device) for name, (_, t) in constants.items()})


class _Origin:
    """Stamps each recorded node with the phase, module and source line of what was running when it was recorded."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.meta = graph, {"phase": "forward"}
        self.last: fx.Node | None = next(iter(reversed(graph.nodes)), None)

    def enter(self, meta: dict[str, Any], phase: str) -> None:
        self.flush()
        self.meta = {"phase": phase, **{key: meta[key] for key in ("module", "source", "why") if key in meta}}

    def flush(self) -> None:
        newest = self.last
        for node in reversed(self.graph.nodes):
            if node is self.last:
                break
            node.meta.update(self.meta)
            newest = node if newest is self.last else newest
        self.last = newest

    def follow(self, result: Any, meta: dict[str, Any], seen: set[Any]) -> None:
        """Make the backward of `result`, as far as it is new, record under the same origin."""
        stack = [t.grad_fn for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, Tensor)]
        while stack:
            grad_fn = stack.pop()
            if grad_fn is None or grad_fn in seen:
                continue
            seen.add(grad_fn)
            grad_fn.register_prehook(lambda _, meta=meta: self.enter(meta, "backward"))
            stack.extend(previous for previous, _ in grad_fn.next_functions)


class _Recorder(fx.Interpreter):
    """Runs the lowered graph, telling `origin` which of its nodes is running."""

    def __init__(self, lowered: fx.GraphModule, constants: dict[str, Tensor], origin: _Origin) -> None:
        super().__init__(lowered)
        self.constants, self.origin, self.seen = constants, origin, set[Any]()

    def run_node(self, n: fx.Node) -> Any:
        self.origin.enter(n.meta, "forward")
        result = super().run_node(n)
        self.origin.follow(result, n.meta, self.seen)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.constants[str(target)]


def _fake(value: Value, mesh: Mesh, device: torch.device, requires_grad: bool) -> Tensor:
    shape = value.spec.local_shape(value.shape, mesh)
    return torch.empty(shape, dtype=value.dtype, device=device, requires_grad=requires_grad)


def _attribute(module: fx.GraphModule, target: str) -> Tensor:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor), f"{target} of a lowered graph is a {type(value).__name__}, not a tensor"
    return value


def _unflatten(flat: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    groups: list[list[T]] = []
    at = 0
    for size in sizes:
        groups.append(list(flat[at : at + size]))
        at += size
    return groups


def _check_outputs(values: Sequence[Tensor], outputs: Sequence[Value], mesh: Mesh) -> None:
    assert len(values) == len(outputs), f"a lowered graph returns {len(values)} values, {len(outputs)} are declared"
    for value, declared in zip(values, outputs, strict=True):
        shape = declared.spec.local_shape(declared.shape, mesh)
        assert tuple(value.shape) == shape, f"{declared.name}: the graph gives {tuple(value.shape)}, its Spec {shape}"
        assert value.dtype == declared.dtype, f"{declared.name}: the graph gives {value.dtype}, declared {declared.dtype}"
        assert declared.requires_grad or not value.requires_grad, f"{declared.name} carries a gradient that would be dropped"


def _check_run_uses(lowered: fx.GraphModule) -> None:
    """Run arguments may only be handed to operators. Python arithmetic on them would be done now and its result baked in."""
    placeholders = [n for n in lowered.graph.nodes if n.op == "placeholder"]
    assert len(placeholders) >= len(RUN), "a lowered graph starts with world, step, microbatch, salt"
    for name, node in zip(RUN, placeholders, strict=False):
        for user in node.users:
            plain = isinstance(user.target, torch._ops.OpOverload)
            assert plain, f"{user.format_node()} computes with {name} outside an operator"


def _named(traced: fx.GraphModule, labels: Sequence[str], sizes: Sequence[int], constants: dict[str, Tensor]) -> Joint:
    """Turn sentinels into run placeholders and constants into attributes, and label every argument."""
    graph = traced.graph
    for name, value in constants.items():
        traced.register_buffer(name, value)
    groups = _unflatten([n for n in graph.nodes if n.op == "placeholder"], sizes)
    for label, node in zip(labels, (n for group in groups for n in group), strict=False):
        node.meta["label"] = label
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        run = tuple(graph.placeholder(name) for name in RUN)
        for node in run:
            node.meta["label"] = node.name
        attributes = [graph.get_attr(name) for name in constants]
    for node, attribute in zip(groups[3], attributes, strict=True):
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
    replace = _sentinel_replacer(run)
    for node in graph.nodes:
        made_here = node.op == "get_attr" and node.target not in constants
        assert not made_here, f"{node} is a tensor made by Python while tracing; its value would be baked in"
        if node.op == "call_function":
            node.args = map_aggregate(node.args, replace)
            node.kwargs = map_aggregate(node.kwargs, replace)
    return Joint(graph, run, tuple(groups[0]), tuple(groups[1]), tuple(groups[2]), tuple(groups[4]), constants)


def _sentinel_replacer(run: Sequence[fx.Node]) -> Callable[[Argument], Argument]:
    numbers = {s: n for s, n in zip(SENTINELS, run, strict=True) if isinstance(s, int)}

    def replace(value: Argument) -> Argument:
        if isinstance(value, str):
            assert value == SENTINELS[0] or str(SENTINELS[0]) not in value, f"arithmetic on world was baked in: {value!r}"
            return run[0] if value == SENTINELS[0] else value
        if type(value) is int:
            if value in numbers:
                return numbers[value]
            clear = all(abs(value - s) > NEAR for s in numbers)
            assert clear, f"arithmetic on step, microbatch or salt was baked in: {value}"
        return value

    return replace
