"""What `explain` lists is what a step does: against the ledger of a real step, and against counting by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import phalanx as phx
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.rules import table_for
from phalanx.schedule.data import COUNT_BYTES, NORM_BYTES
from phalanx.schedule.explain import Explanation, explain

BATCH = {key: torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0)) for key in ("tokens", "targets")}
LAYOUT = {"batch": "dp", "heads": "tp", "mlp": "tp", "vocab": "tp"}


def step_on(world: phx.LocalWorld, *, sequence_parallel: bool = False, microbatches: int = 2, tied: bool = False) -> phx.Step:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab=64, hidden=32, inner=48, layers=3, heads=4, kv_heads=2, tied=tied)).double()
    layout = {**LAYOUT, **({"residual_seq": "tp"} if sequence_parallel else {})}
    placed = {name: axis for name, axis in layout.items() if axis in world.mesh.names}
    return phx.parallelize(
        model, world, example=BATCH, names=table_for(model, BATCH), layout=placed, loss=loss, microbatches=microbatches
    )  # fmt: skip


def of(explanation: Explanation, segment: str) -> Counter[tuple[str, str, str]]:
    return Counter({(r.direction, r.op, r.axis): 0 for r in explanation.rows}) + Counter(
        [(r.direction, r.op, r.axis) for r in explanation.rows for _ in range(r.count) if r.segment == segment]
    )


def test_a_layer_under_sequence_parallelism() -> None:
    """Per layer and microbatch 2 reduce_scatter and 2 all_gather each way, all of batch x seq x hidden on the larger side."""
    with phx.local(phx.Mesh(dp=2, tp=2)) as world:
        step = step_on(world, sequence_parallel=True)
        explanation = explain(step.program, step.schedule)
    inside = [r for r in explanation.rows if r.segment == "layers.1" and not r.why.startswith("REDUCE")]
    assert Counter((r.direction, r.op) for r in inside for _ in range(r.count)) == {
        ("forward", "reduce_scatter"): 2 * 2,
        ("forward", "all_gather"): 2 * 2,
        ("backward", "reduce_scatter"): 2 * 2,
        ("backward", "all_gather"): 2 * 2,
    }
    # 8 samples over 2 microbatches and 2 data ranks; 16 positions, 32 wide, 8 bytes
    assert {r.bytes for r in inside} == {2 * 16 * 32 * 8}
    assert {r.axis for r in inside} == {"tp"}
    assert {r.module for r in inside} >= {"layers.1.self_attn.o_proj", "layers.1.mlp.down_proj"}


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (phx.Mesh(dp=2), {}),
        (phx.Mesh(tp=2), {"sequence_parallel": True}),
        (phx.Mesh(dp=2, tp=2), {"sequence_parallel": True}),
        (phx.Mesh(pp=2, tp=2), {"tied": True}),
        (phx.Mesh(pp=2, dp=2), {"microbatches": 4}),
    ],
    ids=str,
)
def test_a_real_step_moves_what_is_listed(mesh: phx.Mesh, options: dict[str, object]) -> None:
    """Every call of every rank of a step, as the ledger saw it, adds up to the listed calls of the segments it hosts."""
    with phx.local(mesh) as world:
        step = step_on(world, **options)  # type: ignore[arg-type]
        step(BATCH)
        for rank in world.worlds:
            rank.ledger.start()
        step(BATCH)
        explanation = explain(step.program, step.schedule)
        seen = [rank.ledger.totals() for rank in world.worlds]
    coordinate = {k: step.schedule.host[s] for s, stage in enumerate(step.schedule.stages) for k in stage}
    names = {segment.name: coordinate[segment.index] for segment in step.program.segments}
    everybody = "world" if sum(size > 1 for _, size in mesh.axes) > 1 else next(name for name, size in mesh.axes if size > 1)
    for rank, totals in zip(world.worlds, seen, strict=True):
        stage = rank.coordinates.get("pp", 0)
        expected: dict[tuple[str, str], tuple[int, int]] = {}
        for row in explanation.rows:
            here = names.get(row.segment, stage)
            axis = everybody if row.axis == "world" else row.axis
            for op, place in _ends(row.op, row.direction, here):
                if place == stage:
                    calls, size = expected.get((axis, op), (0, 0))
                    expected[axis, op] = (calls + row.count, size + row.bytes * row.count)
        assert totals == expected, f"rank {rank.rank} at {rank.coordinates}"


class Uneven(torch.nn.Module):
    """Sizes that fill no cache line, in two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 3)
        self.second = torch.nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).double())


def test_reduce_is_listed_as_it_lies_in_memory() -> None:
    """Of each dtype one call, and every parameter takes whole lines of 64 bytes."""
    batch = {"x": torch.randn(4, 4)}

    def total(outputs, batch):  # type: ignore[no-untyped-def]
        return outputs.square().sum(), torch.ones_like(batch["x"][:, 0]).sum()

    with phx.local(phx.Mesh(dp=2)) as world:
        step = phx.parallelize(Uneven(), world, example=batch, loss=total)
        step(batch)
        world.worlds[0].ledger.start()
        step(batch)
        moved = [(e.name, e.bytes) for e in world.worlds[0].ledger.events]
        listed = [row.bytes for row in explain(step.program, step.schedule).rows if row.why.startswith("REDUCE")]
    assert sorted(listed) == [128, 128]  # float32: 12 and 3 elements; float64: 3 and 1
    assert sorted(size for _, size in moved) == sorted([*listed, COUNT_BYTES, NORM_BYTES])


def _ends(op: str, direction: str, host: int) -> list[tuple[str, int]]:
    """(call, pp coordinate): a listed send is one rank's send and another's recv."""
    if op != "send":
        return [(op, host)]
    return [("send", host), ("recv", host + 1)] if direction == "forward" else [("send", host + 1), ("recv", host)]


def test_json_and_text() -> None:
    with phx.local(phx.Mesh(dp=2, tp=2)) as world:
        step = step_on(world)
        explanation = explain(step.program, step.schedule)
    data = explanation.as_json()
    assert set(data["collectives"][0]) == {"segment", "module", "direction", "op", "axis", "bytes", "count", "why"}
    assert data["totals"] == explanation.totals
    assert data["totals"]["tp"] == sum(r["bytes"] * r["count"] for r in data["collectives"] if r["axis"] == "tp")
    assert all(r["why"] for r in data["collectives"])
    text = str(explanation)
    assert "layers.0 … 2 (x3)" in text  # three layers, one class, listed once
    assert f"tp {explanation.totals['tp']:,}" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float64])
def test_the_count_is_one_wide_number_whatever_the_loss_counts_in(dtype: torch.dtype) -> None:
    """Counts of narrow types are added up in int64 or float64, so that is what travels."""
    batch = {"x": torch.randn(4, 3), "weight": torch.ones(4, dtype=dtype)}

    def weighed(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return outputs.square().sum(), batch["weight"].sum(dtype=dtype)

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # torch's own calls its argument input, and entries go by name
            return super().forward(x)

    with phx.local(phx.Mesh(dp=2)) as world:
        step = phx.parallelize(Model(3, 1), world, loss=weighed, example=batch)
        for rank in world.worlds:
            rank.ledger.start()
        step(batch)
        first, *_, last = world.worlds[0].ledger.events
    said = {row.why.partition(":")[0]: row.bytes for row in explain(step.program, step.schedule).rows}
    assert (said["COUNT"], said["NORM"]) == (first.bytes, last.bytes)
