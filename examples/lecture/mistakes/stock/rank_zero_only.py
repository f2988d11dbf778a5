"""A collective under `if rank == 0`: the others never come.

PHALANX_PATIENCE=1 phalanx run --ranks 2 examples/lecture/mistakes/stock/rank_zero_only.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import phalanx.watched  # noqa: F401 - nothing else here is ours: it registers watched:gloo

dist.init_process_group("watched:gloo")
rank = dist.get_rank()

loss = torch.tensor([1.0])
if rank == 0:
    dist.all_reduce(loss)  # meant for the log
    print(f"loss {loss.item()}")
dist.destroy_process_group()
