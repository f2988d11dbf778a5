"""`phalanx doctor`: says what is wrong, and where."""

from __future__ import annotations

from phalanx.cli import choose

CHOICES = {
    "topology": "The links between this machine's devices, and which mesh axis crosses which.",
    "links": "Name the slow rank, host or link out of pairwise and ring measurements.",
    "run": "Read what the ranks of a run recorded, and say who stood where when it stopped.",
}


def main(args: list[str]) -> int:
    return choose("doctor", CHOICES, args)
