"""`phalanx explain`: what every rank computes, exchanges and keeps, read off the derived graphs. Runs nothing."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from phalanx.cli.options import NoRun, Switch, Unused, defaults
from phalanx.train.config import OptimizerConfig, TrainConfig, closest
from phalanx.train.metrics import bytes_text

if TYPE_CHECKING:
    from phalanx.derive.program import Program
    from phalanx.derive.suggest import Suggestion
    from phalanx.schedule.actions import Schedule, Storage
    from phalanx.schedule.check import Report


@dataclass(frozen=True, kw_only=True)
class Explained(NoRun):
    """What of a run its graphs depend on."""

    steps: Unused[int] = 200
    device: Unused[Literal["cpu", "cuda"] | None] = None
    optimizer: Unused[OptimizerConfig] = field(default_factory=OptimizerConfig)
    compile: Unused[bool] = False
    balance: Unused[Path | None] = None
    reduce_dtype: Unused[Literal["bfloat16"] | None] = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say what a model on a mesh computes, exchanges and keeps, without running it: every collective, its bytes and why."""

    config: Path | None = None
    """A YAML file with any of the run's options below; the command line has the last word."""
    actions: Switch = False
    """Print every rank's list of actions as well."""
    json: Switch = False
    """Print the collectives as one JSON object and nothing else."""
    suggest_rules: Switch = False
    """Print a table of dimension names for the model and nothing else. It needs none yet, and may be FILE.py:FUNCTION, which returns
    (module, batch) or (module, batch, loss)."""
    run: Annotated[Explained, tyro.conf.arg(name="")]


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, default=Options(run=defaults(args, Explained())), prog="phalanx explain")
    config = options.run
    config.check()
    if options.suggest_rules:
        print(suggested(config))
        return 0

    from phalanx.run.initialize import deferred_init
    from phalanx.schedule import build, from_program
    from phalanx.schedule.check import check
    from phalanx.schedule.explain import explain
    from phalanx.train.assembly import derived_program
    from phalanx.train.models import build as build_model

    model = build_model(config.model, config.dtype, dropout=config.dropout, documents=config.mask_documents)
    config = replace(config, batch=config.batch or model.batch, seq=config.seq or model.seq)
    program = derived_program(config, model, deferred_init(model.factory))
    view = from_program(program, config.storage(), late=not config.barrier)
    schedule = build(view, config.schedule, view.pp, config.microbatches, config.chunks)
    report = check(schedule, view)
    explanation = explain(program, schedule)
    if options.json:
        print(json.dumps(explanation.as_json()))
        return 0
    print("\n".join([*head(config, program), "", str(explanation), "", *stages(program, schedule, report)]))
    if options.actions:
        print(f"\n{schedule}")
    return 0


def suggested(config: TrainConfig) -> Suggestion:
    """Names for a model that may have no table: by its name, or by the file and function that make it."""
    from phalanx.derive.suggest import suggest
    from phalanx.hf import capture_context, is_hf_model

    path, _, function = config.model.rpartition(":")
    module, example, *loss = made_by(Path(path), function) if path.endswith(".py") else without_table(config)
    return suggest(module, example, *loss, prepare=capture_context if is_hf_model(module) else None)


def made_by(path: Path, function: str) -> Sequence[Any]:
    """(module, batch) or (module, batch, loss) from a function of a Python file."""
    if not path.is_file():
        raise FileNotFoundError(f"--model {path}:{function}: there is no file {path}")
    names = runpy.run_path(str(path), run_name=path.stem)
    if not callable(names.get(function)):
        there = closest(function, [name for name, value in names.items() if callable(value)])
        raise ValueError(f"--model {path}:{function}: {path} has no function {function!r}; there are {there}")
    made = names[function]()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(
            f"{path}:{function} returned {type(made).__name__}; it returns (module, batch) or (module, batch, loss)"
        )
    return made


def without_table(config: TrainConfig) -> Sequence[Any]:
    """Module, batch and loss of a model by its name. Those of Hugging Face are built here, since `build` wants a table for them."""
    import torch

    from phalanx.hf import Folder
    from phalanx.run.initialize import deferred_init
    from phalanx.train import models, tiny

    models.check_name(config.model)
    kind, _, rest = config.model.partition(":")
    dtype = getattr(torch, config.dtype)
    if kind == "hf-tiny":
        factory, vocab = partial(tiny.build, rest, dtype), tiny.config(rest).vocab_size
    elif kind == "hf":
        folder = Folder(rest, dropout=config.dropout)
        factory, vocab = partial(folder.module, dtype), folder.config.vocab_size
    else:
        model = models.build(config.model, config.dtype, dropout=config.dropout, documents=config.mask_documents)
        example = model.example(config.batch or model.batch, config.seq or model.seq, config.seed)
        return deferred_init(model.factory), example, model.loss
    example = models.token_batch("input_ids", vocab, config.batch or 8, config.seq or 32, config.seed)
    return deferred_init(factory), example, models.token_loss


def head(config: TrainConfig, program: Program) -> list[str]:
    total = sum(numel(program, program.parameters))
    placed = f"mesh {program.mesh}, {program.mesh.size} ranks" if program.mesh.names else "one rank"
    batch = f"batch {config.batch} × {config.seq} in {program.microbatches} microbatches"
    split = f"split over {'+'.join(program.batch_axes)}" if program.batch_axes else "whole on every rank"
    return [f"{config.model}: {total:,} parameters in {config.dtype} on {placed}", f"{batch}, {split}"]


def stages(program: Program, schedule: Schedule, report: Report) -> list[str]:
    """What a rank at each pipeline coordinate holds and does in one step."""
    lines = [f"schedule {schedule.name}, proved free of deadlock; one rank at each pipeline coordinate:"]
    for at, actions in enumerate(schedule.ranks):
        hosted = [k for k, places in enumerate(schedule.places) if at in places]
        segments = [program.segments[k] for k in hosted]
        runs = [
            [program.segments[k].name for k in stage]
            for stage, where in zip(schedule.stages, schedule.host, strict=True)
            if where == at
        ]
        where = " and ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
        names = dict.fromkeys(name for segment in segments for name in segment.params)
        each = sum(s.cls.graphs.flops["F"] + s.cls.graphs.flops["B"] for s in segments if s.cls.graphs)
        flops = each * program.microbatches / schedule.copies
        lines.append(
            f"  pp {at}: {where}, {sum(numel(program, names, local=True)):,} parameters, "
            f"{flops / 1e12:.3g} TFLOP a step, keeps at most {bytes_text(report.peak_saved_bytes[at])} for the backward, "
            f"{len(actions)} actions"
        )
        parts = ", ".join(f"{what} {bytes_text(int(size))}" for what, size in stored(program, names, schedule.storage).items())
        lines.append(f"        stores between steps: {parts}")
    return lines


def stored(program: Program, names: Iterable[str], storage: Storage | None) -> dict[str, float]:
    """Bytes that a rank stores between steps for some parameters: values, gradients once they are summed, and AdamW's state.

    The state is two moments and, where parameters are narrower than their gradients, their wider copy. Padding is left out.
    """
    from phalanx.schedule.view import split_axes

    found = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0}
    level = storage.level if storage else 0
    for name in names:
        parameter = program.parameters[name]
        (count,), ranks = numel(program, [name], local=True), program.mesh.extent(split_axes(program, name, storage))
        narrow, wide = parameter.dtype.itemsize, max(4, parameter.dtype.itemsize)
        found["parameters"] += count * narrow / (ranks if level == 3 else 1)
        if parameter.trainable:
            found["gradients"] += count * wide / (ranks if level >= 2 else 1)
            found["optimizer"] += count * wide * (2 if narrow == wide else 3) / ranks
    return found


def numel(program: Program, names: Iterable[str], *, local: bool = False) -> list[int]:
    """Elements of each parameter, of the whole or of one rank's shard."""
    parameters = [program.parameters[name] for name in names]
    if local:
        return [math.prod(p.spec.local_shape(p.shape, program.mesh)) for p in parameters]
    return [math.prod(p.given) for p in parameters]
