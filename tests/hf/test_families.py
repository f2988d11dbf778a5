"""Each family: in on two ranks, trained as one process of plain PyTorch trains it, and out again, bit for bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from phalanx.cli import main
from phalanx.comm.local import local
from phalanx.mesh import Mesh
from phalanx.run.initialize import deferred_init
from phalanx.spec import shard
from phalanx.train.assembly import parallel_step
from phalanx.train.checkpoint import Checkpoints
from phalanx.train.config import TrainConfig
from phalanx.train.models import build
from phalanx.train.settings import dump
from phalanx.train.verify import verify

transformers = pytest.importorskip("transformers")

from tests.hf.folders import FAMILIES, logits, saved  # noqa: E402 - needs transformers

MESHES = ("tp=2", "dp=2,tp=2", "sp tp=2", "pp=2,tp=2", "sp pp=2,dp=2,tp=2")
"""sp: sequence parallel. Each of dp, pp, tp and sp alone with tp, and all at once."""


@cache
def config_on(family: str, mesh: str) -> TrainConfig:
    axes = mesh.removeprefix("sp ")
    return TrainConfig(
        model=family, mesh=axes, sequence_parallel=mesh != axes, microbatches=2 if "pp" in axes else 1,
        steps=2, dtype="float64", batch=4, seq=24,
    )  # fmt: skip


def check_parity(family: str, mesh: str) -> None:
    """seq is longer than the windows (16) of the families that have them. Sums differ in their order only: 1e-14 of a loss of
    two hundred tokens, a digit more of its gradients; AdamW amplifies that in weights whose gradients are small."""
    config = config_on(f"hf-tiny:{family}", mesh)
    with local(config.parsed_mesh()) as world:
        found = verify(config, world)
    assert found.loss < 1e-14
    assert 0 < found.grad < 1e-13
    assert found.weight < 1e-10


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "phi3"])
def test_all_axes_at_once_train_as_one_process(family: str) -> None:
    """Of those that are least alike: windows that alternate, projections fused by head and by part."""
    check_parity(family, MESHES[-1])


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_axis_trains_as_one_process(family: str, mesh: str) -> None:
    check_parity(family, mesh)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_on_two_ranks_and_out_again(family: str, tmp_path: Path) -> None:
    """Each rank's shards are those of the stock model; after two steps what from_pretrained loads is what was trained."""
    stock = saved(family, tmp_path / "in")
    config = config_on(f"hf:{tmp_path / 'in'}", "tp=2")
    model = build(config.model, config.dtype)
    assert model.values is not None
    with local(Mesh(tp=2)) as world:
        step = parallel_step(config, world, model, deferred_init(model.factory))
        assert any(parameter.spec.sharded for parameter in step.program.parameters.values())
        for parameter in step.program.parameters.values():
            whole = stock.get_parameter(parameter.name).detach()
            for rank in world.worlds:
                expected = shard(whole, parameter.spec, world.mesh, rank.rank)
                assert torch.equal(model.values(parameter, rank), expected), parameter.name
        before = step.state_dict()
        assert all(torch.equal(before[name], value) for name, value in stock.state_dict().items())
        for number in range(2):
            step(model.example(4, 24, number))
        checkpoints = Checkpoints(step, str(tmp_path / "run" / "checkpoints"))
        checkpoints.save(2, {"config": dump(config)})
        checkpoints.wait()
        trained = step.state_dict()
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--shard-size", "100KB"]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {name: tuple(value.shape) for name, value in back.state_dict().items()} == {
        name: tuple(value.shape) for name, value in trained.items()
    }
    twin = stock
    twin.load_state_dict(trained)
    assert torch.equal(logits(back), logits(twin))
    assert not torch.equal(logits(back), logits(saved(family, tmp_path / "again")))
    names = {path.name for path in (tmp_path / "in").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
