"""The actions that belong to the step and not to the pipeline: COUNT, REDUCE, NORM, OPT, and what each REDUCE sums over what.

Pure. `reductions` is the one answer to "which gradients does REDUCE(k) sum, over which ranks, in which order"; the executor
follows it and the checker proves that every rank agrees with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.schedule.actions import Action
from phalanx.schedule.view import View, Weight

COUNT_BYTES = 8
"""One number as int64, or float64 if the loss counts in floating point: the sum of all microbatches' counts."""
NORM_BYTES = 3 * 8
"""Loss sum, squared norm and count, in float64. No flag is sent: a sum shows whether a term of it was not finite."""


@dataclass(frozen=True)
class Part:
    """One sum of a REDUCE: over mesh axes, or over the pp coordinates that host a tied parameter."""

    parameters: tuple[str, ...]
    bytes: int
    axes: tuple[str, ...] = ()
    coordinates: tuple[int, ...] = ()
    """pp coordinates of a sum over hosting stages, at equal other coordinates; empty for a sum over axes."""


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


def reductions(view: View, coordinates: Sequence[int]) -> dict[int, Reduction]:
    """By segment, the REDUCEs of a step; `coordinates` is the pp coordinate of each segment.

    A parameter is summed over its axes once on each coordinate, by the first of its segments there. A parameter of several
    coordinates is then summed over those, as a rule by the same REDUCE.
    """
    owners = _owners(view, coordinates)
    over_axes: dict[int, dict[tuple[tuple[str, ...], str, str], list[Weight]]] = {}
    over_hosts: dict[int, dict[tuple[tuple[int, ...], str], list[Weight]]] = {}
    earlier: dict[int, set[int]] = {k: set() for k in range(len(view.segments))}
    after = {k: {k} for k in range(len(view.segments))}
    for k, segment in enumerate(view.segments):
        for weight in segment.weights:
            hosts = view.hosts(weight.name)
            here = [host for host in hosts if coordinates[host] == coordinates[k]]
            if k != here[0]:
                continue
            after[k].update(here)
            # A parameter that several coordinates share is summed by itself, since it is summed over them next.
            alone = weight.name if len(here) < len(hosts) else ""
            if weight.axes:
                over_axes.setdefault(k, {}).setdefault((weight.axes, weight.dtype, alone), []).append(weight)
            if len(here) < len(hosts):
                owner = owners[hosts, coordinates[k]]
                after[owner].update(here)
                over_hosts.setdefault(owner, {}).setdefault((hosts, weight.name), []).append(weight)
                if weight.axes and owner != k:
                    earlier[owner].add(k)
    found = {}
    for k in sorted({*over_axes, *over_hosts}):
        parts = [_part(weights, axes=axes) for (axes, _, _), weights in sorted(over_axes.get(k, {}).items())]
        # In the order of hosts, then names: every coordinate then makes the same parts in the same order.
        for (hosts, _), weights in sorted(over_hosts.get(k, {}).items()):
            parts.append(_part(weights, coordinates=tuple(sorted({coordinates[host] for host in hosts}))))
        found[k] = Reduction(k, tuple(parts), tuple(sorted(after[k])), tuple(sorted(earlier[k])))
    return found


def _owners(view: View, coordinates: Sequence[int]) -> dict[tuple[tuple[int, ...], int], int]:
    """(hosts of tied parameters, coordinate) -> the segment whose REDUCE sums them over hosts that are on several coordinates.

    It is the first host, except that sets of hosts which meet in one REDUCE anywhere share one REDUCE everywhere. Otherwise two
    coordinates could be bound to opposite orders: one by a REDUCE that has both sums, the other by two that have one each.
    """
    every = {view.hosts(weight.name) for segment in view.segments for weight in segment.weights}
    groups = [[hosts] for hosts in sorted(every) if len({coordinates[host] for host in hosts}) > 1]

    def first(group: Sequence[tuple[int, ...]]) -> dict[int, int]:
        members = sorted({host for hosts in group for host in hosts}, reverse=True)
        return {coordinates[host]: host for host in members}

    while True:
        meeting = (
            (a, b) for n, a in enumerate(groups) for b in groups[n + 1 :] if set(first(a).values()) & set(first(b).values())
        )
        a, b = next(meeting, ([], []))
        if not a:
            break
        groups = [group for group in groups if group not in (a, b)] + [a + b]
    return {(hosts, at): owner for group in groups for hosts in group for at, owner in first(group).items()}


def _part(weights: Sequence[Weight], axes: tuple[str, ...] = (), coordinates: tuple[int, ...] = ()) -> Part:
    ordered = sorted(weights, key=lambda weight: weight.name)
    return Part(tuple(w.name for w in ordered), sum(w.bytes for w in ordered), axes, coordinates)


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


def reduce(reduction: Reduction) -> Action:
    return Action("REDUCE", reduction.segment, lane=reduction.lane)


def finish() -> tuple[Action, Action]:
    return Action("NORM", lane="world"), Action("OPT")
