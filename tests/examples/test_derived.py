"""The same MLP, derived: the same gradients as by hand, and not one byte more.

Bytes by hand are those of the ledger. Bytes of the derived step are those that explain reads off its graphs, and the ledger of a
step that ran agrees. Left out on both sides is what brings numbers to every rank rather than computes: NORM (loss, gradient norm,
count), and by hand the loss that is printed.
"""

from __future__ import annotations

from dataclasses import dataclass

import data_parallel
import mlp
import pipeline
import stage
import tensor_parallel
from torch import Tensor

import phalanx as phx
from phalanx.schedule.data import NORM_BYTES
from phalanx.schedule.explain import Row, explain

# Sums of float64 in another order; gradients are of the order of 10.
EXACT = 1e-12
LOSS_BYTES = 8


@dataclass(frozen=True)
class Derived:
    bytes: int
    """Of one rank and step, without NORM; a pipeline's messages are counted where they are sent."""
    rows: list[Row]
    gradients: dict[str, Tensor]


def derived(
    mesh: phx.Mesh, names: dict[str, str] | None = None, layout: dict[str, str] | None = None, microbatches: int = 1
) -> Derived:
    with phx.local(mesh, rendezvous=True, timeout=20) as local:
        step = phx.parallelize(
            mlp.MLP(), local, example=mlp.batch_of(0), names=names, layout=layout, loss=mlp.squared_error,
            optimizer=phx.sgd(lr=mlp.LR), microbatches=microbatches, schedule="gpipe",
        )  # fmt: skip
        for world in local.worlds:
            world.ledger.start()
        step(mlp.batch_of(0))
        totals = [world.ledger.totals() for world in local.worlds]
        rows = [row for row in explain(step.program, step.schedule).rows if not row.why.startswith("NORM")]
        promised = sum(row.bytes * row.count for row in rows)
        sent = [sum(bytes for (_, op), (_, bytes) in ops.items() if op not in ("recv", "barrier")) for ops in totals]
        over = 2 if mesh.shape.get("pp", 1) > 1 else 1  # of a cut, one stage sends forward and the other backward
        assert all(over * (bytes - NORM_BYTES) == promised for bytes in sent), (sent, promised)
        return Derived(promised, rows, step.gradients())


def test_data_parallel() -> None:
    ours = derived(data_parallel.MESH)
    with phx.local(data_parallel.MESH, timeout=10) as local:
        for world in local.worlds:
            world.ledger.start()
        local.run(lambda world: data_parallel.train(world, steps=1))
        by_hand = sum(bytes for _, bytes in local.worlds[0].ledger.totals().values()) - LOSS_BYTES
    assert 0 < ours.bytes <= by_hand
    assert mlp.worst_error(ours.gradients, mlp.one_process().gradients) < EXACT


def test_tensor_parallel() -> None:
    names = {
        "layers.*.up.weight": "inner width", "layers.*.up.bias": "inner", "layers.*.down.weight": "width inner",
        "layers.*.down.bias": "width",
    }  # fmt: skip
    ours = derived(tensor_parallel.MESH, names, {"inner": "tp"})
    with phx.local(tensor_parallel.MESH, timeout=10) as local:
        result = local.run(lambda world: tensor_parallel.step(world, tensor_parallel.megatron_block, tensor_parallel.MEGATRON))[
            0
        ]
    assert 0 < ours.bytes <= sum(bytes for _, bytes in result.traffic.values())
    assert ours.gradients.keys() == result.gradients.keys()
    assert mlp.worst_error(ours.gradients, result.gradients) < EXACT
    assert mlp.worst_error(ours.gradients, mlp.one_process().gradients) < EXACT


def test_pipeline() -> None:
    mesh = phx.Mesh(pp=2)
    ours = derived(mesh, microbatches=stage.MICROBATCHES)
    assert {row.op for row in ours.rows} == {"send"}
    with phx.local(mesh, rendezvous=True, timeout=20) as local:
        for world in local.worlds:
            world.ledger.start()
        results = local.run(lambda world: pipeline.measure(world, pipeline.gpipe, False, 0.0))
        by_hand = sum(bytes for world in local.worlds for (_, op), (_, bytes) in world.ledger.totals().items() if op == "send")
    assert max(result.error for result in results) < EXACT
    assert 0 < ours.bytes <= by_hand
    assert mlp.worst_error(ours.gradients, mlp.one_process().gradients) < EXACT
