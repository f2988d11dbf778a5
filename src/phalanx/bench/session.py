"""One rank's whole run: meets the others, opens every backend's groups, measures, and on rank 0 prints, writes and draws."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import phalanx as phx
from phalanx.bench import table
from phalanx.bench.buffers import Pool, check_memory, last_level_cache_bytes, pool_bytes
from phalanx.bench.clock import Start, host
from phalanx.bench.collectives import Bench, Refused, measure
from phalanx.bench.mpi import MpiWires
from phalanx.bench.plot import plot
from phalanx.bench.results import Row
from phalanx.bench.sweep import Case, Effort, Request
from phalanx.bench.wires import TIMEOUT, TorchWires, Wires, resident_bytes
from phalanx.comm.launch import Launch
from phalanx.mesh import Mesh
from phalanx.train.launch import RankFailure


@dataclass(frozen=True)
class Run:
    """What a person asked for.

    axes  the groups that are measured lie along these axes of the mesh
    args  the command line, to be told with the results
    """

    request: Request
    effort: Effort
    mesh: Mesh
    axes: tuple[str, ...]
    factor: int
    args: tuple[str, ...]
    json: Path | None = None
    plot: Path | None = None


def run(asked: Run, launch: Launch) -> list[Row]:
    """Measure as one of the ranks that were launched; returns the rows, the same on every rank.

    Raises RankFailure on rank 0 if a backend computed something wrong.
    """
    device = torch.device("cuda", launch.local_rank) if "nccl" in asked.request.backends else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    # What is not measured goes over this one: starts, samples, what failed.
    dist.init_process_group("gloo", init_method=launch.rendezvous, rank=launch.rank, world_size=launch.size, timeout=TIMEOUT)
    wires: dict[str, Wires] = {}
    try:
        groups = asked.mesh.groups(asked.axes)
        for backend in asked.request.backends:
            wires[backend] = MpiWires(groups, launch.rank, launch.size) if backend == "mpi" else TorchWires(backend, groups)
        rows = _run(asked, launch, device, groups, wires)
        for each in wires.values():
            each.close()
    finally:
        dist.destroy_process_group()
    if launch.rank == 0:
        require_right(rows)
    return rows


def require_right(rows: Sequence[Row]) -> None:
    """Raise RankFailure with what was wrong where, if anything was, or if nothing was measured at all."""
    if not rows:
        raise RankFailure("nothing was measured: no backend has the operation, for the reasons above", 1)
    failed = [row for row in rows if row.wrong]
    if failed:
        where = ", ".join(dict.fromkeys(f"{row.case.op} on {row.case.label}" for row in failed))
        raise RankFailure(f"{sum(row.wrong for row in failed)} elements are wrong: {where}", 1)


def _run(asked: Run, launch: Launch, device: torch.device, groups: list[tuple[int, ...]], wires: dict[str, Wires]) -> list[Row]:
    rounds = asked.request.rounds()
    cases = [case for each in rounds for case in each]
    cache = last_level_cache_bytes(device)
    group = next(at for at, ranks in enumerate(groups) if launch.rank in ranks)
    pools = _pools(cases, cache, device)
    bench = Bench(wires, pools, Start(device), groups[group].index(launch.rank), asked.request.baseline)
    devices: list[table.Device | None] = [None] * launch.size
    dist.all_gather_object(devices, _device(device, launch, group))
    setting = table.Setting(
        args=asked.args,
        versions=f"phalanx {phx.__version__}, torch {torch.__version__}, nccl-tests' conventions",
        ranks=launch.size,
        mesh=str(asked.mesh),
        axes=asked.axes,
        sizes=asked.request.sizes,
        factor=asked.factor,
        baseline=asked.request.baseline,
        pool_bytes=max(pool.bytes for pool in pools.values()),
        last_level_cache=cache,
        effort=asked.effort,
        devices=tuple(each for each in devices if each is not None),
        started=_now(),
    )
    rows: list[Row] = []
    refused: list[Refused] = []
    if launch.rank == 0:
        print(table.header(setting), flush=True)
    for done in measure(bench, rounds, asked.effort):
        if isinstance(done, Row):
            rows.append(done)
        else:
            refused.append(done)
        if launch.rank == 0:
            print(table.line(done, setting.baseline) if isinstance(done, Row) else table.refusal(done), flush=True)
    if launch.rank == 0:
        print(table.footer(setting, rows, bench.start.late / max(1, bench.start.starts)), flush=True)
        if asked.json is not None:
            asked.json.write_text(json.dumps(table.as_json(setting, rows, refused, _now()), indent=1) + "\n")
        if asked.plot is not None and rows:
            plot(rows, asked.plot, f"{launch.size} ranks, mesh {asked.mesh}, {asked.request.dtype}")
    return rows


def _pools(cases: Sequence[Case], cache: int, device: torch.device) -> dict[bool, Pool]:
    """By residence. All ranks of a host are counted before any of them takes memory."""
    needs = {
        resident: pool_bytes(mine, cache)
        for resident in (False, True)
        if (mine := [case for case in cases if case.resident == resident])
    }
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, host())
    if device.type == "cpu":
        check_memory(sum(needs.values()), hosts.count(host()))

    def ordinary(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    # Nobody may take memory before everybody has seen that it is there.
    dist.barrier()
    return {resident: Pool(nbytes, resident_bytes if resident else ordinary) for resident, nbytes in needs.items()}


def _device(device: torch.device, launch: Launch, group: int) -> table.Device:
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        where = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
        return table.Device(launch.rank, group, os.getpid(), socket.gethostname(), launch.local_rank, where, properties.name)
    return table.Device(launch.rank, group, os.getpid(), socket.gethostname(), launch.local_rank, "cpu", _processor())


def _processor() -> str:
    """The model as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
