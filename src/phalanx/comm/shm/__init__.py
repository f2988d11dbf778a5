"""Ranks of one host through shared memory: the c10d backend "shm".

    core/             the engine, in C: staging, reducing, messages, who is alive
    bootstrap.py      maps the memory of every rank of a group into every other
    group.py          one open group: the core's calls and codes, failures as CommError
    work.py           an operation in flight, and the thread that finishes those nobody waits for
    process_group.py  what torch.distributed calls
    sites.py          where in the user's program a call was made

Importing this registers the backend and needs neither the compiled core nor Linux: `available` says what is missing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

__all__ = ["Unavailable", "available", "register"]


class Unavailable(RuntimeError):
    """These ranks cannot share memory, and why. Every rank of the group gets it, so all can turn to another backend."""


def available() -> str | None:
    """Why processes cannot share memory here; None if they can."""
    if sys.platform != "linux":
        return f"sharing memory between ranks needs Linux, this is {sys.platform}"
    try:
        from phalanx.comm.shm import _core  # noqa: F401
    except ImportError as error:
        return f"the compiled core is missing ({error}); install phalanx where a C compiler is"
    return None


def _create(options: Any, pg_options: Any) -> Any:
    reason = available()
    if reason is not None:
        raise Unavailable(reason)
    from phalanx.comm.shm.process_group import create

    return create(options, pg_options)


def register() -> None:
    """Make torch.distributed know the backend; idempotent. Torch 2.14 and later call it when they are asked for "shm"."""
    if not hasattr(dist.Backend, "SHM"):
        dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])


register()
