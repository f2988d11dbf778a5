"""MPI as one more backend, through mpi4py on the memory of the tensors; its ranks must be started by mpirun or by srun's MPI.

Out of place and in place are MPI's own. torch's wheels have no process group for it, so this measures MPI as its users call it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.bench.busbw import Form
from phalanx.bench.sweep import Case
from phalanx.bench.wires import Call

_MOVED_AS_BYTES = ("half", "bfloat16")
"""Neither numpy nor MPI knows arithmetic on both of them."""


def check_mpi(launcher: str | None) -> None:
    """Raise ValueError if MPI cannot be had here. `launcher` started this process; None if we are to start mpirun."""
    if importlib.util.find_spec("mpi4py") is None:
        raise ValueError("the backend mpi needs mpi4py, which is not installed: pip install 'phalanx[mpi]'")
    if launcher is None and shutil.which("mpirun") is None:
        raise ValueError(
            "the backend mpi needs mpirun to start its ranks, and there is none: install Open MPI, as in "
            "apt-get install openmpi-bin libopenmpi-dev"
        )
    if launcher == "torchrun":
        raise ValueError(
            "the backend mpi needs ranks that mpirun or srun started, but torchrun started these: use mpirun, or no launcher"
        )


def mpirun(ranks: int, command: Sequence[str]) -> int:
    """Run `command` as `ranks` processes of Open MPI on this machine; returns mpirun's exit code."""
    # Unbound, because ranks that are bound in order would sit on one another's cores where other jobs are bound too; more ranks
    # than cores are allowed as they are with torch's launcher.
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    options = [*root, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    process = subprocess.Popen(["mpirun", *options, *command], env=environment)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


class MpiWires:
    """A communicator over the ranks of this process's group. Every rank must make one."""

    def __init__(self, groups: list[tuple[int, ...]], rank: int, world_size: int) -> None:
        import mpi4py

        # One thread calls MPI: locks that nobody needs would count against it.
        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        if (world.rank, world.size) != (rank, world_size):
            raise ValueError(
                f"MPI says that this is rank {world.rank} of {world.size}, the launcher said rank {rank} of {world_size}: "
                "was it started by another MPI than the one that mpi4py is built for?"
            )
        at = next(index for index, ranks in enumerate(groups) if rank in ranks)
        self._mpi = MPI
        self.communicator = world.Split(color=at, key=rank)
        self._redops = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}

    def call(self, case: Case, form: Form, send: Tensor, recv: Tensor) -> Call:
        comm, root, redop = self.communicator, case.root, self._redops.get(case.redop, self._mpi.SUM)
        sent, received = _buffers(case, form, send, recv, comm.rank == root, self._mpi.IN_PLACE)
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.Allreduce(sent, received, redop),
            "all_gather": lambda: comm.Allgather(sent, received),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(sent, received, redop),
            "all_to_all": lambda: comm.Alltoall(sent, received),
            "broadcast": lambda: comm.Bcast(received, root),
            "reduce": lambda: comm.Reduce(sent, received, redop, root),
            "gather": lambda: comm.Gather(sent, received, root),
            "scatter": lambda: comm.Scatter(sent, received, root),
            "sendrecv": lambda: comm.Sendrecv(sent, (comm.rank + 1) % comm.size, 0, received, (comm.rank - 1) % comm.size),
        }
        call = calls[case.op]
        if case.op == "broadcast" and form == "out_of_place" and comm.rank == root:
            # MPI's broadcast is in place as torch's is: the root keeps its input by a copy, on the clock.
            return lambda: (recv.copy_(send), call())
        return call

    def refusal(self, case: Case, form: Form) -> str | None:
        if case.redop == "avg":
            return "MPI has no average"
        if case.redop != "none" and case.dtype in _MOVED_AS_BYTES:
            return f"MPI has no arithmetic on {case.dtype}"
        if case.op == "reduce_scatter" and form == "in_place":
            return "MPI's reduce_scatter in place leaves the result in the first block, not in the rank's own"
        return None

    def close(self) -> None:
        self.communicator.Free()


def _buffers(case: Case, form: Form, send: Tensor, recv: Tensor, is_root: bool, in_place: Any) -> tuple[Any, Any]:
    """The two arguments that MPI wants: what is not significant on this rank is None, what is in place is IN_PLACE."""
    sent, received = _array(send, case), _array(recv, case)
    if case.op == "scatter":
        return (sent, in_place if form == "in_place" else received) if is_root else (None, received)
    if case.op in ("reduce", "gather") and not is_root:
        return sent, None
    return (in_place if form == "in_place" else sent), received


def _array(tensor: Tensor, case: Case) -> Any:
    return (tensor.view(torch.uint8) if case.dtype in _MOVED_AS_BYTES else tensor).numpy()
