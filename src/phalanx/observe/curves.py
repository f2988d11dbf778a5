"""Loss curves of runs in one picture, as PNG, SVG or PDF: training as lines, held-out batches as dots."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from phalanx.observe.runs import Run, number

AGAINST = {"steps": "step", "tokens": "tokens seen", "seconds": "seconds of training"}

SUFFIXES = (".png", ".svg", ".pdf")

SMOOTH_STEPS = 100
"""A curve of more steps than this is drawn as the mean over a hundredth of them, with every step faint behind it."""


def check_plot(path: Path) -> None:
    """Raise ValueError if no plot can be written there."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot {path} ends in {path.suffix or 'nothing'}; there are {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'phalanx[plot]'")


def plot(runs: Sequence[Run], path: Path, against: str = "steps") -> None:
    """Losses over steps, tokens or seconds. Steps whose loss was not finite are gaps.

    Raises ValueError if no run has a step.
    """
    shown = [run for run in runs if run.rows]
    if not shown:
        raise ValueError(f"--plot {path}: none of {', '.join(run.name for run in runs) or 'no runs'} has a step")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    smoothed: set[int] = set()
    for at, run in enumerate(shown):
        colour, where = f"C{at % 10}", positions(run, against)
        xs = [where[row["step"]] for row in run.rows]
        losses = [number(row, "loss") for row in run.rows]
        width = max(1, len(losses) // SMOOTH_STEPS)
        if width > 1:
            smoothed.add(width)
            panel.plot(xs, losses, color=colour, linewidth=0.6, alpha=0.25)
        panel.plot(xs, running_mean(losses, width), color=colour, linewidth=1.6, label=run.name)
        dots = [row for row in run.evaluations if row["step"] in where]
        panel.plot(
            [where[row["step"]] for row in dots],
            [number(row, "held_out_loss") for row in dots],
            linestyle="none",
            marker="o",
            markersize=6,
            color=colour,
            markeredgecolor="white",
            label=f"{run.name}, held-out" if dots else None,
        )
    mean = f", mean of the last {' or '.join(map(str, sorted(smoothed)))} steps" if smoothed else ""
    dots_too = "; dots: held-out loss" if any(run.evaluations for run in shown) else ""
    panel.set(xlabel=AGAINST[against], ylabel="loss (nats per token)", title=f"lines: training loss{mean}{dots_too}")
    panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panel.grid(visible=True, alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.savefig(path, dpi=150)


def positions(run: Run, against: str) -> dict[int, float]:
    """Where each step of a run is on the axis: its number, or the sum of tokens or seconds of the steps up to it.

    Steps that are missing in a damaged file count as much as the one behind them.
    """
    if against == "steps":
        return {row["step"]: float(row["step"]) for row in run.rows}
    total, places = 0.0, {0: 0.0}
    steps = [0, *(row["step"] for row in run.rows)]
    for (before, step), row in zip(pairwise(steps), run.rows, strict=True):
        amount = number(row, against)
        total += (step - before) * amount if math.isfinite(amount) else 0.0
        places[step] = total
    return places


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and the finite ones of those before it, `width` in all as far as there are; nan where it is not finite."""
    array = np.asarray(values, dtype=np.float64)
    good = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(good, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(good)])
    ends = np.arange(1, len(array) + 1)
    begins = np.maximum(ends - width, 0)
    means = (sums[ends] - sums[begins]) / np.maximum(counts[ends] - counts[begins], 1)
    return [float(mean) for mean in np.where(good, means, np.nan)]
