"""Pipeline parallelism: every rank has some of the layers; micro-batches travel forward as activations and back as gradients.

    python examples/lecture/pipeline.py
    phalanx run --ranks 4 examples/lecture/pipeline.py --processes

Three orders of the same work, over blocking and over asynchronous messages (isend and irecv: every send and recv here returns a
handle, and blocking means to wait for it at once). What is computed is real. How long it takes is pretended, so that two cores
can show four devices: a forward keeps its rank busy for FORWARD seconds, a backward twice that, a message needs DELAY seconds
on its way, and meanwhile the rank sleeps and the others run. As processes the messages go over real wires, without DELAY.

Stated and tested: GPipe with isend and irecv takes at most WINS of the time of GPipe with blocking messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from launch import start
from mlp import MLP, batch_of, one_process, squared_error, worst_error
from torch import Tensor

import phalanx as phx
from phalanx import comm
from phalanx.comm import Delay, Handle
from phalanx.event import Event
from phalanx.schedule.draw import draw

MESH = phx.Mesh(pp=4)
MICROBATCHES = 8
FORWARD, DELAY = 0.005, 0.005
WINS = 0.75


def naive(stage: Stage) -> None:
    """A micro-batch goes through all stages and back before the next one starts: one rank works, the others wait."""
    for j in range(MICROBATCHES):
        stage.forward(j)
        stage.backward(j)


def gpipe(stage: Stage) -> None:
    """Huang et al. 2019: all forwards, then all backwards. Every rank keeps the activations of every micro-batch."""
    for j in range(MICROBATCHES):
        stage.forward(j)
    for j in range(MICROBATCHES):
        stage.backward(j)


def one_f_one_b(stage: Stage) -> None:
    """Narayanan et al. 2021, section 2.2: as many forwards in flight as there are later stages, then one backward for each
    forward. The idle time is GPipe's, the activations are those of few micro-batches.

    Only with asynchronous sends: here a rank sends an activation down while the next sends a gradient up, and if both wait for
    the other to receive, both wait for ever (mistakes/both_send_first.py).
    """
    warm_up = min(MICROBATCHES, stage.last - stage.index)
    for j in range(warm_up):  # warm-up
        stage.forward(j)
    for j in range(MICROBATCHES - warm_up):  # steady
        stage.forward(warm_up + j)
        stage.backward(j)
    for j in range(MICROBATCHES - warm_up, MICROBATCHES):  # cool-down
        stage.backward(j)


@dataclass
class Stage:
    """The layers of one rank, what it must remember between forward and backward, and its messages in flight."""

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
        per_stage = len(model := MLP().layers) // self.group.size
        self.layers = model[self.index * per_stage : (self.index + 1) * per_stage]
        self.first_layer = self.index * per_stage
        self.batches = [
            dict(zip(batch_of(0), tensors, strict=True))
            for tensors in zip(*(t.chunk(MICROBATCHES) for t in batch_of(0).values()), strict=True)
        ]  # no batch is sent between stages: each rank cuts its own
        self.samples = len(batch_of(0)["x"])
        self.shape = self.batches[0]["x"].shape

    def forward(self, j: int) -> None:
        x = self.batches[j]["x"] if self.index == 0 else self.receive(self.index - 1, j).requires_grad_()
        with self.busy("F", j, self.forward_seconds):
            y = x
            for layer in self.layers:
                y = layer(y)
            if self.index == self.last:
                y = squared_error(y, self.batches[j])[0] / self.samples
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
        x = torch.empty(self.shape, dtype=torch.float64)
        return x, self.world.transport.recv(x, peer, self.group)

    def step(self, order: Callable[[Stage], None]) -> None:
        neighbours = [peer for peer in (self.index - 1, self.index + 1) if 0 <= peer <= self.last]
        self.world.transport.barrier(self.group).wait()  # so that nobody's clock starts early
        if not self.blocking:
            self.expected = {peer: self.expect(peer) for peer in neighbours}
        order(self)
        for _, handle in self.sent:
            handle.wait()

    @contextmanager
    def busy(self, name: str, j: int, seconds: float) -> Iterator[None]:
        """The stand-in for a device: whatever the block computes, it takes so long, and no core meanwhile."""
        start = time.perf_counter()
        yield
        time.sleep(max(0.0, start + seconds - time.perf_counter()))
        self.events.append(Event(self.world.rank, "compute", name, start, time.perf_counter(), microbatch=j))
