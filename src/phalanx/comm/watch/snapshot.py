"""What a ring says, as plain data: the rank, its groups, its last operations and how it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from phalanx.comm.watch import ring

Life = Literal["running", "died", "ended", "closed", "silent"]
"""died: the process is gone without a word. ended: its interpreter came to its end. closed: it destroyed its default group.
silent: on another host, and it does not answer."""


@dataclass(frozen=True)
class GroupView:
    """A process group as a rank knows it. `ranks` are global, in the order of the group."""

    name: str
    axis: str
    ranks: tuple[int, ...]
    device: str = "cpu"

    def __str__(self) -> str:
        return f"group {self.name!r}" + (f" ({self.axis})" if self.axis not in ("", "undefined", self.name) else "")


_MACHINERY = ("/lib/python", "/site-packages/", "/phalanx/comm/")


@dataclass(frozen=True)
class Site:
    """A line of the user's source."""

    path: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """False for the standard library, installed packages and the machinery of communication."""
        return not any(part in self.path for part in _MACHINERY) and not self.path.startswith("<")

    def __str__(self) -> str:
        if not self.line:
            return self.path
        return f"{self.path.rpartition('/')[2]}:{self.line}" + (f" in {self.function}" if self.function != "<module>" else "")

    @staticmethod
    def of(text: str) -> Site:
        path, line, function = text.rsplit(":", 2)
        return Site(path, int(line), function)


NOWHERE = Site("an unknown line", 0, "")


@dataclass(frozen=True)
class Op:
    """One recorded operation. Times in nanoseconds of CLOCK_MONOTONIC; `ended` is 0 in flight and negative if it raised.

    `root` is the global rank of the root, or of the peer of a message; -1 where there is none.
    """

    number: int
    op: str
    group: str
    seq: int
    dtype: str = ""
    elements: int = 0
    reduction: str = ""
    root: int = -1
    tag: int = 0
    site: Site = NOWHERE
    issued: int = 0
    waited: int = 0
    ended: int = 0

    @property
    def call(self) -> tuple[str, str, int, str, int]:
        """What the ranks of a group must agree on."""
        return self.op, self.dtype, self.elements, self.reduction, -1 if self.is_message else self.root

    @property
    def is_message(self) -> bool:
        return self.op in ("send", "recv", "recv_any")

    @property
    def is_collective(self) -> bool:
        return not self.is_message and self.op not in ("new_group", "destroy")

    @property
    def is_stuck(self) -> bool:
        """Waited for and not over, or over because something broke."""
        return self.ended < 0 or (self.ended == 0 and self.waited > 0)

    def __str__(self) -> str:
        text = self.op + (f"({self.reduction})" if self.reduction else "")
        if self.dtype:
            text += f" of {self.elements:,} {self.dtype}"
        if self.op in ("send", "recv"):
            text += f" {'to' if self.op == 'send' else 'from'} rank {self.root}" + (f" with tag {self.tag}" if self.tag else "")
        elif self.root >= 0:
            text += f" with root {self.root}"
        return text

    @property
    def where(self) -> str:
        return f"{self} at {self.site}"


@dataclass(frozen=True)
class RankView:
    """One rank at one moment. `stack` is of its main thread, innermost first; empty if it did not answer."""

    rank: int
    world_size: int
    ops: tuple[Op, ...] = ()
    groups: dict[str, GroupView] = field(default_factory=dict)
    life: Life = "running"
    reason: str = ""
    stack: tuple[Site, ...] = ()
    pid: int = 0
    pid_started: int = 0
    host: str = ""
    host_name: str = ""
    verdict: str = ""
    now: int = 0
    job: str = ""
    started_unix: int = 0

    def stuck(self) -> list[Op]:
        return [op for op in self.ops if op.is_stuck]

    def __str__(self) -> str:
        return f"rank {self.rank}"


def parse(data: bytes) -> RankView:
    """The view that a ring file's bytes give; ValueError if they are not a ring of this version."""
    if len(data) < ring.HEADER_BYTES or data[:8] != ring.MAGIC:
        raise ValueError(f"not a flight ring: {len(data)} bytes that do not begin with {ring.MAGIC!r}")
    _, version, record_bytes, capacity, _, rank, world, pid, pid_started, started, unix, job, host, host_name = (
        ring.HEADER.unpack_from(data)
    )
    if (version, record_bytes) != (ring.VERSION, ring.RECORD.size):
        raise ValueError(f"a flight ring of version {version}; this Phalanx reads version {ring.VERSION}")
    sites, groups = _texts(data)
    records = data[ring.HEADER_BYTES : ring.HEADER_BYTES + capacity * record_bytes]
    ops = sorted(
        (_op(fields, sites, groups) for fields in ring.RECORD.iter_unpack(records) if fields[0]), key=lambda op: op.number
    )
    state = ring.NUMBER.unpack_from(data, ring.STATE)[0]
    lives: dict[int, Life] = {ring.RUNNING: "running", ring.CLOSED: "closed", ring.ENDED_STATE: "ended"}
    return RankView(
        job=job.rstrip(b"\0").decode(),
        started_unix=unix,
        rank=rank,
        world_size=world,
        ops=tuple(ops),
        groups={group.name: group for group in groups.values()},
        life=lives[state],
        reason=_area(data, "reason"),
        stack=tuple(Site.of(line) for line in _area(data, "stack").splitlines() if line),
        pid=pid,
        pid_started=pid_started,
        host=host.rstrip(b"\0").decode(),
        host_name=host_name.rstrip(b"\0").decode(),
        verdict=_area(data, "verdict"),
        now=max((max(op.issued, op.waited, abs(op.ended)) for op in ops), default=started),
    )


def latest(data: bytes, records: int = 512) -> bytes:
    """The ring with all but its last records blanked, to be sent: it shrinks when compressed."""
    kept = bytearray(data)
    newest = max(fields[0] for fields in ring.RECORD.iter_unpack(kept[ring.HEADER_BYTES : ring.AREA_AT["stack"]]))
    for number in range(max(1, newest - ring.CAPACITY + 1), newest - records + 1):
        at = ring.HEADER_BYTES + number % ring.CAPACITY * ring.RECORD.size
        kept[at : at + ring.RECORD.size] = bytes(ring.RECORD.size)
    return bytes(kept)


def _texts(data: bytes) -> tuple[dict[int, Site], dict[int, GroupView]]:
    sites: dict[int, Site] = {}
    groups: dict[int, GroupView] = {}
    at, end = ring.TEXTS_AT, ring.TEXTS_AT + ring.NUMBER.unpack_from(data, ring.TEXT_USED)[0]
    while at < end:
        size, kind, id = ring.TEXT.unpack_from(data, at)
        text = data[at + ring.TEXT.size : at + ring.TEXT.size + size].decode(errors="replace")
        if kind == ring.SITE:
            sites[id] = Site.of(text)
        elif kind == ring.GROUP:
            name, axis, ranks, device = text.split("\n")
            groups[id] = GroupView(name, axis, tuple(map(int, ranks.split(","))), device)
        at += ring.TEXT.size + size
    return sites, groups


def _area(data: bytes, name: str) -> str:
    at = ring.AREA_AT[name]
    size = ring.NUMBER.unpack_from(data, at)[0]
    return data[at + 8 : at + 8 + size].decode(errors="replace")


def _op(fields: Sequence[int], sites: dict[int, Site], groups: dict[int, GroupView]) -> Op:
    number, issued, waited, ended, elements, seq, site, root, tag, group_id, op, dtype, reduction = fields
    group = groups.get(group_id, GroupView("?", "", ()))
    name = ring.OPS[op]
    return Op(
        number=number,
        op=name,
        group=group.name,
        seq=seq,
        dtype=ring.DTYPES[dtype],
        elements=elements,
        reduction="" if reduction == ring.NO_REDUCTION else ring.REDUCTIONS[reduction],
        root=group.ranks[root] if 0 <= root < len(group.ranks) else -1,
        tag=tag,
        site=sites.get(site, NOWHERE),
        issued=issued,
        waited=waited,
        ended=ended,
    )
