"""A vocabulary that its axes do not divide is padded, and nobody but memory sees it: losses, gradients, weights and state are those
of one process, and what is padding stays zero to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as phx
from phalanx.comm.local import LocalWorld
from phalanx.derive import capture, derive, derive_captured
from phalanx.derive.ops import loss as loss_rules
from phalanx.derive.program import Program
from phalanx.mesh import Mesh
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.rules import table_for
from phalanx.run.initialize import deferred_init, materialize
from phalanx.train import tiny
from phalanx.train.config import TrainConfig
from phalanx.train.models import build, token_batch
from phalanx.train.verify import verify

from .parity import Result, on_mesh, one_process, values, worst

# Float64 sums of some thousand terms near 1 in another order.
EXACT = 1e-12
LAYOUT = {"batch": "dp", "heads": "tp", "mlp": "tp", "vocab": "tp"}


def llama(vocab: int, tied: bool, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    sizes = LlamaConfig(vocab=vocab, hidden=32, inner=48, layers=2, heads=4, kv_heads=4, tied=tied, dropout=dropout)
    return Llama(sizes).double()


def placed(mesh: Mesh, more: Mapping[str, str] | None = None) -> dict[str, str]:
    return {name: axis for name, axis in {**LAYOUT, **(more or {})}.items() if axis in mesh.names}


def narrowed(program: Program, result: Result) -> Result:
    """Without padding, whose gradients are checked to be zero."""
    for name, p in program.parameters.items():
        whole, kept = result.grads[name], p.narrowed(result.grads[name])
        assert int(whole.count_nonzero()) == int(kept.count_nonzero()), f"{name}: padding got a gradient"
        result.grads[name] = kept
    return result


def error(program: Program, module: nn.Module, batch: Mapping[str, Tensor], how: str = "graphs") -> float:
    """The largest relative error of loss, count and gradients against the captured pieces on one process."""
    assert program.origin is not None
    captured = program.origin.captured
    params, buffers = values(module, captured)
    long = {name: p.padded(params[name]) for name, p in program.parameters.items()}
    held = {name: b.padded(buffers[name]) for name, b in program.buffers.items()}
    result = narrowed(program, on_mesh(program, long, held, batch, how=how))
    return worst(result, one_process(captured, params, buffers, batch))[0]


@pytest.mark.parametrize(
    ("mesh", "vocab", "tied", "how", "more"),
    [
        ("tp=2", 257, False, "graphs", {}),
        pytest.param("tp=2", 257, True, "split", {}, marks=pytest.mark.nightly),
        pytest.param("tp=4", 257, False, "split", {}, marks=pytest.mark.nightly),
        pytest.param("tp=4", 257, True, "graphs", {}, marks=pytest.mark.nightly),
        ("tp=2", 257, True, "graphs", {"residual_seq": "tp"}),
        pytest.param("dp=2,tp=2", 255, False, "graphs", {}, marks=pytest.mark.nightly),
        # 5 rows over 4 ranks: the last rank holds nothing but padding
        ("tp=4", 5, False, "graphs", {}),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(
    mesh: str, vocab: int, tied: bool, how: str, more: dict[str, str]
) -> None:
    module, batch, on = llama(vocab, tied), token_batch("tokens", vocab, 4, 8, 1), Mesh.parse(mesh)
    program = derive(module, on, example=batch, names=table_for(module, batch), layout=placed(on, more), loss=loss)
    table = program.parameters["embed_tokens.weight"]
    ranks = on.shape["tp"]
    assert table.valid == (vocab, 32) and table.shape == (-(-vocab // ranks) * ranks, 32)
    assert error(program, module, batch, how) < EXACT
    assert not program.report, "nothing is gathered"


def test_three_ranks_split_a_vocabulary_of_256() -> None:
    module, batch = llama(256, False), token_batch("tokens", 256, 3, 8, 1)
    program = derive(module, Mesh(tp=3), example=batch, names=table_for(module, batch), layout={"vocab": "tp"}, loss=loss)
    assert program.parameters["lm_head.weight"].shape == (258, 32)
    assert program.parameters["layers.0.mlp.up_proj.weight"].valid is None
    assert error(program, module, batch) < EXACT


def test_a_cross_entropy_that_counts_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: without the mask the padded logits, which are 0, have a part in the sum."""
    monkeypatch.setattr(
        loss_rules, "_penalty", lambda e, logits, classes, valid: e.call(torch.ops.aten.zeros_like.default, logits)
    )
    module, batch = llama(257, False), token_batch("tokens", 257, 4, 8, 1)
    program = derive(module, Mesh(tp=2), example=batch, names=table_for(module, batch), layout=placed(Mesh(tp=2)), loss=loss)
    with pytest.raises(AssertionError, match="padding got a gradient"):
        error(program, module, batch)


# What a head may do with its logits

VOCAB = 11
HEAD_NAMES = {"table.weight": "vocab embed", "head.weight": "vocab embed", "head.bias": "vocab", "ids": "batch", "y": "batch"}


class Head(nn.Module):
    """Logits, after `use` of them."""

    def __init__(self, use: Callable[[Head, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.scale = nn.Parameter(torch.rand(VOCAB) + 1)
        self.register_buffer("allowed", torch.arange(VOCAB) != 3)
        self.use = use
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.use(self, self.head(self.table(ids)))


def likelihood(logits: Tensor, batch: Mapping[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    y = batch["y"]
    return F.cross_entropy(logits, y, reduction="sum", **options), torch.ones_like(y).sum()


def with_z_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    total, count = likelihood(logits, batch)
    return total + 1e-2 * torch.logsumexp(logits, -1).square().sum(), count


def of_probabilities(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    y = batch["y"]
    return -logits.softmax(-1).gather(1, y[:, None]).log().sum(), torch.ones_like(y).sum()


def unchanged(head: Head, logits: Tensor) -> Tensor:
    return logits


WEIGHTS = torch.linspace(1, 2, VOCAB, dtype=torch.float64)
KEEPING: dict[str, tuple[Callable[[Head, Tensor], Tensor], Any]] = {
    "softcap": (lambda head, x: 30 * torch.tanh(x / 30), likelihood),
    "views": (lambda head, x: x[None].view(2, 2, 2, VOCAB).transpose(0, 1).reshape(-1, VOCAB)[:, :], likelihood),
    "a scale of another name": (lambda head, x: x * head.scale - 1, likelihood),
    "tied": (lambda head, x: x.tanh() + head.table(torch.arange(8) % VOCAB) @ head.table.weight.t(), likelihood),
    "none of them": (lambda head, x: F.cross_entropy(x, torch.arange(8) % VOCAB, reduction="none")[:, None] * x, likelihood),
}
"""What keeps the logits split."""
NARROWING: dict[str, tuple[Callable[[Head, Tensor], Tensor], Any]] = {
    "softmax": (unchanged, of_probabilities),
    "z-loss": (unchanged, with_z_loss),
    "smoothing": (unchanged, partial(likelihood, label_smoothing=0.1)),
    "class weights": (unchanged, lambda x, batch: likelihood(x, batch, weight=WEIGHTS)),
    "mask": (lambda head, x: x.masked_fill(~head.allowed, -5.0), likelihood),
    "root": (lambda head, x: (x * x).sqrt(), likelihood),
    "quotient": (lambda head, x: 1 / (x + 10), likelihood),
    "contraction": (lambda head, x: x.tanh() @ head.head.weight @ head.table.weight.t(), likelihood),
    "sum": (lambda head, x: x - x.mean(-1, keepdim=True), likelihood),
    "largest": (lambda head, x: x * (x.argmax(-1) + 1)[:, None], likelihood),
    "flat": (lambda head, x: (x.flatten() * 2).view(-1, VOCAB), likelihood),
    "part": (lambda head, x: torch.cat([x[:, :4] * 2, x[:, 4:]], 1), likelihood),
}
"""What may not see padding: it is cut off first, and the report says so."""


@pytest.mark.parametrize("name", [*KEEPING, *NARROWING])
def test_whatever_reads_logits_reads_no_padding(name: str) -> None:
    use, criterion = {**KEEPING, **NARROWING}[name]
    torch.manual_seed(1)
    module, generator = Head(use), torch.Generator().manual_seed(2)
    batch = {key: torch.randint(VOCAB, (8,), generator=generator) for key in ("ids", "y")}
    program = derive(module, Mesh(tp=2), example=batch, names=HEAD_NAMES, layout={"vocab": "tp"}, loss=criterion)
    assert program.parameters["head.bias"].valid == (VOCAB,)
    assert error(program, module, batch) < EXACT
    assert bool(program.report) == (name in NARROWING), program.report
    for note in program.report:
        assert "11 of 12 entries of a padded vocabulary" in note["why"] and note["source"]


def test_only_a_vocabulary_is_padded() -> None:
    module, batch = Head(unchanged), {key: torch.arange(8) for key in ("ids", "y")}
    captured = capture(module, batch, likelihood)
    names = {**HEAD_NAMES, "head.weight": "classes embed", "head.bias": "classes"}
    with pytest.raises(
        ValueError, match=r"head\.weight: dimension 0 \(classes\) of size 11 does not divide over tp of 2 ranks"
    ):
        derive_captured(captured, Mesh(tp=2), names=names, layout={"classes": "tp"})


def test_ids_that_no_row_of_the_user_has_are_refused() -> None:
    module, batch = llama(257, False), token_batch("tokens", 257, 4, 8, 1)
    program = derive(module, Mesh(tp=2), example=batch, names=table_for(module, batch), layout=placed(Mesh(tp=2)), loss=loss)
    assert {name: bound.size for name, bound in program.bounds.items()} == {"tokens": 257, "targets": 257}


# Training, and the state of a run


@pytest.mark.parametrize(
    ("mesh", "vocab", "tied", "options"),
    [
        pytest.param("tp=2", 257, False, {}, marks=pytest.mark.nightly),
        ("tp=4", 257, True, {"sequence_parallel": True}),
        ("dp=2,tp=2", 255, False, {"zero": 3, "microbatches": 2}),
        ("pp=2,tp=2", 257, True, {"microbatches": 2}),
        pytest.param("tp=3", 256, False, {"layout": "vocab=tp"}, marks=pytest.mark.nightly),
    ],
)
def test_three_steps_of_adamw_end_in_the_weights_of_one_process(
    mesh: str, vocab: int, tied: bool, options: dict[str, Any]
) -> None:
    model = replace(
        build("llama-tiny", "float64"),
        factory=partial(llama, vocab, tied), example=partial(token_batch, "tokens", vocab), batch=4, seq=8,
    )  # fmt: skip
    with LocalWorld(Mesh.parse(mesh), timeout=20) as world:
        found = verify(TrainConfig(model=model.name, mesh=mesh, dtype="float64", steps=3, **options), world, model=model)
    assert found.loss < EXACT and found.grad < EXACT and found.weight < EXACT, found


def hugging_face(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = tiny.config(family)
    config.vocab_size, config.num_hidden_layers = 255, 2
    torch.manual_seed(0)
    module: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    return module


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_three_steps_of_a_tied_head_and_of_capped_logits(family: str) -> None:
    """GPT-2 ties its head to the table; Gemma 2 caps its logits as well."""
    model = replace(
        build(f"hf-tiny:{family}", "float64"),
        factory=partial(hugging_face, family), example=partial(token_batch, "input_ids", 255), batch=4, seq=8,
    )  # fmt: skip
    with LocalWorld(Mesh(dp=2, tp=2), timeout=20) as world:
        found = verify(TrainConfig(model=model.name, mesh="dp=2,tp=2", dtype="float64", steps=3), world, model=model)
    assert found.loss < EXACT and found.grad < EXACT and found.weight < 1e-11, found


def test_a_hugging_face_model_with_its_own_loss() -> None:
    """It views the logits with the true size, and computes the loss in float32: 1e-6 is its rounding."""
    module = hugging_face("gpt2")
    batch = {"input_ids": token_batch("tokens", 255, 4, 8, 1)["tokens"]}
    batch["labels"] = batch["input_ids"].clone()
    reference = copy.deepcopy(module)
    eager = reference(**batch, use_cache=False).loss
    eager.backward()
    with LocalWorld(Mesh(tp=2), timeout=20) as world:
        step = phx.parallelize(module, world, example=batch, names=table_for(module, batch), layout=placed(world.mesh))
        assert step.program.parameters["transformer.wte.weight"].shape == (256, 64) and not step.program.report
        out, grads = step(batch), step.gradients()
    assert abs(out.loss - eager.item()) < 1e-6 * eager.item()
    for name, p in reference.named_parameters():
        assert p.grad is not None
        assert float((grads[name] - p.grad).abs().max()) < 1e-6, name


@pytest.mark.parametrize(
    "optimizer", [phx.adamw(lr=1e-2, weight_decay=0.1), phx.sgd(lr=1e-2, momentum=0.9, weight_decay=0.1)], ids=["adamw", "sgd"]
)
def test_padding_stays_zero_and_no_state_shows_it(optimizer: Any) -> None:
    """Through initial values by global position, three updates, state_dict, and a run that goes on from it on another layout."""
    factory = partial(llama, 257, False, dropout=0.1)
    batches = [token_batch("tokens", 257, 4, 8, step) for step in range(4)]
    names = table_for(factory(), batches[0])

    def start(world: LocalWorld) -> phx.Step:
        return phx.parallelize(
            deferred_init(factory), world, example=batches[0], names=names, layout=placed(world.mesh) or None, loss=loss,
            optimizer=optimizer, seed=5,
        )  # fmt: skip

    with LocalWorld(Mesh(tp=4), timeout=20) as world, LocalWorld(Mesh(), timeout=20) as alone:
        step, other = start(world), start(alone)
        initial = materialize(deferred_init(factory), 5)
        for name, x in step.state_dict().items():
            assert torch.equal(x, initial.state_dict()[name]), name
        for batch in batches[:3]:
            step(batch)
        for executor in step.executors[3:]:  # rank 3 of 4 holds rows 195 to 259, of which the last three are padding
            for name in ("embed_tokens.weight", "lm_head.weight"):
                held = executor.parameters.views[name]
                assert held.shape == (65, 32) and held[:62].count_nonzero() == 62 * 32 and not held[62:].any()
        weights, moments = step.state_dict(), step.optimizer_state_dict()
        assert weights["lm_head.weight"].shape == (257, 32)
        assert weights["lm_head.weight"].untyped_storage().nbytes() == 257 * 32 * 8
        assert {tuple(x.shape) for name, x in moments.items() if "lm_head" in name} == {(257, 32)}
        for continued in (other, step):
            continued.load_state_dict(weights)
            continued.load_optimizer_state_dict(moments)
        assert abs(step(batches[3]).loss - other(batches[3]).loss) < EXACT
        assert abs(step.evaluate(batches[0]).loss - other.evaluate(batches[0]).loss) < EXACT
        logits = step.watch("lm_head", batches[3])
        assert logits.shape == (4, 8, 257)
        torch.testing.assert_close(logits, other.watch("lm_head", batches[3]), rtol=0, atol=EXACT)
        assert "vocab 257 padded to 260 on tp=4: embed_tokens.weight, lm_head.weight" in step.explain()


def test_a_loop_of_ones_own_gives_and_takes_true_shapes() -> None:
    module, batch = llama(257, True), token_batch("tokens", 257, 4, 8, 1)
    with LocalWorld(Mesh(tp=2), timeout=20) as world:
        modules = phx.shard(module, world, example=batch, names=table_for(module, batch), layout=placed(world.mesh), loss=loss)
        states = world.run(lambda rank, mine: mine.full_state_dict(), modules)
    for name, x in module.state_dict().items():
        assert torch.equal(states[0][name], x), name
