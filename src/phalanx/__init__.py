"""Phalanx: write a model once, name its dimensions, train it on any mesh. Imported as `import phalanx as phx`.

Names are loaded at first use, so that `phalanx --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from phalanx.mesh import Mesh

if TYPE_CHECKING:
    from phalanx.comm.local import LocalWorld, local
    from phalanx.comm.world import World, init
    from phalanx.run.initialize import deferred_init, materialize
    from phalanx.run.optimizer import adamw, sgd
    from phalanx.run.precision import LossScale
    from phalanx.run.step import Step, parallelize, shard
    from phalanx.run.torch_optimizer import optimizer
    from phalanx.schedule.actions import Storage
    from phalanx.spec import Spec

__version__ = "0.1.0"
__all__ = [
    "LocalWorld",
    "LossScale",
    "Mesh",
    "Spec",
    "Step",
    "Storage",
    "World",
    "adamw",
    "deferred_init",
    "init",
    "local",
    "materialize",
    "optimizer",
    "parallelize",
    "sgd",
    "shard",
]

_HOMES = {
    "LocalWorld": "comm.local",
    "LossScale": "run.precision",
    "Spec": "spec",
    "Step": "run.step",
    "Storage": "schedule.actions",
    "World": "comm.world",
    "adamw": "run.optimizer",
    "deferred_init": "run.initialize",
    "init": "comm.world",
    "local": "comm.local",
    "materialize": "run.initialize",
    "parallelize": "run.step",
    "optimizer": "run.torch_optimizer",
    "sgd": "run.optimizer",
    "shard": "run.step",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
