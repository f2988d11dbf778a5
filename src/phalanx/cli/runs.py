"""`phalanx runs`: what runs there are, how they stand, and how they differ."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from phalanx.cli.options import Switch
from phalanx.observe.runs import Run, compare, find_runs, named_runs

WIDTH = 500
"""More than any table takes. A terminal that is narrower wraps lines, which is better to read than columns of one letter."""


def _last(value: float | None, sign: int = 1) -> tuple[bool, float]:
    """A key that sorts what is missing, or not finite, last."""
    bad = value is None or math.isnan(value)
    return bad, 0.0 if value is None or bad else sign * value


SORTS: dict[str, Callable[[Run], tuple[bool, float] | tuple[bool, str] | str]] = {
    "name": lambda run: run.name,
    "started": lambda run: (run.started is None, run.started or ""),
    "loss": lambda run: _last(run.loss),
    "held-out": lambda run: _last(run.best_held_out),
    "speed": lambda run: _last(run.tokens_per_second, -1),
    "steps": lambda run: _last(run.steps, -1),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """List the runs in folders, compare some, or draw their losses. Only reads; runs that are going on are shown as they stand.

    A folder that is damaged, or from a newer version, is listed with what is wrong with it.
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER ...]")] = ()
    """Run folders, or folders with runs in them; runs/ unless given."""
    sort: Literal["name", "started", "loss", "held-out", "speed", "steps"] | None = None
    """The best, or the first, on top; by name unless given."""
    compare: tuple[str, ...] = ()
    """Runs by name or path, two or more: the settings that differ, losses at common steps and speed, against the first one."""
    plot: Path | None = None
    """Draw the losses of the runs that are listed or compared: .png, .svg or .pdf."""
    against: Literal["steps", "tokens", "seconds"] | None = None
    """What --plot draws them over; steps unless given. Runs with another --batch or --seq are to be compared over tokens."""
    json: Switch = False
    """Print everything as JSON and nothing else."""


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, prog="phalanx runs")
    if options.against is not None and options.plot is None:
        raise ValueError(f"--against {options.against} is for --plot, which draws")
    if options.sort is not None and options.compare:
        raise ValueError(f"--sort {options.sort} is for the list; --compare shows runs in the order in which they are named")
    if options.plot is not None:
        from phalanx.observe.curves import check_plot

        check_plot(options.plot)
    places = options.folders or (Path("runs"),)
    if not options.folders and not options.compare and not places[0].is_dir():
        raise ValueError("there is no folder runs/ here: `phalanx train` makes one, or name another")
    runs = named_runs(options.compare, places) if options.compare else find_runs(places)
    if not runs and not options.json:
        raise ValueError(f"there are no runs in {', '.join(f'{place}/' for place in places)}")
    if not options.compare:
        runs.sort(key=SORTS[options.sort or "name"])
    show(runs, options)
    if options.plot is not None:
        from phalanx.observe.curves import plot

        plot(runs, options.plot, options.against or "steps")
        if not options.json:
            print(f"\ndrawn in {options.plot}")
    return 0


def show(runs: list[Run], options: Options) -> None:
    comparison = compare(runs) if options.compare else None
    if options.json:
        print(json.dumps(comparison.as_json() if comparison else [run.as_json() for run in runs], allow_nan=False))
        return

    from rich.console import Console

    from phalanx.observe.runs_table import comparison_table, runs_table

    console = Console(highlight=False, width=WIDTH)
    console.print(runs_table(runs) if comparison is None else comparison_table(comparison))
