"""What is drawn, before anybody decides how: rows of blocks over time, messages between rows, and activations held.

Pure. Times of a Picture begin at 0; the renderers add nothing to what stands here but ink.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.event import Event
from phalanx.mesh import Mesh
from phalanx.schedule.actions import Schedule
from phalanx.schedule.pipeline import Step, times

NAMES: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward, input gradient only",
    "W": "backward, weight gradient",
    "OPT": "optimizer",
    "SEND_F": "send an activation",
    "RECV_F": "receive an activation",
    "SEND_B": "send a gradient",
    "RECV_B": "receive a gradient",
    "GATHER": "gather parameters",
    "REDUCE": "sum gradients",
    "COUNT": "count tokens",
    "NORM": "sum loss and norm",
}
COLOURS: Mapping[str, str] = {
    "F": "#0072B2",
    "B": "#009E73",
    "I": "#56B4E9",
    "W": "#E69F00",
    "OPT": "#CC79A7",
    "SEND_F": "#7A9CB8",
    "RECV_F": "#7A9CB8",
    "SEND_B": "#79A898",
    "RECV_B": "#79A898",
    "GATHER": "#F0E442",
    "REDUCE": "#D55E00",
    "COUNT": "#999999",
    "NORM": "#999999",
}
"""Of Okabe and Ito (2008), who chose colours that people with every kind of colour vision can tell apart. Messages have a paler
tone of the pass they belong to."""
COMPUTE = ("F", "B", "I", "W", "OPT")
NAME = re.compile(r"([A-Z]+(?:_[FB])?)(\d+)?(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Block:
    """One action, or neighbouring segments of one kind and microbatch, on one lane of one rank."""

    kind: str
    first: int | None
    last: int | None
    microbatch: int | None
    chunk: int
    """Which of its rank's stages it is of, from 0."""
    start: float
    end: float
    bytes: int = 0

    @property
    def label(self) -> str:
        """F3, or f3 on a rank's second stage, its fourth, and so on: short enough for a block."""
        letter = self.kind[0]
        return (letter.lower() if self.chunk % 2 else letter) + ("" if self.microbatch is None else str(self.microbatch))

    def continues(self, other: Block, gap: float = 0.0) -> bool:
        """True if the two are one piece of work with at most `gap` between them."""
        return (self.kind, self.microbatch, self.chunk) == (other.kind, other.microbatch, other.chunk) and (
            other.start - self.end <= gap
        )


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    compute: tuple[Block, ...]
    """By start; neighbours without a gap are one block."""
    lanes: Mapping[str, tuple[Block, ...]]
    """Communication by lane, where it takes time."""
    memory: tuple[tuple[float, float], ...]
    """(time, activations held from then on)."""

    @property
    def peak(self) -> float:
        return max((held for _, held in self.memory), default=0.0)


@dataclass(frozen=True, slots=True)
class Flow:
    """A message from one row to another: from when its SEND was issued to when its RECV was complete."""

    source: int
    target: int
    direction: str
    """F or B."""
    segment: int
    microbatch: int | None
    start: float
    end: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    unit: str
    """Of time; "s" for seconds, which renderers may scale."""
    rows: tuple[Row, ...]
    flows: tuple[Flow, ...]
    span: float
    memory_unit: str = ""

    @property
    def kinds(self) -> list[str]:
        """Of what is drawn, in the order of NAMES."""
        drawn = {block.kind for row in self.rows for block in row.compute}
        drawn |= {block.kind for row in self.rows for blocks in row.lanes.values() for block in blocks}
        return [kind for kind in NAMES if kind in drawn]


def picture(
    what: Schedule | Sequence[Event],
    *,
    title: str = "",
    unit: str | None = None,
    schedule: Schedule | None = None,
    mesh: Mesh | None = None,
    weights: Mapping[int, float] | None = None,
    memory_unit: str = "",
) -> Picture:
    """The picture of a schedule at unit costs, or of a step's Events.

    unit      of time: "s" unless given, "forwards" for a Schedule
    schedule  that the Events are of: tells the stages of one rank apart
    mesh      of the Events' ranks; without it a rank's number is its pp coordinate
    weights   activations that F of a segment leaves for the backward, in `memory_unit`; 1 for each if left out
    """
    if isinstance(what, Schedule):
        events, schedule, unit, label = unit_events(what), what, unit or "forwards", "pp"
    else:
        events, unit, label = list(what), unit or "s", "rank"
    drawn = [(event, kind, segment) for event in events for kind, segment in [parsed(event.name)] if kind in NAMES]
    begin = min((event.start for event, _, _ in drawn), default=0.0)
    end = max((event.end for event, _, _ in drawn), default=0.0)
    chunks = _chunks(schedule)
    places = {event.rank: {"pp": event.rank} if mesh is None else mesh.coordinates(event.rank) for event, _, _ in drawn}
    rows: dict[int, list[tuple[str, Block]]] = {event.rank: [] for event, kind, _ in drawn if kind in COMPUTE}
    for event, kind, segment in sorted(drawn, key=lambda each: (each[0].start, each[0].end)):
        chunk = chunks.get((places[event.rank].get("pp", 0), segment), 0)
        block = Block(kind, segment, segment, event.microbatch, chunk, event.start - begin, event.end - begin, event.bytes)
        if event.rank in rows:
            rows[event.rank].append((event.lane, block))
    made = tuple(_row(f"{label} {rank}", blocks, weights) for rank, blocks in sorted(rows.items()))
    return Picture(title, unit, made, _flows(rows, places), end - begin, memory_unit)


def parsed(name: str) -> tuple[str, int | None]:
    """(kind, segment) of an action's name."""
    match = NAME.fullmatch(name)
    return (match[1], None if match[2] is None else int(match[2])) if match else ("", None)


def unit_events(schedule: Schedule) -> list[Event]:
    """Compute alone, at default costs of a stage, shared equally by its segments; messages take no time."""
    copies, length = schedule.copies, len({k for stage in schedule.stages for k in stage})
    ranks = [
        [
            Step(a.kind, a.segment + length * (a.microbatch * copies // schedule.microbatches), a.microbatch)
            for a in actions
            if a.kind in ("F", "B", "I", "W") and a.segment is not None and a.microbatch is not None
        ]
        for actions in schedule.ranks
    ]
    share = {
        length * (s * copies // len(schedule.stages)) + k: 1 / len(stage)
        for s, stage in enumerate(schedule.stages)
        for k in stage
    }
    spans = times(ranks, share=share, copies=copies)
    return [
        Event(rank, "compute", f"{step.kind}{step.stage % length}.{step.microbatch}", *spans[step], microbatch=step.microbatch)
        for rank, steps in enumerate(ranks)
        for step in steps
    ]


def joined(blocks: Iterable[Block], gap: float = 0.0) -> list[Block]:
    """Neighbours that belong together, with at most `gap` between them, as one block."""
    found: list[Block] = []
    for block in blocks:
        if found and found[-1].continues(block, gap):
            before = found.pop()
            block = replace(before, last=block.last, end=block.end, bytes=before.bytes + block.bytes)
        found.append(block)
    return found


def busiest(blocks: Sequence[Block], span: float, columns: int) -> list[tuple[str, int] | None]:
    """For each of `columns` equal pieces of the time: the (kind, chunk) that takes most of it, None if it is idle for most."""
    if not span:
        return [None] * columns
    shares: list[dict[tuple[str, int], float]] = [{} for _ in range(columns)]
    for block in blocks:
        first, last = block.start / span * columns, block.end / span * columns
        for column in range(int(first), min(int(last), columns - 1) + 1):
            key = (block.kind, block.chunk)
            inside = min(last, column + 1) - max(first, column)
            shares[column][key] = shares[column].get(key, 0.0) + inside
    return [max(share, key=lambda key: share[key]) if sum(share.values()) >= 0.5 else None for share in shares]


def _chunks(schedule: Schedule | None) -> dict[tuple[int, int | None], int]:
    """(pp coordinate, segment) -> which of the coordinate's stages holds it."""
    found: dict[tuple[int, int | None], int] = {}
    count: dict[int, int] = {}
    for stage, at in zip(schedule.stages, schedule.host, strict=True) if schedule else ():
        for segment in stage:
            found[at, segment] = count.get(at, 0)
        count[at] = count.get(at, 0) + 1
    return found


def _row(label: str, blocks: Sequence[tuple[str, Block]], weights: Mapping[int, float] | None) -> Row:
    lanes: dict[str, list[Block]] = {}
    for lane, block in blocks:
        if lane != "compute":
            lanes.setdefault(lane, []).append(block)
    compute = [block for lane, block in blocks if lane == "compute" and block.end > block.start]
    # What takes no time, as messages without a cost, has no lane.
    shown = {name: tuple(lanes[name]) for name in sorted(lanes) if any(block.end > block.start for block in lanes[name])}
    return Row(label, tuple(joined(compute)), shown, _memory(compute, weights))


def _memory(compute: Sequence[Block], weights: Mapping[int, float] | None) -> tuple[tuple[float, float], ...]:
    """From the start of F to the end of B, or of W."""
    changes: dict[float, float] = {}
    for block in compute:
        weight = 1.0 if weights is None or block.first is None else weights.get(block.first, 0.0)
        if block.kind == "F":
            changes[block.start] = changes.get(block.start, 0.0) + weight
        elif block.kind in ("B", "W"):
            changes[block.end] = changes.get(block.end, 0.0) - weight
    held, line = 0.0, []
    for time in sorted(changes):
        held += changes[time]
        line.append((time, round(held, 9)))
    return tuple(line)


def _flows(rows: Mapping[int, Sequence[tuple[str, Block]]], places: Mapping[int, Mapping[str, int]]) -> tuple[Flow, ...]:
    """Both ends of a message have its lane, segment and microbatch, and differ in their pp coordinate alone."""
    sent: dict[Hashable, tuple[int, Block]] = {}
    received: list[tuple[Hashable, int, Block]] = []
    for number, rank in enumerate(sorted(rows)):
        others = tuple(place for axis, place in places[rank].items() if axis != "pp")
        for lane, block in rows[rank]:
            key = (others, lane, block.first, block.microbatch)
            if block.kind.startswith("SEND"):
                sent[key] = (number, block)
            elif block.kind.startswith("RECV"):
                received.append((key, number, block))
    found = []
    for end, number, block in received:
        if end in sent and block.first is not None:
            source, send = sent[end]
            size = max(send.bytes, block.bytes)
            found.append(Flow(source, number, block.kind[-1], block.first, block.microbatch, send.start, block.end, size))
    return tuple(found)
