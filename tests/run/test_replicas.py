"""Copies that differ by one bit on one rank are told, whatever they are copies of; equal ones never are.

The model has one of everything: a tied embedding, parameters that an axis splits and whole ones, a frozen one, a buffer and a table.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as phx
from phalanx.run.executor import Executor
from phalanx.run.replicas import Copy, ReplicaError, check_replicas, checksum, copies, odd_words
from phalanx.run.step import Step
from phalanx.schedule import Storage

pytestmark = pytest.mark.filterwarnings("ignore:replicated, since no name matches")
VOCAB, WIDTH, INNER, SEQ = 23, 12, 20, 6
NAMES = {"*.up.weight": "mlp embed", "*.down.weight": "embed mlp"}
STEPS_EACH = 15
"""Steps of each of the runs below, of which 14 are made at every change: 200 together."""
NIGHTLY = ("tied over the ends of four", "tied, zero 3", "zero 2 with copies", "bf16, zero 2", "momentum")
"""The others are much like one of those."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)
        self.fixed = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x) + places.to(x.dtype)))) * self.scale.to(x.dtype) * self.fixed


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        places = torch.outer(torch.arange(SEQ), torch.arange(1, WIDTH + 1)).to(x.dtype).cos()
        for block in self.blocks:
            x = block(x, places)
        return F.linear(x, self.embed.weight)


def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    return total, torch.ones_like(batch["targets"]).sum()


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randint(0, VOCAB, (8, SEQ), generator=generator) for key in ("tokens", "targets")}


@dataclass(frozen=True)
class Run:
    """A way to run the model. `held` are the kinds of copies that it must compare, with their axes, by a name that has them."""

    mesh: str
    options: dict[str, Any]
    held: dict[tuple[str, str], str]
    layout: dict[str, Any] = field(default_factory=lambda: {"batch": "dp"})


EMBED, NORM, UP, DOWN = "embed.weight", "blocks.1.norm.weight", "blocks.1.up.weight", "blocks.0.down.weight"
FIXED, SCALE = "blocks.0.fixed", "blocks.1.scale"
REP, SPLIT = {"batch": ("rep", "dp")}, {"batch": "dp", "mlp": "tp"}
DP = Storage(1, ("dp",))
ADAMW = ("parameter", "exp_avg", "exp_avg_sq")
RUNS = {
    "dp": Run(
        "dp=4",
        {},
        {(EMBED, kind): "dp" for kind in ADAMW}
        | {(FIXED, "parameter"): "dp", (SCALE, "buffer"): "dp", ("step number", "number"): "dp"},
    ),
    "dp tp": Run(
        "dp=2,tp=2",
        {},
        {(UP, kind): "dp" for kind in ADAMW}
        | {(DOWN, "parameter"): "dp", (NORM, "exp_avg"): "dp+tp", (SCALE, "buffer"): "dp+tp", (EMBED, "parameter"): "dp+tp"},
        SPLIT,
    ),
    "tied over pp": Run(
        "pp=2,dp=2",
        {"microbatches": 2},
        {(EMBED, kind): "pp+dp" for kind in ADAMW} | {(NORM, "parameter"): "dp", ("optimizer's step", "number"): "pp+dp"},
    ),
    "tied over pp alone": Run("pp=2", {"microbatches": 2}, {(EMBED, kind): "pp" for kind in ADAMW}, {}),
    "tied over the ends of four": Run("pp=4", {"microbatches": 4}, {(EMBED, kind): "pp" for kind in ADAMW}, {}),
    "tied, zero 1": Run("pp=2,dp=2", {"microbatches": 2, "zero": 1}, {(EMBED, kind): "pp" for kind in ADAMW}),
    "tied, zero 3": Run("pp=2,dp=2", {"microbatches": 2, "zero": 3}, {(EMBED, kind): "pp" for kind in ADAMW}),
    "two copies of the model": Run(
        "pp=2",
        {"schedule": "dualpipe", "microbatches": 4},
        {(UP, kind): "pp" for kind in ADAMW} | {(SCALE, "buffer"): "pp"},
        {},
    ),
    **{
        f"zero {level} with copies": Run(
            "rep=2,dp=2",
            {"zero": replace(DP, level=level)},
            {(name, kind): "rep" for name in (EMBED, UP) for kind in ADAMW}
            | {(SCALE, "buffer"): "rep+dp"}
            | ({(UP, "gathered"): "rep+dp"} if level < 3 else {}),
            REP,
        )
        for level in (1, 2, 3)
    },
    "zero 1": Run("dp=4", {"zero": 1}, {(UP, "gathered"): "dp", (FIXED, "parameter"): "dp", (SCALE, "buffer"): "dp"}),
    "bf16": Run("dp=2", {"precision": "bf16"}, {(UP, "master"): "dp", (UP, "parameter"): "dp", (UP, "exp_avg"): "dp"}),
    "bf16, zero 2": Run("rep=2,dp=2", {"precision": "bf16", "zero": replace(DP, level=2)}, {(UP, "master"): "rep"}, REP),
    "fp16": Run("dp=2", {"precision": "fp16"}, {("loss scale", "number"): "dp", ("skipped steps", "number"): "dp"}),
    "momentum": Run("dp=2", {"optimizer": phx.sgd(momentum=0.9)}, {(UP, "momentum"): "dp"}),
    "without a barrier": Run("dp=2", {"barrier": False}, {(UP, kind): "dp" for kind in ADAMW}),
    "torch, by elements": Run(
        "dp=2",
        {"optimizer": phx.optimizer(torch.optim.NAdam)},
        {(UP, "exp_avg"): "dp", (f"optimizer's {UP}/mu_product", "number"): "dp"},
    ),
    "torch, whole": Run(
        "dp=2", {"optimizer": phx.optimizer(torch.optim.Adafactor)}, {(UP, "row_var"): "dp", (NORM, "variance"): "dp"}
    ),
}


@contextmanager
def running(run: Run) -> Any:
    torch.manual_seed(0)
    with phx.local(phx.Mesh.parse(run.mesh), rendezvous=True) as world:
        step = phx.parallelize(
            Tied(), world, example=batch(0), loss=loss, names=NAMES, layout=run.layout, max_norm=0.5,
            **{"optimizer": phx.adamw(lr=1e-2), **run.options},
        )  # fmt: skip
        yield step, world


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in RUNS])
def test_one_bit_on_one_rank_is_told_and_equal_copies_never_are(name: str) -> None:
    generator, run = random.Random(name), RUNS[name]
    with running(run) as (step, _):
        step.each(check_replicas)
        for number in range(STEPS_EACH):
            step(batch(generator.randrange(10**6)))
            step.each(check_replicas)
            if number == 1:
                held = [
                    copy
                    for executor in step.executors
                    for copy in copies(executor)
                    if copy.value is not None and len(copy.value)
                ]
                found = {(copy.name, copy.kind): "+".join(copy.axes) for copy in held}
                assert found.items() >= run.held.items()
                others = generator.sample(sorted(found.keys() - run.held.keys()), min(5, len(found.keys() - run.held.keys())))
                for label in (*run.held, *others):
                    assert_told(step, label, found[label], generator)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_every_schedule_storage_and_recomputation_keeps_copies_equal() -> None:
    """The covering set of the options matrix and some of its other cases, with a fault in every kind of copy."""
    pytest.importorskip("transformers")
    from tests.matrix.test_options import CASES, EVERY_CHANGE, config_of, model_of, module_of

    from phalanx.train.assembly import parallel_step

    generator = random.Random(0)
    for case in (*EVERY_CHANGE, *generator.sample(CASES, 20)):
        model = model_of(case)
        with phx.local(phx.Mesh.parse(case.mesh), rendezvous=True) as world:
            step = parallel_step(config_of(case, zero=case.zero, recompute=case.recompute), world, model, module_of(model))
            for number in range(3):
                step(model.example(model.batch, model.seq, number))
                step.each(check_replicas)
            by_kind = {}
            for copy in [copy for executor in step.executors for copy in copies(executor)]:
                if copy.value is not None and len(copy.value) and copy.kind != "number":
                    by_kind.setdefault(copy.kind, []).append(copy)
            for found in by_kind.values():
                copy = generator.choice(found)
                assert_told(step, (copy.name, copy.kind), "+".join(copy.axes), generator)
            step.each(check_replicas)


def assert_told(step: Step, label: tuple[str, str], axes: str, generator: random.Random) -> None:
    """Change one bit of one of the copies on a rank that has one. The error must say what was done, and go when it is undone."""
    owners = [(executor, copy) for executor in step.executors for copy in copies(executor) if (copy.name, copy.kind) == label]
    executor, copy = generator.choice(
        [(executor, copy) for executor, copy in owners if copy.value is not None and len(copy.value)]
    )
    assert copy.value is not None
    rank, mesh = executor.world.rank, executor.world.mesh
    alike = [e.world.rank for e, other in owners if is_copy(other, copy, e, executor)]
    if label[1] == "number":
        change, undo = changed_number(executor, label[0])
    else:
        change = undo = lambda: flip(copy.value, element, bit)
    element, bit = generator.randrange(len(copy.value)), generator.randrange(8 * copy.value.element_size())
    before = shown(copy.value[element])
    if len(alike) == 1:  # nobody else has it: nothing can be known
        return
    change()
    step_number = "after step" if label[1] == "number" else f"after step {executor.step_number}: "
    try:
        with pytest.raises(ReplicaError, match=step_number) as told:
            step.each(check_replicas)
    finally:
        undo()
    error = told.value
    if "/" in label[0]:  # a number of all parameters of a group, of which the first is named
        assert error.name.partition("/")[2] == label[0].partition("/")[2]
    else:
        assert (error.name, error.kind) == label
    assert error.ranks == ((rank,) if len(alike) > 2 else tuple(alike)), (error, alike)
    other = next(r for r in map(int, re.findall(r" on rank (\d+)", str(error))) if r != rank)
    assert other in alike
    coordinates = [mesh.coordinates(r) for r in (rank, other)]
    assert error.axis == "+".join(axis for axis in mesh.names if coordinates[0][axis] != coordinates[1][axis])
    assert set(error.axis.split("+")) <= set(axes.split("+"))
    if label[1] != "number":
        assert f"{before} on rank {other}" in str(error)
        assert_names_the_element(step, error, before)


def assert_names_the_element(step: Step, error: ReplicaError, before: str) -> None:
    """What is read at that index of the global tensor, from any rank, is what the error calls the others' value."""
    if error.kind not in ("parameter", "exp_avg", "exp_avg_sq", "momentum", "buffer"):
        return
    place = re.search(r"first at element \(([\d, ]+)\)", str(error))
    assert place is not None
    index = tuple(map(int, place[1].split(", ")))
    if error.kind in ("parameter", "buffer"):
        state = step.state_dict()[error.name]
        described = step.program.parameters.get(error.name) or step.program.buffers[error.name]
    else:
        state = step.optimizer_state_dict()[f"{error.name}/{error.kind}"]
        described = None
    value = state[index] if described is None else state[index].to(described.dtype)
    assert shown(value) == before


def is_copy(other: Copy, copy: Copy, there: Executor, here: Executor) -> bool:
    """Whether two ranks have copies of the same elements: where the rank lies on the axes that hold none is the same."""
    apart = [axis for axis in here.world.mesh.names if axis not in copy.axes]
    same = all(there.world.coordinates[axis] == here.world.coordinates[axis] for axis in apart)
    return same and other.slice == copy.slice and other.value is not None


def flip(value: Tensor | None, element: int, bit: int) -> None:
    assert value is not None
    width = value.element_size()
    data = value.view(torch.uint8)
    data[element * width + bit // 8] ^= 1 << bit % 8


def shown(element: Tensor) -> str:
    width = element.element_size()
    bits = int.from_bytes(bytes(element.clone().reshape(1).view(torch.uint8).tolist()), "little")
    return f"{float(element):.9g} (bits {bits:0{2 * width}x})"


def changed_number(executor: Executor, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """A way to change a number of a run, and to put it back."""
    optimizer, scale, number = executor.optimizer, executor.loss_scale, executor.step_number
    if name == "step number":
        return lambda: executor.seek(number + 1), lambda: executor.seek(number)
    if attribute := {"optimizer's step": "steps", "optimizer's before": "before"}.get(name):
        was = getattr(optimizer, attribute)
        return lambda: setattr(optimizer, attribute, was + 1), lambda: setattr(optimizer, attribute, was)
    if scale is not None:
        key = {"loss scale": "value", "loss scale's finite steps": "finite", "skipped steps": "skipped"}[name]
        wrong = replace(scale, **{key: getattr(scale, key) + 1})
        return lambda: setattr(executor, "loss_scale", wrong), lambda: setattr(executor, "loss_scale", scale)
    parameter, state = name.removeprefix("optimizer's ").split("/")
    mine = optimizer._states(optimizer._witnesses[optimizer._group_of[parameter]])[state]  # type: ignore[attr-defined]
    return lambda: mine.mul_(2), lambda: mine.div_(2)  # type: ignore[return-value]


def test_a_difference_of_sign_counts_and_equal_values_that_are_no_numbers_do_not() -> None:
    with running(RUNS["dp tp"]) as (step, _):
        for executor in step.executors:
            executor.parameters.buffers[SCALE][3] = torch.nan
        step.each(check_replicas)
        for executor in step.executors:
            executor.parameters.buffers[SCALE][3] = -0.0 if executor.world.rank == 2 else 0.0
        with pytest.raises(
            ReplicaError, match=r"element \(3\): -0 \(bits 80000000\) on rank 2, 0 \(bits 00000000\) on rank 0"
        ) as told:
            step.each(check_replicas)
        assert (told.value.name, told.value.ranks, told.value.axis) == (SCALE, (2,), "dp")


def test_of_two_differences_the_first_in_the_order_of_the_program_is_told() -> None:
    with running(RUNS["dp tp"]) as (step, _):
        names = list(step.program.parameters)
        for name in (names[-1], names[3]):
            found = next(copy for copy in copies(step.executors[3]) if copy.name == name and copy.kind == "parameter")
            flip(found.value, 0, 0)
        with pytest.raises(ReplicaError) as told:
            step.each(check_replicas)
        assert told.value.name == names[3]


def test_where_two_of_four_agree_against_two_no_majority_is_told() -> None:
    with running(RUNS["dp"]) as (step, _):
        for rank in (1, 2):
            step.executors[rank].parameters.buffers[SCALE][0] = 7.0
        with pytest.raises(ReplicaError, match="between ranks 0, 1, 2, 3, and no majority says who is wrong") as told:
            step.each(check_replicas)
        assert told.value.ranks == (0, 1, 2, 3)


def test_one_rank_has_no_copies() -> None:
    with running(Run("", {}, {}, {})) as (step, _):
        step(batch(0))
        step.each(check_replicas)
        assert copies(step.executors[0]) == []


@pytest.mark.parametrize(
    ("dtype", "numel"), [(torch.float32, 37), (torch.bfloat16, 35), (torch.float64, 17), (torch.uint8, 27)]
)
def test_no_change_of_one_bit_escapes_the_hash_that_a_device_makes(dtype: torch.dtype, numel: int) -> None:
    """All bits of a tensor of several chunks with a rest, and every exchange of two unequal elements."""
    weights = ODD[:3]
    x = torch.arange(1, numel + 1).to(dtype)
    right = int(checksum(x, weights))
    assert right == int(checksum(torch.cat([x[:3], x])[3:], weights))  # wherever in memory it begins
    for element in range(numel):
        for bit in range(8 * dtype.itemsize):
            flip(x, element, bit)
            assert int(checksum(x, weights)) != right
            flip(x, element, bit)
        y = x.clone()
        y[element], y[(element + 1) % numel] = x[(element + 1) % numel], x[element]
        assert int(checksum(y, weights)) != right
    assert int(checksum(x, weights)) == right


ODD = odd_words(torch.device("cpu"), 64)


def test_the_words_of_the_hash_are_odd_and_differ() -> None:
    assert bool((ODD % 2 != 0).all())
    assert len(set(ODD.tolist())) == 64


@pytest.mark.parametrize("numel", [0, 1, 8, 100])
def test_the_hash_of_the_cpu_is_xxh3(numel: int) -> None:
    import xxhash

    x = torch.arange(numel).double()
    expected = xxhash.xxh3_64_intdigest(x.numpy().tobytes())
    assert checksum(x) == expected - (expected >> 63 << 64)


@pytest.mark.nightly
def test_what_a_check_costs() -> None:
    """Prints what the module's docstring says; a check is far less than a step."""
    from phalanx.train.assembly import parallel_step
    from phalanx.train.config import TrainConfig
    from phalanx.train.models import build

    x = torch.rand(1 << 26)
    rate = x.numel() * 4 / least(lambda: checksum(x)) / 1e9
    config = TrainConfig(model="llama-tiny", mesh="dp=2", batch=8)
    model = build("llama-tiny", "float32", dropout=0.0)
    config = replace(config, seq=model.seq)
    with phx.local(phx.Mesh(dp=2)) as world:
        step = parallel_step(config, world, model, model.factory())
        tokens = model.example(8, model.seq, 0)
        check, taken = least(lambda: step.each(check_replicas)), least(lambda: step(tokens))
    print(f"xxh3 {rate:.1f} GB/s; llama-tiny on dp=2: a check {check * 1e3:.1f} ms, a step {taken * 1e3:.0f} ms")  # noqa: T201
    assert check < taken


def least(fn: Callable[[], Any], times: int = 7) -> float:
    """Seconds of the fastest of several calls."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        fn()
        found.append(time.perf_counter() - began)
    return min(found)
