"""A rank that misses a call. The others wait for it until the timeout, which names the rank that did not come.

    python examples/lecture/mistakes/missing_call.py

The usual cause is an `if` that is not the same on every rank: here, a rank whose loss is small skips the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

import phalanx as phx
from phalanx import comm

MESH = phx.Mesh(dp=3)


def losses(rank: int) -> Tensor:
    return torch.tensor([3.0 - rank], dtype=torch.float64)


def wrong(world: phx.World) -> float:
    loss = losses(world.rank)
    if loss > 1.5:  # true on ranks 0 and 1 only
        loss = comm.all_reduce(loss, world, "dp")
    return loss.item()


def right(world: phx.World) -> float:
    """Every rank makes the call; what a rank has nothing to say to, it answers with zeros."""
    loss = losses(world.rank)
    return comm.all_reduce(torch.where(loss > 1.5, loss, 0.0), world, "dp").item()


def main() -> None:
    with phx.local(MESH, timeout=0.5) as local:
        try:
            local.run(wrong)
        except TimeoutError as error:
            print(f"wrong: {error}")
        print(f"right: {local.run(right)}")


if __name__ == "__main__":
    main()
