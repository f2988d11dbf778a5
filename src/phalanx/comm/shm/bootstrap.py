"""Opening a group: every rank maps the memory of every other, or all of them learn why they cannot.

Ranks talk through the group's store: one key each to say who they are, then for ranks that have not met before two keys each per
way of reaching memory, until all agree that one way served everybody. Ranks that have met need the first key only, so that a group
among them costs one exchange. What they say is the same for all, so all decide alike.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from phalanx.comm.shm import Unavailable, _core
from phalanx.comm.shm.group import SharedGroup
from phalanx.comm.shm.sites import forget_sites
from phalanx.comm.transport import CommError

MEMFD_MAX = 256 << 30  # address space that a segment takes in every peer: 256 of them fit into 47 bits
FILE_MAX = 64 << 20  # of /dev/shm, which is reserved at once
FILE_MIN = 16 << 20


@dataclass(frozen=True)
class Host:
    """What ranks must have in common to reach each other's memory and to see each other die."""

    boot: str  # of the running kernel
    processes: str  # the namespace in which process numbers mean something
    user: int


def this_host() -> Host:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return Host(boot, os.readlink("/proc/self/ns/pid"), os.getuid())


@dataclass
class Segment:
    """The memory that this process shows to its peers, and theirs that it has mapped. One per process."""

    nonce: int
    descriptor: int
    peers: dict[int, int] = field(default_factory=dict)
    """The core's number of a peer, by the nonce of its segment."""


_segment: Segment | None = None


def segment() -> Segment:
    """This process's segment, made at first use; a forked child makes its own. OSError."""
    if _segment is None or not _core.started():
        return _start(None, min(MEMFD_MAX, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    return _segment


def _start(path: str | None, size: int) -> Segment:
    global _segment
    nonce = secrets.randbits(64)
    forget_sites()
    _segment = Segment(nonce, _core.start(path, size, nonce))
    return _segment


@dataclass
class Offer:
    """What peers need to know to open a process's memory in one of the ways."""

    pid: int
    nonce: int
    where: str


class Way(Protocol):
    """A way to reach the memory of peers."""

    def offer(self) -> Offer:
        """Make this process's segment reachable. OSError or the core's Error if that fails."""

    def reach(self, peer: Offer) -> int:
        """A descriptor of a peer's segment. OSError."""

    def close(self) -> None:
        """Withdraw the offer: all have come, or the way was given up."""


class ThroughProc:
    """Open /proc/PID/fd/N. Needs to be the same user, and a process that may be inspected."""

    def offer(self) -> Offer:
        mine = segment()
        return Offer(os.getpid(), mine.nonce, str(mine.descriptor))

    def reach(self, peer: Offer) -> int:
        return os.open(f"/proc/{peer.pid}/fd/{peer.where}", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None: ...


class ThroughSocket:
    """Be handed the descriptor through a socket, by a thread that serves until all have come. Needs the same network namespace."""

    def offer(self) -> Offer:
        mine = segment()
        name = f"phalanx-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}")
        self._listener.listen(1024)
        self._thread = threading.Thread(target=self._serve, args=(mine.descriptor,), name="phalanx-shm-socket", daemon=True)
        self._thread.start()
        return Offer(os.getpid(), mine.nonce, name)

    def _serve(self, descriptor: int) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection, suppress(OSError):
                if _user_of(connection) == os.getuid():
                    socket.send_fds(connection, [b"."], [descriptor])

    def reach(self, peer: Offer) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10.0)
            connection.connect(f"\0{peer.where}")
            if _user_of(connection) != os.getuid():
                raise PermissionError(f"the socket {peer.where} belongs to another user")
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            if len(descriptors) != 1:
                raise ConnectionError(f"process {peer.pid} sent no descriptor")
            return descriptors[0]

    def close(self) -> None:
        if hasattr(self, "_thread"):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            self._thread.join()
            self._listener.close()


def _user_of(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)


class ThroughFile:
    """Make a new segment, a file in /dev/shm that is removed as soon as all have it. The former stays for those who know it."""

    path: str | None = None

    def offer(self) -> Offer:
        disk = os.statvfs("/dev/shm")
        size = min(FILE_MAX, disk.f_bavail * disk.f_frsize // 16) // 4096 * 4096
        if size < FILE_MIN:
            raise OSError(f"/dev/shm has {disk.f_bavail * disk.f_frsize >> 20} MiB left, which is too little for 16 ranks")
        path = f"/dev/shm/phalanx-{secrets.token_hex(16)}"
        mine = _start(path, size)
        self.path = path
        os.posix_fallocate(mine.descriptor, 0, size)  # else a full /dev/shm would kill the process that touches it
        return Offer(os.getpid(), mine.nonce, path)

    def reach(self, peer: Offer) -> int:
        return os.open(peer.where, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def close(self) -> None:
        if self.path is not None:
            os.unlink(self.path)


WAYS: dict[str, type[Way]] = {"proc": ThroughProc, "socket": ThroughSocket, "file": ThroughFile}


def open_group(
    store: Store,
    rank: int,
    ranks: tuple[int, ...],
    name: str,
    timeout: float,
    ways: Sequence[str] = tuple(WAYS),
    host: Host | None = None,
) -> SharedGroup:
    """Open a group. `rank` is this process's position in `ranks`, which are global; every rank calls it, with the same `ways`.

    Unavailable, on all ranks, if they do not share a host or no way to their memory serves all of them; CommError if a rank does
    not come within `timeout` seconds or dies meanwhile.
    """
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise ValueError(f"no way to reach memory is called {unknown[0]!r}; there are {', '.join(WAYS)}")
    meeting = Meeting(store, rank, ranks, name, timeout)
    hellos = meeting.exchange("hello", _hello(len(ranks), rank, host))
    _check_hosts(hellos, meeting)
    nonces = [hello["nonce"] for hello in hellos]
    control = hellos[0]["control"]
    if any(other not in hello["known"] for hello in hellos for other in nonces if other != hello["nonce"]):
        nonces, control = _meet(meeting, control, ways)
    elif control is None:  # a group of one
        control = _core.control(len(ranks))
    mine = segment()
    peers = tuple(-1 if position == rank else mine.peers[nonce] for position, nonce in enumerate(nonces))
    return SharedGroup(_core.open_group(control, rank, peers, ranks, name), rank, ranks, name)


class Meeting:
    """The ranks of a group to be, talking through a store."""

    def __init__(self, store: Store, rank: int, ranks: tuple[int, ...], name: str, timeout: float) -> None:
        self.store, self.rank, self.ranks, self.name = store, rank, ranks, name
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.pids: list[int] = []  # by position, once they have said so
        # A group may be opened under the same prefix again, after it was destroyed: do not read what was said then.
        self.visit = store.add(f"visits/{rank}", 1) if len(ranks) > 1 else 0

    def exchange(self, step: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says in this step, by position."""
        if len(self.ranks) == 1:
            return [mine]
        keys = [f"{self.visit}/{step}/{position}" for position in range(len(self.ranks))]
        self.store.set(keys[self.rank], json.dumps(mine))
        while True:
            seconds = max(0.001, min(1.0, self.deadline - time.monotonic()))
            try:
                self.store.wait(keys, timedelta(seconds=seconds))
                break
            except RuntimeError as error:  # not all stores raise DistStoreError when the time is over
                if isinstance(error, dist.DistNetworkError):
                    raise
                self._look_for(step, [position for position, key in enumerate(keys) if not self.store.check([key])])
        said = [json.loads(text) for text in self.store.multi_get(keys)]
        self.pids = [word["pid"] for word in said] if step == "hello" else self.pids
        return said

    def _look_for(self, step: str, missing: list[int]) -> None:
        gone = [position for position in missing if self.pids and _has_ended(self.pids[position])]
        late = missing if time.monotonic() >= self.deadline else []
        if gone or late:
            what = f"died (process {self.pids[gone[0]]})" if gone else f"did not come within {self.timeout:g} s"
            raise CommError(f"{self}: {self.names(gone or late)} {what}, at the step {step!r}")

    def names(self, positions: list[int]) -> str:
        ranks = [str(self.ranks[position]) for position in positions]
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"

    def __str__(self) -> str:
        return f"opening group {self.name!r} of ranks {', '.join(map(str, self.ranks))} through shared memory"


def _has_ended(pid: int) -> bool:
    """A zombie has: it answers to signal 0, but not here."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # not supported: the deadline will tell
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)


def _hello(size: int, rank: int, host: Host | None) -> dict[str, Any]:
    try:
        mine = segment()
        identity = asdict(host or this_host())
    except (OSError, _core.Error) as error:
        return {"pid": os.getpid(), "failure": str(error)}
    # Position 0 makes the control block at once if this is hardly its first group: then all are likely to know each other.
    control = _core.control(size) if rank == 0 and mine.peers else None
    known = [mine.nonce, *mine.peers]
    return {"pid": os.getpid(), "host": identity, "nonce": mine.nonce, "known": known, "control": control}


def _check_hosts(hellos: list[dict[str, Any]], meeting: Meeting) -> None:
    for position, hello in enumerate(hellos):
        if "failure" in hello:
            raise Unavailable(f"{meeting}: {meeting.names([position])} cannot make its segment: {hello['failure']}")
    for position, hello in enumerate(hellos):
        for what, value in hello["host"].items():
            first = hellos[0]["host"][what]
            if value != first:
                names = {"boot": "hosts (boot id)", "processes": "PID namespaces", "user": "users (uid)"}
                raise Unavailable(
                    f"{meeting}: ranks {meeting.ranks[0]} and {meeting.ranks[position]} run in different {names[what]}: "
                    f"{first} and {value}"
                )


def _meet(meeting: Meeting, control: int | None, ways: Sequence[str]) -> tuple[list[int], int]:
    """Map the segments that are new, in the first way that serves all ranks: nonces by position, and the control block."""
    failures: list[str] = []
    for name in ways:
        way = WAYS[name]()
        try:
            offers = meeting.exchange(f"{name} offer", _offer(way))
            problems = [f"{meeting.names([i])}: {offer['failure']}" for i, offer in enumerate(offers) if "failure" in offer]
            if not problems:
                peers = [Offer(**offer) for offer in offers]
                report: dict[str, Any] = {"problem": _attach_all(way, peers, meeting), "control": control}
                if meeting.rank == 0 and control is None and not report["problem"]:
                    report["control"] = _core.control(len(meeting.ranks))
                reports = meeting.exchange(f"{name} report", report)
                control = reports[0]["control"]
                problems = [f"{meeting.names([i])}: {said['problem']}" for i, said in enumerate(reports) if said["problem"]]
                if not problems:
                    assert control is not None
                    return [peer.nonce for peer in peers], control
            failures.append(f"through {name}, {problems[0]}")
        finally:
            way.close()
    raise Unavailable(f"{meeting}: no way to reach their memory serves all ranks: {'; '.join(failures)}")


def _offer(way: Way) -> dict[str, Any]:
    try:
        return asdict(way.offer())
    except (OSError, _core.Error) as error:
        return {"failure": str(error)}


def _attach_all(way: Way, peers: list[Offer], meeting: Meeting) -> str:
    """Map what is new; why that failed, or nothing."""
    mine = segment()
    for position, peer in enumerate(peers):
        if position == meeting.rank or peer.nonce in mine.peers:
            continue
        try:
            descriptor = way.reach(peer)
            try:
                mine.peers[peer.nonce] = _core.attach(descriptor, peer.pid, peer.nonce)
            finally:
                os.close(descriptor)
        except (OSError, _core.Error) as error:
            return f"cannot map the memory of {meeting.names([position])} (process {peer.pid}): {error}"
    return ""
