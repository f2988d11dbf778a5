"""Random models on random meshes with random storage: every step is that of one process, and every call was foretold.

A case is a function of its seed. The reference is the module itself under plain PyTorch and torch.optim.AdamW.
"""

from __future__ import annotations

import fnmatch
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as phx
from phalanx import rules
from phalanx.models.llama import Llama, LlamaConfig
from phalanx.run.step import Step
from phalanx.schedule import Storage, from_program
from phalanx.schedule.data import reductions, sum_order
from phalanx.schedule.explain import explain
from phalanx.schedule.pipeline import SCHEDULES

EXACT = 1e-12
"""Of values of size 1 after AdamW steps in float64. An update divides a gradient's rounding of 1e-17 by its size, 1e-3 or more."""
EPS = 1e-3
"""Of AdamW. With 1e-8 the update of a gradient that is nothing but rounding, as of a bias before a norm, is the sign of rounding."""
LR, DECAY, STEPS = 1e-2, 0.1, 3

Batch = dict[str, Tensor]


class Layer(nn.Module):
    def __init__(self, hidden: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """The least that has an embedding, blocks that tensor parallelism splits, norms, and a head that may be tied."""

    def __init__(self, vocab: int, hidden: int, inner: int, layers: int, tied: bool, bias: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, inner, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(self.norm(x))
        return found


NAMES = {
    "*.up.weight": "mlp embed",
    "*.down.weight": "embed mlp",
    "embed.weight": "vocab embed",
    "*norm.weight": "embed",
    "*norm.bias": "embed",
    "embed:out": "batch residual_seq embed",
    "*.down:out": "batch residual_seq embed",
    "tokens": "batch seq",
    "targets": "batch seq",
}


def loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["targets"]
    total = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


@dataclass(frozen=True, kw_only=True)
class Case:
    seed: int
    mesh: phx.Mesh
    batch_axes: tuple[str, ...]
    schedule: str
    chunks: int | None
    microbatches: int
    zero: Storage | None
    layers: int
    sizes: tuple[int, int, int]
    """vocab, hidden, inner."""
    batch_size: int
    seq: int
    family: str = "net"
    tied: bool = False
    bias: bool = True
    sequence_parallel: bool = False
    frozen: tuple[str, ...] = ()
    groups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    max_norm: float | None = None
    recompute: str = "none"

    @classmethod
    def of(cls, seed: int) -> Case:
        rng = random.Random(seed)
        axes = _axes(rng)
        mesh, pp, tp = phx.Mesh(**axes), axes.get("pp", 1), axes.get("tp", 1)
        batch_axes = [axis for axis in ("rep", "dp") if axis in axes]
        rng.shuffle(batch_axes)
        schedule = rng.choice([name for name, row in SCHEDULES.items() if row.copies == 1 or pp % 2 == 0])
        row = SCHEDULES[schedule]
        chunks = rng.choice((None, 1, 2, 3)) if row.any_chunks and pp > 1 else None
        stages = pp * (chunks or row.chunks) if pp > 1 else 1
        m = rng.choice((1, 2, 3, 4)) if row.copies == 1 or pp == 1 else 2 * pp
        sp = tp > 1 and rng.random() < 0.5
        family = "llama" if rng.random() < 0.2 else "net"
        hidden, inner = rng.choice((8, 20, 24)), rng.choice((3, 8, 13)) * tp * 2
        tied = rng.random() < 0.5
        embeddings = ("embed*", "head*") if tied else ("embed*",)
        return cls(
            seed=seed,
            mesh=mesh,
            batch_axes=tuple(batch_axes),
            schedule=schedule,
            chunks=chunks,
            microbatches=m,
            zero=_storage(rng, axes, batch_axes, sp),
            layers=stages + rng.choice((0, 1, 2)),
            sizes=(rng.choice((7, 17, 40)), hidden, inner),
            batch_size=m * mesh.extent(batch_axes) * rng.choice((1, 2)),
            seq=4 * rng.choice((1, 2)),
            family=family,
            tied=tied,
            bias=rng.random() < 0.5,
            sequence_parallel=sp,
            frozen=rng.choice(((), (), (), embeddings, ("layers.0.*",), ("*norm*",), (*embeddings, "layers.0.*"))),
            groups=rng.choice(({}, {}, {"*norm.weight": {"lr": 3e-2, "weight_decay": 0.3}})),
            max_norm=rng.choice((None, 0.1)),
            recompute=rng.choice(("none", "none", "selective", "full")),
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.seed}: {self.family} {self.mesh} {self.schedule} m={self.microbatches} zero={self.zero and self.zero.level}"
        )


def _axes(rng: random.Random) -> dict[str, int]:
    """At most 8 ranks; some of them hold the same parameters. In any order, on which that of the sums depends."""
    while True:
        sizes = {"pp": rng.choice((1, 1, 2, 2, 3, 4)), "rep": rng.choice((1, 1, 2)), "dp": rng.choice((1, 2, 2, 3, 4))}
        sizes["tp"] = rng.choice((1, 1, 2))
        axes = {axis: size for axis, size in sizes.items() if size > 1}
        if math.prod(axes.values()) <= 8 and ("rep" in axes or "dp" in axes):
            return dict(rng.sample(sorted(axes.items()), len(axes)))


def _storage(rng: random.Random, axes: Mapping[str, int], batch_axes: list[str], sp: bool) -> Storage | None:
    level = rng.choice((0, 1, 2, 2, 3, 3, 3))
    if not level:
        return None
    choices = [tuple(batch_axes), *((axis,) for axis in batch_axes)]
    if sp:
        # Only what tp does not split is divided over it: norms, and the biases after a sum.
        choices += [("tp",), (*batch_axes, "tp")]
    prefetch = rng.choice((0, 1, 1, 2, 3))
    keep = rng.choice((None, None, prefetch + 1, prefetch + 3)) if level == 3 else None
    return Storage(level, rng.choice(choices), by_microbatch=level > 1 and rng.random() < 0.5, prefetch=prefetch, keep=keep)


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(case.seed)
    vocab, hidden, inner = case.sizes
    if case.family == "llama":
        heads = 2 if hidden % 8 else 4
        config = LlamaConfig(vocab=vocab, hidden=hidden, inner=inner, layers=case.layers, heads=heads, kv_heads=heads // 2)
        made: nn.Module = Llama(replace(config, tied=case.tied)).double()
    else:
        made = Net(vocab, hidden, inner, case.layers, case.tied, case.bias).double()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in case.frozen))
    return made


def batch_of(case: Case, step: int) -> Batch:
    """Ignored targets are spread unevenly, so a mean of means would be wrong."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    shape = (case.batch_size, case.seq)
    batch = {key: torch.randint(0, case.sizes[0], shape, generator=generator) for key in ("tokens", "targets")}
    batch["targets"][torch.rand(shape, generator=generator) < 0.2] = -100
    batch["targets"][0, : case.seq // 2] = -100
    batch["targets"][-1, 0] = 0
    return batch


Result = tuple[list[tuple[float, float]], float, dict[str, Tensor], dict[str, Tensor]]
"""(loss, norm) of each step, the loss of an evaluation after the second, the last gradients and the weights after all."""


def reference(case: Case) -> Result:
    model = model_of(case)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = []
    for name, p in named.items():
        own = next((options for pattern, options in case.groups.items() if fnmatch.fnmatchcase(name, pattern)), {})
        groups.append({"params": [p], "lr": LR, "weight_decay": DECAY if p.dim() > 1 else 0.0, **own})
    optimizer = torch.optim.AdamW(groups, eps=EPS)

    def mean(step: int) -> Tensor:
        batch = batch_of(case, step)
        total, count = loss(model(batch["tokens"]), batch)
        return total / count

    rows, evaluated = [], 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        value = mean(step)
        value.backward()
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}
        norm = torch.nn.utils.clip_grad_norm_(named.values(), case.max_norm or math.inf)
        optimizer.step()
        rows.append((value.item(), norm.item()))
        if step == 1:
            with torch.no_grad():
                evaluated = mean(7).item()
    return rows, evaluated, gradients, {name: x.detach() for name, x in model.state_dict().items()}


def parallel_step(case: Case, model: nn.Module, world: Any) -> Step:
    names = rules.table_for(model, ("tokens", "targets")) if case.family == "llama" else dict(NAMES)
    if case.family == "net":
        names |= {"*.up.bias": "mlp", "*.down.bias": "embed"} if case.bias else {}
        names |= {} if case.tied else {"head.weight": "vocab embed"}
    layout: dict[str, Any] = {"batch": case.batch_axes}
    if "tp" in case.mesh.names:
        layout |= {"mlp": "tp"} | ({"heads": "tp"} if case.family == "llama" else {})
        layout |= {"residual_seq": "tp"} if case.sequence_parallel else {}
    return phx.parallelize(
        model, world, example=batch_of(case, 0), loss=loss, names=names, layout=layout,
        optimizer=phx.adamw(lr=LR, weight_decay=DECAY, eps=EPS, groups=case.groups), microbatches=case.microbatches,
        schedule=case.schedule, chunks=case.chunks, zero=case.zero or 0, recompute=case.recompute, max_norm=case.max_norm,
    )  # fmt: skip


def assert_nothing_is_gathered(step: Step) -> None:
    for executor in step.executors:
        parameters = executor.parameters
        for unit in parameters.units:
            assert unit.whole is None and (not unit.sliced or (unit.gathering is None and not unit.holders)), unit.name
            assert unit.summed is None, unit.name
            assert not unit.sliced or not any(place.parameter.name in parameters.views for place in unit.places)
        bound = executor._training
        gathered = [key for key in bound._ids if key[0] == "parameter" and parameters.places[str(key[1])][0].sliced]
        assert all(bound.machine.slots[bound._ids[key]] is None for key in gathered)


Calls = Counter[tuple[str, str, int]]
"""How many calls of (group, operation, bytes) there were."""


def called(step: Step, batch: Batch) -> list[Calls]:
    """What each rank calls in a step."""
    for executor in step.executors:
        executor.world.ledger.clear()
        executor.world.ledger.start()
    step(batch)
    found = []
    for executor in step.executors:
        ledger = executor.world.ledger
        ledger.stop()
        found.append(Counter((str(event.axis), event.name, event.bytes) for event in ledger.events))
    return found


def foretold(step: Step) -> Calls:
    """What the ranks of one pipeline call, from `explain`, which counts what several coordinates do alike once."""
    world, schedule = step.executors[0].world, step.schedule
    pp = world.mesh.extent(("pp",))
    places = {segment.name: schedule.places[segment.index] for segment in step.program.segments}
    found: Calls = Counter()
    for row in explain(step.program, schedule).rows:
        axes = tuple(world.mesh.names) if row.axis == "world" else tuple(row.axis.split("+"))
        group, times = world.group(axes).name.partition("@")[0], row.count
        if row.why.startswith(("COUNT", "NORM")):
            times *= pp
        elif row.why.startswith(("GATHER", "REDUCE")):
            times *= len(places[row.segment])
        if "is shared by the stages on pp" in row.why:
            # One call on each of them; explain has it with the segments that issue it.
            stages = [int(stage) for stage in row.why.rpartition(" on pp ")[2].split(", ")]
            group = "pp" if len(stages) == pp else f"pp[{','.join(map(str, stages))}]"
            times = row.count * len(places[row.segment])
        if row.op == "send":
            found["pp", "recv", row.bytes] += times
        found[group, row.op, row.bytes] += times
    return +found


def assert_foretold(step: Step, by_rank: list[Calls], case: Case) -> None:
    said, mesh = foretold(step), case.mesh
    if slices_are_alike(step):
        pipeline = [
            calls for rank, calls in enumerate(by_rank) if not any(mesh.coordinates(rank)[a] for a in mesh.names if a != "pp")
        ]
        found = sum(pipeline, Calls())
        differ = {key: (found[key], said[key]) for key in {*found, *said} if found[key] != said[key]}
        assert not differ, f"{case}: (called, foretold) {differ}"
        return
    pipelines = mesh.size // mesh.extent(("pp",))
    found, expected = moved(sum(by_rank, Calls())), moved(said)
    assert found.keys() == expected.keys()
    for key, size in found.items():
        # What is behind the last parameter of a unit, less than a cache line of 64 bytes for each rank, is not summed everywhere.
        padding = 64 * mesh.size * sum(times for (group, op, _), times in said.items() if (group, op) == key)
        assert abs(size - expected[key] * pipelines) <= padding, f"{case}: {key}"


def moved(calls: Calls) -> Counter[tuple[str, str]]:
    """Bytes by group and operation."""
    found: Counter[tuple[str, str]] = Counter()
    for (group, op, size), times in calls.items():
        found[group, op] += size * times
    return found


def slices_are_alike(step: Step) -> bool:
    """Whether each rank's slices need the same sums: a short parameter with sums of its own lies in one slice alone, and of what is
    then called `explain` has the mean."""
    view = from_program(step.program, step.schedule.storage)
    parts = [part for reduction in reductions(view, step.schedule.places).values() for part in reduction.parts if part.split]
    return all(len({sum_order(axes, part.split)[1] for axes, _ in part.runs}) <= 1 for part in parts)


def ran(case: Case) -> Result:
    with phx.local(case.mesh, rendezvous=True, timeout=30) as world:
        step = parallel_step(case, model_of(case), world)
        outs = [step(batch_of(case, 0))]
        assert_nothing_is_gathered(step)
        calls = called(step, batch_of(case, 1))
        evaluated = step.evaluate(batch_of(case, 7)).loss
        assert_nothing_is_gathered(step)
        outs.append(step(batch_of(case, 2)))
        assert_nothing_is_gathered(step)
        assert step.evaluate(batch_of(case, 7)) == step.evaluate(batch_of(case, 7))
        assert_foretold(step, calls, case)
        rows = [(out.loss, out.grad_norm) for out in outs]
        return rows, evaluated, step.gradients(), step.state_dict()


def assert_as_one_process(case: Case) -> None:
    rows, evaluated, gradients, weights = ran(case)
    expected_rows, expected_evaluation, expected_gradients, expected_weights = reference(case)
    # The second step is the one whose calls are counted.
    for mine, theirs in zip(rows, (expected_rows[0], expected_rows[2]), strict=True):
        assert mine == pytest.approx(theirs, abs=EXACT), case
    assert evaluated == pytest.approx(expected_evaluation, abs=EXACT), case
    for found, expected in ((gradients, expected_gradients), (weights, expected_weights)):
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=0, atol=EXACT, msg=lambda m, name=name: f"{case}: {name}: {m}")


EVERY_CHANGE = (*range(24), 81)
"""81 divides by microbatch over an axis that splits some of the parameters only."""
NIGHTLY = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(425) if seed not in EVERY_CHANGE]


@pytest.mark.parametrize("seed", [*EVERY_CHANGE, *NIGHTLY])
def test_any_storage_trains_as_one_process(seed: int) -> None:
    assert_as_one_process(Case.of(seed))


@pytest.mark.parametrize(("mesh", "share"), [("rep=2,dp=2", 2), ("dp=2,rep=2", 1)])
def test_slow_axes_get_what_is_smallest(mesh: str, share: int) -> None:
    """Links are faster the later their axis is in the mesh: what is copied over a slower axis is summed there after it was scattered,
    in slices, and what is copied over a faster one before."""
    case = replace(
        Case.of(0), mesh=phx.Mesh.parse(mesh), batch_axes=("rep", "dp"), zero=Storage(2, ("dp",)), schedule="1f1b", chunks=None,
        microbatches=1, layers=2, sizes=(40, 24, 16), batch_size=4, tied=False, bias=False,
    )  # fmt: skip
    with phx.local(case.mesh, rendezvous=True, timeout=30) as world:
        step = parallel_step(case, model_of(case), world)
        calls = called(step, batch_of(case, 0))
    for found in map(moved, calls):
        # COUNT sums 8 bytes. The sizes are such that nothing is padded.
        assert (found["rep", "all_reduce"] - 8) * share == found["dp", "reduce_scatter"] > 0
