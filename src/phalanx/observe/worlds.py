"""A World over the backend that a measurement asks for, rather than the one that training would take."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from phalanx.comm import shm
from phalanx.comm.c10d import C10dTransport
from phalanx.comm.hierarchy import HierarchicalTransport
from phalanx.comm.world import World, init
from phalanx.mesh import Mesh

DEVICES = {"gloo": "cpu", "shm": "cpu", "nccl": "cuda", "threads": "cpu"}
"""Backends and the devices of their tensors. `threads` are ranks of one process and have no wires to open here."""


def check_backend(backend: str | None) -> None:
    """Raise ValueError for a backend that does not exist, or that needs what this machine lacks. None is the usual one."""
    if backend is None:
        return
    if backend not in DEVICES:
        close = difflib.get_close_matches(backend, DEVICES, n=1)
        raise ValueError(
            f"there is no backend {backend!r}{f'; did you mean {close[0]!r}?' if close else ''} of {', '.join(DEVICES)}"
        )
    if DEVICES[backend] == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"backend {backend} needs a CUDA device, and torch finds none; on CPUs there are gloo and shm")
    if backend == "shm" and (reason := shm.available()) is not None:
        raise ValueError(f"backend shm cannot be used here: {reason}")


@contextmanager
def opened(mesh: Mesh, backend: str | None, p2p: Sequence[str] = ()) -> Iterator[tuple[World, str]]:
    """This process's World and its backend, closed behind the block; `backend` is one that check_backend accepts, or None."""
    with init(mesh, device=None if backend is None else DEVICES[backend], p2p=p2p) as world:
        own = world.transport.inner
        usual = own.backend if isinstance(own, C10dTransport) else "threads"  # one rank has no wires
        if isinstance(own, HierarchicalTransport):
            usual = "shm"
        if mesh.size == 1 or backend in (None, usual):
            yield world, usual
            return
        assert backend is not None
        wires = C10dTransport(world.device, backend=backend)
        with World(mesh, world.rank, wires, device=world.device, p2p=p2p) as other:
            yield other, backend


def carrier(world: World, axis: str, backend: str) -> str:
    """The backend that carries messages along an axis, where `backend` is that of the world: between hosts it is Gloo."""
    own = world.transport.inner
    if not isinstance(own, HierarchicalTransport):
        return backend
    return "gloo" if len({own.hosts[rank] for rank in world.group(axis).ranks}) > 1 else backend
