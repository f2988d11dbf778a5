"""A step as an SVG, for a page: rows to scale, communication under each rank if asked for, and the activations that it holds.

One file without a script or anything from elsewhere. Blocks narrower than a pixel are drawn by what takes most of each pixel, so
that a picture of any number of microbatches stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from phalanx.schedule.draw.picture import COLOURS, NAMES, Block, Picture, Row, busiest

WIDTH, LEFT, RIGHT = 1200, 70, 60
ROW, LANE, MEMORY, GAP = 20, 7, 18, 8
TITLE, AXIS, LINE = 26, 30, 18


def svg(drawn: Sequence[Picture], lanes: bool = False) -> str:
    """Pictures under each other on one time scale, with a legend. `lanes` draws communication under each rank."""
    span = max((each.span for each in drawn), default=0.0)
    body: list[str] = []
    top = 6.0
    for each in drawn:
        body += _panel(each, span, lanes, top)
        top += _height(each, lanes)
    explained, below = _legend(drawn, top)
    height = top + below
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
            'font-family="system-ui, sans-serif" font-size="11">',
            f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>',
            *body,
            *explained,
            "</svg>\n",
        ]
    )


def shade(kind: str, chunk: int) -> str:
    """The colour of a block: paler on a rank's second stage, its fourth, and so on."""
    colour = COLOURS[kind]
    if not chunk % 2:
        return colour
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * 0.45):02X}" for part in parts)


def ticks(span: float) -> list[float]:
    """Times for an axis: about eight, at round numbers."""
    if span <= 0:
        return [0.0]
    step = 10.0 ** len(str(int(span))) if span >= 1 else 1.0
    while span / step < 4:
        for part in (2, 2.5, 2):
            step /= part
            if span / step >= 4:
                break
    return [i * step for i in range(int(span / step) + 1)]


def scaled(span: float, unit: str) -> tuple[float, str]:
    """(factor, unit) in which a span in `unit` is easy to read: seconds as ms or µs if there are few of them."""
    if unit != "s" or span >= 1 or span <= 0:
        return 1.0, unit
    return (1e3, "ms") if span >= 1e-3 else (1e6, "µs")


def _height(each: Picture, lanes: bool) -> float:
    return TITLE + AXIS + sum(_row_height(row, lanes) for row in each.rows)


def _row_height(row: Row, lanes: bool) -> float:
    return ROW + MEMORY + GAP + (LANE * len(row.lanes) if lanes else 0)


def _panel(each: Picture, span: float, lanes: bool, top: float) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="{top + 14:g}" font-size="13" font-weight="bold">{escape(each.title)}</text>'
    scale = (WIDTH - LEFT - RIGHT) / span if span else 0.0
    highest = max((row.peak for row in each.rows), default=0.0)
    y = top + TITLE
    for row in each.rows:
        yield f'<text x="{LEFT - 6}" y="{y + 14:g}" text-anchor="end">{escape(row.label)}</text>'
        yield f'<rect x="{LEFT}" y="{y:g}" width="{each.span * scale:.2f}" height="{ROW}" fill="#F2F2F2"/>'
        yield from _blocks(row.compute, each, span, y, ROW, scale, labels=True)
        below = y + ROW + 1
        if lanes:
            for name, blocks in row.lanes.items():
                said = escape(lane_name(name))
                yield f'<text x="{LEFT - 6}" y="{below + 6:g}" text-anchor="end" font-size="6.5" fill="#666">{said}</text>'
                yield from _blocks(blocks, each, span, below, LANE - 1, scale, labels=False)
                below += LANE
        yield from _memory(row, each, highest, below, scale)
        y += _row_height(row, lanes)
    yield from _axis(each, scale, y)


def _blocks(
    blocks: Sequence[Block], each: Picture, span: float, y: float, height: float, scale: float, *, labels: bool
) -> Iterator[str]:
    wide = [block for block in blocks if (block.end - block.start) * scale >= 1]
    narrow = [block for block in blocks if (block.end - block.start) * scale < 1]
    columns = round(span * scale)
    start = 0
    pixels = busiest(narrow, span, columns) if narrow else []
    for column in range(1, len(pixels) + 1):
        if column < len(pixels) and pixels[column] == pixels[start]:
            continue
        found = pixels[start]
        if found is not None:
            yield f'<rect x="{LEFT + start}" y="{y:g}" width="{column - start}" height="{height:g}" fill="{shade(*found)}"/>'
        start = column
    factor, unit = scaled(each.span, each.unit)
    for block in wide:
        x, width = LEFT + block.start * scale, (block.end - block.start) * scale
        # A hair of white at the end of a block, so that neighbours can be told apart.
        drawn = max(width - 0.7, 0.7)
        said = f"{name_of(block)}: {NAMES[block.kind]}, {block.start * factor:.4g} to {block.end * factor:.4g} {unit}" + (
            f", {block.bytes:,} bytes" if block.bytes else ""
        )
        yield (
            f'<rect x="{x:.2f}" y="{y:g}" width="{drawn:.2f}" height="{height:g}" fill="{shade(block.kind, block.chunk)}">'
            f"<title>{escape(said)}</title></rect>"
        )
        if labels and width >= 6.5 * len(block.label):
            ink = "white" if block.kind == "F" and not block.chunk % 2 else "black"
            middle = x + width / 2
            yield (
                f'<text x="{middle:.2f}" y="{y + 14:g}" text-anchor="middle" fill="{ink}" pointer-events="none">'
                f"{block.label}</text>"
            )


def lane_name(lane: str) -> str:
    """`pp:0>1:F` as 0→1 F."""
    return lane.removeprefix("pp:").replace(">", "→").replace(":", " ")


def name_of(block: Block) -> str:
    """As a Schedule writes it: F0-3.1."""
    if block.first is None:
        return block.kind
    place = f"{block.first}" if block.first == block.last else f"{block.first}-{block.last}"
    return f"{block.kind}{place}" + ("" if block.microbatch is None else f".{block.microbatch}")


def _memory(row: Row, each: Picture, highest: float, y: float, scale: float) -> Iterator[str]:
    """Activations held, as a step line over the height of a rank's strip; the number is the peak."""
    if not row.memory or not highest:
        return
    base, height = y + MEMORY, MEMORY - 3
    previous, points = 0.0, [f"{LEFT},{base:g}"]
    for time, held in thinned(row.memory, 1 / scale if scale else 0.0):
        x = LEFT + time * scale
        points += [f"{x:.1f},{base - previous / highest * height:.1f}", f"{x:.1f},{base - held / highest * height:.1f}"]
        previous = held
    points += [f"{LEFT + each.span * scale:.1f},{base - previous / highest * height:.1f}"]
    yield f'<polyline points="{" ".join(points)}" fill="none" stroke="#444" stroke-width="0.8"/>'
    yield (
        f'<text x="{LEFT + each.span * scale + 4:.1f}" y="{base - 2:g}" font-size="9" fill="#444">'
        f"peak {row.peak:.4g}{_spaced(each.memory_unit)}</text>"
    )


def thinned(memory: Sequence[tuple[float, float]], step: float) -> list[tuple[float, float]]:
    """A step line with at most one rise or fall in every `step` of time, whose highest point is kept."""
    found: list[tuple[float, float]] = []
    first, last = 0.0, 0.0
    for time, held in memory:
        if found and time - first < step:
            found[-1] = (first, max(found[-1][1], held))
        else:
            if found and found[-1][1] != last:
                found.append((min(first + step, time), last))
            found.append((time, held))
            first = time
        last = held
    if found and found[-1][1] != last:
        found.append((first + step, last))
    return found


def _spaced(unit: str) -> str:
    return f" {unit}" if unit else ""


def _axis(each: Picture, scale: float, y: float) -> Iterator[str]:
    factor, unit = scaled(each.span, each.unit)
    right = LEFT + each.span * scale
    yield f'<line x1="{LEFT}" y1="{y:g}" x2="{right:.1f}" y2="{y:g}" stroke="#444" stroke-width="0.8"/>'
    for time in ticks(each.span * factor):
        x = LEFT + time / factor * scale
        yield f'<line x1="{x:.1f}" y1="{y:g}" x2="{x:.1f}" y2="{y + 4:g}" stroke="#444" stroke-width="0.8"/>'
        yield f'<text x="{x:.1f}" y="{y + 15:g}" text-anchor="middle" fill="#444">{time:.6g}</text>'
    yield f'<text x="{right + 4:.1f}" y="{y + 4:g}" fill="#444">{escape(unit)}</text>'


def _legend(drawn: Sequence[Picture], top: float) -> tuple[list[str], float]:
    """The legend and its height."""
    x, y, found = float(LEFT), top, list[str]()
    for colour, said in _legend_words(drawn):
        length = 26 + 6.2 * len(said)
        if x > LEFT and x + length > WIDTH:
            x, y = float(LEFT), y + LINE
        if colour:
            found.append(f'<rect x="{x:g}" y="{y + 4:g}" width="11" height="11" fill="{colour}"/>')
        found.append(f'<text x="{x + 15:g}" y="{y + 13:g}">{escape(said)}</text>')
        x += length
    return found, y + LINE + 6 - top


def _legend_words(drawn: Sequence[Picture]) -> list[tuple[str, str]]:
    """(colour, words) of each entry."""
    kinds = {kind for each in drawn for kind in each.kinds if not kind.startswith("RECV")}
    named = {"SEND_F": "activation message", "SEND_B": "gradient message"}
    words = [(COLOURS[kind], named.get(kind, f"{kind[0]}: {NAMES[kind]}")) for kind in NAMES if kind in kinds]
    return [
        *words,
        ("", "numbers: microbatches"),
        ("", "paler, small letters: a rank's second stage"),
        ("", "line: activations held"),
    ]
