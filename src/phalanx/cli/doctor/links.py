"""`phalanx doctor links`: which rank, host or link is slow, in one line and a matrix."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from phalanx.cli.options import Switch
from phalanx.mesh import Mesh

if TYPE_CHECKING:
    from phalanx.observe.links import Links

SOMETHING_IS_SLOW = 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure every link between ranks, both ways, and name what is slow.

    Under torchrun, srun or mpirun it joins their ranks; otherwise it starts local ones, and exits with 1 if something is slow.
    """

    ranks: int | None = None
    """Number of local ranks to start; under a launcher it has said how many there are."""
    backend: str | None = None
    """gloo, shm, nccl, or threads (ranks of one process); by default that of training: nccl on GPUs, else shm or gloo."""
    mib: float = 4.0
    """Size of the large message, whose time is the bandwidth, in MiB."""
    repeats: int = 5
    """Repetitions of every message in each pass; the best counts."""
    recorded: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Judge the measurements in this file instead, which --out wrote."""
    out: Path | None = None
    """Write the measurements to this JSON file."""
    no_matrix: Switch = False
    """Print the verdict alone."""


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, prog="phalanx doctor links")
    if options.recorded is not None:
        from phalanx.observe.links import Links

        if options.ranks is not None:
            raise ValueError("--from reads measurements and starts no ranks; leave --ranks out")
        return report(Links.load(options.recorded), options)
    if options.repeats < 1 or options.mib <= 0:
        raise ValueError(f"--repeats {options.repeats} --mib {options.mib}: both are more than 0")
    if options.out is not None and not options.out.parent.is_dir():
        raise FileNotFoundError(f"--out {options.out}: there is no folder {options.out.parent}")

    from phalanx.comm.launch import check_mesh, launch_from
    from phalanx.observe.worlds import check_backend

    outer = launch_from(os.environ)
    count = options.ranks if options.ranks is not None else outer.size if outer is not None else 0
    if count < 2:
        raise ValueError("say how many ranks to start, at least 2, as in --ranks 4; or start it with torchrun, srun or mpirun")
    check_backend(options.backend)
    mesh = Mesh(dp=count)
    if options.backend == "threads":
        return in_threads(mesh, options)
    if outer is None:
        return in_local_ranks(mesh, args, options)
    check_mesh(mesh, outer)
    from phalanx.observe.tournament import measure_links
    from phalanx.observe.worlds import opened

    with opened(mesh, options.backend) as (world, _):
        links = measure_links(world.transport, world.device, size=message(options), repeats=options.repeats)
        if world.rank == 0:
            report(links, options)
    return 0


def in_threads(mesh: Mesh, options: Options) -> int:
    from phalanx.comm.local import local
    from phalanx.observe.tournament import measure_links

    with local(mesh) as ranks:
        measured = ranks.run(lambda w: measure_links(w.transport, w.device, size=message(options), repeats=options.repeats))
    return report(measured[0], options)


def in_local_ranks(mesh: Mesh, args: list[str], options: Options) -> int:
    """Rank 0 reports; its measurements come back in a file, since an exit code of a rank would be told as its failure."""
    import tempfile

    from phalanx.observe.links import Links, judge
    from phalanx.train.launch import launch, rank_command

    with tempfile.TemporaryDirectory(prefix="phalanx_links_") as folder:
        out = options.out if options.out is not None else Path(folder, "links.json")
        launch(mesh.size, rank_command(["doctor", "links", *args, "--out", str(out)]))
        return SOMETHING_IS_SLOW if judge(Links.load(out)).findings else 0


def message(options: Options) -> int:
    return max(int(options.mib * 2**20), 1)


def report(links: Links, options: Options) -> int:
    from rich.console import Console

    from phalanx.observe.links import judge, matrix_table

    verdict = judge(links)
    console = Console(width=None if os.isatty(1) else 200)  # a file has no width to fit
    console.print(verdict.line, highlight=False, markup=False, soft_wrap=True)
    if not options.no_matrix:
        console.print(matrix_table(links, verdict.findings))
    if options.out is not None:
        links.save(options.out)
    return SOMETHING_IS_SLOW if verdict.findings else 0
