"""The c10d backend "shm": ranks of one host that communicate through shared memory.

    import phalanx.shm
    torch.distributed.init_process_group("shm")

Importing this registers it and needs nothing but torch; where it cannot work, `available` says why and the backend raises
Unavailable. Names are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from phalanx.comm.shm import Unavailable, available

if TYPE_CHECKING:
    from phalanx.comm.shm.arena import empty, empty_like, is_resident
    from phalanx.comm.shm.process_group import Options, ProcessGroup

__all__ = ["Options", "ProcessGroup", "Unavailable", "available", "empty", "empty_like", "is_resident"]

_HOMES = {
    "Options": "process_group",
    "ProcessGroup": "process_group",
    "empty": "arena",
    "empty_like": "arena",
    "is_resident": "arena",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (reason := available()) is not None:
        raise Unavailable(reason)
    value = getattr(importlib.import_module(f"phalanx.comm.shm.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
