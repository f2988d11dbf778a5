"""Data parallelism without the all_reduce of the gradients. Nothing fails: every replica learns from its own samples, and apart.

python examples/lecture/mistakes/forgotten_all_reduce.py
"""

from __future__ import annotations

import torch

import phalanx as phx
from phalanx import comm

MESH = phx.Mesh(dp=2)
STEPS, LR = 3, 0.1


def train(world: phx.World, sums: bool) -> list[float]:
    """Distance between the replicas after each step: the largest less the smallest of each weight, at most."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, dtype=torch.float64, generator=generator)
    x, targets = torch.randn(8, 4, dtype=torch.float64, generator=generator), torch.ones(8, dtype=torch.float64)
    mine, wanted = comm.shard(x, world, "dp"), comm.shard(targets, world, "dp")
    apart = []
    for _ in range(STEPS):
        gradient = 2 * (mine @ weight - wanted) @ mine / len(x)
        weight -= LR * (comm.all_reduce(gradient, world, "dp") if sums else gradient)
        apart.append((comm.all_reduce(weight, world, "dp", "max") - comm.all_reduce(weight, world, "dp", "min")).max().item())
    return apart


def main() -> None:
    with phx.local(MESH) as local:
        for title, sums in (("wrong", False), ("right", True)):
            apart = local.run(lambda world, sums=sums: train(world, sums))[0]
            print(f"{title}: distance between the replicas after each step {', '.join(f'{d:.4f}' for d in apart)}")


if __name__ == "__main__":
    main()
