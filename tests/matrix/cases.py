"""The combinations of the matrix, and the models that they are tried on, small enough for a second each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import rules
from phalanx.comm.local import local
from phalanx.mesh import Mesh
from phalanx.models import llama, mlp
from phalanx.train import tiny
from phalanx.train.config import OptimizerConfig, TrainConfig
from phalanx.train.models import Model, class_batch, token_batch, token_loss
from phalanx.train.norms import rewrite_norms
from phalanx.train.verify import Comparison, verify

# From equal weights two float64 computations differ by the order of their sums: some 1e3 roundings of 1e-16, less than 1e-12.
# An update of AdamW divides a gradient's rounding by its size; 1e-10 after three of them still sees 1e-8 of a gradient.
FROM_EQUAL_WEIGHTS, AFTER_THREE_STEPS = 1e-12, 1e-10

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

# One dropping combination of each model that can drop and each mesh.
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


def marked(cases: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """All cases, those that are not chosen for every change marked nightly."""
    often = set(chosen)
    return [pytest.param(case, id=str(case), marks=[] if case in often else pytest.mark.nightly) for case in cases]


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


def module_of(model: Model) -> nn.Module:
    torch.manual_seed(0)
    module = model.factory()
    rewrite_norms(module)
    return module


def mean_loss(module: nn.Module, model: Model, batch: dict[str, Tensor]) -> Tensor:
    """Of one process of plain PyTorch."""
    total, count = model.loss(module(next(value for name, value in batch.items() if name != "targets")), batch)
    return total / count
