"""Batch normalisation under data parallelism: the statistics of a slice of the batch are not those of the batch.

    python examples/lecture/mistakes/batchnorm.py

The model that is trained depends on the number of ranks, and nothing fails. Sums, squared distances and counts can be added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

import phalanx as phx
from phalanx import comm

MESH = phx.Mesh(dp=2)
EPS = 1e-5


def batch() -> Tensor:
    """(8, 1), sorted: the worst case for a contiguous split."""
    return torch.arange(8, dtype=torch.float64)[:, None]


def one_process() -> Tensor:
    return torch.nn.functional.batch_norm(batch(), None, None, training=True, eps=EPS)


def wrong(world: phx.World) -> Tensor:
    mine = comm.shard(batch(), world, "dp")
    normed: Tensor = torch.nn.functional.batch_norm(mine, None, None, training=True, eps=EPS)
    return comm.all_gather(normed, world, "dp")


def right(world: phx.World) -> Tensor:
    """Two sums: the mean first, then the distances from it (the mean of squares less the square of the mean cancels badly)."""
    mine = comm.shard(batch(), world, "dp")
    samples = len(mine) * world.size
    mean = comm.all_reduce(mine.sum(0), world, "dp") / samples
    variance = comm.all_reduce((mine - mean).square().sum(0), world, "dp") / samples
    return comm.all_gather((mine - mean) / (variance + EPS).sqrt(), world, "dp")


def main() -> None:
    with phx.local(MESH) as local:
        for title, normed in (("one process", one_process()), ("wrong", local.run(wrong)[0]), ("right", local.run(right)[0])):
            print(f"{title:12} {' '.join(f'{value:6.3f}' for value in normed[:, 0].tolist())}")


if __name__ == "__main__":
    main()
