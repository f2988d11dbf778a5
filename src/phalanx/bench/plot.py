"""Bus bandwidth over size, a panel per operation and a line per backend, as PNG, SVG or PDF."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from phalanx.bench.busbw import OPS
from phalanx.bench.results import Row

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise ValueError if no plot can be written there."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot {path} ends in {path.suffix or 'nothing'}; there are {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'phalanx[plot]'")


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """The median of each row's usual form, shaded from its 5th to its 95th percentile. A/A rows are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if not row.case.again]
    ops = list(dict.fromkeys(row.case.op for row in shown))
    figure = Figure(figsize=(1 + 5 * len(ops), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(ops), squeeze=False)[0]
    for panel, op in zip(panels, ops, strict=True):
        mine = [row for row in shown if row.case.op == op]
        for name in dict.fromkeys(_name(row) for row in mine):
            line = [row for row in mine if _name(row) == name]
            form = OPS[op].usual
            line = [row for row in line if form in row.forms]
            sizes = [row.case.size for row in line]
            low, middle, high = ([row.bandwidths(form, q)[1] for row in line] for q in (0.95, 0.5, 0.05))
            panel.plot(sizes, middle, marker="o", markersize=3, label=name)
            panel.fill_between(sizes, low, high, alpha=0.2)
        panel.set(title=f"{op}, {OPS[op].usual.replace('_', ' ')}", xlabel="size (bytes)", ylabel="busbw (GB/s)")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.grid(visible=True, alpha=0.3)
        panel.legend()
    figure.suptitle(title)
    figure.savefig(path)


def _name(row: Row) -> str:
    return f"{row.case.label}, {row.case.buffers}"
