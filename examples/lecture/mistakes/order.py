"""Messages between two ranks match by order alone. Swapped sends put each value where the other was meant to go.

    python examples/lecture/mistakes/order.py

Nothing can notice, unless the shapes differ too: then both ranks are told what each of them wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor

import phalanx as phx

MESH = phx.Mesh(pp=2)


def exchange(world: phx.World, order: tuple[str, str], sizes: dict[str, int]) -> dict[str, Tensor]:
    """Rank 0 sends "weights" (ones) and "bias" (twos) in `order`; rank 1 receives the weights, then the bias."""
    group = world.group("pp")
    values = {"weights": torch.ones(sizes["weights"]), "bias": torch.full((sizes["bias"],), 2.0)}
    if world.rank == 0:
        for name in order:
            world.transport.send(values[name], 1, group).wait()
        return values
    received = {name: torch.empty_like(value) for name, value in values.items()}
    for x in received.values():
        world.transport.recv(x, 0, group).wait()
    return received


def run(local: phx.LocalWorld, order: tuple[str, str], sizes: dict[str, int]) -> dict[str, list[float]]:
    """What arrives on rank 1."""
    received = local.run(lambda world: exchange(world, order, sizes))[1]
    return {name: x.tolist() for name, x in received.items()}


RIGHT, WRONG = ("weights", "bias"), ("bias", "weights")
EQUAL, DIFFERENT = {"weights": 2, "bias": 2}, {"weights": 4, "bias": 2}


def main() -> None:
    with phx.local(MESH, timeout=0.5) as local:
        print(f"right: {run(local, RIGHT, EQUAL)}")
        print(f"wrong: {run(local, WRONG, EQUAL)}, and nobody notices")
        try:
            run(local, WRONG, DIFFERENT)
        except ValueError as error:
            print(f"wrong: {error}")


if __name__ == "__main__":
    main()
