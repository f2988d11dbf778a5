"""The building blocks: eight collectives and send/recv, each as one call on four ranks, shown before and after.

    python examples/lecture/collectives.py
    phalanx run --ranks 4 examples/lecture/collectives.py --processes

A call returns a handle at once; `wait` says that the bytes have arrived. Below it is always waited for, so nothing overlaps yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from launch import say, start
from torch import Tensor

import phalanx as phx

MESH = phx.Mesh(dp=4)
ROOT = 0


def before(rank: int) -> Tensor:
    """One element for each rank: 0 1 2 3 on rank 0, 10 11 12 13 on rank 1, and so on."""
    return 10 * rank + torch.arange(MESH.size)


def all_reduce(world: phx.World, x: Tensor) -> Tensor:
    """Every rank ends with the sum."""
    y = x.clone()  # the call works in place
    world.transport.all_reduce(y, world.group("dp")).wait()
    return y


def all_gather(world: phx.World, x: Tensor) -> Tensor:
    """Every rank ends with everybody's slice, in the order of the ranks."""
    y = x.new_empty(world.size * x.numel())
    world.transport.all_gather(y, x, world.group("dp")).wait()
    return y


def reduce_scatter(world: phx.World, x: Tensor) -> Tensor:
    """Rank i ends with slice i of the sum."""
    y = x.new_empty(x.numel() // world.size)
    world.transport.reduce_scatter(y, x, world.group("dp")).wait()
    return y


def all_to_all(world: phx.World, x: Tensor) -> Tensor:
    """Slice i goes to rank i: the transpose of a matrix whose row r lies on rank r."""
    y = torch.empty_like(x)
    world.transport.all_to_all(y.split(1), x.split(1), world.group("dp")).wait()
    return y


def broadcast(world: phx.World, x: Tensor) -> Tensor:
    """Every rank ends with what the root has."""
    y = x.clone()
    world.transport.broadcast(y, ROOT, world.group("dp")).wait()
    return y


def reduce(world: phx.World, x: Tensor) -> Tensor | None:
    """The root ends with the sum; what the others end with means nothing."""
    y = x.clone()
    world.transport.reduce(y, ROOT, world.group("dp")).wait()
    return y if world.rank == ROOT else None


def gather(world: phx.World, x: Tensor) -> Tensor | None:
    """The root ends with everybody's slice."""
    y = x.new_empty(world.size * x.numel()) if world.rank == ROOT else None
    world.transport.gather(y, x, ROOT, world.group("dp")).wait()
    return y


def scatter(world: phx.World, x: Tensor) -> Tensor:
    """Rank i ends with slice i of what the root has."""
    y = x.new_empty(x.numel() // world.size)
    world.transport.scatter(y, x if world.rank == ROOT else None, ROOT, world.group("dp")).wait()
    return y


def send_and_recv(world: phx.World, x: Tensor) -> Tensor:
    """Around a ring: to the right-hand neighbour, from the left-hand one. The send is not waited for before the recv is there:
    if everybody waited, nobody would receive (mistakes/both_send_first.py)."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    y = torch.empty_like(x)
    sending = world.transport.send(x, right, world.group("dp"))
    world.transport.recv(y, left, world.group("dp")).wait()
    sending.wait()
    return y


def all_reduce_in_two(world: phx.World, x: Tensor) -> Tensor:
    """reduce_scatter, then all_gather: the same as all_reduce. ZeRO and sequence parallelism only move something in between."""
    return all_gather(world, reduce_scatter(world, x))


BLOCKS: tuple[Callable[[phx.World, Tensor], Tensor | None], ...] = (
    all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send_and_recv, all_reduce_in_two,
)  # fmt: skip


def lecture(world: phx.World) -> None:
    for block in BLOCKS:
        assert block.__doc__ is not None
        x = before(world.rank)
        after = block(world, x)
        shown = "-" if after is None else " ".join(f"{value:2}" for value in after.tolist())
        say(world, f"{block.__name__}: {block.__doc__}", f"{' '.join(f'{value:2}' for value in x.tolist())}   ->   {shown}")
    same = torch.equal(all_reduce(world, before(world.rank)), all_reduce_in_two(world, before(world.rank)))
    say(world, "all_reduce equals reduce_scatter then all_gather:", str(same))


def main() -> None:
    start(lecture, MESH)


if __name__ == "__main__":
    main()
