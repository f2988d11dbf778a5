"""Compiled graphs compute what plain graphs do: the cut into regions exactly, what Inductor makes of them up to rounding."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from phalanx.derive import capture, compile, derive_captured
from phalanx.derive.accumulate import WRITES
from phalanx.derive.compile import check_can_compile, compiled, compiled_program, regions
from phalanx.derive.program import Graphs
from phalanx.mesh import Mesh
from phalanx.models.mlp import MLP, MLPConfig, loss

from .parity import on_mesh, values, worst
from .split_cases import CASES, RUN, Case, case

KINDS = ("F", "B", "I", "W", "E")
Kernel = Callable[[list[Any]], Sequence[Tensor]]


def interpreted(region: fx.GraphModule, outputs: int, name: str) -> Kernel:
    """In place of Inductor: the region's own operators, so that the cut alone is tested and nothing is built."""

    def call(arguments: list[Any]) -> Sequence[Tensor]:
        given = list(arguments)
        arguments.clear()
        results: Sequence[Tensor] = fx.Interpreter(region).run(*given)
        assert len(results) == outputs
        return results

    call.__name__ = call.__qualname__ = name
    return call


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "_compile", interpreted)


def run(one: Case, graphs: Graphs) -> dict[str, list[Tensor | None]]:
    """What every graph returns or writes."""
    with torch.no_grad():
        head: list[Any] = [*RUN, *one.arguments]
        outputs, saved = graphs.F([*head, *one.inputs])
        late = [*head, *saved, *one.grad_outputs]
        grad_inputs, grads = graphs.B(list(late))
        early, pending = graphs.I(list(late))
        late_w = [*head, *(saved[i] for i in graphs.saved_for_w), *pending]
        trained = [p for p in one.module.parameters() if p.requires_grad]
        found = {"outputs": outputs, "saved": saved, "grad_inputs": grad_inputs, "grads": grads, "early": early}
        found |= {"late": graphs.W(list(late_w)), "alone": graphs.E([*head, *one.inputs])}
        for name, graph, arguments in (("BA", graphs.BA, late), ("WA", graphs.WA, late_w)):
            assert graph is not None
            for fresh in (True, False):
                accumulators = [torch.full_like(p, 5.0) for p in trained]
                given = [*arguments, [fresh] * len(trained), *accumulators]
                graph(given)
                assert given == []
                found[f"{name} {fresh}"] = accumulators
    return {name: list(value) for name, value in found.items()}


def compare(ours: dict[str, list[Tensor | None]], theirs: dict[str, list[Tensor | None]], tolerance: float) -> None:
    for name, expected in theirs.items():
        assert len(ours[name]) == len(expected)
        for a, b in zip(ours[name], expected, strict=True):
            assert (a is None) == (b is None), name
            if a is not None and b is not None:
                assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), name
                torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.abs().max()) if b.numel() else 0.0)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", CASES)
def test_the_cut_into_regions_changes_no_bit(name: str, recompute: str, without_inductor: None) -> None:
    one = case(name, torch.float64)
    plain = one.split(accumulate=True, recompute=recompute)
    compare(run(one, compiled(plain, KINDS)), run(one, plain), 0.0)


def test_regions_hold_the_arithmetic_and_nothing_else(without_inductor: None) -> None:
    plain = case("llama").split(accumulate=True)
    made = compiled(plain, KINDS)
    found = regions(made)
    assert len(found["F"]) == 1 and 3 <= len(found["BA"]) <= 5
    assert [_code(region) for region in found["B"]] == [_code(region) for region in found["BA"]], "B must get BA's bits"
    inside = {str(n.target) for region in found["BA"] for n in region.graph.nodes}
    assert "aten.mul.Tensor" in inside and not {"aten.add_.Tensor", "aten.mul_.Tensor"} & inside
    assert made.BA is not None
    assert sum(n.target in WRITES for n in made.BA.graph.nodes) == 9  # one for each parameter


def _code(region: fx.GraphModule) -> str:
    return str(region.code)


def test_what_dies_in_a_region_is_let_go_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen from inside: of what the region reads last, only the list that it was handed holds anything."""
    one = case("llama")
    kept: dict[str, list[bool]] = {}

    def watching(region: fx.GraphModule, outputs: int, name: str) -> Kernel:
        inner = interpreted(region, outputs, name)

        def call(arguments: list[Any]) -> Sequence[Tensor]:
            copies = [x.clone() for x in arguments]
            refs = [weakref.ref(x) for x in arguments]
            arguments.clear()
            kept[name] = [ref() is not None for ref in refs]
            return inner(copies)

        call.__name__ = call.__qualname__ = name
        return call

    monkeypatch.setattr(compile, "_compile", watching)
    made = compiled(one.split(accumulate=True), ("F", "B"))
    assert made.BA is not None
    with torch.no_grad():
        _, saved = made.F([*RUN, *one.arguments, *one.inputs])
        trained = [p for p in one.module.parameters() if p.requires_grad]
        arguments = [*RUN, *one.arguments, *saved, *one.grad_outputs, [True] * len(trained), *map(torch.zeros_like, trained)]
        del saved
        made.BA(arguments)
    order = {node: at for at, node in enumerate(made.BA.graph.nodes)}
    held = {
        n.name for n in made.BA.graph.nodes if n.op == "placeholder" and n.name.endswith(("_weight", "x0", "x1", "x2", "y0"))
    }
    checked = 0
    for node in made.BA.graph.nodes:
        if "compiled" in node.meta:
            for read, alive in zip(node.args[0], kept[node.target.__name__], strict=True):
                last = max(order[user] for user in read.users) == order[node]
                if last and read.name not in held:
                    assert not alive, f"{read} is alive in {node}"
                    checked += 1
    assert checked >= 10


NIGHTLY = pytest.mark.nightly  # each region takes seconds of a C++ compiler


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("mlp", ("B",)), pytest.param("gelu", ("F", "B"), marks=NIGHTLY), pytest.param("llama", KINDS, marks=NIGHTLY)],
)
def test_inductor_computes_the_same(name: str, kinds: tuple[str, ...]) -> None:
    """float64; Inductor's sums are in another order: 1e-12 of the largest element. B and BA agree bit for bit."""
    one = case(name, torch.float64)
    plain = one.split(accumulate=True)
    made = compiled(plain, kinds)
    ours = run(one, made)
    assert regions(made)["BA"]
    compare(ours, run(one, plain), 1e-12)
    for grad, accumulator in zip(ours["grads"], ours["BA True"], strict=True):
        assert grad is not None and accumulator is not None and torch.equal(grad, accumulator)


def test_collectives_and_masks_stay_ordinary_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of one process share the graphs, whose world and step are arguments: one compilation serves both, and every step.

    The order of the collectives is that of the plain graphs, on which `check` has proved the run free of deadlock.
    """
    torch.manual_seed(0)
    model = MLP(MLPConfig(inputs=6, hidden=8, inner=8, layers=2, outputs=2, dropout=0.5)).double()
    batch = {"x": torch.randn(4, 6, dtype=torch.float64), "targets": torch.tensor([0, 1, 1, 0])}
    captured = capture(model, batch, loss)
    names = {"layers.*.up_proj.weight": "mlp embed", "layers.*.up_proj.bias": "mlp", "layers.*.down_proj.weight": "embed mlp"}
    program = derive_captured(captured, Mesh(tp=2), names=names, layout={"mlp": "tp"})
    counted: list[str] = []

    def counting(region: fx.GraphModule, outputs: int, name: str) -> Kernel:
        counted.append(name)
        return interpreted(region, outputs, name)

    monkeypatch.setattr(compile, "_compile", counting)
    made, report = compiled_program(program, ("F", "B"))
    assert sum(row.regions for row in report) == len(counted) > 0
    assert len({id(s.cls) for s in made.segments}) == len({id(s.cls) for s in program.segments}) == len(report)
    for before, after in zip(program.segments, made.segments, strict=True):
        for name in ("F", "B"):
            assert _communication(before.cls.graphs, name) == _communication(after.cls.graphs, name)
    assert sum(len(_communication(s.cls.graphs, "F")) for s in made.segments) >= 2
    params, buffers = values(model, captured)
    error, where = worst(on_mesh(made, params, buffers, batch), on_mesh(program, params, buffers, batch))
    assert error == 0.0, where
    compilations = len(counted)
    on_mesh(made, params, buffers, batch)
    assert len(counted) == compilations


def _communication(graphs: Graphs | None, name: str) -> list[str]:
    graph = getattr(graphs, name).graph
    return [str(n.target) for n in graph.nodes if n.op == "call_function" and str(n.target).startswith("phx")]


def test_sums_without_an_order_are_not_compiled(without_inductor: None) -> None:
    """The gradient of an embedding would be added with atomic operations."""
    made = compiled(case("prologue").split(accumulate=True), KINDS)
    targets = [n.target for found in regions(made).values() for region in found for n in region.graph.nodes]
    assert torch.ops.aten.embedding_dense_backward.default not in targets
    assert torch.ops.aten.embedding_dense_backward.default in [n.target for n in made.B.graph.nodes]


def test_what_cannot_be_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = case("gelu").split()
    with pytest.raises(ValueError, match=r"nothing is compiled for X; the kinds are F, B, I, W, E"):
        compiled(plain, ("F", "X"))
    from torch._inductor import cpp_builder, exc

    def missing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(ValueError, match=r"compile=True needs a C\+\+ compiler .* install g\+\+"):
        compiled(plain, ("F",))

    def too_new() -> None:
        raise RuntimeError("Python 3.15+ not yet supported for torch.compile")

    monkeypatch.setattr(torch._dynamo.eval_frame, "check_if_dynamo_supported", too_new)
    with pytest.raises(ValueError, match=r"compile=True: Python 3.15\+ not yet supported .* use another Python"):
        check_can_compile(torch.device("cpu"))


def test_a_graph_without_anything_to_fuse_is_left_alone(without_inductor: None) -> None:
    assert not regions(compiled(case("through").split(), ("F",)))["F"]
