"""A batch script for Slurm (22.05 or later): one task per rank, a checkpoint before the time is up, and the job in the queue again."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from phalanx.train.recipes import Job, Recipe, at_least, folded


@dataclass(frozen=True, kw_only=True)
class Slurm(Recipe):
    """Print a batch script for `sbatch` that trains with the options behind `-- train`."""

    time: str = "24:00:00"
    """Limit of one allocation, as sbatch takes it: minutes, hours:minutes:seconds, or days-hours. The run takes as many as it needs."""
    seconds: int = 180
    """Seconds before the limit at which the ranks are told to stop: to write a checkpoint and end. Slurm may be a minute early."""
    restarts: int = 3
    """Times that the ranks are started anew in one allocation after one of them has died."""
    partition: str | None = None
    """Where the job is queued. Left out: the cluster's default."""
    account: str | None = None
    """Who pays. Left out: your default."""
    cpus: int | None = None
    """Cores of each rank. Left out: the cluster's default, often one."""
    setup: tuple[str, ...] = ()
    """Shell lines to run first, as in --setup "module load cuda" "source .venv/bin/activate"."""
    options: tuple[str, ...] = ()
    """More of sbatch's own options, each without its hyphens, as in --options constraint=h100 exclusive."""


def script(job: Job, slurm: Slurm) -> str:
    """The script; raises ValueError for what Slurm would not take."""
    at_least(1, seconds=slurm.seconds)
    at_least(0, restarts=slurm.restarts)
    if not re.fullmatch(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d(:\d\d)?)?", slurm.time):
        raise ValueError(f"time is {slurm.time!r}; it is minutes, hours:minutes:seconds or days-hours, as in 24:00:00 or 2-12")
    if re.search(r"[%\\\s]", job.folder):
        raise ValueError(
            f"out is {job.folder!r}: Slurm reads percent signs, backslashes and spaces in names of files as its own"
        )
    for option in slurm.options:
        if not re.fullmatch(r"[a-z][-a-z]*(=\S+)?", option):
            raise ValueError(f"options has {option!r}; each is a name of sbatch's, with its value, as in constraint=h100")
    directives = {
        "job-name": job.name,
        "partition": slurm.partition,
        "account": slurm.account,
        "nodes": job.nodes,
        "ntasks-per-node": job.per_node,
        "gpus-per-node": job.per_node if job.gpus else None,
        "cpus-per-task": slurm.cpus,
        "time": slurm.time,
        "signal": f"TERM@{slurm.seconds}",
        "output": f"{job.name}-%j.txt",
        "open-mode": "append",
    }
    for name in ("partition", "account"):
        if not re.fullmatch(r"[-\w.,]+", directives[name] or "none"):  # type: ignore[arg-type]
            raise ValueError(f"{name} is {directives[name]!r}; it is a name without spaces")
    lines = [f"--{name}={value}" for name, value in directives.items() if value is not None]
    lines += ["--requeue", *(f"--{option}" for option in slurm.options)]
    logs = f"{job.folder}/logs"
    # Each rank to the end of its own file. A rank that is gone takes the others along after two minutes: they have seen it long
    # before, but those that write a checkpoint may take longer than one another.
    srun = ("srun", "--kill-on-bad-exit=0", "--wait=120", "--open-mode=append", f"--output={logs}/rank_%t.txt")
    return TEMPLATE.format(
        directives="\n".join(f"#SBATCH {line}" for line in lines),
        setup="".join(f"{line}\n" for line in slurm.setup),
        cores="export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n" if slurm.cpus else "",
        logs=shlex.quote(logs),
        restarts=slurm.restarts,
        srun=folded(srun, job.command, indent="        "),
    )


TEMPLATE = """\
#!/bin/bash
{directives}

{setup}{cores}export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}
mkdir -p {logs}

# Only scancel and preemption signal this shell as well: Slurm then knows by itself what becomes of the job.
ended=
trap 'ended=yes' TERM

for ((start = 0; ; start++)); do
    began=$SECONDS
    {srun}
    code=$?
    # 0: done. 2: a mistake in what was asked. 3: numbers that went wrong. 143: told to stop, checkpoint written.
    [[ $code == 0 || $code == 2 || $code == 3 || $code == 143 || -n $ended || $start -ge {restarts} ]] && break
    echo "start $((start + 1)) ended with exit code $code after $((SECONDS - began)) s; the ranks are started again" >&2
done

if [[ $code == 143 && -z $ended ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""
