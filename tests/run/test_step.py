"""From a plain module to its training step: what `parallelize` and `shard` return is the module, on any mesh."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import phalanx as phx
from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.mesh import Mesh
from phalanx.run.step import Sharded, parallelize, shard
from phalanx.spec import shard as cut

VOCAB, HIDDEN, BATCH, SEQ, LAYERS = 16, 8, 8, 4, 3
# Sums of float64 in another order, of numbers near 1, over three steps.
EXACT = 1e-13
MAX_NORM = 0.5  # below every gradient norm here


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NAMES = {
    "embed.weight": "vocab embed",
    "blocks.*.up.weight": "mlp embed",
    "blocks.*.up.bias": "mlp",
    "blocks.*.down.weight": "embed mlp",
    "tokens": "batch seq",
    "labels": "batch seq",
}
LAYOUT = {"batch": "dp", "mlp": "tp", "vocab": "tp"}
MESHES = ["", "dp=2", "tp=2", "pp=2", "dp=2,tp=2", "pp=2,dp=2,tp=2"]


def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return total, (labels != -100).sum()


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    labels = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    labels[step] = -100  # whole samples ignored: a mean of means would be wrong
    return {"tokens": tokens, "labels": labels}


@functools.cache
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


@functools.cache
def reference() -> tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor]]:
    """(loss, norm) of three steps, then weights and the last gradients, of the untouched module."""
    module = copy.deepcopy(model())
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    others = [p for p in module.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    rows = []
    for step in range(3):
        optimizer.zero_grad()
        total, count = loss(module(batch(step)["tokens"]), batch(step))
        (total / count).backward()
        gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        rows.append(((total / count).item(), norm.item()))
        optimizer.step()
    return rows, {name: x.clone() for name, x in module.state_dict().items()}, gradients


def parallel(world: LocalWorld, module: nn.Module | None = None, microbatches: int = 2, **options: object) -> phx.Step:
    """The step with as much of the names and the layout as the mesh has axes for."""
    layout = {name: axis for name, axis in LAYOUT.items() if axis in world.mesh.names}
    names = NAMES if layout else None
    options = {"optimizer": phx.adamw(lr=1e-2), "max_norm": MAX_NORM, "seed": 3, **options}
    return parallelize(
        module if module is not None else model(), world, example=batch(0), names=names, layout=layout or None, loss=loss,
        microbatches=microbatches, **options,
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_never_changes_what_a_model_computes(mesh: str) -> None:
    rows, weights, gradients = reference()
    with LocalWorld(Mesh.parse(mesh), rendezvous=True, timeout=20) as world:
        step = parallel(world)
        for number, (expected, norm) in enumerate(rows):
            out = step(batch(number))
            assert norm > MAX_NORM
            assert abs(out.loss - expected) < EXACT and abs(out.grad_norm - norm) < EXACT
        ours, grads = step.state_dict(), step.gradients()
        assert list(ours) == list(weights)
        for name, x in weights.items():
            torch.testing.assert_close(ours[name], x, rtol=0, atol=EXACT)
        for name, x in gradients.items():
            torch.testing.assert_close(grads[name], x, rtol=0, atol=EXACT)
        module = copy.deepcopy(model())
        module.load_state_dict(ours)
        total, count = loss(module(batch(5)["tokens"]), batch(5))
        assert abs(step.evaluate(batch(5)).loss - (total / count).item()) < EXACT


def test_a_run_goes_on_bit_by_bit_where_it_was_saved() -> None:
    with LocalWorld(Mesh(pp=2, tp=2), timeout=20) as world:
        step = parallel(world)
        step(batch(0))
        weights, moments = step.state_dict(), step.optimizer_state_dict()
        expected = step(batch(1)), step.state_dict()
    with LocalWorld(Mesh(pp=2, tp=2), timeout=20) as world:
        step = parallel(world)
        step.load_state_dict(weights)
        step.load_optimizer_state_dict(moments)
        assert step(batch(1)) == expected[0]
        assert all(torch.equal(x, expected[1][name]) for name, x in step.state_dict().items())


def test_recorded_initial_values_are_the_same_on_every_layout() -> None:
    deferred = phx.deferred_init(Tied)
    assert all(p.is_meta for p in deferred.parameters())
    states = []
    for mesh in ("", "pp=2,dp=2,tp=2"):
        with LocalWorld(Mesh.parse(mesh), timeout=20) as world:
            step = parallel(world, deferred)
            states.append(step.state_dict())
            assert step(batch(0)).loss > 0
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def test_meta_parameters_without_a_record_are_refused() -> None:
    with torch.device("meta"):
        module = Tied()
    with (
        LocalWorld(Mesh(), timeout=20) as world,
        pytest.raises(ValueError, match=r"embed\.weight is a meta tensor.*deferred_init"),
    ):
        parallel(world, module)


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_ids_beyond_an_embedding_are_refused(mesh: str) -> None:
    """Split over tp, no rank holds the row, and what is gathered would be zeros."""
    with LocalWorld(Mesh.parse(mesh), timeout=20) as world:
        step = parallel(world)
        bad = {**batch(0), "tokens": batch(0)["tokens"].clone()}
        bad["tokens"][2, 1] = VOCAB
        with pytest.raises(ValueError, match=r"'tokens' holds 16 at \[2, 1\]; valid are 0 to 15"):
            step(bad)


def test_local_batches_are_given_by_rank() -> None:
    with LocalWorld(Mesh(dp=2), timeout=20) as world:
        step = parallel(world, microbatches=1)
        expected = step.evaluate(batch(0))
        halves = [{name: x.chunk(2)[rank] for name, x in batch(0).items()} for rank in range(2)]
        assert step.evaluate(halves, local=True) == expected
        with pytest.raises(ValueError, match="1 batches were given"):
            step(halves[:1], local=True)
        with pytest.raises(ValueError, match="one batch for each of its 2 ranks"):
            step(halves[0], local=True)


def test_a_step_can_be_recorded() -> None:
    with LocalWorld(Mesh(pp=2, dp=2), timeout=20) as world:
        step = parallel(world)
        with step.recording() as events:
            step(batch(0))
        assert {event.rank for event in events} == {0, 1, 2, 3}
        assert sum(event.name == "NORM" for event in events) == 4


@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2"])
def test_a_loop_of_ones_own(mesh: str) -> None:
    """Gradients add up over two calls, sum over ranks, and clip as torch's do; with `count` the two calls are one batch."""
    module = copy.deepcopy(model())
    expected = [loss(module(batch(step)["tokens"]), batch(step)) for step in range(2)]
    everything = expected[0][1] + expected[1][1]
    (sum(total for total, _ in expected) / everything).backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)

    def train(world: World, mine: Sharded) -> tuple[list[float], dict[str, Tensor], float, dict[str, Tensor]]:
        losses = [mine(batch(step), count=everything) for step in range(2)]
        sum(losses).backward()  # type: ignore[union-attr]
        mine.sync_gradients()
        shards = {name: p.grad.clone() for name, p in mine.named_parameters() if p.grad is not None}
        clipped = mine.clip_grad_norm_(MAX_NORM)
        mean = mine(batch(0)).item()
        return [mean, *(x.item() for x in losses)], shards, clipped.item(), mine.full_state_dict()

    with LocalWorld(Mesh.parse(mesh), timeout=20) as world:
        layout = {name: axis for name, axis in LAYOUT.items() if axis in world.mesh.names}
        modules = shard(model(), world, example=batch(0), names=NAMES if layout else None, layout=layout or None, loss=loss)
        for rank, (losses, shards, clipped, state) in enumerate(world.run(train, modules)):
            total, count = expected[0]
            assert abs(losses[0] - (total / count).item()) < EXACT
            assert abs(losses[1] - (total / everything).item()) < EXACT
            assert abs(clipped - norm.item()) < EXACT
            for name, x in gradients.items():
                spec = modules[rank].program.parameters[name].spec
                mine = cut(x, spec, world.mesh, rank)
                torch.testing.assert_close(shards[name], mine, rtol=0, atol=EXACT)
            assert all(torch.equal(state[name], x) for name, x in model().state_dict().items())


def test_the_module_of_one_rank_cannot_be_called_alone() -> None:
    """It would wait a minute for ranks that nobody has started."""
    with LocalWorld(Mesh(dp=2), timeout=20) as world:
        modules = shard(model(), world, example=batch(0), loss=loss)
        with pytest.raises(ValueError, match=r"the module of rank 1 of 2, .* as in world\.run"):
            modules[1](batch(0))
        first, second = world.run(lambda rank, mine: mine(batch(0)).item(), modules)
        assert first == second


def test_a_loop_of_ones_own_has_no_pipeline() -> None:
    with LocalWorld(Mesh(pp=2), timeout=20) as world, pytest.raises(ValueError, match="runs no pipeline"):
        shard(model(), world, example=batch(0), loss=loss)
