"""`phalanx bench peers`: PyTorch's own parallelism, peer by peer, against Phalanx doing the same job, in one run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from phalanx.cli.options import Switch

Words = tyro.conf.UseAppendAction[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train the same model under each of PyTorch's own ways and under Phalanx, alternated step by step in one run.

    Peers are ddp, zero1, fsdp2, tp, tp+sp, gpipe, 1f1b, interleaved and zb-v over Gloo; Phalanx runs over Gloo and over shared memory.
    """

    peer: Words = ()
    """A peer; all without. May be given several times."""
    shape: Words = ()
    """compute-bound or communication-bound; both without. May be given several times."""
    transport: Words = ()
    """Of Phalanx's side: gloo or shm; both without, with --quick shm alone."""
    ranks: int = 2
    """Local processes to start, of one thread each."""
    pairs: int | None = None
    """Timed steps of every way of training: 40, with --quick 5, with --device cuda 10."""
    quick: Switch = False
    """A small model and few pairs, in a minute: whether everything runs, not how fast."""
    with_jax: Switch = False
    """Peers jax-dp and jax-tp too: the same step in JAX, over as many host devices in a process of its own."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: one GPU instead of ranks. The peers are then eager, fsdp2 (in a group of one) and compile; tensors are bfloat16."""
    preset: str = "1b"
    """The Llama, with --device cuda."""
    batch: int = 8
    """Its sequences in a step."""
    seq: int = 2048
    """Tokens in each of them."""
    json: Path | None = None
    """Write the rows there."""
    plot: Path | None = None
    """Draw the ratios there, as .png, .svg or .pdf."""


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, prog="phalanx bench peers")

    from phalanx.bench.peers.session import Request, check, run
    from phalanx.comm.launch import launch_from

    if options.pairs is not None and options.pairs < 1:
        raise ValueError(f"--pairs is {options.pairs}; it is a number of at least 1")
    request = Request(
        peers=options.peer,
        shapes=options.shape,
        transports=options.transport or default_transports(options.quick),
        pairs=options.pairs or (5 if options.quick else 40),
        quick=options.quick,
        with_jax=options.with_jax,
        json=options.json,
        plot=options.plot,
    )
    if options.device == "cuda":
        return on_gpu(options)
    outer = launch_from(os.environ)
    check(request, options.ranks if outer is None else outer.size)
    if outer is None:
        from phalanx.train.launch import launch, rank_command

        launch(options.ranks, rank_command(["bench", "peers", *args]))
        return 0
    run(request, outer)
    return 0


def default_transports(quick: bool) -> tuple[str, ...]:
    from phalanx.comm.shm import available

    if available() is not None:
        return ("gloo",)
    return ("shm",) if quick else ("gloo", "shm")


def on_gpu(options: Options) -> int:
    import torch

    from phalanx.bench.peers import cuda
    from phalanx.bench.peers.jobs import chosen
    from phalanx.models.llama import LlamaConfig

    if not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, and torch sees none")
    peers = chosen("peer", options.peer, cuda.PEERS)
    setting = cuda.Setting(LlamaConfig.preset(options.preset), options.batch, options.seq, torch.device("cuda", 0))
    cuda.run(setting, peers, options.pairs or 10, options.json)
    return 0
