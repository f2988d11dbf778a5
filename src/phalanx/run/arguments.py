"""What `parallelize` and `shard` are given, looked at before anything is derived: each is the kind of thing that it should be.

What is wrong inside them (a name that matches nothing, a size that does not divide) is found by whoever reads it.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from phalanx.comm.local import LocalWorld
from phalanx.comm.threads import ThreadTransport
from phalanx.comm.world import World
from phalanx.derive.program import Program
from phalanx.derive.reject import is_internal
from phalanx.run.optimizer import AdamW, Config


def check_arguments(
    model: Any,
    world: Any,
    *,
    example: Any = None,
    names: Any = None,
    layout: Any = None,
    loss: Any = None,
    optimizer: Any = None,
) -> None:
    """Raise ValueError for the first argument that is no such thing; None is one that was left out."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {_kind(model)}; it must be a torch.nn.Module")
    if not isinstance(world, World | LocalWorld):
        raise ValueError(f"the world is a {_kind(world)}; make one with phx.init(mesh) under a launcher, or phx.local(mesh)")
    _check_rank(world)
    if example is not None:
        check_batch(example, "the example")
    for argument, what, value_kind in (
        (names, "names", "text such as 'batch seq'"),
        (layout, "layout", "the name of a mesh axis, or several"),
    ):
        if argument is None:
            continue
        if not isinstance(argument, Mapping):
            raise ValueError(f"{what} is a {_kind(argument)}; it must be a dict")
        for key, value in argument.items():
            several = what == "layout" and isinstance(value, Sequence) and all(isinstance(axis, str) for axis in value)
            if not isinstance(key, str) or not (isinstance(value, str) or several):
                raise ValueError(f"{what} has {key!r}: {value!r}; a value is {value_kind}")
    if loss is not None:
        _check_loss(loss)
    if optimizer is not None and not isinstance(optimizer, Config):
        raise ValueError(
            f"the optimizer is a {_kind(optimizer)}; it must be phx.adamw(...), phx.sgd(...) or "
            "phx.optimizer(torch.optim.X, ...), which ranks apply to their shards "
            f"(phx.shard takes any torch optimizer). The default is {AdamW()}"
        )


def check_batch(batch: Any, what: str = "the batch") -> None:
    """Raise ValueError if a batch is no mapping of names to values."""
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"{what} is a {_kind(batch)}; it must be a dict of tensors by the names that the model's forward gives them"
        )


def warn_of_losses(program: Program, world: World | LocalWorld) -> None:
    """Each of the Program's warnings once for all ranks, at the user's own line."""
    if isinstance(world, World) and world.rank:
        return
    frame, level = sys._getframe(0), 1
    while frame.f_back is not None and is_internal(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    for text in program.warnings:
        warnings.warn(text, stacklevel=level)


def _check_rank(world: World | LocalWorld) -> None:
    """Rank threads share one model, and a trace in one of them would see the modules of all."""
    if isinstance(world, World) and isinstance(world.transport.inner, ThreadTransport) and world.size > 1:
        raise ValueError(
            f"this World is rank {world.rank} of a local world of {world.size} ranks: call this once with the local world itself, "
            "outside its run"
        )


def _check_loss(loss: Callable[..., Any]) -> None:
    if not callable(loss):
        raise ValueError(f"the loss is a {_kind(loss)}; it must be a function of (outputs, batch)")
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # written in C, and says nothing of itself
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(loss, "__name__", _kind(loss))
        code = getattr(loss, "__code__", None)
        place = f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        raise ValueError(f"the loss {name}{signature}{place} is called as loss(outputs, batch): {error}") from None


def _kind(value: object) -> str:
    return type(value).__name__
