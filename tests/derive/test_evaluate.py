"""A Program in evaluation mode: without dropout and gradients, and the same object where that changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phalanx.derive import derive
from phalanx.derive.evaluate import evaluation
from phalanx.derive.program import Program
from phalanx.mesh import Mesh
from phalanx.models.mlp import MLP, MLPConfig, loss

BATCH = {"x": torch.zeros(4, 6), "targets": torch.zeros(4, dtype=torch.long)}


def program(model: nn.Module) -> Program:
    return derive(model, Mesh(dp=2), example=BATCH, loss=loss)


def masks(program: Program) -> int:
    """Dropout masks in the forward of each class of segments."""
    lowered = {id(segment.cls): segment.cls.lowered for segment in program.segments}.values()
    return sum(node.target is torch.ops.phx.dropout_mask.default for graph in lowered for node in graph.graph.nodes)


def mlp(dropout: float) -> MLP:
    return MLP(MLPConfig(inputs=6, hidden=8, inner=8, layers=3, outputs=2, dropout=dropout))


def test_without_dropout_it_is_the_program_itself() -> None:
    trained = program(mlp(0.0))
    assert evaluation(trained) is trained


def test_equal_blocks_stay_one_class_and_train_nothing() -> None:
    trained = program(mlp(0.5))
    quiet = evaluation(trained)
    assert (masks(trained), masks(quiet)) == (1, 0)
    assert len({id(segment.cls) for segment in quiet.segments}) == len({id(segment.cls) for segment in trained.segments})
    assert not any(value.requires_grad for segment in quiet.segments for value in (*segment.cls.params, *segment.cls.outputs))


class Dropping(nn.Module):
    """Probabilities passed by place, by name and left at their default."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.proj = how, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "attention":
            x = nn.functional.scaled_dot_product_attention(*(x.unflatten(1, (1, 1, 6)),) * 3, dropout_p=0.5).flatten(1)
        else:
            x = torch.dropout(x, 0.5, True) if self.how == "place" else torch.dropout(x, p=0.5, train=True)
        return self.proj(x)


@pytest.mark.parametrize("how", ["place", "name", "attention"])
def test_every_way_of_dropping_is_switched_off(how: str) -> None:
    trained = program(Dropping(how))
    assert (masks(trained), masks(evaluation(trained))) == (1, 0)
