"""What is compared: sizes of the model and its batch, and for every peer the job that Phalanx does in its place. Data."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.models.llama import LlamaConfig

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1
"""Of parameters with two dimensions or more; the others have none."""


@dataclass(frozen=True)
class Shape:
    """A Llama and its global batch, in float32."""

    name: str
    model: LlamaConfig
    batch: int
    """Samples of all ranks together."""
    seq: int

    @property
    def tokens(self) -> int:
        """Of one step, over all ranks."""
        return self.batch * self.seq

    def example(self, seed: int = 0) -> dict[str, Tensor]:
        """A random global batch, the same on every rank; every target counts."""
        generator = torch.Generator().manual_seed(seed)
        size = (self.batch, self.seq)
        return {key: torch.randint(0, self.model.vocab, size, generator=generator) for key in ("tokens", "targets")}


def _shape(name: str, hidden: int, vocab: int, batch: int, seq: int, layers: int = 4) -> Shape:
    model = LlamaConfig(vocab=vocab, hidden=hidden, inner=3 * hidden, layers=layers, heads=8, kv_heads=4)
    return Shape(name, model, batch, seq)


SHAPES = {
    shape.name: shape
    for shape in (
        _shape("compute-bound", hidden=256, vocab=2048, batch=8, seq=128),
        _shape("communication-bound", hidden=512, vocab=8192, batch=4, seq=64),
    )
}
QUICK_SHAPES = {"quick": _shape("quick", hidden=64, vocab=256, batch=8, seq=32)}
"""Of --quick: to see that everything runs. Its times say how much Python each side has, and little else."""


@dataclass(frozen=True)
class Job:
    """A peer, and Phalanx's arguments for the same job.

    axis       of the one-dimensional mesh of all ranks
    arguments  of phx.parallelize, beside model, loss, example and optimizer
    sliced     each rank is given its own samples, of which it has 1/ranks; otherwise every rank is given the global batch
    chunks     stages of a rank, for the pipelines
    """

    peer: str
    what: str
    axis: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sliced: bool = False
    chunks: int = 1


MICROBATCHES = 4
"""Of the pipelines."""
_SPLIT = {"heads": "tp", "mlp": "tp", "vocab": "tp"}


def _data(peer: str, what: str, **arguments: Any) -> Job:
    return Job(peer, what, "dp", {"layout": {"batch": "dp"}, **arguments}, sliced=True)


def _pipeline(peer: str, what: str, schedule: str, chunks: int = 1) -> Job:
    arguments = {"layout": {}, "schedule": schedule, "microbatches": MICROBATCHES}
    return Job(peer, what, "pp", arguments | ({"chunks": chunks} if chunks > 1 else {}), chunks=chunks)


JOBS = {
    job.peer: job
    for job in (
        _data("ddp", "DistributedDataParallel"),
        _data("zero1", "DDP with ZeroRedundancyOptimizer", zero=1),
        _data("fsdp2", "fully_shard of every block and of the root", zero=3),
        Job("tp", "parallelize_module, loss_parallel", "tp", {"layout": _SPLIT}),
        Job("tp+sp", "the same with SequenceParallel", "tp", {"layout": {**_SPLIT, "residual_seq": "tp"}}),
        _pipeline("gpipe", "ScheduleGPipe", "gpipe"),
        _pipeline("1f1b", "Schedule1F1B", "1f1b"),
        _pipeline("interleaved", "ScheduleInterleaved1F1B", "interleaved", chunks=2),
        _pipeline("zb-v", "ScheduleZBVZeroBubble", "zb-v", chunks=2),
    )
}
"""By the peer's name."""
JAX_JOBS = {
    job.peer: job
    for job in (
        _data("jax-dp", "jit with NamedSharding, the batch split"),
        Job("jax-tp", "jit with NamedSharding, the weights split", "tp", {"layout": _SPLIT}),
    )
}
"""In a process of its own, with a host device for each rank."""


def chosen(kind: str, names: tuple[str, ...], table: Mapping[str, Any]) -> tuple[str, ...]:
    """The names as they are, or all of the table if there are none. Raises ValueError with the closest match for an unknown one."""
    for name in names:
        if name not in table:
            close = difflib.get_close_matches(name, table, n=1, cutoff=0.0)[0]
            raise ValueError(f"there is no {kind} {name!r}; did you mean {close!r}? There are {', '.join(table)}")
    return names or tuple(table)
