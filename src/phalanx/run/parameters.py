"""The weights that one rank holds: their storage, their gradients, and the sums that a step owes them.

Parameters of one dtype lie in one flat buffer, ordered so that what is reduced together, counted together or updated together
is contiguous: a REDUCE is one collective per range, the optimizer one call over few ranges. Segments see views. This file knows
the Program and the World; it does not know in which order a step does things.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.comm.transport import Handle
from phalanx.comm.world import World
from phalanx.derive.program import Parameter, Program
from phalanx.run.flat import Flat, Gradients, Place, Span, accumulator
from phalanx.run.gather import from_stage, gather
from phalanx.run.sums import sum_over
from phalanx.spec import Spec, owner, shard

NORM_CHUNK = 4096
"""Elements summed in the gradient's own dtype; chunks are added in float64. One float32 norm over 16M elements is off by 1.3e-3,
chunks by 2e-9 at the same speed; converting the whole buffer to float64 first is twenty times slower."""


class Parameters:
    """The shards of the parameters and buffers that this rank's segments use.

    placement   pp coordinate that hosts each segment
    values      the local shard of a parameter or buffer; called once for each one that is hosted here
    groups      optimizer group by first name; parameters of one group are updated alike
    Every rank of the world constructs it together, since communicators between tied stages are opened here.
    """

    def __init__(
        self,
        program: Program,
        world: World,
        placement: Sequence[int],
        values: Callable[[Parameter], Tensor],
        groups: Mapping[str, Hashable] | None = None,
    ) -> None:
        self.program, self.world, self.placement = program, world, tuple(placement)
        self.stage = world.coordinates.get("pp", 0)
        self.segments = tuple(s for s in program.segments if self.placement[s.index] == self.stage)
        self._stages = {
            name: tuple(sorted({self.placement[s.index] for s in program.segments if name in (*s.params, *s.buffers)}))
            for name in (*program.parameters, *program.buffers)
        }
        self.trained = tuple(name for name, p in program.parameters.items() if p.trainable and self._stages[name])
        """Names of the parameters that some rank of the world trains."""
        shared = sorted({self._stages[name] for name in self.trained if len(self._stages[name]) > 1})
        world.open_stages(shared)
        self._links = {stages: world.stage_group(stages) for stages in shared if self.stage in stages}
        self.flats = self._lay_out(groups or {})
        self.places = {place.parameter.name: (flat, place) for flat in self.flats for place in flat.places}
        self.views: dict[str, Tensor] = {name: self.view(flat.values, place) for name, (flat, place) in self.places.items()}
        for name, view in self.views.items():
            view.copy_(_fitting(values(program.parameters[name]), view.shape, name))
        extra = [program.count] + ([program.tables] if program.tables is not None else [])
        needed = {name for segment in (*self.segments, *extra) for name in segment.buffers}
        needed |= {name for name in program.buffers if not self._stages[name]}
        self.buffers: dict[str, Tensor] = {}
        for name, buffer in program.buffers.items():
            if name in needed:
                shape = buffer.spec.local_shape(buffer.shape, world.mesh)
                self.buffers[name] = _fitting(values(buffer), shape, name).to(world.device, buffer.dtype).clone()
        self._targets = {segment.index: self._segment_targets(segment.index) for segment in self.segments}
        self._reductions = self._spans(
            lambda p: (p.hosts[0], p.axes, p.stages and p.parameter.name) if p.axes or p.stages else None
        )
        self._tied = sorted((s for s in self._reductions if s.places[0].stages), key=lambda s: s.places[0].parameter.name)
        self._counted = self._spans(lambda place: place.hosts[0] if place.counted else None)
        self.updates = self._spans(lambda place: (place.hosts[0], place.group))
        """Ranges of one optimizer group."""
        self._unwritten: set[str] = set()
        self._issued: list[Handle] = []
        self._taken: set[int] = set()
        self._held: set[int] = set()

    # Layout

    def _lay_out(self, groups: Mapping[str, Hashable]) -> tuple[Flat, ...]:
        mesh, local = self.world.mesh, {s.index for s in self.segments}
        kinds: dict[tuple[torch.dtype, bool], list[Place]] = {}
        for name, parameter in self.program.parameters.items():
            hosts = tuple(k for k in self.program.hosts(name) if k in local)
            if not hosts:
                continue
            wanted = self.program.reduce_axes(name) if parameter.trainable else frozenset()
            axes = tuple(axis for axis in mesh.names if axis in wanted and mesh.shape[axis] > 1)
            stages = self._stages[name] if parameter.trainable and len(self._stages[name]) > 1 else ()
            place = Place(
                parameter=parameter,
                shape=parameter.spec.local_shape(parameter.shape, mesh),
                start=0,
                hosts=hosts,
                axes=axes,
                stages=stages,
                counted=contributes(parameter.spec, self.world) and self._stages[name][0] == self.stage,
                group=groups.get(name),
            )
            kinds.setdefault((parameter.dtype, parameter.trainable), []).append(place)
        flats = []
        for (dtype, trainable), places in kinds.items():
            # Nothing here may depend on the rank, since ranks that reduce together must lay out alike: who counts an element
            # differs among them, the axes that decide it do not.
            places.sort(key=lambda p: (p.hosts[0], p.axes, p.stages, sorted(p.parameter.spec.varying), str(p.group)))
            laid, start = [], 0
            for place in places:
                laid.append(replace(place, start=start))
                start += place.stored
            values = torch.zeros(start, dtype=dtype, device=self.world.device)
            gradients = {}
            for segment, run in itertools.groupby(laid if trainable else (), lambda place: place.hosts[0]):
                own = list(run)
                first = own[0].start
                numel = own[-1].start + own[-1].stored - first
                shared = self.world.transport.shared(numel, accumulator(dtype)) if any(place.axes for place in own) else None
                data = (
                    shared.zero_()
                    if shared is not None
                    else torch.zeros(numel, dtype=accumulator(dtype), device=self.world.device)
                )
                ends = [(place.start + place.numel - first, place.start + place.stored - first) for place in own]
                gaps = [data[end:stop] for end, stop in ends if end < stop]
                gradients[segment] = Gradients(first, data, gaps, shared is not None)
            flats.append(Flat(dtype, trainable, tuple(laid), values, gradients))
        return tuple(flats)

    def _spans(self, key: Callable[[Place], Hashable]) -> list[Span]:
        """Runs of neighbours with equal keys in the trained flats, without those whose key is None."""
        spans = []
        for flat in self.flats:
            if flat.trainable:
                for shared, run in itertools.groupby(flat.places, key):
                    places = tuple(run)
                    if shared is not None:
                        spans.append(Span(flat, places, places[0].start, places[-1].start + places[-1].stored))
        return spans

    def _segment_targets(self, index: int) -> list[tuple[str, Tensor, bool]]:
        """For each gradient that a segment returns: its name, its accumulator, and whether this rank's counts at all."""
        segment, targets = self.program.segments[index], []
        for name, deferred in zip(segment.params, segment.cls.deferred, strict=True):
            _, place = self.places[name]
            if place.parameter.trainable:
                # An axis that other hosts of the parameter leave partial and this one does not: here the gradient is the same
                # on every rank of it, so one of them contributes it to the sum (R -> P).
                missing = set(place.axes) - deferred
                counts = all(self.world.coordinates[axis] == 0 for axis in missing)
                targets.append((name, self.local_gradient(name), counts))
        return targets

    def view(self, buffer: Tensor, place: Place) -> Tensor:
        """The part of a buffer that is laid out like this parameter's flat."""
        return buffer[place.start : place.start + place.numel].view(place.shape)

    # One step

    def begin(self) -> None:
        """Forget the gradients of the step before, and give their memory to the forward."""
        for chunk in self._chunks():
            chunk.release()
        self._unwritten = {name for name, (_, place) in self.places.items() if place.parameter.trainable}
        self._issued.clear()
        self._taken.clear()
        self._held.clear()

    def accumulators(self, segment: int) -> list[Tensor] | None:
        """Where a segment may write its gradients itself, one per trainable parameter; None if one does not count here."""
        targets = self._targets[segment]
        return [view for _, view, _ in targets] if all(counts for _, _, counts in targets) else None

    def fresh(self, segment: int) -> list[bool]:
        """For each of `accumulators`: whether it is to be overwritten. From now on it counts as written."""
        if not self._unwritten:
            return [False] * len(self._targets[segment])
        self._hold(segment)
        flags = []
        for name, _, _ in self._targets[segment]:
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
        for (name, view, counts), grad in zip(self._targets[segment], grads, strict=True):
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

        Every host of them on this rank must have had its last backward, as `schedule.data.reductions` orders it.
        """
        self._taken.add(segment)
        issued = []
        for span in self._reductions:
            place = span.places[0]
            if place.hosts[0] == segment and place.axes:
                self._zero_unwritten([place.parameter.name for place in span.places])
                issued.append(sum_over(self.world, span.gradient, place.axes))
        self._issued += issued
        return issued

    def finish(self) -> None:
        """Complete every sum that this step owes; last, those over the stages that share a tied parameter, in order of name.

        Those come here and not at their REDUCE because they need its sums over axes, for which the host would block, and
        because every stage passes here when its backwards are done, so the order is the same everywhere.
        """
        self._zero_unwritten(list(self.places))
        for handle in self._issued:
            handle.wait()
        self._issued.clear()
        for span in self._reductions:
            first = span.places[0].hosts[0]
            assert not span.places[0].axes or first in self._taken, f"the schedule has no REDUCE{first} before NORM"
        for span in self._tied:
            self.world.transport.all_reduce(span.gradient, self._links[span.places[0].stages]).wait()

    def _chunks(self) -> Iterator[Gradients]:
        return (chunk for flat in self.flats for chunk in flat.gradients.values())

    def _hold(self, segment: int) -> None:
        """Memory for the accumulators that a segment writes to, at its first backward of a step."""
        if segment not in self._held:
            self._held.add(segment)
            for name, _, _ in self._targets[segment]:
                flat, place = self.places[name]
                flat.gradients[place.hosts[0]].hold()

    def _zero_unwritten(self, names: Sequence[str]) -> None:
        """A parameter that got no gradient in this step counts as zeros."""
        if not self._unwritten:
            return
        for name in [name for name in names if name in self._unwritten]:
            flat, place = self.places[name]
            flat.gradients[place.hosts[0]].hold()
            self.local_gradient(name).zero_()
            self._unwritten.discard(name)

    # What the norm and the optimizer read

    def squared_norm(self, *, exact: bool = False) -> Tensor:
        """Sum of squares of the gradients that this rank counts, in float64. `exact` squares in float64 too."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for span in self._counted:
            total += squared_norm(span.gradient, exact=exact)
        return total

    def first_non_finite(self) -> str | None:
        """First name, in the Program's order, whose gradient here has a NaN or an infinity."""
        for name in self.program.parameters:
            if name in self.places and self.places[name][0].trainable and not self.local_gradient(name).isfinite().all():
                return name
        return None

    def local_gradient(self, name: str) -> Tensor:
        """This rank's shard of the gradient of the last step."""
        flat, place = self.places[name]
        chunk = flat.gradients[place.hosts[0]]
        start = place.start - chunk.start
        return chunk.data[start : start + place.numel].view(place.shape)

    # Global values

    def collect(
        self, names: Sequence[str], local: Callable[[str], Tensor], dtype: Callable[[str], torch.dtype]
    ) -> dict[str, Tensor]:
        """Global tensors from shards, on every rank. `local` gives the shard of a parameter or buffer that is hosted here."""
        known = {**self.program.buffers, **self.program.parameters}
        found = {}
        for name in names:
            stages, parameter = self._stages[name], known[name]
            value = gather(local(name), parameter.spec, self.world) if name in self.views or name in self.buffers else None
            # What no stage hosts is read by tables or the count, and every rank has it.
            if stages:
                value = from_stage(value, parameter.shape, dtype(name), stages[0], self.world)
            assert value is not None
            found[name] = value
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer that the Program uses, global, by first name and aliases, on every rank."""
        names = [name for name in self.program.parameters if self._stages[name]] + list(self.program.buffers)
        known = {**self.program.buffers, **self.program.parameters}
        state = self.collect(names, lambda name: {**self.buffers, **self.views}[name], lambda name: known[name].dtype)
        return {alias: value for name, value in state.items() for alias in (name, *known[name].aliases)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the shards of global tensors. A name may be any of a tied parameter's; every hosted one must be there."""
        loaded = []
        for name, view in {**self.buffers, **self.views}.items():
            parameter = self.program.parameters.get(name) or self.program.buffers[name]
            key = next((key for key in (name, *parameter.aliases) if key in state), name)
            loaded.append((view, self.shard_of(state, key, name)))
        for view, value in loaded:
            view.copy_(value)

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

    def accumulator_of(self, name: str) -> torch.dtype:
        return accumulator(self.program.parameters[name].dtype)


def contributes(spec: Spec, world: World) -> bool:
    """True on the one rank, of those with the same data, that adds it to a sum over its stage's ranks."""
    return owner(spec.with_partial(spec.partial | {"pp"}), world.mesh, world.rank)


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


def _fitting(value: Tensor, shape: Sequence[int], name: str) -> Tensor:
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name}: the shard has shape {tuple(value.shape)}, this rank holds {tuple(shape)}")
    if value.is_meta:
        raise ValueError(f"{name} is a meta tensor without a value: build the model under phx.deferred_init or give it values")
    return value
