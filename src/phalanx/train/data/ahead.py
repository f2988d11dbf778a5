"""Reading the next batches while the step of this one computes: one thread, a few batches, in the order of the cursor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

DEPTH = 2
"""Batches read ahead: the next one, and one more so that a slow read is made up for by the fast one after it."""


class Ahead:
    """`read` by cursor, read ahead for the cursors that follow in steps of `stride`.

    A cursor that does not follow on (a resumed or rewound run) drops what was read ahead and starts there. What `read` raises for a
    cursor reaches whoever asks for that one; the cursors after it can still be asked for.
    """

    def __init__(self, read: Callable[[int], Mapping[str, Tensor]], stride: int, depth: int = DEPTH) -> None:
        if stride < 1 or depth < 1:
            raise ValueError(f"{depth} batches of {stride} samples cannot be read ahead; both are at least 1")
        self._read, self._stride, self._depth = read, stride, depth
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="phalanx-batches")
        self._under_way: deque[tuple[int, Future[Mapping[str, Tensor]]]] = deque()

    def __call__(self, cursor: int) -> Mapping[str, Tensor]:
        """The batch at `cursor`."""
        if not self._under_way or self._under_way[0][0] != cursor:
            self._drop()
            self._start(cursor)
        _, batch = self._under_way.popleft()
        while len(self._under_way) < self._depth:
            self._start(cursor + (len(self._under_way) + 1) * self._stride)
        return batch.result()

    def close(self) -> None:
        """End the thread."""
        self._drop()
        self._pool.shutdown()

    def _start(self, cursor: int) -> None:
        self._under_way.append((cursor, self._pool.submit(self._read, cursor)))

    def _drop(self) -> None:
        for _, batch in self._under_way:
            batch.cancel()
        self._under_way.clear()
