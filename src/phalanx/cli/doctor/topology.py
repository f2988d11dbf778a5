"""`phalanx doctor topology`: the links between devices, and which axis of a mesh crosses which. Sends nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from phalanx.mesh import Mesh

if TYPE_CHECKING:
    from phalanx.comm.launch import Launch
    from phalanx.observe.machine import Machine
    from phalanx.observe.placement import Judgement


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show the links between this machine's devices and, with --mesh, which axis crosses which, with advice.

    Started on several hosts by torchrun, srun or mpirun, all of them are shown, once.
    """

    mesh: str = ""
    """Axes and sizes, the last varying fastest: dp=2,tp=4."""
    json: Path | None = None
    """Write all of it to this file; --from reads the machines in it."""
    recorded: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Machines that were recorded elsewhere, instead of this one: a JSON file, or a folder with one for each host."""


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, prog="phalanx doctor topology")
    mesh = Mesh.parse(options.mesh)

    from phalanx.observe.machine import load_machines
    from phalanx.observe.placement import judge

    per_host: list[int] | None = None
    if options.recorded is not None:
        machines = load_machines(options.recorded)
    else:
        found = here_and_elsewhere()
        if found is None:
            return 0
        machines, per_host = found
    judgement = judge(machines, mesh, per_host) if mesh.size > 1 else None
    if options.json is not None:
        options.json.write_text(json.dumps(report(machines, judgement), indent=1) + "\n")

    from rich.console import Console

    from phalanx.observe.topology_table import topology_table

    Console(highlight=False).print(topology_table(machines, judgement))
    return 0


def here_and_elsewhere() -> tuple[list[Machine], list[int] | None] | None:
    """The machines of all hosts of a launch with their ranks on each, in the order of ranks; None on ranks that do not print."""
    from phalanx.comm.launch import launch_from
    from phalanx.observe.collect import collect
    from phalanx.observe.topology import visible

    machine = visible(collect(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    launch = launch_from(os.environ)
    if launch is None or launch.size == 1:
        return [machine], None
    everyone = gathered(machine, launch)
    if launch.rank:
        return None
    starts = [rank for rank, (local_rank, _) in enumerate(everyone) if local_rank == 0]
    ends = [*starts[1:], launch.size]
    return [everyone[start][1] for start in starts], [end - start for start, end in zip(starts, ends, strict=True)]


def gathered(machine: Machine, launch: Launch) -> list[tuple[int, Machine]]:
    """(local rank, machine) of every rank."""
    import torch.distributed as dist

    from phalanx.comm.world import init

    with init(Mesh(ranks=launch.size), device="cpu"):
        everyone: list[Any] = [None] * launch.size
        dist.all_gather_object(everyone, (launch.local_rank, machine))
    return everyone


def report(machines: Sequence[Machine], judgement: Judgement | None) -> dict[str, Any]:
    """Everything that is known, as JSON: machines, the links between all their devices, and what became of the mesh."""
    from phalanx.observe.topology import Device, Wiring

    devices = [Device(h, k) for h, machine in enumerate(machines) for k in range(len(machine.gpus) or len(machine.numa))]
    wiring = Wiring(machines)
    links = [[None if a == b else asdict(wiring.link(a, b)) for b in devices] for a in devices]
    known: dict[str, Any] = {
        "machines": [machine.as_json() for machine in machines],
        "devices": [asdict(device) for device in devices],
        "links": links,
    }
    if judgement is not None:
        better = None if judgement.better is None else str(judgement.better)
        known["mesh"] = asdict(judgement) | {"mesh": str(judgement.mesh), "better": better}
    return known
