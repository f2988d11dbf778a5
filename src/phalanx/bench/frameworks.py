"""PyTorch's own parallelism over shared memory against Gloo: `python -m phalanx.bench.frameworks`.

Steps of a small transformer under FSDP2, DTensor tensor parallelism and DDP, whose only difference is the process group. They
alternate in one run; a barrier before every step stands outside the clock and the slower rank's time counts. How many collectives
each group ran is printed beside the times: DTensor keeps the first of two equal meshes, so a comparison can be of a thing with itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from phalanx.bench.ddp import measured
from phalanx.bench.pairs import ratio
from phalanx.comm.launch import launch_from
from phalanx.comm.shm import available
from phalanx.train.launch import launch

Step = Callable[[], float]
"""One optimizer step; the loss of this rank."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.frameworks", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2, help="samples of one rank")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--framework", action="append", choices=list(FRAMEWORKS), help="all without; may be repeated")
    options = parser.parse_args(argv)
    if (reason := available()) is not None:
        raise SystemExit(reason)
    if launch_from(os.environ) is None:
        own = sys.argv[1:] if argv is None else argv
        launch(options.ranks, [sys.executable, "-P", "-W", "ignore::FutureWarning", "-m", "phalanx.bench.frameworks", *own])
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    say = print if dist.get_rank() == 0 else lambda *_: None
    say(
        f"transformer of hidden {options.hidden}, {options.layers} layers, {options.batch} x {options.seq} tokens per rank, "
        f"float32, SGD, {options.ranks} ranks of one thread"
    )
    for name in options.framework or FRAMEWORKS:
        steps, counts = {}, {}
        for label, backend in (("shm", "shm"), ("gloo", "gloo"), ("again", "shm")):
            group = dist.new_group(backend=backend)
            steps[label] = step_of(name, group, label, options.hidden, options.layers, options.batch, options.seq)
            counts[label] = calls_of(steps[label], group)
        say(f"{name}: speed of shm relative to gloo {ratio(measured(steps['shm'], steps['gloo'], options.pairs))}")
        say(f"  shm relative to itself (A/A) {ratio(measured(steps['again'], steps['shm'], options.pairs))}")
        say("  collectives of a step: " + ", ".join(f"{count} on {label}" for label, count in counts.items()))
    dist.destroy_process_group()


def step_of(framework: str, group: dist.ProcessGroup, label: str, hidden: int, layers: int, batch: int, seq: int) -> Step:
    """A step of the same model on the same data whatever the group. `label` names the mesh, and must be new for every group."""
    torch.manual_seed(0)
    model: nn.Module = Transformer(hidden, layers)
    # A mesh is equal to another of the same names and ranks, whatever its group: only the name tells them apart.
    model = FRAMEWORKS[framework](model, group, DeviceMesh.from_group(group, "cpu", mesh_dim_names=(label,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Tensor parallel ranks share their samples, the others have samples of their own.
    torch.manual_seed(1 if framework == "tp" else 1 + dist.get_rank(group))
    tokens, targets = torch.randint(0, VOCABULARY, (2, batch, seq))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


def calls_of(step: Step, group: dist.ProcessGroup) -> int:
    """How many collectives one step runs on the group, the first step with its set-up aside."""
    count: Callable[[], int] = getattr(group, "_get_sequence_number_for_group")  # noqa: B009 - c10d's stubs lack it
    step()
    before = count()
    step()
    return count() - before


VOCABULARY = 512
HEADS = 4


class Transformer(nn.Module):
    """Embedding, blocks and a head, written for one device."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # (batch, seq, hidden)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.width = hidden // HEADS
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        # -1 heads: a tensor parallel rank has its share of them
        q, k, v = (each(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for each in (self.q, self.k, self.v))
        attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))  # type: ignore[no-any-return]


def _ddp(model: nn.Module, group: dist.ProcessGroup, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


def _fsdp2(model: nn.Module, group: dist.ProcessGroup, mesh: DeviceMesh) -> nn.Module:
    assert isinstance(model, Transformer)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _tensor_parallel(model: nn.Module, group: dist.ProcessGroup, mesh: DeviceMesh) -> nn.Module:
    """Megatron's split of each block: Shoeybi et al. 2019, section 3."""
    assert isinstance(model, Transformer)
    columns, rows = ("q", "k", "v", "up"), ("out", "down")
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in rows}
        parallelize_module(block, mesh, plan)
    return model


FRAMEWORKS: dict[str, Callable[[nn.Module, dist.ProcessGroup, DeviceMesh], nn.Module]] = {
    "fsdp2": _fsdp2,
    "tp": _tensor_parallel,
    "ddp": _ddp,
}

if __name__ == "__main__":
    main()
