"""A running machine: the mesh, this rank's place in it, and the transport that moves its bytes.

All communicators are opened when a World is made, by every rank in one order, because opening one later would need all ranks to
agree on when. Custom ops know a World by its name.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock

import torch
import torch.distributed as dist

from phalanx.comm.connect import Connecting, Terms
from phalanx.comm.launch import Launch, check_mesh, launch_from
from phalanx.comm.ledger import Ledger, Recorded
from phalanx.comm.threads import Fabric
from phalanx.comm.transport import Group, Transport
from phalanx.comm.watch.monitor import Options, options_from
from phalanx.comm.watch.register import BACKENDS
from phalanx.comm.wires import Wires
from phalanx.mesh import Mesh


class World:
    """One rank of a running mesh.

    transport    this rank's wires; every call through it is seen by `ledger`
    stage_sets   pipeline coordinates that need a group of their own (hosts of a tied parameter)
    p2p          axes along which ranks send and receive; stage sets always may
    epoch        counts rebuilds after a fault
    generator    random numbers of this rank alone, seeded with its rank
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        transport: Transport,
        *,
        device: torch.device | None = None,
        epoch: int = 0,
        stage_sets: Iterable[tuple[int, ...]] = (),
        p2p: Sequence[str] = ("pp",),
    ) -> None:
        if transport.world_size != mesh.size:
            raise ValueError(f"mesh {mesh} has {mesh.size} ranks, but the transport has {transport.world_size}")
        self.mesh = mesh
        self.rank = rank
        self.coordinates = mesh.coordinates(rank)
        self.device = device if device is not None else torch.device("cpu")
        self.epoch = epoch
        self.ledger = Ledger(transport)
        self.transport = Recorded(transport, self.ledger)
        self.generator = torch.Generator(self.device).manual_seed(rank)
        self._live = tuple(name for name, size in mesh.axes if size > 1)
        self._groups: dict[tuple[str, ...], Group] = {}
        self._stage_groups: dict[tuple[int, ...], Group] = {}
        self._places: dict[str, tuple[Group, int]] = {}
        self._p2p = frozenset(p2p)
        self._open_groups()
        self.open_stages(stage_sets)
        self.name = _register(self)

    def __repr__(self) -> str:
        return f"World({self.mesh}, rank={self.rank}, name={self.name!r})"

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.transport.abort(error)  # so that the other ranks learn why this one does not come
        self.close()

    @property
    def size(self) -> int:
        return self.mesh.size

    def group(self, axes: str | Sequence[str]) -> Group:
        """The ranks that differ from this one only along `axes`: names, or one text such as `tp` or `dp+tp`.

        Ranks ascend, so the order of the axes in the argument means nothing. Axes of one rank do not count; with none left it
        is the group of this rank alone.
        """
        names = set(axes.split("+") if isinstance(axes, str) else axes)
        unknown = sorted(names - set(self.mesh.names))
        if unknown:
            raise ValueError(f"mesh {self.mesh} has no axis {unknown[0]!r}")
        return self._groups[tuple(name for name in self._live if name in names)]

    def place(self, axis: str) -> tuple[Group, int]:
        """The group along `axis` and this rank's position in it."""
        place = self._places.get(axis)
        if place is None:
            group = self.group(axis)
            place = self._places[axis] = (group, group.index(self.rank))
        return place

    def stage_group(self, stages: Sequence[int]) -> Group:
        """The ranks at these pipeline coordinates and this rank's other coordinates."""
        key = tuple(sorted(set(stages)))
        if len(key) == self.mesh.extent(("pp",)):
            return self.group("pp") if "pp" in self._live else self.group(())
        if key == (self.coordinates.get("pp", 0),):
            return self.group(())
        if key not in self._stage_groups:
            raise ValueError(f"no group was opened for the stages {key}; pass them in stage_sets or to open_stages")
        return self._stage_groups[key]

    def open_stages(self, stage_sets: Iterable[tuple[int, ...]]) -> None:
        """Open groups of stages. Every rank of the world calls this with the same sets, at the same point."""
        stages = self.mesh.extent(("pp",))
        for key in sorted({tuple(sorted(set(stage_set))) for stage_set in stage_sets} - set(self._stage_groups)):
            if not key or key[0] < 0 or key[-1] >= stages:
                raise ValueError(f"stages {key} are outside a pipeline of {stages} stages")
            if len(key) == stages:
                continue
            for base in range(self.mesh.size):
                place = self.mesh.coordinates(base)
                if place.get("pp", 0):
                    continue
                ranks = tuple(self.mesh.rank({**place, "pp": stage}) for stage in key)
                group = self.transport.group(f"pp[{','.join(map(str, key))}]@{ranks[0]}", ranks, p2p=True)
                if base == self.mesh.rank({**self.coordinates, "pp": 0}):
                    self._stage_groups[key] = group

    def reconnect(self, transport: Transport) -> None:
        """New wires after a fault, with the same groups; the epoch goes up by one. Every rank does this."""
        self.epoch += 1
        self.transport.inner = transport
        self.ledger.stop()
        self.ledger = self.transport.ledger = Ledger(transport)
        stage_sets = list(self._stage_groups)
        self._places.clear()
        self._stage_groups.clear()
        self._open_groups()
        self.open_stages(stage_sets)

    def close(self) -> None:
        """Release the communicators and the name; idempotent."""
        _unregister(self.name)
        self.transport.close()

    def _open_groups(self) -> None:
        """The whole world, then every smaller combination of axes, single axes first."""
        combinations = [axes for count in range(1, len(self._live)) for axes in itertools.combinations(self._live, count)]
        if self._live:
            combinations.insert(0, self._live)
        self._groups[()] = Group(f"alone@{self.rank}", (self.rank,))
        for axes in combinations:
            title = "+".join(axes) if len(axes) < len(self._live) or len(axes) == 1 else "world"
            for ranks in _cosets(self.mesh, axes):
                group = self.transport.group(f"{title}@{ranks[0]}", ranks, p2p=len(axes) == 1 and axes[0] in self._p2p)
                if self.rank in ranks:
                    self._groups[axes] = group


def find_world(name: str) -> World:
    """The World of that name in this process."""
    world = _WORLDS.get(name)
    if world is None:
        raise ValueError(f"no world is called {name!r}; open ones: {', '.join(sorted(_WORLDS)) or 'none'}")
    return world


def init(
    mesh: Mesh,
    *,
    device: torch.device | str | None = None,
    timeout: float = 60.0,
    stage_sets: Iterable[tuple[int, ...]] = (),
    p2p: Sequence[str] = ("pp",),
    wires: Wires | None = None,
    watch: Path | str | None = None,
    watched: Sequence[str] = ("gloo", "nccl", "shm"),
) -> World:
    """The World of this process, from what its launcher says: torchrun, srun, or mpirun (Open MPI, or any that speaks PMI).

    The device is the CUDA device of the local rank if there is one (over NCCL), else the CPU: through shared memory inside a host
    and over Gloo between hosts, or over Gloo alone, with a log line that says why, where memory cannot be shared. Without a launcher,
    a mesh of one rank is a world without a process group. Where torch.distributed is initialised already, that is used and left
    open. `timeout` is in seconds, for one communication.

    wires    what the collectives across hosts are chosen by
    watch    a folder. What every rank calls is written to `watch`/flight and outlives it, and a hang or a disagreement gets a verdict
             with rank, call and line; `phalanx doctor run` reads the folder. None: PHALANX_RUN_DIR, which `phalanx run --watch` sets
             and without which nothing is watched
    watched  the backends whose groups are watched. A watch over NCCL has not run on a GPU yet

    Of `wires`, `watch` and `watched`, those of rank 0 count for all ranks. Raises ValueError if the mesh has more or fewer ranks than
    there are, or `watched` names a backend that cannot be, and CommError, with the ranks that are missing, if they do not all come
    within the timeout.
    """
    launch = launch_from(os.environ)
    if dist.is_initialized():
        local_rank = launch.local_rank if launch is not None else dist.get_rank() % max(torch.cuda.device_count(), 1)
        launch = Launch("torch.distributed", dist.get_rank(), dist.get_world_size(), local_rank)
    check_mesh(mesh, launch)
    if unknown := [backend for backend in watched if backend not in BACKENDS]:
        raise ValueError(f"watched has {unknown[0]!r}, which is none of {', '.join(BACKENDS)}")
    place = _device(device, launch.local_rank if launch is not None else 0)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if launch is None:
        return World(mesh, 0, Fabric(1).transport(0), device=place, stage_sets=stage_sets, p2p=p2p)
    options = options_from(os.environ, Options(patience=min(PATIENCE_SECONDS, timeout / 4)))
    folder = watch if watch is not None else options.run_dir
    terms = Terms(wires, None if folder is None else str(Path(folder).resolve()), tuple(watched))
    connecting = Connecting(launch, place, timeout, options)
    transport = connecting.on_default(terms) if dist.is_initialized() else connecting.best(terms)
    return World(mesh, launch.rank, transport, device=place, epoch=launch.restarts, stage_sets=stage_sets, p2p=p2p)


PATIENCE_SECONDS = 15.0
"""How long a wait of a watched world may take before the ranks are asked, or a quarter of the time-out: a verdict must come before
that. Ranks that derive their programs on a busy machine are seconds apart, and nobody wants to be told of it."""


def _device(device: torch.device | str | None, local_rank: int) -> torch.device:
    wanted = torch.device(device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu"))
    if wanted.type != "cuda" or wanted.index is not None:
        return wanted
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU: this machine shows {torch.cuda.device_count()}; with device='cpu' ranks need none"
        )
    return torch.device("cuda", local_rank)


def _cosets(mesh: Mesh, axes: Sequence[str]) -> list[tuple[int, ...]]:
    """mesh.groups(axes) in time linear in the number of ranks."""
    strides, stride = [], 1
    for name, size in reversed(mesh.axes):
        if name in axes:
            strides.append((stride, size))
        stride *= size
    offsets = [0]
    for stride, size in strides:  # the fastest axis first, so that slower ones repeat what is there
        offsets = [place * stride + offset for place in range(size) for offset in offsets]
    return [
        tuple(base + offset for offset in offsets)
        for base in range(mesh.size)
        if not any(base // stride % size for stride, size in strides)
    ]


# The one piece of hidden state, because a custom op can be given a text but not an object.
_WORLDS: dict[str, World] = {}
_NUMBERS = itertools.count()
_LOCK = Lock()


def _register(world: World) -> str:
    with _LOCK:
        name = f"world{next(_NUMBERS)}/{world.rank}"
        _WORLDS[name] = world
    return name


def _unregister(name: str) -> None:
    with _LOCK:
        _WORLDS.pop(name, None)
