"""`python -m phalanx.bench.checkpoint`: how long a save keeps training, and how much a rank reads to go on from one.

Real ranks on this machine train a Llama whose state (float32 weights and two moments) has about --gigabytes. The pause of a save that
goes on in the background is what `save` and the update after it wait for; it is compared with a save that is waited for.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from phalanx.comm.world import World, init
from phalanx.mesh import Mesh
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.rules import table_for
from phalanx.run.initialize import deferred_init
from phalanx.run.optimizer import adamw
from phalanx.run.pieces import state_of
from phalanx.run.step import Step, parallelize
from phalanx.train.checkpoint import Checkpoints, Saved, load
from phalanx.train.checkpoint.load import check_fits
from phalanx.train.launch import launch

LAYOUT = {"batch": "dp", "heads": "tp", "mlp": "tp", "vocab": "tp"}
LOADED = ("tp=2", "dp=2", "tp=4", "dp=2,tp=2", "pp=2,tp=2")
"""Meshes of which every rank's part is read; of those with as many ranks as run, by the ranks themselves."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.checkpoint", description=__doc__)
    parser.add_argument("--mesh", default="tp=2", help="under which the state is saved")
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the whole state")
    parser.add_argument("--saves", type=int, default=8, help="of each kind, alternated")
    parser.add_argument("--folder", help="where to write; a temporary folder if left out")
    parser.add_argument("--joined", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    mesh = Mesh.parse(args.mesh)
    if args.joined or mesh.size == 1:
        world = init(mesh)
        try:
            measure(world, args)
        finally:
            world.close()
        return
    folder = args.folder or tempfile.mkdtemp(prefix="phalanx_bench_")
    try:
        command = [sys.executable, "-P", "-u", "-m", "phalanx.bench.checkpoint", *sys.argv[1:], "--folder", folder, "--joined"]
        launch(mesh.size, command)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)


def model_config(gigabytes: float) -> LlamaConfig:
    """A Llama whose float32 weights and two moments have about so many bytes."""
    layers = max(1, round((gigabytes * 1e9 / 12 - 2 * 2048 * 1024) / (4 * 1024**2 + 3 * 1024 * 2816)))
    return LlamaConfig(vocab=2048, hidden=1024, inner=2816, layers=layers, heads=16, kv_heads=16)


def batch_of(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2048, (rows, 65), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def built(world: World, config: LlamaConfig, zero: int = 0) -> Step:
    model = deferred_init(lambda: Llama(config))
    example = batch_of(4, 0)
    layout = {name: axis for name, axis in LAYOUT.items() if axis in world.mesh.names}
    return parallelize(
        model, world, names=table_for(model, example), layout=layout, loss=loss, example=example, optimizer=adamw(lr=1e-4), zero=zero,
        microbatches=2 if "pp" in world.mesh.names else 1,
    )  # fmt: skip


def measure(world: World, args: argparse.Namespace) -> None:
    config = model_config(args.gigabytes)
    step = built(world, config, args.zero)
    folder = Path(args.folder or tempfile.mkdtemp(prefix="phalanx_bench_"))
    checkpoints = Checkpoints(step, str(folder / "checkpoints"), keep=2)
    number = 0

    def train(count: int) -> list[float]:
        nonlocal number
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            step(batch_of(4, number))
            number += 1
            seconds.append(time.perf_counter() - began)
        return seconds

    train(3)
    blocking, pauses, quiet, busy = [], [], [], []
    for at in range(args.saves + 1):
        quiet += train(2)
        began = time.perf_counter()
        checkpoints.save(number, {})
        checkpoints.wait()
        waited = time.perf_counter() - began
        before = checkpoints.paused_seconds
        checkpoints.save(number, {})
        during = train(3)
        pause = checkpoints.paused_seconds - before
        checkpoints.wait()
        if at:  # the first takes the memory for the copies
            blocking.append(waited)
            pauses.append(pause)
            busy += during
    here = step.executors[0]
    state = sum(
        piece.value.numel() * piece.value.element_size()
        for piece in state_of(here.parameters, here.optimizer, step.names).reads
    )
    if world.rank == 0:
        share = [pause / waited for pause, waited in zip(pauses, blocking, strict=True)]
        print(f"mesh {args.mesh} zero {args.zero}; rank 0 holds {state / 1e6:,.0f} MB")
        print(f"blocking save {statistics.median(blocking):.2f} s ({min(blocking):.2f} to {max(blocking):.2f})")
        low, high = min(pauses) * 1e3, max(pauses) * 1e3
        print(f"pause of a background save {statistics.median(pauses) * 1e3:.1f} ms ({low:.1f} to {high:.1f})")
        print(f"pause / blocking {statistics.median(share):.4f} ({min(share):.4f} to {max(share):.4f}, {len(share)} pairs)")
        print(f"step {statistics.median(quiet) * 1e3:.0f} ms; while one is written {statistics.median(busy) * 1e3:.0f} ms")
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    began = time.perf_counter()
    saved = load(step, str(newest))
    seconds = time.perf_counter() - began
    if world.rank == 0:
        print(
            f"load on the same mesh: {saved.bytes_read / state:.3f} of its bytes, {saved.bytes_read / seconds / 1e6:,.0f} MB/s and rank"
        )
    if world.rank == 0:
        reading(str(newest), config)


def reading(address: str, config: LlamaConfig) -> None:
    """What ranks of other meshes read of their part."""
    from phalanx.comm.local import local

    for mesh in LOADED:
        for zero in (0, 3) if "dp" in mesh else (0,):
            shares = []
            step = built(local(Mesh.parse(mesh)), config, zero)  # type: ignore[arg-type]
            check_fits(step, Saved(address), optimizer=False, cast=False)
            for executor in step.executors:
                saved = Saved(address)
                executor.optimizer.resume({"step": 1})
                pieces = state_of(executor.parameters, executor.optimizer, step.names).reads
                saved.fill(pieces)
                shares.append(saved.bytes_read / sum(p.value.numel() * p.value.element_size() for p in pieces))
                saved.close()
            print(f"load on {mesh} zero {zero}: {max(shares):.3f} of its bytes at most")
            step.world.close()


if __name__ == "__main__":
    main()
