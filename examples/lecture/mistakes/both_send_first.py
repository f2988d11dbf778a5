"""Two ranks that both send first. If a send waits for its receive, as on NCCL, neither ever receives.

    python examples/lecture/mistakes/both_send_first.py

This is 1F1B with blocking messages on two stages: rank 0 sends the activation of micro-batch 1 down while rank 1 sends the
gradient of micro-batch 0 up. On wires that buffer it works, so it passes on a laptop and hangs on the cluster. The static check
finds the cycle without running anything.
"""

from __future__ import annotations

import re

import torch

import phalanx as phx
from phalanx.schedule.actions import Action, Kind, Schedule
from phalanx.schedule.check import ScheduleError, check
from phalanx.schedule.data import count, finish
from phalanx.schedule.values import Values, link
from phalanx.schedule.view import Message, SegmentView, View

MESH = phx.Mesh(pp=2)
MICROBATCHES = 2


def wrong(world: phx.World) -> float:
    """What I get from the other rank, which sends its rank number."""
    mine, theirs, other = torch.tensor([float(world.rank)]), torch.empty(1), 1 - world.rank
    world.transport.send(mine, other, world.group("pp")).wait()
    world.transport.recv(theirs, other, world.group("pp")).wait()
    return theirs.item()


def right(world: phx.World) -> float:
    """Both are in flight before either is waited for."""
    mine, theirs, other = torch.tensor([float(world.rank)]), torch.empty(1), 1 - world.rank
    sending = world.transport.send(mine, other, world.group("pp"))
    world.transport.recv(theirs, other, world.group("pp")).wait()
    sending.wait()
    return theirs.item()


def view() -> View:
    """Two segments and the activation between them: all that a schedule needs to know of a model."""
    hidden = (Message("h", (4, 16), "float64", 4 * 16 * 8),)
    first = SegmentView("first", outputs=hidden, output_grads=hidden)
    return View(MESH, (first, SegmentView("last", inputs=hidden, input_grads=hidden)))


def schedule(*lists: str) -> Schedule:
    """Lists of actions, one for each rank, as a Schedule: `SEND_F0.1` sends what segment 0 made of micro-batch 1."""
    values, ranks = Values.of(view(), ((0, 1),), MICROBATCHES), []
    for at, actions in enumerate(lists):
        steps = [action(at, *re.fullmatch(r"([A-Z_]+)(\d+)\.(\d+)", word).groups()) for word in actions.split()]  # type: ignore[union-attr]
        ranks.append(link(values, at, [count(view()), *steps, *finish()]))
    return Schedule("1F1B by hand", tuple(ranks), ((0,), (1,)), (0, 1), MICROBATCHES)


def action(at: int, kind: Kind, segment: str, microbatch: str) -> Action:
    if "_" not in kind:
        return Action(kind, int(segment), int(microbatch))
    ends = f"{at}>{1 - at}" if kind.startswith("SEND") else f"{1 - at}>{at}"
    return Action(kind, int(segment), int(microbatch), peer=1 - at, lane=f"pp:{ends}:{kind[-1]}")


# Receive just before computing, send just after: how one writes 1F1B at first.
RANK_0 = "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B1.0 B0.0 RECV_B1.1 B0.1"
RANK_1 = "RECV_F0.0 F1.0 B1.0 SEND_B1.0 RECV_F0.1 F1.1 B1.1 SEND_B1.1"
MENDED = "RECV_F0.0 F1.0 B1.0 RECV_F0.1 SEND_B1.0 F1.1 B1.1 SEND_B1.1"


def main() -> None:
    with phx.local(MESH, rendezvous=True, timeout=0.5) as local:
        try:
            local.run(wrong)
        except TimeoutError as error:
            print(f"wrong: {error}")
        print(f"right: {local.run(right)}")
    blocking = "host"  # the channel model in which every communication blocks its rank
    try:
        check(schedule(RANK_0, RANK_1), view(), blocking)
    except ScheduleError as error:
        print(f"wrong, found before the run: {error}")
    check(schedule(RANK_0, MENDED), view(), blocking)
    print(f"right, proved before the run: rank 1 does {MENDED}")


if __name__ == "__main__":
    main()
