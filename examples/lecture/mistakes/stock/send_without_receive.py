"""Rank 0 sends and rank 1 never receives. Give the number of elements: 1 or 16777216 (64 MB).

On Gloo a send waits for its receive however small it is; on wires that buffer, the small one passes.

    PHALANX_PATIENCE=1 phalanx run --ranks 2 examples/lecture/mistakes/stock/send_without_receive.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import phalanx.watched  # noqa: F401 - nothing else here is ours: it registers watched:gloo

dist.init_process_group("watched:gloo")
rank = dist.get_rank()

elements = int(sys.argv[1]) if len(sys.argv) > 1 else 1
if rank == 0:
    dist.send(torch.ones(elements), 1)
dist.barrier()
dist.destroy_process_group()
