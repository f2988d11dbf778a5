"""`phalanx train`: one training run, on local ranks that it starts itself or on those of torchrun, Slurm or MPI."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from phalanx.cli.options import defaults
from phalanx.train.config import TrainConfig

if TYPE_CHECKING:
    from phalanx.train.folder import RunFolder
    from phalanx.train.launch import RankFailure


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a model on a mesh. Under torchrun, srun or mpirun it joins their ranks; otherwise it starts local ones."""

    config: Path | None = None
    """A YAML file with any of the options below; the command line has the last word."""
    run: Annotated[TrainConfig, tyro.conf.arg(name="")]


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, default=Options(run=defaults(args, TrainConfig())), prog="phalanx train")
    config = options.run
    if not config.data and any(word.partition("=")[0] == "--data" for word in args):
        raise ValueError("--data names nothing: name text files, folders of them or token folders, or leave it out")
    config.check()
    mesh = config.parsed_mesh()

    from phalanx.comm.launch import launch_from
    from phalanx.train.models import check_name

    check_name(config.model)
    started = launch_from(os.environ)
    if config.resume == "auto" and has_ended(config):
        print(f"the run in {config.out} has taken all its {config.steps} steps", flush=True)
        return 0
    if started is None and (mesh.size > 1 or config.restarts):
        return start(config, args)
    if started is not None and started.restarts:
        config = started_again(config)
    return join(config, is_first=started is None or started.rank == 0)


def has_ended(config: TrainConfig) -> bool:
    """Whether the run that --resume auto would go on with has nothing left to do: a job that is queued again ends well."""
    from phalanx.train.checkpoint.blocks import Place
    from phalanx.train.checkpoint.load import find
    from phalanx.train.checkpoint.manifest import read_manifest

    try:
        addresses, _ = find(config.checkpoints or str(config.out))
        return read_manifest(Place(addresses[0])).step >= config.steps
    except ValueError:  # told where it is gone on with
        return False


def started_again(config: TrainConfig) -> TrainConfig:
    """What ranks do that a launcher has started again: go on with the run in --out, or begin as they did the first time."""
    from phalanx.train.checkpoint import find

    if config.out is None:
        raise ValueError(
            "the launcher has started the ranks again, but without --out nobody knows in which folder the run was: name one"
        )
    if config.resume is not None:
        try:
            find(config.checkpoints or str(config.out))
        except ValueError:  # nothing yet: what --resume names is where the run was
            return config
    return replace(config, resume="auto")


def start(config: TrainConfig, args: list[str]) -> int:
    """Start local ranks, and start them again as often as --restarts says."""
    from phalanx.train.folder import LAUNCHER, RunFolder

    check_files(config)
    ranks = config.parsed_mesh().size
    print(f"starting {ranks} local ranks for mesh {config.mesh}; each imports torch and derives its program first", flush=True)
    # All starts of a run share a folder.
    folder = RunFolder.create(config)
    with folder.lock():
        pass  # that another run writes there is known now, not when all ranks have started
    asked = [*args, "--out", str(folder.path)]
    with folder.lock(LAUNCHER):
        return start_in(folder, config, asked)


def start_in(folder: RunFolder, config: TrainConfig, asked: list[str]) -> int:
    from phalanx.train.launch import RankFailure, Stopped, launch, rank_command

    ranks = config.parsed_mesh().size
    try:
        for attempt in range(config.restarts + 1):
            try:
                launch(ranks, rank_command(["train", *asked]), logs=folder.logs, attempt=attempt)
                return 0
            except Stopped:
                raise
            except RankFailure as failure:
                if failure.is_final or attempt == config.restarts:
                    raise
                tell_restart(failure, attempt + 1, config.restarts, folder)
    finally:
        forget_unless_begun(folder, config)
    raise AssertionError("every attempt returns or raises")


def tell_restart(failure: RankFailure, attempt: int, restarts: int, folder: RunFolder) -> None:
    print(f"phalanx: {failure}", file=sys.stderr)
    again = f"starting the ranks again, from the newest good checkpoint (restart {attempt} of {restarts})"
    print(f"phalanx: {again}", file=sys.stderr, flush=True)
    folder.event("restart", folder.steps(), why=str(failure).splitlines()[0], attempt=attempt)


def check_files(config: TrainConfig) -> None:
    """What needs no model is refused here, at once, rather than by every rank after it has started."""
    from phalanx.schedule.measured import read as read_trace
    from phalanx.train.beginning import look
    from phalanx.train.data.source import open_sources
    from phalanx.train.wires import measured_wires

    if config.balance is not None:
        read_trace(config.balance)
    if config.data:
        open_sources(config.data)
    if config.profile is not None:
        measured_wires(config.profile)
    look(config)


def join(config: TrainConfig, *, is_first: bool) -> int:
    """Train as one rank; returns the exit code. The first one decides for all where the run folder is, and reads the profile."""
    from rich.console import Console

    from phalanx.comm.world import init
    from phalanx.train.beginning import look
    from phalanx.train.checkpoint.save import leave_behind
    from phalanx.train.folder import RunFolder
    from phalanx.train.loop import train
    from phalanx.train.wires import measured_wires

    wires = measured_wires(config.profile) if is_first and config.profile is not None else None
    # Before the ranks meet: the first thing that they write down is how they do.
    folder = RunFolder.create(config) if is_first else None
    try:
        if folder is not None and config.resume != "auto":
            kind, addresses, _ = look(config)
            with folder.lock():
                leave_behind(config.checkpoints or folder.checkpoints, addresses[0] if kind == "resume" else "")
        world = init(
            config.parsed_mesh(),
            device=config.device,
            wires=wires,
            watch=folder.path if folder is not None and config.watch is not False else None,
            watched=WATCHED[config.watch],
        )
        try:
            summary = train(config if folder is None else replace(config, out=folder.path), world, Console())
        finally:
            world.close()
    finally:
        if folder is not None:
            forget_unless_begun(folder, config)
    if summary.stopped is None:
        return 0
    return 128 + (signal.SIGINT if summary.stopped == signal.SIGINT else signal.SIGTERM)


def forget_unless_begun(folder: RunFolder, config: TrainConfig) -> None:
    """Remove what was made for a run which was refused before its first step: the folder, or what a start leaves in that of --out."""
    ours = {each.name for each in folder.path.glob("*")} - folder.before
    if folder.metrics.exists() or (config.out is not None and (folder.is_locked or ours - LEFT)):
        return
    with suppress(OSError):  # the first that cannot go, or holds anything else, stays, and so do those around it
        for path in (folder.path / name for name in ours):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for made in folder.made:
            made.rmdir()


LEFT = {"lock", "lock.json", "launcher", "launcher.json", "logs"}
"""What a start makes in a run folder before the run itself writes there."""


WATCHED: dict[bool | None, tuple[str, ...]] = {None: ("gloo",), True: ("gloo", "nccl", "shm"), False: ()}
"""Backends that are watched, by the setting `watch`."""
