"""What a collective over several hosts costs, flat or in two levels, and which is cheapest: a model of latency and rate.

Every host has one network card that its ranks share. Then both two-level schemes put the same bytes on it, 2(M-1)/M of an
all_reduce over M hosts: a stream per local rank is not L times as fast as one leader. It spreads the sums over the ranks and moves
less inside. What two levels save against a flat ring is (N-1)/N down to (M-1)/M, each time the ring leaves the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Scheme = Literal["flat", "leader", "columns"]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]


UNCHUNKED = 1.25
"""How much longer one large Gloo exchange takes than its bytes: it uses one direction of the wire after the other, so 1.1 to 1.7
times as long (python -m phalanx.bench.hierarchy). In chunks, two of which are in flight, both directions are busy; rings are too."""


@dataclass(frozen=True)
class Wire:
    """The time of one message of n bytes is latency_seconds + n / bytes_per_second."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, messages: float, bytes: float) -> float:
        return messages * self.latency_seconds + bytes / self.bytes_per_second


@dataclass(frozen=True)
class Wires:
    """What `choose` knows about the machine.

    inside            between two ranks of a host
    between           between two hosts, in one direction, for all ranks of a host together
    handover_seconds  what a call in two levels costs beside its messages: its thread, and the waits between stages
    chunk_bytes       of the whole buffer, per step of the pipeline

    The defaults are those of Gloo on 1 Gbit/s and shared memory, four ranks on two busy cores (python -m phalanx.bench.hierarchy).
    """

    inside: Wire = Wire(1e-4, 2e9)
    between: Wire = Wire(6e-4, 1.2e8)
    handover_seconds: float = 2e-3
    chunk_bytes: int = 2 << 20


def choose(
    bytes: int,
    local_sizes: Sequence[int],
    wires: Wires | None = None,
    *,
    op: Collective = "all_reduce",
    crossings: int = 1,
) -> Scheme:
    """The cheapest scheme for a buffer of `bytes` (the whole one) over hosts with `local_sizes` ranks of the group each.

    `crossings` is `ring_crossings` of the group. Columns need equally many ranks on every host. All ranks must ask with the same
    numbers, or they would do different things.
    """
    if len(local_sizes) < 2:
        return "flat"
    schemes: tuple[Scheme, ...] = ("flat", "columns", "leader")
    if len(set(local_sizes)) > 1:
        schemes = ("flat", "leader")
    return min(schemes, key=lambda scheme: seconds(scheme, bytes, local_sizes, wires or Wires(), op=op, crossings=crossings))


def seconds(
    scheme: Scheme,
    bytes: int,
    local_sizes: Sequence[int],
    wires: Wires,
    *,
    op: Collective = "all_reduce",
    crossings: int = 1,
) -> float:
    """Predicted duration. N ranks on M hosts, L on the fullest, S bytes; a ring all_reduce is two passes, the others one.

    flat     rings of N-1 steps a pass, each as slow as its slowest, which puts crossings * S/N on a host's card. A reduce_scatter
             on Gloo is an exchange of slices (C10dTransport): every rank's slices for other hosts cross, all at once
    leader   the bytes that must cross; inside, all of S to the leader and back
    columns  the bytes that must cross; inside, (L-1)/L of S each way

    In two levels, inside and between run at the same time, chunk by chunk: the slower counts, and one chunk of the other.
    """
    n, m, most = sum(local_sizes), len(local_sizes), max(local_sizes)
    passes = 2 if op == "all_reduce" else 1
    if scheme == "flat":
        ring = crossings * (n - 1) / n * bytes
        exchange = max(local * (n - local) for local in local_sizes) / n * bytes
        steps, volume = {
            "all_reduce": (2 * (n - 1), 2 * ring),
            "reduce_scatter": (2, UNCHUNKED * exchange),
            "all_gather": (n - 1, UNCHUNKED * ring),
        }[op]
        return wires.between.seconds(steps, volume)
    chunks = max(1, math.ceil(bytes / wires.chunk_bytes))
    crossing = passes * bytes * (m - 1) / m
    if op != "all_reduce":  # uneven hosts have uneven slices
        crossing = max((m - 1) * local for local in local_sizes) / n * bytes
    staged = 2.0 if op == "all_reduce" else 1 + 1 / m  # times S, to and from the leader
    if scheme == "columns":
        staged = passes * (most - 1) / most
    between = wires.between.seconds(chunks * passes * (m - 1), crossing)
    inside = wires.inside.seconds(chunks * 2 * (most - 1), staged * bytes)
    return wires.handover_seconds + max(between, inside) + min(between, inside) / chunks
