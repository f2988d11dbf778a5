"""The promise in every combination: model, mesh, sequence parallelism, schedule, microbatches, tied weights, kv heads.

Each combination trains the untouched module in one process and the derived program on threads, from the same float64 weights. A
subset that holds every pair of values runs at every change, the rest nightly. Run without xdist, the file ends with a table of
the worst errors.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx as phx
from phalanx import rules
from phalanx.comm.local import local
from phalanx.comm.world import World
from phalanx.mesh import Mesh
from phalanx.models import llama, mlp
from phalanx.run.step import Sharded
from phalanx.schedule.pipeline import compute_order
from phalanx.train import tiny
from phalanx.train.assembly import parallel_step
from phalanx.train.config import OptimizerConfig, TrainConfig
from phalanx.train.models import Model, class_batch, token_batch, token_loss
from phalanx.train.norms import rewrite_norms
from phalanx.train.verify import Comparison, batches, relative_error, verify

# From equal weights two float64 computations differ by the order of their sums: some 1e3 roundings of 1e-16, less than 1e-12.
# An update of AdamW divides a gradient's rounding by its size; 1e-10 after three of them still sees 1e-8 of a gradient.
FROM_EQUAL_WEIGHTS, AFTER_THREE_STEPS = 1e-12, 1e-10
# A norm that casts to float32 inside rounds a float64 difference of one bit up to 1e-7 where it straddles two float32 numbers.
UNREWRITTEN_GRADIENTS, UNREWRITTEN_WEIGHTS = 1e-5, 1e-4

VOCAB, HEADS = 64, 8
BATCH, SEQ = 8, 8  # 4 microbatches over dp=2, and a sequence that tp=4 divides
GROUPED_QUERY = ("llama", "hf-llama", "hf-qwen3")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination."""

    model: str
    mesh: str
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    microbatches: int = 1
    tied: bool = False
    kv_heads: str = "more"
    """Their number against tp: more, equal or fewer; "all" if every query head has its own."""

    @property
    def layers(self) -> int:
        """One more than the stages, so that they share them unevenly."""
        return 5 if "pp=4" in self.mesh else 3

    @property
    def kv(self) -> int:
        tp = Mesh.parse(self.mesh).extent(("tp",))
        return {"all": HEADS, "more": 2 * tp, "equal": tp, "fewer": tp // 2}[self.kv_heads]

    def __str__(self) -> str:
        words = [self.model, self.mesh or "alone", "sp" * self.sequence_parallel, self.schedule, f"m={self.microbatches}"]
        return " ".join(filter(None, [*words, "tied" * self.tied, f"kv={self.kv_heads}"]))


VALUES: dict[str, tuple[Any, ...]] = {
    "model": ("mlp", "gpt2", *GROUPED_QUERY),
    "mesh": ("dp=2", "tp=2", "pp=2", "dp=2,tp=2", "pp=2,dp=2", "pp=2,tp=2", "pp=2,dp=2,tp=2", "tp=4", "pp=4"),
    "sequence_parallel": (False, True),
    "schedule": ("gpipe", "1f1b"),
    "microbatches": (1, 2, 4),
    "tied": (False, True),
    "kv_heads": ("all", "more", "equal", "fewer"),
}


def exists(case: Case) -> bool:
    """Whether a combination means anything that another does not."""
    has_tp, has_pp = "tp" in case.mesh, "pp" in case.mesh
    if case.model == "mlp" and (case.sequence_parallel or case.tied):
        return False  # it has neither a sequence nor an embedding
    if (case.kv_heads == "all") == (case.model in GROUPED_QUERY):
        return False
    if not has_tp and (case.sequence_parallel or case.kv_heads in ("equal", "fewer")):
        return False
    # Without a pipeline, or with one microbatch, there is one order; and two microbatches add up as well as four.
    return not (case.schedule == "gpipe" and (not has_pp or case.microbatches == 1)) and (has_pp or case.microbatches < 4)


CASES = [
    case for values in itertools.product(*VALUES.values()) if exists(case := Case(**dict(zip(VALUES, values, strict=True))))
]

Pair = frozenset[tuple[str, Any]]


def pairs(case: Case) -> set[Pair]:
    return {frozenset(two) for two in itertools.combinations(asdict(case).items(), 2)}


def covering(cases: Iterable[Case]) -> list[Case]:
    """A small subset with every pair that occurs: each time the case with the most new pairs, of these one with few ranks."""
    found = {case: pairs(case) for case in cases}
    missing = set().union(*found.values())
    chosen = []
    while missing:
        best = max(found, key=lambda case: (len(found[case] & missing), -Mesh.parse(case.mesh).size))
        missing -= found.pop(best)
        chosen.append(best)
    return chosen


EVERY_CHANGE = covering(CASES)


def test_every_pair_of_values_is_tried_at_every_change() -> None:
    """All pairs, but for those of which this list says why they do not exist."""
    everything = {
        frozenset([(one, x), (other, y)])
        for (one, xs), (other, ys) in itertools.combinations(VALUES.items(), 2)
        for x, y in itertools.product(xs, ys)
    }
    no_tp, no_pp = (("dp=2", "pp=2", "pp=2,dp=2", "pp=4"), ("dp=2", "tp=2", "dp=2,tp=2", "tp=4"))
    impossible = {("model", "mlp", "sequence_parallel", True), ("model", "mlp", "tied", True)}
    impossible |= {("model", model, "kv_heads", "all") for model in GROUPED_QUERY}
    impossible |= {("model", model, "kv_heads", kv) for model in ("mlp", "gpt2") for kv in ("more", "equal", "fewer")}
    impossible |= {("mesh", mesh, "sequence_parallel", True) for mesh in no_tp}
    impossible |= {("mesh", mesh, "kv_heads", kv) for mesh in no_tp for kv in ("equal", "fewer")}
    impossible |= {("mesh", mesh, "schedule", "gpipe") for mesh in no_pp} | {
        ("mesh", mesh, "microbatches", 4) for mesh in no_pp
    }
    impossible |= {("schedule", "gpipe", "microbatches", 1)}
    covered = set().union(*map(pairs, EVERY_CHANGE))
    assert everything - covered == {frozenset([(a, x), (b, y)]) for a, x, b, y in impossible}
    assert len(EVERY_CHANGE) < len(CASES) / 10


@pytest.mark.parametrize("pp", [2, 4])
def test_one_microbatch_has_one_order(pp: int) -> None:
    assert compute_order("gpipe", pp, 1) == compute_order("1f1b", pp, 1)


# The models, small enough for a second each


def model_of(case: Case, dropout: float = 0.0) -> Model:
    """The model of a case in float64, with the names of its family."""
    example = partial(class_batch, 16, 8, torch.float64)
    if case.model != "mlp":
        example = partial(token_batch, "tokens" if case.model == "llama" else "input_ids", VOCAB)
    factory = partial(build, case, dropout)
    with torch.device("meta"):
        names = rules.table_for(factory(), example(1, 1, 0))
    loss = {"mlp": mlp.loss, "llama": llama.loss}.get(case.model, token_loss)
    return Model(
        name=str(case), factory=factory, names=names, loss=loss, example=example, batch=BATCH, seq=SEQ, tokens=None
    )  # fmt: skip


def build(case: Case, dropout: float) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        if case.model == "mlp":
            return mlp.MLP(mlp.MLPConfig(inputs=16, hidden=32, inner=64, layers=case.layers, outputs=8, dropout=dropout))
        if case.model == "llama":
            sizes = llama.LlamaConfig(vocab=VOCAB, hidden=64, inner=96, layers=case.layers, heads=HEADS, kv_heads=case.kv)
            return llama.Llama(replace(sizes, tied=case.tied, dropout=dropout))
        return hugging_face(case, dropout)
    finally:
        torch.set_default_dtype(before)


def hugging_face(case: Case, dropout: float) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = tiny.config(case.model.removeprefix("hf-"))
    wanted = {"vocab_size": VOCAB, "tie_word_embeddings": case.tied}
    if case.model == "gpt2":
        wanted |= {
            "n_layer": case.layers,
            "n_head": HEADS,
            "resid_pdrop": dropout,
            "embd_pdrop": dropout,
            "attn_pdrop": dropout,
        }
    else:
        wanted |= {
            "num_hidden_layers": case.layers,
            "num_attention_heads": HEADS,
            "head_dim": 8,
            "num_key_value_heads": case.kv,
        }
        wanted |= {"layer_types": ["full_attention"] * case.layers} if case.model == "hf-qwen3" else {}
    for name, value in wanted.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    module: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    assert module.get_input_embeddings().weight.shape[0] == VOCAB
    assert (module.get_output_embeddings().weight is module.get_input_embeddings().weight) == case.tied
    return module


def config_of(case: Case, **more: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": case.model,
        "mesh": case.mesh,
        "sequence_parallel": case.sequence_parallel,
        "schedule": case.schedule,
        "microbatches": case.microbatches,
        "steps": 3,
        "batch": BATCH,
        "seq": SEQ,
        "dtype": "float64",
        # Full rate from the first step, and a norm below all gradients' so that every step is clipped.
        "optimizer": OptimizerConfig(warmup=1, max_norm=0.1),
    }
    return TrainConfig(**{**settings, **more})


def compared(case: Case, dropout: float = 0.0, **options: Any) -> Comparison:
    with local(Mesh.parse(case.mesh)) as world:
        return verify(config_of(case, dropout=dropout), world, model=model_of(case, dropout), **options)


# The matrix


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[str, list[tuple[float, float, float]]]]:
    """Takes the errors of every combination by model; shows the worst ones at the end."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    yield rows
    terminal = request.config.get_terminal_writer()
    terminal.line("\n\n| model | combinations | loss | gradients | weights after 3 steps |\n|---|---|---|---|---|")
    for model, errors in rows.items():
        worst = (max(column) for column in zip(*errors, strict=True))
        terminal.line(f"| {model} | {len(errors)} | {' | '.join(f'{error:.1e}' for error in worst)} |")


def marked(cases: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """All cases, those that are not chosen for every change marked nightly."""
    often = set(chosen)
    return [pytest.param(case, id=str(case), marks=[] if case in often else pytest.mark.nightly) for case in cases]


@pytest.mark.parametrize("case", marked(CASES, EVERY_CHANGE))
def test_the_mesh_never_changes_what_the_model_computes(case: Case, table: dict[str, list[tuple[float, float, float]]]) -> None:
    comparison = compared(case)
    first = comparison.by_step[0]
    table.setdefault(case.model, []).append((first.loss, first.grad, comparison.weight))
    assert max(first.loss, first.grad) <= FROM_EQUAL_WEIGHTS, comparison.first_divergence
    assert comparison.weight <= AFTER_THREE_STEPS, comparison.first_divergence
    assert comparison.first_divergence is None  # neither of the later losses and gradients
    # Norms that round were replaced in transformers' models, and there only; and the two sides are not one computation.
    assert len(comparison.notes) == case.model.startswith("hf-")
    assert comparison.grad > 0


STOCK = [
    Case(model=model, mesh=mesh, sequence_parallel=sp)
    for model, mesh, sp in itertools.product(("hf-llama", "hf-qwen3"), VALUES["mesh"], (False, True))
    if "tp" in mesh or not sp
]


@pytest.mark.parametrize(
    "case", marked(STOCK, [case for case in STOCK if case.mesh == "pp=2,dp=2,tp=2" and case.sequence_parallel])
)
def test_norms_that_round_to_float32_inside(case: Case) -> None:
    comparison = compared(case, rewrite=False, tolerance=UNREWRITTEN_WEIGHTS)
    assert comparison.grad <= UNREWRITTEN_GRADIENTS
    assert comparison.weight <= UNREWRITTEN_WEIGHTS
    assert comparison.first_divergence is None
    assert not comparison.notes


DROPOUT = [
    Case(
        model=model,
        mesh=mesh,
        sequence_parallel="tp" in mesh and model != "mlp",
        microbatches=2,
        tied=model != "mlp",
        kv_heads=kv,
    )
    for (model, kv), mesh in itertools.product((("mlp", "all"), ("llama", "more"), ("gpt2", "all")), VALUES["mesh"])
]


@pytest.mark.parametrize("case", marked(DROPOUT, [c for c in DROPOUT if c.mesh in ("pp=4", "pp=2,dp=2,tp=2")]))
def test_dropout_does_not_depend_on_the_mesh(case: Case) -> None:
    """Against the derived program on one rank and in one microbatch: the masks are a function of sample and position."""
    comparison = compared(case, dropout=0.3)
    first = comparison.by_step[0]
    assert max(first.loss, first.grad) <= FROM_EQUAL_WEIGHTS, comparison.first_divergence
    assert comparison.weight <= AFTER_THREE_STEPS, comparison.first_divergence


@pytest.mark.parametrize("case", marked(DROPOUT, [c for c in DROPOUT if c.mesh == "pp=2,dp=2,tp=2"]))
def test_evaluation_drops_nothing(case: Case) -> None:
    """Not in `evaluate`, nor after `eval()` in a loop of one's own; training does, the same whether evaluated between or not."""
    model, config = model_of(case, 0.3), config_of(case, dropout=0.3)
    module, batch = module_of(model), next(batches(model, config))
    expected = mean_loss(copy.deepcopy(module).eval(), model, batch).item()

    def between(world: World, mine: Sharded) -> tuple[float, float]:
        evaluated = mine.eval()(batch)
        assert not evaluated.requires_grad
        return evaluated.item(), mine.train()(batch).item()

    with local(Mesh.parse(case.mesh)) as world:
        step = parallel_step(config, world, model, module)
        found = [step.evaluate(batch).loss]
        trained = step(batch).loss
    with local(Mesh.parse("dp=2,tp=2")) as world:
        layout = replace(config, mesh="dp=2,tp=2").parsed_layout(model.dimensions)
        sharded = phx.shard(module, world, example=batch, names=model.names, layout=layout, loss=model.loss)
        for evaluated, own in world.run(between, sharded):
            found.append(evaluated)
            assert abs(own / trained - 1) <= FROM_EQUAL_WEIGHTS
    assert max(abs(loss / expected - 1) for loss in found) <= FROM_EQUAL_WEIGHTS
    assert abs(trained / expected - 1) > 1e-5  # more than any rounding: training did drop


# The other ways into a model: recorded initial values, evaluation, a loop of one's own

ONE_OF_EACH = [Case(model=model, mesh=mesh, tied=model in ("gpt2", "llama"), kv_heads=kv) for model, mesh, kv in (
    *((model, mesh, "all") for model in ("mlp", "gpt2") for mesh in VALUES["mesh"]),
    *((model, mesh, "more") for model in GROUPED_QUERY for mesh in VALUES["mesh"]),
)]  # fmt: skip
TRIPLE = [case for case in ONE_OF_EACH if case.mesh == "pp=2,dp=2,tp=2"]


@pytest.mark.parametrize("case", marked(ONE_OF_EACH, TRIPLE))
def test_recorded_initial_values_are_those_of_one_process(case: Case) -> None:
    """Bit by bit, and not those of another seed."""
    model = model_of(case)
    whole = phx.materialize(phx.deferred_init(model.factory), 5).state_dict()
    with local(Mesh.parse(case.mesh)) as world:
        state = parallel_step(config_of(case, seed=5), world, model, phx.deferred_init(model.factory)).state_dict()
    assert list(state) == list(whole)
    assert all(torch.equal(value, whole[name]) for name, value in state.items())
    other = phx.materialize(phx.deferred_init(model.factory), 6).state_dict()
    assert any(not torch.equal(value, other[name]) for name, value in state.items())


@pytest.mark.parametrize("case", marked(ONE_OF_EACH, TRIPLE))
def test_evaluation_is_that_of_one_process(case: Case) -> None:
    """Before and after a step, on another batch than the step's, and it changes nothing."""
    model, config = model_of(case), config_of(case, microbatches=2)
    module = module_of(model)
    trained, held_out, _ = batches(model, config)
    with local(Mesh.parse(case.mesh)) as world:
        step = parallel_step(config, world, model, module)
        found = [step.evaluate(held_out)]
        step(trained)
        after = step.state_dict()
        found += [step.evaluate(held_out), step.evaluate(held_out)]
        assert all(torch.equal(value, after[name]) for name, value in step.state_dict().items())
    expected = [mean_loss(module, model, held_out)]
    module.load_state_dict(after)
    expected.append(mean_loss(module, model, held_out))
    assert abs(expected[0] - expected[1]) > 1e-6  # one step was seen
    assert found[1] == found[2]
    for ours, theirs in zip(found, expected, strict=False):
        assert abs(ours.loss / theirs.item() - 1) <= FROM_EQUAL_WEIGHTS
        assert ours.tokens == (held_out["targets"] != -100).sum()


OWN_LOOP = [case for case in ONE_OF_EACH if "pp" not in case.mesh]


@pytest.mark.parametrize("case", marked(OWN_LOOP, [case for case in OWN_LOOP if case.mesh == "dp=2,tp=2"]))
def test_a_loop_of_ones_own_with_torchs_optimizer(case: Case) -> None:
    model, config = model_of(case), config_of(case)
    module = module_of(model)
    steps = list(batches(model, config))

    def train(world: World, mine: Sharded) -> tuple[list[float], dict[str, Tensor]]:
        optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3)
        losses = []
        for batch in steps:
            optimizer.zero_grad()
            loss = mine(batch)
            loss.backward()
            mine.sync_gradients()
            optimizer.step()
            losses.append(loss.item())
        return losses, mine.full_state_dict()

    layout = config.parsed_layout(model.dimensions)
    with local(Mesh.parse(case.mesh)) as world:
        sharded = phx.shard(module, world, example=steps[0], names=model.names, layout=layout, loss=model.loss)
        ranks = world.run(train, sharded)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    expected = []
    for batch in steps:
        optimizer.zero_grad()
        loss = mean_loss(module, model, batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, state in ranks:
        assert abs(losses[0] / expected[0] - 1) <= FROM_EQUAL_WEIGHTS
        assert max(abs(x / y - 1) for x, y in zip(losses, expected, strict=True)) <= AFTER_THREE_STEPS
        for name, value in module.state_dict().items():
            assert relative_error(value, state[name]) <= AFTER_THREE_STEPS, name


def module_of(model: Model) -> nn.Module:
    torch.manual_seed(0)
    module = model.factory()
    rewrite_norms(module)
    return module


def mean_loss(module: nn.Module, model: Model, batch: dict[str, Tensor]) -> Tensor:
    """Of one process of plain PyTorch."""
    total, count = model.loss(module(next(value for name, value in batch.items() if name != "targets")), batch)
    return total / count
