"""`phalanx verify`: train a model on a mesh and in one plain PyTorch process, and compare every number."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from phalanx.cli.options import NoRun, Switch, defaults
from phalanx.train.config import OptimizerConfig

if TYPE_CHECKING:
    from phalanx.train.verify import Comparison


@dataclass(frozen=True, kw_only=True)
class Verified(NoRun):
    """What of a run is verified: all but its text and its folder."""


DEFAULTS = Verified(mesh="dp=2,tp=2", steps=3, dtype="float64", optimizer=OptimizerConfig(warmup=1))


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare loss, every gradient and every weight of a model on a mesh with one process of plain PyTorch, step by step.

    Exit code 0 when all agree, 1 when something differs by more than the tolerance.
    """

    config: Path | None = None
    """A YAML file with any of the run's options below; the command line has the last word."""
    processes: Switch = False
    """Run the ranks as processes over the real transport; by default they are threads of this one."""
    rewrite_norms: bool | None = None
    """Replace norms that round to float32 inside, on both sides; by default only in float64."""
    tolerance: float | None = None
    """Largest relative error that passes; by default 1e-10 in float64, 1e-4 in float32, 5e-2 in bfloat16."""
    json: Switch = False
    """Print the result as one JSON object and nothing else."""
    run: Annotated[Verified, tyro.conf.arg(name="")]


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, default=Options(run=defaults(args, DEFAULTS)), prog="phalanx verify")
    config = options.run
    config.check()
    mesh = config.parsed_mesh()

    from phalanx.comm.launch import launch_from
    from phalanx.comm.local import LocalWorld, local
    from phalanx.comm.world import World, init
    from phalanx.train.models import check_name
    from phalanx.train.verify import verify

    check_name(config.model)
    world: World | LocalWorld
    joined = launch_from(os.environ) is not None
    if options.processes and not joined and mesh.size > 1:
        from phalanx.train.launch import launch, rank_command

        launch(mesh.size, rank_command(["verify", *args]))
        return 0
    world = init(mesh, device=config.device) if joined else local(mesh)
    try:
        comparison = verify(config, world, rewrite=options.rewrite_norms, tolerance=options.tolerance)
    finally:
        world.close()
    if isinstance(world, LocalWorld) or world.rank == 0:
        print(json.dumps(comparison.as_json()) if options.json else described(comparison), flush=True)
    return 0 if comparison.passed else 1


def described(comparison: Comparison) -> str:
    c = comparison
    layout = (
        ", ".join(f"{name}={axes if isinstance(axes, str) else '+'.join(axes)}" for name, axes in c.layout.items()) or "none"
    )
    lines = [
        f"{c.model} on mesh {c.mesh or 'of one rank'}, layout {layout}, {c.dtype}",
        f"{c.steps} steps against {c.reference}",
        "largest relative error, max|Δ| / max|reference| of a tensor:",
        f"  loss    {c.loss:.1e}",
        f"  grad    {c.grad:.1e}  {c.worst['grad'] or ''}".rstrip(),
        f"  weight  {c.weight:.1e}  {c.worst['weight'] or ''}".rstrip(),
        *(f"note: {note}" for note in c.notes),
    ]
    first = c.first_divergence
    if first is None:
        lines.append(f"agrees: nothing differs by more than {c.tolerance:.0e}")
    else:
        what = first.kind if first.tensor is None else f"{first.kind} of {first.tensor} (segment {first.segment})"
        lines.append(f"DIFFERS: first in step {first.step}, {what}, by {first.error:.1e}; the tolerance is {c.tolerance:.0e}")
    return "\n".join(lines)
