"""`phalanx bench`: measurements that a person can repeat on any machine."""

from __future__ import annotations

from phalanx.cli import choose

CHOICES = {
    "collectives": "Time collectives as nccl-tests does, on one or several backends, and check what they computed.",
    "hardware": "Measure this machine from registers to network, fit latency and bandwidth, and write its profile.",
    "peers": "PyTorch's own parallelism against Phalanx doing the same job, alternated in one run.",
}


def main(args: list[str]) -> int:
    return choose("bench", CHOICES, args)
