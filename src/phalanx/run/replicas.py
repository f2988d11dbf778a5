"""The proof, between two steps, that what ranks hold copies of is still equal bit for bit, and where it is not.

Copies start equal and every rank makes the same update to them, so they stay equal, unless memory, a wire or a kernel changes a bit or
the program is wrong; the loss curve looks the same then. Each rank hashes its copies, the hashes are compared along the mesh axes that
hold copies, in one message for each group of axes, and values travel only once something differs.

A check reads what it compares once, and sends 16 bytes for each tensor. Of two cores that eight other processes shared, xxh3 took 3.6
GB/s from memory, and llama-tiny on dp=2 was checked in 5 ms where a step took 734 (`pytest tests/run/test_replicas.py -m nightly -k
costs -s`). On CUDA the hash is made of torch's integer operations on the device, which has been tested on the CPU alone.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from phalanx.comm.world import World
from phalanx.derive.program import Parameter, Program, Value
from phalanx.run.executor import Executor
from phalanx.run.flat import Place, Unit
from phalanx.run.optimizer import Optimizer
from phalanx.schedule.view import split_axes
from phalanx.spec import dim_ranges

NOTHING = -(2**63)
"""In a maximum, what a rank says that has no copy."""
CHUNK = 1 << 20
"""Words that the hash of a device takes at once, with two buffers of 8 MiB."""
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, whose multiples are spread evenly (Knuth, volume 3, section 6.4)."""

Label = tuple[str, str]
"""Name and kind of what is compared."""


class ReplicaError(RuntimeError):
    """Ranks hold different bits of what must be equal. The same on every rank.

    name, kind  of the first such tensor in the Program's order: a parameter, one of its moments, a buffer, ...
    axis        mesh axes along which the ranks differ, joined with +
    ranks       that differ from most others, or all that hold a copy if no value has most of them
    step        the last one that was taken, from 1; 0 before the first
    """

    def __init__(self, text: str, *, name: str, kind: str, axis: str, ranks: tuple[int, ...], step: int) -> None:
        super().__init__(text)
        self.name, self.kind, self.axis, self.ranks, self.step = name, kind, axis, ranks, step


@dataclass(frozen=True, eq=False)
class Copy:
    """What the ranks along `axes` must have the same bits of.

    kind   number, parameter, gathered, master, a state of the optimizer, buffer or table
    value  flat and contiguous; None where this rank has none, though others of its group may
    start  of the value in this rank's flattened shard
    slice  of what was gathered: its place among the slices of the unit
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    value: Tensor | None
    start: int = 0
    slice: int = 0


@torch.no_grad()
def check_replicas(executor: Executor) -> None:
    """Raise ReplicaError, on every rank alike, if ranks hold different bits of what they hold copies of.

    Collective, between two steps. Compared are parameters, their masters and the optimizer's state, along every axis that neither
    the Spec nor storage divides them over, and between the stages that share them; buffers and tables; the numbers of step and
    updates and the loss scale. Under ZeRO 1 and 2 a rank's own slice is new and the others are those that its last step gathered:
    these are compared among the ranks that gathered them, though the next gather overwrites them.
    """
    executor.settle()
    world = executor.world
    if world.mesh.size == 1:
        return
    labels, held = list(_labels(executor)), copies(executor)
    place = {label: at for at, label in enumerate(labels)}
    order = [place[copy.name, copy.kind] * world.size + copy.slice for copy in held]
    weights = None if world.device.type == "cpu" else odd_words(world.device)
    sums = _integers([NOTHING if copy.value is None else checksum(copy.value, weights) for copy in held], world.device)
    groups: dict[tuple[str, ...], list[int]] = {}
    for at, copy in enumerate(held):
        groups.setdefault(copy.axes, []).append(at)
    first = end = len(labels) * world.size
    # One order of groups on all ranks, or two of them could wait for each other.
    for axes, members in sorted(groups.items()):
        differ = _differences(sums[members], world, axes)
        first = min([first, *(order[members[at]] for at in differ)])
    found = _integers([first], world.device)
    world.transport.all_reduce(found, world.group(world.mesh.names), "min").wait()
    if (first := int(found)) < end:
        mine = held[order.index(first)] if first in order else None
        raise _diagnosis(executor, labels[first // world.size], mine, weights)


def _differences(sums: Tensor, world: World, axes: tuple[str, ...]) -> list[int]:
    """Which of the sums differ between the ranks along `axes`. One message tells, since min(x) is ~max(~x)."""
    both = torch.cat([sums, torch.where(sums == NOTHING, NOTHING, ~sums)])
    world.transport.all_reduce(both, world.group(axes), "max").wait()
    largest, smallest = both[: len(sums)], ~both[len(sums) :]
    # Where no rank has a copy, the smallest is above the largest.
    return [int(at) for at in (smallest < largest).nonzero()]


# What is held


def _labels(executor: Executor) -> Iterator[Label]:
    """Everything that may be compared, in the order in which a difference is told; the same on every rank."""
    program = executor.program
    yield from ((name, "number") for name in _numbers(executor))
    for name in program.parameters:
        yield from ((name, kind) for kind in (*_kinds(executor.optimizer, name), "gathered"))
    yield from ((name, "buffer") for name in program.buffers)
    yield from ((name, "table") for name in executor._tables)


def copies(executor: Executor) -> list[Copy]:
    """What this rank holds copies of. Ranks that are compared list the same, each with the values that it has."""
    everywhere = _axes(executor.world, ())
    found = [Copy(name, "number", everywhere, value) for name, value in _numbers(executor).items()]
    found += [*_parameters(executor), *_buffers(executor)]
    for name, value in executor._tables.items():
        described = _described(executor.program, name)
        assert described is not None
        found.append(Copy(name, "table", _axes(executor.world, described.spec.varying), _flat(value)))
    return [copy for copy in found if copy.axes]


def _numbers(executor: Executor) -> dict[str, Tensor]:
    scale, device = executor.loss_scale, executor.world.device
    numbers: dict[str, float] = {"step number": executor.step_number}
    numbers |= {f"optimizer's {name}": number for name, number in executor.optimizer.numbers().items()}
    if scale is not None:
        numbers |= {"loss scale": scale.value, "loss scale's finite steps": scale.finite, "skipped steps": scale.skipped}
    return {name: torch.tensor([number], dtype=torch.float64, device=device) for name, number in numbers.items()}


def _parameters(executor: Executor) -> Iterator[Copy]:
    """Parameters with their masters and states, and what was gathered of them."""
    parameters, optimizer, world = executor.parameters, executor.optimizer, executor.world
    pieces = {place.parameter.name: (own, part) for unit in parameters.units for place, own, part in unit.pieces()}
    for name, parameter in parameters.program.parameters.items():
        shared = len(parameters.stages[name]) > 1
        if name not in parameters.places and not shared:
            continue
        split = split_axes(parameters.program, name, parameters.storage)
        axes = _axes(world, {*parameter.spec.varying, *split, *(() if shared else ("pp",))})
        own, part = pieces.get(name, (slice(0), slice(0)))
        for kind in _kinds(optimizer, name):
            value = _value(optimizer, name, kind, own) if name in pieces else None
            yield Copy(name, kind, axes, value, part.start or 0)
        if name in parameters.places:
            unit, place = parameters.places[name]
            if unit.split and not unit.sliced:
                yield from _gathered(unit, place, _axes(world, {*parameter.spec.varying, "pp"}), world)


def _kinds(optimizer: Optimizer, name: str) -> tuple[str, ...]:
    """What some rank may hold for a parameter."""
    if not optimizer.parameters.program.parameters[name].trainable:
        return ("parameter", "master")
    return ("parameter", "master", *optimizer.config.moments, *optimizer.whole_states.get(name, ()))


def _value(optimizer: Optimizer, name: str, kind: str, own: slice) -> Tensor | None:
    """What this rank holds of a parameter that has the slice `own` of its unit's."""
    unit, _ = optimizer.parameters.places[name]
    if kind in optimizer.whole_states.get(name, ()):
        return _flat(optimizer.whole(name, kind)) if optimizer.steps else None
    buffers = {"parameter": unit.own_values, "master": unit.master}
    buffer = buffers[kind] if kind in buffers else optimizer.state.get(kind, {}).get(unit)
    return None if buffer is None else buffer[own]


def _gathered(unit: Unit, place: Place, axes: tuple[str, ...], world: World) -> Iterator[Copy]:
    """The slices of a parameter that are other ranks' own, as they were gathered from them."""
    ranks = world.mesh.extent(axes)
    if ranks - ranks // unit.ranks < 2:
        return  # a slice is gathered by one rank only
    for index in range(unit.ranks):
        first = max(place.start, index * unit.slice_numel)
        last = min(place.start + place.numel, (index + 1) * unit.slice_numel)
        if first < last:
            value = None if index == unit.index else unit.values[first:last]
            yield Copy(place.parameter.name, "gathered", axes, value, first - place.start, index)


def _buffers(executor: Executor) -> Iterator[Copy]:
    """Buffers: of the segments of a stage, or of tables and count, which every stage has."""
    parameters, program = executor.parameters, executor.program
    extra = {*program.count.buffers, *(program.tables.buffers if program.tables is not None else ())}
    for name, buffer in program.buffers.items():
        shared = name in extra or len(parameters.stages[name]) != 1
        if shared or name in parameters.buffers:
            axes = _axes(executor.world, {*buffer.spec.varying, *(() if shared else ("pp",))})
            value = parameters.buffers.get(name)
            yield Copy(name, "buffer", axes, None if value is None else _flat(value))


def _axes(world: World, apart: Sequence[str] | set[str] | frozenset[str]) -> tuple[str, ...]:
    """The axes of several ranks but those along which they hold values of their own."""
    return tuple(name for name, size in world.mesh.axes if size > 1 and name not in apart)


def _flat(x: Tensor) -> Tensor:
    return (torch.view_as_real(x) if x.is_complex() else x).contiguous().view(-1)


def _described(program: Program, name: str) -> Parameter | Value | None:
    """Global shape and Spec of a parameter, buffer or table."""
    tables = program.tables
    values = {} if tables is None else dict(zip(tables.outputs, tables.cls.outputs, strict=True))
    return program.parameters.get(name) or program.buffers.get(name) or values.get(name)


# Hashes


def checksum(x: Tensor, weights: Tensor | None = None) -> int | Tensor:
    """64 bits of a flat, contiguous tensor, signed: xxh3 on the CPU; with `weights`, a weighted sum of its words, on any device.

    Weights are odd, so that no change of one word, however few bits it has, leaves the sum modulo 2^64 as it was.
    """
    data = x.view(torch.uint8)
    if weights is None:
        return _signed(xxhash.xxh3_64_intdigest(data.numpy().data))
    whole = data.numel() // 8 * 8
    if data.storage_offset() % 8:
        data = data.clone()
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    parts = list(torch.split(data[:whole].view(torch.int64), len(weights)))
    if whole < data.numel():
        parts.append(torch.nn.functional.pad(data[whole:], (0, 8 - (data.numel() - whole))).view(torch.int64))
    for at, words in enumerate(parts):
        total += (words * weights[: len(words)]).sum() * _signed((at + 1) * GOLDEN | 1)
    return total


def odd_words(device: torch.device, count: int = CHUNK) -> Tensor:
    """Odd numbers without a pattern, one for each word of a chunk."""
    spread = (torch.arange(count, device=device) + 1) * _signed(GOLDEN)
    return (spread ^ (spread >> 29)) | 1


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def _integers(numbers: Sequence[int | Tensor], device: torch.device) -> Tensor:
    """Numbers of 64 bits on a device, some of which may be there already."""
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([x if isinstance(x, Tensor) else torch.tensor(x, device=device) for x in numbers])
    return torch.tensor(numbers, dtype=torch.int64, device=device)


# Once something differs


def _diagnosis(executor: Executor, label: Label, mine: Copy | None, weights: Tensor | None) -> ReplicaError:
    """What differs, between which ranks, and the first element of it. Collective; no tensor travels, only hashes of ever smaller parts."""
    world, mesh = executor.world, executor.world.mesh
    value = mine.value if mine is not None else None

    def told(*numbers: int | Tensor) -> list[list[int]]:
        """What every rank says."""
        row = _integers(numbers, world.device)
        rows = row.new_empty(world.size * len(row))
        world.transport.all_gather(rows, row, world.group(mesh.names)).wait()
        return rows.view(world.size, -1).tolist()  # type: ignore[no-any-return]

    def part(start: int, stop: int) -> int | Tensor:
        return 0 if value is None else checksum(value[start:stop], weights)

    axes = sum(1 << at for at, axis in enumerate(mesh.names) if mine is not None and axis in mine.axes)
    start, numel, width = (0, 0, 0) if mine is None or value is None else (mine.start, value.numel(), value.element_size())
    rows = told(value is not None, part(0, numel), axes, start, numel, width, executor.step_number)
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, (has, _, bits, *_) in enumerate(rows):
        if has:
            apart = [at for at in range(len(mesh.names)) if not bits >> at & 1]
            places = list(mesh.coordinates(rank).values())
            holders.setdefault(tuple(places[at] for at in apart), []).append(rank)
    ranks = next(ranks for ranks in holders.values() if len({rows[rank][1] for rank in ranks}) > 1)
    (common, count), *_ = Counter(rows[rank][1] for rank in ranks).most_common()
    odd = tuple(rank for rank in ranks if rows[rank][1] != common)
    others = [rank for rank in ranks if rows[rank][1] == common]
    a, b = odd[0], min(others, key=lambda rank: len(_apart(executor, rank, odd[0])))

    _, _, _, start, numel, width, step = rows[a]
    low, high = 0, numel
    while high - low > 1:
        middle = (low + high) // 2
        halves = told(part(low, middle))
        low, high = (middle, high) if halves[a] == halves[b] else (low, middle)
    seen = told(*((0, 0) if value is None or low >= len(value) else _shown(value[low])))
    texts = {rank: f"{_number(seen[rank][0])} (bits {seen[rank][1] & (1 << 8 * width) - 1:0{2 * width}x})" for rank in (a, b)}

    name, kind = label
    what = {"number": f"the {name}", "gathered": f"the parameter {name} as it was gathered"}.get(kind, f"the {kind} {name}")
    if kind not in ("number", "gathered", "parameter", "buffer", "table"):
        what = f"{kind} of the parameter {name}"
    where = "" if kind == "number" else f" at element {_element(executor, label, start + low, a)}"
    majority = count > len(ranks) / 2
    who = (
        f": {_listed(odd)} from {_listed(others)}"
        if majority
        else f" between {_listed(ranks)}, and no majority says who is wrong"
    )
    axis = "+".join(_apart(executor, a, b))
    return ReplicaError(
        f"after step {step}: {what} differs along {axis}{who}; first{where}: {texts[a]} on rank {a}, {texts[b]} on rank {b}. "
        "These are copies that every rank updates alike, so a bit has changed in memory, on a wire or in a kernel: go back to a "
        "checkpoint of before, and if a rank is named again, leave its machine out",
        name=name, kind=kind, axis=axis, ranks=odd if majority else tuple(ranks), step=step,
    )  # fmt: skip


def _apart(executor: Executor, one: int, other: int) -> list[str]:
    """Axes along which two ranks lie apart."""
    here, there = (executor.world.mesh.coordinates(rank) for rank in (one, other))
    return [axis for axis in here if here[axis] != there[axis]]


def _shown(element: Tensor) -> tuple[int, int]:
    """An element as the bits of a float64, and its own."""
    data = element.reshape(1).view(torch.uint8).tolist()
    (as_float,) = struct.unpack("<q", struct.pack("<d", float(element)))
    return as_float, int.from_bytes(bytes(data), "little", signed=len(data) == 8)


def _number(bits: int) -> str:
    return f"{struct.unpack('<d', struct.pack('<q', bits))[0]:.9g}"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _element(executor: Executor, label: Label, at: int, rank: int) -> str:
    """Global index of an element of a rank's flattened shard; the flat one in a state of another shape than its parameter's."""
    (name, kind), mesh = label, executor.world.mesh
    described = _described(executor.program, name)
    assert described is not None
    if kind in executor.optimizer.whole_states.get(name, ()):
        return str(at)
    if described.dtype.is_complex:
        at //= 2  # hashed as pairs of numbers
    index: list[int] = []
    shape = described.spec.local_shape(described.shape, mesh)
    for dim, size in reversed(list(enumerate(shape))):
        at, here = divmod(at, size)
        for start, length in dim_ranges(described.spec, described.shape, mesh, rank, dim):
            if here < length:
                index.append(start + here)
                break
            here -= length
    return f"({', '.join(map(str, reversed(index)))})"
