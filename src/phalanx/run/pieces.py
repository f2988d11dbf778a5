"""What a rank holds of the state of a run, as boxes of global tensors: the terms in which any layout's state is any other's.

A box is a rectangle of a global tensor. Whoever writes a checkpoint writes the boxes that are this rank's to write; whoever reads one
fills the boxes that this rank holds. Nothing here communicates, and no file is named.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm.world import World
from phalanx.derive.program import Parameter
from phalanx.run.flat import Place, Unit
from phalanx.run.optimizer import Optimizer
from phalanx.run.parameters import Parameters
from phalanx.run.stored import precise
from phalanx.spec import Spec, dim_ranges

SHARED_BYTES = 1 << 16
"""What several ranks hold copies of is written in equal parts by all of them if a part has so many bytes, else by one of them in turn."""

Sizes = tuple[int, ...]
Flat = tuple[Tensor, int]
"""A run of elements of a flattened local shard, and where in it the run starts."""


@dataclass(frozen=True)
class Kind:
    """A global tensor of the state."""

    shape: Sizes
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a global tensor, and the memory of this rank that holds it.

    key      "model.NAME", or "optimizer.NAME.STATE"
    offsets  of its first element in the global tensor; the shape of `value` is its size
    value    a view: to be read, or filled
    """

    key: str
    offsets: Sizes
    value: Tensor


@dataclass(frozen=True)
class State:
    """The state of one rank.

    kinds    every tensor of the whole run, the same on every rank
    writes   the boxes that this rank writes; those of all ranks together are every element once
    reads    the boxes that this rank holds
    """

    kinds: Mapping[str, Kind]
    writes: tuple[Piece, ...]
    reads: tuple[Piece, ...]


def kinds_of(parameters: Parameters, optimizer: Optimizer | None, persistent: Sequence[str], steps: int) -> dict[str, Kind]:
    """Every tensor of the state of the whole run: of the model alone without an optimizer.

    persistent  names in the module's state_dict: other buffers are made anew by whoever builds the module
    steps       updates so far: some optimizers keep nothing before the first
    """
    program = parameters.program
    kinds = {
        f"model.{name}": Kind(parameter.given, parameter.stored or parameter.dtype)
        for name, parameter in program.parameters.items()
        if parameters.stages[name]
    }
    for name, buffer in program.buffers.items():
        if {name, *buffer.aliases} & set(persistent):
            kinds[f"model.{name}"] = Kind(buffer.given, buffer.dtype)
    for name, state in () if optimizer is None else optimizer.kept(steps):
        assert optimizer is not None
        own = Kind(program.parameters[name].given, parameters.accumulator_of(name))
        whole = optimizer.whole_states.get(name, {}).get(state)
        kinds[f"optimizer.{name}.{state}"] = own if whole is None else Kind(*whole)
    return kinds


def state_of(parameters: Parameters, optimizer: Optimizer | None, persistent: Sequence[str]) -> State:
    """The state of one rank; arguments are those of `kinds_of`.

    The boxes are views of the memory of the run, so look at them between steps, or before the next update.
    """
    program, world = parameters.program, parameters.world
    kinds = kinds_of(parameters, optimizer, persistent, 0 if optimizer is None else optimizer.steps)
    # Masters that are kept for themselves, which rounded parameters would not give back.
    masters = {name for name, state in (() if optimizer is None else optimizer.kept(optimizer.steps)) if state == "master"}
    writes: list[Piece] = []
    reads: list[Piece] = []
    for turn, (name, parameter) in enumerate(program.parameters.items()):  # turns are the same on every rank
        if name not in parameters.places:
            continue
        unit, place = parameters.places[name]
        key = f"model.{name}"
        writes += _written(key, _own(unit, place, precise(unit)), place, turn, parameters)
        # What is computed with, and what the optimizer updates, if that is another copy.
        held = _own(unit, place, unit.values) if unit.sliced else [(parameters.views[name].view(-1), 0)]
        held += [] if unit.master is None or name in masters else _own(unit, place, unit.master)
        reads += [piece for flat in held for piece in boxes(key, flat, parameter, world)]
    for name, value in parameters.buffers.items():
        key, buffer = f"model.{name}", program.buffers[name]
        if key in kinds:
            found = list(boxes(key, (value.view(-1), 0), buffer, world))
            reads += found
            # What tables read is held by stages that do not host it as well.
            stages = parameters.stages[name]
            if not stages or parameters.stage in stages:
                copy, _ = _copy(buffer.spec, (), stages, world)
                writes += found if copy == 0 else []
    for turn, (name, state) in enumerate(() if optimizer is None else optimizer.kept(optimizer.steps)):
        assert optimizer is not None
        if name not in parameters.places:
            continue
        unit, place = parameters.places[name]
        key, parameter = f"optimizer.{name}.{state}", place.parameter
        if state not in optimizer.whole_states.get(name, {}):
            flats = _own(unit, place, optimizer.own(unit, state))
            writes += _written(key, flats, place, turn, parameters)
            reads += [piece for flat in flats for piece in boxes(key, flat, parameter, world)]
        else:
            value = optimizer.whole(name, state)
            reads.append(Piece(key, (0,) * value.dim(), value))
            copy, copies = _copy(parameter.spec, place.split, parameters.stages[name], world)
            writes += reads[-1:] if copy == turn % copies else []
    return State(kinds, tuple(writes), tuple(reads))


def boxes(key: str, flat: Flat, parameter: Parameter, world: World) -> Iterator[Piece]:
    """A run of elements of this rank's flattened shard as boxes of the global tensor: at most 2 n - 1 of each part of n dimensions."""
    values, start = flat
    local = parameter.spec.local_shape(parameter.shape, world.mesh)
    ranges = [dim_ranges(parameter.spec, parameter.shape, world.mesh, world.rank, dim) for dim in range(len(local))]
    for offsets, sizes, first in flat_boxes(local, start, start + values.numel()):
        view = values[first - start : first - start + math.prod(sizes)].view(sizes)
        for cuts in itertools.product(*map(_pieces, ranges, offsets, sizes, parameter.given)):
            piece = view
            for dim, (begin, length, _) in enumerate(cuts):
                piece = piece.narrow(dim, begin, length)
            yield Piece(key, tuple(place for _, _, place in cuts), piece)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[Sizes, Sizes, int]]:
    """Elements start to stop of a row-major tensor as boxes: (offsets, sizes, number of the first element), in order."""
    if stop <= start:
        return []
    if not shape:
        return [((), (), start)]
    inner = math.prod(shape[1:])
    (first, before), (last, after) = divmod(start, inner), divmod(stop, inner)

    def within(row: int, begin: int, end: int) -> list[tuple[Sizes, Sizes, int]]:
        found = flat_boxes(shape[1:], begin, end)
        return [((row, *offsets), (1, *sizes), row * inner + place) for offsets, sizes, place in found]

    if first == last:
        return within(first, before, after)
    head = within(first, before, inner) if before else []
    begin = first + bool(before)
    rows = [((begin, *(0 for _ in shape[1:])), (last - begin, *shape[1:]), begin * inner)] if last > begin else []
    return head + rows + within(last, 0, after)


def _pieces(ranges: Sequence[tuple[int, int]], offset: int, size: int, end: int) -> list[tuple[int, int, int]]:
    """An interval of a local dimension, cut where its global pieces end: (begin in the interval, length, global offset).

    What lies at or after the global `end` is padding, and no part of the state.
    """
    found, local = [], 0
    for start, length in ranges:
        first, last = max(local, offset), min(local + min(length, end - start), offset + size)
        if first < last:
            found.append((first - offset, last - first, start + first - local))
        local += length
    return found


def _own(unit: Unit, place: Place, own: Tensor) -> list[Flat]:
    """The runs of one parameter in a buffer that is laid out like the own slice of its unit."""
    return [(own[mine], part.start) for other, mine, part in unit.pieces() if other is place]


def _written(key: str, flats: Sequence[Flat], place: Place, turn: int, parameters: Parameters) -> Iterator[Piece]:
    """What this rank writes of runs that others may hold copies of."""
    parameter, world = place.parameter, parameters.world
    copy, copies = _copy(parameter.spec, place.split, parameters.stages[parameter.name], world)
    for values, start in flats:
        share = -(-values.numel() // copies)
        if share * values.element_size() >= SHARED_BYTES:
            yield from boxes(
                key, (values[copy * share : (copy + 1) * share], start + min(copy * share, values.numel())), parameter, world
            )
        elif copy == turn % copies:
            yield from boxes(key, (values, start), parameter, world)


def _copy(spec: Spec, split: Sequence[str], stages: Sequence[int], world: World) -> tuple[int, int]:
    """(which of the ranks that hold the same elements this is, how many they are)."""
    copy, copies = 0, 1
    for axis in world.mesh.names:
        if axis == "pp":
            hosts = list(stages) or list(range(world.mesh.shape[axis]))
            copy, copies = copy * len(hosts) + hosts.index(world.coordinates[axis]), copies * len(hosts)
        elif axis not in spec.sharded and axis not in split:
            copy, copies = copy * world.mesh.shape[axis] + world.coordinates[axis], copies * world.mesh.shape[axis]
    return copy, copies
