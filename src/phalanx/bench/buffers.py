"""The memory that is sent and received: one pool per rank, walked from end to end so that no cache holds what comes next.

With a pool of twice the last-level cache, what an iteration touches was last touched a whole cache ago. Hot buffers are the first
bytes of the pool, each time the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from phalanx.bench.busbw import ELEMENT_BYTES, OPS, Form
from phalanx.bench.inputs import TORCH_DTYPES
from phalanx.bench.sweep import Case

ALIGNMENT = 256
Allocate = Callable[[int], Tensor]
"""A flat uint8 tensor of so many bytes."""


class Pool:
    """Buffers cut from one allocation. Everything in it is zero, so repeated sums in place stay zero and never overflow."""

    def __init__(self, nbytes: int, allocate: Allocate) -> None:
        self.bytes = _aligned(nbytes)
        self._memory = allocate(self.bytes)
        self._at = 0
        # Written, not merely asked for: pages that nobody wrote are all one page of zeros, which every cache holds.
        self._memory.zero_()

    def take(self, case: Case, form: Form, rank: int) -> tuple[Tensor, Tensor]:
        """(send, recv) for group rank `rank`, flat, in the case's dtype. In place one is, or is part of, the other."""
        op, count, n = OPS[case.op], case.count, case.group
        sent, received = (count * (n if blocks == "n" else 1) for blocks in (op.sends, op.receives))
        if case.buffers == "hot" or self._at + buffer_bytes(case) > self.bytes:
            self._at = 0
        if form == "out_of_place":
            return self._cut(sent, case.dtype), self._cut(received, case.dtype)
        whole = self._cut(max(sent, received), case.dtype)
        mine = slice(rank * count, (rank + 1) * count)
        return (whole if sent >= received else whole[mine]), (whole if received >= sent else whole[mine])

    def _cut(self, count: int, dtype: str) -> Tensor:
        nbytes = count * ELEMENT_BYTES[dtype]
        cut = self._memory[self._at : self._at + nbytes].view(TORCH_DTYPES[dtype])
        self._at += _aligned(nbytes)
        return cut


def buffer_bytes(case: Case) -> int:
    """Bytes that one call needs at most, sent and received."""
    return 2 * _aligned(case.size)


def pool_bytes(cases: list[Case], last_level_cache: int) -> int:
    """At least one call of each case, and twice the last-level cache if any is to be cold."""
    cold = 2 * last_level_cache if any(case.buffers == "cold" for case in cases) else 0
    return max(cold, *(buffer_bytes(case) for case in cases)) + max(buffer_bytes(case) for case in cases)


def check_memory(pool: int, pools_on_this_host: int) -> None:
    """Raise ValueError if the pools of all ranks here would not fit into the memory that is free."""
    free = available_memory()
    if free is not None and pool * pools_on_this_host > 0.9 * free:
        raise ValueError(
            f"the buffers need {pool * pools_on_this_host / 2**30:.1f} GiB on this host ({pools_on_this_host} times "
            f"{pool / 2**20:.0f} MiB), but {free / 2**30:.1f} GiB are free: choose a smaller -e, fewer ranks, or --cache hot"
        )


def last_level_cache_bytes(device: torch.device) -> int:
    """Of the GPU, or of the CPU as Linux describes it; 32 MiB where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_kernel_bytes(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=32 * 2**20)


def available_memory() -> int | None:
    """Bytes that a program may still take on this host; None where Linux does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _kernel_bytes(path: Path) -> int:
    text = path.read_text().strip()
    return int(text.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(text[-1], 1)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
