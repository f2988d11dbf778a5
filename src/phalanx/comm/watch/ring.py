"""The flight ring: the last operations of one rank in a file that is mapped, so that it survives the process.

    header | records, a ring of `CAPACITY` | areas that are overwritten (stack, verdict, reason) | texts, appended

All numbers are little endian. A record costs one `pack_into`; nothing is flushed, because the page cache outlives the process
(though not the machine). Times are CLOCK_MONOTONIC in nanoseconds, one clock for all ranks of a host.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

MAGIC, VERSION = b"PHXRING1", 1
CAPACITY, HEADER_BYTES = 4096, 4096
TEXT_BYTES = 1 << 18

# magic, version, record bytes, capacity, text bytes, rank, world size, pid, start of the process in clock ticks since boot,
# start of the ring on CLOCK_MONOTONIC and in Unix time, job, host identity, host name
HEADER = struct.Struct("<8s7IQqq32s64s64s")
# number from 1 (0: never written), issued, waited (0: nobody waited), ended (0: in flight; negative: failed then), elements,
# sequence number, call site, root or peer as a group rank (-1: none), tag, group, op, dtype, reduction
RECORD = struct.Struct("<QqqqqQIiiHBBB7x")
WAITED_ENDED, ENDED = struct.Struct("<qq"), struct.Struct("<q")
WAITED_AT, ENDED_AT = 16, 24
NUMBER = struct.Struct("<Q")
TEXT = struct.Struct("<IHH")  # bytes, kind, id

# Live words of the header, 8 bytes each.
TEXT_USED, STATE, ASKED, ANSWERED = 512, 520, 528, 536
RUNNING, CLOSED, ENDED_STATE = 0, 1, 2  # closed: its default group was destroyed; ended: the interpreter came to its end

AREAS = {"stack": 16384, "verdict": 8192, "reason": 2048}
AREA_AT: dict[str, int] = {}
_at = HEADER_BYTES + CAPACITY * RECORD.size
for _name, _bytes in AREAS.items():
    AREA_AT[_name] = _at
    _at += _bytes
TEXTS_AT = _at
FILE_BYTES = TEXTS_AT + TEXT_BYTES

SITE, GROUP = 1, 2  # kinds of texts

# Looked up once: a record is written for every operation.
_RECORD_BYTES = RECORD.size
_pack, _pack_time, _now = RECORD.pack_into, ENDED.pack_into, time.monotonic_ns

OPS = (
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
    "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_coalesced", "all_to_all_single",
    "all_to_all", "barrier", "send", "recv", "recv_any", "new_group", "destroy",
)  # fmt: skip
OP = {name: number for number, name in enumerate(OPS)}
DTYPES = ("", *sorted({str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)}))
DTYPE = {x: DTYPES.index(str(x).removeprefix("torch.")) for x in vars(torch).values() if isinstance(x, torch.dtype)}
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
NO_REDUCTION = 255


class Identity(NamedTuple):
    """Who writes a ring. `host` is the same for ranks that share memory, a clock and process numbers."""

    job: str
    rank: int
    world_size: int
    pid: int
    pid_started: int
    started: int
    started_unix: int
    host: str
    host_name: str


class Ring:
    """The writer's end. One per process; any thread may record."""

    def __init__(self, path: Path, job: str, rank: int, world_size: int, host: str) -> None:
        self.path = path
        self.identity = Identity(
            job,
            rank,
            world_size,
            os.getpid(),
            pid_started(os.getpid()),
            time.monotonic_ns(),
            time.time_ns(),
            host,
            os.uname().nodename,
        )
        # Written under another name first: whoever finds the ring finds its header.
        unfinished = path.with_suffix(f".{os.getpid()}")
        with open(unfinished, "w+b") as file:
            file.truncate(FILE_BYTES)
            self._map = mmap.mmap(file.fileno(), FILE_BYTES)
        who = self.identity
        HEADER.pack_into(
            self._map, 0, MAGIC, VERSION, RECORD.size, CAPACITY, TEXT_BYTES, rank, world_size, who.pid, who.pid_started,
            who.started, who.started_unix, job.encode(), host.encode(), who.host_name.encode()[:64]
        )  # fmt: skip
        unfinished.rename(path)
        self._numbers = count(1)
        self._latest = 0
        self._ids = {SITE: count(1), GROUP: count(1)}
        self._text_used = 0
        self._text_lock = threading.Lock()

    def record(
        self,
        op: int,
        group: int,
        seq: int,
        dtype: int,
        elements: int,
        reduction: int,
        root: int,
        tag: int,
        site: int,
        waits: bool,
    ) -> int:
        """Write that an operation is issued; returns its number. `waits`: the caller blocks in it from now on."""
        number = self._latest = next(self._numbers)
        now = _now()
        _pack(
            self._map, HEADER_BYTES + number % CAPACITY * _RECORD_BYTES,
            number, now, now if waits else 0, 0, elements, seq, site, root, tag, group, op, dtype, reduction
        )  # fmt: skip
        return number

    def end(self, number: int) -> None:
        """The operation has completed."""
        if self._latest - number < CAPACITY:
            _pack_time(self._map, HEADER_BYTES + ENDED_AT + number % CAPACITY * _RECORD_BYTES, _now())

    def fail(self, number: int) -> None:
        """The operation has raised."""
        if self._latest - number < CAPACITY:
            at = HEADER_BYTES + number % CAPACITY * RECORD.size + ENDED_AT
            ENDED.pack_into(self._map, at, -time.monotonic_ns())

    def wait(self, number: int) -> None:
        """Somebody waits for the operation, from now on."""
        if self._latest - number < CAPACITY:
            at = HEADER_BYTES + number % CAPACITY * RECORD.size + WAITED_AT
            ENDED.pack_into(self._map, at, time.monotonic_ns())

    def text(self, kind: int, text: str) -> int:
        """Append a text and return its id; 0 if there is no room left."""
        return self._append(kind, next(self._ids[kind]), text)

    def amend(self, kind: int, id: int, text: str) -> None:
        """Replace the text `id`: the last one of an id counts."""
        self._append(kind, id, text)

    def _append(self, kind: int, id: int, text: str) -> int:
        data = text.encode(errors="replace")
        with self._text_lock:
            room = TEXT.size + len(data)
            if self._text_used + room > TEXT_BYTES or id > 0xFFFF:
                return 0
            at = TEXTS_AT + self._text_used
            TEXT.pack_into(self._map, at, len(data), kind, id)
            self._map[at + TEXT.size : at + room] = data
            self._text_used += room
            NUMBER.pack_into(self._map, TEXT_USED, self._text_used)
        return id

    def write_area(self, name: str, text: str) -> None:
        data = text.encode(errors="replace")[: AREAS[name] - 8]
        at = AREA_AT[name]
        self._map[at + 8 : at + 8 + len(data)] = data
        NUMBER.pack_into(self._map, at, len(data))

    def word(self, at: int) -> int:
        value: int = NUMBER.unpack_from(self._map, at)[0]
        return value

    def set_word(self, at: int, value: int) -> None:
        NUMBER.pack_into(self._map, at, value)

    def waited_since(self) -> int | None:
        """Since when the operation is waited for that has been waited for longest; None if there is none. Of the latest 256."""
        oldest: int | None = None
        for number in range(max(1, self._latest - 255), self._latest + 1):
            at = HEADER_BYTES + number % CAPACITY * RECORD.size
            waited, ended = WAITED_ENDED.unpack_from(self._map, at + WAITED_AT)
            if waited and not ended and (oldest is None or waited < oldest):
                oldest = waited
        return oldest

    def name_message(self, number: int, source: int, seq: int) -> None:
        """A receive from anybody got its message: from whom, and which of that rank's messages it is."""
        if self._latest - number < CAPACITY:
            at = HEADER_BYTES + number % CAPACITY * RECORD.size
            fields = list(RECORD.unpack_from(self._map, at))
            fields[5], fields[7], fields[10] = seq, source, OP["recv"]
            RECORD.pack_into(self._map, at, *fields)

    def bytes(self) -> bytes:
        return self._map[:]


def group_text(name: str, axis: str, ranks: Sequence[int], device: str) -> str:
    """How a ring tells of a group: name, what it is for, its global ranks, and whether a wait blocks the host."""
    return "\n".join([name, axis, ",".join(map(str, ranks)), device])


def pid_started(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the number, the identity of a process. 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
