"""Two data-parallel ranks against torch DistributedDataParallel: `python -m phalanx.bench.ddp`.

Same model, data, optimizer, threads and wires, alternated in one run; a barrier before every step stands outside the clock and the
slower rank's time counts. DDP against itself is printed beside it: no ratio closer to 1 than that means anything.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import phalanx as phx
from phalanx.bench.pairs import alternated, ratio
from phalanx.comm.launch import launch_from
from phalanx.comm.world import World
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.train.launch import launch

Batch = dict[str, Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.ddp", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="samples of all ranks together")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args(argv)
    if launch_from(os.environ) is None:
        launch(options.ranks, [sys.executable, "-P", "-m", "phalanx.bench.ddp", *(sys.argv[1:] if argv is None else argv)])
        return
    torch.set_num_threads(1)
    config = LlamaConfig(hidden=options.hidden, inner=3 * options.hidden, layers=options.layers, heads=8, kv_heads=4)
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.seq)
    batch = {key: torch.randint(0, config.vocab, shape, generator=generator) for key in ("tokens", "targets")}
    with phx.init(phx.Mesh(dp=options.ranks)) as world:
        ours, theirs, again = derived_step(config, batch, world), ddp_step(config, batch, world), ddp_step(config, batch, world)
        lines = [
            f"Llama of hidden {options.hidden}, {options.layers} layers, global batch {shape}, float32, AdamW, "
            f"{options.ranks} ranks of one thread over {dist.get_backend()}",
            f"speed relative to DDP: {ratio(measured(ours, theirs, options.pairs))}",
            f"DDP relative to itself (A/A): {ratio(measured(again, theirs, options.pairs))}",
        ]
        if world.rank == 0:
            print("\n".join(lines))


def derived_step(config: LlamaConfig, batch: Batch, world: World) -> Callable[[], object]:
    torch.manual_seed(0)
    step = phx.parallelize(Llama(config), world, loss=loss, example=batch, optimizer=phx.adamw(lr=3e-4, weight_decay=0.1))
    mine = _slice(batch, world)
    return lambda: step(mine, local=True)


def ddp_step(config: LlamaConfig, batch: Batch, world: World) -> Callable[[], object]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Llama(config))
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, fused=True)
    mine = _slice(batch, world)

    def step() -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        total, count = loss(model(mine["tokens"]), mine)
        mean = total / count
        mean.backward()  # type: ignore[no-untyped-call]
        # our step reports the norm as well
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        return mean.item(), norm.item()

    return step


def measured(ours: Callable[[], object], theirs: Callable[[], object], pairs: int) -> list[tuple[float, float]]:
    """Seconds of each pair, of the slower rank; the ranks start every step together."""
    times = torch.tensor(alternated(ours, theirs, pairs, before=dist.barrier), dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return [(float(a), float(b)) for a, b in times]


def _slice(batch: Batch, world: World) -> Batch:
    return {key: value.chunk(world.mesh.size)[world.rank].contiguous() for key, value in batch.items()}


if __name__ == "__main__":
    main()
