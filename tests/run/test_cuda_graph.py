"""Slots of captured segments: who may overwrite which memory when. Without a GPU a capture is work that writes to fixed tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import phalanx as phx
from phalanx.derive.program import Program
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.run.cuda_graph import Slots, captured_program
from phalanx.run.executor import Executor


def record(work: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
    """As a CUDA graph does: each repetition overwrites the tensors of the first."""
    results = work()

    def replay() -> None:
        for old, new in zip(tree_leaves(results), tree_leaves(work()), strict=True):
            if old is not None and old.data_ptr() != new.data_ptr():
                old.copy_(new)

    return replay, results


def parts(dropout: float = 0.0) -> tuple[phx.Step, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = LlamaConfig(vocab=32, hidden=16, inner=24, layers=2, heads=2, kv_heads=1, dropout=dropout)
    batch = {key: torch.randint(0, 32, (8, 4)) for key in ("tokens", "targets")}
    step = phx.parallelize(
        Llama(config).double(), phx.init(phx.Mesh()), example=batch, loss=loss, optimizer=phx.adamw(lr=1e-2), microbatches=4,
        schedule="gpipe", layout={},
    )  # fmt: skip
    return step, batch


def on(step: phx.Step, program: Program) -> Executor:
    executor = step.executors[0]
    return Executor(program, executor.schedule, executor.world, executor.parameters, executor.optimizer)


def test_captured_segments_train_as_plain_ones() -> None:
    """Several microbatches are in flight at once, and none may overwrite what another has saved.

    The sums over microbatches are taken outside of the graphs, where `addmm_` no longer adds product by product: 1e-13 in float64.
    """
    plain, batch = parts()
    expected = [plain(batch) for _ in range(3)]
    step, _ = parts()
    program, left = captured_program(step.program, record)
    assert left == ()
    executor = on(step, program)
    with torch.no_grad():
        found = [executor.step(batch) for _ in range(3)]
    for ours, theirs in zip(found, expected, strict=True):
        assert abs(ours.loss - theirs.loss) < 1e-13 and abs(ours.grad_norm - theirs.grad_norm) < 1e-12
    for segment, most in zip(program.segments, (4, 4, 4, 4), strict=True):
        assert segment.cls.graphs is not None
        slots = segment.cls.graphs.F.__self__  # type: ignore[union-attr]
        assert isinstance(slots, Slots)
        assert 1 <= len(slots.slots) <= most, "slots of finished microbatches are used again"
        assert all(slot.free for slot in slots.slots), "nothing of a step outlives it"


def test_a_slot_is_taken_while_a_view_of_it_lives() -> None:
    step, _ = parts()
    program, _ = captured_program(step.program, record)
    segment = program.segments[1]
    assert segment.cls.graphs is not None
    forward: Any = segment.cls.graphs.F
    bound = step.executors[0]
    fixed = [bound.world.name, 0, 0, 1, *(bound.parameters.views[name] for name in segment.params)]
    inputs = [torch.randn(v.spec.local_shape(v.shape, program.mesh), dtype=v.dtype) for v in segment.cls.inputs]
    with torch.no_grad():
        outputs, saved = forward([*fixed, *inputs])
        view, before = outputs[0].view(-1), outputs[0].clone()
        del outputs, saved
        again, _ = forward([*fixed, *(x + 1 for x in inputs)])
        assert torch.equal(view.view_as(before), before) and not torch.equal(again[0], before)
        assert len(forward.__self__.slots) == 2
        del view, again
        forward([*fixed, *inputs])
        assert len(forward.__self__.slots) == 2


def test_what_depends_on_the_step_is_not_captured() -> None:
    step, batch = parts(dropout=0.5)
    program, left = captured_program(step.program, record)
    assert set(left) == {s.name for s in step.program.segments if s.name.startswith("layers")}
    with torch.no_grad():
        assert on(step, program).step(batch).loss > 0
