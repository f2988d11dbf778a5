"""The promise under every way to run a step: schedule, ZeRO, recomputation and precision, on every kind of mesh.

A subset that holds every pair of values runs at every change, all combinations nightly. The reference of a model is computed once,
and so is the program that combinations of schedule and storage share.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import phalanx as phx
from phalanx.comm.local import local
from phalanx.mesh import Mesh
from phalanx.run import step as entrance
from phalanx.run.step import Step
from phalanx.schedule import Schedule
from phalanx.schedule.pipeline import SCHEDULES
from phalanx.train.assembly import parallel_step
from phalanx.train.models import Model
from phalanx.train.verify import NEGLIGIBLE, Eager, Numbers, batches, relative_error

from .cases import AFTER_THREE_STEPS, FROM_EQUAL_WEIGHTS, Case, config_of, marked, model_of, module_of
from .test_matrix import covering


@dataclass(frozen=True, kw_only=True)
class Options(Case):
    zero: int = 0
    recompute: str = "none"

    @property
    def stages(self) -> int:
        return Mesh.parse(self.mesh).extent(("pp",)) * SCHEDULES[self.schedule].chunks if "pp" in self.mesh else 1

    @property
    def layers(self) -> int:
        """One more than the stages, so that they share them unevenly."""
        return self.stages + 1

    @property
    def kv(self) -> int:
        """The same on all meshes, which then have one reference."""
        return 8 if self.model == "gpt2" else 4

    @property
    def microbatches_fit(self) -> bool:
        pp = Mesh.parse(self.mesh).extent(("pp",))
        return self.schedule != "dualpipe" or self.microbatches >= 2 * pp

    def __str__(self) -> str:
        words = [self.model, self.mesh, "sp" * self.sequence_parallel, self.schedule, f"m={self.microbatches}"]
        return " ".join(filter(None, [*words, "tied" * self.tied, f"zero={self.zero}", self.recompute]))


VALUES: dict[str, tuple[Any, ...]] = {
    "model": ("mlp", "gpt2", "llama"),
    "mesh": ("dp=2", "dp=2,tp=2", "pp=2,dp=2", "pp=2,tp=2", "pp=4"),
    "sequence_parallel": (False, True),
    "schedule": tuple(SCHEDULES),
    "microbatches": (2, 4),
    "tied": (False, True),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
}


def exists(case: Options) -> bool:
    if case.model == "mlp" and (case.sequence_parallel or case.tied):
        return False  # it has neither a sequence nor an embedding
    if "tp" not in case.mesh and case.sequence_parallel:
        return False
    if "dp" not in case.mesh and case.zero:
        return False  # no two ranks have the same parameters
    return case.microbatches_fit if "pp" in case.mesh else case.schedule == "1f1b"


CASES = [
    case for values in itertools.product(*VALUES.values()) if exists(case := Options(**dict(zip(VALUES, values, strict=True))))
]
EVERY_CHANGE = covering(CASES)


def test_every_pair_of_values_is_tried_at_every_change() -> None:
    def found(cases: list[Options]) -> set[frozenset[tuple[str, Any]]]:
        return {frozenset(two) for case in cases for two in itertools.combinations(asdict(case).items(), 2)}

    assert found(EVERY_CHANGE) == found(CASES)
    for name in SCHEDULES.keys() - {"1f1b"}:  # which is also what runs without a pipeline
        mine = [case for case in EVERY_CHANGE if case.schedule == name]
        assert {case.zero for case in mine} == {0, 1, 2, 3}
        assert {case.recompute for case in mine} == {"none", "selective", "full"}
        # DualPipe on four ranks takes eight microbatches, of which the matrix has no case.
        assert {case.mesh for case in mine} == {"pp=2,dp=2", "pp=2,tp=2", "pp=4"} - {"pp=4" if name == "dualpipe" else ""}
    assert len(EVERY_CHANGE) < len(CASES) / 10


@functools.cache
def reference(model: str, tied: bool, layers: int) -> list[Numbers]:
    """Three steps of one process of plain PyTorch. Weights are live, so all are those after the last."""
    case = next(case for case in CASES if (case.model, case.tied, case.layers) == (model, tied, layers))
    made = model_of(case)
    trainer = Eager(module_of(made), made, config_of(case))
    return [trainer.step(batch) for batch in batches(made, config_of(case))]


derive = entrance.derive


@functools.lru_cache(maxsize=2)
def program(model: str, mesh: str, sp: bool, tied: bool, layers: int, microbatches: int, recompute: str) -> list[Any]:
    """Filled by whoever derives it first."""
    return []


def step_of(case: Options, world: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Step, Model]:
    kept = program(
        case.model, case.mesh, case.sequence_parallel, case.tied, case.layers, case.microbatches, case.recompute
    )  # fmt: skip

    def once(*args: Any, **kwargs: Any) -> Any:
        if not kept:
            kept.append(derive(*args, **kwargs))
        return kept[0]

    monkeypatch.setattr(entrance, "derive", once)
    model = model_of(case)
    return parallel_step(config_of(case, zero=case.zero, recompute=case.recompute), world, model, module_of(model)), model


@pytest.mark.parametrize("case", marked(CASES, EVERY_CHANGE))
def test_no_option_changes_what_the_model_computes(case: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(case.model, case.tied, case.layers)
    with local(Mesh.parse(case.mesh), rendezvous=True) as world:
        step, model = step_of(case, world, monkeypatch)
        for number, batch in enumerate(batches(model, config_of(case))):
            out = step(batch)
            bound = AFTER_THREE_STEPS if number else FROM_EQUAL_WEIGHTS
            assert abs(out.loss / expected[number].loss - 1) <= bound
            if number == 0:
                compare(expected[0].gradients, step.gradients(), bound)
        state = step.state_dict()
        for name, weight in expected[-1].weights.items():
            assert relative_error(weight, state[name]) <= AFTER_THREE_STEPS, name


def compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], bound: float) -> None:
    largest = max(x.abs().max().item() for x in expected.values())
    assert largest > 0
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert relative_error(x, found[name], NEGLIGIBLE["float64"] * largest) <= bound, name


PIPELINES = [
    Options(model=model, mesh=mesh, schedule=name, microbatches=4, recompute=recompute)
    for (model, recompute), mesh, name in itertools.product(
        (("mlp", "none"), ("llama", "full"), ("gpt2", "selective")), ("pp=2", "pp=4"), SCHEDULES
    )
    if name != "dualpipe" or mesh == "pp=2"
]
ROUNDED = [
    Options(model=model, mesh=mesh, microbatches=2, tied=model != "mlp", zero=zero, recompute=recompute)
    for (model, recompute), (mesh, zero) in itertools.product(
        (("mlp", "full"), ("llama", "none"), ("gpt2", "selective")), (("dp=2", 0), ("dp=2", 3), ("tp=2", 0), ("pp=2,dp=2", 2))
    )
]
A_STEP_APART = 2**-5
"""Between two ways to compute a bfloat16 gradient, relative to the largest of the tensor. Numbers are rounded to 2^-9 of their size:
each of some ten operators between a gradient and the loss once, and a partial sum once on each rank. 6 x 2^-9 is the most seen."""


class Bf16(NamedTuple):
    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def in_bf16(case: Options) -> tuple[Bf16, Schedule]:
    """Two steps from float32 parameters; without clipping, whose norm is a sum of ranks."""
    model = model_of(case)
    module = module_of(model).float()
    made = list(batches(model, config_of(case)))[:2]
    made = [{name: x.float() if x.is_floating_point() else x for name, x in batch.items()} for batch in made]
    with local(Mesh.parse(case.mesh), rendezvous=True) as world:
        step = phx.parallelize(
            module, world, example=made[0], names=model.names, layout=config_of(case).parsed_layout(model.dimensions),
            loss=model.loss, optimizer=phx.adamw(eps=1e-3), microbatches=case.microbatches, schedule=case.schedule,
            zero=case.zero, recompute=case.recompute, precision="bf16",
        )  # fmt: skip
        losses, gradients = [], {}
        for batch in made:
            losses.append(step(batch).loss)
            gradients = gradients or step.gradients()
        return Bf16(losses, gradients, step.state_dict()), step.schedule


@functools.cache
def alone_in_bf16(model: str, tied: bool, stages: str, schedule: str, microbatches: int) -> Bf16:
    """One rank; mesh and schedule say only how many layers there are."""
    case = Options(model=model, mesh=stages, schedule=schedule, tied=tied, microbatches=microbatches)
    return in_bf16(Alone(**asdict(case) | {"mesh": "", "schedule": "1f1b", "wanted": case.layers}))[0]


@dataclass(frozen=True, kw_only=True)
class Alone(Options):
    wanted: int

    @property
    def layers(self) -> int:
        return self.wanted


def accumulates_in_order(schedule: Schedule) -> bool:
    """Whether each segment's gradients are added up microbatch by microbatch, as they are on one rank."""
    for actions in schedule.ranks:
        order: dict[int | None, list[int]] = {}
        for action in actions:
            if action.kind in ("B", "W"):
                order.setdefault(action.segment, []).append(action.microbatch or 0)
        if any(found != list(range(schedule.microbatches)) for found in order.values()):
            return False
    return True


@pytest.mark.parametrize(
    "case",
    marked(PIPELINES, [case for case in PIPELINES if case.model == "mlp" and case.mesh == "pp=2"]),
)
def test_bf16_in_a_pipeline_is_that_of_one_rank(case: Options) -> None:
    """Bit by bit, where gradients are added in the order of microbatches: in every schedule but one. DualPipe's two copies of the
    model add up half of the microbatches each, so there two float32 sums differ by their rounding."""
    found, schedule = in_bf16(case)
    expected = alone_in_bf16(case.model, case.tied, case.mesh, case.schedule, case.microbatches)
    assert accumulates_in_order(schedule) == (case.schedule != "dualpipe")
    assert found.losses[0] == expected.losses[0]
    if case.schedule == "dualpipe":
        for name, x in expected.gradients.items():
            assert relative_error(x, found.gradients[name]) <= 4 * 2**-24, name
        return
    assert found.losses == expected.losses
    for these, those in ((found.gradients, expected.gradients), (found.weights, expected.weights)):
        assert these.keys() == those.keys()
        assert [name for name, x in those.items() if not torch.equal(these[name], x)] == []


@pytest.mark.parametrize("case", marked(ROUNDED, [case for case in ROUNDED if case.model == "mlp"]))
def test_bf16_on_other_meshes_differs_by_its_rounding(case: Options) -> None:
    found, _ = in_bf16(case)
    expected = alone_in_bf16(case.model, case.tied, case.mesh, case.schedule, case.microbatches)
    assert abs(found.losses[0] / expected.losses[0] - 1) <= 2**-9
    largest = max(x.abs().max().item() for x in expected.gradients.values())
    assert found.gradients.keys() == expected.gradients.keys()
    for name, x in expected.gradients.items():
        assert x.dtype == found.gradients[name].dtype == torch.float32
        assert relative_error(x, found.gradients[name], NEGLIGIBLE["bfloat16"] * largest) <= A_STEP_APART, name
