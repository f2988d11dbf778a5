"""How the views of all ranks come together: rings of this host are read, other hosts are asked through the store.

A process of this host is known to be gone from /proc, at once. One of another host is silent if it does not answer.
"""

from __future__ import annotations

import os
import signal
import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.comm.watch import ring as rings
from phalanx.comm.watch.snapshot import RankView, latest, parse

FLIGHT = "flight"
"""The folder of the rings inside a run's folder."""
_SENT = struct.Struct("<Qq")  # which question this answers, and when


def ring_path(folder: Path, rank: int) -> Path:
    return folder / FLIGHT / f"rank{rank}.ring"


class Collector:
    """One rank's way to the views of all ranks of its job."""

    def __init__(self, folder: Path, ring: rings.Ring, store: Any) -> None:
        self.folder, self.ring, self.store = folder, ring, store
        self.me = ring.identity
        self._hosts_key = f"hosts/{self.me.host}"
        self._answered = 0
        self._asked = 0
        store.add(self._hosts_key, 1)
        self._alone: bool | None = None

    @property
    def one_host(self) -> bool:
        """True once all ranks are known to be on this host: then the store is not used any more."""
        if not self._alone:
            self._alone = self.store.add(self._hosts_key, 0) >= self.me.world_size
        return self._alone

    def ask(self) -> None:
        """Ask every other rank to say where it is."""
        now = time.monotonic_ns()
        for rank in range(self.me.world_size):
            path = ring_path(self.folder, rank)
            if rank != self.me.rank and path.exists():
                with open(path, "r+b", buffering=0) as file:
                    os.pwrite(file.fileno(), rings.NUMBER.pack(now), rings.ASKED)
        if not self.one_host:
            self._asked = self.store.add("asked", 1)

    def asked(self) -> bool:
        """True if another rank of this host wants to know where this one is."""
        return self.ring.word(rings.ASKED) > self.ring.word(rings.ANSWERED)

    def answer_other_hosts(self) -> None:
        """Publish the ring if a rank of another host asked."""
        if self.one_host:
            return
        asked = self.store.add("asked", 0)
        if asked > self._answered:
            self._answered = asked
            self.store.set(
                f"ring/{self.me.rank}", _SENT.pack(asked, time.monotonic_ns()) + zlib.compress(latest(self.ring.bytes()), 1)
            )

    def views(self) -> dict[int, RankView]:
        """A view of every rank that can be had now. Who is on another host and did not answer is `silent`."""
        now = time.monotonic_ns()
        found = {view.rank: replace(view, now=now) for view in local_views(self.folder, self.me.job, self.me.host)}
        if not self.one_host:
            for rank in set(range(self.me.world_size)) - set(found):
                found[rank] = self._remote(rank)
        return found

    def _remote(self, rank: int) -> RankView:
        key = f"ring/{rank}"
        if not self.store.check([key]):
            return RankView(rank, self.me.world_size, life="silent")
        data = self.store.get(key)
        asked, now = _SENT.unpack_from(data)
        view = replace(parse(zlib.decompress(data[_SENT.size :])), now=now)  # on that host's clock, as its operations are
        if view.life == "running" and asked < self._asked - 1:
            return replace(view, life="silent")
        return view


def local_views(folder: Path, job: str, host: str) -> Iterable[RankView]:
    """The views of the ranks of `job` whose rings lie in `folder` and that run, or ran, on this host."""
    for path in sorted((folder / FLIGHT).glob("rank*.ring")):
        try:
            view = parse(path.read_bytes())
        except (ValueError, FileNotFoundError):
            continue
        if view.job == job and view.host == host:
            yield with_life(view)


def with_life(view: RankView) -> RankView:
    """The view with what /proc says of its process. Only for processes of this host."""
    if view.life != "running":
        return view
    try:
        fields = Path(f"/proc/{view.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return replace(view, life="died")
    state, started = fields[0], int(fields[19])
    if started != view.pid_started:
        return replace(view, life="died")
    if state in ("Z", "X"):
        return replace(view, life="died", reason=_cause(int(fields[49])) or view.reason)
    if state in ("T", "t"):
        return replace(view, reason="stopped by a signal")
    return view


def _cause(status: int) -> str:
    """Of a process that ended but was not waited for yet; 0 may also mean that we are not allowed to know."""
    if status & 0x7F:
        return f"killed by {signal.Signals(status & 0x7F).name}"
    return f"exit code {status >> 8}" if status else ""


def host_identity() -> str:
    """Equal for processes that share memory, a clock and process numbers: boot and process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot[:23]}-{os.stat('/proc/self/ns/pid').st_ino}"
