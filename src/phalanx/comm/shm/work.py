"""Operations in flight. A Flight owns the operation's memory until it is done, whoever still holds it; Work is c10d's view of it.

Most flights are waited for, and whoever waits does what remains. Those that somebody must be told of (futures), that leave
something to do (results to copy back) or that were dropped early are watched by one thread per process, which sleeps in the core.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.shm import _core
from phalanx.comm.shm.group import SharedGroup, close_all
from phalanx.comm.transport import CommError

PENDING = 0


class Flight:
    """One operation of the core, as a handle of phalanx.comm.transport.

    `keep` is whatever must stay in memory until it is done; `finish` runs once, right after it is done and before anybody is
    told so.
    """

    __slots__ = ("_callbacks", "_finish", "_keep", "_lock", "_watched", "dropped", "failure", "group", "op", "settled")

    def __init__(self, group: SharedGroup, op: int, keep: object, finish: Callable[[], None] | None = None) -> None:
        self.group = group
        self.op = op
        self._keep = keep
        self._finish = finish
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._watched = self.dropped = self.settled = False
        self.failure: str | None = None
        if finish is not None:
            self.watch()

    def wait(self, seconds: float = -1.0) -> None:
        """Block until it is done, CommError if it failed; or, if seconds >= 0, CommError after them and it goes on."""
        if not self.settled:
            handles = self.group.handles
            try:
                handles.wait(self.op, seconds)
            except _core.Error as error:
                if handles.test(self.op) == PENDING:
                    raise CommError(str(error)) from None
                self.settle(str(error))
            else:
                self.settle(None)
        if self.failure is not None:
            raise CommError(self.failure)

    synchronize = wait

    def done(self) -> bool:
        """True once it is done or has failed; never blocks."""
        if not self.settled and self.group.handles.test(self.op) != PENDING:
            self.settle(self.group.handles.error(self.op))
        return self.settled

    def finished(self) -> float | None:
        """When it was done, on the clock of time.perf_counter; None while it is in flight."""
        return self.group.handles.finished(self.op) if self.done() else None

    def settle(self, failure: str | None) -> None:
        """What remains once the core has done it or given it up. Whoever comes second waits for the first."""
        with self._lock:
            if self.settled:
                return
            if self._finish is not None and failure is None:
                try:
                    self._finish()
                except RuntimeError as error:
                    failure = str(error)
            self.failure = failure
            self.settled = True
            self._keep = self._finish = None
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call it once this is settled, in whichever thread finds out; at once if it is."""
        with self._lock:
            late = self.settled
            if not late:
                self._callbacks.append(callback)
        if late:
            callback()
        else:
            self.watch()

    def watch(self) -> None:
        with self._lock:
            watched, self._watched = self._watched, True
        if not watched:
            _completer.watch(self)

    def release(self) -> None:
        self.group.handles.release(self.op)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # the interpreter, and with it all that is used here
            return
        # Watched ones are alive, so nobody else looks at this one. If it is pending, watching it brings it to life again.
        if not self.settled and self.group.handles.test(self.op) == PENDING:
            self.dropped = True  # __del__ runs once in a life: the completer releases it
            _completer.watch(self)
        elif not self.dropped:
            self.release()


class Completer:
    """Settles the flights it is given as they are done."""

    def __init__(self) -> None:
        self._inbox: deque[Flight] = deque()  # without a lock: `watch` may run in a garbage collection, anywhere
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def watch(self, flight: Flight) -> None:
        self._inbox.append(flight)
        if self._thread is None and self._starting.acquire(blocking=False):
            self._thread = threading.Thread(target=self._run, name="phalanx-shm", daemon=True)
            self._thread.start()
        _core.nudge()

    def stop(self) -> None:
        """Return when all flights are settled; they are to be done or to have failed."""
        self._stopping = True
        if self._thread is not None:
            _core.nudge()
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        flights: list[Flight] = []
        while True:
            while self._inbox:
                flights.append(self._inbox.popleft())
            if self._stopping and not flights:
                return
            first = _core.wait_any(tuple(flight.op for flight in flights), -1.0)
            if first >= 0:
                self._settle(flights.pop(first))

    def _settle(self, flight: Flight) -> None:
        flight.settle(_core.error(flight.op))
        if flight.dropped:
            flight.release()


_completer = Completer()


def _in_forked_child() -> None:
    global _completer
    _completer = Completer()  # the thread of the other is not here


def _at_exit() -> None:
    close_all()
    _completer.stop()


os.register_at_fork(after_in_child=_in_forked_child)
atexit.register(_at_exit)


class Work(dist.Work):
    """What c10d's callers hold: the flights of one call, and the tensors that it gives."""

    def __init__(self, flights: tuple[Flight, ...], result: list[Tensor]) -> None:
        super().__init__()
        self._flights = flights
        self.tensors = result
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done. CommError if it failed, or after `timeout`; zero is none, as in C++."""
        seconds = timeout.total_seconds() if timeout else -1.0
        for flight in self._flights:
            flight.wait(seconds)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(flight.done() for flight in self._flights)

    def is_success(self) -> bool:
        return self.is_completed() and self._failure() is None

    def exception(self) -> BaseException | None:
        failure = self._failure()
        return None if failure is None else CommError(failure)

    def _failure(self) -> str | None:
        return next((flight.failure for flight in self._flights if flight.done() and flight.failure is not None), None)

    def result(self) -> list[Tensor]:
        self.wait()
        return self.tensors

    def source_rank(self) -> int:
        """Position in the group of the sender of a message that was received."""
        self.wait()
        return int(self._flights[0].group.handles.source(self._flights[0].op))

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors that the call gives."""
        if self._future is None:
            self._future = WorkFuture(self)
            _resolve(self, self._future)
        return self._future


class WorkFuture(torch.futures.Future[Any]):
    """A callback may wait for the future of another call: in the completer's thread nobody else would settle that."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._flights = work._flights

    def wait(self) -> Any:
        for flight in self._flights:
            if not flight.settled:
                try:
                    flight.wait()
                except CommError:
                    break  # the future has it too
        return super().wait()


def _resolve(work: Work, future: torch.futures.Future[Any]) -> None:
    """Set the future when the last of its flights is settled."""
    flights, result = work._flights, work.tensors
    is_last = [True, *[False] * (len(flights) - 1)]  # popping from a list is atomic: the last to be settled gets the True

    def settled() -> None:
        if is_last.pop():
            failure = next((flight.failure for flight in flights if flight.failure is not None), None)
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(CommError(failure))

    if not flights:
        future.set_result(result)
    for flight in flights:
        flight.when_settled(settled)
