"""Collectives that are made of several others: a thread per group that runs their stages, chunk by chunk, in the order of issue.

Nothing here knows what a stage does. A call returns at once; its handle completes when the last stage of its last chunk has.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Lock, Thread

import torch

from phalanx.comm.transport import CommError, Handle

Stage = Callable[[int], Handle]
"""Starts one step of chunk k; called when the step before it is complete for that chunk."""


def run(chunks: int, stages: Sequence[Stage]) -> None:
    """Every stage of every chunk, each stage in the order of chunks.

    While stage s works on chunk k, stage s-1 works on k+1, and two chunks of each stage are in flight at a time.
    """
    flying: list[deque[Handle]] = [deque() for _ in stages]
    for step in range(chunks + len(stages)):
        for at, stage in enumerate(stages):
            chunk = step - at
            if not 0 <= chunk < chunks:
                continue
            if at:
                flying[at - 1].popleft().wait()
            flying[at].append(stage(chunk))
        if step >= len(stages):
            flying[-1].popleft().wait()


class Job:
    """One call in flight: a Handle."""

    __slots__ = ("_body", "_ended", "_failure", "_finished")

    def __init__(self, body: Callable[[], None]) -> None:
        self._body: Callable[[], None] | None = body
        self._ended = Event()
        self._finished = 0.0
        self._failure: BaseException | None = None

    def wait(self) -> None:
        self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def synchronize(self) -> None:
        self.wait()

    def done(self) -> bool:
        return self._ended.is_set()

    def finished(self) -> float | None:
        return self._finished if self.done() else None

    def perform(self) -> None:
        assert self._body is not None
        self._body()

    def end(self, failure: BaseException | None) -> None:
        self._body = None  # lets go of the tensors
        self._failure = failure
        self._finished = time.perf_counter()
        self._ended.set()


class Worker:
    """Runs jobs one after the other in a thread of its own, started by the first. After a failure nothing runs any more.

    `failed` is told the failure, once, in that thread.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._name = name
        self._failed = failed
        self._failure: BaseException | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None

    def submit(self, body: Callable[[], None]) -> Job:
        """Raises CommError if an earlier job failed: its ranks have lost their common place."""
        if self._failure is not None:
            raise CommError(f"group {self._name!r}: refused, an earlier call on it failed: {self._failure}") from self._failure
        job = Job(body)
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Wait for what was submitted; idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _serve(self) -> None:
        with torch.no_grad():  # tensors may be leaves that require grad; the mode is each thread's own
            while (job := self._jobs.get()) is not None:
                if self._failure is None:
                    try:
                        job.perform()
                    except BaseException as error:  # noqa: BLE001 - raised where the caller waits
                        self._failure = error
                        self._failed(error)
                job.end(self._failure)
