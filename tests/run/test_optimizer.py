"""The fused updates over flat storage are torch's optimizers, with and without the fused kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phalanx.mesh import Mesh
from phalanx.run.executor import Executor
from phalanx.run.optimizer import SGD, AdamW, Config, Constant, Cosine, Group, Linear, groups

from . import hand_made

STEPS = 4
# Some five operations in each of four steps round weights below 2 to 2e-16; torch's default path orders them otherwise.
EXACT = 4e-15


def fixed_gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(w.shape, generator=generator, dtype=torch.float64) for name, w in hand_made.weights().items()}


def updated(config: Config, *, fused: bool, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    def run(executor: Executor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        executor.optimizer._fused = fused
        for step in range(STEPS):
            for name, gradient in fixed_gradients(step).items():
                unit, place = executor.parameters.places[name]
                place.of(unit.gradient.data).copy_(gradient)
            executor.optimizer.update()
        return executor.parameters.state_dict(), executor.optimizer.state_dict()

    made = hand_made.program(Mesh(), 1, dtype=dtype)
    (result,) = hand_made.on_every_rank(made, torch.no_grad()(run), config)
    return result


def torch_updated(make: Callable[[list], torch.optim.Optimizer], decay: float) -> dict[str, Tensor]:
    values = {name: w.clone().requires_grad_() for name, w in hand_made.weights().items()}
    matrices = [w for w in values.values() if w.dim() >= 2]
    others = [w for w in values.values() if w.dim() < 2]
    optimizer = make([{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}])
    for step in range(STEPS):
        for name, gradient in fixed_gradients(step).items():
            values[name].grad = gradient
        optimizer.step()
    return {name: w.detach() for name, w in values.items()}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("config", "make"),
    [
        (AdamW(lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2), lambda p: torch.optim.AdamW(p, 0.1, (0.8, 0.95), 1e-6)),
        (SGD(lr=0.1, weight_decay=0.2), lambda p: torch.optim.SGD(p, 0.1)),
        (SGD(lr=0.1, momentum=0.9, weight_decay=0.2), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
        (SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
    ],
)
def test_updates_are_those_of_torch(config: Config, make: Callable[[list], torch.optim.Optimizer], fused: bool) -> None:
    ours, _ = updated(config, fused=fused)
    for name, expected in torch_updated(make, 0.2).items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=EXACT)


def test_bfloat16_parameters_are_updated_through_float32_copies() -> None:
    """Updates of 1e-4 of weights near 1 vanish in bfloat16 (steps of 4e-3) unless a wider copy adds them up."""
    config = AdamW(lr=1e-4, weight_decay=0.0)
    ours, state = updated(config, fused=True, dtype=torch.bfloat16)
    for name, start in hand_made.weights(torch.bfloat16).items():
        master = state[f"{name}/master"]
        assert master.dtype == torch.float32 and ours[name].dtype == torch.bfloat16
        moved = (master - start.float()).abs().max().item()
        assert 1e-4 < moved < 5e-4
        assert torch.equal(ours[name], master.bfloat16())


def test_state_goes_over_to_another_layout() -> None:
    """Two steps on one rank, the state into a pipeline with data parallelism, and one more step there, is three on one rank."""
    config = AdamW(lr=1e-2)

    def begin(executor: Executor) -> tuple:
        for step in range(2):
            executor.step(hand_made.batch(step))
        saved = executor.parameters.state_dict(), executor.optimizer.state_dict()
        saved = tuple({name: x.clone() for name, x in part.items()} for part in saved)
        executor.step(hand_made.batch(2))
        return (*saved, executor.parameters.state_dict())

    weights, moments, expected = hand_made.on_every_rank(hand_made.program(Mesh(), 1), begin, config)[0]
    assert int(moments["step"]) == 2

    def go_on(executor: Executor) -> dict[str, Tensor]:
        with torch.no_grad():
            executor.parameters.load_state_dict(weights)
            executor.optimizer.load_state_dict(moments)
        executor.step(hand_made.batch(2))
        return executor.parameters.state_dict()

    for state in hand_made.on_every_rank(hand_made.program(Mesh(pp=2, dp=2), 2), go_on, config):
        for name, x in expected.items():
            torch.testing.assert_close(state[name], x, rtol=0, atol=EXACT)


def test_decay_is_decided_on_names_and_global_shapes() -> None:
    made = hand_made.program(Mesh(), 1)
    default = groups(AdamW(weight_decay=0.3), made)
    assert default["blocks.0.weight"] == Group(1e-3, 0.3) and default["blocks.0.bias"] == Group(1e-3, 0.0)
    assert set(groups(AdamW(weight_decay=0.3, no_decay=()), made).values()) == {Group(1e-3, 0.3)}
    by_alias = groups(AdamW(weight_decay=0.3, no_decay=("head.*",)), made)
    assert by_alias["embed.weight"] == Group(1e-3, 0.0) and by_alias["blocks.0.bias"] == Group(1e-3, 0.3)
    with pytest.raises(ValueError, match="matches none"):
        groups(AdamW(no_decay=("nothing.*",)), made)


def test_learning_rates() -> None:
    assert [Constant(warmup=2)(s) for s in range(3)] == [0.5, 1.0, 1.0]
    assert [Linear(5, warmup=2, final=0.5)(s) for s in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.5]
    cosine = Cosine(6, warmup=1, final=0.1)
    assert cosine(0) == 1.0 and cosine(5) == pytest.approx(0.1) and cosine(9) == pytest.approx(0.1)
    assert cosine(3) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 2 / 4)) / 2)


def test_the_rate_follows_the_steps() -> None:
    def rates(executor: Executor) -> list[float]:
        return [executor.step(hand_made.batch(step)).lr for step in range(3)]

    (seen,) = hand_made.on_every_rank(hand_made.program(Mesh(), 1), rates, SGD(lr=2.0, rate=Linear(3, final=0.0)))
    assert seen == [2.0, 1.0, 0.0]


def test_settings_that_make_no_sense_are_refused() -> None:
    for make in (
        lambda: AdamW(lr=-1.0),
        lambda: AdamW(betas=(1.0, 0.9)),
        lambda: SGD(momentum=1.0),
        lambda: SGD(nesterov=True),
        lambda: SGD(weight_decay=-0.1),
    ):
        with pytest.raises(ValueError, match="must be"):
            make()
