"""The soak with a defect put in: rank 1 adds one to what it contributes to a sum, so that others must find wrong elements."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.comm.shm import soak_player

if __name__ == "__rank__":
    values = soak_player.Player.values

    def wrong(player, operation, rank, count, offset=0):  # type: ignore[no-untyped-def]
        made = values(player, operation, rank, count, offset)
        return made + 1 if rank == dist.get_rank() == 1 else made

    soak_player.Player.values = wrong  # type: ignore[method-assign]
    runpy.run_path(str(Path(__file__).with_name("soak.py")), {"JOB": JOB}, "__rank__")  # type: ignore[name-defined]  # noqa: F821
