"""One step of a run, recorded on every rank and brought together on rank 0 on one clock."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.event import Event
from phalanx.run.step import Step
from phalanx.schedule import from_program
from phalanx.schedule.measured import Trace, write

ROUNDS = 30
"""Meetings by which clocks are compared: the best of some dozens is as good as the wire, where ranks share cores with others too."""


@dataclasses.dataclass(frozen=True)
class Clocks:
    """ahead: by rank, how much its clock shows more than that of rank 0. error: by how much each may be off."""

    ahead: tuple[float, ...]
    error: float


@contextmanager
def tracing(step: Step, world: World | LocalWorld, number: int, folder: Path | None) -> Iterator[None]:
    """Record the step that is taken inside the block as step `number`, and write trace.json to rank 0's `folder`.

    Every rank enters, and leaves once rank 0 has its Events. Comparing clocks brings the ranks together, so that they start alike.
    """
    clocks = Clocks((0.0,) * world.mesh.size, 0.0) if isinstance(world, LocalWorld) else compare_clocks(world)
    with step.recording() as events:
        yield
    found = events if isinstance(world, LocalWorld) else gathered(events, world)
    if folder is not None:
        view = from_program(step.program, step.schedule.storage, late=step.schedule.late)
        write(Trace(number, step.schedule, view, on_one_clock(found, clocks), clocks.error), folder / "trace.json")


def compare_clocks(world: World, clock: Callable[[], float] = time.perf_counter, rounds: int = ROUNDS) -> Clocks:
    """How far the ranks' clocks are apart; the same answer on every rank.

    Nobody leaves an all_gather before everybody has come. So a rank comes, by its clock, no later than rank 0 leaves by its own,
    and the other way round: each meeting bounds the difference of the two clocks from both sides, and the answer is the middle of
    what all meetings leave. Where that still contains 0, the clocks are taken for the one of a single machine.
    """
    if world.size == 1:
        return Clocks((0.0,), 0.0)
    came, left = [], []
    group = world.group(world.mesh.names)
    token = torch.zeros(1, device=world.device)
    out = torch.zeros(world.size, device=world.device)
    for _ in range(rounds):
        came.append(clock())
        handle = world.transport.inner.all_gather(out, token, group)
        handle.wait()
        handle.synchronize()
        left.append(clock())
    every = _all(torch.tensor([came, left], dtype=torch.float64, device=world.device), world)
    ahead, error = [], 0.0
    for rank in range(world.size):
        low = float((every[rank, 0] - every[0, 1]).max())
        high = float((every[rank, 1] - every[0, 0]).min())
        one_clock = low <= 0.0 <= high
        ahead.append(0.0 if one_clock else (low + high) / 2)
        error = max(error, 0.0 if one_clock else (high - low) / 2)
    return Clocks(tuple(ahead), error)


def gathered(events: Sequence[Event], world: World) -> list[Event]:
    """The Events of all ranks, on every rank."""
    text = json.dumps([dataclasses.astuple(event) for event in events]).encode()
    sizes = _all(torch.tensor([len(text)], device=world.device), world)[:, 0].tolist()
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    every = _all(mine.to(world.device), world).cpu()
    parts = (row[:size].numpy().tobytes() for row, size in zip(every, sizes, strict=True))
    return [Event(*fields) for part in parts for fields in json.loads(part)]


def on_one_clock(events: Sequence[Event], clocks: Clocks) -> tuple[Event, ...]:
    """The Events by rank 0's clock, the first at 0, in order of start."""
    moved = [(event, event.start - clocks.ahead[event.rank], event.end - clocks.ahead[event.rank]) for event in events]
    begin = min((start for _, start, _ in moved), default=0.0)
    shifted = [dataclasses.replace(event, start=start - begin, end=end - begin) for event, start, end in moved]
    return tuple(sorted(shifted, key=lambda event: (event.start, event.rank, event.end)))


def _all(x: Tensor, world: World) -> Tensor:
    """Every rank's x, stacked. Past the ledger: it is not the step's own traffic."""
    if world.size == 1:
        return x.unsqueeze(0)
    out = x.new_empty((world.size * x.shape[0], *x.shape[1:]))
    world.transport.inner.all_gather(out, x.contiguous(), world.group(world.mesh.names)).wait()
    return out.view(world.size, *x.shape)
