"""Which parameters lie together and in which order: the units of one rank. Equal on ranks that reduce together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch

from phalanx.comm.world import World
from phalanx.derive.program import Program
from phalanx.run.flat import Place, Unit
from phalanx.schedule.actions import Storage
from phalanx.schedule.view import padded_numel, split_axes
from phalanx.spec import Spec, owner


def lay_out(
    program: Program,
    world: World,
    segments: Sequence[int],
    stages: Mapping[str, tuple[int, ...]],
    groups: Mapping[str, Hashable],
    storage: Storage | None,
) -> tuple[Unit, ...]:
    """The units of what this rank's `segments` use, in order of segment. `stages` are the pp coordinates that use each parameter."""
    mesh, local, stage = world.mesh, set(segments), world.coordinates.get("pp", 0)
    kinds: dict[tuple[int, torch.dtype, bool, tuple[str, ...], str], list[Place]] = {}
    for name, parameter in program.parameters.items():
        everywhere = program.hosts(name)
        hosts = tuple(k for k in everywhere if k in local)
        if not hosts:
            continue
        wanted = program.reduce_axes(name) if parameter.trainable else frozenset()
        split = split_axes(program, name, storage)
        shared = stages[name] if parameter.trainable and len(stages[name]) > 1 else ()
        place = Place(
            parameter=parameter,
            shape=parameter.spec.local_shape(parameter.shape, mesh),
            start=0,
            hosts=hosts,
            axes=tuple(axis for axis in mesh.names if axis in wanted and mesh.shape[axis] > 1),
            split=split,
            stages=shared,
            alone=name if len(everywhere) > 1 and (shared or split) else "",
            counted=contributes(parameter.spec, world, split) and stages[name][0] == stage,
            group=groups.get(name),
        )
        kinds.setdefault((hosts[0], parameter.dtype, parameter.trainable, split, place.alone), []).append(place)
    order = sorted(kinds, key=lambda kind: (kind[0], str(kind)))
    return tuple(_unit(world, storage, kinds[kind], *kind[:4]) for kind in order)


def _unit(
    world: World,
    storage: Storage | None,
    places: list[Place],
    segment: int,
    dtype: torch.dtype,
    trainable: bool,
    split: tuple[str, ...],
) -> Unit:
    # Nothing here may depend on the rank, since ranks that reduce together must lay out alike: who counts an element differs among
    # them, the axes that decide it do not.
    places.sort(key=lambda p: (p.axes, p.stages, sorted(p.parameter.spec.varying), str(p.group)))
    laid, start = [], 0
    for place in places:
        laid.append(replace(place, start=start))
        start += place.stored
    group = world.group(split)
    level = storage.level if storage and split else 0
    return Unit(
        segment=segment,
        dtype=dtype,
        trainable=trainable,
        places=tuple(laid),
        split=split,
        ranks=group.size,
        index=group.index(world.rank),
        sliced=level == 3,
        scattered=level >= 2,
        numel=padded_numel(start, group.size, dtype.itemsize),
    )


def contributes(spec: Spec, world: World, split: Sequence[str] = ()) -> bool:
    """True on the one rank, of those with the same data, that adds it to a sum over its stage's ranks.

    Ranks along `split` have data of their own.
    """
    return owner(spec.with_partial(spec.partial | {"pp", *split}), world.mesh, world.rank)
