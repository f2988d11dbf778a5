"""When work began and ended: the host's clock, or the device's own where the host only enqueues."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


class Clock:
    """Marks on the current stream, read later as seconds of time.perf_counter. For one step; making it waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        if self._on_device:
            torch.cuda.synchronize(device)
            self._base = _event()
            self._base.record()
        self._zero = time.perf_counter()

    def now(self) -> Mark:
        """A mark; on CUDA it is reached when the work enqueued so far is."""
        if not self._on_device:
            return time.perf_counter()
        mark = _event()
        mark.record()
        return mark

    def seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        milliseconds: float = self._base.elapsed_time(mark)
        return self._zero + milliseconds / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
