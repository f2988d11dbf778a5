"""The hierarchy of this machine, from registers to network, measured by all ranks of a world together; a Profile and its tables.

What ranks share, memory and cores, is measured while all use it, and the slowest rank counts: that is what a step will have.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.table import Table

from phalanx.bench import operations
from phalanx.bench.arithmetic import DTYPES, arithmetic
from phalanx.bench.fit import fit
from phalanx.bench.memory import levels
from phalanx.comm.world import World
from phalanx.hardware import Copy, Fit, Level, Profile
from phalanx.observe.worlds import carrier
from phalanx.train.metrics import bytes_text

Floats = Mapping[str, float]


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    repeats          of everything; the median counts
    sizes            of messages and collectives, in bytes
    product_seconds  the longest matrix product
    thorough         copies of every working set, for the whole curve
    """

    repeats: int
    sizes: tuple[int, ...]
    product_seconds: float
    thorough: bool
    ops: tuple[str, ...] = tuple(operations.OPERATIONS)


QUICK = Effort(7, tuple(256 * 4**i for i in range(8)), 0.05, False)
FULL = Effort(20, tuple(64 * 2**i for i in range(20)), 0.5, True)


def measure(world: World, backend: str, effort: Effort, tell: Callable[[str], None] = lambda text: None) -> Profile:
    """The Profile of what this world runs on; every rank calls it with the same arguments and gets the same numbers.

    Raises ValueError for less than one repeat or fewer than two sizes.
    """
    check(effort)
    everybody = world.group(world.mesh.names)
    world.transport.barrier(everybody).synchronize()
    tell("matrix products")
    rates = arithmetic(world.device, effort.product_seconds, effort.repeats)
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    rates = slowest({name: rates.get(name, 0.0) for name in names}, world)
    tell("memory")
    # Latencies are the same on all ranks, and what the others do meanwhile would be in the way of them.
    found, copies = levels(world.device, effort.repeats, latency=world.rank == 0, thorough=effort.thorough)
    bandwidths = slowest({level.name: level.bytes_per_second or 0.0 for level in found}, world)
    curve = slowest({str(copy.set_bytes): copy.bytes_per_second for copy in copies}, world)
    fits = []
    for axis in axes(world):
        for op in effort.ops:
            if "+" in axis and op in operations.MESSAGES:
                continue  # messages go along single axes
            tell(f"{op} along {axis}")
            points = operations.samples(op, world.group(axis), world, effort.sizes, effort.repeats)
            fits.append(fit(op, axis, carrier(world, axis, backend), world.group(axis).size, points))
    return Profile(
        machine(world.device),
        world.device.type,
        world.size,
        {dtype: rate for dtype, rate in rates.items() if rate},
        tuple(replace(level, bytes_per_second=bandwidths[level.name] or None) for level in found),
        tuple(Copy(int(size), rate) for size, rate in curve.items()),
        tuple(fits),
    )


def check(effort: Effort) -> None:
    if effort.repeats < 1:
        raise ValueError(f"{effort.repeats} repeats measure nothing; at least 1, and from 5 the intervals mean something")
    if len(set(effort.sizes)) < 2 or min(effort.sizes) < 1:
        raise ValueError(f"sizes {list(effort.sizes)}: latency and bandwidth need at least two positive ones")
    if unknown := [op for op in effort.ops if op not in operations.OPERATIONS]:
        raise ValueError(f"there is no operation {unknown[0]!r}; there are {', '.join(operations.OPERATIONS)}")


def axes(world: World) -> list[str]:
    """Every axis of more than one rank, and then all of them together."""
    live = [name for name, size in world.mesh.axes if size > 1]
    return [*live, "+".join(live)] if len(live) > 1 else live


def slowest(rates: Floats, world: World) -> dict[str, float]:
    """The least of each over all ranks. Raises ValueError if they did not measure the same things, as on hosts of two kinds."""
    if world.size == 1:
        return dict(rates)
    names = zlib.crc32(" ".join(rates).encode())
    ends = torch.tensor([names, -names], dtype=torch.int64, device=world.device)
    world.transport.all_reduce(ends, world.group(world.mesh.names), "min").synchronize()
    if ends[0] != -ends[1]:
        raise ValueError(
            f"the ranks are on different machines: this one has {', '.join(rates)}; measure hosts of one kind at a time"
        )
    values = torch.tensor(list(rates.values()), dtype=torch.float64, device=world.device)
    world.transport.all_reduce(values, world.group(world.mesh.names), "min").synchronize()
    return dict(zip(rates, values.tolist(), strict=True))


def machine(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What was measured, in words."""
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else None
    cpu = model[1].strip() if model else "CPU"
    gpu = f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    threads = torch.get_num_threads()
    return f"{gpu}{cpu}, {threads} thread{'s' * (threads > 1)} a rank, torch {torch.__version__}"


def tables(profile: Profile) -> list[Table]:
    """Levels as in the textbook picture, arithmetic, and the fits of the links."""
    hierarchy = Table(
        "level",
        "capacity",
        "bandwidth",
        "latency",
        "shared by",
        box=box.SIMPLE,
        title_justify="left",
        title="From registers to network",
    )
    for level in profile.memory:
        sharers = f"{level.shared_by} cores" if level.shared_by > 1 else "one core" if level.capacity_bytes else ""
        hierarchy.add_row(
            level.name, capacity(level), rate_text(level.bytes_per_second), time_text(level.latency_seconds), sharers
        )
    for axis, found in itertools.groupby(profile.links, key=lambda fit: fit.axis):
        message = next((fit for fit in found if fit.op in operations.MESSAGES), None)
        if message is not None:
            line = message.above or message.below
            name = f"{message.backend} along {axis}"
            hierarchy.add_row(
                name,
                "-",
                f"{per_second(line.seconds_per_byte)} GB/s",
                time_text(message.below.latency_seconds),
                f"{message.ranks} ranks",
            )
    products = Table(
        "dtype",
        "TFLOP/s",
        box=box.SIMPLE,
        title_justify="left",
        title=f"Matrix products in one of {profile.at_once} ranks at once",
    )
    for dtype, rate in profile.arithmetic.items():
        products.add_row(dtype, f"{rate / 1e12:.4g}")
    shown = [hierarchy, products]
    if profile.links:
        shown.append(links_table(profile))
    return shown


def links_table(profile: Profile) -> Table:
    """alpha and beta of every operation, of the link that it would be if it were made of messages."""
    title = "Links: t(S) = k(n) latency + f(n) S / bandwidth"
    table = Table(box=box.SIMPLE, title_justify="left", title=title)
    for name in ("axis", "operation", "algorithm", "from", "latency", "95%", "GB/s", "95%", "half at", "worst error"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("axis", "operation", "algorithm") else "right")
    for found in profile.links:
        for line, start in [(found.below, None), (found.above, found.knee_bytes)]:
            if line is None:
                continue
            low, high = line.seconds_per_byte_interval
            table.add_row(
                f"{found.axis} ({found.ranks})" if start is None else "",
                found.op if start is None else "",
                line.algorithm,
                "" if start is None else bytes_text(int(start)),
                time_text(line.latency_seconds),
                " to ".join(map(time_text, line.latency_interval)),
                per_second(line.seconds_per_byte),
                f"{per_second(high)} to {per_second(low)}",
                bytes_text(int(line.half_bytes)) if line.seconds_per_byte else "-",
                worst_error(found) if start is None else "",
            )
    return table


def worst_error(found: Fit) -> str:
    """Of the decade of sizes in which the fit is worst."""
    decade, error = max(found.error_by_decade.items(), key=lambda item: item[1])
    return f"{error:.0%} at 1e{decade} B"


def per_second(seconds_per_byte: float) -> str:
    """GB/s; no bound where no time per byte was found."""
    return f"{1e-9 / seconds_per_byte:.3g}" if seconds_per_byte else "∞"


def capacity(level: Level) -> str:
    return "-" if level.capacity_bytes is None else bytes_text(level.capacity_bytes)


def rate_text(rate: float | None) -> str:
    """1.2e10 → 12 GB/s"""
    return "-" if rate is None else f"{rate / 1e9:.3g} GB/s"


def time_text(seconds: float | None) -> str:
    """1.2e-5 → 12 µs"""
    if seconds is None:
        return "-"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns"
