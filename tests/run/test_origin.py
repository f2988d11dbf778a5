"""A collective that fails inside a step says where in the step it was and which line of the user's model it comes from."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import phalanx as phx


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        return self.down(hidden)


def total(outputs, batch):  # type: ignore[no-untyped-def]
    return outputs.square().sum(), torch.ones_like(batch["x"][:, 0]).sum()


def test_a_rank_that_never_comes_is_named_with_the_line_that_waits_for_it() -> None:
    """Rank 1 leaves; rank 0 waits for it in the all_reduce behind the row-parallel layer."""
    batch = {"x": torch.randn(4, 4)}
    names = {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp", "down.bias": "embed"}
    world = phx.local(phx.Mesh(tp=2), timeout=0.2)
    step = phx.parallelize(Split(), world, names=names, layout={"mlp": "tp"}, loss=total, example=batch)
    with pytest.raises(TimeoutError) as caught:
        world.run(lambda rank: step.executors[0].step(batch) if rank.rank == 0 else None)
    message = str(caught.value)
    assert re.search(r"all_reduce\(sum\).*\b1\b", message)
    # the partial sum that `down` leaves is needed whole where the loss squares it
    line = total.__code__.co_firstlineno + 1
    assert re.search(rf"in F0\.0 of segment \w+, step 0, from \(.*test_origin\.py:{line}\)", message), message
    world.close()
