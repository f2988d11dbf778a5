"""Without a barrier before the optimizer every bit is what it is with one, and a rank starts its next step before others have ended."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import phalanx as phx
from phalanx.comm.threads import Delay
from phalanx.models import mlp
from phalanx.run.executor import Executor, Out
from phalanx.run.late import LateOut
from phalanx.run.optimizer import Cosine, Linear
from phalanx.run.precision import LossScale
from phalanx.schedule import Storage, from_program
from phalanx.schedule.account import account
from phalanx.train.config import OptimizerConfig, TrainConfig
from phalanx.train.loop import train
from phalanx.train.metrics import Recorder, StepMetrics

from . import test_torch_optimizer as torchs
from .test_torch_optimizer import IDS, KINDS

MICROBATCHES = 4
STEPS = 5
NORM = 1.2  # gradient norms of these batches are 0.8 to 1.5: some steps are clipped and some are not
NAMES = {"*.up_proj.weight": "mlp embed", "*.up_proj.bias": "mlp", "*.down_proj.weight": "embed mlp"}


def model(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return mlp.MLP(mlp.MLPConfig(inputs=8, hidden=8, inner=16, layers=2, outputs=3, dropout=dropout)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    targets = torch.randint(3, (16,), generator=generator)
    targets[step % 3] = -100
    return {"x": torch.randn(16, 8, generator=generator, dtype=torch.float64).to(dtype), "targets": targets}


def broken(step: int) -> dict[str, Tensor]:
    found = batch(step)
    found["x"][5, 3] = math.nan
    return found


def start(world: phx.LocalWorld | phx.World, barrier: bool, module: nn.Module | None = None, **more: Any) -> phx.Step:
    module = model() if module is None else module
    names = {"names": NAMES, "layout": {"mlp": "tp", "batch": "dp"}} if "tp" in world.mesh.names else {}
    options = {"optimizer": phx.adamw(lr=0.05), "max_norm": NORM, "microbatches": MICROBATCHES, "loss": mlp.loss, **names}
    example = batch(0, next(module.parameters()).dtype)
    return phx.parallelize(module, world, example=example, barrier=barrier, **{**options, **more})


Result = tuple[list[Out], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def plain(step: phx.Step) -> list[Out]:
    return [step(batch(number)) for number in range(STEPS)]


def trained(
    mesh: str, barrier: bool, take: Callable[[phx.Step], list[Out]] = plain, module: nn.Module | None = None, **more: Any
) -> Result:
    """The last step is still open when the weights are asked for."""
    with phx.local(phx.Mesh.parse(mesh), rendezvous=True, timeout=20) as world:
        step = start(world, barrier, module, **more)
        outs = take(step)
        weights = step.state_dict()
        outs = [out.out if isinstance(out, LateOut) else out for out in outs]
        return outs, weights, step.gradients(), step.optimizer_state_dict()


def assert_equal(found: Result, expected: Result) -> None:
    assert found[0] == expected[0]
    for these, those in zip(found[1:], expected[1:], strict=True):
        assert these.keys() == those.keys()
        for name, x in those.items():
            assert torch.equal(these[name], x), name


# The same bits

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank, one microbatch": ("", {"microbatches": 1}),
    "1f1b, cosine": ("pp=2", {"optimizer": phx.adamw(lr=0.05, rate=Cosine(STEPS, warmup=2))}),
    "zb-h2, sgd": ("pp=2", {"schedule": "zb-h2", "optimizer": phx.sgd(lr=0.1, momentum=0.9, rate=Linear(STEPS))}),
    "zb-v": ("pp=2", {"schedule": "zb-v"}),
    "dualpipe": ("pp=2", {"schedule": "dualpipe"}),
    "pp and dp, always clipped": ("pp=2,dp=2", {"schedule": "zb-h2", "max_norm": 0.5}),
    "never clipped": ("pp=2", {"schedule": "zb-h2", "max_norm": None}),
    "tp": ("dp=2,tp=2", {"microbatches": 1}),
    "zero 1": ("dp=2", {"zero": 1}),
    "zero 2": ("pp=2,dp=2", {"zero": 2}),
    "zero 3": ("pp=2,dp=2", {"zero": 3, "schedule": "zb-h1"}),
    "zero 3, one microbatch": ("dp=2", {"zero": 3, "microbatches": 1}),
}


@pytest.mark.filterwarnings("ignore:replicated")
@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_that_of_a_run_with_a_barrier(case: str) -> None:
    mesh, options = CASES[case]
    expected = trained(mesh, True, **options)
    clipped = {out.grad_norm > NORM for out in expected[0][:-1]}
    assert clipped == {True, False}
    assert_equal(trained(mesh, False, **options), expected)


@pytest.mark.parametrize("index", range(len(KINDS)), ids=IDS)
def test_every_torch_optimizer_takes_an_update_back(index: int) -> None:
    """An update with other gradients, undone before the right one is made, leaves no trace: in the first step as in later ones."""

    def run(twice: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        kind, options = KINDS[index]
        with phx.local(phx.Mesh(dp=2), timeout=20) as world:
            step = torchs.start(world, phx.optimizer(kind, **options), zero=0 if kind is optim.Adafactor else 2)
            for executor in step.executors if twice else ():
                executor.optimizer.update = doubled(executor)  # type: ignore[method-assign]
            for number in range(3):
                step(torchs.batch(number))
            return step.state_dict(), step.optimizer_state_dict()

    def doubled(executor: Executor) -> Callable[[float], float]:
        optimizer, update = executor.optimizer, executor.optimizer.update

        def both(scale: float) -> float:
            optimizer.keep(gradients=True)
            update(-3.0)
            optimizer.undo()
            return update(scale)

        return both

    assert_equal(([], *run(True), {}), ([], *run(False), {}))


def test_dropout_is_drawn_again_when_a_step_runs_twice() -> None:
    """And evaluation, watching and the moments look at a complete update, whenever they are asked for."""

    def take(step: phx.Step) -> list[Any]:
        found: list[Any] = []
        for number in range(STEPS):
            found.append(step(batch(number)))
            if number == 0:
                found += [step.evaluate(batch(7)), step.watch("layers.0").sum().item()]
            if number == 2:
                found += [x.sum().item() for x in (*step.gradients().values(), *step.optimizer_state_dict().values())]
        return found

    found = [trained("pp=2,dp=2", barrier, take, model(dropout=0.5), schedule="zb-h2", zero=1) for barrier in (False, True)]
    assert_equal(*found)


def test_a_run_goes_on_from_a_state_that_was_saved_open() -> None:
    """Saved after step 2, which is clipped; loaded over a step that is still open."""

    def take(step: phx.Step) -> list[Out]:
        outs = [step(batch(0)), step(batch(1)), step(batch(2))]
        weights, moments = step.state_dict(), step.optimizer_state_dict()
        step(batch(0))
        step.load_state_dict(weights)
        step.load_optimizer_state_dict(moments)
        return [*outs, step(batch(3)), step(batch(4))]

    with_barrier = trained("pp=2", True, max_norm=NORM)
    assert_equal(trained("pp=2", False, take), with_barrier)


def test_weights_are_put_back_once_no_gather_reads_them() -> None:
    """Of parameters that are gathered ahead of their W, on wires that take their time."""
    torch.manual_seed(0)
    deep = mlp.MLP(mlp.MLPConfig(inputs=8, hidden=8, inner=16, layers=4, outputs=3)).double()
    with phx.local(phx.Mesh(pp=2, dp=2), delay=Delay(0.01), timeout=20) as world:
        step = start(world, False, deep, zero=Storage(3, ("dp",), prefetch=1, keep=2), schedule="zb-h1", max_norm=0.1)
        executor = step.executors[0]
        undo, seen = executor.optimizer.undo, list[bool]()

        def undone() -> None:
            seen.extend(h.done() for n in executor._gathers for h in executor._training.machine.flying.get(n, ([],))[0])
            undo()

        executor.optimizer.undo = undone  # type: ignore[method-assign]
        step(batch(0))
        step(batch(1))
        assert seen and all(seen)


# What is not finite


@pytest.mark.parametrize("zero", [0, 2])
def test_a_step_that_is_not_finite_is_refused_one_call_later(zero: int) -> None:
    """In the same words; the step that was not taken is taken when it is given again."""

    def late(step: phx.Step) -> list[Out]:
        outs = [step(batch(0))]
        assert math.isnan(step(broken(1)).loss)
        with pytest.raises(FloatingPointError) as caught:
            step(batch(2))
        said.append(str(caught.value))
        outs += [step(batch(2)), step(batch(3))]
        return outs

    def early(step: phx.Step) -> list[Out]:
        outs = [step(batch(0))]
        with pytest.raises(FloatingPointError) as caught:
            step(broken(1))
        said.append(str(caught.value))
        return [*outs, step(batch(2)), step(batch(3))]

    said: list[str] = []
    options = {"schedule": "zb-h2", "zero": zero, "module": model(dropout=0.5)}
    assert_equal(trained("pp=2,dp=2", False, late, **options), trained("pp=2,dp=2", True, early, **options))
    sentence = "the loss is not finite; the first tensor that is not is the batch entry 'x'"
    assert said == [f"step 2: {sentence}; no parameter was changed"] * 2


def test_whatever_needs_the_update_refuses_it_once() -> None:
    with phx.local(phx.Mesh(pp=2), timeout=20) as world:
        step = start(world, False)
        before = step.state_dict()
        out = step(broken(0))
        assert math.isnan(out.loss) and math.isnan(out.grad_norm) and not out.skipped
        with pytest.raises(FloatingPointError, match="step 1: the loss is not finite"):
            step.settle()
        assert all(torch.equal(before[name], x) for name, x in step.state_dict().items())
        assert [e.step_number for e in step.executors] == [e.optimizer.steps for e in step.executors] == [0, 0]


def around(
    executor: Executor,
    kind: str,
    *,
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
    first: bool = False,
) -> None:
    """Do something before or after the last action of a kind in a list, or the first."""
    operations = executor._training.operations
    found = [n for n, (_, _, action) in enumerate(operations) if action is not None and action.kind == kind]
    n = found[0 if first else -1]
    waits, operation, action = operations[n]

    def all_of_it() -> Any:
        if before is not None:
            before()
        result = operation()
        if after is not None:
            after()
        return result

    operations[n] = waits, all_of_it, action


def test_a_gradient_of_one_rank_is_named_on_all() -> None:
    """The loss is finite, and no other rank sees anything wrong: they update, and take it back."""

    def refusal(barrier: bool) -> str:
        with phx.local(phx.Mesh(pp=2, dp=2), timeout=20) as world:
            step = start(world, barrier)
            before, parameters, last = step.state_dict(), step.executors[3].parameters, step.program.segments[-1]
            around(
                step.executors[3],
                "REDUCE",
                before=lambda: parameters.accumulators(last.index)[last.params.index("head.bias")][1].fill_(math.inf),
                first=True,
            )
            if not barrier:
                assert math.isfinite(step(batch(0)).loss)
            with pytest.raises(FloatingPointError) as caught:
                step(batch(0))
            assert all(torch.equal(before[name], x) for name, x in step.state_dict().items())
            assert {executor.optimizer.steps + executor.step_number for executor in step.executors} == {0}
            return str(caught.value)

    assert refusal(False) == refusal(True) == "step 1: the gradient of head.bias is not finite; no parameter was changed"


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_overflows_under_a_loss_scale_are_skipped_alike(mesh: str) -> None:
    """2^24 is far too large; growth after two finite steps makes it overflow again. Clipped steps are among the finite ones."""

    def take(step: phx.Step) -> list[Any]:
        outs = [step(batch(number, torch.float32)) for number in range(14)]
        step.settle()
        return [*outs, *(executor.loss_scale for executor in step.executors), step.executors[0].step_number]

    options = {
        "module": model(dropout=0.5, dtype=torch.float32), "precision": "fp16", "zero": 1 if mesh == "dp=2" else 0,
        "loss_scale": LossScale(initial=2.0**24, growth=3.0, interval=2),
    }  # fmt: skip
    expected = trained(mesh, True, take, **options)
    rows = [(out.skipped, out.grad_norm > NORM) for out in expected[0][:14]]
    assert {(True, False), (False, False), (False, True)} <= {(skipped, norm and not skipped) for skipped, norm in rows}
    found = trained(mesh, False, take, **options)
    assert str(found[0]) == str(expected[0])  # norms that are nan are equal as words
    assert_equal(([], *found[1:]), ([], *expected[1:]))


def test_a_norm_that_overflows_float32_clips_by_the_same_number() -> None:
    """Elements of 1e25 square to 1e50. One rank has them, so one rank squares in float64."""

    def take(step: phx.Step) -> list[Out]:
        parameters = step.executors[1].parameters
        last = step.program.segments[-1].index
        around(step.executors[1], "B", after=lambda: [x.fill_(1e25) for x in parameters.accumulators(last)])
        return [step(batch(number, torch.float32)) for number in range(2)]

    expected = trained("pp=2", True, take, module=model(dtype=torch.float32))
    assert all(1e25 < out.grad_norm < 1e27 for out in expected[0])
    assert_equal(trained("pp=2", False, take, module=model(dtype=torch.float32)), expected)


def test_a_batch_that_is_refused_leaves_the_step_before_it_complete() -> None:
    """Without valid tokens, known at the end of the list; of another shape, known before it."""

    def take(step: phx.Step) -> list[Out]:
        outs = [step(batch(0)), step(batch(1)), step(batch(2))]
        empty = {**batch(3), "targets": torch.full((16,), -100)}
        with pytest.raises(ValueError, match="step 4: the batch has 0 valid tokens"):
            step(empty)
        outs.append(step(batch(2)))
        with pytest.raises(ValueError, match="x"):
            step({**batch(3), "x": batch(3)["x"][:8]})
        return [*outs, step(batch(3))]

    assert_equal(trained("pp=2", False, take), trained("pp=2", True, take))


def test_a_rank_that_fails_in_a_step_does_not_lose_the_one_before() -> None:
    """Rank 1 fails before its list begins, the others inside theirs; the step before was clipped, so there was something to redo."""

    def take(step: phx.Step) -> list[Out]:
        outs = [step(batch(0))]
        assert outs[0].grad_norm > NORM
        begin = step.executors[1].parameters.begin

        def failing(*, keep: bool = False) -> None:
            raise LookupError("of rank 1 alone")

        step.executors[1].parameters.begin = failing  # type: ignore[method-assign]
        with pytest.raises(LookupError):
            step(batch(1))
        step.executors[1].parameters.begin = begin  # type: ignore[method-assign]
        return [*outs, step(batch(1)), step(batch(2))]

    assert_equal(trained("pp=2", False, take), trained("pp=2", True, take))


# How often a list runs, and what is seen of it


def begins(step: phx.Step) -> list[int]:
    """How many times rank 0 begins its list, counted from now on."""
    count, begin = [0], step.executors[0].parameters.begin

    def counting(*, keep: bool = False) -> None:
        count[0] += 1
        begin(keep=keep)

    step.executors[0].parameters.begin = counting  # type: ignore[method-assign]
    return count


@pytest.mark.parametrize(("max_norm", "settled", "runs"), [(None, False, 3), (0.5, False, 5), (0.5, True, 3)])
def test_a_list_runs_twice_only_after_a_step_that_was_clipped_and_not_settled(
    max_norm: float | None, settled: bool, runs: int
) -> None:
    with phx.local(phx.Mesh(pp=2), timeout=20) as world:
        step = start(world, False, max_norm=max_norm)
        count = begins(step)
        for number in range(3):
            step(batch(number))
            if settled:
                step.settle()
        assert count[0] == runs


def test_a_late_result_is_an_out() -> None:
    with phx.local(phx.Mesh(dp=2), timeout=20) as world:
        late, early = start(world, False)(batch(0)), start(world, True)(batch(0))
    assert isinstance(late, Out) and late == early and early == late and hash(late) == hash(early) and late.out == early
    assert (late.loss, late.grad_norm, late.tokens, late.lr, late.skipped) == (
        early.loss, early.grad_norm, early.tokens, early.lr, early.skipped,
    )  # fmt: skip
    assert f"loss={early.loss}" in repr(late) and late != replace(early, tokens=0)


def test_a_recorded_step_has_every_action_once_although_it_ran_twice() -> None:
    with phx.local(phx.Mesh(pp=2), timeout=20) as world:
        step = start(world, False, max_norm=0.5, schedule="zb-h2")
        step(batch(0))
        with step.recording() as events:
            step(batch(1))
            step(batch(2))
        with step.recording() as others:
            step(batch(3))
    for rank, actions in enumerate(step.schedule.ranks):
        assert sorted(e.name for e in events if e.rank == rank) == sorted(2 * [str(a) for a in actions])
    norms = [[event for event in events if event.rank == rank and event.name == "NORM"] for rank in range(2)]
    for first, second in zip(*norms, strict=True):
        # Both end when the later of the two has been issued, although neither rank waited for that.
        assert min(first.end, second.end) >= max(first.start, second.start)
    assert account(step.schedule, from_program(step.program, late=True), others).span_seconds > 0


# A rank goes on


class Gate:
    """Rank 1's last gradient of step 0 waits until rank 0 has begun step 1."""

    def __init__(self, seconds: float) -> None:
        self.begun, self.seconds, self.was_open = Event(), seconds, False

    def steps(self, executor: Executor) -> None:
        if executor.world.rank == 0:
            around(executor, "F", before=lambda: executor.step_number == 1 and self.begun.set(), first=True)
        else:
            around(executor, "W", before=lambda: executor.step_number == 0 and self._pass())
        for number in range(3):
            executor.step(batch(number))
        executor.settle()

    def _pass(self) -> None:
        self.was_open = self.begun.wait(self.seconds)


@pytest.mark.parametrize(("barrier", "seconds"), [(False, 20.0), (True, 0.2)])
def test_a_rank_begins_its_next_step_while_another_still_computes(barrier: bool, seconds: float) -> None:
    gate = Gate(seconds)
    with phx.local(phx.Mesh(pp=2), rendezvous=True, timeout=20) as world:
        step = start(world, barrier, schedule="zb-h2", max_norm=None)
        world.run(lambda rank: gate.steps(step.executors[rank.rank]))
    assert gate.was_open != barrier


def test_over_processes_too(tmp_path: Path) -> None:
    """The same bits, and rank 0 in its second step while rank 1, another process, is held in its first."""
    source, ranks = Path(__file__).parents[2] / "src", Path(__file__).with_name("late_ranks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, str(ranks), str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-c", "import sys; from phalanx.train.launch import launch; launch(2, sys.argv[1:])", *command],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert found == [{"equal": True, "was_open": True, "clipped": [True, False]}] * 2


# The training loop


def test_the_loop_asks_for_numbers_once_the_next_step_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    take, record = phx.Step.__call__, Recorder.record

    def taking(*arguments: Any, **options: Any) -> Out:
        called.append("step")
        return take(*arguments, **options)

    def recording(self: Recorder, row: StepMetrics) -> None:
        called.append(f"record {row.step}")
        record(self, row)

    monkeypatch.setattr(phx.Step, "__call__", taking)
    monkeypatch.setattr(Recorder, "record", recording)
    rows = {}
    for barrier in (True, False):
        config = TrainConfig(model="mlp", mesh="pp=2", microbatches=2, batch=4, steps=3, barrier=barrier, out=tmp_path)
        with phx.local(config.parsed_mesh()) as world:
            train(config, world)
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        rows[barrier] = [{key: line[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")} for line in lines]
    assert called[:6] == ["step", "record 1", "step", "record 2", "step", "record 3"]
    assert called[6:] == ["step", "step", "record 1", "step", "record 2", "record 3"]
    assert rows[True] == rows[False] and len(rows[False]) == 3


def test_the_loop_stops_at_a_loss_that_is_no_number(tmp_path: Path) -> None:
    """Every step before it is written; whether it is the last of the run or not."""
    written = {}
    for barrier in (True, False):
        settings = OptimizerConfig(lr=1e30, warmup=1, max_norm=None)
        config = TrainConfig(model="mlp", steps=20, batch=4, optimizer=settings, barrier=barrier, out=tmp_path)
        for steps in (20, None):
            config = replace(config, steps=steps or len(written[barrier, 20]) + 1)
            with phx.local(config.parsed_mesh()) as world, pytest.raises(FloatingPointError, match=r"step \d+: .* not finite"):
                train(config, world)
            written[barrier, steps] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert 0 < len(written[True, 20]) < 19 and {len(lines) for lines in written.values()} == {len(written[True, 20])}


# What cannot be


class Ours(optim.SGD):
    pass


def test_what_cannot_be_taken_back_is_refused() -> None:
    with phx.local(phx.Mesh()) as world:
        with pytest.raises(ValueError, match=re.escape("test_late.Ours keeps outside of its states")):
            start(world, False, optimizer=phx.optimizer(Ours, lr=0.1))
        made = start(world, True).schedule
        with pytest.raises(ValueError, match="made with a barrier before the optimizer, but barrier=False"):
            start(world, False, schedule=made)
        with pytest.raises(ValueError, match="made without a barrier before the optimizer, but barrier=True"):
            start(world, True, schedule=replace(made, late=True))
        assert start(world, False, schedule=start(world, False).schedule).schedule.late
