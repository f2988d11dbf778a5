"""What each rank of `test_processes` runs: a step over a real pipeline, then a model that differs on one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import phalanx as phx

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.run import test_step as model


def main() -> None:
    torch.set_num_threads(1)
    mesh = phx.Mesh(pp=2)
    rows, weights, _ = model.reference()
    with phx.init(mesh, timeout=30) as world:
        step = phx.parallelize(
            model.model(), world, example=model.batch(0), loss=model.loss, microbatches=4,
            optimizer=phx.adamw(lr=1e-2), max_norm=model.MAX_NORM,
        )  # fmt: skip
        outs = [step(model.batch(number)) for number in range(3)]
        state = step.state_dict()
        with torch.no_grad():
            model.model().blocks[1].up.bias[0] += 0.0 if world.rank == 0 else 1e-9
        try:
            phx.parallelize(model.model(), world, example=model.batch(0), loss=model.loss)
        except ValueError as error:
            refusal = str(error)
        errors = [max(abs(out.loss - loss), abs(out.grad_norm - norm)) for out, (loss, norm) in zip(outs, rows, strict=True)]
        errors += [(state[name] - x).abs().max().item() for name, x in weights.items()]
        print(json.dumps({"rank": world.rank, "error": max(errors), "refusal": refusal}))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main()
