"""A rank that runs the cases of the shm backend by name. test_process_group.py starts 2 and 4 of them."""

from __future__ import annotations

import contextlib
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

if __name__ == "__rank__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.comm.shm import c10d_cases, tensor_cases  # noqa: F401 - fill the list
from tests.comm.shm.rank_set import Raised, stand_by
from tests.comm.shm.values import CASES

import phalanx.shm  # noqa: F401 - registers the backend


def serve(job: dict[str, Any]) -> None:
    rank, size, connection = job["rank"], job["size"], job["connection"]
    stand_by(rank, job["folder"])
    store = dist.FileStore(f"{job['folder']}/store", size)
    dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    with contextlib.suppress(EOFError):
        while True:
            name = connection.recv()
            try:
                CASES[name](rank, size)
                connection.send("passed")
            except BaseException as error:  # noqa: BLE001 - the parent raises it
                connection.send(Raised("".join(traceback.format_exception(error))))
    dist.destroy_process_group()


if __name__ == "__rank__":
    serve(JOB)  # noqa: F821 - set by whoever runs this file
