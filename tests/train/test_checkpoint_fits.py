"""What reads a checkpoint: stock PyTorch does, at any address; a run that it does not fit refuses it and stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.train.reshard_cases import (
    OPTIMIZERS,
    Layout,
    Subject,
    as_if_large,
    check_same,
    contents,
    losses_of,
    on,
    running,
    saved_now,
    small_llama,
    small_mlp,
    state,
    subject,
)
from torch import optim
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import phalanx as phx
from phalanx.train.checkpoint import Damaged, Saved, load

pytestmark = pytest.mark.filterwarnings("ignore:replicated, since no name matches")
STEPS = 2


def written(chosen: Subject, folder: Path | str, layout: Layout | None = None, **options: Any) -> str:
    """A checkpoint after two steps."""
    with running(chosen, layout or on("dp=2", zero=1), seed=0, **options) as step:
        losses_of(step, chosen, range(STEPS))
        return saved_now(step, chosen, str(folder), STEPS)[0]


# Stock PyTorch


def test_stock_pytorch_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one file of global tensors, and into tensors that are there; both without a process group."""
    as_if_large(monkeypatch)
    chosen = subject("llama, tied")
    with running(chosen, on("dp=2,tp=2", zero=3, sp=True), seed=0) as step:
        losses_of(step, chosen, range(STEPS))
        weights, before = step.state_dict(), state(step)
        address, _ = saved_now(step, chosen, str(tmp_path), STEPS)
    dcp_to_torch_save(address, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert found.keys() == {"model", "optimizer"}
    assert found["model"].keys() == weights.keys() - {"lm_head.weight"}  # that is the embedding
    assert torch.equal(weights["lm_head.weight"], weights["embed_tokens.weight"])
    check_same(found["model"], {name: weights[name] for name in found["model"]})
    moments = {name: before[f"optimizer.{'/'.join(name.rsplit('.', 1))}"] for name in found["optimizer"]}
    assert len(moments) == 2 * len(found["model"])
    check_same(found["optimizer"], moments)

    plain = {"model": {name: torch.full_like(weights[name], torch.nan) for name in found["model"]}}
    dcp.load(plain, checkpoint_id=address, no_dist=True)
    check_same(plain["model"], found["model"])


# What does not fit


SGD, ADAMW, NADAM = OPTIMIZERS["momentum"].ours, OPTIMIZERS["adamw"].ours, OPTIMIZERS["nadam"].ours
ADAM = phx.optimizer(optim.Adam, no_decay=())
MISFITS: dict[str, tuple[Subject, Any, Subject, Any, tuple[str, ...]]] = {
    "another width": (
        small_mlp(), ADAMW, small_mlp(hidden=24), ADAMW,
        ("model.in_proj.weight has shape (16, 8) in it and (24, 8) in the model",),
    ),
    "a layer more": (small_mlp(layers=3), ADAMW, small_mlp(), ADAMW, ("model.layers.3.up_proj.weight (32, 16) is not in it",)),
    "a layer less": (
        small_mlp(), ADAMW, small_mlp(layers=3), ADAMW, ("model.layers.3.up_proj.weight (32, 16) is in it, but not in the run",),
    ),
    "an output of its own": (
        small_llama(tied=True), ADAMW, small_llama(), ADAMW, ("optimizer.lm_head.weight.exp_avg (64, 32) is not in it",),
    ),
    "an output too many": (
        small_llama(), ADAMW, small_llama(tied=True), ADAMW, ("model.lm_head.weight (64, 32) is in it, but not in the run",),
    ),
    "momentum to AdamW": (
        small_mlp(), SGD, small_mlp(), ADAMW,
        ("optimizer.in_proj.weight.exp_avg (16, 8) is not in it", "optimizer.in_proj.weight.exp_avg_sq (16, 8) is not in it"),
    ),
    "AdamW to momentum": (small_mlp(), ADAMW, small_mlp(), SGD, ("optimizer.in_proj.weight.momentum (16, 8) is not in it",)),
    "moments to none": (
        small_mlp(), SGD, small_mlp(), phx.sgd(), ("optimizer.in_proj.weight.momentum (16, 8) is in it, but not in the run",),
    ),
    "a number that is missing": (
        small_mlp(), ADAM, small_mlp(), NADAM, ("the number optimizer.in_proj.weight/mu_product is not in it",),
    ),
    "a number too many": (
        small_mlp(), NADAM, small_mlp(), ADAM,
        ("the number optimizer.in_proj.weight/mu_product is in it, but not in the run",),
    ),
    "another dtype": (
        small_mlp(), ADAMW, small_mlp(torch.float32), ADAMW,
        ("model.in_proj.weight is torch.float64 in it and torch.float32 in the run",),
    ),
    "masters": (
        small_mlp(torch.float32), ADAMW, small_mlp(torch.bfloat16), ADAMW,
        ("model.in_proj.weight is torch.float32 in it and torch.bfloat16 in the run",),
    ),
}  # fmt: skip


OFTEN = ("another width", "a layer more", "momentum to AdamW", "a number that is missing", "another dtype")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.nightly) for name in MISFITS])
def test_what_does_not_fit_is_told_by_name_and_size_before_anything_changes(name: str, tmp_path: Path) -> None:
    chosen, with_updates, other, updates, told = MISFITS[name]
    address = written(chosen, tmp_path, on(), optimizer=with_updates)
    with running(other, on("dp=2", zero=2), seed=1, optimizer=updates) as step:
        step(other.example(0))
        before = state(step)
        with pytest.raises(ValueError, match="does not fit") as error:
            load(step, address)
        assert not isinstance(error.value, Damaged)
        for words in (address, *told):
            assert words in str(error.value), error.value
        check_same(state(step), before)
        step(other.example(1))  # and it can go on


@pytest.mark.parametrize("how", ["weights alone", "cast"])
def test_what_is_asked_for_fits(how: str, tmp_path: Path) -> None:
    """The weights without another optimizer's state, or in another dtype."""
    chosen = small_mlp()
    address = written(chosen, tmp_path, optimizer=SGD)
    other = chosen if how == "weights alone" else small_mlp(torch.float32)
    with running(other, on("tp=2"), seed=1, optimizer=ADAMW if how == "weights alone" else SGD) as step:
        moments = step.optimizer_state_dict()
        load(step, address, optimizer=how == "cast", cast=how == "cast")
        held = contents(address)
        for name, x in step.state_dict().items():
            assert torch.equal(x, held[f"model.{name}"].to(x.dtype)), name
        if how == "weights alone":
            check_same(step.optimizer_state_dict(), moments)
            assert step.executors[0].step_number == 0


# Addresses


@pytest.fixture
def address() -> Iterator[str]:
    yield "memory://reshard/checkpoints"
    fsspec.filesystem("memory").rm("/reshard", recursive=True)


def test_any_address_of_fsspec_holds_checkpoints(address: str) -> None:
    chosen = subject("mlp")
    with running(chosen, on("dp=2,tp=2", zero=2), seed=0) as step:
        losses_of(step, chosen, range(STEPS))
        before = state(step)
        found, loss = saved_now(step, chosen, address, STEPS)
    assert found.startswith(address)
    assert Saved(found).step == STEPS
    with running(chosen, on("pp=2", microbatches=2), seed=1) as step:
        load(step, found)
        check_same(state(step), before)
        assert abs(step(chosen.example(STEPS)).loss - loss) < 1e-12
