"""What people get wrong, end to end: a clear error before any rank computes, with names, numbers and the user's own line.

Where each is proved, if not here:

    mesh product that is not the number of ranks         comm/test_world
    names: no match, unknown, disagree, do not divide    derive/test_names; through parallelize here
    what export cannot trace, or whose gradients it      derive/test_capture_reject; a key-value cache, hooks of autograd's
      would change                                         nodes and of saved tensors, and memory of a forward here
    a loss that is neither (sum, count) nor a mean       derive/test_capture_loss; (mean, count) here
    ranks that start from different weights              run/test_processes
    unknown model or configuration key                   train/test_config, cli/test_cli
    an empty or unreadable corpus                        train/test_data; through the command here
    ids beyond the vocabulary                            run/test_step, run/test_batch; labels here
    more stages than blocks, microbatches, batches       here
    hooks and prints that capture loses                  here: warned once, at the user's line
    not a number while running                           run/test_executor; named through the model here
    ranks that die, raise, hang or never come            test_faults
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as phx
from phalanx.cli import main
from phalanx.comm.local import LocalWorld

VOCAB, HIDDEN = 16, 8
DP = phx.Mesh(dp=2)
HERE = __file__


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Small(nn.Module):
    """A linear layer, and whatever a test does to its output."""

    def __init__(self, then: Callable[[Small, Tensor], Tensor] = lambda self, x: x) -> None:
        super().__init__()
        self.linear, self.then, self.calls = nn.Linear(HIDDEN, HIDDEN), then, 0
        self.register_buffer("memory", torch.zeros(4, HIDDEN))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x))


NAMES = {
    "embed.weight": "vocab embed",
    "blocks.*.up.weight": "mlp embed",
    "blocks.*.up.bias": "mlp",
    "blocks.*.down.weight": "embed mlp",
    "blocks.*.down.bias": "embed",
    "head.weight": "vocab embed",
    "head.bias": "vocab",
    "tokens": "batch seq",
    "labels": "batch seq",
}


def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), (labels != -100).sum()


def batch(samples: int = 8, seq: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (samples, seq), generator=generator) for name in ("tokens", "labels")}


def squares(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return (outputs - batch["y"]).square().sum(), torch.ones_like(batch["y"][:, 0]).sum()


POINTS = {"x": torch.ones(4, HIDDEN), "y": torch.zeros(4, HIDDEN)}


def parallelize(mesh: phx.Mesh = DP, model: Any = None, **options: Any) -> phx.Step:
    options = {"loss": loss, "example": batch(), **options}
    with phx.local(mesh, timeout=20) as world:
        return phx.parallelize(model if model is not None else Model(), world, **options)


def line_marked(mark: str) -> int:
    """Number of the line of this file that ends in the comment `# mark`."""
    return next(n for n, line in enumerate(Path(HERE).read_text().splitlines(), 1) if line.endswith("# " + mark))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": phx.Mesh(pp=5)}, r"5 pipeline stages need at least as many segments and at least 1 stage; there are 4"),
        ({"microbatches": 3}, r"'tokens' of shape \(8, 4\) does not split into 3 microbatches; 2 or 4 would"),
        ({"microbatches": 8}, r"dimension 0 \(batch\) of size 1 in one microbatch does not divide over dp of 2 ranks; 1 would"),
        ({"microbatches": 0}, r"microbatches is 0; it is a whole number of at least 1"),
        ({"microbatches": 2.0}, r"microbatches is 2\.0; it is a whole number"),
        ({"example": batch(3)}, r"'tokens': dimension 0 \(batch\) of size 3 .* does not divide over dp of 2 ranks; 1 or 3 would"),
        ({"example": batch(0)}, r"'tokens' of shape \(0, 4\) is empty"),
        ({"example": {**batch(), "labels": batch(4)["labels"]}, "microbatches": 2}, r"differ along dimension 0.*tokens 8, labels 4"),
        ({"example": {**batch(), "ids": ["a", "b"]}}, r"batch entry 'ids' is a list; entries are tensors"),
        ({"example": {**batch(), "scale": torch.tensor(1.0)}}, r"'scale' is a single number; dimension 0 of every entry"),
        ({"example": [batch()]}, r"the example is a list; it must be a dict of tensors"),
        ({"example": {"token": batch()["tokens"], "labels": batch()["labels"]}}, r"forward takes tokens and the batch has token, labels"),
        ({"model": lambda tokens: tokens}, r"the model is a function; it must be a torch\.nn\.Module"),
        ({"model": Model().requires_grad_(False)}, r"does not depend on any trainable parameter"),
        ({"schedule": "1f1"}, r"there is no schedule '1f1'; did you mean '1f1b'"),
        ({"recompute": "ful"}, r"recompute is 'ful'"),
        ({"max_norm": float("nan")}, r"max_norm is nan; it must be above 0"),
        ({"optimizer": torch.optim.SGD(Model().parameters())}, r"optimizer is a SGD; it must be phx\.adamw"),
        ({"names": ["batch"]}, r"names is a list; it must be a dict"),
        ({"names": {"tokens": ["batch", "seq"]}}, r"names has 'tokens': \['batch', 'seq'\]"),
        ({"layout": "batch=dp"}, r"layout is a str; it must be a dict"),
        ({"layout": {"batch": 2}}, r"layout has 'batch': 2; a value is the name of a mesh axis"),
        ({"layout": {"batch": "dp+dp"}}, r"layout batch=dp\+dp names an axis twice"),
        ({"layout": {"batch": "pd"}}, r"no axis 'pd'; the closest is 'dp'"),
        ({"names": {**NAMES, "*.upp.weight": "mlp embed"}}, r"'\*\.upp\.weight' matches no parameter.*closest is 'blocks\.\d\.up\.weight'"),
        ({"names": NAMES, "layout": {"mpl": "dp"}}, r"layout places 'mpl', which names no dimension; the closest is 'mlp'"),
        ({"mesh": phx.Mesh(tp=3), "names": NAMES, "layout": {"mlp": "tp"}},
         r"blocks\.0\.up\.weight: dimension 0 \(mlp\) of size 32 does not divide over tp of 3 ranks; 2 or 4 would"),
        ({"blocks": "layers.*"}, r"'layers\.\*' matches no module"),
        ({"loss": "mean"}, r"the loss is a str; it must be a function of \(outputs, batch\)"),
        ({"loss": lambda outputs: outputs}, rf"the loss <lambda>\(outputs\) at {re.escape(HERE)}:\d+ is called as loss\(outputs, batch\)"),
        ({"loss": lambda outputs, batch: outputs.mean()}, rf"not a mean cross entropy \(it is aten.mean.* at {re.escape(HERE)}:\d+\)"),
        ({"loss": lambda outputs, batch: (F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten()), (batch["labels"] > 0).sum())},
         rf"at {re.escape(HERE)}:\d+: the loss returned \(mean, count\), not \(sum, count\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_before_any_rank_computes(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.compile(said, re.DOTALL)):
        parallelize(**options)


@pytest.mark.parametrize("world", [DP, None, "dp=2"])
def test_a_world_is_a_world(world: Any) -> None:
    for make in (phx.parallelize, phx.shard):
        with pytest.raises(ValueError, match=r"the world is a \w+; make one with phx\.init\(mesh\).*phx\.local"):
            make(Model(), world, example=batch(), loss=loss)


@pytest.mark.parametrize("option", [{"lr": -1.0}, {"lr": "3e-4"}, {"lr": float("nan")}, {"weight_decay": -0.1}])
def test_a_rate_is_a_number(option: dict[str, Any]) -> None:
    (name,) = option
    for make in (phx.adamw, phx.sgd):
        with pytest.raises(ValueError, match=f"{name} is .*; it must be a number of at least 0"):
            make(**option)


# What a graph would silently get wrong


def hook_on_a_node(model: Small, x: Tensor) -> Tensor:
    x.grad_fn.register_hook(lambda inputs, outputs: inputs)  # hook_on_a_node
    return x


def prehook_on_a_node(model: Small, x: Tensor) -> Tensor:
    x.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))  # prehook_on_a_node
    return x


def hook_on_several(model: Small, x: Tensor) -> Tensor:
    torch.autograd.graph.register_multi_grad_hook([x], lambda grads: None)  # hook_on_several
    return x


def hooks_on_what_is_saved(model: Small, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda packed: packed):
        return x.sin()  # hooks_on_what_is_saved


def a_buffer_replaced(model: Small, x: Tensor) -> Tensor:
    model.memory = model.memory + 1
    return x * model.memory


def a_key_value_cache(model: Small, x: Tensor) -> Tensor:
    model.memory[:2] = x[:2].detach()  # a_key_value_cache
    return x + model.memory


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (hook_on_a_node, "reads the grad_fn of an activation"),
        (prehook_on_a_node, "reads the grad_fn of an activation"),
        (hook_on_several, "calls register_hook on an activation"),
        (hooks_on_what_is_saved, "runs under saved_tensors_hooks"),
        (a_key_value_cache, "changes the buffer 'memory' in place"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_what_export_would_lose_of_gradients_and_state_is_refused(function: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        parallelize(model=Small(function), example=POINTS, loss=squares)
    assert f"{HERE}:{line_marked(function.__name__)}" in str(caught.value)


def test_a_buffer_that_the_forward_replaces_is_refused() -> None:
    """Export gives such a graph without a word; every step would read the first value."""
    with pytest.raises(ValueError, match=r"module 'Small' gives its buffer 'memory' a new value in its forward"):
        parallelize(model=Small(a_buffer_replaced), example=POINTS, loss=squares)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.seen = nn.Linear(HIDDEN, HIDDEN), 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # counting
        self.seen.append(self.calls)
        return self.linear(x) * self.calls


def told(fn: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn()
    return [w for w in caught if w.category is UserWarning and Path(w.filename).name != "contextlib.py"]


def test_what_a_forward_remembers_is_warned_of_and_put_back() -> None:
    model = Counting()
    found = [str(w.message) for w in told(lambda: parallelize(model=model, example=POINTS, loss=squares))]
    assert len(found) == 2
    assert f"changes its attribute 'calls' in its forward at {HERE}:{line_marked('counting')}" in found[0]
    assert "'seen'" in found[1]
    assert model.calls == 0 and model.seen == [0]


@pytest.mark.parametrize("make", ["parallelize", "shard"])
def test_what_capture_loses_is_warned_of_once_at_the_users_line(make: str) -> None:
    def prints(model: Small, x: Tensor) -> Tensor:
        print("inside")  # noqa: T201 - what is warned of
        return x

    def build() -> object:
        with phx.local(DP, timeout=20) as world:
            return getattr(phx, make)(model, world, example=POINTS, loss=squares)  # built_here

    model = Small(prints)
    model.linear.register_forward_hook(lambda *_: None)
    model.linear.register_full_backward_hook(lambda *_: None)
    found = told(build)
    for said in ("printed while it was captured", "'linear' has forward hooks", "'linear' has backward hooks"):
        (warning,) = [w for w in found if said in str(w.message)]
        assert (warning.filename, warning.lineno) == (HERE, line_marked("built_here"))


def test_an_axis_that_splits_nothing_is_warned_of() -> None:
    (warning,) = told(lambda: parallelize(phx.Mesh(data=2)))
    assert "mesh axis data splits nothing, so its 2 ranks all do the same work" in str(warning.message)
    assert not told(lambda: parallelize(phx.Mesh(data=2, pp=2), names=NAMES, layout={"batch": "data"}))
    assert not told(lambda: parallelize(phx.Mesh(dp=2, tp=1)))


# While running


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (None, "the batch is a NoneType; it must be a dict"),
        (torch.zeros(2), "the batch is a Tensor; it must be a dict"),
        ([batch()], "1 batches were given"),
        ({"token": batch()["tokens"], "labels": batch()["labels"]}, "no entry 'tokens'.*did you mean 'token'"),
        ({**batch(), "tokens": batch()["tokens"].float()}, r"'tokens' is torch\.float32; the model was captured with torch\.int64"),
        ({**batch(), "tokens": batch()["tokens"].numpy()}, "'tokens' is a ndarray; it must be a tensor"),
        ({**batch(), "tokens": batch()["tokens"].to("meta")}, "'tokens' is on the device meta, so it has no values"),
        ({**batch(), "tokens": batch()["tokens"].to_sparse()}, r"'tokens' is stored as torch\.sparse_coo"),
        (batch(8, 5), r"'tokens' has shape \(8, 5\); the global batch of this step is \(8, 4\)"),
        (batch(0), r"'tokens' has shape \(0, 4\)"),
        ({**batch(), "labels": batch()["labels"] + 1}, r"'labels' holds 16 at \[1, 1\]; valid are 0 to 15, or -100 to ignore one"),
        ({**batch(), "labels": torch.full((8, 4), -100)}, "step 1: the batch has 0 valid tokens"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_changes_nothing(bad: Any, said: str) -> None:
    """A step that failed is as if it had not been taken: the next gives what the first would have given."""
    with phx.local(phx.Mesh(pp=2, dp=2), timeout=20) as world:
        step = phx.parallelize(Model().double(), world, example=batch(), loss=loss, microbatches=2)
        before = step.state_dict()
        expected = step.evaluate(batch())
        with pytest.raises(ValueError, match=said):
            step(bad)
        assert all(torch.equal(x, before[name]) for name, x in step.state_dict().items())
        assert step(batch()).loss == expected.loss


def test_a_count_that_is_no_number_is_blamed_on_the_count() -> None:
    def no_count(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return loss(outputs, batch)[0], (batch["labels"] != -100).sum() * float("nan")

    with phx.local(DP, timeout=20) as world, pytest.raises(ValueError, match="step 1: the batch has nan valid tokens"):
        phx.parallelize(Model(), world, example=batch(), loss=no_count)(batch())


class Overflowing(Model):
    """Its second block takes the logarithm of what may be negative."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        return self.head(self.blocks[1](x.log()))


@pytest.mark.parametrize("mesh", ["", "pp=2,dp=2"])
def test_the_first_tensor_that_is_not_finite_is_named(mesh: str) -> None:
    """Only one rank may see it; all must say the same, and nothing may have changed."""
    with phx.local(phx.Mesh.parse(mesh), timeout=20) as world:
        step = phx.parallelize(Model(), world, example=batch(), loss=loss, microbatches=2)
        step(batch())
        state = step.state_dict()
        broken = {name: x.clone() for name, x in state.items()}
        broken["blocks.1.down.weight"][0, 0] = float("nan")
        step.load_state_dict(broken)
        with pytest.raises(
            FloatingPointError, match=r"step 2: the loss is not finite; .* the parameter blocks\.1\.down\.weight;"
        ):
            step(batch())
        step.load_state_dict(state)
        assert step(batch()).loss > 0


def test_what_is_made_in_the_forward_is_named_by_its_segment() -> None:
    with phx.local(DP, timeout=20) as world:
        step = phx.parallelize(Overflowing(), world, example=batch(), loss=loss)
        with pytest.raises(FloatingPointError, match=r"step 1: the loss is not finite; .* the output of blocks\.0"):
            step(batch())


def test_an_input_that_is_not_finite_is_named() -> None:
    with phx.local(DP, timeout=20) as world:
        step = phx.parallelize(Small(), world, example=POINTS, loss=squares)
        bad = {**POINTS, "x": POINTS["x"].clone()}
        bad["x"][3, 1] = float("inf")
        with pytest.raises(FloatingPointError, match="the first tensor that is not is the batch entry 'x'"):
            step(bad)


def test_ranks_of_a_local_world_do_not_capture() -> None:
    """Their threads share one model, and torch traces in one thread at a time."""
    with phx.local(DP, timeout=20) as world:
        for make in (phx.parallelize, phx.shard):
            with pytest.raises(ValueError, match=r"this World is rank \d of a local world of 2 ranks"):
                world.run(lambda w, make=make: make(Model(), w, example=batch(), loss=loss))


def test_a_step_in_several_threads_runs_once_at_a_time() -> None:
    with phx.local(DP, timeout=20) as world:
        step = phx.parallelize(Model(), world, example=batch(), loss=loss)
        inside, go = threading.Event(), threading.Event()

        def hold(w: object) -> None:
            inside.set()
            assert go.wait(20)

        other = threading.Thread(target=lambda: world.run(hold))
        other.start()
        assert inside.wait(20)
        with pytest.raises(ValueError, match="already running"):
            step(batch())
        go.set()
        other.join()
        assert step(batch()).loss > 0


def test_two_steps_share_a_world_and_two_worlds_a_process() -> None:
    """None disturbs another: each gives what it gives alone."""
    torch.manual_seed(0)
    models = [Model(2).double(), Model(3).double()]

    def alone(model: Model) -> list[float]:
        with phx.local(DP, timeout=20) as world:
            step = phx.parallelize(model, world, example=batch(), loss=loss)
            return [step(batch()).loss for _ in range(2)]

    expected = [alone(model) for model in models]
    with phx.local(DP, timeout=20) as shared, phx.local(phx.Mesh(data=2, model=2), timeout=20) as other:
        steps = [phx.parallelize(model, shared, example=batch(), loss=loss) for model in models]
        layout = {"batch": "data", "mlp": "model", "vocab": "model"}
        steps.append(phx.parallelize(models[0], other, example=batch(), loss=loss, names=NAMES, layout=layout))
        got = [[step(batch()).loss for step in steps] for _ in range(2)]
    for column, want in zip(zip(*got, strict=True), (*expected, expected[0]), strict=True):
        assert column == pytest.approx(want, rel=1e-13)  # float64 sums in another order


def test_a_world_is_closed_once_and_stays_closed() -> None:
    before = threading.active_count()
    world = LocalWorld(DP, timeout=20)
    step = phx.parallelize(Model(), world, example=batch(), loss=loss)
    step(batch())
    world.close()
    world.close()
    with pytest.raises(ValueError, match="local world of mesh dp=2 is closed"):
        step(batch())
    assert not [t for t in threading.enumerate() if t.name.startswith("phx-rank-")]
    assert threading.active_count() <= before + 1  # torch starts a thread of its own at its first capture


def test_an_error_that_all_ranks_share_is_told_once() -> None:
    with phx.local(phx.Mesh(dp=4), timeout=20) as world:
        turn = threading.Barrier(4)

        def mistaken(w: object) -> None:
            turn.wait()
            raise LookupError("the same")

        with pytest.raises(LookupError) as caught:
            world.run(mistaken)
    (note,) = caught.value.__notes__
    assert re.fullmatch(r"raised on rank \d, and likewise on \d, \d, \d", note)


def test_an_empty_corpus_is_one_line_at_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.txt"
    path.touch()
    assert main(["train", "--data", str(path), "--steps", "1", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(path) in said


def test_a_model_in_evaluation_mode_is_trained_and_left_as_it_was() -> None:
    model = Model().eval()
    with phx.local(DP, timeout=20) as world:
        assert phx.parallelize(model, world, example=batch(), loss=loss)(batch()).loss > 0
    assert not any(module.training for module in model.modules())
