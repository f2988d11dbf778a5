"""Executable graphs whose arithmetic TorchInductor compiles; what must keep its order, its bits or its memory stays as it is.

A graph is cut into regions of plain ATen operators and what lies between them: collectives and masks (they read the run
arguments, so these stay ordinary arguments and nothing is compiled anew per step, microbatch or world), weight gradients on their
way to an accumulator, and sums that a compiled kernel would do in no fixed order. Each region is compiled once, ahead of the first
step; the graph around it is an ordinary boxed graph, in which collectives keep their order and values die at their last use.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import PythonCode

from phalanx.derive.accumulate import add, add_product, add_rows, forget
from phalanx.derive.boxed import Boxed
from phalanx.derive.clean import base, is_view, view_root
from phalanx.derive.program import Graphs, Program, Segment, SegmentClass
from phalanx.derive.reuse import FORMS, write_over_the_dead

aten = torch.ops.aten

GRAPHS_OF = {"F": ("F",), "B": ("B", "BA"), "I": ("I",), "W": ("W", "WA"), "E": ("E",)}
"""What each kind of action runs. B stands beside BA: a rank whose gradient does not count runs B, and must get the same bits."""

# Their compiled forms add in parallel with atomic operations, so that two runs would differ.
UNORDERED = frozenset(
    {
        aten.embedding_dense_backward.default, aten.index_put.default, aten.index_add.default, aten.scatter_add.default,
        aten.scatter_reduce.two, aten._unsafe_index_put.default,
    }
)  # fmt: skip
# Inductor calls the same kernels for these as a plain graph does.
LIBRARY = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution.default})
# Nothing waits for these, so they come when their operands exist and cut nothing.
UNHURRIED = frozenset({add, forget})
PRODUCTS = frozenset({add_product, add_rows})

PLAIN = {write: functional for functional, (write, _, _) in FORMS.items()}
OPTIONS: dict[str, Any] = {
    # Ranks that hold the same values must compute the same bits, so no kernel may be chosen by a measurement.
    "deterministic": True,
}

Region = Callable[[list[Any]], Sequence[Tensor]]


@dataclass(frozen=True)
class Compiled:
    """What compiling one class of segments took."""

    name: str
    """Of its first segment."""
    seconds: float
    regions: int
    """Different ones."""


def compiled_program(program: Program, kinds: Iterable[str] = ("F", "B")) -> tuple[Program, tuple[Compiled, ...]]:
    """The same Program on compiled graphs, and what that took. Equal segments are compiled once.

    kinds  the actions to compile for: those of a schedule, and "E" for evaluation. All other graphs stay as they are, and so do
           the tables and the count, which are too small to gain.
    Raises ValueError where nothing can be compiled: no C++ compiler, or a Python that torch.compile does not know.
    """
    wanted, made, report = tuple(kinds), dict[int, SegmentClass](), []
    for segment in program.segments:
        cls = segment.cls
        if id(cls) not in made:
            assert cls.graphs is not None, f"{segment.name} was derived without graphs"
            start, known = time.perf_counter(), dict[Hashable, Region]()
            made[id(cls)] = replace(cls, graphs=compiled(cls.graphs, wanted, known))
            report.append(Compiled(segment.name, time.perf_counter() - start, len(known)))
    segments: tuple[Segment, ...] = tuple(replace(s, cls=made[id(s.cls)]) for s in program.segments)
    return replace(program, segments=segments), tuple(report)


def compiled(graphs: Graphs, kinds: Iterable[str] = ("F", "B"), known: dict[Hashable, Region] | None = None) -> Graphs:
    """The same Graphs, those of `kinds` compiled. Results are equal up to rounding, with equal shapes, strides and argument lists.

    known  regions compiled so far, by what they compute; B and BA share theirs through it
    """
    unknown = sorted(set(kinds) - set(GRAPHS_OF))
    if unknown:
        raise ValueError(f"nothing is compiled for {', '.join(unknown)}; the kinds are {', '.join(GRAPHS_OF)}")
    known = {} if known is None else known
    names = [name for kind in kinds for name in GRAPHS_OF[kind] if getattr(graphs, name) is not None]
    made: dict[str, Any] = {name: _compiled_module(getattr(graphs, name), name, known) for name in names}
    return replace(graphs, **made)


def check_can_compile(device: torch.device) -> None:
    """Raise ValueError if Inductor cannot compile for `device` here."""
    try:
        # What torch.compile itself refuses, without its text about decorators.
        torch._dynamo.eval_frame.check_if_dynamo_supported()
    except RuntimeError as error:
        raise ValueError(f"compile=True: {error}; leave it out or use another Python") from error
    if device.type == "cpu":
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler as error:
            raise ValueError(
                f"compile=True needs a C++ compiler for graphs on CPU: {error}; install g++, name one in CXX, or leave it out"
            ) from error
    elif device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ValueError("compile=True needs Triton for graphs on CUDA, which is not here; install it or leave compile out")


def _compiled_module(module: fx.GraphModule, name: str, known: dict[Hashable, Region]) -> fx.GraphModule:
    graph = _functional(module.graph)
    constants = {str(n.target): getattr(module, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
    around = _Around(graph, known, _handed_out(graph) if name in ("B", "W") else frozenset())
    around.build()
    write_over_the_dead(around.new)
    around.new.set_codegen(_EmptyingLists())
    around.new.lint()
    return fx.GraphModule(constants, around.new, class_name=name)


def _functional(graph: fx.Graph) -> fx.Graph:
    """A copy in which operators that write over a dead operand return a new tensor again: Inductor plans memory itself."""
    copy = fx.Graph()
    output = copy.graph_copy(graph, val_map := dict[fx.Node, fx.Node]())
    copy.output(output)
    for old, new in val_map.items():
        new.meta = dict(old.meta)
        if new.op == "placeholder":
            new.target = new.name
        if new.target in PLAIN:
            new.target = PLAIN[new.target]
            keyword = FORMS[new.target][1]
            new.kwargs = {key: value for key, value in new.kwargs.items() if key != keyword}
    return copy


def _handed_out(graph: fx.Graph) -> frozenset[fx.Node]:
    """The products among the parameter gradients that B or W returns: where BA or WA writes to an accumulator."""
    results: Any = graph.output_node().args[0]
    grads = results[1] if len(results) == 2 and isinstance(results[0], (tuple, list)) else results
    ordered = (aten.mm.default, aten.embedding_dense_backward.default)
    return frozenset(n for n in grads if isinstance(n, fx.Node) and n.target in ordered)


@dataclass
class _Around:
    """Copies a graph node by node; runs of compilable nodes become calls of regions.

    A view is made again by whoever reads it, inside or outside of a region: a region is handed storages and returns storages.
    """

    graph: fx.Graph
    known: dict[Hashable, Region]
    products: frozenset[fx.Node]
    """Gradients that are left as they are, so that B has the regions of BA."""
    new: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    open: dict[fx.Node, None] = field(default_factory=dict)
    """The nodes of the region that is being gathered."""
    waiting: list[fx.Node] = field(default_factory=list)
    early: set[fx.Node] = field(default_factory=set)
    """Nodes that were pulled into a region before their turn."""

    def build(self) -> None:
        for node in self.graph.nodes:
            if is_view(node) or node in self.early:
                continue
            roots = {view_root(n) for n in node.all_input_nodes}
            if node.op == "call_function" and (base(node) in self.open if node.target is getitem else self.compilable(node)):
                self.open[node] = None
            elif node.op != "output" and roots.isdisjoint(self.open):
                self.emit(node)
            elif node.target in UNHURRIED:
                self.waiting.append(node)
            else:  # the output too, whatever it reads: writes to accumulators may still be waiting
                self.close()
                self.emit(node)

    def compilable(self, node: fx.Node) -> bool:
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
            return False
        values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
        tensors = all(isinstance(value, (Tensor, tuple, list)) for value in values)
        return tensors and node.target not in UNORDERED and node not in self.products

    def emit(self, node: fx.Node) -> fx.Node:
        """The node itself, and before it the views that it reads."""
        if node not in self.env:
            for needed in node.all_input_nodes:
                self.emit(needed)
            self.env[node] = self.new.node_copy(node, self.env.__getitem__)
            if node.op == "placeholder":
                self.env[node].target = self.env[node].name
        return self.env[node]

    def close(self) -> None:
        """End the region: compile it and call it, unless there is nothing to fuse."""
        self.pull()
        nodes = list(self.open)
        self.open.clear()
        if sum(node.target is not getitem and node.target not in LIBRARY for node in nodes) < 2:
            for node in nodes:
                self.emit(node)
        else:
            self.call(nodes)
        for node in self.waiting:
            self.emit(node)
        self.waiting.clear()

    def pull(self) -> None:
        """Take in what would be the only reader of a value of the region, and is no larger: then that value never leaves it."""
        stack = list(self.open)
        while stack:
            value = stack.pop()
            outside = {reader for reader in _readers(value) if reader not in self.open}
            if len(outside) == 1 and self.replaces(reader := outside.pop(), value):
                self.open[reader] = None
                self.early.add(reader)
                stack.append(reader)

    def replaces(self, reader: fx.Node, value: fx.Node) -> bool:
        result, operand = reader.meta.get("val"), value.meta.get("val")
        return (
            reader.op == "call_function"
            and self.compilable(reader)
            and reader.target not in LIBRARY
            and isinstance(result, Tensor)
            and isinstance(operand, Tensor)
            and result.numel() * result.itemsize <= operand.numel() * operand.itemsize
            and all(root in self.open or root in self.env for root in map(view_root, reader.all_input_nodes))
        )

    def call(self, nodes: list[fx.Node]) -> None:
        inside = set(nodes)
        read = dict.fromkeys(view_root(n) for node in nodes for n in node.all_input_nodes)
        inputs = [n for n in read if n not in inside]
        outputs = [n for n in nodes if isinstance(n.meta["val"], Tensor) and any(u not in inside for u in _readers(n))]
        region = _region(nodes, inputs, outputs)
        key = _key(region)
        if key not in self.known:
            self.known[key] = _compile(region, len(outputs), f"region_{len(self.known)}")
        result = self.new.call_function(self.known[key], ([self.emit(n) for n in inputs],))
        result.meta = {"val": tuple(n.meta["val"] for n in outputs), "compiled": region}
        for at, node in enumerate(outputs):
            self.env[node] = self.new.call_function(getitem, (result, at))
            self.env[node].meta = dict(node.meta)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads the storage of a node, other than views."""
    found, stack = [], list(node.users)
    while stack:
        user = stack.pop()
        if is_view(user):
            stack.extend(user.users)
        else:
            found.append(user)
    return found


def _region(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.GraphModule:
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for at, node in enumerate(inputs):
        env[node] = graph.placeholder(f"input_{at}")
        env[node].meta = {"val": node.meta["val"]}

    def make(node: fx.Node) -> fx.Node:
        if node not in env:
            for needed in node.all_input_nodes:
                make(needed)
            env[node] = graph.node_copy(node, env.__getitem__)
        return env[node]

    for node in nodes:
        make(node)
    graph.output(tuple(env[node] for node in outputs))
    return fx.GraphModule({}, graph)


def _key(region: fx.GraphModule) -> Hashable:
    """Equal for regions that compute the same of inputs of the same layout."""
    number = {node: at for at, node in enumerate(region.graph.nodes)}
    words: list[Hashable] = []
    for node in region.graph.nodes:
        shown = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}"))
        value = node.meta.get("val") if node.op == "placeholder" else None
        layout = (value.dtype, value.device, tuple(value.shape), value.stride()) if isinstance(value, Tensor) else None
        words.append((node.op, str(node.target) if node.op == "call_function" else "", shown, layout))
    return tuple(words)


def _compile(region: fx.GraphModule, outputs: int, name: str) -> Region:
    """Inductor's own callable, which takes one list and empties it, without the wrappers that dynamic callers need."""
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inputs = [node.meta["val"] for node in region.graph.nodes if node.op == "placeholder"]
    device = next(x.device for node in region.graph.nodes for x in _tensors(node.meta.get("val")))
    check_can_compile(device)
    found: list[Any] = []

    def inner(graph: fx.GraphModule, arguments: Sequence[Any], **options: Any) -> Any:
        results = graph.graph.output_node().args[0]
        # The region is called past what would undo such changes.
        assert len(arguments) == len(inputs) and len(results) == outputs, "a region changed its arguments while compiled"  # type: ignore[arg-type]
        found.append(compile_fx_inner(graph, arguments, **options))
        return found[-1]

    copy = fx.GraphModule(region, region.graph)  # which compile_fx may change
    # A cache of whole callables would skip `inner`; that of Inductor's kernels, on disk, stays.
    with torch.no_grad(), functorch_config.patch(enable_autograd_cache=False):
        compile_fx(copy, inputs, inner_compile=inner, config_patches=OPTIONS)
    (kernel,) = found

    def call(arguments: list[Any]) -> Sequence[Tensor]:
        results: Sequence[Tensor] = kernel(arguments)
        return results

    call.__name__ = call.__qualname__ = name
    return call


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [x for each in value for x in _tensors(each)]
    return [value] if isinstance(value, Tensor) else []


_CALL = re.compile(r"^( *)(\w+) = (\w*region_\d+)\((\[.*\])\);  (.* = None)$", re.MULTILINE)


class _EmptyingLists(Boxed):
    """Lets go of what is handed to a region before it runs rather than after it."""

    def _gen_python_code(self, nodes: Any, *args: Any, **kwargs: Any) -> PythonCode:
        code = super()._gen_python_code(nodes, *args, **kwargs)
        # One line, so that a traceback still names the node by what the line assigns to.
        code.src = _CALL.sub(r"\1\2 = \4;  \5;  \2 = \3(\2)", code.src)
        return code


def regions(graphs: Graphs) -> Mapping[str, tuple[fx.GraphModule, ...]]:
    """The regions that were compiled, as plain graphs, by the name of the graph that calls them."""
    modules = {name: getattr(graphs, name) for names in GRAPHS_OF.values() for name in names}
    return {
        name: tuple(node.meta["compiled"] for node in module.graph.nodes if "compiled" in node.meta)
        for name, module in modules.items()
        if module is not None
    }
