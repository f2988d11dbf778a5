"""Models as people write them: on any mesh their loss and every gradient are those of one process."""

from __future__ import annotations

import pytest
import torch

import phalanx as phx
from phalanx.comm.local import LocalWorld
from phalanx.derive import capture, derive_captured
from phalanx.mesh import Mesh

from .parity import on_mesh, worst
from .users_models import MODELS, Prepared

# float64 sums in another order; a missing or doubled term is at least 1e-2
TOLERANCE = 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process(name: str) -> None:
    ready = Prepared(MODELS[name])
    assert max(ready.eager.values()) <= 1e-10, "the captured graph is not the eager module"
    for mesh, how in ((Mesh(dp=2), "graphs"), (Mesh(tp=2), "split"), (Mesh(dp=2, tp=2), "eager")):
        program = derive_captured(
            ready.captured, mesh, names=ready.model.names, layout=ready.layout(mesh), graphs=how != "eager"
        )
        result = on_mesh(program, ready.params, ready.buffers, ready.batch, how=how)
        error, where = worst(result, ready.reference)
        assert error <= TOLERANCE, f"{name} on {mesh}: {where} is off by {error:.1e}"


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.pipelines])
def test_a_pipeline_of_its_blocks_gives_the_same(name: str) -> None:
    model = MODELS[name]
    ready = Prepared(model)
    mesh = Mesh(pp=2, dp=2, tp=2) if name == "gpt" else Mesh(pp=2, tp=2)
    with LocalWorld(mesh, timeout=60) as world:
        step = phx.parallelize(
            ready.module, world, example=ready.batch, names=model.names, layout=ready.layout(mesh), loss=model.loss,
            microbatches=2, optimizer=phx.sgd(lr=0.0),
        )  # fmt: skip
        out = step(ready.batch)
        found = step.gradients()
    expected = ready.reference.loss / ready.reference.count
    assert abs(out.loss - float(expected)) <= TOLERANCE * abs(float(expected))
    for key, grad in ready.reference.grads.items():
        if ready.captured.parameters[key].trainable:
            right = grad / ready.reference.count
            # what the model never reads has no gradient
            mine = found[key] if key in found else torch.zeros_like(right)
            assert (mine - right).abs().max() <= TOLERANCE * right.abs().max().clamp_min(1e-3), key


# Split as one would, these are never whole: of the others a value is gathered for an operator that needs all of it.
NEVER_GATHERED = (
    "mlp", "gate_up by chunk", "gate_up by slices", "experts, split inside", "experts, split among ranks", "qkv by split",
    "qkv by unbind", "qkv by select", "attention by matmul", "attention by einsum", "attention by alibi",
    "rotary by complex numbers", "rotary by halves", "grouped by repeat, 2 kv heads", "grouped by expand, 2 kv heads",
    "grouped by gqa, 2 kv heads", "grouped by gqa, 1 kv heads", "parallel", "nn.MultiheadAttention, causal",
    "nn.MultiheadAttention, padding", "nn.MultiheadAttention, time first", "nn.TransformerEncoder", "gpt", "vit", "convolutions",
)  # fmt: skip


@pytest.mark.parametrize("name", NEVER_GATHERED)
def test_a_sensible_layout_gathers_nothing(name: str) -> None:
    model = MODELS[name]
    captured = capture(model.make().double(), model.batch(), model.loss)
    program = derive_captured(
        captured, Mesh(dp=2, tp=2), names=model.names, layout={"batch": "dp", **model.layout}, graphs=False
    )
    for segment in program.segments:
        moves = [n for n in segment.cls.lowered.graph.nodes if n.target is torch.ops.phx.move.default]
        gathers = [
            (n.args[1], n.meta["why"], n.meta["source"]) for n in moves if n.args[1] in ("gather", "gather_vary", "exchange")
        ]
        assert not gathers
