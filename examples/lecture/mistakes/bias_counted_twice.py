"""The bias of a row-parallel linear, added on every rank before the sum: it is counted once for each rank.

    python examples/lecture/mistakes/bias_counted_twice.py

At the start biases are zero, so the first loss is right and the mistake shows only later.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import phalanx as phx
from phalanx import comm

MESH = phx.Mesh(tp=2)


def linear() -> tuple[Tensor, Tensor, Tensor]:
    """x (1, 4), weight (2, 4), bias (2)."""
    ones = torch.ones(1, 4, dtype=torch.float64)
    return ones, torch.arange(8, dtype=torch.float64).view(2, 4), torch.tensor([100.0, 200.0], dtype=torch.float64)


def one_process() -> Tensor:
    return F.linear(*linear())


def wrong(world: phx.World) -> Tensor:
    x, weight, bias = linear()
    part = F.linear(comm.shard(x, world, "tp", dim=1), comm.shard(weight, world, "tp", dim=1), bias)
    return comm.all_reduce(part, world, "tp")


def right(world: phx.World) -> Tensor:
    """After the sum. (Or before it on one rank only, zeros elsewhere: the pair `keep_first` of comm.move.)"""
    x, weight, bias = linear()
    part = F.linear(comm.shard(x, world, "tp", dim=1), comm.shard(weight, world, "tp", dim=1))
    return comm.all_reduce(part, world, "tp") + bias


def main() -> None:
    with phx.local(MESH) as local:
        print(f"one process {one_process().tolist()}")
        print(f"wrong       {local.run(wrong)[0].tolist()}")
        print(f"right       {local.run(right)[0].tolist()}")


if __name__ == "__main__":
    main()
