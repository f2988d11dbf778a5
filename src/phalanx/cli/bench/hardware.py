"""`phalanx bench hardware`: what this machine is, from registers to network, as tables and as a profile file."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from phalanx.cli.options import Switch
from phalanx.mesh import Mesh

if TYPE_CHECKING:
    from phalanx.bench.hardware import Effort
    from phalanx.hardware import Profile

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure this machine: matrix products, levels of memory and, with several ranks, every link of the mesh.

    Under torchrun, srun or mpirun it joins their ranks; otherwise it starts local ones.
    """

    mesh: str | None = None
    """Axes whose links are measured, as in dp=2,tp=2."""
    ranks: int | None = None
    """A mesh of one axis, dp, with this many ranks. One rank, the default, has no links."""
    backend: str | None = None
    """gloo, shm, nccl, or threads (ranks of one process); by default that of training: nccl on GPUs, else shm or gloo."""
    quick: Switch = False
    """Fewer sizes and repeats: about 20 seconds for two ranks on two cores."""
    repeats: int | None = None
    """Repetitions of every measurement."""
    ops: tuple[str, ...] = ()
    """Operations to measure along each axis; all if none is named."""
    max_bytes: str | None = None
    """Largest message or collective, as in 64M."""
    out: Path | None = None
    """Write the profile, with its raw samples, to this JSON file."""


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, prog="phalanx bench hardware")

    from phalanx.bench.hardware import check
    from phalanx.comm.launch import check_mesh, launch_from
    from phalanx.observe.worlds import check_backend

    outer = launch_from(os.environ)
    mesh = mesh_of(options.mesh, options.ranks, outer.size if outer is not None else 1)
    plan = effort(options)
    check(plan)
    check_backend(options.backend)
    if options.out is not None and not options.out.parent.is_dir():
        raise FileNotFoundError(f"--out {options.out}: there is no folder {options.out.parent}")
    if options.backend == "threads":
        report(in_threads(mesh, plan), options)
        return 0
    if mesh.size > 1 and outer is None:
        from phalanx.train.launch import launch, rank_command

        launch(mesh.size, rank_command(["bench", "hardware", *args]))
        return 0
    check_mesh(mesh, outer)
    in_processes(mesh, plan, options)
    return 0


def in_processes(mesh: Mesh, plan: Effort, options: Options) -> None:
    from rich.console import Console

    from phalanx.bench.hardware import measure
    from phalanx.observe.worlds import opened

    console = Console(stderr=True, quiet=not os.isatty(2))
    with opened(mesh, options.backend, p2p=mesh.names) as (world, backend):
        with console.status("measuring") as status:
            profile = measure(world, backend, plan, lambda what: status.update(f"measuring {what}"))
        if world.rank == 0:
            report(profile, options)


def in_threads(mesh: Mesh, plan: Effort) -> Profile:
    import torch

    from phalanx.bench.hardware import measure
    from phalanx.comm.local import local

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // mesh.size))
    with local(mesh) as ranks:
        return ranks.run(lambda world: measure(world, "threads", plan))[0]


def mesh_of(text: str | None, ranks: int | None, started: int) -> Mesh:
    """The mesh that --mesh and --ranks ask for together; without either, of the ranks that were started."""
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks is {ranks}; it is a number of at least 1")
    if text is None:
        count = ranks if ranks is not None else started
        return Mesh(dp=count) if count > 1 else Mesh()
    mesh = Mesh.parse(text)
    if ranks is not None and ranks != mesh.size:
        raise ValueError(f"--ranks is {ranks}, but mesh {text} has {mesh.size}; leave one of the two out")
    return mesh


def effort(options: Options) -> Effort:
    from phalanx.bench.hardware import FULL, QUICK

    plan = QUICK if options.quick else FULL
    if options.repeats is not None:
        plan = replace(plan, repeats=options.repeats)
    if options.ops:
        plan = replace(plan, ops=options.ops)
    if options.max_bytes is not None:
        largest = parse_bytes(options.max_bytes)
        factor = plan.sizes[1] // plan.sizes[0]
        sizes = [size for size in plan.sizes if size <= largest]
        while sizes and sizes[-1] * factor <= largest:
            sizes.append(sizes[-1] * factor)
        plan = replace(plan, sizes=tuple(sizes) or (largest,))
    return plan


def parse_bytes(text: str) -> int:
    """64M → 67108864"""
    unit = UNITS.get(text[-1:].upper())
    digits = text[:-1] if unit else text
    if not digits.isdecimal():
        raise ValueError(f"{text!r} is not a number of bytes; write 4096, 64K, 16M or 1G")
    return int(digits) * (unit or 1)


def report(profile: Profile, options: Options) -> None:
    from rich.console import Console

    from phalanx.bench.hardware import tables

    console = Console(width=None if os.isatty(1) else 140)  # a file has no width to fit
    console.print(profile.machine, highlight=False)
    for table in tables(profile):
        console.print(table)
    if options.out is not None:
        profile.save(options.out)
        console.print(f"profile written to {options.out}", highlight=False)
