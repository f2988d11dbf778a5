"""The promise under every way to run a step: schedule, ZeRO, recomputation and precision, on every kind of mesh.

A subset that holds every pair of values runs at every change, all combinations nightly. The reference of a model is computed once,
and so is the program that combinations of schedule and storage share.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from torch import Tensor

from phalanx.comm.local import local
from phalanx.mesh import Mesh
from phalanx.run import step as entrance
from phalanx.run.step import Step
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
