"""A checkpoint of one layout goes on under any other: as one process of plain PyTorch would have gone on that was never stopped.

The second run starts with other weights, so that whatever is not loaded shows. What is loaded is compared bit for bit; what is
computed from it by another layout differs by the order of sums.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import phalanx as phx
from phalanx import rules
from phalanx.models import llama, mlp
from phalanx.run.precision import LossScale
from phalanx.run.step import Step
from phalanx.schedule import Storage
from phalanx.spec import shard
from phalanx.train import models
from phalanx.train.checkpoint import Checkpoints, Damaged, Saved, find, load

pytestmark = pytest.mark.filterwarnings("ignore:replicated, since no name matches")
STOP, END = 3, 8
"""Steps of the first run, and of both."""
# Float64 sums in another order: some 1e3 roundings of 1e-16. An update divides a gradient's rounding by its size, at least EPS.
LOSS, WEIGHTS = 1e-12, 1e-10
EPS = 1e-3
"""Of AdamW. With 1e-8 the update of a gradient that is nothing but rounding, as of a key's bias, is the sign of rounding."""
VOCAB, BATCH, SEQ = 64, 8, 8
State = dict[str, Tensor]


# Models


@dataclass(frozen=True)
class Subject:
    """A model in float64, with what it learns from."""

    make: Callable[[], nn.Module]
    loss: Any
    example: Callable[[int], State]
    """Of a seed."""

    def module(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return self.make()
        finally:
            torch.set_default_dtype(before)


def small_llama(**sizes: Any) -> Subject:
    config = llama.LlamaConfig(**{"vocab": VOCAB, "hidden": 32, "inner": 48, "layers": 3, "heads": 4, "kv_heads": 2, **sizes})
    example = partial(models.token_batch, "tokens", config.vocab, BATCH, SEQ)
    return Subject(lambda: llama.Llama(config), llama.loss, example)


def small_mlp(hidden: int = 16) -> Subject:
    config = mlp.MLPConfig(inputs=8, hidden=hidden, inner=32, layers=4, outputs=4)
    return Subject(lambda: mlp.MLP(config), mlp.loss, partial(models.class_batch, 8, 4, torch.float64, BATCH, SEQ))


def hugging_face(family: str) -> Subject:
    found = models.build(f"hf-tiny:{family}", "float64")
    return Subject(found.factory, found.loss, partial(found.example, BATCH, SEQ))


@cache
def subject(name: str) -> Subject:
    if name in ("gpt2", "phi3"):
        pytest.importorskip("transformers")
        return hugging_face(name)
    made = {
        "llama": small_llama,
        "llama, tied": partial(small_llama, tied=True),
        "llama, one key head": partial(small_llama, kv_heads=1),
        "llama, odd vocabulary": partial(small_llama, vocab=257, tied=True),
        "mlp": small_mlp,
    }
    return made[name]()


# Optimizers, and what one process of plain PyTorch makes of them


def adamw(**options: Any) -> Any:
    return phx.adamw(lr=1e-2, eps=EPS, no_decay=(), **options)


@dataclass(frozen=True)
class Updates:
    ours: Any
    plain: Callable[..., optim.Optimizer]


def both(kind: type[optim.Optimizer], **options: Any) -> Updates:
    return Updates(phx.optimizer(kind, no_decay=(), **options), partial(kind, **options))


OPTIMIZERS = {
    "adamw": Updates(adamw(), partial(optim.AdamW, lr=1e-2, eps=EPS)),
    "momentum": Updates(phx.sgd(lr=0.1, momentum=0.9), partial(optim.SGD, lr=0.1, momentum=0.9)),
    "rmsprop": both(optim.RMSprop, lr=1e-3, momentum=0.9, centered=True, eps=EPS),
    "nadam": both(optim.NAdam, lr=1e-2, eps=EPS),
    "adafactor": both(optim.Adafactor, lr=1e-2),
    "muon": Updates(phx.optimizer(optim.Muon, lr=1e-2, no_decay=()), partial(optim.Muon, lr=1e-2)),
}


@dataclass(frozen=True)
class Expected:
    losses: list[float]
    weights: State


@cache
def expected(name: str, updates: str = "adamw") -> Expected:
    """What one process is at that is never stopped."""
    chosen = subject(name)
    module = chosen.module(0)
    made = OPTIMIZERS[updates].plain([p for p in module.parameters() if p.requires_grad])
    losses = []
    for number in range(END):
        batch = chosen.example(number)
        made.zero_grad()
        total, count = chosen.loss(module(batch[next(iter(batch))]), batch)
        (total / count).backward()
        made.step()
        losses.append(float(total / count))
    return Expected(losses, {key: x.detach().clone() for key, x in module.state_dict().items()})


# Layouts


@dataclass(frozen=True)
class Layout:
    mesh: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of parallelize."""
    sequence_parallel: bool = False

    def __str__(self) -> str:
        words = [self.mesh or "alone", "sp" * self.sequence_parallel, *(f"{key}={value}" for key, value in self.options.items())]
        return " ".join(filter(None, words))

    def dimensions(self, mesh: phx.Mesh, names: Mapping[str, str]) -> dict[str, Any]:
        placed: dict[str, Any] = {"heads": "tp", "mlp": "tp", "vocab": "tp"} if "tp" in mesh.names else {}
        if self.sequence_parallel:
            placed["residual_seq"] = "tp"
        rows = tuple(axis for axis in ("rep", "dp") if axis in mesh.names)
        used = {word for dims in names.values() for word in dims.split()}
        return {key: axis for key, axis in {**placed, **({"batch": rows} if rows else {})}.items() if key in used}


def on(mesh: str = "", *, sp: bool = False, **options: Any) -> Layout:
    return Layout(mesh, options, sp)


@contextmanager
def running(chosen: Subject, layout: Layout, seed: int, module: nn.Module | None = None, **options: Any) -> Iterator[Step]:
    module = chosen.module(seed) if module is None else module
    batch = chosen.example(0)
    names = rules.table_for(module, batch)
    mesh = phx.Mesh.parse(layout.mesh)
    with phx.local(mesh) as world:
        yield phx.parallelize(
            module, world, example=batch, names=names, layout=layout.dimensions(mesh, names), loss=chosen.loss,
            **{"optimizer": adamw(), **layout.options, **options},
        )  # fmt: skip


def state(step: Step) -> State:
    """All that a checkpoint has of the weights and the optimizer, and the numbers beside."""
    weights = {f"model.{name}": x.clone() for name, x in step.state_dict().items()}
    steps = {"steps": torch.tensor([executor.step_number for executor in step.executors]).unique()}
    return weights | {f"optimizer.{name}": x.clone() for name, x in step.optimizer_state_dict().items()} | steps


def check_same(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert x.dtype == found[name].dtype, name
        assert torch.equal(found[name], x), name


def check_close(found: State, wanted: State) -> None:
    """Relative to the largest element of each tensor."""
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        error = float((found[name] - x).abs().max() / x.abs().max().clamp(min=1e-30))
        assert error < WEIGHTS, (name, error)


def saved_now(step: Step, chosen: Subject, address: str, number: int = STOP) -> str:
    """The state after so many steps; the next step is taken while it is written."""
    made = Checkpoints(step, address)
    made.save(number, {})
    step(chosen.example(number))
    made.wait()
    return find(address)[0][0]


def losses_of(step: Step, chosen: Subject, numbers: range) -> list[float]:
    return [step(chosen.example(number)).loss for number in numbers]


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
    "stages of an MLP": ("mlp", on("pp=4", schedule="zb-h2", microbatches=4), on("tp=4")),
}  # fmt: skip
EVERY_CHANGE = tuple(PAIRS)[:3]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EVERY_CHANGE else pytest.mark.nightly, id=name) for name in PAIRS]
)
def test_it_goes_on_as_one_process_that_was_never_stopped(name: str, tmp_path: Path) -> None:
    which, one, other = PAIRS[name]
    chosen, wanted = subject(which), expected(which)
    with running(chosen, one, seed=0) as step:
        losses = losses_of(step, chosen, range(STOP))
        assert max(abs(x - y) for x, y in zip(losses, wanted.losses, strict=False)) < LOSS
        before = state(step)
        address = saved_now(step, chosen, str(tmp_path))
    with running(chosen, other, seed=1) as step:
        assert not torch.equal(next(iter(step.state_dict().values())), next(iter(before.values())))
        load(step, address)
        check_same(state(step), before)
        losses = losses_of(step, chosen, range(STOP, END))
        assert abs(losses[0] - wanted.losses[STOP]) < LOSS
        check_close(step.state_dict(), wanted.weights)
