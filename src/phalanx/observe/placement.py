"""Which axis of a mesh crosses which links, what is wrong with that, and which order of the axes would be better.

Ranks sit on devices in order: hosts as they are listed, on each the local ranks in the order of its devices.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.mesh import Mesh
from phalanx.observe.machine import Machine
from phalanx.observe.topology import ORDER, Device, Link, Wiring

TRAFFIC = {"tp": 0, "sp": 0, "ep": 1, "cp": 1, "dp": 2, "fsdp": 2, "pp": 3}
"""How much an axis talks, 0 the most: within every layer, around attention or experts, once a step, and at stage borders only."""
CHATTY = 0
UNKNOWN_AXIS = TRAFFIC["dp"]


@dataclass(frozen=True)
class Crossing:
    """What an axis crosses. `link` is the slowest that its worst group cannot avoid, `ranks` the two that it joins."""

    axis: str
    size: int
    groups: int
    link: Link
    ranks: tuple[int, int]
    symbols: dict[str, int]
    """How many groups depend on which kind of link."""

    @property
    def traffic(self) -> int:
        return TRAFFIC.get(self.axis, UNKNOWN_AXIS)


@dataclass(frozen=True)
class Judgement:
    """`better` is the same mesh in an order that keeps busy axes on faster links, if there is one."""

    mesh: Mesh
    devices: tuple[Device, ...]
    crossings: tuple[Crossing, ...]
    warnings: tuple[str, ...]
    advice: tuple[str, ...]
    better: Mesh | None = None


def place(machines: Sequence[Machine], mesh: Mesh, per_host: Sequence[int] | None = None) -> tuple[Device, ...]:
    """The device of every rank. `per_host` has the number of ranks on each host, if a launcher has said so.

    Raises ValueError if the mesh does not divide over the hosts, or a host has fewer GPUs than ranks. Ranks of a host without
    GPUs are spread over its NUMA nodes in order, as if they were pinned so.
    """
    hosts = len(machines)
    if per_host is None:
        if mesh.size % hosts:
            raise ValueError(
                f"mesh {mesh} has {mesh.size} ranks, which do not divide over {hosts} hosts; use a multiple of {hosts}"
            )
        per_host = [mesh.size // hosts] * hosts
    if sum(per_host) != mesh.size:
        raise ValueError(f"mesh {mesh} has {mesh.size} ranks, but the launcher started {sum(per_host)}")
    with_gpus = [machine.host for machine in machines if machine.gpus]
    devices = []
    for host, (machine, ranks) in enumerate(zip(machines, per_host, strict=True)):
        if with_gpus and not machine.gpus:
            raise ValueError(f"host {machine.host} shows no GPU, host {with_gpus[0]} does: a mesh needs one kind of device")
        if machine.gpus and ranks > len(machine.gpus):
            raise ValueError(
                f"mesh {mesh} puts {ranks} ranks on host {machine.host}, which shows {len(machine.gpus)} GPUs; "
                f"use a mesh of {len(machine.gpus) * hosts} ranks, or more hosts"
            )
        nodes = max(len(machine.numa), 1)
        devices += [Device(host, rank if machine.gpus else rank * nodes // ranks) for rank in range(ranks)]
    return tuple(devices)


def judge(machines: Sequence[Machine], mesh: Mesh, per_host: Sequence[int] | None = None) -> Judgement:
    """What every axis of more than one rank crosses, with warnings and advice."""
    devices = place(machines, mesh, per_host)
    wiring = Wiring(machines)
    ways = _Ways(wiring, devices)
    crossings = _crossings(ways, mesh)
    better = _better(ways, mesh, crossings)
    warnings, advice = _verdict(ways, crossings, better)
    return Judgement(mesh, devices, crossings, tuple(warnings + unhealthy(wiring)), tuple(advice), better)


class _Ways:
    """The links between the ranks of a placement, each worked out once."""

    def __init__(self, wiring: Wiring, devices: Sequence[Device]) -> None:
        self.size = len(devices)
        known: dict[tuple[Device, Device], Link] = {}
        for a, b in itertools.product(dict.fromkeys(devices), repeat=2):
            known[a, b] = wiring.link(a, b)
        self.links = [[known[a, b] for b in devices] for a in devices]
        self.distances = [[way.distance for way in row] for row in self.links]

    def bottleneck(self, group: Sequence[int]) -> tuple[Link, tuple[int, int]]:
        """The slowest link that joining all of a group cannot avoid: the worst of a spanning tree of best links (Prim)."""
        nearest = {rank: (self.distances[group[0]][rank], group[0]) for rank in group[1:]}
        worst: tuple[tuple[int, float], int, int] | None = None
        while nearest:
            rank = min(nearest, key=lambda other: (nearest[other], other))
            distance, via = nearest.pop(rank)
            if worst is None or distance > worst[0]:
                worst = distance, via, rank
            for other, known in nearest.items():
                nearest[other] = min(known, (self.distances[rank][other], rank))
        assert worst is not None
        _, a, b = worst
        return self.links[a][b], (min(a, b), max(a, b))

    def fastest(self) -> Link:
        pairs = itertools.combinations(range(self.size), 2)
        return min((self.links[a][b] for a, b in pairs), key=lambda way: way.distance)

    def domains(self, kind: str) -> list[int]:
        """Sizes of the sets of ranks that are joined by links of this kind or nearer, the largest first."""
        sizes, left = [], set(range(self.size))
        while left:
            reached, edge = set(), {left.pop()}
            while edge:
                reached |= edge
                edge = {b for b in left for a in edge if ORDER[self.links[a][b].kind] <= ORDER[kind]}
                left -= edge
            sizes.append(len(reached))
        return sorted(sizes, reverse=True)


def _crossings(ways: _Ways, mesh: Mesh) -> tuple[Crossing, ...]:
    found = []
    for axis, size in mesh.axes:
        if size == 1:
            continue
        each = [ways.bottleneck(group) for group in _groups(mesh, axis)]
        worst, ranks = max(each, key=lambda pair: (pair[0].distance, [-rank for rank in pair[1]]))
        symbols = Counter(way.symbol for way, _ in sorted(each, key=lambda pair: pair[0].distance))
        found.append(Crossing(axis, size, len(each), worst, ranks, dict(symbols)))
    return tuple(found)


def _groups(mesh: Mesh, axis: str) -> Iterator[list[int]]:
    """mesh.groups of one axis, in time linear in the number of ranks: orders are tried by the hundred."""
    place = mesh.names.index(axis)
    box = np.arange(mesh.size).reshape([size for _, size in mesh.axes])
    yield from np.moveaxis(box, place, -1).reshape(-1, mesh.shape[axis]).tolist()


def _better(ways: _Ways, mesh: Mesh, crossings: Sequence[Crossing]) -> Mesh | None:
    """The order of axes whose busiest axes have the nearest links; None if that is the given one or no better."""
    best, least = None, _burden(crossings)
    for axes in itertools.permutations([(name, size) for name, size in mesh.axes if size > 1]):
        order = Mesh(**dict(axes))
        burden = _burden(_crossings(ways, order))
        if burden < least:
            best, least = order, burden
    return best


def _burden(crossings: Sequence[Crossing]) -> list[tuple[int, float]]:
    """The worst link at each level of traffic, the busiest first: orders of one mesh are compared by it."""
    worst: dict[int, tuple[int, float]] = {}
    for crossing in crossings:
        worst[crossing.traffic] = max(worst.get(crossing.traffic, (-1, 0.0)), crossing.link.distance)
    return [worst[level] for level in sorted(worst)]


def _verdict(ways: _Ways, crossings: Sequence[Crossing], better: Mesh | None) -> tuple[list[str], list[str]]:
    warnings, advice = [], []
    fastest = ways.fastest() if ways.size > 1 else None
    for crossing in crossings:
        if crossing.traffic != CHATTY or fastest is None:
            continue
        axis, (a, b), way = crossing.axis, crossing.ranks, crossing.link
        if ORDER[way.kind] > ORDER[fastest.kind]:
            warnings.append(
                f"{axis} talks in every layer but leaves the fastest links: ranks {a} and {b} meet over {way}, "
                f"while the fastest here is {fastest}"
            )
            if better is None or _still_leaves(ways, better, axis, fastest):
                advice.append(_cannot(crossing, fastest, ways.domains(fastest.kind)))
        if not way.p2p:
            warnings.append(f"{axis}: ranks {a} and {b} have no peer-to-peer, so what they exchange goes through host memory")
    if better is not None:
        changed = [f"{now.axis} {was.symbol} → {now.link.symbol}" for now, was in _changes(ways, better, crossings)]
        advice.append(f"order the axes as --mesh {better}: {', '.join(changed)}")
    return warnings, advice


def _cannot(crossing: Crossing, fastest: Link, sizes: Sequence[int]) -> str:
    fitting = math.gcd(*sizes)
    instead = (
        f"{crossing.axis}={fitting} or a divisor of it fits" if fitting > 1 else "leave out the devices without such links"
    )
    return (
        f"no order of the axes keeps {crossing.axis}={crossing.size} on {fastest.symbol}: such links join sets of "
        f"{', '.join(map(str, sizes))} ranks; {instead}"
    )


def _still_leaves(ways: _Ways, mesh: Mesh, axis: str, fastest: Link) -> bool:
    return any(ORDER[c.link.kind] > ORDER[fastest.kind] for c in _crossings(ways, mesh) if c.axis == axis)


def _changes(ways: _Ways, better: Mesh, crossings: Sequence[Crossing]) -> list[tuple[Crossing, Link]]:
    before = {crossing.axis: crossing.link for crossing in crossings}
    return [(now, before[now.axis]) for now in _crossings(ways, better) if now.link.distance != before[now.axis].distance]


def unhealthy(wiring: Wiring) -> list[str]:
    """What is wrong with hosts whatever runs on them: NVLinks that are down, and ports behind another socket."""
    found = []
    for machine, ports in zip(wiring.machines, wiring.uplinks, strict=True):
        counts = [sum(links.count for links in gpu.nvlinks) for gpu in machine.gpus]
        for gpu, count, port in zip(machine.gpus, counts, ports, strict=True):
            if count < max(counts):
                found.append(f"{machine.host}: GPU {gpu.index} has {count} active NVLinks, another GPU has {max(counts)}")
            if len(wiring.machines) > 1 and port is not None and port.kind == "SYS":
                found.append(
                    f"{machine.host}: GPU {gpu.index} reaches the network only over {port.nic.name} at another NUMA node"
                )
    return found
