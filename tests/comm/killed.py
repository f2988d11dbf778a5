"""A rank that writes its ring and is killed. Started by test_flight.py with JOB set."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def _main(rank: int, folder: str) -> None:
    from phalanx.comm.watch import ring as rings
    from phalanx.comm.watch.collect import host_identity, ring_path
    from phalanx.comm.watch.sites import Sites

    path = ring_path(Path(folder), rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    ring = rings.Ring(path, "job", rank, 2, host_identity())
    sites = Sites(lambda text: ring.text(rings.SITE, text))
    group = ring.text(rings.GROUP, rings.group_text("w", "", [0, 1], "cpu"))
    for seq in range(1, 3 - rank):
        number = ring.record(0, group, seq, rings.DTYPES.index("float32"), 10, 0, -1, 0, sites.here(0), True)
        if seq == 1:
            ring.end(number)
    os.kill(os.getpid(), signal.SIGKILL)


if "JOB" in globals():
    _main(*globals()["JOB"])
