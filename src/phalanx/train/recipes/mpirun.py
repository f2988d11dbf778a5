"""An mpirun line, in a loop that starts the ranks anew when one of them has died. MPI starts them and does nothing else."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from phalanx.train.recipes import PORT, Job, Recipe, at_least, folded, hosts


@dataclass(frozen=True, kw_only=True)
class Mpirun(Recipe):
    """Print a script with an mpirun line that trains with the options behind `-- train`."""

    flavour: Literal["openmpi", "mpich"] = "openmpi"
    """Whose mpirun: Open MPI's (4 or 5), or MPICH's and those derived from it (Intel MPI, MVAPICH)."""
    hosts: tuple[str, ...] = ()
    """The hosts, by names under which they reach one another; ranks meet at the first. Left out: node0 and so on."""
    port: int = PORT
    """On the first host, where they meet."""
    restarts: int = 3
    """Times that all ranks are started anew after one of them has died."""


def script(job: Job, mpirun: Mpirun) -> str:
    """The script; raises ValueError for hosts that do not fit."""
    at_least(0, restarts=mpirun.restarts)
    at_least(1, port=mpirun.port)
    named = hosts(mpirun.hosts, job.nodes)
    write, signal = FLAVOURS[mpirun.flavour]
    words = write(job, mpirun, named)
    return TEMPLATE.format(
        logs=shlex.quote(f"{job.folder}/logs"),
        restarts=mpirun.restarts,
        signal=signal,
        line=folded(words, job.command, indent="        "),
    )


def openmpi(job: Job, mpirun: Mpirun, named: tuple[str, ...]) -> list[str]:
    return [
        *("mpirun", "-np", str(job.ranks)),
        *("--host", ",".join(f"{host}:{job.per_node}" for host in named), "--map-by", f"ppr:{job.per_node}:node"),
        *("--bind-to", "none", "-x", f"MASTER_ADDR={named[0]}", "-x", f"MASTER_PORT={mpirun.port}"),
        *("-x", "OMP_NUM_THREADS", "--output-filename", f"{job.folder}/logs/rank"),
    ]


def mpich(job: Job, mpirun: Mpirun, named: tuple[str, ...]) -> list[str]:
    return [
        *("mpirun", "-n", str(job.ranks), "-ppn", str(job.per_node), "-hosts", ",".join(named)),
        *("-genv", "MASTER_ADDR", named[0], "-genv", "MASTER_PORT", str(mpirun.port)),
        *("-outfile-pattern", f"{job.folder}/logs/rank_%r.txt", "-errfile-pattern", f"{job.folder}/logs/rank_%r.err.txt"),
    ]


FLAVOURS = {"openmpi": (openmpi, "USR1"), "mpich": (mpich, "TERM")}
"""The words before the run's own, and the signal that mpirun passes on to its ranks and lets them end of. For SIGTERM, Open MPI
kills them a second or two later (or, told to be patient, does not pass it on until its patience is over)."""

TEMPLATE = """\
#!/bin/bash
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
mkdir -p {logs}

told=
trap 'told=yes; kill -{signal} "$pid"' TERM INT

for ((start = 0; ; start++)); do
    {line} &
    pid=$!
    wait "$pid"
    code=$?
    # A signal ends the wait before mpirun, which waits for the ranks, has ended.
    while kill -0 "$pid" 2>/dev/null; do
        wait "$pid"
        code=$?
    done
    # 0: done. 2: a mistake in what was asked. 3: numbers that went wrong. 143: told to stop.
    [[ $code == 0 || $code == 2 || $code == 3 || $code == 143 || -n $told || $start -ge {restarts} ]] && break
    echo "start $((start + 1)) ended with exit code $code; the ranks are started again" >&2
done
exit $code
"""
