"""Rank 1 counts in integers. Plain Gloo adds the bits: 1.0 becomes 1065353216, and nothing fails.

PHALANX_PATIENCE=1 phalanx run --ranks 2 examples/lecture/mistakes/stock/wrong_dtype.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import phalanx.watched  # noqa: F401 - nothing else here is ours: it registers watched:gloo

dist.init_process_group("watched:gloo")
rank = dist.get_rank()

count = torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32)
dist.all_reduce(count)
dist.destroy_process_group()
