"""Which ranks share a host: found once, when ranks meet, and the same on all of them.

A host is a place whose ranks reach one another through shared memory. What looks like one machine may be two hosts (containers,
network namespaces); that costs speed, while the other mistake would cost the run. So every doubt counts as another host.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store


def hosts_of(store: Store, rank: int, size: int, *, node: str | None = None, timeout: float = 60.0) -> tuple[int, ...]:
    """The host number of every rank; hosts are numbered in the order of their lowest ranks. Every rank calls this once.

    node     what the launcher says, from `node_from`; ranks of different nodes are never on one host
    timeout  seconds to wait for the other ranks; past them torch raises DistStoreError
    """
    store.set(f"host/{rank}", f"{node}/{machine()}")
    keys = [f"host/{other}" for other in range(size)]
    store.wait(keys, timedelta(seconds=timeout))
    numbers: dict[bytes, int] = {}
    return tuple(numbers.setdefault(store.get(key), len(numbers)) for key in keys)


def node_from(env: Mapping[str, str]) -> str | None:
    """The launcher's number of this machine, where there may be several on one kernel: torchrun numbers its agents.

    Slurm and MPI start a task per slot of a real machine, which `machine` tells apart.
    """
    return env.get("GROUP_RANK")


def machine() -> str:
    """Equal for two processes only if they run on one kernel since one boot, see each other's process ids and have one /dev/shm.

    Without a boot id (not Linux) it is the name of the machine.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return platform.node()
    parts = [boot.read_text().strip()]
    with suppress(OSError):
        parts.append(f"pid:{Path('/proc/self/ns/pid').stat().st_ino}")
    with suppress(OSError):
        parts.append(f"shm:{Path('/dev/shm').stat().st_dev}")
    return " ".join(parts)


def by_host(ranks: Sequence[int], hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, ascending; hosts in the order of their lowest ranks."""
    found: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(hosts[rank], []).append(rank)
    return tuple(tuple(members) for members in found.values())


def ring_crossings(ranks: Sequence[int], hosts: Sequence[int]) -> int:
    """How many steps of a ring in rank order leave the host that most of them leave: 1 if the ranks of a host are neighbours."""
    leaving: dict[int, int] = {}
    for rank, after in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
        if hosts[rank] != hosts[after]:
            leaving[hosts[rank]] = leaving.get(hosts[rank], 0) + 1
    return max(leaving.values(), default=0)
