"""From a measured hardware profile to the wires that collectives across hosts are chosen by.

A message inside a host is timed over shared memory, one between hosts over Gloo. Where several axes were measured over the same
backend, the last is taken for the inside and the first for the outside: a mesh's last axes have the fast links.
"""

from __future__ import annotations

import math
from pathlib import Path

from phalanx.comm.wires import Wire, Wires
from phalanx.hardware import Fit, Profile

MESSAGES = ("sendrecv", "send")
"""Operations that are a message of a link; both directions at once, as in a ring, if that was measured."""


def measured_wires(path: Path) -> Wires:
    """The wires of the profile in that file.

    Raises FileNotFoundError, or ValueError if it is no profile or lacks the links of one of the two kinds.
    """
    profile = Profile.load(path)
    inside, between = _links(profile, "shm"), _links(profile, "gloo")
    if missing := [
        f"{what} ({name})"
        for what, name, fits in (("inside a host", "shm", inside), ("between hosts", "gloo", between))
        if not fits
    ]:
        found = ", ".join(sorted({f"{fit.op} along {fit.axis} over {fit.backend}" for fit in profile.links})) or "no links"
        raise ValueError(
            f"{path} has no messages {' nor '.join(missing)}: it has {found}. Measure ranks of several hosts, with --ops sendrecv "
            "among the operations"
        )
    chunk = Wires().chunk_bytes
    # All groups of an axis were measured at once and shared the card of their host; a Wire is what they have together.
    sharing = max(profile.at_once // between[0].ranks, 1)
    return Wires(inside=_wire(inside[-1], chunk, 1), between=_wire(between[0], chunk, sharing))


def _links(profile: Profile, backend: str) -> list[Fit]:
    """Messages over the backend along single axes, in the order of the mesh; of one kind, the better one that there is."""
    for op in MESSAGES:
        if fits := [fit for fit in profile.links if (fit.op, fit.backend) == (op, backend) and "+" not in fit.axis]:
            return fits
    return []


def _wire(fit: Fit, chunk_bytes: int, sharing: int) -> Wire:
    """The latency of small messages, and the rate of those of a chunk's size."""
    per_byte = fit.line(chunk_bytes).seconds_per_byte
    return Wire(fit.below.latency_seconds, sharing / per_byte if per_byte else math.inf)
