"""Runs, and a comparison of them, drawn for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.observe.runs import Comparison, Run, age

STYLES = {"running": "green", "finished": "", "interrupted": "yellow", "unknown": "red"}
"""The word says everything; the colour only repeats it."""
MISSING = "–"


def runs_table(runs: Sequence[Run]) -> RenderableType:
    """One line per run, and below the table what is wrong with any of them."""
    table = _table("name", "model", "mesh", right=("steps", "loss", "held-out", "tokens/s"))
    for title in ("state", "restarts", "started", "checkpoint"):
        table.add_column(title, no_wrap=True, justify="left" if title in ("state", "started") else "right")
    for run in runs:
        table.add_row(
            Text(run.name),
            Text(_value(run.settings.get("model"))),
            Text(str(run.settings["mesh"] or "one rank") if "mesh" in run.settings else MISSING),
            f"{run.steps}/{run.asked if run.asked is not None else '?'}",
            _loss(run.loss),
            _loss(run.best_held_out),
            _speed(run.tokens_per_second),
            Text(run.state, STYLES[run.state]),
            str(run.count("restart")),
            age(run.started),
            MISSING if run.checkpoint is None else f"step {run.checkpoint}",
        )
    wrong = [Text(f"{run.name}: {problem}", "red") for run in runs for problem in run.problems]
    return Group(table, *([Text(), *wrong] if wrong else []))


def comparison_table(found: Comparison) -> RenderableType:
    """Settings that differ, losses at common steps, speed."""
    parts: list[RenderableType] = [*_differing("settings that differ", "no setting differs", found.names, found.settings)]
    if found.environment:
        parts += [Text(), *_differing("what they ran on", "", found.names, found.environment)]
    parts.append(Text())
    if not found.common:
        parts.append(Text("no step is common to all runs"))
    else:
        table = _table("loss at step", right=found.names)
        for step, losses in found.losses.items():
            first, *others = losses
            table.add_row(str(step), _loss(first), *(_beside(loss, first) for loss in others))
        parts += [table, Text(_apart(found))]
    if not found.tokens_alike:
        parts.append(Text("a step is not as many tokens in each run: --plot FILE --against tokens compares those"))
    speed = _table("", right=found.names)
    speed.add_row("tokens/s, median", *(_speed(each and each[1]) for each in found.speeds))
    speed.add_row("middle half of steps", *(_range(each) for each in found.speeds))
    speed.add_row(
        f"relative to {found.names[0]}", *(MISSING if each is None else f"{each:.2f}×" for each in found.relative_speeds)
    )
    if any(loss is not None for loss in found.held_out):
        speed.add_row("best held-out loss", *(_loss(loss) for loss in found.held_out))
    return Group(*parts, Text(), speed)


def _differing(title: str, none: str, names: Sequence[str], rows: Mapping[str, tuple[Any, ...]]) -> list[RenderableType]:
    if not rows:
        return [Text(none)]
    table = _table(title, *names)
    for name, values in rows.items():
        table.add_row(Text(name), *(Text(_value(value)) for value in values))
    return [table]


def _apart(found: Comparison) -> str:
    steps = f"{found.common:,} common step{'' if found.common == 1 else 's'}"
    if found.first_apart is None:
        return f"equal to the bit in all {steps}"
    step, name = found.first_apart
    return f"{steps}; the first that is not equal to the bit is step {step}, in {name}"


def _beside(loss: float, first: float) -> str:
    return f"{_loss(loss)} ({loss - first:+.1e})" if math.isfinite(loss - first) and loss != first else _loss(loss)


def _loss(loss: float | None) -> str:
    return MISSING if loss is None else f"{loss:.4f}"


def _speed(speed: float | None) -> str:
    return MISSING if speed is None else f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _range(speed: tuple[float, float, float] | None) -> str:
    return MISSING if speed is None else f"{_speed(speed[0])} to {_speed(speed[2])}"


def _value(value: Any) -> str:
    if value is None or value in ("", []):
        return MISSING
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(*left: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in left:
        table.add_column(Text(title), overflow="fold")
    for title in right:
        table.add_column(Text(title), justify="right", no_wrap=True)
    return table
