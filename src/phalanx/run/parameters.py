"""The weights that one rank holds: their storage, their gradients, and the sums that a step owes them.

Parameters lie in units (see `flat`), ordered so that what is reduced together, counted together or updated together is contiguous: a
REDUCE is one collective per range, the optimizer one call over few ranges. Segments see views. With ZeRO a rank keeps its slice of a
unit's optimizer state, gradients and values, as the level says. This file knows the Program and the World; it does not know in which
order a step does things.
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
from phalanx.run.flat import Gradients, Place, Range, Unit, accumulator, runs
from phalanx.run.gather import from_stage, gather
from phalanx.run.layout import lay_out
from phalanx.run.reduce import all_reduced, scattered
from phalanx.schedule.actions import Storage
from phalanx.schedule.data import everywhere
from phalanx.spec import shard

NORM_CHUNK = 4096
"""Elements summed in the gradient's own dtype; chunks are added in float64. One float32 norm over 16M elements is off by 1.3e-3,
chunks by 2e-9 at the same speed; converting the whole buffer to float64 first is twenty times slower."""


class Parameters:
    """The shards of the parameters and buffers that this rank's segments use.

    places        pp coordinates that host each segment
    values        the local shard of a parameter or buffer; called once for each one that is hosted here
    groups        optimizer group by first name; parameters of one group are updated alike
    storage       what ranks with equal parameters store once between them; None: nothing
    reduce_dtype  dtype in which gradients travel, if it is narrower than that in which they accumulate
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
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.program, self.world, self.storage, self.reduce_dtype = program, world, storage, reduce_dtype
        self.stage = world.coordinates.get("pp", 0)
        self.segments = tuple(s for s in program.segments if self.stage in places[s.index])
        self._hosts = {
            name: tuple(s.index for s in program.segments if name in (*s.params, *s.buffers))
            for name in (*program.parameters, *program.buffers)
        }
        self._stages = {name: everywhere(hosts, places) for name, hosts in self._hosts.items()}
        self.trained = tuple(name for name, p in program.parameters.items() if p.trainable and self._stages[name])
        """Names of the parameters that some rank of the world trains."""
        shared = sorted({self._stages[name] for name in self.trained if len(self._stages[name]) > 1})
        world.open_stages(shared)
        self._links = {stages: world.stage_group(stages) for stages in shared if self.stage in stages}
        local = [segment.index for segment in self.segments]
        self.units = lay_out(program, world, local, self._stages, groups or {}, storage)
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
        self._targets = {segment.index: self._segment_targets(segment.index) for segment in self.segments}
        self._accumulators: dict[int, list[Tensor]] = {}
        """By segment: where its gradients are added up, in the order of its targets."""
        self._summed = [unit for unit in self.units if unit.trainable and any(place.axes for place in unit.places)]
        self._tied = sorted(self._ranges(lambda place: place.stages or None), key=lambda found: found.unit.name)
        self._counted = self._ranges(lambda place: place.counted or None)
        self.updates = self._ranges(lambda place: (place.group,))
        """What this rank updates, in ranges of one optimizer group."""
        self._by_microbatch = storage is not None and storage.by_microbatch
        self._unwritten: set[str] = set()
        self._issued: list[Handle] = []
        self._taken: set[int] = set()
        self._held: set[int] = set()

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
            sums = any(place.axes for place in unit.places) and not unit.scattered
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
        needed |= {name for name in program.buffers if not self._stages[name]}
        found = {}
        for name, buffer in program.buffers.items():
            if name in needed:
                shape = buffer.spec.local_shape(buffer.shape, self.world.mesh)
                found[name] = _fitting(values(buffer), shape, name).to(self.world.device, buffer.dtype).clone()
        return found

    def _ranges(self, key: Callable[[Place], Hashable]) -> list[Range]:
        """Runs of neighbours with equal keys in the own slices of what is trained, without those whose key is None."""
        return [
            Range(unit, places, max(0, start - unit.start), min(unit.slice_numel, stop - unit.start))
            for unit in self.units
            if unit.trainable
            for places, start, stop in runs(unit, key)
            if start < unit.start + unit.slice_numel and unit.start < stop
        ]

    def _segment_targets(self, index: int) -> list[tuple[str, bool]]:
        """For each gradient that a segment returns: its name, and whether this rank's counts at all."""
        segment, targets = self.program.segments[index], []
        for name, deferred in zip(segment.params, segment.cls.deferred, strict=True):
            _, place = self.places[name]
            if place.parameter.trainable:
                # An axis that other hosts of the parameter leave partial and this one does not: here the gradient is the same
                # on every rank of it, so one of them contributes it to the sum (R -> P).
                missing = set(place.axes) - deferred
                targets.append((name, all(self.world.coordinates[axis] == 0 for axis in missing)))
        return targets

    # Whole parameters

    def gather(self, segment: int) -> list[Handle]:
        """Issue the gathers that make a segment's parameters whole; `views` has them once the handles are complete.

        What another segment has gathered and still holds, or what no rank has updated since, is there already.
        """
        return [handle for unit in self._units_of[segment] if unit.split for handle in self._gather(unit, segment)]

    def _gather(self, unit: Unit, segment: int) -> list[Handle]:
        group = self.world.group(unit.split)
        if not unit.sliced:
            if not unit.stale:
                return []
            unit.stale = False
            return [self.world.transport.all_gather(unit.values, unit.own_values, group)]
        first = not unit.holders
        unit.holders.add(segment)
        if first:
            unit.whole = self._buffers.take(unit.numel, unit.dtype)
            self.views.update((place.parameter.name, place.of(unit.whole)) for place in unit.places)
            unit.gathering = self.world.transport.all_gather(unit.whole, unit.values, group)
        assert unit.gathering is not None
        return [unit.gathering]

    def free(self, segment: int) -> None:
        """A segment needs its gathered parameters no more."""
        for unit in self._units_of[segment]:
            if unit.sliced and unit.split:
                unit.holders.discard(segment)
                if not unit.holders:
                    self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        if unit.whole is not None:
            self._buffers.give(unit.whole)
            unit.whole = unit.gathering = None
            for place in unit.places:
                del self.views[place.parameter.name]

    # One step

    def begin(self, *, keep: bool = False) -> None:
        """Forget the gradients of the step before, and give their memory to the forward unless they are to be kept for now."""
        for unit in self.units:
            unit.holders.clear()
            self._drop(unit)
            unit.summed = None
        if not keep:
            self.release()
        self._buffers.clear()
        self._unwritten = {name for name, (_, place) in self.places.items() if place.parameter.trainable}
        self._issued.clear()
        self._taken.clear()
        self._held.clear()

    def release(self) -> None:
        """Give the memory of the gradients back, until the next backward takes it again."""
        for unit in self.units:
            if unit.trainable:
                unit.gradient.release()

    def writes_in_place(self, segment: int) -> bool:
        """Whether a segment may write all its gradients into its accumulators itself: those that count here."""
        return all(counts for _, counts in self._targets[segment])

    def accumulators(self, segment: int) -> list[Tensor]:
        """Where a segment adds up its gradients, one per trainable parameter; once `fresh` has been asked."""
        return self._accumulators[segment]

    def fresh(self, segment: int) -> list[bool]:
        """For each of `accumulators`: whether it is to be overwritten. From now on it counts as written."""
        self._hold(segment)
        if not self._unwritten:
            return [False] * len(self._targets[segment])
        flags = []
        for name, _ in self._targets[segment]:
            flags.append(name in self._unwritten)
            self._unwritten.discard(name)
        return flags

    def accumulate(self, segment: int, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients that B or W of a segment returned. The first gradient of a step overwrites."""
        self._hold(segment)
        first: list[Tensor] = []
        fresh: list[Tensor] = []
        later: list[Tensor] = []
        more: list[Tensor] = []
        for (name, counts), view, grad in zip(self._targets[segment], self._accumulators[segment], grads, strict=True):
            if grad is None or not counts:
                continue
            if name in self._unwritten:
                self._unwritten.discard(name)
                first.append(view)
                fresh.append(grad)
            else:
                later.append(view)
                more.append(grad)
        if first:
            torch._foreach_copy_(first, fresh)
        if later:
            torch._foreach_add_(later, more)

    def reduce(self, segment: int) -> list[Handle]:
        """Issue the sums over axes of the gradients that this segment is the first host of. `finish` waits for them.

        Every host of them on this rank must have had its last backward, of the step or of the microbatch, as
        `schedule.data.reductions` orders it. Of several in a step, later ones add to the slices of earlier ones.
        """
        issued: list[Handle] = []
        for unit in self._summed:
            # Whole accumulators hold the sum of all microbatches: summed after each, earlier ones would count again.
            if unit.segment == segment and (unit.split or not self._by_microbatch):
                issued += self._sum(unit)
        self._taken.add(segment)
        self._issued += issued
        return issued

    def _sum(self, unit: Unit) -> list[Handle]:
        self._zero_unwritten([place.parameter.name for place in unit.places])
        return self._scatter(unit) if unit.split else all_reduced(self.world, unit, self.reduce_dtype)

    def _scatter(self, unit: Unit) -> list[Handle]:
        # What is on its way keeps its buffers, and on Gloo another of the same size: only what the next backward hides is.
        for handle in self._issued:
            handle.wait()
        self._issued.clear()
        unit.gradient.hold()
        again = unit.segment in self._taken
        handle = scattered(self.world, unit, self._whole_gradient(unit), self.reduce_dtype, add=again)
        if unit.summed is not None:
            self._buffers.give(unit.summed, handle)
            unit.summed = None
            # The next microbatch, if there is one, writes to another buffer.
            self._unwritten |= {place.parameter.name for place in unit.places}
            for host in {host for place in unit.places for host in place.hosts}:
                self._held.discard(host)
                self._accumulators.pop(host, None)
        return [handle]

    def finish(self) -> None:
        """Complete every sum that this step owes; last, those over the stages that share a tied parameter, in order of name.

        Those come here and not at their REDUCE because they need its sums over axes, for which the host would block, and
        because every stage passes here when its backwards are done, so the order is the same everywhere.
        """
        # What was scattered is counted as unwritten again, but in no buffer.
        self._zero_unwritten([name for name, (unit, _) in self.places.items() if not unit.scattered])
        for unit in self._summed:
            if self._by_microbatch and not unit.split:
                self._issued += self._sum(unit)
        for handle in self._issued:
            handle.wait()
        self._issued.clear()
        for unit in self._summed:
            assert unit.segment in self._taken, f"the schedule has no REDUCE{unit.segment} before NORM"
        for found in self._tied:
            self.world.transport.all_reduce(found.gradient, self._links[found.places[0].stages]).wait()
        self._buffers.clear()

    def _hold(self, segment: int) -> None:
        """Memory for the accumulators that a segment writes to, at its first backward of a step."""
        if segment in self._held:
            return
        self._held.add(segment)
        units = [unit for unit in self._units_of[segment] if unit.trainable]
        for unit in units:
            self._hold_unit(unit)
        if segment not in self._accumulators or any(unit.scattered for unit in units):
            targets = (self.places[name] for name, _ in self._targets[segment])
            self._accumulators[segment] = [place.of(self._whole_gradient(unit)) for unit, place in targets]

    def _hold_unit(self, unit: Unit) -> None:
        if not unit.scattered:
            unit.gradient.hold()
        elif unit.summed is None:
            unit.summed = self._buffers.take(unit.numel, unit.accumulator)
            gaps = unit.gaps(unit.summed)
            if gaps:
                torch._foreach_zero_(gaps)

    def _whole_gradient(self, unit: Unit) -> Tensor:
        """Accumulators of all of a unit, before its sum."""
        if not unit.scattered:
            return unit.gradient.data
        assert unit.summed is not None, f"the gradients of {unit.name} have been scattered"
        return unit.summed

    def _zero_unwritten(self, names: Sequence[str]) -> None:
        """A parameter that got no gradient in this step counts as zeros."""
        if not self._unwritten:
            return
        for name in [name for name in names if name in self._unwritten]:
            unit, place = self.places[name]
            self._hold_unit(unit)
            place.of(self._whole_gradient(unit)).zero_()
            self._unwritten.discard(name)

    def updated(self) -> None:
        """The optimizer has changed `updates`: parameters follow their masters, and whole ones are whole no more."""
        pairs = [(u.own_values, u.master) for u in self.units if u.trainable and u.master is not None]
        if pairs:
            torch._foreach_copy_([values for values, _ in pairs], [master for _, master in pairs])
        for unit in self.units:
            unit.stale = unit.trainable and bool(unit.split) and not unit.sliced

    # What the norm reads

    def squared_norm(self, *, exact: bool = False) -> Tensor:
        """Sum of squares of the gradients that this rank counts, in float64. `exact` squares in float64 too."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for found in self._counted:
            total += squared_norm(found.gradient, exact=exact)
        return total

    def finite_squared_norm(self) -> Tensor:
        """The same; squared in float64 if chunks of a narrower dtype overflow, which they do long before float64."""
        square = self.squared_norm()
        return square if square.isfinite() else self.squared_norm(exact=True)

    def first_non_finite(self) -> str | None:
        """First name, in the Program's order, whose gradient here has a NaN or an infinity."""
        broken = {
            place.parameter.name
            for unit in self.units
            if unit.trainable
            for place, own, _ in unit.pieces()
            if not unit.own_gradient[own].isfinite().all()
        }
        return next((name for name in self.program.parameters if name in broken), None)

    # Global values

    def collect(
        self, names: Sequence[str], own: Callable[[Unit], Tensor], dtype: Callable[[str], torch.dtype]
    ) -> dict[str, Tensor]:
        """Global tensors on every rank, from buffers that are laid out like the own slices of units."""
        whole: dict[Unit, Tensor] = {}
        found = {}
        for name in names:
            stages, parameter = self._stages[name], self.program.parameters[name]
            value = None
            if name in self.places:
                unit, place = self.places[name]
                if unit not in whole:
                    # Names come segment by segment, so few units are in use at once.
                    whole = {**dict(itertools.islice(reversed(whole.items()), 1)), unit: self._reunited(unit, own(unit))}
                value = gather(place.of(whole[unit]).to(dtype(name)), parameter.spec, self.world)
            found[name] = from_stage(value, parameter.shape, dtype(name), stages[0], self.world)
        return found

    def _reunited(self, unit: Unit, own: Tensor) -> Tensor:
        """A buffer of the whole unit from the own slices of its ranks."""
        if not unit.split:
            return own
        out = own.new_empty(unit.numel)
        self.world.transport.all_gather(out, own.contiguous(), self.world.group(unit.split)).wait()
        return out

    def gradients(self) -> dict[str, Tensor]:
        """Global gradients of the last step, on every rank, by first name."""
        return self.collect(self.trained, lambda unit: unit.own_gradient, self.accumulator_of)

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
        names = [name for name in self.program.parameters if self._stages[name]]
        state = self.collect(names, _precise, self._stored_dtype)
        for name, buffer in self.program.buffers.items():
            value = gather(self.buffers[name], buffer.spec, self.world) if name in self.buffers else None
            if self._stages[name]:
                value = from_stage(value, buffer.shape, buffer.dtype, self._stages[name][0], self.world)
            assert value is not None
            state[name] = value
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
        if tuple(state[key].shape) != parameter.shape:
            raise ValueError(f"{key} has shape {tuple(state[key].shape)} in the state and {parameter.shape} in the model")
        return shard(state[key], parameter.spec, self.world.mesh, self.world.rank)

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


def squared_norm(x: Tensor, *, exact: bool = False) -> Tensor:
    """Sum of squares in float64, by chunks of NORM_CHUNK in the dtype of x."""
    if exact or x.dtype == torch.float64:
        norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
        return norm.square()
    whole = x.numel() // NORM_CHUNK * NORM_CHUNK
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in (x[:whole].view(-1, NORM_CHUNK), x[whole:].view(1, -1)):
        if part.numel():
            norms = torch.linalg.vector_norm(part, dim=1).double()
            total += torch.dot(norms, norms)
    return total


def _precise(unit: Unit) -> Tensor:
    """What a unit's values are before they are rounded to the dtype that is computed in."""
    wide = any(place.parameter.stored is not None for place in unit.places)
    return unit.master if wide and unit.master is not None else unit.own_values


def _fitting(value: Tensor, shape: Sequence[int], name: str) -> Tensor:
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name}: the shard has shape {tuple(value.shape)}, this rank holds {tuple(shape)}")
    if value.is_meta:
        raise ValueError(f"{name} is a meta tensor without a value: build the model under phx.deferred_init or give it values")
    return value
