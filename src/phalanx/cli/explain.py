"""`phalanx explain`: what every rank computes, exchanges and keeps, read off the derived graphs. Runs nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from phalanx.cli.options import defaults
from phalanx.train.config import TrainConfig
from phalanx.train.metrics import bytes_text

if TYPE_CHECKING:
    from torch import fx

    from phalanx.derive.program import Program, Segment
    from phalanx.schedule.actions import Schedule
    from phalanx.schedule.view import View

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say what a model on a mesh computes, exchanges and keeps, rank by rank, without running it."""

    config: Path | None = None
    """A YAML file with any of the run's options below; the command line has the last word."""
    actions: bool = False
    """Print every rank's list of actions as well."""
    run: Annotated[TrainConfig, tyro.conf.arg(name="")]


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, default=Options(run=defaults(args, TrainConfig())), prog="phalanx explain")
    config = options.run
    config.check()

    from phalanx.run.initialize import deferred_init
    from phalanx.schedule import build, from_program
    from phalanx.schedule.check import check
    from phalanx.train.assembly import derived_program
    from phalanx.train.models import build as build_model

    model = build_model(config.model, config.dtype, dropout=config.dropout)
    config = replace(config, batch=config.batch or model.batch, seq=config.seq or model.seq)
    program = derived_program(config, model, deferred_init(model.factory))
    view = from_program(program)
    schedule = build(view, config.schedule, view.pp, config.microbatches)
    check(schedule, view)
    print(explained(config, program, view, schedule))
    if options.actions:
        print(f"\nactions:\n{schedule}")
    return 0


def explained(config: TrainConfig, program: Program, view: View, schedule: Schedule) -> str:
    """The whole text."""
    total = sum(parameter_sizes(program, program.parameters))
    placed = ", ".join(f"{name}={size}" for name, size in program.mesh.axes) or "one rank"
    lines = [
        f"{config.model}: {total:,} parameters on {placed} ({program.mesh.size} ranks), {config.dtype}",
        f"batch {config.batch} × {config.seq} in {program.microbatches} microbatches, split over "
        + ("+".join(program.batch_axes) or "nothing"),
        "",
        "segments: what one rank computes and exchanges for a microbatch (F forward, B backward) and sums once a step (REDUCE)",
    ]
    lines += [line for group in classes(program) for line in segment_lines(group, program, view)]
    lines += ["", "why each forward collective is there (its backward is fixed by the pair):", *reasons(program)]
    lines += ["", f"one step of one rank, schedule {schedule.name}:", *stage_lines(program, view, schedule)]
    lines += [f"warning: {warning}" for warning in program.warnings]
    return "\n".join(lines)


def classes(program: Program) -> list[list[Segment]]:
    """Segments that share a class, in order of their first."""
    groups: dict[int, list[Segment]] = {}
    for segment in program.segments:
        groups.setdefault(id(segment.cls), []).append(segment)
    return list(groups.values())


def segment_lines(group: list[Segment], program: Program, view: View) -> list[str]:
    first = group[0]
    graphs = first.cls.graphs
    assert graphs is not None
    name = first.name if len(group) == 1 else f"{first.name} … {group[-1].name} ({len(group)} alike)"
    seen = view.segments[first.index]
    lines = [
        f"  {name}: {sum(parameter_sizes(program, first.params, local=True)):,} parameters a rank, "
        f"{graphs.flops['F'] / 1e9:.3g} + {graphs.flops['B'] / 1e9:.3g} GFLOP, keeps {bytes_text(graphs.saved_bytes)}"
    ]
    lines += [
        f"    {letter} {line}" for letter, graph in (("F", graphs.F), ("B", graphs.B)) for line in traffic(collectives(graph))
    ]
    sums: Counter[tuple[str, str]] = Counter()
    for weight in seen.weights:
        for axis in weight.axes:
            sums[axis, "all_reduce"] += weight.bytes
    return lines + [f"    REDUCE {operation} over {axis}: {bytes_text(size)}" for (axis, operation), size in sums.items()]


def collectives(graph: fx.GraphModule) -> list[tuple[str, str, int]]:
    """(axis, operation, bytes) of every collective in a graph; bytes are the larger of what goes in and what comes out."""
    found = []
    for node in graph.graph.nodes:
        operation = getattr(node.target, "_opname", "")
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "phx" and operation in COLLECTIVES:
            values = [node.meta["val"], node.args[0].meta["val"]]
            found.append((str(node.args[2]), operation, max(value.numel() * value.element_size() for value in values)))
    return found


def traffic(calls: Iterable[tuple[str, str, int]]) -> list[str]:
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for axis, operation, moved in calls:
        count[axis, operation] += 1
        size[axis, operation] += moved
    return [f"{count[key]} {key[1]} over {key[0]}: {bytes_text(size[key])}" for key in count]


def reasons(program: Program) -> list[str]:
    """Each move once per class of segments."""
    firsts = {group[0].name for group in classes(program)}
    lines = []
    for note in program.report:
        if note["segment"] in firsts:
            place = " ".join(filter(None, (note["module"], note["source"])))
            lines.append(f"  {note['segment']}: {note['pair']} over {note['axis']} at {note['node']} ({place}): {note['why']}")
    return lines or ["  none"]


def stage_lines(program: Program, view: View, schedule: Schedule) -> list[str]:
    """Bytes by axis of each pipeline coordinate, and the parameters and saved values that it holds at most."""
    from phalanx.schedule.check import report

    lines = []
    peak = report(schedule, view)
    for at, actions in enumerate(schedule.ranks):
        moved: Counter[str] = Counter()
        for action in actions:
            if action.segment is None:
                continue
            segment = program.segments[action.segment]
            graphs = segment.cls.graphs
            if action.kind in ("F", "B", "I", "W"):
                for axis, _, size in collectives(getattr(graphs, action.kind)):
                    moved[axis] += size
            elif action.kind == "REDUCE":
                for weight in view.segments[action.segment].weights:
                    for axis in weight.axes:
                        moved[axis] += weight.bytes
            elif action.kind in ("SEND_F", "SEND_B"):
                moved["pp"] += sum(message.bytes for message in view.cut(action.kind, action.segment))
        hosted = {k for stage, where in zip(schedule.stages, schedule.host, strict=True) if where == at for k in stage}
        names = dict.fromkeys(name for k in sorted(hosted) for name in program.segments[k].params)
        held = sum(parameter_sizes(program, names, local=True))
        axes = ", ".join(f"{axis} {bytes_text(moved[axis])}" for axis in program.mesh.names if moved[axis]) or "nothing"
        lines.append(f"  pp {at}: {held:,} parameters, {len(actions)} actions, moves {axes}")
    lines.append(f"  the list is proved free of deadlock; {peak}")
    return lines


def parameter_sizes(program: Program, names: Iterable[str], *, local: bool = False) -> list[int]:
    from phalanx.spec import local_numel

    parameters = [program.parameters[name] for name in names]
    return [local_numel(p.spec, p.shape, program.mesh) if local else math.prod(p.shape) for p in parameters]
