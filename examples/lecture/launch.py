"""How a lecture starts its ranks, and lets them speak in order. Every lecture is one function of a World, run by every rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

import phalanx as phx
from phalanx.comm import Delay

T = TypeVar("T")


def start(rank: Callable[[phx.World], T], mesh: phx.Mesh, *, rendezvous: bool = False, delay: Delay | None = None) -> list[T]:
    """[rank(world) of every rank of this process].

    The ranks are threads of this process. With `--processes` on the command line this process is one rank among those that
    `phalanx run` or torchrun started; its wires are real, so `rendezvous` and `delay` do not apply.
    """
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--processes", action="store_true", help="join the ranks of phalanx run or torchrun")
    if arguments.parse_args().processes:
        with phx.init(mesh, device="cpu") as world:
            return [rank(world)]
    with phx.local(mesh, rendezvous=rendezvous, delay=delay) as local:
        return local.run(rank)


def say(world: phx.World, title: str, mine: str) -> None:
    """Print a title once and every rank's own line below it, in the order of the ranks."""
    everybody = world.group(world.mesh.names)
    for turn in range(world.size):
        if turn == world.rank:
            print(f"{title}\n  rank {turn}  {mine}" if turn == 0 else f"  rank {turn}  {mine}", flush=True)
        world.transport.barrier(everybody).wait()
