"""A process that joins a world as torchrun starts it, moves a tensor along each axis and reports. Its caller sets `JOB`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.comm import all_reduce, init, move
from phalanx.mesh import Mesh


def _main(rank: int, environment: dict[str, str], report: str) -> None:
    os.environ.update(environment)
    told: dict[str, object] = {}
    try:
        init(Mesh(dp=3))
    except ValueError as error:
        told["refused"] = str(error)
    with init(Mesh(tp=2, dp=2), device="cpu", timeout=20.0) as world:
        x = torch.tensor([[1.0 + rank, 2.0]], dtype=torch.float64)
        y = x.clone().requires_grad_()
        with world.ledger.recording():
            move(y, "gather_vary", world, "tp").pow(2).sum().backward()
        told["sums"] = [all_reduce(x, world, axis)[0, 0].item() for axis in ("tp", "dp", "tp+dp")]
        told["grad"] = y.grad.tolist()
        told["totals"] = [[*key, *value] for key, value in world.ledger.totals().items()]
        told["complete"] = len(world.ledger.events)
        told["epoch"] = world.epoch
    told["closed"] = not dist.is_initialized()
    Path(f"{report}.{rank}").write_text(json.dumps(told))


if "JOB" in globals():
    _main(*globals()["JOB"])
