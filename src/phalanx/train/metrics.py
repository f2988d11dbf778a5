"""What a run tells while it runs: a line of metrics.jsonl per step and one live line for whoever watches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from phalanx.train.folder import LineWriter, RunFolder
from phalanx.train.sinks import Sink

MOST_NATS = 700.0
"""exp of a larger loss is no float64."""


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
    skipped: bool = False
    """The update was left out. Only in the lines of such steps."""

    def line(self) -> dict[str, Any]:
        values = asdict(self)
        return values if self.skipped else {name: value for name, value in values.items() if name != "skipped"}


class Recorder:
    """Writes metrics.jsonl into `folder`, a line as each step ends, tells `sinks` the same and shows progress on `console`.

    On a terminal one line is redrawn in place; elsewhere about twenty plain lines are printed over the run. Without a folder
    nothing is written and without a console nothing is shown: so it is on every rank but the first.

    A run that begins at a later `first_step` than 1 adds to the file that is there (RunFolder.rewind has made it end before that
    step); the time left is then of the steps that this process has seen.

    A sink that raises, as it starts or later, is told no more; that is said once, on the console and in events.jsonl. Training does
    not depend on it.
    """

    def __init__(
        self,
        steps: int,
        folder: Path | None,
        console: Console | None,
        *,
        first_step: int = 1,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.steps = steps
        self.first_step = first_step
        self.first: StepMetrics | None = None
        self.last: StepMetrics | None = None
        self._folder = RunFolder(folder) if folder is not None else None
        self._console = console
        self._sinks = list(sinks)
        self._file: LineWriter | None = None
        self._live: Live | None = None
        self._timed_steps = 0
        self._timed_seconds = 0.0

    def __enter__(self) -> Self:
        if self._folder is not None:
            self._file = LineWriter(self._folder.metrics, fresh=self.first_step == 1)
        if self._console is not None and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._tell_sinks(lambda sink: sink.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
        if self._file is not None:
            self._file.close()
        self._tell_sinks(lambda sink: sink.close(failed=kind is not None))

    def record(self, metrics: StepMetrics) -> None:
        # The first step pays for allocations that no other does; the estimate of the time left is of the others.
        if self.first is not None:
            self._timed_steps += 1
            self._timed_seconds += metrics.seconds
        self.first = self.first or metrics
        self.last = metrics
        self._write(metrics.line())
        per_step = self._timed_seconds / self._timed_steps if self._timed_steps else metrics.seconds
        line = progress_line(metrics, self.steps, per_step)
        if self._live is not None:
            self._live.update(Text(line), refresh=True)
        elif metrics.step in (self.first_step, self.steps) or metrics.step % max(1, self.steps // 20) == 0:
            self._say(line)

    def record_evaluation(self, step: int, loss: float, tokens: int) -> None:
        """The held-out batches after `step` steps: mean loss over their `tokens` tokens, in nats.

        A line of its own in metrics.jsonl, which has no key `loss`: {"step", "held_out_loss", "perplexity", "held_out_tokens"}.
        """
        perplexity = math.exp(loss) if loss < MOST_NATS else math.inf if loss == loss else math.nan
        self._write({"step": step, "held_out_loss": loss, "perplexity": perplexity, "held_out_tokens": tokens})
        self._say(f"step {step}/{self.steps} · held-out loss {loss:.4f} · perplexity {perplexity:,.2f}")

    def rewind(self, step: int, **facts: Any) -> None:
        """Forget the steps after `step`, which will come again; `facts` go into events.jsonl."""
        if self._folder is None:
            return
        if self._file is not None:
            self._file.close()  # the file is replaced by a shorter one
        self._folder.rewind(step, **facts)
        self._file = LineWriter(self._folder.metrics)
        self._tell_sinks(lambda sink: sink.rewind(step))

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(values)
        step = values["step"]
        numbers = {name: float(value) for name, value in values.items() if name not in ("step", "tokens", "held_out_tokens")}
        self._tell_sinks(lambda sink: sink.record(step, numbers))

    def _tell_sinks(self, what: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                what(sink)
            except Exception as error:  # noqa: BLE001 - whatever a network or another's library does: the run goes on
                self._sinks.remove(sink)
                notes = "".join(f". {note}" for note in getattr(error, "__notes__", ()))
                text = f"{sink.name} is told no more: {type(error).__name__}: {error}{notes}"
                self._say(f"WARNING: {text}; training goes on, and metrics.jsonl has everything")
                if self._folder is not None:
                    self._folder.event("warning", self.last.step if self.last else self.first_step - 1, what=text)

    def _say(self, line: str) -> None:
        if self._console is not None:
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
