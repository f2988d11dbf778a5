"""A step as text, one row per rank, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from phalanx.event import Event
from phalanx.schedule.actions import Schedule
from phalanx.schedule.draw.picture import COMPUTE, NAMES, Block, Picture, busiest, joined, picture

PAINT: Mapping[str, tuple[int, int, int]] = {
    "F": (231, 25, 67),
    "B": (16, 36, 115),
    "I": (16, 74, 153),
    "W": (16, 172, 222),
    "OPT": (16, 175, 182),
}
"""Of the 256 colours of a terminal: the letter, what is behind it on a rank's first stage and on its second. The nearest to those
of `picture.COLOURS`."""


def draw(what: Schedule | Sequence[Event], width: int = 100, colour: bool = False) -> str:
    """The compute lanes over time, for a terminal `width` columns wide.

    F3 is the forward of microbatch 3, B its backward, I and W its halves, O the optimizer, a dot is idle; a rank's second stage has
    small letters. Neighbouring segments of one kind and microbatch are one block; a block too narrow for its number shows its
    letter alone, and where blocks are narrower than a column it shows what takes most of its time. A Schedule is drawn at unit
    costs: F=1, B=2, I=W=1 for every stage.
    """
    return text(picture(what), width, colour)


def text(drawn: Picture, width: int = 100, colour: bool = False, span: float | None = None) -> str:
    """A Picture; with `span`, its time axis is that long, so that two pictures can stand under each other."""
    if not drawn.rows:
        return ""
    span = span or drawn.span
    label = max(len(row.label) for row in drawn.rows) + 1
    columns = max(width - label - 1, 1)
    lines = [row.label.ljust(label) + _row(row.compute, span, columns, colour) for row in drawn.rows]
    end = _time(span, drawn.unit)
    return "\n".join([*lines, " " * label + "0" + end.rjust(columns - 1)])


def legend(kinds: Sequence[str], colour: bool = False, chunks: bool = False) -> str:
    """One line that says what the letters mean."""
    words = [f"{_paint(kind[0], kind, 0) if colour else kind[0]} {NAMES[kind]}" for kind in kinds if kind in COMPUTE]
    small = ["small letters: a rank's second stage"] if chunks else []
    return ", ".join([*words, ". idle", "a number is a microbatch", *small])


def _time(span: float, unit: str) -> str:
    return f"{span:.4g} s" if unit == "s" else f"{span:g} {unit}"


def _row(blocks: Sequence[Block], span: float, columns: int, colour: bool) -> str:
    scale = columns / span if span else 0.0
    cells = ["."] * columns
    paint: list[tuple[str, int] | None] = [None] * columns
    narrow = []
    for block in joined(blocks, gap=0.5 / scale if scale else 0.0):
        start, end = round(block.start * scale), round(block.end * scale)
        if end == start:
            narrow.append(block)
            continue
        # One column stays blank at the end of a block, so that neighbours can be told apart.
        room = end - start - 1
        shown = (block.label if len(block.label) <= max(room, 1) else block.label[0]).ljust(room, "-") + (" " if room else "")
        cells[start:end] = shown[: end - start]
        paint[start:end] = [(block.kind, block.chunk)] * (end - start)
    for column, kind in enumerate(busiest(narrow, span, columns) if narrow else ()):
        if kind is not None and cells[column] == ".":
            cells[column], paint[column] = (kind[0][0].lower() if kind[1] % 2 else kind[0][0]), kind
    if not colour:
        return "".join(cells)
    runs = groupby(zip(cells, paint, strict=True), itemgetter(1))
    words = [(kind, "".join(cell for cell, _ in run)) for kind, run in runs]
    return "".join(word if kind is None else _paint(word, *kind) for kind, word in words)


def _paint(cells: str, kind: str, chunk: int) -> str:
    letter, first, second = PAINT.get(kind, (16, 250, 250))
    return f"\x1b[38;5;{letter};48;5;{second if chunk % 2 else first}m{cells}\x1b[0m"
