"""What one rank stores of the weights: their memory, what makes them whole for a while, and global tensors from them.

Parameters lie in units (see `flat`). Segments see views. With ZeRO a rank keeps its slice of a unit's optimizer state, gradients and
values, as the level says. This file knows the Program and the World; gradients are `parameters`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.comm.transport import Handle
from phalanx.comm.world import World
from phalanx.derive.program import Parameter, Program
from phalanx.run.buffers import Buffers, room
from phalanx.run.flat import Gradients, Unit, accumulator
from phalanx.run.gather import from_stage, gather
from phalanx.run.layout import lay_out
from phalanx.schedule.actions import Storage
from phalanx.schedule.data import everywhere
from phalanx.spec import shard


class Stored:
    """The shards of the parameters and buffers that this rank's segments use.

    places        pp coordinates that host each segment
    values        the local shard of a parameter or buffer; called once for each one that is hosted here
    groups        optimizer group by first name; parameters of one group are updated alike
    storage       what ranks with equal parameters store once between them; None: nothing
    Every rank of the world constructs it together, since communicators between tied stages are opened here.
    """

    def __init__(
        self,
        program: Program,
        world: World,
        places: Sequence[tuple[int, ...]],
        values: Callable[[Parameter], Tensor],
        groups: Mapping[str, Hashable] | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.program, self.world, self.storage = program, world, storage
        self.stage = world.coordinates.get("pp", 0)
        self.segments = tuple(s for s in program.segments if self.stage in places[s.index])
        self._hosts = {
            name: tuple(s.index for s in program.segments if name in (*s.params, *s.buffers))
            for name in (*program.parameters, *program.buffers)
        }
        self.stages = {name: everywhere(hosts, places) for name, hosts in self._hosts.items()}
        self.trained = tuple(name for name, p in program.parameters.items() if p.trainable and self.stages[name])
        """Names of the parameters that some rank of the world trains."""
        shared = sorted({self.stages[name] for name in self.trained if len(self.stages[name]) > 1})
        world.open_stages(shared)
        self._links = {stages: world.stage_group(stages) for stages in shared if self.stage in stages}
        local = [segment.index for segment in self.segments]
        self.units = lay_out(program, world, local, self.stages, groups or {}, storage)
        self.places = {place.parameter.name: (unit, place) for unit in self.units for place in unit.places}
        self.views: dict[str, Tensor] = {}
        """Parameters that are whole at this moment, by first name."""
        self._buffers = Buffers(world)
        for unit in self.units:
            self._fill(unit, values)
        self._units_of = {
            segment.index: list(dict.fromkeys(self.places[name][0] for name in segment.params)) for segment in self.segments
        }
        self.buffers = self._module_buffers(values)

    # Layout

    def _fill(self, unit: Unit, values: Callable[[Parameter], Tensor]) -> None:
        """Take memory for a unit and put its values there, the own slice of the master from what they were before rounding."""
        numel = unit.slice_numel if unit.sliced else unit.numel
        unit.values = (room(self.world, numel, unit.dtype) if unit.split else self._empty(numel, unit.dtype)).zero_()
        keeps = unit.trainable or any(place.parameter.stored is not None for place in unit.places)
        if keeps and unit.dtype != unit.accumulator:
            unit.master = self._empty(unit.slice_numel, unit.accumulator).zero_()
        if unit.trainable:
            numel = unit.slice_numel if unit.scattered else unit.numel
            # Shared memory stays for the run: where little of a unit is summed, as the norms beside split matrices, it is not worth it.
            summed = sum(place.stored for place in unit.places if place.axes)
            sums = 2 * summed >= unit.numel and not unit.scattered
            shared = self.world.transport.shared(numel, unit.accumulator) if sums else None
            data = (self._empty(numel, unit.accumulator) if shared is None else shared).zero_()
            unit.gradient = Gradients(data, [] if unit.scattered else unit.gaps(data), shared is not None)
        for place in unit.places:
            name = place.parameter.name
            value = _fitting(values(place.parameter), place.shape, name)
            self._store(unit, name, value)
            if not unit.sliced:
                self.views[name] = place.of(unit.values)
                self.views[name].copy_(value)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.world.device)

    def _store(self, unit: Unit, name: str, value: Tensor) -> None:
        """Write the part of a parameter that is in the own slice, to the values and to the master."""
        for buffer in (unit.own_values, unit.master):
            if buffer is not None:
                self.store(name, buffer, value)

    def _module_buffers(self, values: Callable[[Parameter], Tensor]) -> dict[str, Tensor]:
        program = self.program
        extra = [program.count] + ([program.tables] if program.tables is not None else [])
        needed = {name for segment in (*self.segments, *extra) for name in segment.buffers}
        needed |= {name for name in program.buffers if not self.stages[name]}
        found = {}
        for name, buffer in program.buffers.items():
            if name in needed:
                shape = buffer.spec.local_shape(buffer.shape, self.world.mesh)
                found[name] = _fitting(values(buffer), shape, name).to(self.world.device, buffer.dtype).clone()
        return found

    # Whole parameters

    def gather(self, segment: int) -> list[Handle]:
        """Issue the gathers that make a segment's parameters whole; `views` has them once the handles are complete.

        What another segment has gathered in this list and still holds is there already.
        """
        return [handle for unit in self._units_of[segment] if unit.split for handle in self._gather(unit, segment)]

    def _gather(self, unit: Unit, segment: int) -> list[Handle]:
        if not unit.holders:
            whole = unit.values
            if unit.sliced:
                whole = unit.whole = self._buffers.take(unit.numel, unit.dtype)
                self.views.update((place.parameter.name, place.of(whole)) for place in unit.places)
            unit.gathering = self.world.transport.all_gather(whole, unit.own_values, self.world.group(unit.split))
        unit.holders.add(segment)
        assert unit.gathering is not None
        return [unit.gathering]

    def free(self, segment: int) -> None:
        """A segment needs its gathered parameters no more."""
        for unit in self._units_of[segment]:
            if unit.sliced and unit.split:
                unit.holders.discard(segment)
                if not unit.holders:
                    self._drop(unit)

    def let_go(self) -> None:
        """Forget what was gathered: a list begins with slices, wherever the one before it has ended on each rank."""
        for unit in self.units:
            unit.holders.clear()
            self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        unit.gathering = None
        if unit.whole is not None:
            self._buffers.give(unit.whole)
            unit.whole = None
            for place in unit.places:
                del self.views[place.parameter.name]

    def updated(self) -> None:
        """The optimizer has changed `updates`: parameters follow their masters."""
        pairs = [(u.own_values, u.master) for u in self.units if u.trainable and u.master is not None]
        if pairs:
            torch._foreach_copy_([values for values, _ in pairs], [master for _, master in pairs])

    # Global values

    def collect(
        self, names: Sequence[str], own: Callable[[Unit], Tensor], dtype: Callable[[str], torch.dtype]
    ) -> dict[str, Tensor]:
        """Global tensors on every rank, from buffers that are laid out like the own slices of units."""
        whole: dict[Unit, Tensor] = {}
        found = {}
        for name in names:
            stages, parameter = self.stages[name], self.program.parameters[name]
            value = None
            if name in self.places:
                unit, place = self.places[name]
                if unit not in whole:
                    # Names come segment by segment, so few units are in use at once.
                    whole = {**dict(itertools.islice(reversed(whole.items()), 1)), unit: self._reunited(unit, own(unit))}
                value = gather(place.of(whole[unit]).to(dtype(name)), parameter.spec, self.world)
            found[name] = parameter.narrowed(from_stage(value, parameter.shape, dtype(name), stages[0], self.world))
        return found

    def _reunited(self, unit: Unit, own: Tensor) -> Tensor:
        """A buffer of the whole unit from the own slices of its ranks."""
        if not unit.split:
            return own
        out = own.new_empty(unit.numel)
        self.world.transport.all_gather(out, own.contiguous(), self.world.group(unit.split)).wait()
        return out

    def held(self) -> dict[str, Tensor]:
        """By name, what this rank stores of its parameters and buffers."""
        found = dict(self.buffers)
        for unit in self.units:
            found.update((place.parameter.name, unit.own_values[own]) for place, own, _ in unit.pieces())
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer that the Program uses, global, by first name and aliases, on every rank."""
        known = {**self.program.buffers, **self.program.parameters}
        # What no stage hosts is read by tables or the count, and every rank has it.
        names = [name for name in self.program.parameters if self.stages[name]]
        state = self.collect(names, precise, self._stored_dtype)
        for name, buffer in self.program.buffers.items():
            value = gather(self.buffers[name], buffer.spec, self.world) if name in self.buffers else None
            if self.stages[name]:
                value = from_stage(value, buffer.shape, buffer.dtype, self.stages[name][0], self.world)
            assert value is not None
            state[name] = buffer.narrowed(value)
        return {alias: value for name, value in state.items() for alias in (name, *known[name].aliases)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the shards of global tensors. A name may be any of a tied parameter's; every hosted one must be there."""
        loaded = []
        for name in (*self.buffers, *self.places):
            parameter = self.program.parameters.get(name) or self.program.buffers[name]
            key = next((key for key in (name, *parameter.aliases) if key in state), name)
            loaded.append((name, self.shard_of(state, key, name)))
        for name, value in loaded:
            if name in self.buffers:
                self.buffers[name].copy_(value)
                continue
            unit, _ = self.places[name]
            self._store(unit, name, value)
            if not unit.sliced:
                self.views[name].copy_(value)

    def shard_of(self, state: Mapping[str, Tensor], key: str, name: str) -> Tensor:
        """This rank's shard of `state[key]`, which is laid out as parameter or buffer `name`."""
        parameter = self.program.parameters.get(name) or self.program.buffers[name]
        if key not in state:
            raise ValueError(f"the state has no {key!r}; it has {len(state)} tensors")
        if not isinstance(state[key], Tensor):
            raise ValueError(f"{key} is a {type(state[key]).__name__} in the state; it must be a tensor")
        if tuple(state[key].shape) != parameter.given:
            raise ValueError(f"{key} has shape {tuple(state[key].shape)} in the state and {parameter.given} in the model")
        return shard(parameter.padded(state[key]), parameter.spec, self.world.mesh, self.world.rank)

    def store(self, name: str, buffer: Tensor, value: Tensor) -> None:
        """Write a parameter's shard into a buffer that is laid out like the own slice of its unit."""
        for place, own, part in self.places[name][0].pieces():
            if place.parameter.name == name:
                buffer[own].copy_(value.reshape(-1)[part])

    def accumulator_of(self, name: str) -> torch.dtype:
        return accumulator(self.program.parameters[name].dtype)

    def _stored_dtype(self, name: str) -> torch.dtype:
        parameter = self.program.parameters[name]
        return parameter.stored or parameter.dtype


def precise(unit: Unit) -> Tensor:
    """What a unit's values are before they are rounded to the dtype that is computed in."""
    wide = any(place.parameter.stored is not None for place in unit.places)
    return unit.master if wide and unit.master is not None else unit.own_values


def _fitting(value: Tensor, shape: Sequence[int], name: str) -> Tensor:
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name}: the shard has shape {tuple(value.shape)}, this rank holds {tuple(shape)}")
    if value.is_meta:
        raise ValueError(f"{name} is a meta tensor without a value: build the model under phx.deferred_init or give it values")
    return value
