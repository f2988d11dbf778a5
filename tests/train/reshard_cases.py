"""Models, optimizers and layouts for the tests of checkpoints, and what one process of plain PyTorch makes of the first two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import phalanx as phx
from phalanx import rules
from phalanx.models import llama, mlp
from phalanx.run import pieces
from phalanx.run.pieces import Piece
from phalanx.run.step import Step
from phalanx.train import models
from phalanx.train.checkpoint import Checkpoints, Saved, find, part

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
    """A model, in float64 unless it says otherwise, with what it learns from."""

    make: Callable[[], nn.Module]
    loss: Any
    example: Callable[[int], State]
    """Of a seed."""
    names: Mapping[str, str] | None = None
    """None: those of its family's table."""
    dtype: torch.dtype = torch.float64

    def module(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return self.make()
        finally:
            torch.set_default_dtype(before)


def small_llama(dtype: torch.dtype = torch.float64, **sizes: Any) -> Subject:
    config = llama.LlamaConfig(**{"vocab": VOCAB, "hidden": 32, "inner": 48, "layers": 3, "heads": 4, "kv_heads": 2, **sizes})
    example = partial(models.token_batch, "tokens", config.vocab, BATCH, SEQ)
    return Subject(lambda: llama.Llama(config), llama.loss, example, dtype=dtype)


class Block(nn.Module):
    """With a frozen parameter, a buffer that is kept, and one that is made anew."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.fixed = nn.Parameter(torch.rand(width), requires_grad=False)
        self.register_buffer("scale", torch.rand(width))
        self.register_buffer("made", torch.ones(width), persistent=False)

    def forward(self, x: Tensor, angles: Tensor, places: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x * self.fixed + angles))) * self.scale * self.made + places[:, None]


class Odd(nn.Module):
    """With a tied embedding, a buffer that both a table and a block read, and a parameter and a buffer that nothing uses."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Parameter(torch.rand(5, 3))
        self.register_buffer("places", torch.rand(SEQ))
        self.register_buffer("note", torch.rand(7))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = torch.outer(self.places, torch.arange(x.shape[-1], dtype=x.dtype)).cos()
        for block in self.blocks:
            x = block(x, angles, self.places)
        logits: Tensor = self.head(x)
        return logits


ODD = {
    "*.up.weight": "mlp embed",
    "*.up.bias": "mlp",
    "*.down.weight": "embed mlp",
    "tokens": "batch seq",
    "targets": "batch seq",
}


def small_mlp(dtype: torch.dtype = torch.float64, **sizes: Any) -> Subject:
    config = mlp.MLPConfig(**{"inputs": 8, "hidden": 16, "inner": 32, "layers": 4, "outputs": 4, **sizes})
    example = partial(models.class_batch, config.inputs, config.outputs, dtype, BATCH, SEQ)
    return Subject(lambda: mlp.MLP(config), mlp.loss, example, dtype=dtype)


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
        "llama, float32": partial(small_llama, dtype=torch.float32),
        "llama, bfloat16": partial(small_llama, dtype=torch.bfloat16),
        "mlp": small_mlp,
        "odd": lambda: Subject(Odd, llama.loss, partial(models.token_batch, "tokens", VOCAB, BATCH, SEQ), ODD),
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
        losses.append(float(total.detach() / count))
    return Expected(losses, {key: x.detach().clone() for key, x in module.state_dict().items()})


# Layouts


@dataclass(frozen=True)
class Layout:
    mesh: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of parallelize."""
    sequence_parallel: bool = False

    def __str__(self) -> str:
        words = [
            self.mesh or "alone",
            "sp" * self.sequence_parallel,
            *(f"{key}={value}" for key, value in self.options.items()),
        ]
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
    names = rules.table_for(module, batch) if chosen.names is None else chosen.names
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


def contents(address: str) -> State:
    """Every tensor of a checkpoint, under the names of `state`; tied ones by each of their names."""
    saved = Saved(address)
    values = {key: torch.empty(kind.shape, dtype=kind.dtype) for key, kind in saved.kinds.items()}
    saved.fill([Piece(key, (0,) * value.dim(), value) for key, value in values.items()])
    saved.close()
    values |= {f"model.{alias}": values[f"model.{name}"] for alias, name in saved.aliases.items()}
    named = [key.rsplit(".", 1) if key.startswith("optimizer.") else [key] for key in values]
    return {"/".join(key): value for key, value in zip(named, values.values(), strict=True)}


def saved_now(step: Step, chosen: Subject, address: str, number: int = STOP) -> tuple[str, float]:
    """The state after so many steps; the next step, whose loss is returned, is taken while it is written."""
    made = Checkpoints(step, address)
    made.save(number, {})
    loss = step(chosen.example(number)).loss
    made.wait()
    return find(address)[0][0], loss


def losses_of(step: Step, chosen: Subject, numbers: range) -> list[float]:
    return [step(chosen.example(number)).loss for number in numbers]


def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done to large tensors is done to these: all ranks that hold copies write a part, in strips."""
    monkeypatch.setattr(pieces, "SHARED_BYTES", 64)
    monkeypatch.setattr(part, "STRIP_BYTES", 256)
    monkeypatch.setattr(part, "ROW_BYTES", 16)
