"""Ranks as threads of one process: the transport of tests, examples and laptops. CPU only.

Issuing a call posts this rank's tensors and returns; the last rank to arrive does the work for all, in a fixed order of
summation, so every rank ends with the same bits. Ranks that disagree about what comes next on a group are told so, with both
versions, instead of hanging. The first failure, reported with `abort`, wakes everyone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Lock
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import signature
from phalanx.comm.reduction import reduced
from phalanx.comm.signature import Call
from phalanx.comm.transport import CommError, Done, Group, Handle, ReduceOp, Transport


@dataclass(frozen=True)
class Delay:
    """How long a pretended wire takes, from the arrival of the last rank or, if buffered, from the send.

    Calls on one channel queue behind each other.
    """

    seconds: float = 0.0
    seconds_per_byte: float = 0.0

    def of(self, bytes: int) -> float:
        return self.seconds + self.seconds_per_byte * bytes


class Fabric:
    """What the ranks of one threads world share: the calls that wait for a partner, and the failure that ends them.

    rendezvous  a send completes only when its receive is there, as on NCCL; otherwise it is buffered and completes at once
    delay       pretended duration of every call between ranks; a handle is done only when it has passed
    timeout     seconds that `wait` allows a rank to be late before it raises TimeoutError with the ranks that are missing
    """

    def __init__(self, size: int, *, rendezvous: bool = False, delay: Delay | None = None, timeout: float = 60.0) -> None:
        self.size = size
        self.rendezvous = rendezvous
        self.delay = delay
        self.timeout = timeout
        self.lock = Lock()
        self.failure: BaseException | None = None
        self.meetings: dict[tuple[Any, ...], Meeting] = {}
        self.busy_until: dict[tuple[Any, ...], float] = {}

    def transport(self, rank: int) -> ThreadTransport:
        return ThreadTransport(self, rank)

    def abort(self, reason: BaseException) -> None:
        """End every pending and later call with `reason`; only the first reason counts."""
        with self.lock:
            if self.failure is None:
                self.failure = reason
            for meeting in self.meetings.values():
                meeting.fail(self._aborted(f"{meeting.call.on(meeting.group)} was abandoned"))
            self.meetings.clear()

    def check(self, call: Call, group: Group) -> None:
        if self.failure is not None:
            raise self._aborted(f"{call.on(group)} refused") from self.failure

    def reset(self) -> None:
        """Usable again after an abort. Every rank must have left, and opens a new transport."""
        with self.lock:
            self.failure = None
            self.meetings.clear()
            self.busy_until.clear()

    def _aborted(self, what: str) -> CommError:
        error = CommError(f"{what}: the world was aborted by {self.failure!r}")
        error.__cause__ = self.failure
        return error


class Meeting:
    """One call at which the ranks of a group meet: what each has posted, and how it ended."""

    __slots__ = ("arrived", "call", "changed", "deadline", "failure", "group", "posts", "ready", "sent", "who")

    def __init__(self, call: Call, group: Group, who: tuple[int, ...], lock: Lock) -> None:
        self.call = call
        self.group = group
        self.who = who  # global ranks, by place in `posts`
        self.posts: list[Any] = [None] * len(who)
        self.arrived = 0
        self.ready = False
        self.sent: float | None = None  # when a buffered message left
        self.deadline = 0.0
        self.failure: Exception | None = None
        self.changed = Condition(lock)

    def fail(self, failure: Exception) -> None:
        """Call with the lock held."""
        if not self.ready and self.failure is None:
            self.failure = failure
            self.posts.clear()
            self.changed.notify_all()

    def complete(self, deadline: float) -> None:
        """Call with the lock held."""
        self.posts.clear()
        self.deadline = deadline
        self.ready = True
        self.changed.notify_all()


class ThreadHandle:
    __slots__ = ("_fabric", "_meeting", "_rank")

    def __init__(self, fabric: Fabric, meeting: Meeting, rank: int) -> None:
        self._fabric = fabric
        self._meeting = meeting
        self._rank = rank

    def wait(self) -> None:
        meeting, fabric = self._meeting, self._fabric
        if meeting.ready and time.perf_counter() >= meeting.deadline:
            return
        patience = time.perf_counter() + fabric.timeout
        with fabric.lock:
            while True:
                now = time.perf_counter()
                if meeting.ready:
                    if now >= meeting.deadline:
                        return
                    meeting.changed.wait(meeting.deadline - now)
                    continue
                if meeting.failure is None and now >= patience:
                    meeting.fail(self._missing())
                if meeting.failure is not None:
                    raise _own_copy(meeting.failure)
                meeting.changed.wait(patience - now)

    def synchronize(self) -> None:
        self.wait()

    def done(self) -> bool:
        return self._meeting.ready and time.perf_counter() >= self._meeting.deadline

    def finished(self) -> float | None:
        return self._meeting.deadline if self.done() else None

    def _missing(self) -> Exception:
        meeting = self._meeting
        missing = [str(rank) for rank, post in zip(meeting.who, meeting.posts, strict=True) if post is None]
        return TimeoutError(
            f"{meeting.call.on(meeting.group)}: rank {self._rank} waited {self._fabric.timeout:g} s for "
            f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}, which did not arrive"
        )


class ThreadTransport(Transport):
    """One rank's end of a Fabric."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric = fabric
        self.rank = rank
        self.world_size = fabric.size
        self._position: dict[tuple[Any, ...], int] = {}  # of the next call, for each channel

    def group(self, name: str, ranks: Sequence[int], *, p2p: bool = False) -> Group:
        return Group(name, tuple(ranks))

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        return self._meet(signature.all_reduce(x, group, op), group, (x,))

    def all_gather(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        return self._meet(signature.all_gather(out, x, group), group, (out, x))

    def reduce_scatter(self, out: Tensor, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        return self._meet(signature.reduce_scatter(out, x, group, op), group, (out, x))

    def all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor], group: Group) -> Handle:
        return self._meet(signature.all_to_all(outs, ins, group), group, (tuple(outs), tuple(ins)))

    def broadcast(self, x: Tensor, root: int, group: Group) -> Handle:
        return self._meet(signature.broadcast(x, root, group), group, (x,))

    def reduce(self, x: Tensor, root: int, group: Group, op: ReduceOp = "sum") -> Handle:
        return self._meet(signature.reduce(x, root, group, op), group, (x,))

    def gather(self, out: Tensor | None, x: Tensor, root: int, group: Group) -> Handle:
        return self._meet(signature.gather(out, x, root, group, self.rank), group, (out, x))

    def scatter(self, out: Tensor, x: Tensor | None, root: int, group: Group) -> Handle:
        return self._meet(signature.scatter(out, x, root, group, self.rank), group, (out, x))

    def send(self, x: Tensor, peer: int, group: Group) -> Handle:
        call = signature.message("send", x, peer, group, self.rank)
        ends = (self.rank, group.ranks[peer])
        channel = (group.name, *ends)
        if self.fabric.rendezvous:
            return self._arrive(call, group, channel, ends, 0, (x,))
        # A buffered send has its own copy, unless the receiver already waits and takes it now.
        expected = (channel, self._position.get(channel, 0)) in self.fabric.meetings
        handle = self._arrive(call, group, channel, ends, 0, (x if expected else x.clone(),))
        return handle if expected else Done()

    def recv(self, x: Tensor, peer: int, group: Group) -> Handle:
        call = signature.message("recv", x, peer, group, self.rank)
        ends = (group.ranks[peer], self.rank)
        return self._arrive(call, group, (group.name, *ends), ends, 1, (x,))

    def barrier(self, group: Group) -> Handle:
        return self._meet(signature.barrier(), group, ())

    def close(self) -> None: ...

    def abort(self, reason: BaseException) -> None:
        self.fabric.abort(reason)

    def _meet(self, call: Call, group: Group, post: tuple[Any, ...]) -> Handle:
        if group.size == 1:
            self.fabric.check(call, group)
            if call.op not in _TRIVIAL_ALONE:
                _perform(call, [post])
            return Done()
        return self._arrive(call, group, (group.name, group.ranks), group.ranks, group.index(self.rank), post)

    def _arrive(
        self, call: Call, group: Group, channel: tuple[Any, ...], who: tuple[int, ...], place: int, post: tuple[Any, ...]
    ) -> ThreadHandle:
        """Post at the next position of a channel; the last to arrive does the work and completes the meeting."""
        fabric = self.fabric
        position = self._position.get(channel, 0)
        self._position[channel] = position + 1
        key = (channel, position)
        with fabric.lock:
            fabric.check(call, group)
            meeting = fabric.meetings.get(key)
            if meeting is None:
                meeting = fabric.meetings[key] = Meeting(call, group, who, fabric.lock)
            if meeting.failure is None and meeting.call != call:
                meeting.fail(ValueError(_divergence(meeting, call, self.rank, position)))
            meeting.arrived += 1
            last = meeting.arrived == len(who)
            if last:
                del fabric.meetings[key]
            if meeting.failure is not None:
                raise _own_copy(meeting.failure)
            meeting.posts[place] = post
            if not fabric.rendezvous and call.op == "send/recv" and place == 0:
                meeting.sent = time.perf_counter()
        if last:
            self._finish(meeting, channel)
        return ThreadHandle(fabric, meeting, self.rank)

    def _finish(self, meeting: Meeting, channel: tuple[Any, ...]) -> None:
        fabric = self.fabric
        failure: Exception | None = None
        delay = 0.0
        try:
            if fabric.delay is not None:
                delay = fabric.delay.of(max(_post_bytes(post) for post in meeting.posts))
            _perform(meeting.call, meeting.posts)
        except (ValueError, RuntimeError) as error:  # every rank of the group gets it from its handle
            failure = error
        with fabric.lock:
            if failure is not None:
                meeting.fail(failure)
                return
            deadline = time.perf_counter()
            if delay:
                start = deadline if meeting.sent is None else meeting.sent
                deadline = max(deadline, max(start, fabric.busy_until.get(channel, 0.0)) + delay)
                fabric.busy_until[channel] = deadline
            meeting.complete(deadline)


def _divergence(meeting: Meeting, call: Call, rank: int, position: int) -> str:
    first = next(who for who, post in zip(meeting.who, meeting.posts, strict=True) if post is not None)
    # by rank, not by arrival: the same mistake reads the same every time
    (a, earlier), (b, later) = sorted(((first, str(meeting.call)), (rank, str(call))))
    return (
        f"ranks of group {meeting.group.name!r} disagree about call {position} on it: "
        f"rank {a} issued {earlier}, rank {b} issued {later}"
    )


def _own_copy(failure: Exception) -> Exception:
    """One exception object per rank: threads that raise the same one would mix their tracebacks in it."""
    copy = type(failure)(*failure.args)
    copy.__cause__ = failure.__cause__ if failure.__cause__ is not None else failure
    return copy


def _post_bytes(post: tuple[Any, ...]) -> int:
    tensors = [x for item in post for x in (item if isinstance(item, tuple) else (item,))]
    return max((signature.numbytes(x) for x in tensors), default=0)


# What a call does to the posts of all ranks. Each reads what it needs before it writes what another rank still has to read.

_TRIVIAL_ALONE = frozenset({"all_reduce", "broadcast", "reduce", "barrier"})


def _perform(call: Call, posts: Sequence[Any]) -> None:
    with torch.no_grad():  # the posted tensors may be leaves that require grad
        _PERFORM[call.op](call, posts)


def _all_reduce(call: Call, posts: Sequence[Any]) -> None:
    total = reduced([x for (x,) in posts], call.reduce)
    for (x,) in posts:
        x.copy_(total)


def _reduce(call: Call, posts: Sequence[Any]) -> None:
    assert call.root is not None
    posts[call.root][0].copy_(reduced([x for (x,) in posts], call.reduce))


def _reduce_scatter(call: Call, posts: Sequence[Any]) -> None:
    slices = [x.tensor_split(len(posts)) for _, x in posts]
    totals = [reduced(mine, call.reduce) for mine in zip(*slices, strict=True)]
    for (out, _), total in zip(posts, totals, strict=True):
        out.copy_(total)


def _all_gather(call: Call, posts: Sequence[Any]) -> None:
    for out, _ in posts:
        for slot, (_, x) in zip(out.tensor_split(len(posts)), posts, strict=True):
            if slot.data_ptr() != x.data_ptr():
                slot.copy_(x)


def _all_to_all(call: Call, posts: Sequence[Any]) -> None:
    for receiver, (outs, _) in enumerate(posts):
        for sender, (_, ins) in enumerate(posts):
            if outs[sender].shape != ins[receiver].shape:
                raise ValueError(
                    f"all_to_all: position {sender} sends {tuple(ins[receiver].shape)} to position {receiver}, "
                    f"which expects {tuple(outs[sender].shape)}"
                )
    for receiver, (outs, _) in enumerate(posts):
        for sender, (_, ins) in enumerate(posts):
            outs[sender].copy_(ins[receiver])


def _broadcast(call: Call, posts: Sequence[Any]) -> None:
    assert call.root is not None
    source = posts[call.root][0]
    for (x,) in posts:
        if x is not source:
            x.copy_(source)


def _gather(call: Call, posts: Sequence[Any]) -> None:
    assert call.root is not None
    for slot, (_, x) in zip(posts[call.root][0].tensor_split(len(posts)), posts, strict=True):
        slot.copy_(x)


def _scatter(call: Call, posts: Sequence[Any]) -> None:
    assert call.root is not None
    for piece, (out, _) in zip(posts[call.root][1].tensor_split(len(posts)), posts, strict=True):
        out.copy_(piece)


def _message(call: Call, posts: Sequence[Any]) -> None:
    posts[1][0].copy_(posts[0][0])


def _barrier(call: Call, posts: Sequence[Any]) -> None: ...


_PERFORM: dict[str, Callable[[Call, Sequence[Any]], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "send/recv": _message,
    "barrier": _barrier,
}
