"""What derivation promises about communication, and what it refuses."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from phalanx.derive import derive
from phalanx.derive.program import Program
from phalanx.mesh import Mesh
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.rules import table_for

from .parity import on_mesh, one_process, values, worst

LAYOUT = {"batch": "dp", "heads": "tp", "mlp": "tp", "vocab": "tp"}


def llama(mesh: Mesh, sequence_parallel: bool, **changes: object) -> Program:
    model = Llama(
        LlamaConfig(**{"vocab": 64, "hidden": 64, "inner": 96, "layers": 3, "heads": 8, "kv_heads": 4, **changes})
    ).double()  # type: ignore[arg-type]
    layout = {**LAYOUT, **({"residual_seq": "tp"} if sequence_parallel else {})}
    batch = {"tokens": torch.zeros(4, 16, dtype=torch.long), "targets": torch.zeros(4, 16, dtype=torch.long)}
    placed = {name: axis for name, axis in layout.items() if axis in mesh.names}
    return derive(model, mesh, example=batch, names=table_for(model, batch), layout=placed, loss=loss)


def calls(program: Program, segment: int, graph: str, axis: str = "tp") -> dict[str, int]:
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    ops = {getattr(torch.ops.phx, name).default: name for name in names}
    nodes = getattr(program.segments[segment].cls.graphs, graph).graph.nodes
    return dict(Counter(ops[n.target] for n in nodes if n.target in ops and n.args[2] == axis))


@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_under_sequence_parallelism_has_the_minimum(tp: int) -> None:
    program = llama(Mesh(dp=2, tp=tp), sequence_parallel=True)
    for layer in (1, 2, 3):
        assert calls(program, layer, "F") == {"reduce_scatter": 2, "all_gather": 2}
        assert calls(program, layer, "B") == {"reduce_scatter": 2, "all_gather": 2}
        assert calls(program, layer, "F", "dp") == calls(program, layer, "B", "dp") == {}


@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_under_tensor_parallelism_has_two_all_reduces_each_way(tp: int) -> None:
    program = llama(Mesh(tp=tp), sequence_parallel=False)
    for layer in (1, 2, 3):
        assert calls(program, layer, "F") == calls(program, layer, "B") == {"all_reduce": 2}


def test_fewer_heads_than_ranks_cost_no_collective_in_the_backward() -> None:
    """The key and value projections are replicated; their weights' sums are deferred and their input shares the queries' all_reduce."""
    program = llama(Mesh(tp=4), sequence_parallel=False, kv_heads=2)
    layer = program.segments[2]
    assert calls(program, 2, "F") == calls(program, 2, "B") == {"all_reduce": 2}
    deferred = dict(zip(layer.params, layer.cls.deferred, strict=True))
    assert deferred["layers.1.self_attn.k_proj.weight"] == deferred["layers.1.self_attn.v_proj.weight"] == {"tp"}
    assert deferred["layers.1.self_attn.q_proj.weight"] == frozenset()


def test_equal_blocks_share_a_class() -> None:
    program = llama(Mesh(dp=2, tp=2), sequence_parallel=True)
    assert [s.name for s in program.segments] == ["prologue", "layers.0", "layers.1", "layers.2", "epilogue"]
    assert len({id(s.cls) for s in program.segments[1:4]}) == 1


def test_blocks_whose_declared_outputs_are_of_different_modules_share_no_class() -> None:
    """Layers 1 and 2 are equal and get equal inputs; each has one declared output, of equal state, in another place."""
    model = Llama(LlamaConfig(vocab=64, hidden=64, inner=96, layers=3, heads=8, kv_heads=4))
    batch = {"tokens": torch.zeros(4, 16, dtype=torch.long), "targets": torch.zeros(4, 16, dtype=torch.long)}
    table = {pattern: dims for pattern, dims in table_for(model, batch).items() if not pattern.endswith(":out")}
    tp = {"heads": "tp", "mlp": "tp", "residual_seq": "tp"}
    declared = ("layers.[01].self_attn.o_proj:out", "layers.2.mlp.down_proj:out")
    names = table | dict.fromkeys(declared, "batch residual_seq embed")
    program = derive(model, Mesh(tp=2), example=batch, names=names, layout=tp, loss=loss)
    first, second = program.segments[2:4]
    assert [value.spec for value in first.cls.inputs] == [value.spec for value in second.cls.inputs]
    for segment, module in ((first, "layers.1.self_attn.o_proj"), (second, "layers.2.mlp.down_proj")):
        nodes = [node for node in segment.cls.lowered.graph.nodes if "its names say so" in node.meta.get("why", "")]
        assert [node.meta["module"] for node in nodes] == [module]


def test_norm_weights_defer_the_axis_of_sequence_parallelism_only_under_it() -> None:
    for sequence_parallel, axes in ((False, {"dp"}), (True, {"dp", "tp"})):
        program = llama(Mesh(dp=2, tp=2), sequence_parallel)
        assert program.reduce_axes("layers.1.input_layernorm.weight") == axes
        assert program.reduce_axes("layers.1.mlp.up_proj.weight") == {"dp"}


@pytest.mark.parametrize("how", ["eager", "graphs", "split"])
@pytest.mark.parametrize(
    ("mesh", "sequence_parallel", "changes"),
    [
        (Mesh(dp=2), False, {}),
        (Mesh(tp=2), True, {"tied": True}),
        (Mesh(tp=4), False, {"kv_heads": 2}),
        (Mesh(dp=2, tp=2), True, {"kv_heads": 1}),
        (Mesh(tp=8), True, {"kv_heads": 2, "tied": True}),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_process(mesh: Mesh, sequence_parallel: bool, changes: dict[str, object], how: str) -> None:
    from phalanx.derive import capture, derive_captured

    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(**{"vocab": 64, "hidden": 64, "inner": 96, "layers": 2, "heads": 8, "kv_heads": 4, **changes})
    ).double()  # type: ignore[arg-type]
    batch = {"tokens": torch.randint(0, 64, (4, 16)), "targets": torch.randint(0, 64, (4, 16))}
    batch["targets"][0, :5] = -100
    captured = capture(model, batch, loss)
    params, buffers = values(model, captured)
    layout = {n: a for n, a in {**LAYOUT, **({"residual_seq": "tp"} if sequence_parallel else {})}.items() if a in mesh.names}
    program = derive_captured(captured, mesh, names=table_for(model, batch), layout=layout)
    error, name = worst(on_mesh(program, params, buffers, batch, how=how), one_process(captured, params, buffers, batch))
    # float64 sums in another order
    assert error <= 1e-12, f"{name} is off by {error:.1e}"


class Odd(nn.Module):
    """Two linear layers and something between them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = inner
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(self.first(x)))


class NoRule(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.matrix_exp(x.unflatten(0, (-1, 8))).flatten(0, 1)


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def total(outputs, batch):  # type: ignore[no-untyped-def]
    return outputs.square().sum(), torch.ones_like(batch["x"][:, 0]).sum()


EXAMPLE = {"x": torch.randn(16, 8)}


def test_an_operator_without_a_rule_is_an_error_with_its_place() -> None:
    with pytest.raises(
        ValueError, match=r"linalg_matrix_exp.* in inner \(.*test_lower\.py:\d+\): no rule says how to split it"
    ):
        derive(Odd(NoRule()), Mesh(dp=2), example=EXAMPLE, loss=total)


def test_an_operator_without_a_rule_runs_on_one_rank() -> None:
    derive(Odd(NoRule()), Mesh(), example=EXAMPLE, loss=total)


def test_random_operators_are_refused() -> None:
    with pytest.raises(ValueError, match=r"randn_like.* in inner .*its values would depend on the layout"):
        derive(Odd(Noise()), Mesh(dp=2), example=EXAMPLE, loss=total)
