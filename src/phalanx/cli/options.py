"""How a command reads a run: defaults, then the YAML file of --config, then the command line with dotted names."""

from __future__ import annotations

import dataclasses
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

    A key that the file leaves out has the value that it has in `otherwise`; --resume of a run begins with the settings of that run.
    """
    resumed, file = _option(args, "--resume"), _option(args, "--config")
    if resumed is not None and resumed not in ("auto", "None"):
        folder = run_of(Path(resumed))
        if folder is not None:
            otherwise = dataclasses.replace(
                load(folder / "config.yaml", otherwise), out=folder, init_from=None, init_optimizer="fresh"
            )
    return otherwise if file is None else load(Path(file), otherwise)


def run_of(path: Path) -> Path | None:
    """The run folder that a path to one, or to a checkpoint in one, belongs to; None for any other."""
    return next((folder for folder in (path, path.parent, path.parent.parent) if (folder / "config.yaml").is_file()), None)


def _option(args: list[str], name: str) -> str | None:
    """The last value of an option in `args`."""
    found = None
    for position, word in enumerate(args):
        if word == name and position + 1 < len(args):
            found = args[position + 1]
        elif word.startswith(f"{name}="):
            found = word.removeprefix(f"{name}=")
    return found


@dataclass(frozen=True, kw_only=True)
class NoRun(TrainConfig):
    """A run as commands see it that take no step of one: without its text, folder, checkpoints and its faults."""

    data: Unused[tuple[str, ...]] = ()
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
