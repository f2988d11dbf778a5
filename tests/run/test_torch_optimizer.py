"""Optimizers of torch.optim over what ranks store: bit for bit the plain ones on one process, on any layout up to rounding."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import phalanx as phx
from phalanx.comm.world import World
from phalanx.derive import derive
from phalanx.derive.program import Program
from phalanx.models import mlp
from phalanx.run.executor import Executor
from phalanx.run.optimizer import Constant, Group, Linear, Torch, groups
from phalanx.run.parameters import Parameters
from phalanx.run.step import storage_of
from phalanx.run.torch_optimizer import ELEMENTWISE, optimizer, optimizer_of
from phalanx.run.values import initial_values
from phalanx.schedule import build, from_program

STEPS = 3
# Sums of float64 in another order, of gradients near 1; RMSprop divides by roots of small ones.
CLOSE = 1e-12

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (optim.AdamW, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (optim.Adadelta, {}),
    (optim.Adamax, {}),
    (optim.NAdam, {"momentum_decay": 0.1}),
    (optim.RAdam, {}),
    (optim.ASGD, {"lr": 0.01, "lambd": 0.1}),
    (optim.Rprop, {"lr": 0.01}),
    (optim.Adafactor, {}),
]
IDS = [kind.__name__ for kind, _ in KINDS]


def model() -> nn.Module:
    torch.manual_seed(0)
    return mlp.MLP(mlp.MLPConfig(inputs=8, hidden=8, inner=16, layers=2, outputs=3)).double()


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, width, generator=generator, dtype=torch.float64) for name, width in (("x", 8), ("targets", 3))}


def plain(module: nn.Module, updates: optim.Optimizer, steps: int = STEPS) -> dict[str, Tensor]:
    """Weights of the module after `steps` on one process."""
    for step in range(steps):
        updates.zero_grad()
        total, count = mlp.squared_error(module(batch(step)["x"]), batch(step))
        (total / count).backward()
        updates.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@functools.cache
def expected(index: int) -> dict[str, Tensor]:
    kind, options = KINDS[index]
    module = model()
    return plain(module, kind(module.parameters(), **options))


@functools.cache
def derived(make: Any, mesh: str, layout: str) -> tuple[Program, nn.Module]:
    """Deriving takes most of the time that a test could."""
    names = {"*up_proj.weight": "mlp embed", "*down_proj.weight": "embed mlp"} if layout else None
    module = make()
    with warnings.catch_warnings(action="ignore"):  # what no name matches is replicated
        program = derive(
            module, phx.Mesh.parse(mesh), example=batch(0), loss=mlp.squared_error, names=names,
            layout={"mlp": "tp"} if layout else None, microbatches=2 if "pp" in mesh else 1,
        )  # fmt: skip
    return program, module


def start(world: phx.LocalWorld, config: Any, make: Any = model, zero: int = 0) -> phx.Step:
    """What parallelize makes, of a Program that is derived once."""
    program, module = derived(make, str(world.mesh), "mlp" if "tp" in world.mesh.names else "")
    view = from_program(program, storage_of(zero, program))
    schedule = build(view, "1f1b", world.mesh.extent(("pp",)), program.microbatches)

    def executor(rank: World) -> Executor:
        values, of = initial_values(module, rank, 0), groups(config, program)
        parameters = Parameters(program, rank, schedule.places, values, of, schedule.storage)
        return Executor(program, schedule, rank, parameters, optimizer_of(config, parameters))

    return phx.Step(module, world, program, schedule, world.run(executor), 0)


def largest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((found[name] - x).abs().max()) for name, x in wanted.items())


def test_the_table_is_tested() -> None:
    assert {kind for kind, _ in KINDS} - {optim.Adafactor} == ELEMENTWISE


@pytest.mark.parametrize("index", range(len(KINDS)), ids=IDS)
def test_on_one_rank_every_bit_is_torchs(index: int) -> None:
    kind, options = KINDS[index]
    with phx.local(phx.Mesh()) as world:
        step = start(world, optimizer(kind, no_decay=(), **options))
        for number in range(STEPS):
            step(batch(number))
        found = step.state_dict()
    for name, x in expected(index).items():
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize("index", range(len(KINDS)), ids=IDS)
def test_state_goes_from_one_rank_over_to_any_layout(index: int) -> None:
    """Two steps on one rank, the third on others with the state of the first: what three steps on one process give."""
    kind, options = KINDS[index]
    config = optimizer(kind, no_decay=(), **options)
    with phx.local(phx.Mesh()) as world:
        step = start(world, config)
        fresh = step.optimizer_state_dict()
        for number in range(STEPS - 1):
            step(batch(number))
        weights, state = step.state_dict(), step.optimizer_state_dict()
    assert int(fresh["step"]) == 0 and int(state["step"]) == STEPS - 1
    cases = [("dp=2", 0), ("pp=2", 0)] if kind is optim.Adafactor else [("dp=2", 1), ("tp=2", 0), ("pp=2", 0)]
    for mesh, zero in cases:
        with phx.local(phx.Mesh.parse(mesh)) as world:
            step = start(world, config, zero=zero)
            step.load_state_dict(weights)
            step.load_optimizer_state_dict(state)
            again = step.optimizer_state_dict()
            assert again.keys() == state.keys() and all(torch.equal(again[name], x) for name, x in state.items()), mesh
            step(batch(STEPS - 1))
            assert largest(step.state_dict(), expected(index)) < CLOSE, mesh
            step.load_optimizer_state_dict(fresh)
            assert int(step.optimizer_state_dict()["step"]) == 0


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("index", [0, 7], ids=["SGD", "NAdam"])
def test_from_the_first_step_on_data_ranks(index: int, zero: int) -> None:
    kind, options = KINDS[index]
    with phx.local(phx.Mesh(dp=2)) as world:
        step = start(world, optimizer(kind, no_decay=(), **options), zero=zero)
        for number in range(STEPS):
            step(batch(number))
        assert largest(step.state_dict(), expected(index)) < CLOSE


def half_frozen() -> nn.Module:
    module = model()
    module.in_proj.requires_grad_(False)
    return module


@pytest.mark.parametrize("ours", [True, False])
def test_groups_are_param_groups(ours: bool) -> None:
    """The first pattern that matches counts, in what it says; frozen parameters are in no group."""
    options = {"*.up_proj.*": {"lr": 0.02, "weight_decay": 0.3}, "layers.*": {"lr": 0.0}, "head.weight": {"lr": 0.05}}
    config: Any = phx.adamw(lr=0.01, weight_decay=0.1, groups=options)
    if not ours:
        config = optimizer(optim.AdamW, lr=0.01, weight_decay=0.1, groups=options)
    module = half_frozen()
    found = groups(config, derived(half_frozen, "", "")[0])
    assert found["layers.0.up_proj.bias"] == Group(0.02, 0.3) and found["layers.1.down_proj.weight"] == Group(0.0, 0.1)
    assert found["head.weight"] == Group(0.05, 0.1) and found["head.bias"] == Group(0.01, 0.0)
    assert not [name for name in found if name.startswith("in_proj")]
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rows = [{"params": [p], "lr": found[name].lr, "weight_decay": found[name].weight_decay} for name, p in trained.items()]
    wanted = plain(module, optim.AdamW(rows))
    with phx.local(phx.Mesh(dp=2)) as world:
        step = start(world, config, half_frozen)
        for number in range(STEPS):
            assert step(batch(number)).lr == 0.01
        state = step.state_dict()
    assert largest(state, wanted) < CLOSE
    for name, p in model().named_parameters():
        assert torch.equal(state[name], p) == (found.get(name, Group(0.0, 0.0)).lr == 0.0), name


def test_other_options_and_the_rate_reach_torch() -> None:
    """A group's own momentum, and the learning rates of a schedule, on parameters that decay by their shape."""
    config = optimizer(
        optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, groups={"head.*": {"momentum": 0.5}}, rate=Linear(STEPS)
    )
    module = model()
    rows = [
        {"params": [p], "momentum": 0.5 if name.startswith("head") else 0.9, "weight_decay": 0.1 if p.dim() > 1 else 0.0}
        for name, p in module.named_parameters()
    ]
    updates = optim.SGD(rows, lr=0.1)
    for number in range(STEPS):
        for settings in updates.param_groups:
            settings["lr"] = 0.1 * Linear(STEPS)(number)
        wanted = plain_step(module, updates, number)
    with phx.local(phx.Mesh()) as world:
        step = start(world, config)
        assert [step(batch(number)).lr for number in range(STEPS)] == [0.1 * Linear(STEPS)(number) for number in range(STEPS)]
        assert largest(step.state_dict(), wanted) == 0.0


def test_parallelize_takes_it() -> None:
    with phx.local(phx.Mesh()) as world:
        step = phx.parallelize(
            matrices(), world, example=batch(0), loss=mlp.squared_error, optimizer=phx.optimizer(optim.RMSprop, lr=0.1)
        )
        assert step(batch(0)).lr == 0.1


def plain_step(module: nn.Module, updates: optim.Optimizer, number: int) -> dict[str, Tensor]:
    updates.zero_grad()
    total, count = mlp.squared_error(module(batch(number)["x"]), batch(number))
    (total / count).backward()
    updates.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


class Matrices(nn.Module):
    """Parameters that Muon takes: matrices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 16, bias=False), nn.Linear(16, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x).relu())


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return Matrices().double()


def test_muon_where_parameters_are_whole() -> None:
    module = matrices()
    wanted = plain(module, optim.Muon(module.parameters(), lr=0.01))
    config = optimizer(optim.Muon, lr=0.01)
    with phx.local(phx.Mesh(dp=2)) as world:
        step = start(world, config, matrices)
        for number in range(STEPS):
            step(batch(number))
        # Muon rounds to bfloat16, where a last bit of float64 may move a result by 2^-8 of itself, times the learning rate.
        assert largest(step.state_dict(), wanted) < 1e-4
        assert step.optimizer_state_dict()["up_proj.weight/momentum_buffer"].shape == (16, 8)


@pytest.mark.parametrize(
    ("mesh", "zero", "message"),
    [
        ("tp=2", 0, r"up_proj.weight of shape \(16, 8\) is not whole on a rank, which stores shape \(8, 8\) of it"),
        ("dp=2", 1, r"is not whole on a rank, which stores 1/2 of its elements"),
    ],
)
def test_an_update_that_depends_on_the_layout_is_refused(mesh: str, zero: int, message: str) -> None:
    with phx.local(phx.Mesh.parse(mesh)) as world, pytest.raises(ValueError, match=message):
        start(world, optimizer(optim.Muon), matrices, zero)
    with phx.local(phx.Mesh.parse(mesh)) as world:
        start(world, optimizer(optim.RMSprop), matrices, zero)


def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LBFGS.*closure"):
        optimizer(optim.LBFGS)
    with pytest.raises(ValueError, match=r"SparseAdam.*dense"):
        optimizer(optim.SparseAdam)
    with pytest.raises(ValueError, match=r"RMSprop, tempo=2.*tempo"):
        optimizer(optim.RMSprop, tempo=2)
    with pytest.raises(ValueError, match=r"groups\['head.\*'\] sets 'tempo'; parameters can differ in lr, "):
        optimizer(optim.RMSprop, groups={"head.*": {"tempo": 2}})
    with pytest.raises(ValueError, match=r"groups\['head.\*'\] sets 'betas'; parameters can differ in lr, weight_decay"):
        phx.adamw(groups={"head.*": {"betas": 0.5}})
    with pytest.raises(ValueError, match=r"lr of groups\['head.\*'\] is -1"):
        phx.sgd(groups={"head.*": {"lr": -1}})
    with pytest.raises(ValueError, match="must be a class such as"):
        optimizer("adam")  # type: ignore[arg-type]
    with phx.local(phx.Mesh()) as world:
        with pytest.raises(ValueError, match=r"groups pattern 'heed.\*' matches none"):
            start(world, phx.adamw(groups={"heed.*": {"lr": 1.0}}))
        with pytest.raises(ValueError, match=r"in_proj.bias of shape \(8,\): .*Muon.*2D"):
            start(world, optimizer(optim.Muon))


def test_states_that_do_not_fit_are_refused() -> None:
    config = optimizer(optim.NAdam)
    with phx.local(phx.Mesh()) as world:
        step = start(world, config)
        step(batch(0))
        state = step.optimizer_state_dict()
        with pytest.raises(ValueError, match=r"has no 'head.bias/mu_product'"):
            step.load_optimizer_state_dict({name: x for name, x in state.items() if name != "head.bias/mu_product"})
        with pytest.raises(ValueError, match=r"mu_product .* which are one group here"):
            step.load_optimizer_state_dict({**state, "head.bias/mu_product": torch.tensor(0.5)})


def test_what_is_left_out_is_the_classs_own() -> None:
    config = optimizer(optim.RMSprop)
    assert isinstance(config, Torch) and (config.lr, config.weight_decay, config.rate) == (0.01, 0.0, Constant())
    assert (config.moments, config.numbers) == (("square_avg",), ())
    assert optimizer(optim.ASGD).numbers == ("eta", "mu")


class Lion(optim.Optimizer):
    """Chen et al. 2023: a sign of two momenta, by element."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.add_(torch.sign(0.9 * m + 0.1 * p.grad), alpha=-group["lr"])
                    m.mul_(0.99).add_(p.grad, alpha=0.01)


def test_a_class_of_ones_own_is_whole_unless_told_otherwise() -> None:
    module = model()
    wanted = plain(module, Lion(module.parameters()))
    with phx.local(phx.Mesh(dp=2)) as world:
        with pytest.raises(ValueError, match="not whole on a rank"):
            start(world, optimizer(Lion), zero=1)
        step = start(world, optimizer(Lion, elementwise=True), zero=1)
        for number in range(STEPS):
            step(batch(number))
        assert largest(step.state_dict(), wanted) < CLOSE
