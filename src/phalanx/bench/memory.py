"""The levels of memory of this machine: their sizes as the system tells them, their bandwidth and latency as measured.

Bandwidth is of copies within half a level. A call of torch costs about a microsecond, so sets below a megabyte are copied in C and
by one core; larger ones by torch with the rank's threads. Latency comes from a chain of loads in C, or is left out.
"""

from __future__ import annotations

import ctypes
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from phalanx.bench import native
from phalanx.bench.arithmetic import timed
from phalanx.hardware import Copy, Level

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
SMALL_BYTES = 1 << 20
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "": 1}


def levels(device: torch.device, repeats: int, *, latency: bool, thorough: bool) -> tuple[tuple[Level, ...], tuple[Copy, ...]]:
    """The levels of the CPU, and of the GPU in front of them if that is the device; and every copy that was timed.

    `latency` adds the C chains. `thorough` copies sets of every power of two as well, for the whole curve.
    """
    host = cpu_levels(CACHES, Path("/proc/cpuinfo"), Path("/proc/meminfo"))
    found, copies = measured(host, torch.device("cpu"), repeats, thorough)
    if latency and (library := native.loops()) is not None:
        found = tuple(replace(level, latency_seconds=chain_seconds(library, level, found)) for level in found)
    if device.type == "cuda":
        own, more = measured(cuda_levels(device), device, repeats, thorough)
        return (*own, *found, host_link(device, repeats)), (*more, *copies)
    return found, copies


def cpu_levels(caches: Path, cpuinfo: Path, meminfo: Path) -> list[Level]:
    """Registers, the data caches in order, and memory, unmeasured. What the files do not tell is left out or unknown."""
    flags = set(re.findall(r"\w+", _text(cpuinfo).partition("\n\n")[0]))
    # The vector registers that a kernel may use: number × bytes.
    registers = 32 * 64 if "avx512f" in flags else 16 * 32 if "avx2" in flags else 32 * 16 if "asimd" in flags else None
    found = {}
    for index in sorted(caches.glob("index*")):
        size = re.fullmatch(r"(\d+)([KMG]?)", _text(index / "size"))
        number = _text(index / "level")
        if size and number.isdecimal() and _text(index / "type") in ("Data", "Unified"):
            shared = count_cpus(_text(index / "shared_cpu_list"))
            found[int(number)] = Level(f"L{number}", int(size[1]) * UNITS[size[2]], shared_by=shared)
    total = re.search(r"^MemTotal:\s+(\d+) kB", _text(meminfo), re.MULTILINE)
    cores = max([1, *(level.shared_by for level in found.values())])
    memory = Level("memory", int(total[1]) * 1024 if total else None, shared_by=cores)
    return [Level("registers", registers), *(found[number] for number in sorted(found)), memory]


def cuda_levels(device: torch.device) -> list[Level]:
    """L2 and device memory, unmeasured."""
    properties = torch.cuda.get_device_properties(device)
    units = properties.multi_processor_count
    return [
        Level("GPU L2", properties.L2_cache_size, shared_by=units),
        Level("GPU memory", properties.total_memory, shared_by=units),
    ]


def measured(
    found: Sequence[Level], device: torch.device, repeats: int, thorough: bool
) -> tuple[tuple[Level, ...], tuple[Copy, ...]]:
    """The levels with the bandwidth of a set that fits each: half of a cache, four times the last cache for memory."""
    sets = {level.name: set_bytes(level, found) for level in found if level.name != "registers"}
    wanted = set(sets.values())
    if thorough:
        wanted |= {1 << power for power in range(12, max(sets.values()).bit_length())}
    rates = {size: copy_rate(size, device, repeats) for size in sorted(wanted)}
    copies = tuple(Copy(size, rate) for size, rate in rates.items() if rate is not None)
    return tuple(replace(level, bytes_per_second=rates.get(sets.get(level.name, 0))) for level in found), copies


def set_bytes(level: Level, among: Sequence[Level]) -> int:
    """The working set that lives in a level and in none before it."""
    if "memory" not in level.name:
        assert level.capacity_bytes is not None
        return level.capacity_bytes // 2
    caches = [other.capacity_bytes or 0 for other in among if "memory" not in other.name]
    return max(4 * max(caches, default=0), 64 << 20)


def copy_rate(size: int, device: torch.device, repeats: int) -> float | None:
    """Bytes read and written per second by copies from one half of a set to the other; None for small sets without a compiler."""
    if device.type == "cpu" and size < SMALL_BYTES:
        if (library := native.loops()) is None:
            return None
        times = max(1, (2 << 20) // size)
        return size / statistics.median(native.copy_seconds(library, size, times) for _ in range(repeats))
    source, target = (torch.ones(size // 2, dtype=torch.uint8, device=device) for _ in range(2))
    batch = max(1, (8 << 20) // size) if device.type == "cpu" else 20
    return size / timed(lambda: target.copy_(source), device, repeats, batch=batch)


def chain_seconds(library: ctypes.CDLL, level: Level, among: Sequence[Level]) -> float:
    """Latency of one level: of a multiply-add for registers, of a load in a set that fits for the rest."""
    if level.name == "registers":
        return min(native.multiply_add_seconds(library, 1_000_000) for _ in range(3))
    steps = 1_000_000 if "memory" not in level.name else 300_000
    # interruptions only ever add
    return min(native.load_seconds(library, set_bytes(level, among), steps) for _ in range(2))


def host_link(device: torch.device, repeats: int) -> Level:
    """Between pinned host memory and the device: the slower direction's bandwidth, and a few bytes' latency."""
    size = 64 << 20
    seconds = []
    for count in (size, 4):
        host, own = torch.ones(count, dtype=torch.uint8).pin_memory(), torch.ones(count, dtype=torch.uint8, device=device)
        ways = (lambda h=host, d=own: d.copy_(h, non_blocking=True), lambda h=host, d=own: h.copy_(d, non_blocking=True))
        seconds.append(max(timed(way, device, repeats) for way in ways))
    return Level("host link", None, size / seconds[0], seconds[1])


def count_cpus(text: str) -> int:
    """How many a list of the kernel names: `0-3,8` is 5."""
    count = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return max(count, 1)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
