"""Pipeline parallelism: every rank has some of the layers; micro-batches travel forward as activations and back as gradients.

    python examples/lecture/pipeline.py
    phalanx run --ranks 4 examples/lecture/pipeline.py --processes

Three orders of the same work (`stage.py` has the work itself), over blocking and over asynchronous messages. Computation takes a
pretended time, and on threads so does a message: DELAY seconds. As processes the messages go over real wires, without DELAY.

Stated and tested: GPipe with isend and irecv takes at most WINS of the time of GPipe with blocking messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from launch import start
from mlp import one_process, worst_error
from stage import FORWARD, MICROBATCHES, Stage

import phalanx as phx
from phalanx import comm
from phalanx.comm import Delay
from phalanx.event import Event
from phalanx.schedule.draw import draw

MESH = phx.Mesh(pp=4)
DELAY = 0.005
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
    forward. The activations are those of few micro-batches. The idle time is GPipe's if messages take no time; if they do it is
    longer, since no other micro-batch is there to work on while one is on its way.

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


@dataclass(frozen=True)
class Measured:
    seconds: float
    """From the first rank's first forward to the last rank's last backward."""
    idle: list[float]
    """Share of that time in which a rank computes nothing, by rank."""
    peak_live: list[float]
    """Micro-batches whose activations a rank holds at most, by rank."""
    loss: float
    error: float
    """Of any rank's gradients against one process, relative."""
    events: list[Event]


def measure(world: phx.World, order: Callable[[Stage], None], blocking: bool, forward_seconds: float = FORWARD) -> Measured:
    stage = Stage(world, blocking, forward_seconds)
    stage.step(order)
    clock = torch.tensor([-stage.events[0].start, stage.events[-1].end], dtype=torch.float64)
    begin, end = comm.all_reduce(clock, world, "pp", "max").tolist()
    busy = sum(event.end - event.start for event in stage.events)
    error = worst_error(stage.gradients(), one_process().gradients)
    mine = torch.tensor([[1 - busy / (end + begin), stage.peak_live, stage.loss, error]], dtype=torch.float64)
    idle, live, losses, errors = comm.all_gather(mine, world, "pp").T.tolist()
    return Measured(end + begin, idle, live, losses[-1], max(errors), stage.events)


VARIANTS = (
    ("naive, blocking", naive, True),
    ("naive, isend and irecv", naive, False),
    ("GPipe, blocking", gpipe, True),
    ("GPipe, isend and irecv", gpipe, False),
    ("1F1B, isend and irecv", one_f_one_b, False),
)


def lecture(world: phx.World) -> list[Measured]:
    measure(world, gpipe, False, 0.0)  # unmeasured: the first backward of a process takes a while to start
    found = []
    for title, order, blocking in VARIANTS:
        found.append(result := measure(world, order, blocking))
        if world.rank == 0:
            idle, live = " ".join(f"{share:4.0%}" for share in result.idle), " ".join(f"{n:.0f}" for n in result.peak_live)
            print(f"{title:24} step {result.seconds:.3f} s   idle {idle}   live micro-batches {live}   loss {result.loss:.6f}")
    if world.rank == 0:
        exact = max(result.error for result in found) < 1e-12
        print(f"loss in one process {one_process().losses[0]:.6f}; every gradient equals that of one process to 1e-12: {exact}")
    return found


def main() -> None:
    ranks = start(lecture, MESH, rendezvous=True, delay=Delay(DELAY))  # rendezvous: a send is done when its recv is there
    if len(ranks) == MESH.size:  # as processes, nobody has everybody's events
        for number, (title, _, _) in enumerate(VARIANTS):
            print(f"\n{title}\n{draw([event for results in ranks for event in results[number].events])}")


if __name__ == "__main__":
    main()
