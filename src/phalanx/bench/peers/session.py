"""One rank's whole run: joins the others, holds every bout that was asked for, and on rank 0 prints, writes and draws."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import phalanx as phx
from phalanx.bench.peers import report
from phalanx.bench.peers.compare import Refused, Row, bout
from phalanx.bench.peers.frameworks import Step
from phalanx.bench.peers.jax_process import check_jax, jax_step
from phalanx.bench.peers.jobs import JAX_JOBS, JOBS, QUICK_SHAPES, SHAPES, Job, Shape, chosen
from phalanx.bench.wires import register_shm
from phalanx.comm.launch import Launch
from phalanx.train.launch import RankFailure


@dataclass(frozen=True)
class Request:
    """What a person asked for; empty names are all.

    transports  of Phalanx's side: gloo, shm
    """

    peers: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    transports: tuple[str, ...] = ("gloo", "shm")
    pairs: int = 40
    quick: bool = False
    with_jax: bool = False
    json: Path | None = None
    plot: Path | None = None


def check(request: Request, ranks: int) -> None:
    """Raise ValueError for what can be known to be wrong before any rank starts."""
    jobs(request)
    chosen("shape", request.shapes, _shapes(request))
    chosen("transport", request.transports, {"gloo": None, "shm": None})
    if ranks < 2:
        raise ValueError(f"--ranks is {ranks}; peers are compared on at least 2")
    if request.with_jax:
        check_jax()
    if "shm" in request.transports:
        register_shm()
    for path in (request.json, request.plot):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")
    if request.plot is not None:
        report.check_plot(request.plot)


def run(request: Request, launch: Launch) -> list[Row]:
    """As one of the ranks that were launched; returns the rows, the same on every rank.

    Raises RankFailure on rank 0 if nothing could be compared.
    """
    torch.set_num_threads(1)
    timeout = timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=launch.rendezvous, rank=launch.rank, world_size=launch.size, timeout=timeout)
    try:
        return _run(request)
    finally:
        dist.destroy_process_group()


def _run(request: Request) -> list[Row]:
    shapes = _shapes(request)
    first = dist.get_rank() == 0
    if first:
        print(
            f"phalanx {phx.__version__}, torch {torch.__version__}; {dist.get_world_size()} ranks of one thread, float32, AdamW in "
            f"fused kernels on both sides, every gradient's norm on both sides, {request.pairs} pairs",
            flush=True,
        )
    rows: list[Row] = []
    refused: list[Refused] = []
    for shape in chosen("shape", request.shapes, shapes):
        for job in jobs(request):
            with ExitStack() as stack:
                foreign: Step | None = None
                if job.peer in JAX_JOBS:
                    foreign = lambda: None  # noqa: E731 - the ranks that wait
                    if first:
                        foreign = stack.enter_context(jax_step(shapes[shape], job.axis, dist.get_world_size()))
                found = bout(job, shapes[shape], request.transports, request.pairs, foreign)
            gc.collect()
            if isinstance(found, Refused):
                refused.append(found)
            else:
                rows += found
            if first:
                print(report.line(found), flush=True)
    if first:
        report.show(rows, refused)
        if request.json is not None:
            report.save(rows, request.json)
        if request.plot is not None and rows:
            report.plot(rows, request.plot)
        if not rows:
            raise RankFailure("nothing was compared, for the reasons above", 1)
    return rows


def jobs(request: Request) -> list[Job]:
    """Those that were asked for. Raises ValueError for a peer that there is not."""
    table = JOBS | JAX_JOBS if request.with_jax else JOBS
    return [table[name] for name in chosen("peer", request.peers, table)]


def _shapes(request: Request) -> Mapping[str, Shape]:
    return QUICK_SHAPES if request.quick and not request.shapes else SHAPES
