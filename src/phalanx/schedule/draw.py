"""A step as text, one row per rank: what ran, what was predicted, or the bare order of a schedule, in the same picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.event import Event
from phalanx.schedule.actions import Schedule
from phalanx.schedule.pipeline import Step, times

COLOURS = {"F": "44", "B": "42", "I": "46", "W": "43", "O": "45"}
"""ANSI backgrounds by first letter."""


def draw(what: Schedule | Sequence[Event], width: int = 100, colour: bool = False) -> str:
    """The compute lanes over time, for a terminal `width` columns wide.

    F3 is the forward of microbatch 3, B its backward, I and W its halves, O the optimizer, a dot is idle. Neighbouring segments
    of one kind and microbatch are one block; a block too narrow for its number shows its letter alone. A Schedule is drawn at
    unit costs: F=1, B=2, I=W=1 for every stage.
    """
    events = _unit_events(what) if isinstance(what, Schedule) else what
    blocks = _blocks(events)
    if not blocks:
        return ""
    begin = min(block.start for row in blocks.values() for block in row)
    end = max(block.end for row in blocks.values() for block in row)
    label = max(len(_label(what, rank)) for rank in blocks) + 1
    columns = max(width - label - 1, 1)
    scale = columns / (end - begin) if end > begin else 0.0
    rows = [_label(what, rank).ljust(label) + _row(row, begin, scale, columns, colour) for rank, row in sorted(blocks.items())]
    span = f"{end - begin:g} forwards" if isinstance(what, Schedule) else f"{end - begin:.4g} s"
    return "\n".join([*rows, " " * label + "0" + span.rjust(columns - 1)])


def _label(what: Schedule | Sequence[Event], rank: int) -> str:
    return f"pp {rank}" if isinstance(what, Schedule) else f"rank {rank}"


@dataclass(frozen=True)
class _Block:
    letter: str
    microbatch: int | None
    start: float
    end: float


def _unit_events(schedule: Schedule) -> list[Event]:
    """Compute alone, at default costs of a stage, shared equally by its segments."""
    ranks = [
        [
            Step(a.kind, a.segment, a.microbatch)
            for a in actions
            if a.kind in ("F", "B", "I", "W") and a.segment is not None and a.microbatch is not None
        ]
        for actions in schedule.ranks
    ]
    spans = times(ranks, share={k: 1 / len(stage) for stage in schedule.stages for k in stage})
    return [
        Event(rank, "compute", str(step), *spans[step], microbatch=step.microbatch)
        for rank, steps in enumerate(ranks)
        for step in steps
    ]


def _blocks(events: Sequence[Event]) -> dict[int, list[_Block]]:
    rows: dict[int, list[_Block]] = {}
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        if event.lane != "compute" or event.end <= event.start:
            continue
        row = rows.setdefault(event.rank, [])
        block = _Block(event.name[0], event.microbatch, event.start, event.end)
        if row and (row[-1].letter, row[-1].microbatch, row[-1].end) == (block.letter, block.microbatch, block.start):
            block = _Block(block.letter, block.microbatch, row.pop().start, block.end)
        row.append(block)
    return rows


def _row(blocks: Sequence[_Block], begin: float, scale: float, columns: int, colour: bool) -> str:
    cells = ["."] * columns
    paint = [""] * columns
    for block in blocks:
        start, end = round((block.start - begin) * scale), round((block.end - begin) * scale)
        if end == start:
            continue  # narrower than half a column
        text = block.letter + ("" if block.microbatch is None else str(block.microbatch))
        # One column stays blank at the end of a block, so that neighbours can be told apart.
        room = end - start - 1
        text = (text if len(text) <= max(room, 1) else block.letter).ljust(room, "-") + (" " if room else "")
        cells[start:end] = text[: end - start]
        paint[start:end] = [COLOURS.get(block.letter, "")] * (end - start)
    if not colour:
        return "".join(cells)
    return "".join(f"\x1b[{code}m{cell}\x1b[0m" if code else cell for cell, code in zip(cells, paint, strict=True))
