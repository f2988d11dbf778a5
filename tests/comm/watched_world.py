"""What two ranks of test_world run under `phalanx run`: a watched world that ends well, then one whose last rank hangs."""

from __future__ import annotations

import signal
import sys

import torch
import torch.distributed as dist

import phalanx as phx


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.ones(4)
    with phx.init(phx.Mesh(dp=2), watch=f"{folder}/well") as world:
        world.transport.all_reduce(x, world.group("dp")).wait()
    with phx.init(phx.Mesh(dp=2), timeout=5, watch=f"{folder}/hangs") as world:
        if world.rank == 1:
            signal.pause()
        world.transport.all_reduce(x, world.group("dp")).wait()


if __name__ == "__main__":
    main(sys.argv[1])
