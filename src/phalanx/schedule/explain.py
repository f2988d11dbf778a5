"""Every collective of one training step, read off the graphs and the schedule: where, how many bytes, and why.

Nothing is estimated: what happens inside segments is what the traced F and B (or I and W) graphs contain, what happens between them is
what the schedule's actions carry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from phalanx.derive.program import Program, Segment, SegmentClass, Value
from phalanx.mesh import Mesh
from phalanx.schedule.actions import Schedule
from phalanx.schedule.data import COUNT_BYTES, NORM_BYTES, reductions
from phalanx.schedule.storage import gathers_of
from phalanx.schedule.view import from_program

COMMUNICATES = {
    getattr(torch.ops.phx, name).default: name for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
}


@dataclass(frozen=True)
class Row:
    """One kind of call. bytes is one call's payload on one rank, the larger of its local input and output; count is per rank and step."""

    segment: str
    module: str
    direction: str
    op: str
    axis: str
    bytes: int
    count: int
    why: str


@dataclass(frozen=True)
class Explanation:
    rows: tuple[Row, ...]
    alike: tuple[tuple[str, ...], ...]
    """Names of segments that share a class, in order."""
    notes: tuple[str, ...] = ()

    @property
    def totals(self) -> dict[str, int]:
        """Bytes times count by axis."""
        totals: dict[str, int] = {}
        for row in self.rows:
            totals[row.axis] = totals.get(row.axis, 0) + row.bytes * row.count
        return totals

    def as_json(self) -> dict[str, Any]:
        return {"collectives": [asdict(row) for row in self.rows], "totals": self.totals, "notes": list(self.notes)}

    def __str__(self) -> str:
        """A table in which segments that communicate alike share their lines."""
        lines = [f"{'segment':24} {'module':34} {'dir':8} {'op':14} {'axis':6} {'bytes':>12} {'count':>6}  why"]
        shown: dict[tuple[tuple[str, str, str, str, int, int, str], ...], list[str]] = {}
        for name, rows in self._by_segment():
            relative = tuple(
                (_below(r.module, name), r.direction, r.op, r.axis, r.bytes, r.count, _without(r.why, name)) for r in rows
            )
            shown.setdefault(relative, []).append(name)
        for relative, names in shown.items():
            first = _range(names)
            for module, direction, op, axis, size, count, why in relative:
                lines.append(f"{first:24} {module:34} {direction:8} {op:14} {axis:6} {size:12,} {count:6}  {why}")
                first = ""
        lines += ["", "total bytes per axis (bytes x count, every segment): " + (
            ", ".join(f"{axis} {total:,}" for axis, total in self.totals.items()) or "none: nothing is communicated"
        )]  # fmt: skip
        return "\n".join([*lines, *self.notes])

    def _by_segment(self) -> Iterator[tuple[str, list[Row]]]:
        names = list(dict.fromkeys(row.segment for row in self.rows))
        for name in names:
            yield name, [row for row in self.rows if row.segment == name]


def explain(program: Program, schedule: Schedule) -> Explanation:
    """The collectives of one step of `program` run by `schedule`."""
    m = program.microbatches
    kinds = {action.kind for rank in schedule.ranks for action in rank}
    backward = ("I", "W") if "W" in kinds else ("B",)
    rows: list[Row] = []
    rows += _count(program)
    if program.tables is not None:
        rows += _graph(program, program.tables, program.tables, "E", "forward", m if program.tables_read_batch else 1)
    origins: dict[int, Segment] = {}
    view, chains = from_program(program, schedule.storage, late=schedule.late), schedule.chains
    reduce, gathers = reductions(view, schedule.places), gathers_of(view, schedule)
    for segment in program.segments:
        origin = origins.setdefault(id(segment.cls), segment)
        rows += _graph(program, segment, origin, "F", "forward", m)
        k = segment.index
        for gathered, count in gathers.get(k, ()):
            why = f"GATHER: ranks store slices of {_some(gathered.parameters)}"
            rows.append(
                Row(segment.name, segment.name, "step", "all_gather", "+".join(gathered.axes), gathered.bytes, count, why)
            )
        sent = sum(m // len(chains) for chain in chains if k + 1 < len(program.segments) and chain[k] != chain[k + 1])
        if sent:
            rows += _sends(program, segment, sent)
        for graph in backward:
            rows += _graph(program, segment, origin, graph, "backward", m)
        if k in reduce:
            times = sum(a.kind == "REDUCE" and a.segment == k for a in schedule.ranks[schedule.places[k][0]])
            for part in reduce[k].parts:
                for op, axes, size in part.calls(program.mesh):
                    axis = "+".join(axes)
                    why = f"the gradients of {_some(part.parameters)} are partial sums over {axis}"
                    if op == "reduce_scatter":
                        why += ", and each rank keeps its slice"
                    if part.coordinates:
                        why = f"{_some(part.parameters)} is shared by the stages on pp {', '.join(map(str, part.coordinates))}"
                    # What stages share, and what is not scattered, is summed once a step.
                    number = 1 if part.coordinates or not part.split else times
                    rows.append(Row(segment.name, segment.name, "backward", op, axis, size, number, f"REDUCE: {why}"))
    if program.mesh.size > 1:
        why = "NORM: loss, gradient norm and count to every rank, which all see if one is not finite or a rank is to stop"
        rows.append(Row("step", "step", "backward", "all_reduce", "world", NORM_BYTES, 1, why))
    shared: dict[int, list[str]] = {}
    for segment in program.segments:
        shared.setdefault(id(segment.cls), []).append(segment.name)
    notes = [
        f"{n['module']} ({n['source']}): {n['node']} runs whole on every rank, up to {n['bytes']:,} bytes: {n['why']}"
        for n in program.report
    ]
    return Explanation(
        tuple(rows), tuple(tuple(names) for names in shared.values()), (*notes, *_padding(program), *program.warnings)
    )


def _padding(program: Program) -> list[str]:
    """What was padded so that its axes divide it, with the parameters that it is a dimension of."""
    found: dict[str, list[str]] = {}
    for p in (*program.parameters.values(), *program.buffers.values()):
        for true, held, axes in zip(p.given, p.shape, p.spec.dims, strict=True):
            if true != held:
                ranks = ",".join(f"{axis}={program.mesh.shape[axis]}" for axis in axes if axis in program.mesh.shape)
                found.setdefault(f"vocab {true} padded to {held} on {ranks}", []).append(p.name)
    return [f"{padding}: {', '.join(names)}" for padding, names in found.items()]


def _count(program: Program) -> list[Row]:
    return [
        Row(
            "step",
            "step",
            "forward",
            "all_reduce",
            axis,
            COUNT_BYTES,
            1,
            f"COUNT: valid tokens of all microbatches, counted over the batch on {axis}",
        )
        for axis in reversed(program.batch_axes)
        if program.mesh.shape[axis] > 1
    ]


def _graph(program: Program, segment: Segment, origin: Segment, graph: str, direction: str, count: int) -> list[Row]:
    cls: SegmentClass = segment.cls
    if cls.graphs is None:
        raise ValueError("the program was derived without graphs; explain reads the collectives off them")
    merged: dict[Row, int] = {}
    for node in getattr(cls.graphs, graph).graph.nodes:
        if node.op == "call_function" and node.target in COMMUNICATES and program.mesh.shape.get(str(node.args[2]), 1) > 1:
            module = _renamed(str(node.meta.get("module") or origin.name), origin.name, segment.name)
            why = str(node.meta.get("why", ""))
            if node.meta.get("phase") == "backward":
                why = f"backward of: {why}"
            row = Row(segment.name, module, direction, COMMUNICATES[node.target], str(node.args[2]), _payload(node), count, why)
            merged[row] = merged.get(row, 0) + 1
    return [Row(**{**asdict(row), "count": row.count * times}) for row, times in merged.items()]


def _payload(node: fx.Node) -> int:
    values = (node.args[0].meta["val"], node.meta["val"])  # type: ignore[union-attr]
    return max(int(value.numel() * value.element_size()) for value in values)


def _sends(program: Program, segment: Segment, count: int) -> Iterable[Row]:
    for value in segment.cls.outputs:
        why = f"SEND: {segment.name} and the segment after it are on different stages"
        yield Row(segment.name, segment.name, "forward", "send", "pp", _bytes(value, program.mesh), count, why)
    for value in segment.cls.outputs:
        if value.requires_grad:
            why = f"SEND: the gradient of what {segment.name} sent"
            yield Row(segment.name, segment.name, "backward", "send", "pp", _bytes(value, program.mesh), count, why)


def _bytes(value: Value, mesh: Mesh) -> int:
    return math.prod(value.spec.local_shape(value.shape, mesh)) * value.dtype.itemsize


def _some(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parameters"


def _renamed(text: str, origin: str, name: str) -> str:
    """Words about the first segment of a class, for another of it."""
    return text if origin == name else text.replace(origin + ".", name + ".") if text != origin else name


def _below(module: str, segment: str) -> str:
    return module.removeprefix(segment).removeprefix(".") or "(segment)"


def _without(why: str, segment: str) -> str:
    return why.replace(segment, "this segment")


def _range(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1].rsplit('.', 1)[-1]} (x{len(names)})"
