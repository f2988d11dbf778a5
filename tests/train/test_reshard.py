"""A checkpoint of one layout goes on under any other: as one process of plain PyTorch would have gone on that was never stopped.

The second run starts with other weights, so that whatever is not loaded shows. What is loaded is compared bit for bit; what is
computed from it by another layout differs by the order of sums.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.reshard_cases import (
    END,
    LOSS,
    OPTIMIZERS,
    STOP,
    Layout,
    as_if_large,
    check_close,
    check_same,
    contents,
    expected,
    losses_of,
    on,
    running,
    saved_now,
    state,
    subject,
)

from phalanx.run.precision import LossScale
from phalanx.schedule import Storage
from phalanx.train.checkpoint import Checkpoints, find, load

pytestmark = pytest.mark.filterwarnings("ignore:replicated, since no name matches")


# From one layout to another


PAIRS: dict[str, tuple[str, Layout, Layout]] = {
    "zero to a pipeline": ("llama, tied", on("dp=2,tp=2", zero=2), on("pp=2,tp=2", sp=True, microbatches=2)),
    "a V to zero 3": ("llama", on("pp=2", schedule="zb-v", microbatches=4), on("dp=4", zero=3)),
    "slices to stages": ("mlp", on("dp=2,tp=2", zero=3), on("pp=2", microbatches=4)),
    "rounds to fewer key heads than ranks": (
        "llama, tied", on("pp=2,dp=2", schedule="interleaved", microbatches=4, zero=1), on("tp=4"),
    ),
    "two copies to one process": ("llama, tied", on("pp=2", schedule="dualpipe", microbatches=4), on()),
    "one process to every axis": ("llama, tied", on(), on("pp=2,dp=2,tp=2", sp=True, microbatches=2, zero=3)),
    "hybrid to zero 1": ("llama", on("rep=2,dp=2", zero=Storage(3, ("dp",))), on("dp=2", zero=1)),
    "zero 2 to hybrid": ("llama", on("dp=4", zero=2), on("rep=2,dp=2", zero=Storage(2, ("dp",)), microbatches=2)),
    "one key head": ("llama, one key head", on("tp=4", sp=True), on("dp=2,tp=2", zero=3)),
    "one key head, back": ("llama, one key head", on("dp=2,tp=2", zero=1), on("pp=2,tp=2", schedule="zb-h1", microbatches=2)),
    "fused by part, off its axis": ("gpt2", on("dp=2,tp=2", zero=3), on("pp=2", microbatches=2)),
    "fused by part, wider": ("gpt2", on("tp=2", sp=True), on("tp=4")),
    "fused by part, onto slices": ("gpt2", on("pp=2", schedule="interleaved", microbatches=2), on("dp=2,tp=2", zero=3)),
    "fused of unequal parts": ("phi3", on("tp=2"), on("dp=2", zero=2)),
    "fused of unequal parts, back": ("phi3", on("dp=4", zero=3), on("pp=2,tp=2", microbatches=2)),
    "more microbatches": ("llama, tied", on("dp=2", microbatches=1), on("dp=2", microbatches=4)),
    "fewer microbatches": ("llama", on("pp=4", schedule="gpipe", microbatches=8), on("dp=8", zero=1)),
    "with a barrier to none": ("llama, tied", on("pp=2,dp=2", microbatches=2), on("pp=2", barrier=False, microbatches=2)),
    "without a barrier to one": ("llama, tied", on("pp=2", barrier=False, microbatches=2), on("tp=2", recompute="full")),
    "two copies, and slices": ("llama", on("pp=2,dp=2", schedule="dualpipe", microbatches=4, zero=1), on("tp=2,dp=2", zero=3)),
    "padded for two to padded for four": ("llama, odd vocabulary", on("tp=2", sp=True), on("dp=2,tp=4", zero=2)),
    "padded for four to none": ("llama, odd vocabulary", on("pp=2,tp=4", microbatches=2), on("dp=2", zero=3)),
    "stages of an MLP": ("mlp", on("pp=4", schedule="zb-h2", microbatches=4), on("tp=4")),
}  # fmt: skip
EVERY_CHANGE = tuple(PAIRS)[:3]


def check_pair(which: str, layouts: Sequence[Layout], folder: Path, updates: str = "adamw") -> None:
    chosen, wanted, ours = subject(which), expected(which, updates), OPTIMIZERS[updates].ours
    one, other = layouts
    with running(chosen, one, seed=0, optimizer=ours) as step:
        losses = losses_of(step, chosen, range(STOP))
        assert max(abs(x - y) for x, y in zip(losses, wanted.losses, strict=False)) < LOSS
        before = state(step)
        address, _ = saved_now(step, chosen, str(folder))
    with running(chosen, other, seed=1, optimizer=ours) as step:
        weights = step.state_dict()
        assert not any(torch.equal(weights[name], before[f"model.{name}"]) for name in weights if weights[name].dim() > 1)
        load(step, address)
        check_same(state(step), before)
        losses = losses_of(step, chosen, range(STOP, END))
        assert abs(losses[0] - wanted.losses[STOP]) < LOSS
        after = step.state_dict()
        worst = max(float((after[name] - x).abs().max() / x.abs().max()) for name, x in wanted.weights.items() if x.any())
        off = abs(losses[0] - wanted.losses[STOP])
        print(f"{which}, {one} -> {other}: loss off by {off:.1e}, weights by {worst:.1e}")  # noqa: T201 - the figures, with -s
        check_close(after, wanted.weights)


def marked(names: Sequence[str], often: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in often else pytest.mark.nightly, id=name) for name in names]


@pytest.mark.parametrize("name", marked(list(PAIRS), EVERY_CHANGE))
def test_it_goes_on_as_one_process_that_was_never_stopped(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_large(monkeypatch)
    which, *layouts = PAIRS[name]
    check_pair(which, layouts, tmp_path)


OTHERS = {
    "momentum": (on("dp=2,tp=2", zero=1), on("pp=2", microbatches=2)),
    "rmsprop": (on("dp=2", zero=3), on("tp=2")),
    "nadam": (on("tp=2"), on("dp=4", zero=2)),
    "adafactor": (on("dp=2"), on("pp=2", microbatches=2)),
}


@pytest.mark.parametrize("updates", marked(list(OTHERS), ["nadam"]))
def test_the_state_of_every_kind_of_optimizer_goes_on(updates: str, tmp_path: Path) -> None:
    check_pair("mlp", OTHERS[updates], tmp_path, updates)


def test_what_is_frozen_or_unused_and_buffers_go_along(tmp_path: Path) -> None:
    """Into the run alone: the module of the user stays as it is."""
    check_pair("odd", (on("pp=2,dp=2", microbatches=2, zero=1), on("dp=2,tp=2", zero=3)), tmp_path)
    address = find(str(tmp_path))[0][0]
    kept = {name for name in contents(address) if name.startswith("model.")}
    assert kept == {f"model.{name}" for name in subject("odd").module(0).state_dict()}
    assert {"model.spare", "model.note", "model.places", "model.blocks.0.fixed", "model.blocks.2.scale"} <= kept
    module = subject("odd").module(2)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    with running(subject("odd"), on(), seed=2, module=module) as step:
        batch = subject("odd").example(STOP)
        other = step.evaluate(batch).loss
        load(step, address)
        assert abs(step.evaluate(batch).loss - expected("odd").losses[STOP]) < LOSS < abs(other - expected("odd").losses[STOP])
    check_same(module.state_dict(), before)


# The same layout: every bit


SAME: dict[str, tuple[str, Layout, Layout]] = {
    "float64": ("llama, tied", on("dp=2,tp=2", zero=2, sp=True), on("pp=2", microbatches=2)),
    "bf16 from float32": ("llama, float32", on("dp=2", precision="bf16", zero=2), on("tp=2", precision="bf16")),
    "bf16 from float32, whole": ("llama, float32", on("pp=2", precision="bf16", microbatches=2), on("dp=4", precision="bf16", zero=3)),
    "fp16": (
        "llama, float32",
        on("dp=2", precision="fp16", loss_scale=LossScale(initial=2.0**24, backoff=2.0**-6, interval=4)),
        on("tp=2", precision="fp16"),
    ),
    "bfloat16 parameters": ("llama, bfloat16", on("dp=2", zero=1), on("pp=2,tp=2", microbatches=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", marked(list(SAME), ["bf16 from float32"]))
def test_on_the_same_layout_every_bit_is_that_of_a_run_that_was_never_stopped(name: str, tmp_path: Path) -> None:
    """And another layout takes every bit of the state: of masters, and of the loss scale with its counts."""
    which, layout, other = SAME[name]
    chosen = subject(which)
    with running(chosen, layout, seed=0) as step:
        losses_of(step, chosen, range(STOP))
        before, scale = state(step), step.executors[0].loss_scale
        address, first = saved_now(step, chosen, str(tmp_path))
        losses, after = [first, *losses_of(step, chosen, range(STOP + 1, END))], state(step)
    assert "fp16" not in name or (scale is not None and 0 < scale.skipped < STOP and scale.finite > 0), scale
    with running(chosen, layout, seed=1) as step:
        load(step, address)
        check_same(state(step), before)
        assert [executor.loss_scale for executor in step.executors] == [scale] * len(step.executors)
        assert losses_of(step, chosen, range(STOP, END)) == losses
        check_same(state(step), after)
    with running(chosen, other, seed=1) as step:
        load(step, address)
        check_same(state(step), before)


# Writing while training


class Arrival:
    """In place of a rank's event that the state was copied: tells when the rank waits for it."""

    def __init__(self, copied: threading.Event, here: threading.Semaphore) -> None:
        self.copied, self.here = copied, here

    def wait(self) -> None:
        self.here.release()
        self.copied.wait()


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize("barrier", [True, False])
def test_the_update_after_it_waits_until_the_state_is_copied(
    is_guarded: bool, barrier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy begins when every rank is about to update; unguarded, when every rank has: then it is not the state that was meant."""
    chosen, here = subject("mlp"), threading.Semaphore(0)
    with running(chosen, on("dp=2", zero=1, barrier=barrier), seed=0) as step:
        losses_of(step, chosen, range(STOP))
        before = state(step)
        real = Checkpoints._copy

        def copied(self: Checkpoints, states: Any) -> Any:
            for _ in step.executors:
                assert here.acquire(timeout=60)
            return real(self, states)

        monkeypatch.setattr(Checkpoints, "_copy", copied)
        made = Checkpoints(step, str(tmp_path))
        made.save(STOP, {})
        for executor in step.executors:
            assert executor.reading is not None
            executor.reading = Arrival(executor.reading, here) if is_guarded else None  # type: ignore[assignment]
        step(chosen.example(STOP))
        step.settle()
        after = state(step)
        if not is_guarded:
            here.release(len(step.executors))
        made.wait()
    held = contents(find(str(tmp_path))[0][0])
    assert not torch.equal(before["model.head.weight"], after["model.head.weight"])
    wanted = before if is_guarded else after
    assert held.keys() == {name for name in wanted if name not in ("optimizer.step", "steps")}
    check_same(held, {name: wanted[name] for name in held})


def test_what_an_optimizer_keeps_from_its_first_update_on_is_written_from_then_on(tmp_path: Path) -> None:
    """The memory of the copies is used again only for what is alike."""
    chosen = subject("mlp")
    with running(chosen, on("dp=2"), seed=0, optimizer=OPTIMIZERS["adafactor"].ours) as step:
        made = Checkpoints(step, str(tmp_path))
        made.save(0, {})
        step(chosen.example(0))
        made.save(1, {})
        made.wait()
        wanted = state(step)
    newest, oldest = (contents(address) for address in find(str(tmp_path))[0])
    assert newest.keys() - oldest.keys() >= {"optimizer.head.weight/row_var", "optimizer.head.bias/variance"}
    check_same(newest, {name: wanted[name] for name in newest})
