"""The peers' side: one training step of the same Llama under each of PyTorch's own ways, and plainly in one process.

Every step reports its loss and the norm of all gradients, as ours does, and updates with AdamW in fused kernels. A step returns the
loss where it is known, and None on the other ranks of a pipeline; nothing is sent only to make it known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from phalanx.bench.peers.jobs import LEARNING_RATE, MICROBATCHES, WEIGHT_DECAY, Job, Shape
from phalanx.derive import derive
from phalanx.mesh import Mesh
from phalanx.models.llama import Llama, loss, rotary_table
from phalanx.run.initialize import deferred_init
from phalanx.schedule import Schedule, build, from_program

Step = Callable[[], float | None]
"""One optimizer step; its loss, as far as this rank knows it."""


def peer_step(job: Job, shape: Shape, group: dist.ProcessGroup, name: str) -> Step:
    """The peer's training step over `group`. `name` must be new for every group.

    A DeviceMesh is equal to another of the same names and ranks whatever its group, and DTensor keeps the first of two equal ones:
    only the name keeps a comparison from being of a thing with itself.
    """
    if job.axis == "pp":
        return pipeline_step(job, shape, group)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
    model = llama(shape)
    batch = shape.example()
    if job.sliced:
        batch = {key: value.chunk(group.size())[group.rank()].contiguous() for key, value in batch.items()}
    if job.peer in ("ddp", "zero1"):
        wrapped: nn.Module = DistributedDataParallel(model, process_group=group)
    elif job.peer == "fsdp2":
        wrapped = fully_sharded(model, mesh)
    else:
        wrapped = tensor_parallel(model, mesh, job.peer == "tp+sp")
    optimizer = zero_redundancy(model, group) if job.peer == "zero1" else adamw(model.named_parameters())
    return training_step(wrapped, model, optimizer, batch, around=loss_parallel if job.axis == "tp" else nullcontext)


def plain_step(shape: Shape) -> Step:
    """The whole batch in this process alone."""
    model = llama(shape)
    return training_step(model, model, adamw(model.named_parameters()), shape.example())


def llama(shape: Shape) -> Llama:
    """The same weights in every process and on both sides."""
    torch.manual_seed(0)
    return Llama(shape.model)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def training_step(
    forward: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    *,
    mean: Callable[[Tensor, Tensor], Tensor] = mean_loss,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Step:
    """Forward with `forward`, which wraps or compiles `model`, backward, norm, update; forward and backward inside `around`."""
    parameters = list(model.parameters())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with around():
            loss = mean(forward(batch["tokens"]), batch["targets"])
            loss.backward()  # type: ignore[no-untyped-call]
        gradient_norm(parameters)
        optimizer.step()
        return float(whole(loss.detach()))

    return step


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(named), lr=LEARNING_RATE, fused=True)


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Decayed and not, and DTensors apart from plain tensors: one fused kernel does not take both."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for _, p in named:
        groups.setdefault((isinstance(p, DTensor), p.dim() > 1), []).append(p)
    return [{"params": each, "weight_decay": WEIGHT_DECAY if matrix else 0.0} for (_, matrix), each in groups.items()]


def gradient_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Of what this rank can see: with DTensors of all ranks, under DDP the same on every rank."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    kinds = ([g for g in gradients if isinstance(g, DTensor)], [g for g in gradients if not isinstance(g, DTensor)])
    return math.hypot(*(float(whole(torch.nn.utils.get_total_norm(kind))) for kind in kinds if kind))


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def zero_redundancy(model: nn.Module, group: dist.ProcessGroup) -> torch.optim.Optimizer:
    """ZeRO stage 1: every rank has the moments of a part of the parameters, and sends that part when it is updated."""
    return ZeroRedundancyOptimizer(
        parameter_groups(model.named_parameters()),
        optimizer_class=torch.optim.AdamW,
        process_group=group,
        lr=LEARNING_RATE,
        fused=True,
    )


def fully_sharded(model: Llama, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: Llama, mesh: DeviceMesh, sequence_parallel: bool) -> nn.Module:
    """Shoeybi et al. 2019, section 3; with sequence parallelism Korthikanti et al. 2022, section 4.2.2."""
    between = Shard(1) if sequence_parallel else Replicate()
    for layer in model.layers:
        plan: dict[str, ParallelStyle] = {
            "self_attn": PrepareModuleInput(
                input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        }
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan |= {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel(output_layouts=between) for name in ("self_attn.o_proj", "mlp.down_proj")}
        if sequence_parallel:
            plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        parallelize_module(layer, mesh, plan)
    ends: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence_parallel:
        ends["norm"] = SequenceParallel()
    parallelize_module(model, mesh, ends)
    return model


class Stage(nn.Module):
    """The part of a Llama that a stage of Phalanx's holds: segment 0 is the embedding, the last one the head, the others are layers."""

    def __init__(self, model: Llama, segments: Sequence[int]) -> None:
        super().__init__()
        end = len(model.layers) + 1
        self.config = model.config
        self.layers = nn.ModuleList(model.layers[k - 1] for k in segments if 0 < k < end)
        self.embed_tokens = model.embed_tokens if 0 in segments else None
        self.norm = model.norm if end in segments else None
        self.lm_head = model.lm_head if end in segments else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        cos, sin = rotary_table(x.shape[1], self.config.hidden // self.config.heads, self.config.theta, x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        if self.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x


PIPELINES = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "zb-v": torch_schedules.ScheduleZBVZeroBubble,
}


def stages_of(peer: str, rank: int, ranks: int, chunks: int) -> tuple[int, ...]:
    """In a loop, or as a V: the first half down the ranks and the second half back up."""
    if peer == "zb-v":
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * chunks, ranks))


def schedule_of(job: Job, shape: Shape, ranks: int) -> Schedule:
    """Phalanx's Schedule of a pipeline, so that both sides cut the model at the same places."""
    mesh, arguments = Mesh(**{job.axis: ranks}), job.arguments
    program = derive(
        deferred_init(lambda: Llama(shape.model)),
        mesh,
        example=shape.example(),
        loss=loss,
        layout=arguments["layout"],
        microbatches=arguments["microbatches"],
    )
    return build(from_program(program), arguments["schedule"], ranks, arguments["microbatches"], arguments.get("chunks"))


def pipeline_step(job: Job, shape: Shape, group: dist.ProcessGroup) -> Step:
    rank, count = group.rank(), group.size() * job.chunks
    model, batch = llama(shape), shape.example()
    cut = schedule_of(job, shape, group.size()).stages
    indices = stages_of(job.peer, rank, group.size(), job.chunks)
    stages = [PipelineStage(Stage(model, cut[index]), index, count, torch.device("cpu"), group=group) for index in indices]
    del model  # the layers of the other ranks
    optimizer = adamw(named for stage in stages for named in stage.submod.named_parameters())
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    make: Any = PIPELINES[job.peer]
    schedule = make(stages if job.chunks > 1 else stages[0], MICROBATCHES, loss_fn=mean_loss)
    first, last = 0 in indices, count - 1 in indices

    def step() -> float | None:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        inputs = (batch["tokens"],) if first else ()
        schedule.step(*inputs, target=batch["targets"] if last else None, losses=losses if last else None, return_outputs=False)
        square = torch.tensor(gradient_norm(parameters) ** 2, dtype=torch.float64)
        dist.all_reduce(square, group=group)
        optimizer.step()
        return float(torch.stack(losses).detach().mean()) if last else None

    return step
