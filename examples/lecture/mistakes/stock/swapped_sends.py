"""Messages match by order alone: rank 0 sends the weights first, rank 1 expects the bias first.

On plain Gloo the larger message kills the process that receives it.

    PHALANX_PATIENCE=1 phalanx run --ranks 2 examples/lecture/mistakes/stock/swapped_sends.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import phalanx.watched  # noqa: F401 - nothing else here is ours: it registers watched:gloo

dist.init_process_group("watched:gloo")
rank = dist.get_rank()

weights, bias = torch.ones(4), torch.ones(2)
if rank == 0:
    dist.send(weights, 1)
    dist.send(bias, 1)
else:
    dist.recv(bias, 0)
    dist.recv(weights, 0)
dist.destroy_process_group()
