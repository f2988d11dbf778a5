"""What a watch costs: `python -m phalanx.bench.watched`.

A data-parallel step over Gloo, watched against unwatched, alternated in one run of the same ranks; an unwatched step against another
one is printed beside it, and no ratio closer to 1 than that means anything. Then, on one rank, what the watch adds to a call: CPU
time of the calling thread around a backend that does nothing, the best of several rounds, since other processes only ever add.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, FileStore

import phalanx as phx
from phalanx.bench.ddp import derived_step, measured
from phalanx.bench.pairs import ratio
from phalanx.comm.launch import launch_from
from phalanx.comm.watch.monitor import Options
from phalanx.comm.watch.register import registry
from phalanx.models.llama import LlamaConfig
from phalanx.train.launch import launch


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.watched", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="samples of all ranks together")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--calls", type=int, default=2000, help="calls in a round of the second part")
    options = parser.parse_args(argv)
    if launch_from(os.environ) is None:
        launch(options.ranks, [sys.executable, "-P", "-m", "phalanx.bench.watched", *(sys.argv[1:] if argv is None else argv)])
        print("\n".join(f"{what}: {cost:.2f} µs a call" for what, cost in call_costs(options.calls).items()))
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        for line in steps(options):
            if dist.get_rank() == 0:
                print(line, flush=True)
    finally:
        dist.destroy_process_group()


def steps(options: argparse.Namespace) -> list[str]:
    """The two ratios, in words; every rank calls this."""
    config = LlamaConfig(hidden=options.hidden, inner=3 * options.hidden, layers=options.layers, heads=8, kv_heads=4)
    generator, shape = torch.Generator().manual_seed(0), (options.batch, options.seq)
    batch = {key: torch.randint(0, config.vocab, shape, generator=generator) for key in ("tokens", "targets")}
    mesh = phx.Mesh(dp=options.ranks)
    with (
        tempfile.TemporaryDirectory() as folder,
        phx.init(mesh) as world,
        phx.init(mesh) as again,
        phx.init(mesh, watch=folder) as watched,
    ):
        plain, same, ours = (derived_step(config, batch, each) for each in (world, again, watched))
        return [
            f"Llama of hidden {options.hidden}, {options.layers} layers, global batch {shape}, {options.ranks} ranks over Gloo",
            f"speed of a watched step relative to an unwatched one: {ratio(measured(ours, plain, options.pairs))}",
            f"unwatched relative to unwatched (A/A): {ratio(measured(same, plain, options.pairs))}",
        ]


class Nothing:
    """The handle of a backend that does nothing."""

    def wait(self, *timeout: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def call_costs(calls: int, rounds: int = 9) -> dict[str, float]:
    """Microseconds that the watch adds to an all_reduce that the caller blocks in, and to one that it waits for later."""
    x, done = torch.ones(4), Nothing()
    inline, later = AllreduceOptions(), AllreduceOptions()
    inline.asyncOp = False
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(str(Path(folder, "store")), 1)
        registry.begin(store, 0, 1, Options(run_dir=Path(folder)))
        dist.init_process_group("watched:gloo", store=store, rank=0, world_size=1)
        try:
            group = dist.distributed_c10d._get_default_group()
            group._inner_allreduce = lambda tensors, opts: done  # type: ignore[attr-defined]
            bare = best(lambda: done.wait(), calls, rounds)
            return {
                "all_reduce": best(lambda: group.allreduce([x], inline), calls, rounds) - bare,
                "all_reduce, asynchronous": best(lambda: group.allreduce([x], later).wait(), calls, rounds) - bare,
            }
        finally:
            dist.destroy_process_group()


def best(call: Callable[[], object], calls: int, rounds: int) -> float:
    """Microseconds of this thread's CPU time per call, in the fastest round."""
    found = []
    for _ in range(rounds):
        start = time.thread_time_ns()
        for _ in range(calls):
            call()
        found.append((time.thread_time_ns() - start) / calls / 1e3)
    return min(found)


if __name__ == "__main__":
    main()
