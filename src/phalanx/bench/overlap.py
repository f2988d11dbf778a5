"""What an all_reduce that is issued during computation adds to it: `python -m phalanx.bench.overlap`.

Every rank multiplies matrices on one thread while a sum is under way. Where ranks have a core each, the sum takes processor time from
the multiplications, so what it adds is compared with the processor time that it takes alone. Both backends, and computing alone, are
alternated in one run; a barrier before each stands outside the clock and the slower rank's time counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from phalanx.comm.launch import launch_from
from phalanx.comm.shm import available
from phalanx.train.launch import launch


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.overlap", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=16, help="bytes of the sum, in MiB")
    parser.add_argument("--milliseconds", type=float, default=50.0, help="of computing, about")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args(argv)
    if (reason := available()) is not None:
        parser.error(reason)
    if launch_from(os.environ) is None:
        launch(options.ranks, [sys.executable, "-P", "-m", "phalanx.bench.overlap", *(sys.argv[1:] if argv is None else argv)])
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("shm", "gloo")}
    x = torch.zeros(options.mib << 18)
    compute = computing(options.milliseconds / 1e3)
    ways: dict[str, Callable[[], object]] = {"computing": compute, "computing again": compute}
    for name, group in groups.items():
        ways[f"{name} alone"] = lambda group=group: dist.all_reduce(x, group=group, async_op=True).wait()  # type: ignore[misc]

        def overlapped(group: dist.ProcessGroup = group) -> None:
            work = dist.all_reduce(x, group=group, async_op=True)
            compute()
            work.wait()

        ways[f"{name} while computing"] = overlapped
    seconds, processor = timed(ways, options.rounds)
    if dist.get_rank() == 0:
        print(f"all_reduce of {options.mib} MiB, {options.ranks} ranks of one thread, medians of {options.rounds} rounds")
        for name in ways:
            print(f"{name:<22} {seconds[name] * 1e3:8.2f} ms, {processor[name] * 1e3:8.2f} ms of processor time")
        for name in groups:
            added, own = seconds[f"{name} while computing"] - seconds["computing"], processor[f"{name} alone"]
            print(f"{name} adds {added * 1e3:.2f} ms, {added / own:.2f} of its own processor time")
    dist.destroy_process_group()


def computing(seconds: float) -> Callable[[], None]:
    """Multiplications that take about so long."""
    a = torch.randn(256, 256)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        a @ a
        count += 1
    repeats = torch.tensor([count])
    dist.all_reduce(repeats, dist.ReduceOp.MIN)  # the same work on every rank

    def compute() -> None:
        for _ in range(int(repeats)):
            a @ a

    return compute


def timed(ways: dict[str, Callable[[], object]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of the slower rank's seconds, and of the processor time of all threads of a rank, by way."""
    columns = {name: list(zip(*rows, strict=True)) for name, rows in sampled(ways, rounds).items()}
    return tuple({name: statistics.median(rows[k]) for name, rows in columns.items()} for k in range(2))  # type: ignore[return-value]


def sampled(ways: dict[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, list[tuple[float, float]]]:
    """By way and round, (seconds, processor time of all threads of a rank), of the rank where it is longer."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for at in range(warm_up + rounds):
        for name, way in ways.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            way()
            took = torch.tensor([time.perf_counter() - start, time.process_time() - used], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if at >= warm_up:
                samples[name].append((float(took[0]), float(took[1])))
    return samples


if __name__ == "__main__":
    main()
