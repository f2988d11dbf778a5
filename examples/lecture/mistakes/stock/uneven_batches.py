"""Seven batches over two ranks: rank 0 has four, rank 1 three, and the last sum waits for somebody who has left.

PHALANX_PATIENCE=1 phalanx run --ranks 2 examples/lecture/mistakes/stock/uneven_batches.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import phalanx.watched  # noqa: F401 - nothing else here is ours: it registers watched:gloo

dist.init_process_group("watched:gloo")
rank, size = dist.get_rank(), dist.get_world_size()

for batch in torch.arange(7.0)[rank::size]:
    gradient = batch.reshape(1)
    dist.all_reduce(gradient)
dist.destroy_process_group()
