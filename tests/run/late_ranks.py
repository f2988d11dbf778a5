"""What each rank of `test_late.test_over_processes_too` runs: the same steps with and without a barrier, then a gate between ranks."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import phalanx as phx

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.run import test_late as late


class FileGate(late.Gate):
    """Between processes: what has begun is a file."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__(seconds)
        self.path = path
        self.begun.set = path.touch  # type: ignore[method-assign,assignment]

    def _pass(self) -> None:
        deadline = time.monotonic() + self.seconds
        while not self.path.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        self.was_open = self.path.exists()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with phx.init(phx.Mesh(pp=2), timeout=60) as world:
        found = []
        for barrier in (True, False):
            step = late.start(world, barrier, late.model(dropout=0.5), schedule="zb-h2")
            outs = [step(late.batch(number)) for number in range(late.STEPS)]
            weights, gradients, state = step.state_dict(), step.gradients(), step.optimizer_state_dict()
            rows = [out.out if isinstance(out, late.LateOut) else out for out in outs]
            found.append((rows, weights, gradients, state))
        late.assert_equal(found[1], found[0])
        gate = FileGate(folder / "begun", 60.0)
        step = late.start(world, False, schedule="zb-h2", max_norm=None)
        gate.steps(step.executors[0])
        clipped = sorted({out.grad_norm > late.NORM for out in found[0][0][:-1]}, reverse=True)
        was_open = gate.was_open if world.rank == 1 else gate.path.exists()
    (folder / f"rank{world.rank}.json").write_text(json.dumps({"equal": True, "was_open": was_open, "clipped": clipped}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
