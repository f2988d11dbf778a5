"""Collectives over two hosts, plain Gloo against two levels: `python -m phalanx.bench.hierarchy`.

Without a launcher it makes two hosts out of network namespaces with a limited link (needs root) and runs itself there; under
torchrun on real hosts it measures those. All ways alternate in one run; a barrier before every call stands outside the clock and
the slowest rank's time counts. The limit is the time of the bytes that must cross, each way at once, at the rate that two plain
sockets reach: S for an all_reduce over two even hosts, S/2 for a reduce_scatter or all_gather.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from phalanx.bench.bed import two_hosts
from phalanx.comm.c10d import C10dTransport
from phalanx.comm.hierarchy import HierarchicalTransport
from phalanx.comm.hosts import by_host, hosts_of, node_from, ring_crossings
from phalanx.comm.launch import launch_from
from phalanx.comm.transport import Group, Handle, Transport
from phalanx.comm.wires import Collective, Scheme, Wires, choose

OPS: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.hierarchy", description=__doc__)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--mib", default="64", help="sizes of the whole buffer, separated by commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunk-mib", type=float, default=Wires().chunk_bytes / 2**20)
    parser.add_argument("--rate", default="1gbit", help="of the link between the two namespaces")
    parser.add_argument("--inside", default="shm", choices=("shm", "gloo"), help="what carries the bytes inside a host")
    parser.add_argument("--per-host", default="2,2", help="ranks on each of the two")
    options = parser.parse_args(argv)
    given = list(sys.argv[1:] if argv is None else argv)
    if launch_from(os.environ) is None:
        first, second = (int(ranks) for ranks in options.per_host.split(","))
        with two_hosts(options.rate) as bed:
            ends = bed.torchrun(["-P", "-m", "phalanx.bench.hierarchy", *given], per_host=(first, second), seconds=600.0)
        for end in ends:
            print(end.out, end="")
        if any(end.code for end in ends):
            raise SystemExit("\n".join(end.err for end in ends))
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore("bench", _get_default_store())
    hosts = hosts_of(store, rank, size, node=node_from(os.environ))
    between = C10dTransport(torch.device("cpu"), backend="gloo", owns_default=True)
    inside = C10dTransport(torch.device("cpu"), backend=options.inside)
    wires = Wires(chunk_bytes=int(options.chunk_mib * 2**20))
    split = by_host(range(size), hosts)
    sizes = tuple(map(len, split))
    schemes: tuple[Scheme, ...] = ("leader", "columns") if len(set(sizes)) == 1 else ("leader",)
    forced = {scheme: HierarchicalTransport(inside, between, hosts, wires=wires, scheme=scheme) for scheme in schemes}
    ways: dict[str, tuple[Transport, Group]] = {"Gloo": (between, between.group("flat", range(size)))}
    ways |= {scheme: (transport, transport.group(scheme, range(size))) for scheme, transport in forced.items()}
    rate = link_rate(store, rank, split[0][0], split[1][0])
    if rank == 0:
        print(
            f"{size} ranks, by host {split}, link {rate / 1e6:.1f} MB/s each way at once, chunks of {options.chunk_mib:g} MiB"
        )
    for op in options.ops.split(","):
        for mib in map(float, options.mib.split(",")):
            count = int(mib * 2**20) // 4 // size * size
            calls = {name: call(op, transport, group, count) for name, (transport, group) in ways.items()}
            times = alternated(calls, options.rounds)
            chosen = choose(4 * count, sizes, wires, op=op, crossings=ring_crossings(range(size), hosts))
            crossing = 4 * count * (2 if op == "all_reduce" else 1) * (len(sizes) - 1) / len(sizes)
            if op != "all_reduce":
                crossing = 4 * count * max((len(sizes) - 1) * local for local in sizes) / size
            if rank == 0:
                print(f"{op} of {mib:g} MiB: at least {crossing / rate * 1e3:.1f} ms; chosen: {chosen}")
                print("\n".join(lines(times, crossing / rate)))
    for transport in forced.values():
        transport.close()


def lines(times: dict[str, list[float]], limit: float) -> list[str]:
    plain = times["Gloo"]
    return [
        f"  {name:8} median {statistics.median(mine) * 1e3:8.1f} ms ({min(mine) * 1e3:.1f} to {max(mine) * 1e3:.1f}), "
        f"{statistics.median(a / b for a, b in zip(plain, mine, strict=True)):5.2f}x Gloo, "
        f"{statistics.median(mine) / limit:5.2f}x the limit"
        for name, mine in times.items()
    ]


def call(op: str, transport: Transport, group: Group, count: int) -> Callable[[], Handle]:
    """The collective on float32 zeros, which stay what they are however often they are added."""
    whole = torch.zeros(count)
    if op == "all_reduce":
        return lambda: transport.all_reduce(whole, group)
    piece = torch.zeros(count // group.size)
    if op == "reduce_scatter":
        return lambda: transport.reduce_scatter(piece, whole, group)
    return lambda: transport.all_gather(whole, piece, group)


def alternated(calls: dict[str, Callable[[], Handle]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of the slowest rank; each round makes every call once, beginning with another one each time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for at in range(warm_up + rounds):
        for name in names[at % len(names) :] + names[: at % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            calls[name]().wait()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if at >= warm_up:
                times[name].append(seconds.item())
    return times


def link_rate(store: Store, rank: int, one: int, two: int, bytes: int = 64 << 20) -> float:
    """Bytes per second in each direction, both at once, of one TCP connection from rank `one`, which listens, to `two`."""
    rate = 0.0
    if rank == one:
        with socket.create_server((os.environ["MASTER_ADDR"], 0)) as server:
            store.set("port", str(server.getsockname()[1]))
            with server.accept()[0] as end:
                rate = swap_rate(end, bytes)
    elif rank == two:
        port = int(store.get("port"))
        with socket.create_connection((os.environ["MASTER_ADDR"], port)) as end:
            rate = swap_rate(end, bytes)
    rates = torch.tensor(rate, dtype=torch.float64)
    dist.all_reduce(rates, dist.ReduceOp.MAX)
    return float(rates)


def swap_rate(end: socket.socket, bytes: int) -> float:
    """What comes in per second while as much goes out."""
    sender = Thread(target=end.sendall, args=(b"\0" * bytes,))
    sender.start()
    buffer = bytearray(1 << 20)
    got = end.recv_into(buffer)
    start, first = time.perf_counter(), got
    while got < bytes:
        got += end.recv_into(buffer)
    seconds = time.perf_counter() - start
    sender.join()
    return (got - first) / seconds


if __name__ == "__main__":
    main()
