"""`phalanx train`: one training run, on local ranks that it starts itself or on those of torchrun, Slurm or MPI."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from phalanx.cli.options import defaults
from phalanx.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a model on a mesh. Under torchrun, srun or mpirun it joins their ranks; otherwise it starts local ones."""

    config: Path | None = None
    """A YAML file with any of the options below; the command line has the last word."""
    run: Annotated[TrainConfig, tyro.conf.arg(name="")]


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, default=Options(run=defaults(args, TrainConfig())), prog="phalanx train")
    config = options.run
    config.check()
    mesh = config.parsed_mesh()

    from phalanx.comm.launch import launch_from
    from phalanx.train.models import check_name
    from phalanx.train.wires import measured_wires

    check_name(config.model)
    started = launch_from(os.environ)
    if mesh.size > 1 and started is None:
        from phalanx.schedule.measured import read as read_trace
        from phalanx.train.data import byte_tokens
        from phalanx.train.launch import launch, rank_command

        # What needs no model is refused here, at once, rather than by every rank after it has started.
        if config.balance is not None:
            read_trace(config.balance)
        for source in config.data:
            byte_tokens(Path(source))
        if config.profile is not None:
            measured_wires(config.profile)
        print(
            f"starting {mesh.size} local ranks for mesh {config.mesh}; each imports torch and derives its program first",
            flush=True,
        )
        launch(mesh.size, rank_command(["train", *args]))
        return 0
    join(config, is_first=started is None or started.rank == 0)
    return 0


def join(config: TrainConfig, *, is_first: bool) -> None:
    """Train as one rank. The first one decides for all where the run folder is, and reads the profile."""
    from rich.console import Console

    from phalanx.comm.world import init
    from phalanx.train.loop import run_folder, train
    from phalanx.train.wires import measured_wires

    wires = measured_wires(config.profile) if is_first and config.profile is not None else None
    # Before the ranks meet: the first thing that they write down is how they do.
    folder = run_folder(config) if is_first and config.watch is not False else None
    try:
        world = init(
            config.parsed_mesh(),
            device=config.device,
            wires=wires,
            watch=folder,
            watched=WATCHED[config.watch],
        )
        try:
            train(config if folder is None else replace(config, out=folder), world, Console())
        finally:
            world.close()
    finally:
        if folder is not None and config.out is None:
            with suppress(OSError):  # not empty: there was a run
                folder.rmdir()


WATCHED: dict[bool | None, tuple[str, ...]] = {None: ("gloo",), True: ("gloo", "nccl", "shm"), False: ()}
"""Backends that are watched, by the setting `watch`."""
