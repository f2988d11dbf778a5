"""The actions that belong to the step and not to the pipeline: COUNT, REDUCE, NORM, OPT, and what each REDUCE sums over what.

Pure. `reductions` is the one answer to "which gradients does REDUCE(k) sum, over which ranks, in which order"; the executor
follows it and the checker proves that every rank agrees with it. GATHER and FREE, which ZeRO adds, are placed by `storage.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.mesh import Mesh
from phalanx.schedule.actions import Action
from phalanx.schedule.view import View, Weight, padded_numel

COUNT_BYTES = 8
"""One number as int64, or float64 if the loss counts in floating point: the sum of all microbatches' counts."""
NORM_BYTES = 4 * 8
"""Loss sum, squared norm, how many ranks were asked to stop, and count, in float64. A sum shows whether a term was not finite."""


@dataclass(frozen=True)
class Part:
    """One sum of a REDUCE: over mesh axes, or over the pp coordinates that host a tied parameter."""

    parameters: tuple[str, ...]
    bytes: int
    """Of the gradients on one rank before the sum."""
    axes: tuple[str, ...] = ()
    """All that some of them is summed over, in mesh order."""
    coordinates: tuple[int, ...] = ()
    """pp coordinates of a sum over hosting stages, at equal other coordinates; empty for a sum over axes."""
    split: tuple[str, ...] = ()
    """Of the axes, those over which the sum is scattered: each rank is left with its slice (ZeRO)."""
    runs: tuple[tuple[tuple[str, ...], int], ...] = ()
    """(axes, bytes) of the parameters that are summed over the same axes, if it is scattered."""

    def calls(self, mesh: Mesh) -> tuple[tuple[str, tuple[str, ...], int], ...]:
        """(operation, axes, payload bytes) of each call on one rank, in order.

        Where parameters that are scattered together need different sums afterwards, ranks hold different shares of each: these bytes
        are then the mean over them.
        """
        share = mesh.extent(self.split)
        if self.coordinates:
            return (("all_reduce", ("pp",), self.bytes // share),)
        if not self.split:
            return tuple(("all_reduce", (axis,), self.bytes) for axis in sum_order(self.axes, ())[0])
        orders = [(*sum_order(axes, self.split), size) for axes, size in self.runs]
        slow = {after for _, after, _ in orders}
        # One call for the whole slice if all of it is summed over the same axes.
        late = [(next(iter(slow)), self.bytes)] if len(slow) == 1 else [(after, size) for _, after, size in orders]
        return (
            *(("all_reduce", (axis,), size) for before, _, size in orders for axis in before),
            ("reduce_scatter", self.split, self.bytes),
            *(("all_reduce", (axis,), size // share) for after, size in late for axis in after),
        )


def sum_order(axes: Sequence[str], split: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the axes of a sum, in mesh order: those summed whole before it is scattered over `split`, and those summed by slices after.

    The last axis has the fastest links and goes first, so the slow ones get what is smallest.
    """
    others = [axis for axis in axes if axis not in split]
    if not split:
        return tuple(reversed(others)), ()
    last = max(axes.index(axis) for axis in split)
    before = tuple(axis for axis in reversed(others) if axes.index(axis) > last)
    return before, tuple(axis for axis in reversed(others) if axes.index(axis) < last)


@dataclass(frozen=True)
class Reduction:
    """What REDUCE(segment) sums: the parts over axes first, then those over the hosts of tied parameters."""

    segment: int
    parts: tuple[Part, ...]
    after: tuple[int, ...]
    """Segments of the same coordinate whose backward must be finished: itself and the co-located hosts of its parameters."""
    earlier: tuple[int, ...] = ()
    """Segments of the same coordinate whose REDUCE must be complete: it sums over axes what this one sums over hosts."""

    @property
    def tied(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.coordinates)

    @property
    def lane(self) -> str:
        axes = dict.fromkeys(axis for part in self.parts for axis in part.axes)
        return f"reduce:{'+'.join(axes)}" if axes else "reduce:tied"


def reductions(view: View, places: Sequence[tuple[int, ...]]) -> dict[int, Reduction]:
    """By segment, the REDUCEs of a step; `places` are the pp coordinates that host each segment.

    A parameter is summed over its axes once on each coordinate, by the first of its segments there. A parameter of several
    coordinates is then summed over those, as a rule by the same REDUCE. Coordinates that share one segment share all of them (two
    copies of a model lie mirrored), so a REDUCE is the same wherever it is done.
    """
    owners = _owners(view, places)
    over_axes: dict[int, dict[tuple[tuple[str, ...], tuple[str, ...], str, str], list[Weight]]] = {}
    over_hosts: dict[int, dict[tuple[tuple[int, ...], str], list[Weight]]] = {}
    earlier: dict[int, set[int]] = {k: set() for k in range(len(view.segments))}
    after = {k: {k} for k in range(len(view.segments))}
    for k, segment in enumerate(view.segments):
        for weight in segment.weights:
            hosts = view.hosts(weight.name)
            here = [host for host in hosts if places[host] == places[k]]
            if k != here[0]:
                continue
            after[k].update(here)
            shared = len(everywhere(hosts, places)) > 1
            # A parameter of several segments lies elsewhere on each coordinate, and is gathered with each of them: it is a unit.
            alone = weight.name if len(hosts) > 1 and (shared or weight.split) else ""
            if weight.axes:
                # What is scattered travels together, whatever else it is summed over.
                axes = () if weight.split else weight.axes
                over_axes.setdefault(k, {}).setdefault((axes, weight.split, weight.dtype, alone), []).append(weight)
            if shared:
                owner = owners[hosts, places[k]]
                after[owner].update(here)
                over_hosts.setdefault(owner, {}).setdefault((hosts, alone or weight.dtype), []).append(weight)
                if weight.axes and owner != k:
                    earlier[owner].add(k)
    found = {}
    for k in sorted({*over_axes, *over_hosts}):
        parts = [_sum(view.mesh, weights) for _, weights in sorted(over_axes.get(k, {}).items())]
        # In the order of hosts, then names: every coordinate then makes the same parts in the same order.
        for (hosts, _), weights in sorted(over_hosts.get(k, {}).items()):
            parts.append(replace(_sum(view.mesh, weights), axes=(), runs=(), coordinates=everywhere(hosts, places)))
        found[k] = Reduction(k, tuple(parts), tuple(sorted(after[k])), tuple(sorted(earlier[k])))
    return found


def everywhere(hosts: Sequence[int], places: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """pp coordinates that host any of some segments, ascending."""
    return tuple(sorted({at for host in hosts for at in places[host]}))


def _owners(view: View, places: Sequence[tuple[int, ...]]) -> dict[tuple[tuple[int, ...], tuple[int, ...]], int]:
    """(hosts of tied parameters, coordinates of one of them) -> the segment whose REDUCE sums them over several coordinates.

    It is the first host, except that sets of hosts which meet in one REDUCE anywhere share one REDUCE everywhere. Otherwise two
    coordinates could be bound to opposite orders: one by a REDUCE that has both sums, the other by two that have one each.
    """
    every = {view.hosts(weight.name) for segment in view.segments for weight in segment.weights}
    groups = [[hosts] for hosts in sorted(every) if len(everywhere(hosts, places)) > 1]

    def first(group: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
        members = sorted({host for hosts in group for host in hosts}, reverse=True)
        return {places[host]: host for host in members}

    while True:
        meeting = (
            (a, b) for n, a in enumerate(groups) for b in groups[n + 1 :] if set(first(a).values()) & set(first(b).values())
        )
        a, b = next(meeting, ([], []))
        if not a:
            break
        groups = [group for group in groups if group not in (a, b)] + [a + b]
    return {(hosts, at): owner for group in groups for hosts in group for at, owner in first(group).items()}


def _sum(mesh: Mesh, weights: Sequence[Weight]) -> Part:
    """The sum over axes of weights that lie together."""
    names = tuple(sorted(weight.name for weight in weights))
    axes = tuple(axis for axis in mesh.names if any(axis in weight.axes for weight in weights))
    size, split, itemsize = sum(weight.bytes for weight in weights), weights[0].split, weights[0].itemsize
    if not split:
        return Part(names, size, axes)
    runs: dict[tuple[str, ...], int] = {}
    for weight in sorted(weights, key=lambda weight: weight.axes):
        runs[weight.axes] = runs.get(weight.axes, 0) + weight.bytes
    wide = max(4, itemsize)
    padded = padded_numel(size // wide, mesh.extent(split), itemsize) * wide
    return Part(names, padded, axes, (), split, tuple(runs.items()))


def together(found: Mapping[int, Reduction]) -> list[list[Reduction]]:
    """Reductions that share a sum over hosts, directly or through another, and so are issued at one point of the step.

    Were a tied REDUCE issued as soon as its own segment is finished, the last stage would wait in it for the first stage, which
    waits for gradients that the last stage has yet to send. Groups that another may wait for come first.
    """
    groups: list[list[Reduction]] = []
    for reduction in found.values():
        names = {part.parameters for part in reduction.tied}
        linked = [group for group in groups if any(part.parameters in names for other in group for part in other.tied)]
        merged = [other for group in linked for other in group] + [reduction]
        groups = [group for group in groups if group not in linked] + [merged]
    return sorted(groups, key=lambda group: any(reduction.tied for reduction in group))


def count(view: View) -> Action:
    return Action("COUNT", lane=f"count:{'+'.join(view.batch_axes)}" if view.batch_axes else "count")


def reduce(reduction: Reduction, microbatch: int | None = None) -> Action:
    """The sum of all microbatches' gradients, or of one's alone."""
    return Action("REDUCE", reduction.segment, microbatch, lane=reduction.lane)


def finish() -> tuple[Action, Action]:
    return Action("NORM", lane="world"), Action("OPT")
