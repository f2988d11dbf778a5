"""The mean of the ranks' means is not the mean, once the ranks have different numbers of tokens (padding, ignored targets).

    python examples/lecture/mistakes/mean_of_means.py

A sum and a count can be added up over ranks and micro-batches; a mean cannot. The gradient is wrong by the same share as the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

import phalanx as phx
from phalanx import comm

MESH = phx.Mesh(dp=2)


def token_losses(rank: int) -> Tensor:
    """One hard token on rank 0, seven easy ones on rank 1."""
    return torch.tensor([8.0], dtype=torch.float64) if rank == 0 else torch.ones(7, dtype=torch.float64)


def wrong(world: phx.World) -> float:
    return comm.all_reduce(token_losses(world.rank).mean(), world, "dp", "mean").item()


def right(world: phx.World) -> float:
    losses = token_losses(world.rank)
    total, count = comm.all_reduce(torch.tensor([losses.sum(), len(losses)], dtype=torch.float64), world, "dp").tolist()
    return float(total / count)


def main() -> None:
    with phx.local(MESH) as local:
        print(f"wrong: mean of the means {local.run(wrong)[0]}")
        print(f"right: sum over all ranks / tokens of all ranks {local.run(right)[0]}")


if __name__ == "__main__":
    main()
