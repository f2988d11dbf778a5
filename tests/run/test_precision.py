"""Computing in half the width on any mesh is one process with narrow weights, float32 masters and float32 sums of gradients."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx as phx
from phalanx.derive.precision import COMPUTE
from phalanx.models import mlp
from phalanx.run.precision import LARGEST, LossScale, scale_for

# The class alone


def test_the_scale_moves_as_torchs_grad_scaler_does() -> None:
    """Over a fixed row of overflows, to the largest scale that float32 holds."""
    finite = torch.rand(400, generator=torch.Generator().manual_seed(0)) > 0.02
    finite[::37] = False
    settings = {"growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 3}
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**100, **settings)
    ours = LossScale(initial=2.0**100, growth=4.0, interval=3)
    weight = nn.Parameter(torch.zeros(1))
    updates, seen = torch.optim.SGD([weight], lr=1.0), set()
    for good in finite.tolist():
        assert ours.value == torchs.get_scale()
        seen.add(ours.value)
        torchs.scale(torch.ones(1))  # makes its tensors
        weight.grad = torch.full((1,), 0.0 if good else math.inf)
        torchs.step(updates)
        torchs.update()
        ours = ours.update(good)
    assert len(seen) > 5 and ours.skipped == int((~finite).sum())
    capped = LossScale(initial=2.0**127, interval=1).update(True)
    assert capped.value == 2.0**127 and LARGEST < 2.0**128


def test_the_scale_rests_at_its_smallest() -> None:
    scale = LossScale(initial=4.0, smallest=1.5)
    assert not scale.is_smallest
    scale = scale.update(False).update(False)
    assert scale.value == 1.5 and scale.is_smallest and scale.skipped == 2
    assert scale.update(True) == LossScale(initial=4.0, smallest=1.5, value=1.5, finite=1, skipped=2)


def test_a_scale_goes_on_where_it_was_saved() -> None:
    scale = LossScale(initial=8.0, interval=3).update(False).update(True)
    assert LossScale(initial=8.0, interval=3).loaded(scale.state_dict()) == scale
    assert LossScale().loaded({"step": torch.tensor(3)}) == LossScale()


@pytest.mark.parametrize(
    "settings",
    [
        {"growth": 1.0},
        {"backoff": 1.0},
        {"backoff": 0.0},
        {"interval": 0},
        {"initial": 0.5},
        {"smallest": 0.0},
        {"initial": 1e39},
    ],
)
def test_scales_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="loss scale: "):
        LossScale(**settings)


def test_only_float16_is_scaled() -> None:
    assert scale_for("fp16", None) == LossScale() and scale_for("bf16", None) is None and scale_for(None, None) is None
    assert scale_for("fp16", LossScale(initial=4.0)) == LossScale(initial=4.0)
    with pytest.raises(ValueError, match="'bf16' has the exponents of float32"):
        scale_for("bf16", LossScale())


# A step

MICROBATCHES, MAX_NORM, LR = 2, 0.5, 0.1
NAMES = {"*.up_proj.weight": "mlp embed", "*.up_proj.bias": "mlp", "*.down_proj.weight": "embed mlp"}
# Ranks round sums over their part of a batch or a width to bfloat16 (2^-9) or float16 (2^-12) where one process rounds the whole:
# a few roundings of gradients clipped to a norm of 0.5, times the learning rate, over four steps.
CLOSE = {"bf16": 1e-3, "fp16": 2e-4}


def model() -> nn.Module:
    torch.manual_seed(0)
    return mlp.MLP(mlp.MLPConfig(inputs=8, hidden=8, inner=16, layers=2, outputs=3))


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    targets = torch.randint(3, (8,), generator=generator)
    targets[step % 3] = -100
    return {"x": torch.randn(8, 8, generator=generator), "targets": targets}


@dataclass
class Trained:
    """What a run looked like from outside."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@functools.cache
def one_process(precision: str, steps: int, initial: float = 1.0, max_norm: float = MAX_NORM) -> Trained:
    """The module cast by hand, its masters and its gradients in float32, and torch's own scaler, clipping and optimizer."""
    compute, masters, twin = COMPUTE[precision], model(), copy.deepcopy(model())
    for p in twin.parameters():
        p.data = p.data.to(compute)
    updates = torch.optim.SGD(masters.parameters(), lr=LR, momentum=0.9)
    scale, result = LossScale(initial=initial), Trained()
    for step in range(steps):
        sums, whole = 0.0, batch(step)
        count = (whole["targets"] != -100).sum().double()
        updates.zero_grad()
        for j in range(MICROBATCHES):
            part = {name: x.chunk(MICROBATCHES)[j] for name, x in whole.items()}
            total, _ = mlp.loss(twin(part["x"].to(compute)).float(), part)
            sums += total.item()
            total.backward((scale.value / count).float())
            for master, p in zip(masters.parameters(), twin.parameters(), strict=True):
                assert p.grad is not None
                master.grad = p.grad.float() if master.grad is None else master.grad + p.grad.float()
                p.grad = None
        norm = (
            torch.linalg.vector_norm(torch.cat([p.grad.flatten().double() for p in masters.parameters()])).item() / scale.value
        )  # type: ignore[union-attr]
        finite = math.isfinite(norm)
        if finite:
            factor = min(1.0, max_norm / (norm + 1e-6)) / scale.value
            for p in masters.parameters():
                p.grad.mul_(factor)  # type: ignore[union-attr]
            updates.step()
            for master, p in zip(masters.parameters(), twin.parameters(), strict=True):
                p.data.copy_(master.data)
        scale = scale.update(finite)
        result.losses.append(sums / count.item())
        result.norms.append(norm)
        result.skipped.append(not finite)
    result.weights = {name: p.detach().clone() for name, p in masters.named_parameters()}
    return result


def start(world: phx.LocalWorld, precision: Any, initial: float | None = None, **more: Any) -> phx.Step:
    names = {"names": NAMES, "layout": {"mlp": "tp"}} if "tp" in world.mesh.names else {}
    if initial is not None:
        more["loss_scale"] = LossScale(initial=initial)
    more = {"optimizer": phx.sgd(lr=LR, momentum=0.9), "max_norm": MAX_NORM, "microbatches": MICROBATCHES, **names, **more}
    return phx.parallelize(model(), world, example=batch(0), precision=precision, **{"loss": mlp.loss, **more})


def run(step: phx.Step, numbers: Sequence[int]) -> Trained:
    result = Trained()
    for number in numbers:
        out = step(batch(number))
        result.losses.append(out.loss)
        result.norms.append(out.grad_norm)
        result.skipped.append(out.skipped)
    result.weights = step.state_dict()
    return result


@pytest.mark.parametrize(("precision", "initial"), [("bf16", None), ("fp16", 2.0**16)])
def test_on_one_rank_every_bit_is_that_of_one_process(precision: str, initial: float | None) -> None:
    expected = one_process(precision, 4, initial or 1.0, math.inf)
    with phx.local(phx.Mesh()) as world:
        found = run(start(world, precision, initial, max_norm=None), range(4))
    assert found.losses == expected.losses and not any(found.skipped)
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)  # chunks of float32
    for name, x in expected.weights.items():
        assert found.weights[name].dtype == torch.float32
        assert torch.equal(found.weights[name], x), name


@pytest.mark.filterwarnings("ignore:replicated")
@pytest.mark.parametrize(
    ("mesh", "precision", "initial"),
    [("dp=2", "bf16", None), ("tp=2", "bf16", None), ("tp=2", "fp16", 2.0**16), ("pp=2,dp=2", "fp16", 2.0**16)],
)
def test_a_mesh_changes_roundings_only(mesh: str, precision: str, initial: float | None) -> None:
    expected = one_process(precision, 4, initial or 1.0)
    with phx.local(phx.Mesh.parse(mesh)) as world:
        found = run(start(world, precision, initial), range(4))
    assert found.losses == pytest.approx(expected.losses, rel=10 * CLOSE[precision])
    for name, x in expected.weights.items():
        assert float((found.weights[name] - x).abs().max()) < CLOSE[precision], name


def test_masters_start_from_what_the_user_gave() -> None:
    """And go back to it: neither is rounded to what is computed with, under ZeRO as without."""
    given = {name: p.detach() for name, p in model().named_parameters()}
    assert not torch.equal(given["head.weight"], given["head.weight"].bfloat16().float())
    with phx.local(phx.Mesh(dp=2)) as world:
        for zero in (0, 3):
            step = start(world, "bf16", optimizer=phx.sgd(lr=0.0), zero=zero)
            step(batch(0))
            for name, x in step.state_dict().items():
                assert x.dtype == torch.float32 and torch.equal(x, given[name]), name


@pytest.mark.filterwarnings("ignore:replicated")
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,dp=2"])
def test_overflows_are_skipped_until_the_scale_fits(mesh: str) -> None:
    """From a scale that is far too large, every rank skips the same steps, changes nothing in them and then trains."""
    with phx.local(phx.Mesh.parse(mesh)) as world:
        step = start(world, "fp16", 2.0**24)
        found, skipped = step(batch(0)), 0
        while found.skipped:
            skipped += 1
            weights = step.state_dict()
            assert all(torch.equal(weights[name], p) for name, p in model().named_parameters())
            found = step(batch(0))
        assert 2 <= skipped < 20
        reached = LossScale(initial=2.0**24, value=2.0 ** (24 - skipped), finite=1, skipped=skipped)
        assert {executor.loss_scale for executor in step.executors} == {reached}
        assert found.loss == pytest.approx(one_process("fp16", 1).losses[0], rel=1e-3)
        assert step.executors[0].optimizer.steps == 1 and step.executors[0].step_number == skipped + 1
        state = step.optimizer_state_dict()
    with phx.local(phx.Mesh()) as world:
        other = start(world, "fp16")
        other.load_optimizer_state_dict(state)
        assert other.executors[0].loss_scale == LossScale(value=2.0 ** (24 - skipped), finite=1, skipped=skipped)
        assert other.executors[0].step_number == skipped + 1


def tiny_loss(outputs: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total, count = mlp.loss(outputs, given)
    return total * 1e-7, count


def test_gradients_that_would_vanish_survive() -> None:
    """float16 ends at 6e-8. Scaled they come back as those of the loss, before clipping; without a scale most are zero."""
    found, norms = {}, {}
    for initial in (1.0, 2.0**24):
        with phx.local(phx.Mesh()) as world:
            step = start(world, "fp16", initial, microbatches=1, max_norm=1e-9, loss=tiny_loss)
            norms[initial] = step(batch(0)).grad_norm
            found[initial] = step.gradients()
    twin = model().half()
    total, count = mlp.loss(twin(batch(0)["x"].half()).float(), batch(0))
    (total / count).backward()
    for name, p in twin.named_parameters():
        assert p.grad is not None
        size = float(p.grad.abs().max())
        # float16 has 11 bits, fewer for what is below its normal numbers: a few roundings on the way.
        torch.testing.assert_close(found[2.0**24][name] * 1e7, p.grad.float(), rtol=0, atol=size * 2**-8)
    joined = {initial: torch.cat([g.flatten() for g in gradients.values()]) for initial, gradients in found.items()}
    assert norms[2.0**24] > 1e-9 and float(joined[2.0**24].norm()) == pytest.approx(norms[2.0**24], rel=1e-6)
    assert int((joined[1.0] == 0).sum()) > joined[1.0].numel() / 2 > int((joined[2.0**24] == 0).sum())


def test_what_a_smaller_scale_does_not_cure_is_an_error() -> None:
    with phx.local(phx.Mesh(dp=2)) as world:
        step = start(world, "fp16", 2.0)
        broken = batch(0)
        broken["x"][3, 3] = math.nan
        before = step.state_dict()
        assert step(broken).skipped  # 2 falls to 1, where it rests
        with pytest.raises(FloatingPointError, match=r"step 2: the loss is not finite.*batch entry 'x'"):
            step(broken)
        assert all(torch.equal(before[name], x) for name, x in step.state_dict().items())
        assert not step(batch(0)).skipped


def test_a_bfloat16_step_is_never_skipped() -> None:
    with phx.local(phx.Mesh()) as world:
        step = start(world, "bf16")
        broken = batch(0)
        broken["x"][0, 0] = math.inf
        with pytest.raises(FloatingPointError, match="step 1"):
            step(broken)
        with pytest.raises(ValueError, match="needs none"):
            start(world, "bf16", 2.0)
