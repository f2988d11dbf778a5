"""ZeRO: ranks that hold equal parameters store them once between them, and nothing else changes."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import phalanx as phx
from phalanx import rules
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.run.parameters import Parameters
from phalanx.run.step import Step
from phalanx.schedule import Storage
from phalanx.schedule.explain import explain

CONFIG = LlamaConfig(vocab=61, hidden=24, inner=40, layers=3, heads=4, kv_heads=2, tied=True)
"""Sizes that no number of ranks and no cache line divides."""
EXACT = 1e-13
"""Of values of size 1, over three AdamW steps in float64: other orders of summation, and nothing else."""
DP, REP = {"batch": "dp"}, {"batch": ("rep", "dp")}
SP = {"batch": "dp", "heads": "tp", "mlp": "tp", "residual_seq": "tp"}


def model(tied: bool = True, frozen: str = "") -> Llama:
    torch.manual_seed(0)
    made = Llama(LlamaConfig(**{**CONFIG.__dict__, "tied": tied})).double()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not frozen or not re.match(frozen, name))
    return made


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randint(0, 61, (8, 16), generator=generator) for key in ("tokens", "targets")}


Result = tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], float]


def trained(
    mesh: phx.Mesh,
    layout: dict,
    look: Callable[[Step], None] = lambda step: None,
    tied: bool = True,
    frozen: str = "",
    **options,
) -> Result:
    """Three steps: losses and norms, weights, the last gradients, the optimizer's state, and an evaluation between two steps."""
    made = model(tied, frozen)
    with phx.local(mesh, rendezvous=True) as world:
        step = phx.parallelize(
            made, world, example=batch(), loss=loss, names=rules.table_for(made, batch()), layout=layout,
            optimizer=phx.adamw(lr=1e-2), max_norm=0.5, **options,
        )  # fmt: skip
        outs = [step(batch(0))]
        evaluated = step.evaluate(batch(7)).loss
        outs += [step(batch(1)), step(batch(2))]
        look(step)
        rows = [(out.loss, out.grad_norm) for out in outs]
        return rows, step.state_dict(), step.gradients(), step.optimizer_state_dict(), evaluated


@functools.cache
def reference(tied: bool = True, frozen: str = "", microbatches: int = 1) -> Result:
    return trained(phx.Mesh(), {}, tied=tied, frozen=frozen, microbatches=microbatches)


def assert_equal(found: Result, expected: Result) -> None:
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, abs=EXACT)
    for these, those in zip(found[1:4], expected[1:4], strict=True):
        assert these.keys() == those.keys()
        for name, x in those.items():
            torch.testing.assert_close(these[name], x, rtol=0, atol=EXACT, msg=lambda m, name=name: f"{name}: {m}")
    assert found[4] == pytest.approx(expected[4], abs=EXACT)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize(
    ("mesh", "layout", "options"),
    [
        (phx.Mesh(dp=2), DP, {}),
        (phx.Mesh(dp=4), DP, {"microbatches": 2}),
        (phx.Mesh(dp=2, tp=2), SP, {}),
        (phx.Mesh(pp=2, dp=2), DP, {"microbatches": 4}),
        (phx.Mesh(pp=2, dp=2), DP, {"microbatches": 4, "schedule": "zb-h1"}),
    ],
    ids=["dp2", "dp4-m2", "dp2-tp2-sp", "pp2-dp2-1f1b", "pp2-dp2-zb"],
)
def test_training_equals_one_process(mesh: phx.Mesh, layout: dict, options: dict, level: int) -> None:
    assert_equal(trained(mesh, layout, zero=level, **options), reference())


@pytest.mark.parametrize("level", [1, 2, 3])
def test_hybrid_divides_over_one_axis_and_copies_over_the_other(level: int) -> None:
    calls: Counter[tuple[str, str]] = Counter()

    def look(step: Step) -> None:
        ledger = step.executors[0].world.ledger
        with ledger.recording():
            step._with_batches(batch(2), False, lambda executor, mine: executor.evaluate(mine))
        calls.update({key: number for key, (number, _) in ledger.totals().items()})

    found = trained(phx.Mesh(rep=2, dp=2), REP, look, zero=Storage(level, ("dp",)))
    assert_equal(found, reference())
    # prologue with the tied embedding, three layers, epilogue: the norm alone is its own; never over `rep`
    assert calls.get(("rep", "all_gather"), 0) == 0 and calls["dp", "all_gather"] == (6 if level == 3 else 5)


def test_a_tied_embedding_is_gathered_once_while_both_its_segments_hold_it() -> None:
    def look(step: Step) -> None:
        (first, *_) = step.executors
        kinds = [str(a) for a in first.actions if a.kind in ("F", "B", "GATHER", "FREE")]
        assert kinds[:3] == ["GATHER0", "GATHER1", "F0.0"] and kinds[-2:] == ["B0.0", "FREE0"]
        # the last layer stays for its backward, which follows that of the epilogue
        assert "FREE3" not in kinds[: kinds.index("B3.0")]

    assert_equal(trained(phx.Mesh(dp=2), DP, look, zero=3), reference())


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("keep", [None, 5])
def test_any_prefetch_and_any_room(prefetch: int, keep: int | None) -> None:
    most = 0

    def look(step: Step) -> None:
        nonlocal most
        held = set[int]()
        for action in step.executors[0].actions:
            if action.kind == "GATHER":
                held.add(action.segment or 0)
            elif action.kind == "FREE":
                held.remove(action.segment or 0)
            most = max(most, len(held))

    assert_equal(trained(phx.Mesh(dp=2), DP, look, zero=Storage(3, ("dp",), prefetch=prefetch, keep=keep)), reference())
    assert most == (5 if keep else prefetch + 1)


@pytest.mark.parametrize("level", [2, 3])
def test_frozen_parameters(level: int) -> None:
    frozen = r"layers\.[01]\.|embed"
    assert_equal(trained(phx.Mesh(dp=2), DP, zero=level, frozen=frozen), reference(frozen=frozen))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_bytes_are_what_the_formula_says(level: int) -> None:
    """Parameters, gradients and two moments of 8 bytes an element; of four ranks each has a quarter of what is divided."""
    found: dict[str, int] = {}

    def look(step: Step) -> None:
        parameters: Parameters = step.executors[1].parameters
        found["parameters"] = sum(unit.values.numel() * 8 for unit in parameters.units)
        found["gradients"] = sum(unit.gradient.data.numel() * 8 for unit in parameters.units)
        found["moments"] = sum(x.numel() * 8 for moment in step.executors[1].optimizer.state.values() for x in moment.values())

    trained(phx.Mesh(dp=4), DP, look, zero=level)
    whole = sum(p.numel() for p in model().parameters()) * 8
    share = {"moments": 4 if level >= 1 else 1, "gradients": 4 if level >= 2 else 1, "parameters": 4 if level == 3 else 1}
    expected = whole / share["parameters"] + whole / share["gradients"] + 2 * whole / share["moments"]
    assert sum(found.values()) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize(
    ("mesh", "layout", "microbatches"),
    [(phx.Mesh(dp=2), DP, 2), (phx.Mesh(rep=2, dp=2), REP, 1), (phx.Mesh(dp=2, tp=2), SP, 1), (phx.Mesh(pp=2, dp=2), DP, 2)],
    ids=str,
)
def test_explain_says_what_a_step_calls(mesh: phx.Mesh, layout: dict, microbatches: int, level: int) -> None:
    def look(step: Step) -> None:
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for executor in step.executors:
            executor.world.ledger.start()
        step(batch(3))
        for executor in step.executors:
            if all(not place for axis, place in executor.world.coordinates.items() if axis != "pp"):
                for (axis, op), (calls, moved) in executor.world.ledger.totals().items():
                    if axis not in ("pp", "world") and op in ("all_gather", "reduce_scatter", "all_reduce"):
                        before = totals.get((axis, op), (0, 0))
                        totals[axis, op] = before[0] + calls, before[1] + moved
            executor.world.ledger.stop()
        said: dict[tuple[str, str], tuple[int, int]] = {}
        for row in explain(step.program, step.schedule).rows:
            # the world of a mesh with one axis is that axis
            axis = mesh.names[0] if row.axis == "world" and len(mesh.names) == 1 else row.axis
            if axis not in ("pp", "world"):
                # every stage counts tokens, explain says so once
                times = row.count * (mesh.extent(("pp",)) if row.why.startswith("COUNT") else 1)
                before = said.get((axis, row.op), (0, 0))
                said[axis, row.op] = before[0] + times, before[1] + times * row.bytes
        assert {key: value for key, value in said.items() if value[0]} == totals

    zero = Storage(level, ("dp",)) if "rep" in mesh.names else level
    trained(mesh, layout, look, zero=zero, microbatches=microbatches, tied=False)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_state_goes_from_any_storage_to_any_other(level: int) -> None:
    made = model()
    states = {}
    for name, zero in (("whole", 0), ("divided", level)):
        with phx.local(phx.Mesh(dp=2)) as world:
            step = phx.parallelize(made, world, example=batch(), loss=loss, layout=DP, zero=zero)
            step(batch(0))
            states[name] = (step.state_dict(), step.optimizer_state_dict())
    with phx.local(phx.Mesh(dp=4)) as world:
        step = phx.parallelize(made, world, example=batch(), loss=loss, layout=DP, zero=4 - level)
        step.load_state_dict(states["divided"][0])
        step.load_optimizer_state_dict(states["divided"][1])
        found = step(batch(1)).loss, step.state_dict()
    with phx.local(phx.Mesh()) as world:
        step = phx.parallelize(made, world, example=batch(), loss=loss)
        step.load_state_dict(states["whole"][0])
        step.load_optimizer_state_dict(states["whole"][1])
        expected = step(batch(1)).loss, step.state_dict()
    assert found[0] == pytest.approx(expected[0], abs=EXACT)
    for name, x in expected[1].items():
        torch.testing.assert_close(found[1][name], x, rtol=0, atol=EXACT)


@pytest.mark.parametrize("level", [0, 2, 3])
def test_gradients_may_travel_in_bfloat16(level: int) -> None:
    """Each sum of two terms is rounded three times at most, to 2^-9 of its size."""
    found = trained(phx.Mesh(dp=2), DP, zero=level, reduce_dtype=torch.bfloat16)
    exact = reference()[2]
    first = found[2]
    differ = [name for name in exact if not torch.equal(first[name], exact[name])]
    assert differ
    assert found[0][0][1] == pytest.approx(reference()[0][0][1], rel=3 * 2**-9)


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        (4, "zero is 4; it is 0"),
        (lambda: Storage(3, ("tp",)), "over the axis 'tp', but the mesh 'dp=2' has none"),
        (lambda: Storage(3, ("dp",), prefetch=-1), "prefetch is -1"),
        (lambda: Storage(3, ("dp",), prefetch=2, keep=2), "keep is 2 segments and prefetch 2"),
    ],
)
def test_what_cannot_be(zero: int | Callable[[], Storage], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        trained(phx.Mesh(dp=2), DP, zero=zero() if callable(zero) else zero)


def test_a_step_that_fails_leaves_nothing_gathered() -> None:
    made = model()
    with phx.local(phx.Mesh(dp=2)) as world:
        step = phx.parallelize(made, world, example=batch(), loss=loss, layout=DP, zero=3)
        state = step.state_dict()
        step.load_state_dict({name: torch.full_like(x, torch.nan) for name, x in state.items()})
        with pytest.raises(FloatingPointError, match="the parameter embed"):
            step(batch())
        step.load_state_dict(state)
        found = step(batch()).loss
    assert found == pytest.approx(reference()[0][0][0], abs=EXACT)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("action", ["GATHER2", "F1.0"])
def test_a_rank_that_fails_leaves_no_other_rank_with_old_weights(level: int, action: str) -> None:
    """Rank 0 has issued gathers that never became whole; the step after it must gather again, on both ranks alike."""
    made = model(tied=False)
    found = []
    for fails in (False, True):
        with phx.local(phx.Mesh(dp=2), timeout=10) as world:
            step = phx.parallelize(made, world, example=batch(), loss=loss, layout=DP, zero=level, optimizer=phx.adamw(lr=1e-2))
            step(batch(0))
            if fails:
                operations = step.executors[1]._training.operations
                at = next(n for n, (_, _, a) in enumerate(operations) if str(a) == action)
                waits, operation, done = operations[at]
                operations[at] = waits, lambda: 1 / 0, done  # type: ignore[assignment,return-value]
                with pytest.raises(ZeroDivisionError):
                    step(batch(1))
                operations[at] = waits, operation, done
            found.append(step(batch(1)).loss)
    assert found[0] == found[1]
