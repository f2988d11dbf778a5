"""Timing every link of a world: all ordered pairs, round by round so that pairs do not disturb each other, and then a ring.

Latency is half of a small message's way there and back: without a common clock nothing tells the two ways apart, so both have the
same. Bandwidth is one way: what a large message there and a small one back take longer than two small ones. A round's pairs are
disjoint, and no host is in two pairs that leave it at once. The best time of a link counts, and as long as something looks slow
there are more passes: other work on the machine slows a link for a while, what is wrong with it slows it always.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.comm.transport import Group, Transport
from phalanx.observe.links import Links, Matrix, judge

HOST_BYTES = 64
WARM_UPS = 1
PASSES = (3, 3, 6)
"""After each of these many passes the links are judged, and measured no more once nothing is slow."""
LIGHT = 4
"""Small messages for each large one: they cost little, and their times scatter more."""


def measure_links(
    transport: Transport, device: torch.device, *, size: int = 4 << 20, repeats: int = 5, hosts: Sequence[str] | None = None
) -> Links:
    """The Links of a transport's whole world; every rank calls this and gets the same. `size` is that of the large message, in bytes.

    `hosts` names the host of every rank; asked of the ranks if None. Raises ValueError for one rank, which has no links.
    """
    if transport.world_size < 2:
        raise ValueError("links need at least 2 ranks, there is 1; start more with --ranks, torchrun, srun or mpirun")
    if repeats < 1 or size < 1:
        raise ValueError(f"{repeats} repeats of {size} bytes measure nothing; both are at least 1")
    everybody = transport.group("links", range(transport.world_size), p2p=True)
    names = list(hosts) if hosts is not None else gather_hosts(transport, everybody, device)
    small, large = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (1, size))
    best = torch.full((2, len(names), len(names)), math.inf, dtype=torch.float64)  # (light or heavy, from, to)
    for passes in PASSES:
        for _ in range(passes):
            best = torch.minimum(best, one_pass(transport, everybody, rounds(names), small, large, repeats))
        around = torch.tensor(ring(transport, everybody, large, repeats), dtype=torch.float64, device=device)
        transport.all_reduce(around, everybody, "max").synchronize()
        found = links_of(names, size, best, around.item())
        if not judge(found).findings:
            break
    return found


def links_of(hosts: Sequence[str], size: int, best: Tensor, ring_seconds: float) -> Links:
    light, heavy = torch.minimum(best[0], best[0].T), best[1]
    # The bytes of a small "large message" may be lost in the noise of the rest.
    latency, bytes_seconds = light / 2, torch.maximum(heavy - light, heavy / 10)
    return Links(tuple(hosts), size, matrix_of(latency), matrix_of(bytes_seconds), ring_seconds)


def matrix_of(values: Tensor) -> Matrix:
    return tuple(tuple(row) for row in values.tolist())


def one_pass(
    transport: Transport,
    group: Group,
    schedule: Sequence[Sequence[tuple[int, int]]],
    small: Tensor,
    large: Tensor,
    repeats: int,
) -> Tensor:
    """(2, ranks, ranks) in float64: seconds there and back of small messages, and of large ones there; the same on every rank."""
    mine = torch.zeros(2, group.size, group.size, dtype=torch.float64)
    for pairs in schedule:
        transport.barrier(group).synchronize()
        peer = next((b if a == transport.rank else a for a, b in pairs if transport.rank in (a, b)), None)
        if peer is None:
            continue
        for sender in sorted((transport.rank, peer)):
            light = there_and_back(transport, group, small, small, peer, sender, LIGHT * repeats)
            heavy = there_and_back(transport, group, large, small, peer, sender, repeats)
            if sender == transport.rank:
                mine[:, sender, peer] = torch.tensor([light, heavy], dtype=torch.float64)
    mine = mine.to(large.device)
    transport.all_reduce(mine, group).synchronize()
    return mine.cpu()


def rounds(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Every pair of ranks once, in rounds of disjoint pairs of which no two leave the same host.

    The circle method (Kirkman 1847) gives the rounds; pairs that would share a host's way out are put off into rounds of their own.
    """
    n = len(hosts) + len(hosts) % 2
    found = []
    for turn in range(n - 1):
        circle = [0, *((place + turn) % (n - 1) + 1 for place in range(n - 1))]
        pairs = sorted((min(a, b), max(a, b)) for a, b in zip(circle[: n // 2], circle[: n // 2 - 1 : -1], strict=True))
        waves: list[list[tuple[int, int]]] = [[]]
        leaving: list[set[str]] = [set()]
        for a, b in pairs:
            if b >= len(hosts):
                continue  # the rank that an odd number lacks
            ends = {hosts[a], hosts[b]} if hosts[a] != hosts[b] else set()
            at = next((k for k, busy in enumerate(leaving) if not ends & busy), len(waves))
            if at == len(waves):
                waves.append([])
                leaving.append(set())
            waves[at].append((a, b))
            leaving[at] |= ends
        found += [wave for wave in waves if wave]
    return found


def there_and_back(
    transport: Transport, group: Group, there: Tensor, back: Tensor, peer: int, sender: int, repeats: int
) -> float:
    """Least seconds until `sender`, one of this rank and `peer`, has sent one message and received the other."""
    found = []
    for _ in range(WARM_UPS + repeats):
        start = time.perf_counter()
        if sender == transport.rank:
            transport.send(there, peer, group).synchronize()
            transport.recv(back, peer, group).synchronize()
        else:
            transport.recv(there, peer, group).synchronize()
            transport.send(back, peer, group).synchronize()
        found.append(time.perf_counter() - start)
    return min(found[WARM_UPS:])


def ring(transport: Transport, group: Group, large: Tensor, repeats: int) -> float:
    """Least seconds until this rank has sent a large message to its right and received one from its left, all at once."""
    received = torch.empty_like(large)
    right, left = (transport.rank + 1) % group.size, (transport.rank - 1) % group.size
    found = []
    for _ in range(WARM_UPS + repeats):
        transport.barrier(group).synchronize()
        start = time.perf_counter()
        for handle in [transport.send(large, right, group), transport.recv(received, left, group)]:
            handle.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[WARM_UPS:])


def gather_hosts(transport: Transport, group: Group, device: torch.device) -> list[str]:
    """The host name of every rank."""
    name = socket.gethostname().encode()[:HOST_BYTES].ljust(HOST_BYTES, b"\0")
    mine = torch.tensor(list(name), dtype=torch.uint8, device=device)
    out = torch.empty(HOST_BYTES * group.size, dtype=torch.uint8, device=device)
    transport.all_gather(out, mine, group).synchronize()
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in out.cpu().view(group.size, HOST_BYTES)]
