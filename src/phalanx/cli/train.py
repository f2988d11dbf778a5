"""`phalanx train`: one training run, on local ranks that it starts itself or on those of torchrun, Slurm or MPI."""

from __future__ import annotations

import os
from dataclasses import dataclass
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
    from phalanx.comm.world import init
    from phalanx.train.models import check_name

    check_name(config.model)
    if mesh.size > 1 and launch_from(os.environ) is None:
        from phalanx.schedule.pipeline import compute_order
        from phalanx.train.data import byte_tokens
        from phalanx.train.launch import launch, rank_command

        # What needs no model is refused here, at once, rather than by every rank after it has started.
        compute_order(config.schedule, 1, 1)
        if config.data is not None:
            byte_tokens(config.data)
        print(
            f"starting {mesh.size} local ranks for mesh {config.mesh}; each imports torch and derives its program first",
            flush=True,
        )
        launch(mesh.size, rank_command(["train", *args]))
        return 0

    from rich.console import Console

    from phalanx.train.loop import train

    world = init(mesh, device=config.device)
    try:
        train(config, world, Console())
    finally:
        world.close()
    return 0
