"""A step on any mesh, with any number of microbatches and in any order, is the step of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import phalanx.comm.collectives  # noqa: F401 - the operators of the head that is split over tp
from phalanx.comm.local import LocalWorld
from phalanx.comm.threads import Delay
from phalanx.derive.watch import Exit, Watched
from phalanx.mesh import Mesh
from phalanx.run.executor import Executor, Out
from phalanx.run.optimizer import SGD, AdamW
from phalanx.schedule import build, from_program
from phalanx.schedule.account import account
from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.values import Values, link

from . import hand_made

# Sums of float64 in another order: a few units in the last place per step, of numbers near 1, over 3 steps.
EXACT = 1e-13
STEPS = 3
MAX_NORM = 0.9  # below every gradient norm of these batches, so that clipping happens


@functools.cache
def reference(max_norm: float | None = MAX_NORM) -> tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor]]:
    """(loss, norm) of each step, the weights after the last, its gradients before clipping; torch on one process."""
    values = {name: w.clone().requires_grad_() for name, w in hand_made.weights().items()}
    decayed = [w for w in values.values() if w.dim() >= 2]
    others = [w for w in values.values() if w.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1)
    rows = []
    for step in range(STEPS):
        for w in values.values():
            w.grad = torch.zeros_like(w)
        loss = hand_made.reference_loss(values, hand_made.batch(step))
        loss.backward()
        gradients = {name: w.grad.clone() for name, w in values.items() if w.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(values.values(), max_norm or float("inf"))
        rows.append((loss.item(), norm.item()))
        optimizer.step()
    return rows, {name: w.detach() for name, w in values.items()}, gradients


def three_steps(executor: Executor) -> tuple[list[Out], dict[str, Tensor], dict[str, Tensor]]:
    outs = [executor.step(hand_made.batch(step)) for step in range(STEPS)]
    return outs, executor.parameters.state_dict(), executor.gradients()


def assert_is_reference(results: list[tuple[list[Out], dict[str, Tensor], dict[str, Tensor]]]) -> None:
    rows, weights, gradients = reference()
    for outs, ours, grads in results:
        assert outs == results[0][0], "ranks disagree"
        for out, (loss, norm) in zip(outs, rows, strict=True):
            assert norm > MAX_NORM
            assert abs(out.loss - loss) < EXACT and abs(out.grad_norm - norm) < EXACT
            assert out.tokens == 19 and out.lr == 1e-2
        for name in weights:
            torch.testing.assert_close(ours[name], weights[name], rtol=0, atol=EXACT)
            torch.testing.assert_close(grads[name], gradients[name], rtol=0, atol=EXACT)
        assert ours["head.weight"] is ours["embed.weight"]


OPTIMIZER = AdamW(lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mesh", ["", "dp=2", "pp=2", "pp=3", "pp=2,dp=2"])
def test_training_equals_one_process(mesh: str, microbatches: int) -> None:
    made = hand_made.program(Mesh.parse(mesh), microbatches)
    assert_is_reference(hand_made.on_every_rank(made, three_steps, OPTIMIZER, max_norm=MAX_NORM))


def test_gpipe_equals_one_process() -> None:
    made = hand_made.program(Mesh(pp=2), 4)
    assert_is_reference(hand_made.on_every_rank(made, three_steps, OPTIMIZER, max_norm=MAX_NORM, schedule="gpipe"))


@pytest.mark.parametrize("late", [False, True])
def test_split_backward_equals_one_process(late: bool) -> None:
    """I and W in place of B: W right behind I, or all weight gradients after all input gradients."""
    made = hand_made.program(Mesh(pp=2, dp=2), 4)
    schedule = separated(build(from_program(made), "1f1b", 2, 4), made, late=late)
    assert_is_reference(hand_made.on_every_rank(made, three_steps, OPTIMIZER, max_norm=MAX_NORM, schedule=schedule))


def separated(schedule: Schedule, made: hand_made.Program, *, late: bool) -> Schedule:
    values = Values.of(from_program(made), schedule.chains, schedule.microbatches)
    ranks = []
    for at, actions in enumerate(schedule.ranks):
        bare: list[Action] = []
        held: list[Action] = []
        for action in actions:
            if action.kind == "B":
                bare.append(Action("I", action.segment, action.microbatch))
                (held if late else bare).append(Action("W", action.segment, action.microbatch))
            elif late and action.kind in ("REDUCE", "NORM", "OPT"):
                held.append(Action(action.kind, action.segment, lane=action.lane))
            else:
                bare.append(Action(action.kind, action.segment, action.microbatch, action.peer, action.lane))
        order = ("W", "REDUCE", "NORM", "OPT")
        ranks.append(link(values, at, [*bare, *sorted(held, key=lambda a: order.index(a.kind))]))
    return Schedule("split", tuple(ranks), schedule.stages, schedule.host, schedule.microbatches)


def test_hosts_of_a_tied_parameter_may_defer_different_axes() -> None:
    """The head sees half of the positions on each tp rank and defers tp; the embedding computes everything on both."""

    def half(world: str, params: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        x = torch.ops.phx.move(inputs[0], "vary", world, "tp", 2, 0, 0)
        samples = torch.ops.phx.shard(torch.arange(len(x)), world, "tp", 2, 0)
        return hand_made.head(world, params, [x[samples], inputs[1][samples]])

    for mesh in (Mesh(tp=2), Mesh(pp=2, tp=2)):
        made = hand_made.program(mesh, 2, head=half, head_defers=("tp",), loss_partial=("tp",))
        assert made.segments[0].cls.deferred == (frozenset(),) and made.reduce_axes("embed.weight") == {"tp"}
        assert_is_reference(hand_made.on_every_rank(made, three_steps, OPTIMIZER, max_norm=MAX_NORM))


def test_messages_may_arrive_late() -> None:
    """Computation overtakes messages in flight: buffers must stay untouched until they arrive."""
    made = hand_made.program(Mesh(pp=2, dp=2), 4)
    with LocalWorld(made.mesh, rendezvous=True, timeout=20, delay=Delay(2e-3)) as worlds:
        values = hand_made.weights()
        make = functools.partial(hand_made.executor, made, config=OPTIMIZER, values=values, max_norm=MAX_NORM)
        assert_is_reference(worlds.run(lambda world: three_steps(make(world))))


def test_frozen_parameters_stay_and_have_no_accumulator() -> None:
    name = "blocks.1.weight"
    made = hand_made.program(Mesh(dp=2), 2, frozen=(name,))

    def steps(executor: Executor) -> tuple[float, dict[str, Tensor]]:
        out = executor.step(hand_made.batch())
        frozen, _ = executor.parameters.places[name]
        assert not frozen.trainable and not hasattr(frozen, "gradient")
        return out.grad_norm, executor.parameters.state_dict()

    norm, state = hand_made.on_every_rank(made, steps, OPTIMIZER)[0]
    values = {key: w.clone().requires_grad_(key != name) for key, w in hand_made.weights().items()}
    hand_made.reference_loss(values, hand_made.batch()).backward()
    expected = torch.stack([w.grad.norm() for w in values.values() if w.grad is not None]).norm()
    assert abs(norm - expected.item()) < EXACT
    assert torch.equal(state[name], values[name].detach())


def test_a_parameter_without_gradient_counts_as_zero() -> None:
    """Nothing differentiates `unused`: its accumulator must not keep what the memory held, and momentum must decay."""

    def steps(executor: Executor) -> Tensor:
        unit, place = executor.parameters.places["blocks.0.unused"]
        place.of(unit.gradient.data).fill_(7.0)
        executor.step(hand_made.batch())
        return executor.parameters.state_dict()["blocks.0.unused"]

    for state in hand_made.on_every_rank(hand_made.program(Mesh(dp=2), 1), steps, SGD(lr=1.0)):
        assert torch.equal(state, hand_made.weights()["blocks.0.unused"])


@pytest.mark.parametrize("mesh", ["", "pp=2,dp=2"])
def test_evaluation_and_watch_run_forward_only(mesh: str) -> None:
    made = hand_made.program(Mesh.parse(mesh), 2)
    hidden = Watched("blocks.0", made, (Exit(1, made.segments[1].cls.outputs[0], by_microbatch=True),))
    assert hidden.exits[0].value.name == "hidden1"

    def look(executor: Executor) -> tuple:
        before = executor.parameters.state_dict()
        seen = executor.evaluate(hand_made.batch()), executor.watch(hidden, hand_made.batch())
        after = executor.parameters.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        return seen

    values = hand_made.weights()
    x = values["embed.weight"][hand_made.batch()["tokens"]]
    (expected,) = hand_made.block("", [values["blocks.0.weight"], values["blocks.0.bias"], x], [x])
    for evaluation, watched in hand_made.on_every_rank(made, look, OPTIMIZER):
        assert abs(evaluation.loss - hand_made.reference_loss(values, hand_made.batch()).item()) < EXACT
        assert evaluation.tokens == 19
        torch.testing.assert_close(watched, (expected,), rtol=0, atol=EXACT)


def failure(fn: Callable[[Executor], object]) -> Callable[[Executor], str]:
    def run(executor: Executor) -> str:
        before = {name: view.clone() for name, view in executor.parameters.views.items()}
        with pytest.raises((FloatingPointError, ValueError)) as caught:
            fn(executor)
        assert all(
            torch.equal(view, before[name]) or bool(view.isnan().any()) for name, view in executor.parameters.views.items()
        )
        assert executor.optimizer.steps == 0 and executor.step_number == 0
        return f"{type(caught.value).__name__}: {caught.value}"

    return run


def test_a_loss_that_is_not_finite_stops_every_rank_before_the_update() -> None:
    values = hand_made.weights()
    values["blocks.1.bias"] = torch.full_like(values["blocks.1.bias"], float("nan"))
    made = hand_made.program(Mesh(pp=2, dp=2), 2)
    said = hand_made.on_every_rank(made, failure(lambda e: e.step(hand_made.batch())), OPTIMIZER, values=values)
    assert set(said) == {
        "FloatingPointError: step 1: the loss is not finite; the first tensor that is not is the parameter blocks.1.bias; "
        "no parameter was changed"
    }


def test_a_gradient_that_is_not_finite_is_named_on_every_rank() -> None:
    """Only one data rank's gradient of one parameter is broken: everyone must hear of it."""

    def step(executor: Executor) -> None:
        accumulate = executor.parameters.accumulate

        def breaking(segment: int, grads: list[Tensor | None]) -> None:
            if segment == 2 and executor.world.rank == 1:
                grads = [torch.full_like(g, float("inf")) if g is not None and i == 1 else g for i, g in enumerate(grads)]
            accumulate(segment, grads)

        executor.parameters.accumulate = breaking  # type: ignore[method-assign]
        executor.step(hand_made.batch())

    said = hand_made.on_every_rank(hand_made.program(Mesh(dp=2), 1), failure(step), OPTIMIZER)
    assert set(said) == {"FloatingPointError: step 1: the gradient of blocks.1.bias is not finite; no parameter was changed"}


def test_a_norm_that_overflows_float32_is_still_a_number() -> None:
    """Elements of 1e25 square to 1e50: beyond float32, within float64."""
    made = hand_made.program(Mesh(), 1, dtype=torch.float32)

    def step(executor: Executor) -> Out:
        accumulate = executor.parameters.accumulate
        executor.parameters.accumulate = lambda k, grads: accumulate(  # type: ignore[method-assign]
            k, [torch.full_like(g, 1e25) if k == 1 and g is not None else g for g in grads]
        )
        return executor.step(hand_made.batch())

    (out,) = hand_made.on_every_rank(made, step, OPTIMIZER)
    # 36 weights and 6 biases; `unused` has no gradient. 1e25 is rounded to float32.
    assert out.grad_norm == pytest.approx(1e25 * 42**0.5, rel=1e-6)


def test_a_batch_without_valid_tokens_is_refused() -> None:
    empty = {**hand_made.batch(), "labels": torch.full((hand_made.BATCH, hand_made.SEQ), hand_made.IGNORED)}
    said = hand_made.on_every_rank(hand_made.program(Mesh(pp=2), 2), failure(lambda e: e.step(empty)), OPTIMIZER)
    assert len(set(said)) == 1 and "0 valid tokens" in said[0]


def test_a_step_after_a_refused_one_is_as_if_it_had_not_been() -> None:
    def steps(executor: Executor) -> tuple:
        empty = {**hand_made.batch(), "labels": torch.full((hand_made.BATCH, hand_made.SEQ), hand_made.IGNORED)}
        with pytest.raises(ValueError, match="0 valid tokens"):
            executor.step(empty)
        return three_steps(executor)

    made = hand_made.program(Mesh(pp=2), 2)
    assert_is_reference(hand_made.on_every_rank(made, steps, OPTIMIZER, max_norm=MAX_NORM))


def test_nothing_of_a_step_outlives_it_and_buffers_are_reused() -> None:
    made = hand_made.program(Mesh(pp=2), 8)

    def steps(executor: Executor) -> None:
        for step in range(STEPS):
            executor.step(hand_made.batch(step))
        bound = executor._training
        assert [i for i in bound._transient if bound.machine.slots[i] is not None] == []
        assert not bound.machine.flying and not bound.machine.sent
        # 1F1B on 2 stages holds at most 2 microbatches, and one more message may be on its way.
        assert 1 <= max(len(buffers) for buffers in bound.machine.pool.buffers.values()) <= 3

    hand_made.on_every_rank(made, steps, OPTIMIZER)


def test_recorded_events_explain_the_step() -> None:
    made = hand_made.program(Mesh(pp=2), 4)

    def recorded(executor: Executor) -> tuple:
        executor.record = True
        out = executor.step(hand_made.batch())
        return out, executor.events, executor.schedule

    results = hand_made.on_every_rank(made, recorded, OPTIMIZER)
    assert abs(results[0][0].loss - reference()[0][0][0]) < EXACT
    events = [event for _, mine, _ in results for event in mine]
    schedule = results[0][2]
    assert [e.name for e in results[1][1] if e.lane == "compute"] == [str(a) for a in schedule.ranks[1] if a.lane == "compute"]
    found = account(schedule, from_program(made), events)
    assert found.span_seconds > 0 and 0 <= found.bubble_global < 1


def test_microbatches_of_schedule_and_program_must_agree() -> None:
    made = hand_made.program(Mesh(), 2)
    schedule = build(from_program(made), "1f1b", 1, 4)
    with pytest.raises(ValueError, match="schedule has 4 microbatches, the Program 2"):
        hand_made.on_every_rank(made, lambda executor: None, OPTIMIZER, schedule=schedule)
