"""The training loop: batches in, metrics out, the same loss curve on every mesh.

It knows nothing of ranks beyond which slice of a batch is this one's and who writes the files.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.run.executor import Out
from phalanx.run.initialize import deferred_init
from phalanx.train.assembly import parallel_step
from phalanx.train.batches import Batches
from phalanx.train.config import TrainConfig, dump
from phalanx.train.metrics import Recorder, StepMetrics, tell, traffic_lines
from phalanx.train.models import build
from phalanx.train.trace import tracing


@dataclass(frozen=True)
class Summary:
    """What a run came to. `traffic` is {(axis, operation): (calls, bytes)} of rank 0 over all steps."""

    first: StepMetrics
    last: StepMetrics
    traffic: Mapping[tuple[str, str], tuple[int, int]]
    held_out: float | None
    """Mean loss on the batches of --held-out after training; None without them."""
    folder: Path | None
    """Where config.yaml and metrics.jsonl are; None on ranks other than the first."""


def train(config: TrainConfig, world: World | LocalWorld, console: Console | None = None) -> Summary:
    """Train as `config` says; every rank calls this. Rank 0 writes the run folder and tells `console`.

    Raises ValueError for what the user got wrong, before the first step, and FloatingPointError when a loss or gradient is not
    finite.
    """
    model = build(config.model, config.dtype, dropout=config.dropout)
    config = replace(config, batch=config.batch or model.batch, seq=config.seq or model.seq)
    module = deferred_init(model.factory)
    step = parallel_step(config, world, model, module)
    batches = Batches(config, model, step)
    here = world if isinstance(world, World) else world.worlds[0]
    folder = run_folder(config) if here.rank == 0 else None
    if folder is not None:
        # Without the folder: a run from this file is another one, and would replace the metrics beside it.
        (folder / "config.yaml").write_text(dump(replace(config, out=None)))
    if here.rank != 0:
        console = None
    if console is not None:
        parameters = sum(p.numel() for p in module.parameters())
        on = f"mesh {config.mesh}" if config.mesh else "one rank"
        tell(console, f"{config.model}: {parameters:,} parameters on {on}, learning from {batches.source}")
    traffic: Counter[tuple[str, str, str]] = Counter()
    here.ledger.start()
    taken: deque[tuple[int, Out, float]] = deque()
    """Steps that are not recorded yet: number, result and seconds."""
    with Recorder(config.steps, folder, console) as recorder:
        for number in range(config.steps):
            with tracing(step, world, number + 1, folder) if number + 1 == config.trace else nullcontext():
                began = time.perf_counter()
                out = step(batches.training(number), local=batches.is_local)
                taken.append((number + 1, out, time.perf_counter() - began))
            # Without a barrier the next step is started before the numbers of this one are asked for.
            while len(taken) > (0 if config.barrier else 1):
                recorder.record(metrics(*taken.popleft()))
            # Emptied every step: a ledger that is left alone remembers every call of the run.
            for (axis, operation), (calls, moved) in here.ledger.totals().items():
                traffic[axis, operation, "calls"] += calls
                traffic[axis, operation, "bytes"] += moved
            here.ledger.clear()
        step.settle()
        while taken:
            recorder.record(metrics(*taken.popleft()))
    here.ledger.stop()
    assert recorder.first is not None and recorder.last is not None
    totals = {(axis, op): (calls, traffic[axis, op, "bytes"]) for (axis, op, what), calls in traffic.items() if what == "calls"}
    held_out = None
    if config.held_out:
        parts = [step.evaluate(batches.held_out(number), local=batches.is_local) for number in range(config.held_out)]
        held_out = sum(part.loss * part.tokens for part in parts) / sum(part.tokens for part in parts)
    summary = Summary(recorder.first, recorder.last, totals, held_out, folder)
    if console is not None:
        if config.trace is not None:
            tell(console, f"step {config.trace} is recorded; `phalanx schedule --run {folder}` shows it")
        for line in closing_lines(summary, config.steps):
            tell(console, line)
    return summary


def metrics(number: int, out: Out, seconds: float) -> StepMetrics:
    return StepMetrics(
        step=number,
        loss=float(out.loss),
        grad_norm=float(out.grad_norm),
        lr=float(out.lr),
        tokens=int(out.tokens),
        tokens_per_second=int(out.tokens) / seconds,
        seconds=seconds,
    )


def closing_lines(summary: Summary, steps: int) -> list[str]:
    first, last = summary.first, summary.last
    lines = [f"loss {first.loss:.4f} at step {first.step} → {last.loss:.4f} at step {last.step}"]
    if summary.held_out is not None:
        lines.append(f"held-out loss {summary.held_out:.4f}")
    moved = traffic_lines(summary.traffic, steps)
    lines += ["bytes moved by rank 0, by mesh axis:", *moved] if moved else ["no bytes moved: one rank"]
    return [*lines, f"run folder: {summary.folder}"]


def run_folder(config: TrainConfig) -> Path:
    """The folder of --out, or a new one under runs/ named for model and mesh."""
    if config.out is not None:
        config.out.mkdir(parents=True, exist_ok=True)
        return config.out
    name = "-".join([config.model.replace(":", "-"), *config.mesh.replace("=", "").split(",")]).rstrip("-")
    number = 1
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}.{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder
