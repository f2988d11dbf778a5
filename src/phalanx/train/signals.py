"""SIGTERM and SIGINT as a request: the step that runs is finished, a checkpoint is written, and the run ends by itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from phalanx.run.step import Step


class Request:
    """Which signal has come to this rank, if one has."""

    number: int | None = None


@contextmanager
def asked_to_stop(step: Step) -> Iterator[Request]:
    """While it lasts, a signal asks the ranks of `step` to stop: all ranks know after the next step, in Out.stop.

    A second SIGINT interrupts, as ever. Only the main thread can listen; in any other nothing changes.
    """
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if request.number == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.number = number
        for executor in step.executors:
            executor.stop = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
