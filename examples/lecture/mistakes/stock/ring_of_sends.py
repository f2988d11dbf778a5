"""Every rank sends to its right before it receives from its left: nobody ever receives.

PHALANX_PATIENCE=1 phalanx run --ranks 3 examples/lecture/mistakes/stock/ring_of_sends.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import phalanx.watched  # noqa: F401 - nothing else here is ours: it registers watched:gloo

dist.init_process_group("watched:gloo")
rank, size = dist.get_rank(), dist.get_world_size()

mine, theirs = torch.full((1024,), float(rank)), torch.empty(1024)
dist.send(mine, (rank + 1) % size)
dist.recv(theirs, (rank - 1) % size)
dist.destroy_process_group()
