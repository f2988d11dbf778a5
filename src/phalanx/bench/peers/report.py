"""What a person sees of the rows: a line as each bout ends, a table, a plot, and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from phalanx.bench.peers.compare import Refused, Row
from phalanx.bench.peers.jobs import JAX_JOBS, JOBS
from phalanx.bench.plot import check_plot

__all__ = ["check_plot", "line", "plot", "save", "show"]

COLUMNS = (
    "peer", "shape", "transports", "peer ms", "ours ms", "ratio (95%)", "A/A (95%)", "no comm", "gap closed", "not hidden", "tokens/s",
    "live MiB", "sent MiB", "loss diff",
)  # fmt: skip
ABOUT = """ratio: the peer's seconds over Phalanx's, medians of pairs · A/A: the peer over itself · no comm: each rank's compute alone ·
gap closed: how much of what the peer needs beyond that Phalanx does not need · not hidden: step beyond no comm, ms · live: peak of tensors
alive on the rank that has most · sent: what a rank must send in a step · where two numbers stand, the peer's is first"""


def line(found: Sequence[Row] | Refused) -> str:
    if isinstance(found, Refused):
        return f"{found.peer}, {found.shape}: left out: {found.reason}"
    return "\n".join(
        f"{row.peer}, {row.shape}: {row.transport_peer} against {row.transport} {row.ratio:.3f} ({row.ratio_low:.3f} to "
        f"{row.ratio_high:.3f}); {row.peer_ms:.1f} and {row.phalanx_ms:.1f} ms, loss apart by {row.loss_diff:.1e}"
        for row in found
    )


def show(rows: Sequence[Row], refused: Sequence[Refused]) -> None:
    console = Console(width=None if os.isatty(1) else 200)  # a file has no width to fit
    table = Table(*COLUMNS, caption=ABOUT, caption_justify="left")
    for row in rows:
        table.add_row(
            row.peer,
            row.shape,
            f"{row.transport_peer}, {row.transport}",
            f"{row.peer_ms:.1f} ±{row.peer_spread_ms / 2:.1f}",
            f"{row.phalanx_ms:.1f} ±{row.phalanx_spread_ms / 2:.1f}",
            f"{row.ratio:.3f} ({row.ratio_low:.3f} to {row.ratio_high:.3f})",
            f"{row.a_a:.3f} ({row.a_a_low:.3f} to {row.a_a_high:.3f})",
            f"{row.no_comm_ms:.1f}",
            "-" if row.gap_closed is None else f"{row.gap_closed:.2f}",
            f"{row.peer_exposed_ms:.1f}, {row.phalanx_exposed_ms:.1f}",
            f"{row.peer_tokens_per_second:,.0f}, {row.phalanx_tokens_per_second:,.0f}",
            f"{_number(row.peer_mib)}, {_number(row.phalanx_mib)}",
            f"{_number(row.peer_sent_mib)}, {_number(row.phalanx_sent_mib)}",
            f"{row.loss_diff:.1e}",
        )
    if rows:
        console.print(table)
    for shape in dict.fromkeys(row.shape for row in rows):
        single = next(row.single_ms for row in rows if row.shape == shape)
        console.print(f"{shape}: one plain process needs {single:.1f} ms for the whole batch", highlight=False)
    for peer in dict.fromkeys(row.peer for row in rows):
        console.print(f"{peer}: {(JOBS | JAX_JOBS)[peer].what}", highlight=False)
    for each in refused:
        console.print(line(each), highlight=False, markup=False)


def save(rows: Sequence[Row], path: Path) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def plot(rows: Sequence[Row], path: Path) -> None:
    """A panel per shape: the ratio of every peer with its interval, by transport, and the A/A interval behind it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure = Figure(figsize=(2 + 6 * len(shapes), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        mine = [row for row in rows if row.shape == shape]
        peers = list(dict.fromkeys(row.peer for row in mine))
        transports = list(dict.fromkeys(row.transport for row in mine))
        width = 0.8 / len(transports)
        for at, transport in enumerate(transports):
            shown = [row for row in mine if row.transport == transport]
            places = [peers.index(row.peer) + (at - (len(transports) - 1) / 2) * width for row in shown]
            ratios = [row.ratio for row in shown]
            errors = [[row.ratio - row.ratio_low for row in shown], [row.ratio_high - row.ratio for row in shown]]
            panel.bar(places, ratios, width, yerr=errors, capsize=2, label=f"Phalanx on {transport}")
        for place, peer in enumerate(peers):
            row = next(row for row in mine if row.peer == peer)
            panel.fill_between([place - 0.45, place + 0.45], row.a_a_low, row.a_a_high, color="black", alpha=0.2, linewidth=0)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_xticks(range(len(peers)), peers, rotation=30, ha="right")
        panel.set(title=shape, ylabel="the peer's seconds over Phalanx's")
        panel.legend()
    figure.suptitle("Grey: the peer against itself")
    figure.savefig(path)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
