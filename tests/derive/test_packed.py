"""Several documents in a row compute what each computes alone: in the model itself, in the captured graph, and on any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm.local import local
from phalanx.derive import derive_captured
from phalanx.derive.capture import capture, check_capture
from phalanx.derive.program import Captured
from phalanx.hf import capture_context
from phalanx.mesh import Mesh
from phalanx.models.llama import Llama, LlamaConfig, document_mask, loss
from phalanx.rules import TABLES
from phalanx.train import tiny
from phalanx.train.config import TrainConfig
from phalanx.train.models import Model, build, document_batch, of_documents, token_batch, token_loss
from phalanx.train.verify import verify

aten = torch.ops.aten
# float64 sums over other lengths and in another order; a token of another document that is seen changes a logit by more than 1e-2
TOLERANCE = 1e-12

LENGTHS = (20, 1, 2, 9)
"""Of the documents of a row: one longer than the tiny families' window of 16, one of a single token."""
SEQ = sum(LENGTHS)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, SEQ)

FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "smollm3": "SmolLM3",
    "phi3": "Phi3",
    "gpt2": "GPT2",
    "gpt_neox": "GPTNeoX",
}
"""transformers' families by their tables of names."""
OURS = {"Llama", "MLP"}


def magnified(module: nn.Module) -> nn.Module:
    """With weights so large that attention is far from uniform and no token is without effect."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return module


def packed(key: str = "tokens") -> dict[str, Tensor]:
    batch = token_batch(key, 256, 2, SEQ, seed=0)
    return batch | {"positions" if key == "tokens" else "position_ids": POSITIONS.clone()}


def spans() -> list[slice]:
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]


def difference(mine: Tensor, expected: Tensor) -> float:
    return float((mine - expected).detach().abs().max() / expected.detach().abs().max())


def test_the_mask_by_hand() -> None:
    mask = document_mask(torch.tensor([[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]), torch.float64)
    seen = [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]],
        torch.ones(5, 5).tril().tolist(),
    ]
    assert mask.shape == (2, 1, 5, 5)
    assert mask.dtype == torch.float64
    assert torch.equal(mask.exp()[:, 0], torch.tensor(seen, dtype=torch.float64))
    assert document_mask(torch.zeros(1, 2, dtype=torch.int64), torch.bfloat16).dtype == torch.bfloat16


def test_logits_loss_and_gradients_of_llama_are_those_of_each_document_alone() -> None:
    torch.manual_seed(0)
    model = magnified(Llama(LlamaConfig()).double())
    batch = packed()
    logits = model(batch["tokens"], batch["positions"])
    total, count = loss(logits, batch)
    together = torch.autograd.grad(total, list(model.parameters()))
    sums, counts = torch.zeros((), dtype=torch.float64), 0
    for span in spans():
        own = model(batch["tokens"][:, span])
        assert difference(logits[:, span], own) < TOLERANCE
        part, number = loss(own, {"targets": batch["targets"][:, span]})
        sums, counts = sums + part, counts + int(number)
    assert counts == int(count)
    assert difference(total, sums) < TOLERANCE
    for mine, own in zip(together, torch.autograd.grad(sums, list(model.parameters())), strict=True):
        assert difference(mine, own) < TOLERANCE
    assert difference(logits, model(batch["tokens"])) > 1e-2  # else nothing was masked that matters


def test_one_document_is_a_row_without_positions() -> None:
    torch.manual_seed(0)
    model = magnified(Llama(LlamaConfig()).double())
    tokens = packed()["tokens"]
    assert difference(model(tokens, torch.arange(SEQ).expand(2, SEQ)), model(tokens)) < TOLERANCE


def attentions(captured: Captured) -> list[tuple[bool, bool]]:
    """(has a mask, is_causal) of every attention."""
    nodes = [node for piece in captured.pieces for node in piece.graph.graph.nodes]
    found = [node for node in nodes if node.target is aten.scaled_dot_product_attention.default]
    return [(len(n.args) > 3 and n.args[3] is not None, len(n.args) > 5 and bool(n.args[5])) for n in found]


def test_without_positions_attention_stays_causal_by_flag() -> None:
    torch.manual_seed(0)
    model, batch = Llama(LlamaConfig()), packed()
    plain = capture(model, {key: batch[key] for key in ("tokens", "targets")}, loss)
    assert attentions(plain) == [(False, True)] * 4
    assert not plain.tables_read_batch
    assert attentions(capture(model, batch, loss)) == [(True, False)] * 4


@pytest.mark.parametrize("name", ["llama-tiny", "hf-tiny:llama", "hf-tiny:mistral"])
def test_a_stage_makes_one_mask_for_all_its_layers_and_each_data_rank_its_own(name: str) -> None:
    model = build(name, "float32", documents=True)
    prepare = capture_context if name.startswith("hf") else None
    captured = capture(model.factory(), model.example(4, 32, 0), model.loss, prepare=prepare)
    assert captured.tables_read_batch
    layout = {"batch": "dp", "heads": "tp", "mlp": "tp", "vocab": "tp"}
    program = derive_captured(captured, Mesh(dp=2, tp=2), names=model.names, layout=layout)
    assert program.tables is not None
    moved = [node for node in program.tables.cls.lowered.graph.nodes if "phx" in str(node.target)]
    assert not moved
    masks = [value for value in program.tables.cls.outputs if value.shape == (4, 1, 32, 32) and value.dtype == torch.float32]
    assert name != "hf-tiny:llama" or len(masks) == 1  # our rotary tables happen to have this shape as well
    assert masks
    assert all(value.spec.dims[0] == ("dp",) for value in masks)
    for piece in captured.pieces:
        made = [n for n in piece.graph.graph.nodes if n.target in (aten.eq.Tensor, aten.cumsum.default, aten.where.ScalarOther)]
        assert not made, f"{piece.name} makes masks: {made}"


MESHES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-tiny", "dp=2,tp=2", {}),
    ("llama-tiny", "tp=2", {"sequence_parallel": True, "recompute": "selective"}),
    ("llama-tiny", "pp=2,dp=2", {"microbatches": 2, "zero": 2}),
    ("llama-tiny", "pp=2", {"microbatches": 4, "schedule": "zb-h1", "recompute": "full"}),
    ("llama-tiny", "dp=2", {"zero": 3, "microbatches": 2}),
    ("hf-tiny:llama", "pp=2,tp=2", {"microbatches": 2, "sequence_parallel": True}),
    ("hf-tiny:gemma3_text", "dp=2,tp=2", {"recompute": "full"}),
]
ALL_MESHES = [
    (f"hf-tiny:{family}", mesh, more)
    for family in FAMILIES
    for mesh, more in (
        ("dp=2,tp=2", {"zero": 1}),
        ("pp=2,tp=2", {"microbatches": 2, "sequence_parallel": True, "recompute": "full"}),
    )
]


def check_mesh(name: str, mesh: str, more: Mapping[str, Any]) -> None:
    config = TrainConfig(model=name, mesh=mesh, steps=2, dtype="float64", batch=4, seq=32, **more)
    with local(Mesh.parse(mesh)) as world:
        found = verify(config, world, model=build(name, "float64", documents=True))
    assert found.passed
    assert max(found.loss, found.grad) < TOLERANCE
    assert found.grad > 0  # two orders of summation that agree to the last bit would be no comparison


@pytest.mark.parametrize(("name", "mesh", "more"), MESHES)
def test_the_mesh_does_not_change_packed_sequences(name: str, mesh: str, more: dict[str, Any]) -> None:
    check_mesh(name, mesh, more)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "mesh", "more"), ALL_MESHES)
def test_the_mesh_does_not_change_packed_sequences_of_any_family(name: str, mesh: str, more: dict[str, Any]) -> None:
    check_mesh(name, mesh, more)


def test_positions_that_a_rank_forgets_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.train import verify as room

    stock = room.Derived.step

    def forgetful(self: room.Derived, batch: Mapping[str, Tensor]) -> room.Numbers:
        one = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"]).contiguous()
        return stock(self, {**batch, "positions": one})

    monkeypatch.setattr(room.Derived, "step", forgetful)
    config = TrainConfig(model="llama-tiny", steps=1, dtype="float64", batch=4, seq=32)
    with local(Mesh()) as world:
        assert not verify(config, world, model=build("llama-tiny", "float64", documents=True)).passed


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_families_keep_documents_apart(family: str) -> None:
    """Stock transformers against each document alone, and the captured graph against stock transformers."""
    torch.manual_seed(0)
    module, batch = magnified(tiny.build(family, torch.float64)), packed("input_ids")
    logits = module(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    # Gemma 2 takes its softmax in float32
    tolerance = 1e-5 if family == "gemma2" else TOLERANCE
    for span in spans():
        assert difference(logits[:, span], module(input_ids=batch["input_ids"][:, span]).logits) < tolerance
    assert difference(logits, module(input_ids=batch["input_ids"]).logits) > 1e-2
    captured = capture(module, batch, token_loss, prepare=capture_context)
    assert all(found == (True, False) for found in attentions(captured))
    # norms that compute in float32 round before and after otherwise equal numbers
    assert check_capture(module, captured, batch, token_loss) < 1e-6


def test_every_family_with_names_is_proved() -> None:
    assert set(FAMILIES.values()) | OURS == set(TABLES)


def test_a_cache_is_switched_off() -> None:
    """Beside a cache, which is its default, transformers computes no mask of documents and says nothing."""

    def cached() -> nn.Module:
        torch.manual_seed(0)
        module: Any = magnified(tiny.build("llama", torch.float64))
        module.config.use_cache = True
        return module

    batch = packed("input_ids")
    entries = {key: batch[key] for key in ("input_ids", "position_ids")}
    plain = build("hf-tiny:llama", "float64")
    safe = of_documents(replace(plain, factory=cached)).factory()
    span = spans()[-1]
    alone = safe(input_ids=batch["input_ids"][:, span]).logits
    assert difference(safe(**entries).logits[:, span], alone) < TOLERANCE
    assert difference(cached()(**entries).logits[:, span], alone) > 1e-2


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("opt", "OPTForCausalLM makes its attention mask without them"),
        ("qwen3_next", r"Qwen3NextForCausalLM has layers that no mask keeps apart \(linear_attention\)"),
    ],
)
def test_a_model_that_would_mix_documents_is_refused(family: str, why: str) -> None:
    module = tiny.build(family, torch.float32)
    batch = document_batch(partial(token_batch, "input_ids", 256), "position_ids", 2, 16, 0)
    with pytest.raises(ValueError, match=why):
        capture(module, batch, token_loss, prepare=capture_context)


def test_a_model_without_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="--mask-documents: the model mlp cannot keep documents apart"):
        build("mlp", "float32", documents=True)


def test_a_batch_of_documents_predicts_no_other_document() -> None:
    model: Model = build("llama-tiny", "float32", documents=True)
    batch, same = model.example(4, 64, 7), build("llama-tiny", "float32").example(4, 64, 7)
    positions = batch["positions"]
    starts = positions == 0
    assert starts[:, 0].all()
    assert starts[:, 1:].any(1).all()
    assert torch.equal(torch.where(starts[:, 1:], 0, positions[:, :-1] + 1), positions[:, 1:])
    assert (batch["targets"][:, :-1][starts[:, 1:]] == -100).all()
    assert torch.equal(batch["targets"][:, :-1][~starts[:, 1:]], same["targets"][:, :-1][~starts[:, 1:]])
    assert torch.equal(batch["tokens"], same["tokens"])
    assert model.names["positions"] == "batch seq"
