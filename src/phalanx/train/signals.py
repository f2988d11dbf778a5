"""A signal as a request: the step that runs is finished, a checkpoint is written, and the run ends by itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from phalanx.run.step import Step

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Slurm and Kubernetes send SIGTERM, a person SIGINT; of all signals Open MPI's mpirun hands SIGUSR1 alone on to its ranks."""


class Request:
    """Which signal has come to this rank, if one has."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._step: Step | None = None

    def come(self, number: int) -> None:
        self.number = number
        for executor in self._step.executors if self._step is not None else ():
            executor.stop = True

    def watched_by(self, step: Step) -> None:
        """From now on all ranks learn of a request with the next step, in Out.stop."""
        self._step = step
        if self.number is not None:
            self.come(self.number)


@contextmanager
def asked_to_stop() -> Iterator[Request]:
    """While it lasts, a signal is a request to stop. A second SIGINT interrupts, as ever.

    Only the main thread can listen; in any other nothing changes.
    """
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if request.number == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.come(number)

    before = {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
