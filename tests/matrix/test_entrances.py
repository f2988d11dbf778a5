"""The other ways into a model, on every mesh: recorded initial values, evaluation, a loop of one's own."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import phalanx as phx
from phalanx.comm.local import local
from phalanx.comm.world import World
from phalanx.mesh import Mesh
from phalanx.run.step import Sharded
from phalanx.train.assembly import parallel_step
from phalanx.train.verify import batches, relative_error

from .cases import (
    AFTER_THREE_STEPS,
    DROPOUT,
    FROM_EQUAL_WEIGHTS,
    GROUPED_QUERY,
    VALUES,
    Case,
    config_of,
    marked,
    mean_loss,
    model_of,
    module_of,
)

ONE_OF_EACH = [Case(model=model, mesh=mesh, tied=model in ("gpt2", "llama"), kv_heads=kv) for model, mesh, kv in (
    *((model, mesh, "all") for model in ("mlp", "gpt2") for mesh in VALUES["mesh"]),
    *((model, mesh, "more") for model in GROUPED_QUERY for mesh in VALUES["mesh"]),
)]  # fmt: skip
TRIPLE = [case for case in ONE_OF_EACH if case.mesh == "pp=2,dp=2,tp=2"]


@pytest.mark.parametrize("case", marked(ONE_OF_EACH, TRIPLE))
def test_recorded_initial_values_are_those_of_one_process(case: Case) -> None:
    """Bit by bit, and not those of another seed."""
    model = model_of(case)
    whole = phx.materialize(phx.deferred_init(model.factory), 5).state_dict()
    with local(Mesh.parse(case.mesh)) as world:
        state = parallel_step(config_of(case, seed=5), world, model, phx.deferred_init(model.factory)).state_dict()
    assert list(state) == list(whole)
    assert all(torch.equal(value, whole[name]) for name, value in state.items())
    other = phx.materialize(phx.deferred_init(model.factory), 6).state_dict()
    assert any(not torch.equal(value, other[name]) for name, value in state.items())


@pytest.mark.parametrize("case", marked(ONE_OF_EACH, TRIPLE))
def test_evaluation_is_that_of_one_process(case: Case) -> None:
    """Before and after a step, on another batch than the step's, and it changes nothing."""
    model, config = model_of(case), config_of(case, microbatches=2)
    module = module_of(model)
    trained, held_out, _ = batches(model, config)
    with local(Mesh.parse(case.mesh)) as world:
        step = parallel_step(config, world, model, module)
        found = [step.evaluate(held_out)]
        step(trained)
        after = step.state_dict()
        found += [step.evaluate(held_out), step.evaluate(held_out)]
        assert all(torch.equal(value, after[name]) for name, value in step.state_dict().items())
    expected = [mean_loss(module, model, held_out)]
    module.load_state_dict(after)
    expected.append(mean_loss(module, model, held_out))
    assert abs(expected[0] - expected[1]) > 1e-6  # one step was seen
    assert found[1] == found[2]
    for ours, theirs in zip(found, expected, strict=False):
        assert abs(ours.loss / theirs.item() - 1) <= FROM_EQUAL_WEIGHTS
        assert ours.tokens == (held_out["targets"] != -100).sum()


@pytest.mark.parametrize("case", marked(DROPOUT, [c for c in DROPOUT if c.mesh == "pp=2,dp=2,tp=2"]))
def test_evaluation_drops_nothing(case: Case) -> None:
    """Not in `evaluate`, nor after `eval()` in a loop of one's own; training does, the same whether evaluated between or not."""
    model, config = model_of(case, 0.3), config_of(case, dropout=0.3)
    module, batch = module_of(model), next(batches(model, config))
    expected = mean_loss(copy.deepcopy(module).eval(), model, batch).item()

    def between(world: World, mine: Sharded) -> tuple[float, float]:
        evaluated = mine.eval()(batch)
        assert not evaluated.requires_grad
        return evaluated.item(), mine.train()(batch).item()

    with local(Mesh.parse(case.mesh)) as world:
        step = parallel_step(config, world, model, module)
        found = [step.evaluate(batch).loss]
        trained = step(batch).loss
    with local(Mesh.parse("dp=2,tp=2")) as world:
        layout = replace(config, mesh="dp=2,tp=2").parsed_layout(model.dimensions)
        sharded = phx.shard(module, world, example=batch, names=model.names, layout=layout, loss=model.loss)
        for evaluated, own in world.run(between, sharded):
            found.append(evaluated)
            assert abs(own / trained - 1) <= FROM_EQUAL_WEIGHTS
    assert max(abs(loss / expected - 1) for loss in found) <= FROM_EQUAL_WEIGHTS
    assert abs(trained / expected - 1) > 1e-5  # more than any rounding: training did drop


OWN_LOOP = [case for case in ONE_OF_EACH if "pp" not in case.mesh]


@pytest.mark.parametrize("case", marked(OWN_LOOP, [case for case in OWN_LOOP if case.mesh == "dp=2,tp=2"]))
def test_a_loop_of_ones_own_with_torchs_optimizer(case: Case) -> None:
    model, config = model_of(case), config_of(case)
    module = module_of(model)
    steps = list(batches(model, config))

    def train(world: World, mine: Sharded) -> tuple[list[float], dict[str, Tensor]]:
        optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3)
        losses = []
        for batch in steps:
            optimizer.zero_grad()
            loss = mine(batch)
            loss.backward()
            mine.sync_gradients()
            optimizer.step()
            losses.append(loss.item())
        return losses, mine.full_state_dict()

    layout = config.parsed_layout(model.dimensions)
    with local(Mesh.parse(case.mesh)) as world:
        sharded = phx.shard(module, world, example=steps[0], names=model.names, layout=layout, loss=model.loss)
        ranks = world.run(train, sharded)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    expected = []
    for batch in steps:
        optimizer.zero_grad()
        loss = mean_loss(module, model, batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, state in ranks:
        assert abs(losses[0] / expected[0] - 1) <= FROM_EQUAL_WEIGHTS
        assert max(abs(x / y - 1) for x, y in zip(losses, expected, strict=True)) <= AFTER_THREE_STEPS
        for name, value in module.state_dict().items():
            assert relative_error(value, state[name]) <= AFTER_THREE_STEPS, name
