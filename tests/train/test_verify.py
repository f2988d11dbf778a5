"""The judge of everything else: it must see a wrong number, name it, and not be fooled by what is 0 in exact arithmetic."""

from __future__ import annotations

import json
import math

import pytest
import torch

from phalanx.cli import main
from phalanx.comm.local import local
from phalanx.mesh import Mesh
from phalanx.train.config import OptimizerConfig, TrainConfig
from phalanx.train.verify import Numbers, _Tally, relative_error, verify

NAN = float("nan")


@pytest.mark.parametrize(
    ("reference", "value", "error"),
    [
        ([2.0, -4.0], [2.0, -4.0], 0.0),
        ([2.0, -4.0], [3.0, -4.0], 0.25),
        ([0.0, 0.0], [0.0, 1e-30], math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 1.0], [1.0], math.inf),
        ([1.0, NAN], [1.0, 1.0], math.inf),
        ([1.0, 1.0], [1.0, NAN], math.inf),
        ([], [], 0.0),
    ],
)
def test_relative_error(reference: list[float], value: list[float], error: float) -> None:
    assert relative_error(torch.tensor(reference), torch.tensor(value)) == error


def test_relative_error_of_what_is_nothing_but_rounding() -> None:
    reference, value = torch.tensor([1e-19], dtype=torch.float64), torch.tensor([-1e-19], dtype=torch.float64)
    assert relative_error(reference, value) == 2.0
    assert relative_error(reference, value, floor=1e-6) < 1e-12


def numbers(loss: float = 1.0, a: float = 1.0, b: float = 2.0, weight: float = 3.0) -> Numbers:
    return Numbers(
        loss,
        {"a": torch.tensor([a], dtype=torch.float64), "b": torch.tensor([b], dtype=torch.float64)},
        {"a": torch.tensor([weight], dtype=torch.float64), "b": torch.ones(1, dtype=torch.float64)},
    )


def tally() -> _Tally:
    return _Tally({"a": None, "b": None}, {"a": "prologue", "b": "epilogue"}.get, "float64", 1e-10)


def test_the_first_divergence_is_named_with_its_segment() -> None:
    seen = tally()
    seen.compare(1, numbers(), numbers())
    assert seen.first is None
    seen.compare(2, numbers(), numbers(b=2.0 + 2e-9, weight=4.0))
    assert seen.first is not None
    assert (seen.first.step, seen.first.kind, seen.first.tensor, seen.first.segment) == (2, "grad", "b", "epilogue")
    assert seen.first.error == pytest.approx(1e-9)
    assert seen.largest["weight"] == pytest.approx(1 / 3)
    assert seen.worst == {"loss": None, "grad": "b", "weight": "a"}
    assert seen.by_step == [
        {"loss": 0.0, "grad": 0.0, "weight": 0.0},
        {"loss": 0.0, "grad": seen.first.error, "weight": pytest.approx(1 / 3)},
    ]
    seen.compare(3, numbers(), numbers(loss=2.0))
    assert seen.first.step == 2


@pytest.mark.parametrize("wrong", [numbers(loss=1 + 1e-9), numbers(a=1 + 1e-9), numbers(weight=NAN), numbers(a=NAN)])
def test_every_kind_of_wrong_number_is_seen(wrong: Numbers) -> None:
    seen = tally()
    seen.compare(1, numbers(), wrong)
    assert seen.first is not None


# Over 3 steps of AdamW in float64 the sums differ in their order; 1e-10 is `verify`'s own tolerance and leaves four digits.
@pytest.mark.parametrize(
    ("model", "mesh", "more"),
    [
        ("mlp", "", {}),
        ("mlp", "dp=2,tp=2", {}),
        ("llama-tiny", "dp=2,tp=2", {}),
        ("llama-tiny", "tp=2", {"sequence_parallel": True}),
        ("llama-tiny", "pp=2,dp=2", {"microbatches": 2}),
        ("hf-tiny:llama", "dp=2,tp=2", {}),
        ("hf-tiny:gpt2", "tp=2", {}),
    ],
)
def test_the_mesh_does_not_change_the_model(model: str, mesh: str, more: dict[str, object]) -> None:
    config = TrainConfig(model=model, mesh=mesh, steps=3, dtype="float64", batch=4, seq=16, **more)  # type: ignore[arg-type]
    with local(Mesh.parse(mesh)) as world:
        comparison = verify(config, world)
    assert comparison.first_divergence is None
    assert max(comparison.loss, comparison.grad, comparison.weight) < 1e-10
    assert comparison.grad > 0 or not mesh  # two orders of summation that agree to the last bit would be no comparison


def test_another_learning_rate_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.train import verify as room

    stock = room.Eager.step

    def other(self: room.Eager, batch: dict[str, torch.Tensor]) -> Numbers:
        for group in self.optimizer.param_groups:
            group["lr"] *= 1 + 1e-7
        return stock(self, batch)

    monkeypatch.setattr(room.Eager, "step", other)
    config = TrainConfig(model="mlp", steps=1, dtype="float64", batch=4, optimizer=OptimizerConfig(warmup=1))
    with local(Mesh()) as world:
        comparison = verify(config, world)
    assert comparison.first_divergence is not None
    assert comparison.first_divergence.kind == "weight"


def test_json_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", "mlp", "--mesh", "dp=2", "--steps", "2", "--batch", "4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["first_divergence"] is None
    assert all(0 <= said[kind] < 1e-10 for kind in ("loss", "grad", "weight"))


def test_norms_that_round_are_replaced_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["verify", "--model", "hf-tiny:qwen3", "--mesh", "tp=2", "--steps", "1", "--batch", "2", "--seq", "8"]
    assert main(args) == 0
    assert "Qwen3RMSNorm compute in float32; replaced" in capsys.readouterr().out
