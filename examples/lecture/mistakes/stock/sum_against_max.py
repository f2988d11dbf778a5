"""One rank asks for the sum and one for the largest. Plain Gloo returns half of each, and nothing fails.

PHALANX_PATIENCE=1 phalanx run --ranks 2 examples/lecture/mistakes/stock/sum_against_max.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import phalanx.watched  # noqa: F401 - nothing else here is ours: it registers watched:gloo

dist.init_process_group("watched:gloo")
rank = dist.get_rank()

x = torch.full((4,), 2.0 + rank)
dist.all_reduce(x, op=dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX)
dist.destroy_process_group()
