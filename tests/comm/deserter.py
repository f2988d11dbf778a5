"""Three processes of which the last dies or raises in the middle. Started by test_transports.py with `JOB` set."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.comm.c10d import C10dTransport
from phalanx.comm.transport import CommError


def _main(rank: int, store: str, report: str, backend: str, end: str) -> None:
    dist.init_process_group(backend, store=dist.FileStore(store, 3), rank=rank, world_size=3, timeout=timedelta(seconds=30))
    transport = C10dTransport(torch.device("cpu"), timeout=30.0, owns_default=True)
    group = transport.group("world@0", range(3))
    x = torch.ones(4)
    transport.all_reduce(x, group).wait()
    if rank == 2:
        if end == "dies":
            os._exit(1)
        transport.abort(KeyError("my own mistake"))
        transport.close()
        return
    started = time.monotonic()
    told: dict[str, object] = {"type": "nothing was raised"}
    try:
        transport.all_reduce(x, group).wait()
    except CommError as error:
        told = {"type": "CommError", "message": str(error), "seconds": time.monotonic() - started}
    try:
        transport.barrier(group)
    except CommError as error:
        told["later"] = str(error)
    transport.close()
    told["closed"] = not dist.is_initialized()
    Path(f"{report}.{rank}").write_text(json.dumps(told))


if "JOB" in globals():
    _main(*globals()["JOB"])
