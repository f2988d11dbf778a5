"""A torchrun line for each host: they meet at the first one, and start all ranks anew when one of them has died."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from phalanx.train.recipes import PORT, Job, Recipe, at_least, folded, hosts

FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Without it the first host's agent keeps one store for all starts, and ranks that are started again may read in it where ranks
that have ended were listening (seen with torch 2.13 on two hosts: connection refused, 30 s later the run ends)."""


@dataclass(frozen=True, kw_only=True)
class Torchrun(Recipe):
    """Print a torchrun line for each host that trains with the options behind `-- train`."""

    hosts: tuple[str, ...] = ()
    """The hosts, by names or addresses under which they reach one another; ranks meet at the first. Left out: node0 and so on."""
    port: int = PORT
    """On the first host, where they meet."""
    max_restarts: int = 3
    """Times that all ranks are started anew after one of them has died."""
    seconds: int = 120
    """What ranks that are told to stop have to write a checkpoint (torch 2.12 or later; before it 30 are fixed)."""


def script(job: Job, torchrun: Torchrun) -> str:
    """The lines, each behind a comment that says where it goes; raises ValueError for hosts that do not fit."""
    at_least(0, max_restarts=torchrun.max_restarts)
    at_least(1, seconds=torchrun.seconds, port=torchrun.port)
    named = hosts(torchrun.hosts, job.nodes)
    return "\n".join(f"# on {host}\n{line(job, torchrun, named, at)}\n" for at, host in enumerate(named))


def line(job: Job, torchrun: Torchrun, named: tuple[str, ...], at: int) -> str:
    """The command of one host. Who is the meeting place and under which address a host is reached is said, not guessed."""
    words = [
        *(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={torchrun.seconds}", f"{FRESH_STORE}=1", "torchrun"),
        *(f"--nnodes={job.nodes}", f"--nproc-per-node={job.per_node}", f"--max-restarts={torchrun.max_restarts}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={named[0]}:{torchrun.port}", f"--rdzv-id={job.name}"),
        *(f"--rdzv-conf=is_host={int(at == 0)}", f"--local-addr={named[at]}"),
        *("--tee=3", "--no-python"),
    ]
    logs = shlex.quote(f"{job.folder}/logs")
    # Not to torchrun's own --log-dir: where ranks are started again for another host's sake, it deletes what they wrote before.
    return f"mkdir -p {logs}\n{folded(words, job.command)} \\\n    >> {logs}/{named[at]}.txt 2>&1"
