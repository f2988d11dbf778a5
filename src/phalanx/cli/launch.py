"""`phalanx launch`: a complete recipe for a run on other launchers: Slurm, torchrun, mpirun, Kubernetes. Starts nothing."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable
from typing import Any

import tyro

from phalanx.cli import usage
from phalanx.cli.options import defaults
from phalanx.cli.train import Options as Train
from phalanx.train.config import TrainConfig
from phalanx.train.recipes import Recipe, job, jobset, mpirun, slurm, torchrun

RECIPES: dict[str, tuple[type[Recipe], Callable[..., str], str]] = {
    "slurm": (slurm.Slurm, slurm.script, "A batch script for sbatch."),
    "torchrun": (torchrun.Torchrun, torchrun.script, "A torchrun line for each host."),
    "mpirun": (mpirun.Mpirun, mpirun.script, "A script with an mpirun line, of Open MPI or MPICH."),
    "jobset": (jobset.JobSet, jobset.script, "A JobSet manifest for Kubernetes."),
}


def main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(usage("phalanx launch", {name: what for name, (_, _, what) in RECIPES.items()}))
        print("What is to be trained stands behind `--`, as in phalanx launch slurm -- train --mesh dp=16 --out runs/mine ...")
        return 0
    launcher, rest = args[0], args[1:]
    if launcher not in RECIPES:
        close = difflib.get_close_matches(launcher, RECIPES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(RECIPES)}"
        raise ValueError(f"launch has no recipe for {launcher!r}{hint}")
    if "--" not in rest and "train" in rest:
        at = rest.index("train")
        raise ValueError(f"`--` stands before train: phalanx launch {shlex.join([launcher, *rest[:at], '--', *rest[at:]])}")
    at = rest.index("--") if "--" in rest else len(rest)
    kind, write, _ = RECIPES[launcher]
    recipe: Any = tyro.cli(kind, args=rest[:at], prog=f"phalanx launch {launcher}")
    command = rest[at + 1 :]
    if command[:1] != ["train"]:
        given = f"`{shlex.join(command)}`" if command else "nothing"
        raise ValueError(
            f"behind `--` stands what is to be launched, which is {given}; it begins with train, as in "
            f"phalanx launch {launcher} -- train --mesh dp=16 --out runs/mine --checkpoint-every 500"
        )
    run = tyro.cli(Train, args=command[1:], default=Train(run=defaults(command[1:], TrainConfig())), prog="phalanx train").run
    run.check()
    from phalanx.train.models import check_name

    check_name(run.model)
    text = write(job(command[1:], run, recipe), recipe)
    if recipe.out is None:
        print(text, end="")
    else:
        recipe.out.write_text(text)
    return 0
