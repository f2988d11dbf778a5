"""`phalanx bench collectives`: starts the ranks or joins those of a launcher, measures, and prints nccl-tests' table."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from phalanx.bench.busbw import REDOPS
from phalanx.bench.sweep import BACKENDS, BUFFERS, DTYPES, Effort, Request, check, names, op_names, parse_size, sizes
from phalanx.cli.options import Switch
from phalanx.mesh import Mesh

if TYPE_CHECKING:
    from phalanx.comm.launch import Launch

Words = tyro.conf.UseAppendAction[tuple[str, ...]]
EXAMPLES = """Examples:
  phalanx bench collectives --ranks 4 --op all_reduce,all_gather -b 1K -e 64M -f 4
  phalanx bench collectives --ranks 2 --backends shm,gloo --a-a --json bench.json --plot bench.svg
  phalanx bench collectives --mesh dp=2,tp=2 --axis tp --op all_reduce
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time collectives as nccl-tests does, several backends alternated in one run, and check what they computed."""

    ranks: int | None = None
    """Local processes to start. Under torchrun, srun or mpirun their ranks are joined instead."""
    mesh: str = ""
    """Measure groups of a mesh, such as dp=2,tp=2, all at the same time."""
    axis: str = ""
    """The axis, or axes joined by commas, along which its groups lie; by default all of them, which is one group."""
    op: Words = ()
    """Operation: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, sendrecv, or all.
    May be given several times or as a list with commas; all_reduce by default."""
    backends: Words = ()
    """shm, gloo, nccl, mpi: alternated in one run. By default nccl with CUDA, otherwise shm and gloo on this machine."""
    baseline: str = ""
    """The backend that the others are held against; by default the last one."""
    a_a: Switch = False
    """Measure the baseline a second time: no ratio closer to 1 than that one means anything. Always so with one backend."""
    minbytes: Annotated[str, tyro.conf.arg(aliases=["-b"])] = "1K"
    """Smallest size. K, M and G are powers of 1024."""
    maxbytes: Annotated[str, tyro.conf.arg(aliases=["-e"])] = "16M"
    """Largest size."""
    stepfactor: Annotated[int, tyro.conf.arg(aliases=["-f"])] = 4
    """Each size is that many times the one before."""
    iters: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 20
    """Samples of each size."""
    warmup_iters: Annotated[int, tyro.conf.arg(aliases=["-w"])] = 5
    """Untimed calls of every operation, size and backend."""
    pipelined: int = 1
    """Calls back to back in one sample, which is their mean. 1 measures the latency of a call."""
    dtype: Annotated[str, tyro.conf.arg(aliases=["-d"])] = "float"
    """float, double, half, bfloat16, int8, uint8, int32 or int64; torch's names are known too."""
    redop: str = "sum"
    """sum, prod, min, max or avg."""
    root: Annotated[int, tyro.conf.arg(aliases=["-r"])] = 0
    """Rank within its group of the root of broadcast, reduce, gather and scatter."""
    cache: Words = ()
    """cold: other memory in every iteration, from a pool of twice the last-level cache (the default); hot: the same memory;
    or both, with a comma."""
    resident: Switch = False
    """shm on tensors that live in its arena (phalanx.shm.empty)."""
    check: Annotated[int, tyro.conf.arg(aliases=["-c"])] = 1
    """1 compares each operation once per size with its exact result; 0 does not."""
    json: Path | None = None
    """Write the results there, with nccl-tests' keys."""
    plot: Path | None = None
    """Write bus bandwidth over size there, as .png, .svg or .pdf."""
    store: Path | None = None
    """A new file that all ranks can reach and meet through, instead of an address; for ranks that mpirun or srun started."""


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, prog="phalanx bench collectives", description=f"{Options.__doc__}\n\n{EXAMPLES}")
    from phalanx.comm.launch import launch_from

    launched = launch_from(os.environ)
    mesh, axes = chosen_mesh(options, launched)
    request = requested(options, mesh.extent(axes))
    effort = Effort(options.warmup_iters, options.iters, options.pipelined, bool(options.check))
    check(request, validate=effort.check)
    check_surroundings(options, request, mesh, launched)
    if launched is None:
        args = args if options.backends else [*args, "--backends", ",".join(request.backends)]
        return start_ranks(args, mesh.size, with_mpi="mpi" in request.backends)

    from phalanx.bench.session import Run, run

    if options.store is not None:
        launched = replace(launched, rendezvous=f"file://{options.store.resolve()}")
    told = ("phalanx", "bench", "collectives", *(args[:-2] if args[-2:-1] == ["--store"] else args))
    run(Run(request, effort, mesh, axes, options.stepfactor, told, options.json, options.plot), launched)
    return 0


def chosen_mesh(options: Options, launched: Launch | None) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh and the axes along which the measured groups lie; ValueError if it is not as big as the launch or --ranks."""
    if not options.mesh:
        if options.axis:
            raise ValueError(f"--axis {options.axis} is about a mesh: name it, as in --mesh dp=2,tp=2 --axis tp")
        ranks = options.ranks if options.ranks is not None else launched.size if launched else None
        if ranks is None:
            raise ValueError("say how many ranks to start, as in --ranks 2, or start them with torchrun, srun or mpirun")
        if ranks < 1:
            raise ValueError(f"--ranks is {ranks}; it is a number of at least 2")
        mesh = Mesh(ranks=ranks)
    else:
        mesh = Mesh.parse(options.mesh)
    if options.ranks is not None and options.ranks != mesh.size:
        raise ValueError(f"mesh {mesh} has {mesh.size} ranks, but --ranks is {options.ranks}: leave out --ranks")
    if launched is not None:
        from phalanx.comm.launch import check_mesh

        check_mesh(mesh, launched)
    axes = names("axis", [options.axis], mesh.names) or mesh.names
    return mesh, axes


def requested(options: Options, group: int) -> Request:
    backends = names("backend", options.backends, BACKENDS) or default_backends()
    dtype = names("dtype", [options.dtype], DTYPES)
    redop = names("redop", [options.redop], REDOPS)
    if len(dtype) != 1 or len(redop) != 1:
        raise ValueError(f"--dtype is {options.dtype!r} and --redop {options.redop!r}; each is one name")
    chosen = set(names("kind of buffers", options.cache, BUFFERS)) or {"cold"}
    return Request(
        ops=op_names(options.op) or ("all_reduce",),
        sizes=sizes(parse_size(options.minbytes), parse_size(options.maxbytes), options.stepfactor),
        group=group,
        backends=backends,
        baseline=options.baseline or backends[-1],
        dtype=DTYPES[dtype[0]],
        redop=redop[0],
        root=options.root,
        buffers=tuple(kind for kind in BUFFERS if kind in chosen),
        resident=options.resident,
        again=options.a_a,
    )


def default_backends() -> tuple[str, ...]:
    """Those that ranks of this machine have; ranks that an outer launcher started may be on several."""
    import torch

    from phalanx.comm.launch import launch_from
    from phalanx.comm.shm import available

    if torch.cuda.is_available():
        return ("nccl",)
    return ("shm", "gloo") if available() is None and launch_from(os.environ) is None else ("gloo",)


def check_surroundings(options: Options, request: Request, mesh: Mesh, launched: Launch | None) -> None:
    """Raise ValueError for what this machine or installation cannot do."""
    if "nccl" in request.backends:
        import torch

        on_cpu = [backend for backend in request.backends if "cuda" not in BACKENDS[backend]]
        if on_cpu:
            raise ValueError(f"nccl is measured on CUDA tensors, which {on_cpu[0]} does not take: measure them in two runs")
        here = torch.cuda.device_count()
        if here < (mesh.size if launched is None else launched.local_rank + 1):
            raise ValueError(f"nccl needs a GPU for each rank, and this machine has {here}: fewer --ranks, or --backends gloo")
    if "mpi" in request.backends:
        from phalanx.bench.mpi import check_mpi

        check_mpi(launched.launcher if launched else None)
    if "shm" in request.backends:
        from phalanx.bench.wires import register_shm

        register_shm()
    if options.plot is not None:
        from phalanx.bench.plot import check_plot

        check_plot(options.plot)
    for path in (options.json, options.plot):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")


def start_ranks(args: list[str], ranks: int, *, with_mpi: bool) -> int:
    """Run this command as local ranks; the exit code."""
    from phalanx.train.launch import launch, rank_command

    if not with_mpi:
        launch(ranks, rank_command(["bench", "collectives", *args]))
        return 0

    from phalanx.bench.mpi import mpirun

    with tempfile.TemporaryDirectory(prefix="phalanx_bench_") as folder:
        return mpirun(ranks, rank_command(["bench", "collectives", *args, "--store", f"{folder}/store"]))
