"""One GPU against eager PyTorch, FSDP2 and torch.compile: `python -m phalanx.bench.peers.cuda`.

The same Llama in bfloat16, alternated step by step. FSDP2 in a group of one and Phalanx keep float32 weights and gradients beside what
they compute with; eager and compiled PyTorch keep bfloat16 alone, so their optimizers move about half the bytes: what they gain by that
is theirs. Every step reports loss and norm, and ends when the device has finished.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import phalanx as phx
from phalanx.bench.executor import idle_executor, step_seconds
from phalanx.bench.pairs import ratio
from phalanx.bench.peers.frameworks import adamw, training_step
from phalanx.bench.peers.jobs import LEARNING_RATE, WEIGHT_DECAY
from phalanx.comm.world import World
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.rules import table_for

DENSE_BF16_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
}
"""Peak of dense bfloat16 products by the beginning of the device's name, from NVIDIA's data sheets; the first that fits counts."""
Step = Callable[[], float | None]


@dataclass(frozen=True)
class Setting:
    """A Llama, its batch, and where it trains."""

    model: LlamaConfig
    batch: int
    seq: int
    device: torch.device

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def step_flops(self) -> float:
        """Of forward and backward: 6 per token and weight that is multiplied, 12 layers·hidden·seq for attention, causal or not.

        Chowdhery et al. 2022 (PaLM), appendix B. The lookup in the embedding counts nothing, its use as the head does.
        """
        with torch.device("meta"):
            model = Llama(self.model)
        multiplied = sum(p.numel() for p in model.parameters())
        if not self.model.tied:
            multiplied -= model.embed_tokens.weight.numel()
        return self.tokens * (6 * multiplied + 12 * self.model.layers * self.model.hidden * self.seq)

    def example(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        size = (self.batch, self.seq)
        made = {key: torch.randint(0, self.model.vocab, size, generator=generator) for key in ("tokens", "targets")}
        return {key: value.to(self.device) for key, value in made.items()}

    def llama(self, dtype: torch.dtype) -> Llama:
        """The same weights for everybody, but for rounding."""
        torch.manual_seed(0)
        with torch.device(self.device):
            return Llama(self.model).to(dtype)


@dataclass(frozen=True)
class Way:
    """A way of training that has taken its first steps. Bytes are its own: what was allocated before it was made is left out."""

    step: Step
    made_seconds: float
    """From nothing to the end of the second step: derivation and compilation are in it."""
    losses: tuple[float, ...]
    peak_bytes: int | None


@dataclass(frozen=True)
class Row:
    """A peer against Phalanx on one device; ratio is the peer's seconds over ours. MFU is None where the device is not known."""

    peer: str
    phalanx: str
    peer_ms: float
    phalanx_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    a_a_low: float
    a_a_high: float
    peer_mfu: float | None
    phalanx_mfu: float | None
    peer_tokens_per_second: float
    phalanx_tokens_per_second: float
    peer_gib: float | None
    phalanx_gib: float | None
    peer_made_seconds: float
    phalanx_made_seconds: float
    loss_diff: float
    pairs: int

    def __str__(self) -> str:
        def both(name: str, form: str) -> str:
            numbers = (getattr(self, f"peer_{name}"), getattr(self, f"phalanx_{name}"))
            return " and ".join("-" if number is None else format(number, form) for number in numbers)

        return (
            f"{self.peer} against {self.phalanx}: {both('ms', '.1f')} ms, ratio {self.ratio:.3f} ({self.ratio_low:.3f} to "
            f"{self.ratio_high:.3f}), A/A {self.a_a_low:.3f} to {self.a_a_high:.3f}, {self.pairs} pairs\n"
            f"    MFU {both('mfu', '.1%')}; tokens/s {both('tokens_per_second', ',.0f')}; peak GiB {both('gib', '.1f')}; "
            f"first two steps {both('made_seconds', '.1f')} s; losses apart by {self.loss_diff:.1e}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.peers.cuda", description=__doc__)
    parser.add_argument("--preset", default="1b", help="of models/llama.py")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="all without; may be repeated")
    parser.add_argument("--device", default="cuda", help="cpu with --preset tiny shows that everything runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is visible to torch; --device cpu --preset tiny --batch 2 --seq 32 runs the same on the CPU")
    setting = Setting(LlamaConfig.preset(options.preset), options.batch, options.seq, device)
    run(setting, options.peer or list(PEERS), options.pairs, options.json)


def run(setting: Setting, peers: Sequence[str], pairs: int, path: Path | None = None) -> list[Row]:
    """Prints as it goes. Ours is made once; of the peers one at a time shares the memory with it."""
    torch.set_float32_matmul_precision("high")
    print(f"phalanx {phx.__version__}, torch {torch.__version__}, {device_name(setting.device)}; {setting}")
    rows: list[Row] = []
    with ExitStack() as stack:
        # Before there is a process group, which FSDP2 alone needs: ours is then a world without one.
        world = stack.enter_context(phx.init(phx.Mesh(), device=setting.device))
        backend = "nccl" if setting.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        for name, arguments, against in ours(peers):
            mine = first_steps(partial(our_step, setting, world, arguments), setting.device)
            for peer in against:
                theirs = first_steps(partial(PEERS[peer], setting), setting.device)
                rows.append(compare(setting, peer, theirs, name, mine, pairs))
                print(rows[-1], flush=True)
                del theirs
                free(setting.device)
            del mine
            free(setting.device)
    for pp in (1, 2):
        print(executor_line(setting.device, pp), flush=True)
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return rows


def ours(peers: Sequence[str]) -> list[tuple[str, dict[str, Any], list[str]]]:
    """(name, arguments of parallelize beside the usual, peers) of each way of ours. What this version lacks is left out."""
    known = inspect.signature(phx.parallelize).parameters
    precision = {"precision": "bf16"} if "precision" in known else {}
    ways: list[tuple[str, dict[str, Any], list[str]]] = [("Phalanx", precision, list(peers))]
    if "compile" in known:
        ways.append(("Phalanx compiled", {**precision, "compile": True}, [peer for peer in peers if peer == "compile"]))
    else:
        print("Phalanx compiled is left out: parallelize has no parameter 'compile'")
    return [way for way in ways if way[2]]


def our_step(setting: Setting, world: World, arguments: dict[str, Any]) -> Step:
    batch = setting.example()
    model = setting.llama(torch.float32 if "precision" in arguments else torch.bfloat16)
    optimizer = phx.adamw(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    names = table_for(model, batch)
    step = phx.parallelize(
        model, world, names=names, layout={}, loss=loss, example=batch, optimizer=optimizer, **arguments
    )  # fmt: skip
    return lambda: step(batch).loss


def eager_step(setting: Setting) -> Step:
    model = setting.llama(torch.bfloat16)
    return _peer_step(model, model, setting)


def compiled_step(setting: Setting) -> Step:
    model = setting.llama(torch.bfloat16)
    compiled: Any = torch.compile(model)
    return _peer_step(compiled, model, setting)


def fsdp2_step(setting: Setting) -> Step:
    """As torchtitan trains: float32 shards, bfloat16 where they are used, gradients reduced in float32."""
    model = setting.llama(torch.float32)
    mesh = init_device_mesh(setting.device.type, (1,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _peer_step(model, model, setting)


def _peer_step(forward: nn.Module, model: nn.Module, setting: Setting) -> Step:
    return training_step(forward, model, adamw(model.named_parameters()), setting.example(), mean=token_mean)


def token_mean(logits: Tensor, targets: Tensor) -> Tensor:
    """As ours computes it: cross entropy in float32."""
    total, count = loss(logits, {"targets": targets})
    return total / count


PEERS: dict[str, Callable[[Setting], Step]] = {"eager": eager_step, "fsdp2": fsdp2_step, "compile": compiled_step}


def first_steps(make: Callable[[], Step], device: torch.device) -> Way:
    """Make a way of training, take two steps, and see in a third how much memory is needed."""
    free(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    start = time.perf_counter()
    step = make()
    losses = [step(), step()]
    synchronize(device)
    made = time.perf_counter() - start
    if device.type != "cuda":
        return Way(step, made, _known([*losses, step()]), None)
    torch.cuda.reset_peak_memory_stats(device)
    losses.append(step())
    synchronize(device)
    return Way(step, made, _known(losses), torch.cuda.max_memory_allocated(device) - before)


def compare(setting: Setting, peer: str, theirs: Way, phalanx: str, mine: Way, pairs: int) -> Row:
    ways = {"peer": theirs.step, "phalanx": mine.step, "again": theirs.step}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for at in range(pairs + 1):
        for name in ways if at % 2 == 0 else reversed(list(ways)):
            synchronize(setting.device)
            start = time.perf_counter()
            ways[name]()
            synchronize(setting.device)
            if at:
                taken[name].append(time.perf_counter() - start)
    speed = ratio(list(zip(taken["phalanx"], taken["peer"], strict=True)))
    a_a = ratio(list(zip(taken["again"], taken["peer"], strict=True)))
    seconds = {name: statistics.median(each) for name, each in taken.items()}
    return Row(
        peer=peer,
        phalanx=phalanx,
        peer_ms=seconds["peer"] * 1e3,
        phalanx_ms=seconds["phalanx"] * 1e3,
        ratio=speed.median,
        ratio_low=speed.low,
        ratio_high=speed.high,
        a_a_low=a_a.low,
        a_a_high=a_a.high,
        peer_mfu=mfu(setting, seconds["peer"]),
        phalanx_mfu=mfu(setting, seconds["phalanx"]),
        peer_tokens_per_second=setting.tokens / seconds["peer"],
        phalanx_tokens_per_second=setting.tokens / seconds["phalanx"],
        peer_gib=None if theirs.peak_bytes is None else theirs.peak_bytes / 2**30,
        phalanx_gib=None if mine.peak_bytes is None else mine.peak_bytes / 2**30,
        peer_made_seconds=theirs.made_seconds,
        phalanx_made_seconds=mine.made_seconds,
        loss_diff=max(abs(a - b) for a, b in zip(theirs.losses, mine.losses, strict=True)),
        pairs=pairs,
    )


def mfu(setting: Setting, seconds: float) -> float | None:
    peak = peak_flops(device_name(setting.device))
    return None if peak is None else setting.step_flops / seconds / peak


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 of the device of that name; None if the table does not have it."""
    return next((peak for start, peak in DENSE_BF16_FLOPS.items() if name.startswith(start)), None)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def executor_line(device: torch.device, pp: int) -> str:
    """What an action costs when it computes nothing, on this device: see bench/executor.py."""
    make: Any = idle_executor
    if device.type != "cpu" and "device" not in inspect.signature(make).parameters:
        return f"executor on {device.type}, pp={pp}: left out, bench/executor.py knows the CPU only"
    executor = make(16, 16, pp) if device.type == "cpu" else make(16, 16, pp, device=device)
    with torch.device(device):
        seconds = step_seconds(executor, 16, 20)
    synchronize(device)
    return f"executor on {device.type}, pp={pp}: {seconds * 1e6 / len(executor.actions):.1f} us for each of {len(executor.actions)} actions"


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _known(losses: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(each for each in losses if each is not None)


if __name__ == "__main__":
    main()
