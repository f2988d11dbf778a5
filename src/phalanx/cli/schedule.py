"""`phalanx schedule`: a pipeline schedule as a picture and as numbers, before there is a model, or as a run measured it."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from phalanx.cli.options import Switch
from phalanx.schedule.account import REASONS
from phalanx.schedule.check import ScheduleError
from phalanx.schedule.draw import Picture, html, legend, picture, svg, text
from phalanx.schedule.measured import Difference, differences, predict, read, with_bytes
from phalanx.schedule.pipeline import SCHEDULES, Order, compute_order
from phalanx.schedule.study import Prices, Study, deadlocked, study

WIDTH = 100
DRAWN = (".svg", ".html")
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Draw a pipeline schedule and say what it costs: bubble, activations, messages, and why ranks are idle.

    Nothing is run: the schedule is lowered to every rank's list of actions, proved free of deadlock and timed on a model of equal
    stages. With --run, the same picture of a step that `phalanx train --trace N` measured, and beside it the same list predicted
    from the measured durations.

    The bubble over the whole span counts from the first action of any rank to the last of any rank; that is how long a step takes
    if all ranks start the next one together. The bubble over a rank's own span counts from its own first forward to its own last
    backward; papers on zero bubble mean this one, which matters if each rank may go on to its next step by itself.

    Activations are in units of what one microbatch leaves behind in all layers of one rank, messages in boundary tensors.

    A schedule that deadlocks ends with exit code 2 and the circle of actions that wait for each other.
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None
    """A schedule of --list, or auto: the fastest order for the --costs within --memory."""
    stages: int | None = None
    """Ranks of the pipeline, the mesh axis pp; 4 unless given."""
    microbatches: int | None = None
    """Parts of a step's batch; 8 unless given."""
    chunks: int | None = None
    """Stages on each rank, for schedules that take any number of them."""
    costs: str = "1,1,1"
    """F,I,W or F,I,W,message: time of a forward and of the two halves of a backward, of one microbatch through all layers of one
    rank, and of one message. Any unit; a whole backward takes I+W."""
    memory: float | None = None
    """For auto: the most activations that a rank may hold; unlimited unless given."""
    compare: str | None = None
    """Schedules with a comma between them, as in 1f1b,zb-v: their charts on one time scale, and a table."""
    csv: Path | None = None
    """A compute order as torch.distributed.pipelining writes it, a line for each rank. Without NAME it is read; with NAME, whose order
    is written there, it must not exist."""
    run: Path | None = None
    """A run folder of `phalanx train --trace N`, or a trace.json."""
    draw: Path | None = None
    """Draw to a file as well: .svg for a page, .html to zoom into, with messages and sizes."""
    lanes: Switch = False
    """Show communication in the drawing, a lane for each channel of a rank."""
    json: Switch = False
    """Print the numbers as one JSON object and nothing else; by name with --compare."""
    list: Switch = False
    """List the schedules that have a name, with their papers, and end."""


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, prog="phalanx schedule")
    if options.list:
        print("\n".join(listed()))
        return 0
    if options.draw is not None and options.draw.suffix not in DRAWN:
        raise ValueError(f"--draw {options.draw} is neither {' nor '.join(DRAWN)}")
    if options.run is not None:
        if options.name or options.compare or options.csv:
            raise ValueError(f"--run {options.run} shows the schedule that ran; leave out NAME, --compare and --csv")
        asked = ("stages", "microbatches", "chunks", "memory", "costs")
        if changed := [f"--{name}" for name in asked if getattr(options, name) != getattr(Options, name)]:
            raise ValueError(f"--run {options.run} shows a step as it was measured; leave out {', '.join(changed)}")
        return measured(options, options.run)
    try:
        studies = ordered(options)
    except ScheduleError as error:
        if options.json and error.cycle:
            print(json.dumps(deadlocked(error.cycle)))
            return 2
        raise
    if options.json:
        found = {name: each.as_json() for name, each in studies.items()}
        print(json.dumps(found if options.compare else found.popitem()[1]))
    prices = Prices.parse(options.costs)
    pictures = [pictured(each, "units", f"{name}: {sized(each)}") for name, each in studies.items()]
    if options.draw is not None:
        drawn(options, pictures, f"{stated(prices)}; activations in microbatches through all layers of a rank")
    if not options.json:
        print("\n".join([*charts(pictures), stated(prices)]))
        rows = {name: summary(each) for name, each in studies.items()}
        for each in studies.values() if len(studies) == 1 else ():
            print("\n".join(["", *numbers(each, "units"), "", *by_rank(each)]))
        if len(studies) > 1:
            print("\n".join(["", *columns(["", *next(iter(rows.values()))], [[n, *row.values()] for n, row in rows.items()])]))
        if options.draw is not None:
            print(f"\ndrawn in {options.draw}")
    return 0


def ordered(options: Options) -> dict[str, Study]:
    """What is asked for, by name."""
    prices = Prices.parse(options.costs)
    names = [options.name] if options.name else []
    names += [name.strip() for name in options.compare.split(",")] if options.compare is not None else []
    if options.csv is not None and not names:
        order, microbatches = from_csv(options, options.csv)
        return {options.csv.name: study(order, microbatches, prices, options.csv.name)}
    if not names:
        raise ValueError("say which schedule, as in `phalanx schedule 1f1b`; --list lists them, --csv and --run read one")
    stages, microbatches = (
        given if given is not None else 4 * part for given, part in ((options.stages, 1), (options.microbatches, 2))
    )
    orders = {name: named(name, stages, microbatches, options, prices) for name in names}
    if options.csv is not None:
        to_csv(orders, options.csv)
    return {name: study(order, microbatches, prices, name) for name, order in orders.items()}


def named(name: str, stages: int, microbatches: int, options: Options, prices: Prices) -> Order:
    if name == AUTO:
        from phalanx.schedule.pipeline.auto import auto

        costs = {"F": prices.forward, "I": prices.input, "W": prices.weight}
        return auto(stages, microbatches, costs=costs, communication=prices.message, memory=options.memory)
    if options.memory is not None and options.compare is None:
        raise ValueError(f"--memory is for {AUTO}, which plans within it; {name} holds what it holds")
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name, [*SCHEDULES, AUTO], n=1, cutoff=0.0)[0]
        raise ValueError(f"there is no schedule {name!r}; did you mean {close!r}? Known: {', '.join([*SCHEDULES, AUTO])}")
    # Beside others, --chunks is meant for those that it can be said of.
    chunks = options.chunks if options.compare is None or SCHEDULES[name].any_chunks else None
    return compute_order(name, stages, microbatches, chunks)


def from_csv(options: Options, path: Path) -> tuple[Order, int]:
    from phalanx.schedule.pipeline.text import read_csv

    order = read_csv(path.read_text())
    microbatches = 1 + max((step.microbatch for steps in order.ranks for step in steps), default=-1)
    for what, given, there in (
        ("--stages", options.stages, len(order.ranks)),
        ("--microbatches", options.microbatches, microbatches),
    ):
        if given is not None and given != there:
            raise ValueError(f"{what} is {given}, but {path} has {there}; leave it out")
    return order, microbatches


def to_csv(orders: dict[str, Order], path: Path) -> None:
    from phalanx.schedule.pipeline.text import write_csv

    if len(orders) > 1:
        raise ValueError(f"--csv {path} takes one order, not {len(orders)}")
    if path.exists():
        raise FileExistsError(f"{path} exists; leave out NAME to read it, or name a new file to write {next(iter(orders))} to")
    path.write_text(write_csv(next(iter(orders.values()))))


def measured(options: Options, run: Path) -> int:
    """A recorded step, and what its list would have taken at its own mean durations."""
    trace = read(run)
    real, said = trace.study, predict(trace)
    if options.json:
        print(json.dumps(real.as_json()))
    names = [segment.name for segment in trace.view.segments]
    on = f"mesh {trace.view.mesh}" if trace.view.mesh.names else "one rank"
    what = f"{trace.schedule.name} on {on}, {trace.schedule.microbatches} microbatches"
    pictures = [
        pictured(
            Study(real.schedule, real.view, with_bytes(trace, said), real.account), "s", f"measured: step {trace.step}, {what}"
        ),
        pictured(said, "s", "predicted: the same list at the mean measured durations of each kind and segment"),
    ]
    clocks = (
        f"clocks of ranks compared to within {trace.clock_error_seconds * 1e6:.3g} µs"
        if trace.clock_error_seconds
        else "one clock"
    )
    held = "activations in microbatches through an equal share of the model"
    if options.draw is not None:
        drawn(options, pictures, f"{clocks}; {held}; segments: {', '.join(f'{k} {name}' for k, name in enumerate(names))}")
    if options.json:
        return 0
    print("\n".join([*charts(pictures), f"{clocks}; of ranks with equal pp, the first stands for all in the numbers"]))
    print("\n".join(["", *numbers(real, "s"), "", *by_rank(real)]))
    print("\n".join(["", *compared(real, said, differences(trace, said))]))
    if options.draw is not None:
        print(f"\ndrawn in {options.draw}")
    return 0


# What is printed


def charts(pictures: Sequence[Picture]) -> list[str]:
    """On one time scale, under each other, in colour where a person looks."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    span = max(each.span for each in pictures)
    lines = []
    for each in pictures:
        lines += [each.title, text(each, width, colour, span), ""]
    kinds = dict.fromkeys(kind for each in pictures for kind in each.kinds)
    chunks = any(block.chunk for each in pictures for row in each.rows for block in row.compute)
    return [*lines[:-1], legend(list(kinds), colour, chunks)]


def pictured(each: Study, unit: str, title: str) -> Picture:
    return picture(each.events, title=title, unit=unit, schedule=each.schedule, mesh=each.view.mesh, weights=each.weights)


def sized(each: Study) -> str:
    ranks = len(each.schedule.ranks)
    chunks = len(each.schedule.host) // ranks
    held = (
        ""
        if chunks == 1
        else f" with {chunks} stages each" + (", of two copies of the model" if each.schedule.copies > 1 else "")
    )
    return f"{ranks} ranks{held}, {each.schedule.microbatches} microbatches"


def stated(prices: Prices) -> str:
    return (
        f"one microbatch through all layers of a rank takes F={prices.forward:g}, I={prices.input:g}, W={prices.weight:g} units "
        f"(B=I+W), a message {prices.message:g}"
    )


def numbers(each: Study, unit: str) -> list[str]:
    """Span, bubbles and the reasons of idle time."""
    found = each.account
    own = found.bubble_own.index(each.bubble_own)
    idle = {reason: share for reason, share in found.idle.items() if share}
    width = max(map(len, REASONS))
    reasons = [f"  {reason:<{width}}  {share:>6.1%}  {REASONS[reason]}" for reason, share in idle.items()]
    return [
        f"span                  {found.span_seconds:.6g} {unit}, from the first start on any rank to the last end on any rank",
        f"bubble of whole span  {found.bubble_global:.1%}, the mean over ranks",
        f"bubble of own span    {each.bubble_own:.1%} on rank {own}, which has most: from its first forward to its last backward",
        f"messages              {sum(each.sent)} in all",
        *(["idle time is", *reasons] if reasons else ["no rank is idle"]),
    ]


def by_rank(each: Study) -> list[str]:
    rows = [
        [f"pp {at}", f"{own:.1%}", f"{peak:.4g}", f"{sent}"]
        for at, (own, peak, sent) in enumerate(zip(each.account.bubble_own, each.peak_activations, each.sent, strict=True))
    ]
    return columns(["", "own bubble", "peak activations", "tensors sent"], rows)


def summary(each: Study) -> dict[str, str]:
    """A row of the table of --compare."""
    found = each.account
    idle = ", ".join(f"{reason} {share:.0%}" for reason, share in found.idle.items() if share >= 0.005)
    return {
        "span": f"{found.span_seconds:.6g}",
        "bubble": f"{found.bubble_global:.1%}",
        "own span": f"{each.bubble_own:.1%}",
        "peak activations": f"{max(each.peak_activations):.4g}",
        "messages": f"{sum(each.sent)}",
        "idle because of": idle or "nothing",
    }


def compared(real: Study, said: Study, found: Sequence[Difference]) -> list[str]:
    """Prediction beside measurement: the step, then each kind of action."""
    span, predicted = real.account.span_seconds, said.account.span_seconds
    rows = [
        [
            each.kind,
            f"{each.number}",
            f"{each.measured_seconds * 1e3:.3f}",
            f"{each.predicted_seconds * 1e3:.3f}",
            f"{each.error:.1%}",
            f"{each.start_error_seconds * 1e3:.3f}",
        ]
        for each in found
    ]
    return [
        f"step {span * 1e3:.3f} ms, predicted {predicted * 1e3:.3f} ms ({predicted / span - 1:+.1%}); "
        f"bubble {real.account.bubble_global:.1%}, predicted {said.account.bubble_global:.1%}",
        "of messages and collectives, those that a rank waited for:",
        *columns(["kind", "number", "mean ms", "predicted", "differs by", "starts differ by ms"], rows),
    ]


def columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table: the first column and the last of words to the left, numbers to the right."""
    every = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    left = {i for i in range(len(head)) if i == 0 or any(row[i][:1].isalpha() for row in every[1:])}
    lines = [
        "  ".join(
            word.ljust(width) if i in left else word.rjust(width)
            for i, (word, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in every
    ]
    return [line.rstrip() for line in lines]


def listed() -> list[str]:
    rows = []
    for name, row in SCHEDULES.items():
        stages = f"{row.chunks}, or any number" if row.any_chunks else f"{row.chunks}"
        how = [
            *(["I and W apart"] if row.splits else []),
            *(["on a V"] if row.vee else []),
            *(["2 copies"] if row.copies > 1 else []),
        ]
        rows.append([name, row.line, stages, ", ".join(how), row.paper])
    rows.append([AUTO, "the fastest order for given costs and memory", "chosen", "chosen", "list scheduling"])
    head = ["name", "what it is", "stages a rank", "how", "paper"]
    widths = [max(len(each[i]) for each in [head, *rows]) for i in range(len(head))]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]


def drawn(options: Options, pictures: Sequence[Picture], notes: str) -> None:
    assert options.draw is not None
    page = svg(pictures, options.lanes) if options.draw.suffix == ".svg" else html(pictures, options.lanes, notes)
    options.draw.write_text(page, encoding="utf-8")
