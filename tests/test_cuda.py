"""On a GPU: the same numbers as on the CPU, through streams, events and NCCL. Skipped where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx as phx
from phalanx.comm import signature
from phalanx.comm.c10d import C10dTransport
from phalanx.comm.lanes import Lane
from phalanx.comm.transport import Group, Handle
from phalanx.derive.compile import check_can_compile, compiled_program
from phalanx.derive.ops.dropout import keep_mask
from phalanx.derive.program import Program
from phalanx.mesh import Mesh
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.run.cuda_graph import captured_program
from phalanx.run.executor import Executor, Out
from phalanx.run.initialize import deferred_init, initial_shard
from phalanx.run.operations import Pool
from phalanx.spec import Spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = LlamaConfig(vocab=64, hidden=64, inner=96, layers=3, heads=4, kv_heads=2)
BATCH_SIZE = 8


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randint(0, 64, (BATCH_SIZE, 32), generator=generator) for key in ("tokens", "targets")}


def made(world: phx.World, microbatches: int = 1, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> phx.Step:
    torch.manual_seed(0)
    config = LlamaConfig(**{**CONFIG.__dict__, "dropout": dropout})
    model = Llama(config).to(dtype).to(world.device)
    return phx.parallelize(
        model, world, example=batch(), loss=loss, optimizer=phx.adamw(lr=1e-2), microbatches=microbatches, max_norm=1.0
    )


def three_steps(world: phx.World, microbatches: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    step = made(world, microbatches)
    outs = [step(batch()) for _ in range(3)]
    return [(out.loss, out.grad_norm) for out in outs], {name: x.cpu() for name, x in step.state_dict().items()}


def assert_equal_to_cpu(found: tuple[list[tuple[float, float]], dict[str, Tensor]]) -> None:
    """float64 in other kernels' order of summation, over three AdamW steps."""
    with phx.init(phx.Mesh(), device="cpu") as world:
        rows, weights = three_steps(world, 1)
    for mine, theirs in zip(found[0], rows, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10)
    for name, x in weights.items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_gpu_trains_like_the_cpu(microbatches: int) -> None:
    with phx.init(phx.Mesh(), device="cuda") as world:
        assert_equal_to_cpu(three_steps(world, microbatches))


def test_a_group_of_one_over_nccl_trains_like_the_cpu() -> None:
    """As torchrun would start it with one rank: communicators, lanes and events exist, though no other rank does."""
    with alone_over_nccl() as world:
        assert_equal_to_cpu(three_steps(world, 2))


@contextmanager
def alone_over_nccl() -> Iterator[phx.World]:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    with mock.patch.dict(os.environ, alone), phx.init(phx.Mesh(dp=1), device="cuda") as world:
        yield world


# Lanes: a communicator with one rank still copies from one buffer to another, on a stream of its own.

NUMEL = 1 << 20
LONG = 20_000_000
"""Cycles of a kernel that does nothing, 10 ms or more: what does not wait for it is far ahead of it."""


@contextmanager
def lane_of_one() -> Iterator[tuple[C10dTransport, Lane]]:
    """The transport takes a short way for groups of one, so its lane is opened and called below that."""
    with alone_over_nccl():
        transport = C10dTransport(torch.device("cuda", torch.cuda.current_device()), backend="nccl")
        lane = transport._open((0,), "one")
        assert lane is not None and lane.stream is not None
        yield transport, lane
        lane.stream.synchronize()
        dist.destroy_process_group(lane.pg)


def copy_on(transport: C10dTransport, lane: Lane, out: Tensor, x: Tensor) -> Handle:
    group = Group("one", (0,))
    return transport._issue_on_stream(
        signature.all_gather(out, x, group), group, (out, x),
        lambda pg: dist.all_gather_into_tensor(out, x, group=pg, async_op=True), lane, lane.stream,
    )  # fmt: skip


def test_a_lane_waits_for_what_computes_its_input() -> None:
    with lane_of_one() as (transport, lane):
        x, out = torch.zeros(NUMEL, device="cuda"), torch.zeros(NUMEL, device="cuda")
        for value in range(1, 6):
            torch.cuda._sleep(LONG)
            x.fill_(value)
            copy_on(transport, lane, out, x).wait()
            assert (int(out.min()), int(out.max())) == (value, value)


def test_who_waits_for_a_handle_waits_for_the_lane() -> None:
    with lane_of_one() as (transport, lane):
        x, out = torch.zeros(NUMEL, device="cuda"), torch.zeros(NUMEL, device="cuda")
        for value in range(1, 6):
            x.fill_(value)
            with torch.cuda.stream(lane.stream):
                torch.cuda._sleep(LONG)
            handle = copy_on(transport, lane, out, x)
            assert not handle.done()
            handle.wait()
            seen = out.clone()
            assert (int(seen.min()), int(seen.max())) == (value, value)
            assert handle.done()


def test_memory_in_flight_is_not_given_to_others() -> None:
    """The sender lets go of its tensor at once; the allocator must not hand it out while the lane has yet to read it."""
    with lane_of_one() as (transport, lane):
        out = torch.zeros(NUMEL, device="cuda")
        for value in range(1, 6):
            x = torch.full((NUMEL,), float(value), device="cuda")
            with torch.cuda.stream(lane.stream):
                torch.cuda._sleep(LONG)
            handle = copy_on(transport, lane, out, x)
            address = x.data_ptr()
            del x
            others = [torch.full((NUMEL,), -1.0, device="cuda") for _ in range(3)]
            assert address not in [other.data_ptr() for other in others], "given away while the lane reads it"
            handle.wait()
            assert (int(out.min()), int(out.max())) == (value, value)
            del others


def test_a_lane_lets_go_of_what_is_complete() -> None:
    with lane_of_one() as (transport, lane):
        out = torch.zeros(NUMEL, device="cuda")
        for _ in range(20):
            copy_on(transport, lane, out, torch.ones(NUMEL, device="cuda")).synchronize()
        assert len(lane.in_flight) == 1


def test_receive_buffers_are_free_when_nothing_sees_them() -> None:
    pool = Pool(torch.device("cuda", torch.cuda.current_device()))
    first, second = pool.take((4, 8), torch.bfloat16), pool.take((4, 8), torch.bfloat16)
    other = pool.take((8, 4), torch.bfloat16)
    assert len({first.data_ptr(), second.data_ptr(), other.data_ptr()}) == 3
    assert (first.shape, first.dtype, first.is_cuda, first.is_contiguous()) == ((4, 8), torch.bfloat16, True, True)
    address, view = first.data_ptr(), first.view(-1)[3:]
    del first
    assert pool.take((4, 8), torch.bfloat16).data_ptr() not in (address, second.data_ptr()), "a view still sees it"
    del view
    assert pool.take((4, 8), torch.bfloat16).data_ptr() == address


# Numbers


def test_bfloat16_trains_as_on_one_cpu() -> None:
    """Both round every product and sum to 8 bits, in other orders: 2^-8 of the loss, and 16 times that of the norm.

    The norm is a root of squares of gradients that went through all layers. The first step alone: AdamW then moves every weight by
    nearly its whole rate, in the direction of its gradient's sign, which rounding may decide.
    """
    outs: list[Out] = []
    for device in ("cpu", "cuda"):
        with phx.init(phx.Mesh(), device=device) as world:
            outs.append(made(world, dtype=torch.bfloat16)(batch()))
    assert outs[1].loss == pytest.approx(outs[0].loss, rel=2**-8)
    assert outs[1].grad_norm == pytest.approx(outs[0].grad_norm, rel=2**-4)
    assert outs[1].tokens == outs[0].tokens == BATCH_SIZE * 32


def test_a_loss_that_is_not_finite_is_explained() -> None:
    name = "layers.1.mlp.up_proj.weight"
    with phx.init(phx.Mesh(), device="cuda") as world:
        step = made(world)
        state = step.state_dict()
        step.load_state_dict({**state, name: torch.full_like(state[name], float("nan"))})
        with pytest.raises(FloatingPointError, match=rf"step 1: the loss is not finite.*{name}; no parameter was changed"):
            step(batch())
        step.load_state_dict(state)
        assert step(batch()).loss > 0


def test_evaluation_and_watch_see_what_the_cpu_sees() -> None:
    found = []
    for device in ("cpu", "cuda"):
        with phx.init(phx.Mesh(), device=device) as world:
            step = made(world, microbatches=2)
            watched = step.watch("layers.1.mlp", batch())
            assert isinstance(watched, Tensor)
            found.append((step.evaluate(batch()), watched.cpu()))
    (mine, seen), (theirs, expected) = found[1], found[0]
    assert mine.tokens == theirs.tokens and mine.loss == pytest.approx(theirs.loss, rel=1e-12)
    torch.testing.assert_close(seen, expected, rtol=1e-10, atol=1e-12)


# What is not a sum is equal bit for bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("spec", [Spec.replicated(3), Spec((("dp",), (), ("tp",)))], ids=str)
def test_dropout_masks_are_those_of_the_cpu(spec: Spec, dtype: torch.dtype) -> None:
    """40,000 elements and more: several of the blocks in which a CPU hashes them."""
    mesh, shape = Mesh(dp=2, tp=2), (4, 128, 320)
    for rank in range(mesh.size):
        masks = [keep_mask(0.3, 1234567, 3, spec, shape, mesh, rank, dtype, device) for device in ("cpu", "cuda")]
        assert masks[1].is_cuda and torch.equal(masks[0], masks[1].cpu())


def test_dropout_in_training_is_that_of_the_cpu() -> None:
    """Other masks would change the loss in its second digit; the same leave float64's rounding."""
    losses = []
    for device in ("cpu", "cuda"):
        with phx.init(phx.Mesh(), device=device) as world:
            step = made(world, microbatches=2, dropout=0.5)
            losses.append([step(batch()).loss for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def test_initial_weights_are_those_of_the_cpu() -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"llama": Llama(CONFIG), "linear": nn.Linear(48, 40), "embedding": nn.Embedding(30, 24)})

    module, mesh = deferred_init(build), Mesh(tp=2)
    for name, parameter in module.named_parameters():
        spec = Spec((("tp",), *[()] * (parameter.dim() - 1)))
        for rank in range(mesh.size):
            shards = [initial_shard(module, name, spec, mesh, rank, 7, device) for device in ("cpu", "cuda")]
            assert shards[1].is_cuda and torch.equal(shards[0], shards[1].cpu()), name


# Other ways to run the graphs


def on(step: phx.Step, program: Program) -> Executor:
    executor = step.executors[0]
    return Executor(program, executor.schedule, executor.world, executor.parameters, executor.optimizer, max_norm=1.0)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_captured_segments_train_as_plain_ones(microbatches: int) -> None:
    """Gradients of microbatches are added after their products rather than while: 1e-12 in float64 over three steps."""
    with phx.init(phx.Mesh(), device="cuda") as world:
        step = made(world, microbatches)
        expected = [step(batch()) for _ in range(3)]
        other = made(world, microbatches)
        program, left = captured_program(other.program)
        assert left == ()
        executor = on(other, program)
        on_device = {name: x.cuda() for name, x in batch().items()}
        for theirs in expected:
            ours = executor.step(on_device)
            assert (ours.loss, ours.grad_norm) == pytest.approx((theirs.loss, theirs.grad_norm), rel=1e-10)
        assert all(torch.isfinite(x).all() for x in executor.parameters.state_dict().values())


def test_compiled_graphs_train_as_plain_ones() -> None:
    """float64 in other kernels' order of summation."""
    try:
        check_can_compile(torch.device("cuda"))
    except ValueError as error:
        pytest.skip(str(error))
    with phx.init(phx.Mesh(), device="cuda") as world:
        step = made(world, microbatches=2)
        expected = [step(batch()) for _ in range(3)]
        other = made(world, microbatches=2)
        program, report = compiled_program(other.program)
        assert sum(row.regions for row in report) > 0
        executor = on(other, program)
        on_device = {name: x.cuda() for name, x in batch().items()}
        for theirs in expected:
            ours = executor.step(on_device)
            assert (ours.loss, ours.grad_norm) == pytest.approx((theirs.loss, theirs.grad_norm), rel=1e-10)
