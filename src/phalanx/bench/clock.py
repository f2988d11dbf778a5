"""When a measured call begins: on all ranks at once, and off the clock."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

LEAD_NS = 300_000
"""From the last rank's arrival to the common start. Ranks leave a Gloo barrier about 0.1 ms apart, which a call of a few
microseconds would be charged with."""


class Start:
    """On one host the ranks agree on an instant of the clock that they share and wait for it (the window scheme of Hunold and
    Carpen-Amarie, 2016); across hosts, where clocks differ, a barrier is all there is."""

    def __init__(self, device: torch.device) -> None:
        hosts: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, host())
        self.one_host = len(set(hosts)) == 1
        self.starts = self.late = 0
        self._on_cuda = device.type == "cuda"

    def together(self) -> None:
        """Returns on all ranks at about the same time, with nothing outstanding on the device."""
        self.finish()
        self.starts += 1
        if not self.one_host:
            dist.barrier()
            return
        now = torch.tensor([time.monotonic_ns()])
        dist.all_reduce(now, dist.ReduceOp.MAX)
        begin = int(now) + LEAD_NS
        self.late += time.monotonic_ns() > begin
        while time.monotonic_ns() < begin:
            os.sched_yield()

    def finish(self) -> None:
        """Everything that was issued is done; a CPU backend's calls only return when they are."""
        if self._on_cuda:
            torch.cuda.synchronize()


def host() -> str:
    """Names the clock: the machine as it is booted, and the namespace in which its time is told."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return socket.gethostname()
