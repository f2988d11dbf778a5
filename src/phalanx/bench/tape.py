"""The communication of a step by itself, and the step without it: a tape of its calls, and a transport that sends nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from phalanx.bench.hierarchy import call
from phalanx.comm.ledger import Ledger, Recorded
from phalanx.comm.signature import numbytes
from phalanx.comm.transport import Done, Group, Handle, ReduceOp, Transport
from phalanx.comm.world import World

SCALARS_BYTES = 64
"""At most, of the count of tokens and of loss, norm and count together."""
FRACTION = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Times (n-1)/n of the payload is what leaves each of n ranks."""


@dataclass(frozen=True)
class Issued:
    """A call. bytes: the larger of its input and output on this rank; segment: what it was for, None for the step's scalars."""

    op: str
    group: Group
    bytes: int
    segment: str | None

    @property
    def crossing(self) -> float:
        """Bytes that leave this rank."""
        return FRACTION[self.op] * (self.group.size - 1) / self.group.size * self.bytes


class Tape(Ledger):
    """A ledger that notes the first wait for each call as well, and how long it blocked.

    moves  in order: a call that was issued, or the place of the call that was waited for
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.moves: list[Issued | int] = []
        self.blocked: dict[int, float] = {}
        """By call, the seconds of its first wait."""

    @property
    def calls(self) -> list[Issued]:
        return [move for move in self.moves if isinstance(move, Issued)]

    @property
    def crossing(self) -> float:
        """Bytes that leave this rank."""
        return sum(issued.crossing for issued in self.calls)

    @contextmanager
    def of(self, world: World) -> Iterator[None]:
        """Note what a rank calls inside the block."""
        before = world.ledger
        world.ledger = world.transport.ledger = self
        self.start()
        try:
            yield
        finally:
            self.stop()
            world.ledger = world.transport.ledger = before

    def issue(self, op: str, group: Group, bytes: int, call: Callable[[], Handle]) -> Handle:
        if group.size == 1:
            return call()
        place = len(self.calls)
        self.moves.append(Issued(op, group, bytes, self._origin.segment))
        return _Noted(super().issue(op, group, bytes, call), self, place)

    def stops(self, number: int) -> list[tuple[str, float]]:
        """What blocked longest, above a millisecond: (the call and its segment, seconds)."""
        calls = self.calls
        longest = sorted(self.blocked.items(), key=lambda item: -item[1])[:number]
        return [(f"{calls[n].op} of {calls[n].segment or 'the step'}", seconds) for n, seconds in longest if seconds > 1e-3]

    def __str__(self) -> str:
        ops = sorted({issued.op for issued in self.calls})
        said = [(op, [issued for issued in self.calls if issued.op == op]) for op in ops]
        parts = [f"{len(found)} {op} of {sum(issued.bytes for issued in found) / 1e6:.1f} MB" for op, found in said]
        return f"{', '.join(parts)}; {self.crossing / 1e6:.1f} MB each way"


class _Noted:
    """A handle whose first wait is written on the tape."""

    def __init__(self, handle: Handle, tape: Tape, place: int) -> None:
        self.handle, self.tape, self.place = handle, tape, place
        self.done, self.finished = handle.done, handle.finished

    def wait(self) -> None:
        if self.place in self.tape.blocked:
            self.handle.wait()
            return
        self.tape.moves.append(self.place)
        start = time.perf_counter()
        self.handle.wait()
        self.tape.blocked[self.place] = time.perf_counter() - start

    def synchronize(self) -> None:
        self.wait()


def replay(tape: Tape, transport: Transport) -> Callable[[], None]:
    """The calls of a tape on buffers of their own, waited for where the tape has it."""
    prepared = [move if isinstance(move, int) else call(move.op, transport, move.group, move.bytes // 4) for move in tape.moves]

    def run() -> None:
        handles: list[Handle] = []
        for move in prepared:
            if isinstance(move, int):
                handles[move].wait()
            else:
                handles.append(move())
        for handle in handles:
            handle.wait()

    return run


class Alone(Recorded):
    """A transport on which the other ranks seem to have nothing to add: a sum is its own term, a gather repeats the own slice.

    Only the step's scalars are sent, since ranks must agree on them.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner, Ledger(inner))

    @contextmanager
    def of(self, world: World) -> Iterator[None]:
        """A rank's calls inside the block come here."""
        before, world.transport.inner = world.transport.inner, self
        try:
            yield
        finally:
            world.transport.inner = before

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        return Done() if numbytes(x) > SCALARS_BYTES else self.inner.all_reduce(x, group, op)

    def all_gather(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        for slot in out.view(group.size, -1):
            _copy(slot, x.view(-1))
        return Done()

    def reduce_scatter(self, out: Tensor, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        _copy(out.view(-1), x.view(group.size, -1)[group.index(self.rank)])
        return Done()


def _copy(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
