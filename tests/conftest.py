"""What every test shares: one thread per rank, since ranks that each take all cores stall one another."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
