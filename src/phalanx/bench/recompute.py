"""What each choice of recomputation saves and costs on this machine: `python -m phalanx.bench.recompute`.

One rank trains a Llama. Per choice: bytes that a block saves for its backward, the peak bytes of live tensors over a step, the flops
made again, and a step's speed relative to saving everything, alternated in one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import phalanx as phx
from phalanx.bench.eager import peak_bytes
from phalanx.bench.pairs import alternated, ratio
from phalanx.derive.program import Graphs
from phalanx.models.llama import Llama, LlamaConfig, loss

MODELS = {
    "llama-tiny": LlamaConfig.preset("tiny"),
    "llama-14m": LlamaConfig(hidden=512, inner=1536, heads=8, kv_heads=4),
    "llama-1b": LlamaConfig.preset("1b"),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.recompute", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="llama-14m")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--choices", nargs="+", default=["none", "selective", "full"], help="or limits per block, as in 8MiB")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    config = replace(MODELS[options.model], layers=options.layers, dropout=options.dropout)
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.seq)
    batch = {key: torch.randint(0, config.vocab, shape, generator=generator) for key in ("tokens", "targets")}
    saving, none = training("none", config, batch)
    print(f"{options.model}, {options.layers} layers, batch {shape}, float32, AdamW, {options.threads} thread(s)")
    print(f"{'recompute':>10} {'saved/block':>12} {'peak of a step':>15} {'made again':>12}  speed relative to none")
    for choice in options.choices:
        step, graphs = training(choice, config, batch)
        peak = peak_bytes(partial(stepping, choice), config, batch)
        again = graphs.flops["B"] - none.flops["B"]
        speed = ratio(alternated(step, saving, options.pairs))
        print(
            f"{choice:>10} {graphs.saved_bytes / 2**20:8.2f} MiB {peak / 2**20:11.1f} MiB {again / none.flops['F']:9.3f} F  {speed}"
        )


def training(choice: str, config: LlamaConfig, batch: dict[str, Tensor]) -> tuple[Callable[[], object], Graphs]:
    """A step with the blocks recomputed so, prologue and epilogue not at all; and the graphs of a block."""
    torch.manual_seed(0)
    recompute: Any = {"layers.*": choice}
    step = phx.parallelize(
        Llama(config), phx.init(phx.Mesh()), loss=loss, example=batch, layout={}, recompute=recompute,
        optimizer=phx.adamw(lr=3e-4, weight_decay=0.1),
    )  # fmt: skip
    graphs = step.program.segments[1].cls.graphs
    assert graphs is not None
    return lambda: step(batch), graphs


def stepping(choice: str, config: LlamaConfig, batch: dict[str, Tensor]) -> Callable[[], object]:
    return training(choice, config, batch)[0]


if __name__ == "__main__":
    main()
