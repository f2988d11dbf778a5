"""Who started this process, and as which rank: the environment of torchrun, srun and mpirun, read as data.

Nothing here touches os.environ: `init` hands it over, as do the commands that must know whether ranks are there already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.mesh import Mesh


@dataclass(frozen=True)
class Launch:
    """This process among those that were started together.

    rendezvous  how they find each other, as torch.distributed's init_method
    restarts    how often an elastic launcher has started them again
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    rendezvous: str = "env://"
    restarts: int = 0


def launch_from(env: Mapping[str, str]) -> Launch | None:
    """What the launcher said, or None if there was none. torchrun inside srun or mpirun counts as torchrun."""
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        _require(env, "torchrun", "MASTER_ADDR", "MASTER_PORT")
        restarts = _number(env, "TORCHELASTIC_RESTART_COUNT", 0)
        return Launch("torchrun", rank, size, _number(env, "LOCAL_RANK", 0), "env://", restarts)
    # A batch script outside any step also sees SLURM_PROCID and SLURM_NTASKS, but is one process: only steps count.
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        _require(env, "srun", "SLURM_STEP_NODELIST")
        address = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
        port = _number(env, "MASTER_PORT", _port(env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")))
        return Launch(
            "srun",
            _number(env, "SLURM_PROCID"),
            _number(env, "SLURM_STEP_NUM_TASKS"),
            _number(env, "SLURM_LOCALID", 0),
            f"tcp://{address}:{port}",
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        size = _number(env, "OMPI_COMM_WORLD_SIZE")
        one_host = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size)
        return Launch(
            "mpirun (Open MPI)",
            _number(env, "OMPI_COMM_WORLD_RANK"),
            size,
            _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
            _mpi_rendezvous(env, one_host, env.get("PMIX_NAMESPACE", "")),
        )
    if "PMI_RANK" in env and "PMI_SIZE" in env:
        size = _number(env, "PMI_SIZE")
        one_host = env.get("MPI_LOCALNRANKS") == str(size)
        return Launch(
            "mpirun (PMI)",
            _number(env, "PMI_RANK"),
            size,
            _number(env, "MPI_LOCALRANKID", 0),
            _mpi_rendezvous(env, one_host, env.get("PMI_ID", "") and env.get("PMI_JOBID", "")),
        )
    return None


def check_mesh(mesh: Mesh, launch: Launch | None) -> None:
    """Raise ValueError, with both numbers and the nearest meshes that fit, if the mesh is not as big as the launch."""
    if launch is None:
        if mesh.size > 1:
            raise ValueError(
                f"mesh {mesh} has {mesh.size} ranks, but this is 1 process and no launcher started it: use "
                f"torchrun --nproc-per-node {mesh.size}, srun or mpirun, or phx.local(mesh) for threads of one process"
            )
        return
    if mesh.size != launch.size:
        fitting = ", or ".join(str(fit) for fit in nearest_meshes(mesh, launch.size))
        raise ValueError(
            f"mesh {mesh} has {mesh.size} ranks, but {launch.launcher} started {launch.size}; nearest that fit: {fitting}"
        )


def nearest_meshes(mesh: Mesh, size: int) -> list[Mesh]:
    """Meshes of `size` ranks that change one axis of this one; the one axis that is left if that is impossible."""
    fits = []
    for axis, _ in mesh.axes:
        rest = math.prod(extent for name, extent in mesh.axes if name != axis)
        if size % rest == 0:
            fits.append(Mesh(**{**mesh.shape, axis: size // rest}))
    if fits:
        return fits
    first = mesh.names[0] if mesh.names else "dp"
    return [Mesh(**{**dict.fromkeys(mesh.names, 1), first: size})]


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `gpu[07-09,12],login1` gives `gpu07`."""
    prefix, bracket, rest = nodelist.partition("[")
    if not bracket or "," in prefix:
        return nodelist.split(",")[0]
    inside, _, tail = rest.partition("]")
    number = inside.split(",")[0].split("-")[0]
    return prefix + number + tail.split(",")[0]


def _mpi_rendezvous(env: Mapping[str, str], one_host: bool, job: str) -> str:
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if one_host else None)
    if address is None:
        raise ValueError(
            "mpirun over several hosts does not say where rank 0 is: pass MASTER_ADDR to all ranks, as in -x MASTER_ADDR"
        )
    return f"tcp://{address}:{_number(env, 'MASTER_PORT', _port(job))}"


def _port(*job: str) -> int:
    """A port that all ranks of one job agree on and other jobs of the same host are unlikely to choose."""
    number = 0
    for character in "/".join(job):
        number = (number * 31 + ord(character)) % 20000
    return 20000 + number


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ValueError(f"the launcher set {name}={text!r}; expected a whole number")
    return int(text)


def _require(env: Mapping[str, str], launcher: str, *names: str) -> None:
    missing = [name for name in names if name not in env]
    if missing:
        raise ValueError(f"{launcher} set some of its variables but not {', '.join(missing)}")
