"""How a command reads a run: defaults, then the YAML file of --config, then the command line with dotted names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

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
