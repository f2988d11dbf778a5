"""Rank 1 thinks that it may skip a sum, and is one call ahead from then on.

Its next call meets the sum that it skipped. On plain Gloo: a timeout after half an hour.

    PHALANX_PATIENCE=1 phalanx run --ranks 2 examples/lecture/mistakes/stock/skipped_all_reduce.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import phalanx.watched  # noqa: F401 - nothing else here is ours: it registers watched:gloo

dist.init_process_group("watched:gloo")
rank = dist.get_rank()

loss, tokens = torch.tensor([1.0 + rank]), torch.tensor([8.0])
if loss < 2:
    dist.all_reduce(loss)  # rank 1 has a loss of 2
dist.broadcast(tokens, 0)
dist.destroy_process_group()
