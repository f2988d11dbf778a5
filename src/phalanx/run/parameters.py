"""The gradients of one rank in one step: where they add up, the sums that the step owes them, and what the norm reads.

A REDUCE is one collective per range of a unit, or one reduce_scatter per unit that is divided. This file does not know in which order
a step does things.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.comm.transport import Handle
from phalanx.comm.world import World
from phalanx.derive.program import Parameter, Program
from phalanx.run.flat import Place, Range, Unit, runs
from phalanx.run.reduce import all_reduced, scattered
from phalanx.run.stored import Stored
from phalanx.schedule.actions import Storage

NORM_CHUNK = 4096
"""Elements summed in the gradient's own dtype; chunks are added in float64. One float32 norm over 16M elements is off by 1.3e-3,
chunks by 2e-9 at the same speed; converting the whole buffer to float64 first is twenty times slower."""


class Parameters(Stored):
    """What a rank stores, and its gradients.

    reduce_dtype  dtype in which gradients travel, if it is narrower than that in which they accumulate
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
        super().__init__(program, world, places, values, groups, storage)
        self.reduce_dtype = reduce_dtype
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

    # One step

    def begin(self, *, keep: bool = False) -> None:
        """Forget the gradients of the step before, and give their memory to the forward unless they are to be kept for now."""
        if self.world.device.type == "cuda":
            for handle in self._issued:  # of a step that failed: they use memory that is about to be given back
                handle.wait()
        for unit in self.units:
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

    def gradients(self) -> dict[str, Tensor]:
        """Global gradients of the last step, on every rank, by first name."""
        if any(unit.trainable and not unit.gradient.held for unit in self.units):
            raise ValueError("the last step did not end, or none was taken: there are no gradients")
        return self.collect(self.trained, lambda unit: unit.own_gradient, self.accumulator_of)


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
