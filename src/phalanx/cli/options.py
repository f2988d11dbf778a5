"""How a command reads a run: defaults, then the YAML file of --config, then the command line with dotted names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from phalanx.train.config import TrainConfig, load

T = TypeVar("T")
Config = TypeVar("Config", bound=TrainConfig)

Unused = Annotated[T, tyro.conf.Suppress, tyro.conf.Fixed]
"""A setting of a run that a command does not read: a file may hold it, the command line refuses it."""
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A flag of the command itself, which no file sets: there is nothing to switch off."""


def defaults(args: list[str], otherwise: Config) -> Config:
    """What the run is before the command line has its say: the file that --config names in `args`, or `otherwise`.

    A key that the file leaves out has the value that it has in `otherwise`.
    """
    for position, word in enumerate(args):
        if word == "--config" and position + 1 < len(args):
            return load(Path(args[position + 1]), otherwise)
        if word.startswith("--config="):
            return load(Path(word.removeprefix("--config=")), otherwise)
    return otherwise


@dataclass(frozen=True, kw_only=True)
class NoRun(TrainConfig):
    """A run as commands see it that take no step of one: without its text, its folder, its checkpoints and its faults."""

    data: Unused[tuple[str, ...]] = ()
    mask_documents: Unused[bool] = False
    held_out: Unused[int] = 0
    eval_every: Unused[int | None] = None
    resume: Unused[str | None] = None
    init_from: Unused[str | None] = None
    init_optimizer: Unused[Literal["fresh", "kept"]] = "fresh"
    checkpoint_every: Unused[int | None] = None
    keep: Unused[int] = 2
    checkpoints: Unused[str | None] = None
    restarts: Unused[int] = 0
    on_non_finite: Unused[Literal["stop", "skip", "rewind"]] = "stop"
    on_spike: Unused[Literal["ignore", "stop", "skip", "rewind"]] = "ignore"
    spike_factor: Unused[float] = 6.0
    check_replicas: Unused[int | None] = None
    tensorboard: Unused[bool] = False
    wandb: Unused[str | None] = None
    trace: Unused[int | None] = None
    out: Unused[Path | None] = None
    watch: Unused[bool | None] = None
    profile: Unused[Path | None] = None
