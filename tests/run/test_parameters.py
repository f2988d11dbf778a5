"""Storage: few collectives, every element counted once, and global values that come back from any layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.mesh import Mesh
from phalanx.run.executor import Executor
from phalanx.run.gather import check_equal, gather
from phalanx.run.optimizer import SGD
from phalanx.run.parameters import NORM_CHUNK, squared_norm
from phalanx.spec import Spec, shard

from . import hand_made


def test_each_segment_is_reduced_in_one_call() -> None:
    """Weights with and without decay travel together; the tied embedding goes with the first of its hosts, once."""
    made = hand_made.program(Mesh(dp=2), 2)

    def traffic(executor: Executor) -> dict[tuple[str, str], tuple[int, int]]:
        with executor.world.ledger.recording():
            executor.step(hand_made.batch())
        return executor.world.ledger.totals()

    for totals in hand_made.on_every_rank(made, traffic, SGD()):
        calls, _ = totals["dp", "all_reduce"]
        # embedding, three blocks, COUNT and NORM
        assert calls == 4 + 2


def test_parameters_are_aligned_views_of_one_buffer_a_segment() -> None:
    def look(executor: Executor) -> None:
        for name, view in executor.parameters.views.items():
            unit, place = executor.parameters.places[name]
            assert unit.segment == place.hosts[0]
            assert view.untyped_storage().data_ptr() == unit.values.untyped_storage().data_ptr(), name
            assert view.storage_offset() * view.itemsize % 64 == 0 and view.is_contiguous()

    hand_made.on_every_rank(hand_made.program(Mesh(), 1), look, SGD())


@pytest.mark.parametrize("numel", [3, NORM_CHUNK, 5 * NORM_CHUNK + 17])
def test_the_norm_of_float32_is_as_exact_as_float32_allows(numel: int) -> None:
    """Chunks of 4096, with several partial sums each, stay within a few ulp of 1.2e-7 at any length."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    expected = x.double().square().sum().item()
    assert squared_norm(x).item() == pytest.approx(expected, rel=2e-6)
    assert squared_norm(x.double()).item() == pytest.approx(expected, rel=1e-14)


MESH = Mesh(pp=1, dp=2, tp=3)
SPECS = [
    Spec(((), ())),
    Spec((("tp",), ())),
    Spec((("dp",), ("tp",))),
    Spec((("dp", "tp"), ())),
    Spec((("tp", "dp"), ())),
    Spec((("tp",), ()), partial=frozenset({"dp"})),
    Spec((("tp",), ()), parts=((0, (6, 12)),)),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gathering_undoes_sharding(spec: Spec) -> None:
    value = torch.arange(18 * 6).view(18, 6).double()

    def there_and_back(world: World) -> Tensor:
        return gather(shard(value, spec, MESH, world.rank), spec, world)

    with LocalWorld(MESH, timeout=20) as worlds:
        for result in worlds.run(there_and_back):
            assert torch.equal(result, value)


def test_ranks_that_start_differently_are_told_which_tensor() -> None:
    def start(world: World, changed: bool) -> str:
        tensors = {name: x.clone() for name, x in hand_made.weights().items()}
        check_equal(tensors, world)  # equal so far
        if changed:
            tensors["blocks.1.bias"][3] += 1e-12
            tensors["blocks.2.bias"][0] = 0
        with pytest.raises(ValueError, match="different values") as caught:
            check_equal(tensors, world)
        return str(caught.value)

    with LocalWorld(Mesh(dp=3), timeout=20) as worlds:
        said = worlds.run(start, [False, True, False])
    assert len(set(said)) == 1 and "'blocks.1.bias'" in said[0] and "2 of 10 tensors" in said[0]


def test_ranks_that_built_different_models_are_told_so() -> None:
    def start(world: World) -> None:
        check_equal({"weight": torch.zeros(2 + world.rank)}, world)

    with LocalWorld(Mesh(dp=2), timeout=20) as worlds, pytest.raises(ValueError, match="built different models"):
        worlds.run(start)


def test_loading_refuses_what_does_not_fit() -> None:
    def load(executor: Executor) -> None:
        state = executor.parameters.state_dict()
        del state["embed.weight"]
        executor.parameters.load_state_dict(state)  # head.weight is the same tensor
        with pytest.raises(ValueError, match=r"no 'blocks\.0\.bias'"):
            executor.parameters.load_state_dict(
                {"embed.weight": state["head.weight"]} | {"blocks.0.weight": state["blocks.0.weight"]}
            )
        state["blocks.0.bias"] = torch.zeros(3)
        with pytest.raises(ValueError, match=r"shape \(3,\) in the state and \(6,\) in the model"):
            executor.parameters.load_state_dict(state)

    with torch.no_grad():
        hand_made.on_every_rank(hand_made.program(Mesh(), 1), torch.no_grad()(load), SGD())


def test_a_shard_of_the_wrong_shape_is_refused() -> None:
    values = hand_made.weights()
    values["blocks.0.bias"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"blocks.0.bias: the shard has shape \(5,\), this rank holds \(6,\)"):
        hand_made.on_every_rank(hand_made.program(Mesh(), 1), lambda executor: None, SGD(), values=values)
