"""Phalanx's side: the training step of a job over shared memory, over Gloo, and over nothing at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import phalanx as phx
from phalanx.bench.peers.frameworks import llama
from phalanx.bench.peers.jobs import LEARNING_RATE, WEIGHT_DECAY, Job, Shape
from phalanx.comm.c10d import C10dTransport
from phalanx.comm.dry import DryTransport
from phalanx.comm.transport import Group, Handle, ReduceOp
from phalanx.comm.world import World
from phalanx.mesh import Mesh
from phalanx.models.llama import loss
from phalanx.rules import table_for


class Silent(DryTransport):
    """Messages that are done at once and move nothing: what is left of a step is what its rank computes.

    The few numbers of a step's end must be usable, though the rank that knows them says nothing: no mean is over 0 tokens.
    """

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        if x.is_floating_point() and x.numel() <= 8:
            x.clamp_(min=1)
        return super().all_reduce(x, group, op)


def open_world(job: Job, transport: str) -> World:
    """All ranks in a mesh of the job's axis. `transport` is gloo, shm or none. The default process group must be open."""
    mesh = Mesh(**{job.axis: dist.get_world_size()})
    rank = dist.get_rank()
    if transport == "none":
        return World(mesh, rank, Silent(rank, mesh.size))
    return World(mesh, rank, C10dTransport(torch.device("cpu"), backend=transport))


def our_step(job: Job, shape: Shape, world: World) -> Callable[[], float]:
    """The training step, which returns the loss of the whole batch.

    Its norms of gradients are of all ranks. Raises ValueError for what parallelize does not take.
    """
    known = inspect.signature(phx.parallelize).parameters
    if unknown := [name for name in job.arguments if name not in known]:
        raise ValueError(f"Phalanx does not have it: parallelize has no parameter {unknown[0]!r}")
    optimizer = phx.adamw(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    batch = shape.example()
    model = llama(shape)
    names = table_for(model, batch)
    step = phx.parallelize(model, world, names=names, loss=loss, example=batch, optimizer=optimizer, **job.arguments)
    if job.sliced:
        batch = {key: value.chunk(world.size)[world.rank].contiguous() for key, value in batch.items()}
    return lambda: step(batch, local=job.sliced).loss
