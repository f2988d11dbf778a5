"""A handle that writes into the ring what becomes of its operation, and turns a failure into a verdict."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from phalanx.comm.watch.process_group import ProcessGroup

_NO_TIMEOUT = timedelta(0)


class Work(dist._Work):  # type: ignore[misc, name-defined]
    """The inner handle, watched. `number` is that of the operation in the ring."""

    def __init__(self, group: ProcessGroup, number: int, inner: Any) -> None:
        super().__init__()
        self._group, self._number, self._inner = group, number, inner
        self._waited = group.runs_ahead
        self._over = False

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if not self._waited:
            self._waited = True
            self._group.ring.wait(self._number)
        try:
            done: bool = self._inner.wait(timeout) if timeout else self._inner.wait()
        except RuntimeError as error:
            self._over = True
            raise self._group.failure(self._number, error) from error
        if not self._over and (not self._group.runs_ahead or self._inner.is_completed()):
            self._over = True
            self._group.completed(self._number, self._inner)
        return done

    def over(self) -> bool:
        """True once the operation has completed; writes the end down when it is first seen."""
        if not self._over and self._inner.is_completed():
            self._over = True
            self._group.ring.end(self._number)
        return self._over

    def is_completed(self) -> bool:
        return self.over()

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._inner.result()

    def source_rank(self) -> int:
        return int(self._inner._source_rank())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        # Whoever holds the future waits for it out of our sight.
        if not self._waited:
            self._waited = True
            self._group.ring.wait(self._number)
            self._group.watch.expect(self._number, weakref.ref(self))
        future: torch.futures.Future[Any] = self._inner.get_future()
        return future

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()

    def __del__(self) -> None:
        if not self._over and self._inner is not None and self._inner.is_completed():
            self._group.ring.end(self._number)


class StreamEnd:
    """What there is to ask when a backend orders the stream by itself and returns no handle: an event behind it."""

    def __init__(self, ring: Any, number: int) -> None:
        self._ring, self._number = ring, number
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def over(self) -> bool:
        if self._event.query():
            self._ring.end(self._number)
            return True
        return False

    def __call__(self) -> StreamEnd:
        """As a weak reference would be called; this one is strong, and small."""
        return self
