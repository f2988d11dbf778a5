"""How a command reads a run: defaults, then the YAML file of --config, then the command line with dotted names."""

from __future__ import annotations

import dataclasses
import importlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from phalanx.train.config import TrainConfig
from phalanx.train.settings import load

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
    for name in ("--config", "--resume", "--out"):
        if _option(args, name) == "":
            raise ValueError(
                f"{name} is empty, as a variable of the shell is that nobody has set: name a path, or leave it out"
            )
    resumed, file = _option(args, "--resume"), _option(args, "--config")
    out = _option(args, "--out")
    if file is not None:
        asked = load(Path(file), otherwise)
        resumed, out = resumed or asked.resume, out or (None if asked.out is None else str(asked.out))
    if resumed == "auto":
        # A run in --out that can be gone on with is gone on with as by --resume RUN; else this line begins it.
        resumed = out if out is not None and may_go_on(Path(out)) else None
    if resumed is not None and resumed != "None":
        folder = run_of(Path(resumed))
        if folder is not None:
            before = found_from_here(load(folder / "config.yaml", otherwise), started_in(folder))
            otherwise = dataclasses.replace(before, out=folder, init_from=None, init_optimizer="fresh")
        elif file is None:
            # Checkpoints by themselves: their run's settings are in them, and it goes on in a folder of its own.
            with suppress(ValueError):  # what is wrong with them is told by whoever goes on from them
                before = importlib.import_module("phalanx.train.checkpoint.load").settings(resumed)
                otherwise = dataclasses.replace(before, checkpoints=None, init_from=None, init_optimizer="fresh")
    return otherwise if file is None else load(Path(file), otherwise)


def may_go_on(folder: Path) -> bool:
    """Whether a folder has a run with a checkpoint."""
    if not (folder / "config.yaml").is_file():
        return False
    elsewhere = load(folder / "config.yaml", TrainConfig()).checkpoints
    try:
        importlib.import_module("phalanx.train.checkpoint.load").find_resumed(str(folder), elsewhere)
    except ValueError:
        return False
    return True


def started_in(folder: Path) -> Path:
    """The working directory of the run whose folder this is; the present one if that is not known."""
    try:
        return Path(json.loads((folder / "environment.json").read_bytes())["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return Path()


def found_from_here(config: Config, there: Path) -> Config:
    """The settings of a run that was started in `there`: a relative path to what is there, and not here, leads there."""

    def path(text: str) -> str:
        return str(there / text) if text and not Path(text).exists() and (there / text).exists() else text

    def source(text: str) -> str:
        name, equals, weight = text.rpartition("=")
        return f"{path(name)}={weight}" if equals and not (there / text).exists() else path(text)

    kind, colon, rest = config.model.partition(":")
    return dataclasses.replace(
        config,
        model=f"hf:{path(rest)}" if colon and kind == "hf" else config.model,
        data=tuple(map(source, config.data)),
        checkpoints=None if config.checkpoints is None else path(config.checkpoints),
        balance=None if config.balance is None else Path(path(str(config.balance))),
        profile=None if config.profile is None else Path(path(str(config.profile))),
    )


def run_of(path: Path) -> Path | None:
    """The run folder that a path to one, or to a checkpoint in one, belongs to; None for any other."""
    around = [path]
    around += [path.parent] if path.name == "checkpoints" else []
    around += [path.parent.parent] if path.parent.name == "checkpoints" else []
    return next((folder for folder in around if (folder / "config.yaml").is_file()), None)


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
