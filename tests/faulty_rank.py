"""What each rank of `test_faults` runs: a mesh, a folder, and what goes wrong on the last rank.

Every rank writes its process id once it has communicated, so that a test knows when something is under way.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import phalanx as phx

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import test_bad_input as small


def main(mesh: phx.Mesh, folder: Path, fault: str) -> None:
    torch.set_num_threads(1)
    last = int(os.environ["RANK"]) == mesh.size - 1
    if last and fault == "never comes":
        signal.pause()
    with phx.init(mesh, timeout=3 if fault in ("never comes", "hangs") else 60) as world:
        torch.manual_seed(0)
        layout = {name: axis for name, axis in {"batch": "dp", "mlp": "tp"}.items() if axis in mesh.names}
        step = phx.parallelize(
            small.Model(), world, example=small.batch(), loss=small.loss, names=small.NAMES, layout=layout, microbatches=2
        )
        step(small.batch())
        written = folder / f"{world.rank}.new"
        written.write_text(str(os.getpid()))
        written.rename(folder / f"{world.rank}.pid")  # so that nobody reads half a number
        if last and fault == "hangs":
            signal.pause()
        if last and fault == "raises":
            raise LookupError("my own mistake")
        if last and fault == "exits":
            sys.exit(3)
        while True:
            step(small.batch())


if __name__ == "__main__":
    main(phx.Mesh.parse(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
