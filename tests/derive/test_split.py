"""The graphs of a segment against eager autograd of the untouched module, bit for bit unless a tolerance is given."""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.comm.local import LocalWorld
from phalanx.derive.program import Graphs, Value
from phalanx.derive.split import split
from phalanx.mesh import Mesh
from phalanx.spec import Spec

from .split_cases import CASES, RUN, Case, MlpBlock, case, make_case

aten = torch.ops.aten
EVERY = pytest.mark.parametrize("name", CASES)


@functools.cache
def made(name: str, dtype: torch.dtype = torch.float32, recompute: str = "none") -> tuple[Case, Graphs]:
    one = case(name, dtype)
    return one, one.split(recompute=recompute, accumulate=True)


def assert_equal(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None], what: str) -> None:
    assert len(ours) == len(theirs), what
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a is None) == (b is None), f"{what} {i}"
        assert a is None or b is None or (a.dtype == b.dtype and torch.equal(a, b)), f"{what} {i}"


class Run:
    """Every graph run once; checks that none writes what it was handed."""

    def __init__(self, one: Case, graphs: Graphs) -> None:
        with torch.no_grad():
            arguments: list[Any] = [*RUN, *one.arguments]
            self.outputs, self.saved = self.call(graphs.F, [*arguments, *one.inputs])
            late = [*arguments, *self.saved, *one.grad_outputs]
            self.grad_inputs, self.grads = self.call(graphs.B, late)
            self.grad_inputs_split, self.pending = self.call(graphs.I, late)
            self.saved_for_w = [self.saved[i] for i in graphs.saved_for_w]
            self.w_arguments = [*arguments, *self.saved_for_w, *self.pending]
            self.b_arguments = late
            self.grads_split = self.call(graphs.W, self.w_arguments)
            self.forward_only = self.call(graphs.E, [*arguments, *one.inputs])

    @staticmethod
    def call(graph: fx.GraphModule, arguments: list[Any]) -> Any:
        before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        boxed = list(arguments)
        result = graph(boxed)
        assert boxed == []
        for a, b in zip(arguments, before, strict=True):
            assert not isinstance(a, Tensor) or torch.equal(a, b), "a graph wrote its argument"
        return result


@EVERY
@pytest.mark.parametrize(("dtype", "recompute"), [(torch.float32, "none"), (torch.float64, "none"), (torch.float32, "full")])
def test_equals_eager_autograd(name: str, dtype: torch.dtype, recompute: str) -> None:
    one, graphs = made(name, dtype, recompute)
    run = Run(one, graphs)
    outputs, grad_inputs, grads = one.eager()
    wanted = [v for v in one.input_values if v.requires_grad]
    zeros = [torch.zeros(v.shape, dtype=v.dtype) if g is None else g for v, g in zip(wanted, grad_inputs, strict=True)]
    assert_equal(run.outputs, outputs, "output")
    assert_equal(run.forward_only, outputs, "output of E")
    assert_equal(run.grad_inputs, zeros, "grad_input")
    assert_equal(run.grads, grads, "grad")
    assert_equal(run.grad_inputs_split, run.grad_inputs, "grad_input of I")
    assert_equal(run.grads_split, run.grads, "grad of W")
    assert all(
        isinstance(part, tuple) for part in (run.outputs, run.saved, run.grad_inputs, run.grads, run.pending, run.grads_split)
    )
    assert all(t.is_contiguous() for t in (*run.outputs, *run.grad_inputs))


@EVERY
def test_accumulators_receive_the_gradients(name: str) -> None:
    one, graphs = made(name, torch.float64)
    run = Run(one, graphs)
    expected = [torch.zeros_like(p) if g is None else g for p, g in zip(_trainable(one), run.grads, strict=True)]
    for graph, arguments in ((graphs.BA, run.b_arguments), (graphs.WA, run.w_arguments)):
        assert graph is not None
        accumulators = [torch.full_like(p, 5.0) for p in _trainable(one)]
        flags = [[True] * len(accumulators), [False] * len(accumulators)]
        with torch.no_grad():
            results = graph([*arguments, flags[0], *accumulators])
            assert_equal(accumulators, expected, "overwritten accumulator")
            again = graph([*arguments, flags[1], *accumulators])
        for got in (results, again):
            assert_equal(got, run.grad_inputs if graph is graphs.BA else (), "result")
        for accumulator, grad in zip(accumulators, expected, strict=True):
            # addmm_ sums k products onto the accumulator in another order than mm, k <= 160 here: k * 2^-53 of the largest
            torch.testing.assert_close(accumulator, 2 * grad, rtol=0, atol=160 * 2**-53 * float(grad.abs().max() + 1))


def test_half_precision_gradients_go_to_wider_accumulators() -> None:
    torch.manual_seed(0)
    one = make_case(MlpBlock(), [torch.randn(2, 16, 32)], [True], torch.bfloat16)
    graphs = one.split(accumulate=True)
    run = Run(one, graphs)
    accumulators = [torch.zeros(p.shape) for p in _trainable(one)]
    with torch.no_grad():
        graphs.BA([*run.b_arguments, [False] * len(accumulators), *accumulators])  # type: ignore[misc]
    assert_equal(accumulators, [g.float() for g in run.grads], "accumulator")


@EVERY
def test_saves_neither_parameters_nor_one_storage_twice(name: str) -> None:
    one, graphs = made(name)
    run = Run(one, graphs)
    storages = [t.untyped_storage().data_ptr() for t in run.saved]
    assert len(storages) == len(set(storages))
    assert not set(storages) & {t.untyped_storage().data_ptr() for t in one.arguments}
    assert graphs.saved_bytes == sum(t.untyped_storage().nbytes() for t in run.saved)
    inputs = set(_placeholders(graphs.F)[len(RUN) + len(one.arguments) :])
    _, saved = graphs.F.graph.output_node().args[0]  # type: ignore[misc]
    for node in saved:  # type: ignore[union-attr]
        assert inputs & _ancestors(node), f"{node} comes from parameters alone"  # type: ignore[arg-type]


@EVERY
def test_full_recomputation_saves_inputs_only(name: str) -> None:
    _, graphs = made(name, recompute="full")
    _, saved = graphs.F.graph.output_node().args[0]  # type: ignore[misc]
    assert all(node.op == "placeholder" for node in saved)  # type: ignore[union-attr]
    assert sum(n.target is aten.mm.default for n in graphs.F.graph.nodes) == sum(
        n.target is aten.mm.default for n in graphs.E.graph.nodes
    )


@EVERY
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_i_and_w_compute_nothing_twice(name: str, recompute: str) -> None:
    """Flops add up to B's, and W needs only what it is given. Products of saved values are made where they are needed."""
    one, graphs = made(name, recompute=recompute)
    assert graphs.flops["I"] + graphs.flops["W"] == graphs.flops["B"]
    heavy = [
        [n.target for n in g.graph.nodes if n.op == "call_function" and _computes(n, one)]
        for g in (graphs.B, graphs.I, graphs.W)
    ]
    assert len(heavy[0]) == len(heavy[1]) + len(heavy[2])
    if not any(v.requires_grad for v in one.input_values):
        assert heavy[1] == []
        assert graphs.flops["I"] == 0 and graphs.bytes["I"] == 0


def test_graphs_are_clean() -> None:
    """No alias, no round trip of views, no zero-filled slice, no first power; and temporaries are written over."""
    _, graphs = made("llama")
    targets = [n.target for n in graphs.B.graph.nodes]
    assert not {aten.detach.default, aten.slice_backward.default, aten.add.Tensor} & set(targets)
    assert all(n.args[1] != 1 for n in graphs.B.graph.nodes if n.target in (aten.pow.Tensor_Scalar, aten.pow_.Scalar))
    assert targets.count(aten.cat.default) == 2  # the halves of q and of k
    assert targets.count(aten.mm.default) == 14
    assert targets.count(aten.t.default) == 7  # of the output gradient of each weight gradient; no weight is transposed
    assert {aten.add_.Tensor, aten.mul_.Tensor, aten.silu_backward.grad_input} <= set(targets)


def test_what_is_seen_elsewhere_is_not_written_over() -> None:
    """Each expression reads a temporary again, directly or through a view, after an operator that could write over it."""

    class Tricky(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            a = x @ x
            view = a.t()
            b = a * 2.0  # a is read again through its view
            c = x @ x.t()
            d = c + c.t()  # one operand is a view of the other
            e = (x + 1.0) * (x + 1.0)  # one value twice
            f = x.unsqueeze(0).expand(2, -1, -1) * 3.0
            return b, view.clone(), d, e, f + f[:1]

    torch.manual_seed(0)
    one = make_case(Tricky(), [torch.randn(6, 6)], [True], torch.float64)
    run = Run(one, one.split())
    outputs, grad_inputs, _ = one.eager()
    assert_equal(run.outputs, outputs, "output")
    assert_equal(run.grad_inputs, grad_inputs, "grad_input")


def test_a_segment_without_gradients() -> None:
    """The count, the tables: no parameter, nothing differentiable, and a value whose layout is not contiguous."""

    class Count(nn.Module):
        def forward(self, labels: Tensor) -> tuple[Tensor, Tensor]:
            return (labels != -100).sum(), labels.t()

    one = make_case(Count(), [torch.randint(0, 5, (2, 3))], [False], torch.float32)
    run = Run(one, one.split())
    assert_equal(run.outputs, one.module(*one.inputs), "output")
    assert run.saved == run.grad_inputs == run.grads == run.pending == run.grads_split == ()
    assert run.outputs[1].is_contiguous()


def test_constants_of_a_lowered_graph() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(n) for n in ("world", "step", "microbatch", "salt", "x")]
    table = graph.get_attr("table")
    graph.output((graph.call_function(aten.mul.Tensor, (nodes[-1], table)),))
    lowered = fx.GraphModule({"table": torch.tensor([1.0, 2.0])}, graph)
    x = Value("x", (2,), torch.float32, Spec.replicated(1), True)
    graphs = split(lowered, [], [], [x], [replace(x, name="y")], Mesh(), "cpu")
    outputs, saved = graphs.F([*RUN, torch.tensor([3.0, 3.0])])
    assert outputs[0].tolist() == [3.0, 6.0]
    assert saved == ()
    assert graphs.B([*RUN, torch.tensor([1.0, 1.0])])[0][0].tolist() == [1.0, 2.0]


class Live(TorchDispatchMode):
    """Peak bytes of the storages made under this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.known: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        for t in tree_leaves(result):
            storage = t.untyped_storage() if isinstance(t, Tensor) else None
            if storage is not None and storage._cdata not in given and storage._cdata not in self.storages:
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


@pytest.mark.parametrize("name", ["mlp", "gelu", "llama", "epilogue", "fused", "conv"])
def test_peak_memory_is_at_most_that_of_eager(name: str) -> None:
    one, graphs = made(name)
    inputs = [x.clone().requires_grad_(v.requires_grad) for x, v in zip(one.inputs, one.input_values, strict=True)]
    wrt = [*(x for x in inputs if x.requires_grad), *_trainable(one)]
    with Live() as eager:
        outputs = one.module(*inputs)
        grads = torch.autograd.grad(outputs, wrt, one.grad_outputs)
    del outputs, grads
    with torch.no_grad(), Live() as ours:
        result, saved = graphs.F([*RUN, *one.arguments, *one.inputs])
        arguments = [*RUN, *one.arguments, *saved, *one.grad_outputs]
        del saved
        grads = graphs.B(arguments)
    del result, grads
    assert 0 < ours.peak <= eager.peak


def test_saved_values_die_at_their_last_use() -> None:
    """Seen from the last operator of B and I: nothing but results and its operands is alive of what the list alone held."""
    one, graphs = made("llama")

    class Watch(TorchDispatchMode):
        alive: int = -1

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Watch.alive = sum(ref() is not None and all(ref() is not a for a in args) for ref in refs)
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        for name in ("B", "I"):
            _, saved = graphs.F([*RUN, *one.arguments, *one.inputs])
            internal = [t for t in saved if not any(t is x for x in one.inputs)]
            refs = [weakref.ref(t) for t in internal]
            arguments = [*RUN, *one.arguments, *saved, *one.grad_outputs]
            del saved, internal
            with Watch():
                getattr(graphs, name)(arguments)
            assert len(refs) >= 11
            assert Watch.alive == 0


def test_run_arguments_reach_operators_and_are_not_baked_in(stamp: None) -> None:
    graph = fx.Graph()
    world, step, microbatch, salt, x = (graph.placeholder(n) for n in ("world", "step", "microbatch", "salt", "x"))
    stamped = graph.call_function(torch.ops.phx_split_test.stamp.default, (x, [step, microbatch], salt, world))
    graph.output((graph.call_function(aten.mul.Tensor, (stamped, stamped)),))
    lowered = fx.GraphModule({}, graph)
    value = Value("x", (3,), torch.float64, Spec.replicated(1), True)
    for recompute in ("none", "full"):
        graphs = split(lowered, [], [], [value], [replace(value, name="y")], Mesh(), "cpu", recompute=recompute)  # type: ignore[arg-type]
        for run in (("ab", 2, 3, 5), ("abcd", 7, 1, 11)):
            factor = len(run[0]) + 10 * run[1] + 100 * run[2] + 1000 * run[3]
            x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
            outputs, saved = graphs.F([*run, x])
            grad_inputs, _ = graphs.B([*run, *saved, torch.ones(3, dtype=torch.float64)])
            assert_equal(outputs, [(x * factor) ** 2], "output")
            assert_equal(grad_inputs, [2 * x * factor * factor], "grad_input")


def test_arithmetic_on_run_arguments_is_refused() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(n) for n in ("world", "step", "microbatch", "salt", "x")]
    graph.output((graph.call_function(aten.mul.Scalar, (nodes[-1], graph.call_function(operator.add, (nodes[1], 1)))),))
    value = Value("x", (3,), torch.float64, Spec.replicated(1), True)
    with pytest.raises(AssertionError, match="computes with step outside an operator"):
        split(fx.GraphModule({}, graph), [], [], [value], [replace(value, name="y")], Mesh(), "cpu")


def test_writing_an_input_is_refused() -> None:
    with pytest.raises(ValueError, match="writes a tensor that is seen elsewhere"):
        _one_operator(aten.add_.Scalar, 1.0)


def test_writing_a_fresh_value_is_made_functional() -> None:
    graphs = _one_operator(aten.mul.Scalar, 3.0, then=(aten.add_.Scalar, 1.0))
    assert graphs.F([*RUN, torch.ones(3)])[0][0].tolist() == [4.0, 4.0, 4.0]


def test_the_generator_of_torch_is_refused() -> None:
    with pytest.raises(ValueError, match="draws from torch's generator"):
        _one_operator(aten.bernoulli.p, 0.5)


def test_tracing_in_a_rank_thread_is_an_assertion() -> None:
    errors: list[BaseException] = []

    def derive() -> None:
        with pytest.raises(AssertionError, match="calling thread") as caught:
            _one_operator(aten.mul.Scalar, 2.0)
        errors.append(caught.value)

    thread = threading.Thread(target=derive, name="phx-rank-1")
    thread.start()
    thread.join()
    assert len(errors) == 1


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="with CUDA the trace is made")
def test_tracing_for_a_device_that_torch_was_not_built_for_is_refused() -> None:
    one = case("mlp")
    with pytest.raises(ValueError, match="no CUDA"):
        split(one.lowered, one.params, one.buffers, one.input_values, one.output_values, Mesh(), "cuda")


def test_a_gradient_that_would_be_dropped_is_an_assertion() -> None:
    one = case("mlp")
    one.output_values[0] = replace(one.output_values[0], requires_grad=False)
    with pytest.raises(AssertionError, match="carries a gradient"):
        one.split()


def test_costs_are_those_of_the_shapes() -> None:
    _, graphs = made("mlp")
    tokens, hidden = 32, 32
    product = 2 * tokens * hidden * 4 * hidden
    assert graphs.flops == {"F": 2 * product, "B": 4 * product, "I": 2 * product, "W": 2 * product}
    _, graphs = made("llama")
    weights = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 96
    scores = 2 * 4 * 16 * 16  # batch, heads, queries, keys; each a dot product over a width of 8
    assert graphs.flops["F"] == 2 * tokens * weights + 2 * 2 * scores * 8
    assert graphs.flops["B"] == 4 * tokens * weights + 5 * 2 * scores * 8


def test_every_operator_knows_where_it_comes_from() -> None:
    """Backward operators carry the module and line of the forward operator whose gradient they compute."""
    one = case("mlp")
    for node in one.lowered.graph.nodes:
        if node.op == "call_function":
            node.meta["module"] = node.meta["source"] = (
                "up" if "linear" in str(node.target) and "up" in str(node.args[1]) else "rest"
            )
    graphs = one.split()
    computing = [n for n in graphs.B.graph.nodes if n.op == "call_function"]
    assert all(n.meta["module"] in ("up", "rest") for n in computing)
    products = [n.meta["module"] for n in computing if n.target is aten.mm.default]
    assert products == ["rest", "rest", "up", "up"]


def test_collectives_appear_in_both_directions_and_give_the_whole_answer() -> None:
    """A column- then row-parallel MLP over two ranks, lowered by hand, against the whole one."""
    torch.manual_seed(0)
    mesh, hidden, wide = Mesh(tp=2), 8, 32
    up, down, x, grad = (
        torch.randn(s, dtype=torch.float64) for s in ((wide, hidden), (hidden, wide), (4, hidden), (4, hidden))
    )
    graph = fx.Graph()
    world, *_, w1, w2, h = (graph.placeholder(n) for n in ("world", "step", "microbatch", "salt", "up", "down", "x"))
    move = torch.ops.phx.move.default
    varied = graph.call_function(move, (h, "vary", world, "tp", 2, 0, 0))
    middle = graph.call_function(aten.relu.default, (graph.call_function(aten.linear.default, (varied, w1)),))
    partial = graph.call_function(aten.linear.default, (middle, w2))
    graph.output((graph.call_function(move, (partial, "reduce", world, "tp", 2, 0, 0)),))

    specs = Spec((("tp",), ())), Spec(((), ("tp",)))
    params = [Value("up", (wide, hidden), x.dtype, specs[0], True), Value("down", (hidden, wide), x.dtype, specs[1], True)]
    value = Value("x", (4, hidden), x.dtype, Spec.replicated(2), True)
    for recompute in ("none", "full"):
        graphs = split(
            fx.GraphModule({}, graph), params, [], [value], [replace(value, name="y")], mesh, "cpu", recompute=recompute
        )  # type: ignore[arg-type]
        reduces = [
            sum(n.target is torch.ops.phx.all_reduce.default for n in g.graph.nodes)
            for g in (graphs.F, graphs.B, graphs.I, graphs.W)
        ]
        assert reduces == [1, 1, 1, 0]  # recomputation does not need the output, so its all_reduce is dead

        def step(world: Any, w1: Tensor, w2: Tensor, graphs: Graphs = graphs) -> Any:
            with torch.no_grad():
                outputs, saved = graphs.F([world.name, 0, 0, 0, w1, w2, x])
                return outputs, graphs.B([world.name, 0, 0, 0, w1, w2, *saved, grad])

        leaves = [t.clone().requires_grad_() for t in (x, up, down)]
        whole = torch.relu(leaves[0] @ leaves[1].t()) @ leaves[2].t()
        expected = torch.autograd.grad(whole, leaves, grad)
        with LocalWorld(mesh) as local:
            ranks = local.run(step, list(up.chunk(2)), [w.contiguous() for w in down.chunk(2, 1)])
        for rank, (outputs, (grad_inputs, grads)) in enumerate(ranks):
            close = functools.partial(torch.testing.assert_close, rtol=1e-13, atol=1e-13)  # sums of 32 in two orders in float64
            close(outputs[0], whole.detach())
            close(grad_inputs[0], expected[0])
            close(grads[0], expected[1].chunk(2)[rank])
            close(grads[1], expected[2].chunk(2, 1)[rank])


@pytest.fixture(scope="module")
def stamp() -> Any:
    """An operator of all run arguments, two of them in a list; its gradient is itself."""
    library = torch.library.Library("phx_split_test", "DEF")
    library.define("stamp(Tensor x, int[] when, int salt, str world) -> Tensor")

    def kernel(x: Tensor, when: list[int], salt: int, world: str) -> Tensor:
        return x * float(len(world) + 10 * when[0] + 100 * when[1] + 1000 * salt)

    library.impl("stamp", kernel, "CPU")
    library.impl("stamp", lambda x, when, salt, world: torch.empty_like(x), "Meta")

    def remember(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run = inputs[1:]

    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.ops.phx_split_test.stamp(grad, *ctx.run), None, None, None

    torch.library.register_autograd("phx_split_test::stamp", backward, setup_context=remember, lib=library)
    yield
    library._destroy()


def _one_operator(op: Any, argument: float, then: tuple[Any, float] | None = None) -> Graphs:
    graph = fx.Graph()
    x = [graph.placeholder(n) for n in ("world", "step", "microbatch", "salt", "x")][-1]
    result = graph.call_function(op, (x, argument))
    if then is not None:
        result = graph.call_function(then[0], (result, then[1]))
    graph.output((result,))
    value = Value("x", (3,), torch.float32, Spec.replicated(1), False)
    return split(fx.GraphModule({}, graph), [], [], [value], [replace(value, name="y")], Mesh(), "cpu")


def _trainable(one: Case) -> list[nn.Parameter]:
    return [p for p in one.module.parameters() if p.requires_grad]


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "placeholder"]


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, stack = set[fx.Node](), [node]
    while stack:
        here = stack.pop()
        if here not in found:
            found.add(here)
            stack.extend(here.all_input_nodes)
    return found


def _computes(node: fx.Node, one: Case) -> bool:
    """True for a node that is neither a view nor a function of parameters alone nor a product, which may be made again."""
    from phalanx.derive.clean import is_view

    free = set(_placeholders_of(node)[: len(RUN) + len(one.arguments)])
    sources = {n for n in _ancestors(node) if n.op == "placeholder"}
    product = node.target in (aten.mul.Tensor, aten.mul_.Tensor)
    return not product and not is_view(node) and bool(sources - free)


def _placeholders_of(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.graph.nodes if n.op == "placeholder"]


def test_saves_no_product_of_what_it_saves() -> None:
    """Of a llama block: neither the normalised values nor silu(gate) * up, which are one multiplication away."""
    _, graphs = made("llama")
    _, saved = graphs.F.graph.output_node().args[0]  # type: ignore[misc]
    known = {*saved, *_placeholders_of(saved[0])}  # type: ignore[misc,index]
    products = [n for n in saved if n.target in (aten.mul.Tensor, aten.mul_.Tensor)]  # type: ignore[union-attr]
    assert not [n for n in products if all(m in known for m in n.all_input_nodes)]
    silu = [n for n in saved if n.target is aten.silu.default]  # type: ignore[union-attr]
    assert len(silu) == 1
    assert sum(n.target in (aten.mul.Tensor, aten.mul_.Tensor) for n in graphs.B.graph.nodes) > 0
