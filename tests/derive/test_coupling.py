"""Samples that see one another: computed over the whole batch, and refused in microbatches unless asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as phx
from phalanx.comm.local import LocalWorld
from phalanx.derive import capture, derive_captured
from phalanx.derive.coupling import refuse_coupling
from phalanx.mesh import Mesh

from .parity import on_mesh, worst
from .users_models import MLP, MODELS, B, Batch, D, Loss, Model, Prepared, sequence, square

# float64 sums in another order; a missing or doubled term is at least 1e-2
TOLERANCE = 1e-12


class Coupled(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(D, D, bias=False), nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "statistics by hand":
            x = (x - x.mean((0, 1))) / (x.var((0, 1), correction=0) + 1e-5).sqrt()
        elif self.how == "softmax over the batch":
            x = x * x.softmax(0)
        elif self.how == "similarity":
            flat = F.normalize(x.mean(1), dim=-1)
            x = x + (flat @ flat.T).sum(-1)[:, None, None]
        elif self.how == "batch norm":
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        elif self.how == "neighbours":
            x = x + x.roll(1, 0)
        elif self.how == "flipped":
            x = x + x.flip(0)
        elif self.how == "place in the batch":
            x = x + torch.arange(x.shape[0], dtype=x.dtype)[:, None, None]
        elif self.how == "first sample":
            x = x + x[0]
        return self.last(x)


def with_balance(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """A term that is not linear in a mean over samples, as balances experts."""
    summed, count = square(outputs, batch)
    return summed + outputs.mean((0, 1)).square().sum(), count


COUPLINGS = ("statistics by hand", "softmax over the batch", "similarity", "batch norm", "neighbours", "flipped", "place in the batch",
             "first sample")  # fmt: skip


@pytest.mark.parametrize("how", COUPLINGS)
def test_what_couples_samples_is_computed_over_the_whole_batch(how: str) -> None:
    ready = Prepared(Model(lambda: Coupled(how), sequence, square))
    assert max(ready.eager.values()) <= 1e-10
    program = derive_captured(ready.captured, Mesh(dp=4), layout={"batch": "dp"})
    error, where = worst(on_mesh(program, ready.params, ready.buffers, ready.batch), ready.reference)
    assert error <= TOLERANCE, f"{where} is off by {error:.1e}"


def parallelize(module: nn.Module, batch: Batch, loss: Loss, microbatches: int, **options: Any) -> phx.Step:
    with LocalWorld(Mesh(dp=1)) as world:
        return phx.parallelize(module.double(), world, example=batch, loss=loss, microbatches=microbatches, **options)


@pytest.mark.parametrize("microbatches", [2, B])
@pytest.mark.parametrize("how", COUPLINGS)
def test_microbatches_refuse_what_couples_samples(how: str, microbatches: int) -> None:
    with pytest.raises(
        ValueError, match=r"test_coupling\.py:\d+ couples the samples of a batch.*batch_coupling=\"microbatch\""
    ):
        parallelize(Coupled(how), sequence(), square, microbatches)


def test_microbatches_refuse_a_loss_that_couples_samples() -> None:
    with pytest.raises(ValueError, match=r"mean.* couples the samples of a batch: it divides by their number"):
        parallelize(MLP(), sequence(), with_balance, 2)


def test_microbatches_refuse_a_term_that_each_would_add_again() -> None:
    class Decayed(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().sum() + self.up.weight.square().sum()

    def loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs, torch.ones_like(batch["y"]).sum()

    with pytest.raises(ValueError, match="does not depend on them, which every microbatch would add again"):
        parallelize(Decayed(), sequence(), loss, 2)


def test_coupling_within_each_microbatch_can_be_asked_for() -> None:
    torch.manual_seed(0)
    module, batch = Coupled("batch norm").double(), sequence()
    with LocalWorld(Mesh(dp=2)) as world:
        step = phx.parallelize(
            module, world, example=batch, loss=square, microbatches=2, batch_coupling="microbatch", optimizer=phx.sgd(lr=0.0)
        )
        found = float(step(batch).loss)
    halves = [{k: v[at : at + B // 2] for k, v in batch.items()} for at in (0, B // 2)]
    expected = sum(float(square(module(half["x"]), half)[0]) for half in halves) / B
    assert abs(found - expected) <= TOLERANCE * expected


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if not model.pipelines])
def test_what_leaves_samples_apart_is_taken_in_microbatches(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]
    refuse_coupling(capture(model.make().double(), model.batch(), model.loss), 2)
