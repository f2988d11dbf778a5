"""What a run tells while it runs: a line of metrics.jsonl per step and one live line for whoever watches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step; the keys of a line of metrics.jsonl."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over all tokens of the step, before its update."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    tokens: int
    """Tokens (or samples) that counted in the loss of this step."""
    tokens_per_second: float
    seconds: float
    """Wall-clock time of this step on rank 0."""


class Recorder:
    """Writes metrics.jsonl into `folder`, a line as each step ends, and shows progress on `console`.

    On a terminal one line is redrawn in place; elsewhere about twenty plain lines are printed over the run. Without a folder
    nothing is written and without a console nothing is shown: so it is on every rank but the first.
    """

    def __init__(self, steps: int, folder: Path | None, console: Console | None) -> None:
        self.steps = steps
        self.first: StepMetrics | None = None
        self.last: StepMetrics | None = None
        self._folder = folder
        self._console = console
        self._file: TextIO | None = None
        self._live: Live | None = None
        self._seconds = 0.0

    def __enter__(self) -> Self:
        if self._folder is not None:
            self._file = (self._folder / "metrics.jsonl").open("w")
        if self._console is not None and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
        if self._file is not None:
            self._file.close()

    def record(self, metrics: StepMetrics) -> None:
        self.first = self.first or metrics
        self.last = metrics
        # The first step pays for allocations that no other does; the estimate of the time left is of the others.
        if metrics.step > 1:
            self._seconds += metrics.seconds
        if self._file is not None:
            self._file.write(json.dumps(asdict(metrics)) + "\n")
            self._file.flush()  # a run that is killed keeps every step that ended
        line = progress_line(metrics, self.steps, self._seconds / (metrics.step - 1) if metrics.step > 1 else metrics.seconds)
        if self._live is not None:
            self._live.update(Text(line), refresh=True)
        elif self._console is not None and (metrics.step in (1, self.steps) or metrics.step % max(1, self.steps // 20) == 0):
            tell(self._console, line)


def tell(console: Console, line: str) -> None:
    """Print a line as it is: no wrapping, and `hf-tiny:llama:` is a name, not an emoji."""
    console.print(Text(line), soft_wrap=True)


def progress_line(metrics: StepMetrics, steps: int, seconds_per_step: float) -> str:
    """step 40/200 · loss 2.5310 · 21,300 tokens/s · 0:01:12 left"""
    left = round((steps - metrics.step) * seconds_per_step)
    clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
    parts = [f"step {metrics.step}/{steps}", f"loss {metrics.loss:.4f}", f"{metrics.tokens_per_second:,.0f} tokens/s"]
    return " · ".join([*parts, f"{clock} left"])


def traffic_lines(totals: Mapping[tuple[str, str], tuple[int, int]], steps: int) -> list[str]:
    """One line per axis from the ledger's totals, {(axis, operation): (calls, bytes)} of one rank over `steps` steps."""
    axes = sorted({axis for axis, _ in totals})
    lines = []
    for axis in axes:
        rows = {operation: row for (place, operation), row in totals.items() if place == axis}
        parts = ", ".join(
            f"{operation} {bytes_text(moved)} in {calls:,} calls" for operation, (calls, moved) in sorted(rows.items())
        )
        total = sum(moved for _, moved in rows.values())
        lines.append(f"  {axis}: {bytes_text(total)}, {bytes_text(total // max(1, steps))} a step ({parts})")
    return lines


def bytes_text(count: int) -> str:
    """1536 → 1.5 KiB"""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
