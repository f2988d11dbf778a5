"""Every strategy by hand computes what one process does, and stops doing so when one of its collectives is left out."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import collectives
import data_parallel
import mlp
import pipeline
import pytest
import stage
import tensor_parallel
import torch
from torch import Tensor, nn

import phalanx as phx
from phalanx.comm import Delay

# Sums of float64 in another order; losses and gradients are of the order of 10.
EXACT = 1e-12
# What a forgotten collective must change at least.
BROKEN = 1e-3

TRUTH_OF_BLOCKS: dict[str, Callable[[list[Tensor], int], Tensor | None]] = {
    "all_reduce": lambda xs, r: torch.stack(xs).sum(0),
    "all_gather": lambda xs, r: torch.cat(xs),
    "reduce_scatter": lambda xs, r: torch.stack(xs).sum(0)[r : r + 1],
    "all_to_all": lambda xs, r: torch.stack(xs).T[r],
    "broadcast": lambda xs, r: xs[0],
    "reduce": lambda xs, r: torch.stack(xs).sum(0) if r == 0 else None,
    "gather": lambda xs, r: torch.cat(xs) if r == 0 else None,
    "scatter": lambda xs, r: xs[0][r : r + 1],
    "send_and_recv": lambda xs, r: xs[r - 1],
    "all_reduce_in_two": lambda xs, r: torch.stack(xs).sum(0),
}


@pytest.mark.parametrize("block", collectives.BLOCKS, ids=lambda block: block.__name__)
def test_a_building_block_does_what_its_line_says(block: Callable[[phx.World, Tensor], Tensor | None]) -> None:
    inputs = [collectives.before(rank) for rank in range(collectives.MESH.size)]
    with phx.local(collectives.MESH, rendezvous=True, timeout=10) as local:
        after = local.run(lambda world: block(world, inputs[world.rank]))
    for rank, mine in enumerate(after):
        expected = TRUTH_OF_BLOCKS[block.__name__](inputs, rank)
        assert (mine is None) if expected is None else (mine is not None and torch.equal(mine, expected))


def trained_by_hand() -> list[tuple[list[data_parallel.Step], nn.Module]]:
    with phx.local(data_parallel.MESH, timeout=10) as local:
        return local.run(data_parallel.train)


def test_data_parallel_is_one_process() -> None:
    truth = mlp.one_process(data_parallel.STEPS)
    ranks = trained_by_hand()
    for step, loss in enumerate(truth.losses):
        seen = [steps[step] for steps, _ in ranks]
        assert [s.loss for s in seen] == pytest.approx([loss] * len(seen), rel=EXACT)
        assert len({s.hash for s in seen}) == 1, "replicas differ"
        assert len({s.local_loss for s in seen}) == len(seen), "two ranks have the same samples"
    for _, model in ranks:
        assert mlp.worst_error({name: p.detach() for name, p in model.named_parameters()}, truth.weights) < EXACT
        assert mlp.worst_error({name: p.grad for name, p in model.named_parameters()}, truth.gradients) < EXACT


def test_hashes_tell_when_gradients_are_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "sum_gradients", lambda model, world: None)
    assert len({steps[0].hash for steps, _ in trained_by_hand()}) == data_parallel.MESH.size


STRATEGIES = {
    "gathered": (tensor_parallel.gathered_block, tensor_parallel.GATHERED),
    "megatron": (tensor_parallel.megatron_block, tensor_parallel.MEGATRON),
}


def tensor_parallel_by_hand(strategy: str) -> list[tensor_parallel.Result]:
    with phx.local(tensor_parallel.MESH, timeout=10) as local:
        return local.run(lambda world: tensor_parallel.step(world, *STRATEGIES[strategy]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensor_parallel_is_one_process(strategy: str) -> None:
    truth = mlp.one_process()
    for result in tensor_parallel_by_hand(strategy):
        assert result.loss == pytest.approx(truth.losses[0], rel=EXACT)
        assert result.gradients.keys() == truth.gradients.keys()
        assert mlp.worst_error(result.gradients, truth.gradients) < EXACT


def test_column_then_row_moves_less() -> None:
    gathered, megatron = (
        sum(bytes for _, bytes in tensor_parallel_by_hand(strategy)[0].traffic.values()) for strategy in STRATEGIES
    )
    assert 5 * megatron < gathered  # per block 2 widths instead of 10, the first block's input needing no gradient


class Nothing(torch.autograd.Function):
    """Identity both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: phx.World) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize(
    ("strategy", "name", "replacement"),
    [
        ("gathered", "Enter", Nothing),
        ("gathered", "GatherEnter", tensor_parallel.Gather),
        ("megatron", "Enter", Nothing),
        ("megatron", "Leave", Nothing),
    ],
)
def test_a_lost_half_of_a_pair_is_a_wrong_gradient(
    strategy: str, name: str, replacement: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, name, replacement)
    errors = [mlp.worst_error(r.gradients, mlp.one_process().gradients) for r in tensor_parallel_by_hand(strategy)]
    assert min(errors) > BROKEN


def measured(order: Callable[[stage.Stage], None], blocking: bool, seconds: float, delay: float) -> pipeline.Measured:
    wires = Delay(delay) if delay else None
    with phx.local(pipeline.MESH, rendezvous=True, delay=wires, timeout=20) as local:
        return local.run(lambda world: pipeline.measure(world, order, blocking, seconds))[0]


STAGES, M = pipeline.MESH.size, stage.MICROBATCHES
LIVE = {"naive": [1] * STAGES, "gpipe": [M] * STAGES, "one_f_one_b": [min(M, STAGES - r) for r in range(STAGES)]}


@pytest.mark.parametrize(("title", "order", "blocking"), pipeline.VARIANTS, ids=[title for title, _, _ in pipeline.VARIANTS])
def test_a_pipeline_is_one_process(title: str, order: Callable[[stage.Stage], None], blocking: bool) -> None:
    result = measured(order, blocking, seconds=0.0, delay=0.0)
    assert result.loss == pytest.approx(mlp.one_process().losses[0], rel=EXACT)
    assert result.error < EXACT
    assert result.peak_live == LIVE[order.__name__]


def test_blocking_1f1b_deadlocks() -> None:
    with phx.local(pipeline.MESH, rendezvous=True, timeout=0.3) as local, pytest.raises(TimeoutError, match="did not arrive"):
        local.run(lambda world: pipeline.measure(world, pipeline.one_f_one_b, True, 0.0))


def test_asynchronous_messages_win_by_the_stated_margin() -> None:
    """Arithmetic says 0.58: 39 units of 5 ms, 33 of them work, against 67 when each message also holds up its sender. The margin of
    0.75 leaves room for a busy machine, the median of alternated pairs for its moods."""
    measured(pipeline.gpipe, False, 0.0, 0.0)  # the first backward of a process takes a second to start
    ratios = []
    for _ in range(3):
        blocking = measured(pipeline.gpipe, True, stage.FORWARD, pipeline.DELAY)
        asynchronous = measured(pipeline.gpipe, False, stage.FORWARD, pipeline.DELAY)
        ratios.append(asynchronous.seconds / blocking.seconds)
    assert statistics.median(ratios) <= pipeline.WINS, ratios


def test_the_naive_order_keeps_one_rank_at_work() -> None:
    result = measured(pipeline.naive, False, 0.001, 0.0)
    # One at a time is at most one rank's worth of work, however slow the machine: an inequality, not a timing.
    assert sum(result.idle) / STAGES >= 1 - 1 / STAGES - 1e-9
