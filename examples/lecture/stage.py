"""One rank of a pipeline: its layers, what it remembers between forward and backward, and its messages in flight.

`pipeline.py` says in which order it works. What is computed is real. How long it takes is pretended, so that two cores can show
four devices: a forward keeps the rank busy for so many seconds, a backward for twice as many, and meanwhile its thread sleeps
and the others run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from mlp import BATCH, DEPTH, MLP, batch_of, squared_error
from torch import Tensor

import phalanx as phx
from phalanx.comm import Handle
from phalanx.event import Event

MICROBATCHES = 8
FORWARD = 0.005


@dataclass
class Stage:
    """blocking: wait for each message as soon as it is posted (send and recv); otherwise only when it is needed (isend, irecv)."""

    world: phx.World
    blocking: bool
    forward_seconds: float = FORWARD
    events: list[Event] = field(default_factory=list)
    live: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # micro-batch: input, output or loss
    peak_live: int = 0
    loss: float = 0.0
    expected: dict[int, tuple[Tensor, Handle]] = field(default_factory=dict)  # the next message from a peer
    sent: list[tuple[Tensor, Handle]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.group, self.index = self.world.place("pp")
        self.last = self.group.size - 1
        per_stage = DEPTH // self.group.size
        self.layers = dict(list(MLP().layers.named_children())[self.index * per_stage : (self.index + 1) * per_stage])
        cut = {key: value.chunk(MICROBATCHES) for key, value in batch_of(0).items()}  # each rank cuts its own, none is sent
        self.batches = [{key: pieces[j] for key, pieces in cut.items()} for j in range(MICROBATCHES)]

    def step(self, order: Callable[[Stage], None]) -> None:
        neighbours = [peer for peer in (self.index - 1, self.index + 1) if 0 <= peer <= self.last]
        self.world.transport.barrier(self.group).wait()  # so that nobody's clock starts early
        if not self.blocking:
            self.expected = {peer: self.expect(peer) for peer in neighbours}
        order(self)
        for _, handle in self.sent:
            handle.wait()

    def forward(self, j: int) -> None:
        x = self.batches[j]["x"] if self.index == 0 else self.receive(self.index - 1, j).requires_grad_()
        with self.busy("F", j, self.forward_seconds):
            y = x
            for layer in self.layers.values():
                y = layer(y)
            if self.index == self.last:
                y = squared_error(y, self.batches[j])[0] / BATCH
                self.loss += y.item()
        self.live[j] = (x, y)
        self.peak_live = max(self.peak_live, len(self.live))
        if self.index < self.last:
            self.send(y.detach(), self.index + 1)

    def backward(self, j: int) -> None:
        x, y = self.live.pop(j)
        grad = torch.ones_like(y) if self.index == self.last else self.receive(self.index + 1, j)
        with self.busy("B", j, 2 * self.forward_seconds):
            y.backward(grad)  # adds to the gradients of the micro-batches before
        if self.index > 0:
            assert x.grad is not None
            self.send(x.grad, self.index - 1)

    def send(self, x: Tensor, peer: int) -> None:
        handle = self.world.transport.send(x, peer, self.group)
        if self.blocking:
            handle.wait()
        else:
            self.sent.append((x, handle))  # x must stay as it is until it has gone

    def receive(self, peer: int, j: int) -> Tensor:
        x, handle = self.expected.pop(peer) if peer in self.expected else self.expect(peer)
        handle.wait()
        if not self.blocking and j + 1 < MICROBATCHES:
            self.expected[peer] = self.expect(peer)  # the next one may travel while this one is computed
        return x

    def expect(self, peer: int) -> tuple[Tensor, Handle]:
        x = torch.empty_like(self.batches[0]["x"])
        return x, self.world.transport.recv(x, peer, self.group)

    def gradients(self) -> dict[str, Tensor]:
        parameters = ((f"layers.{k}.{name}", p) for k, layer in self.layers.items() for name, p in layer.named_parameters())
        return {name: p.grad for name, p in parameters if p.grad is not None}

    @contextmanager
    def busy(self, name: str, j: int, seconds: float) -> Iterator[None]:
        """The stand-in for a device: whatever the block computes, it takes so long, and no core meanwhile."""
        start = time.perf_counter()
        yield
        time.sleep(max(0.0, start + seconds - time.perf_counter()))
        self.events.append(Event(self.world.rank, "compute", name, start, time.perf_counter(), microbatch=j))
