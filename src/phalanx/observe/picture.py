"""What `demonstrate` saw, drawn for a terminal: tensors before and after, and a matrix of who got what from whom.

Colours tell apart what the digits tell apart already, so nothing is lost without them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.observe.demonstrate import Numbers, Shown

# Okabe and Ito 2008: told apart under every common colour blindness. Without black and yellow, which some backgrounds swallow.
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2")
NOTHING = "-"


def picture(shown: Shown) -> RenderableType:
    """Everything as one rich renderable."""
    case = shown.case
    parts: list[RenderableType] = [
        Text.assemble((case.title, "bold"), f" on {case.ranks} ranks, {case.dtype}: {case.kind.text}"),
        "",
        _tensors(shown),
    ]
    if shown.flows:
        parts += ["", _matrix(shown), Text(_legend(shown), style="dim"), Text(_cost(shown))]
    for backward in shown.backwards:
        row = f"pair {backward.pair}, " if backward.pair else ""
        parts += ["", Text.assemble(("backward", "bold"), f" ({row}{backward.collective}): {backward.text}")]
        parts.append(_columns(("gradient of the output", backward.before), ("gradient of the input", backward.after)))
    parts += ["", *(Text(f"note: {note}") for note in shown.notes)] if shown.notes else []
    return Group(*parts)


def _tensors(shown: Shown) -> Table:
    case = shown.case
    table = _ranks("before", "after")
    sources = _sources(shown)
    for rank, (before, after) in enumerate(zip(shown.before, shown.after, strict=True)):
        came = sources.get(rank, {})
        table.add_row(
            _rank(rank),
            _cell(before, [rank] * case.pieces),
            _cell(after, [came.get(place) for place in range(case.ranks if case.kind.joins else 1)]),
        )
    return table


def _columns(*columns: tuple[str, Sequence[Numbers]]) -> Table:
    table = _ranks(*(title for title, _ in columns))
    for rank, cells in enumerate(zip(*(values for _, values in columns), strict=True)):
        table.add_row(_rank(rank), *(_cell(values, [None]) for values in cells))
    return table


def _ranks(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("")
    for title in titles:
        table.add_column(title)
    return table


def _rank(rank: int) -> Text:
    return Text(f"rank {rank}", style=COLOURS[rank % len(COLOURS)])


def _cell(values: Numbers, owners: Sequence[int | None]) -> Text:
    """The elements, a bar between slices, each in the colour of the one rank that it comes from."""
    if values is None:
        return Text(NOTHING, style="dim")
    cell = Text()
    length = len(values) // len(owners)
    for place, owner in enumerate(owners):
        piece = " ".join(f"{value:.6g}" for value in values[place * length : (place + 1) * length])
        cell.append(" | " if place else "", style="dim").append(
            piece, style="bold" if owner is None else COLOURS[owner % len(COLOURS)]
        )
    return cell


def _sources(shown: Shown) -> dict[int, dict[int, int | None]]:
    """{rank: {slice of its output: the one rank that it comes from, or None for several}}"""
    found: dict[int, dict[int, int | None]] = {}
    for flow in shown.flows:
        slices = found.setdefault(flow.target, {})
        slices[flow.place] = flow.source if flow.place not in slices else None
    return found


def _matrix(shown: Shown) -> Table:
    case = shown.case
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("who gets what")
    for source in range(case.ranks):
        table.add_column(Text(f"from {source}", style=COLOURS[source % len(COLOURS)]), justify="center")
    table.add_column("receives", justify="right")
    for target in range(case.ranks):
        cells = []
        for source in range(case.ranks):
            ways = [
                _way(shown, flow.piece, flow.place) for flow in shown.flows if (flow.source, flow.target) == (source, target)
            ]
            way = ", ".join(ways) or "."
            cells.append(
                Text(f"({way})" if ways and source == target else way, style="" if ways and source != target else "dim")
            )
        table.add_row(_rank(target), *cells, f"{shown.received(target)} B")
    table.add_row("sends", *(f"{shown.sent(source)} B" for source in range(case.ranks)), "")
    return table


def _way(shown: Shown, piece: int, place: int) -> str:
    kind = shown.case.kind
    if not kind.cuts and not kind.joins:
        return "all"
    return f"{piece if kind.cuts else 'all'}→{place if kind.joins else 'all'}"


def _legend(shown: Shown) -> str:
    kind = shown.case.kind
    meaning = "all: the whole tensor"
    if kind.cuts or kind.joins:
        here = "slice i of the sender" if kind.cuts else "the sender's whole tensor"
        there = "slice j of the receiver" if kind.joins else "the receiver's whole tensor"
        shape = f"{'i' if kind.cuts else 'all'}→{'j' if kind.joins else 'all'}"
        meaning = f"{shape}: {here} {'goes into' if kind.reduces else 'becomes'} {there}"
    reduced = f"; what is in one row is reduced by {shown.case.op}" if kind.reduces else ""
    return f"{meaning}{reduced}; (in brackets): its own, not sent; .: nothing"


def _cost(shown: Shown) -> str:
    straight = max(max(shown.sent(rank), shown.received(rank)) for rank in range(shown.case.ranks))
    return f"sent straight: {straight} B at the busiest rank; the best algorithms need {shown.least:.6g} B"
