"""The models that the command line knows by name: how each is built, what names its dimensions, what a batch looks like.

A table, not a framework: your own model needs none of this, only `phx.parallelize`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import rules
from phalanx.hf.folder import Folder, check_folder
from phalanx.models import llama, mlp
from phalanx.run.values import Values
from phalanx.train import tiny
from phalanx.train.config import closest

Loss = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor]]
Factory = Callable[[], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that can be trained by name."""

    name: str
    factory: Factory
    """Builds it, in the dtype that was asked for."""
    names: Mapping[str, str]
    """Names of the dimensions of parameters, outputs and inputs."""
    loss: Loss
    example: Callable[[int, int, int], dict[str, Tensor]]
    """(batch, seq, seed) to a random global batch."""
    batch: int
    seq: int
    """Default sizes of a step."""
    tokens: str | None
    """The batch entry that holds tokens, beside "targets"; None for a model that does not read text."""
    positions: str | None = None
    """The batch entry that holds each token's position in its document, where sequences hold several documents that are to be kept
    apart; None for a model that cannot."""
    values: Values | None = None
    """Where its weights are read from, shard by shard; None: as the factory initialises them."""

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Every dimension name that the names table uses."""
        return tuple(dict.fromkeys(word for names in self.names.values() for word in names.split()))


def build(name: str, dtype: str, *, dropout: float = 0.0, documents: bool = False) -> Model:
    """The model called `name`: one of NAMES, hf-tiny: and a family of transformers, or hf: and a folder with a Hugging Face model.

    documents: its sequences hold several documents, which do not look at one another; its batches have the entry `positions`.
    Raises ValueError, with the closest match, if there is none of that name, and if it cannot keep documents apart.
    """
    check_name(name)
    kind, colon, rest = name.partition(":")
    make = partial(PREFIXES[kind], rest) if colon else NAMES[name]
    model = make(name, getattr(torch, dtype), dropout)
    return of_documents(model) if documents else model


def of_documents(model: Model) -> Model:
    """The same model for sequences of several documents. Raises ValueError if it cannot keep them apart."""
    if model.positions is None:
        raise ValueError(
            f"--mask-documents: the model {model.name} cannot keep documents apart, since its forward takes no positions; "
            "leave the option out, or train a Llama"
        )
    return replace(
        model,
        factory=partial(_uncached, model.factory),
        names={**model.names, model.positions: "batch seq"},
        example=partial(document_batch, model.example, model.positions),
    )


def check_name(name: str) -> None:
    """Raise ValueError, with the closest match, for a name that is not one, and for a folder of hf: that holds no sound weights.

    What follows hf-tiny: is left to transformers.
    """
    kind, colon, rest = name.partition(":")
    if name not in NAMES and not (colon and kind in PREFIXES):
        raise ValueError(f"there is no model {name!r}; there are {closest(name, (*NAMES, 'hf-tiny:llama', 'hf:FOLDER'))}")
    if kind == "hf" and colon:
        check_folder(Path(rest))


def token_loss(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed cross entropy of a Hugging Face model in its logits' own type, and the number of targets that are not -100."""
    targets = batch["targets"].flatten()
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets, reduction="sum"), (targets != -100).sum()


def token_batch(key: str, vocab: int, batch: int, seq: int, seed: int) -> dict[str, Tensor]:
    """Random tokens; one target in eight is left out (-100), so that a count taken for granted shows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (batch, seq + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(batch, seq, generator=generator) < 1 / 8] = -100
    return {key: tokens[:, :-1].contiguous(), "targets": targets}


def document_batch(
    make: Callable[[int, int, int], dict[str, Tensor]], positions: str, batch: int, seq: int, seed: int
) -> dict[str, Tensor]:
    """A batch of `make` cut into random documents of eight tokens on average, none of which is to predict the next one's first."""
    values = make(batch, seq, seed)
    starts = torch.rand(batch, seq, generator=torch.Generator().manual_seed(-1 - seed)) < 1 / 8
    starts[:, 0] = True
    place = torch.arange(seq).expand(batch, seq)
    values["targets"][:, :-1][starts[:, 1:]] = -100
    return {**values, positions: place - torch.where(starts, place, 0).cummax(1).values}


def class_batch(inputs: int, classes: int, dtype: torch.dtype, batch: int, seq: int, seed: int) -> dict[str, Tensor]:
    """Random points, each of the class of its largest coordinate: something that an MLP can learn. There is no sequence."""
    del seq
    x = torch.randn(batch, inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"x": x.to(dtype), "targets": x[:, :classes].argmax(1)}


def _mlp(name: str, dtype: torch.dtype, dropout: float) -> Model:
    config = mlp.MLPConfig(dropout=dropout)
    example = partial(class_batch, config.inputs, config.outputs, dtype)
    factory = partial(_in_dtype, dtype, mlp.MLP, config)
    return Model(
        name=name, factory=factory, names=_names(factory, example), loss=mlp.loss, example=example, batch=32, seq=1, tokens=None
    )


def _llama(size: str, batch: int, seq: int, name: str, dtype: torch.dtype, dropout: float) -> Model:
    config = llama.LlamaConfig.preset(size, dropout=dropout)
    example = partial(token_batch, "tokens", config.vocab)
    factory = partial(_in_dtype, dtype, llama.Llama, config)
    return Model(
        name=name,
        factory=factory,
        names=_names(factory, example),
        loss=llama.loss,
        example=example,
        batch=batch,
        seq=seq,
        tokens="tokens",
        positions="positions",
    )


def _hugging_face(family: str, name: str, dtype: torch.dtype, dropout: float) -> Model:
    if dropout:
        raise ValueError(f"--dropout {dropout}: {name} is a fixed configuration without dropout")
    config = tiny.config(family)
    return _causal(name, partial(tiny.build, family, dtype), config.vocab_size, seq=32)


def _hugging_face_folder(path: str, name: str, dtype: torch.dtype, dropout: float) -> Model:
    folder = Folder(path, dropout=dropout)
    seq = min(1024, getattr(folder.config, "max_position_embeddings", 1024))
    return _causal(name, partial(folder.module, dtype), folder.config.vocab_size, seq, folder.values)


def _causal(name: str, factory: Factory, vocab: int, seq: int, values: Values | None = None) -> Model:
    """A causal language model of transformers."""
    example = partial(token_batch, "input_ids", vocab)
    return Model(
        name=name,
        factory=factory,
        names=_names(factory, example),
        loss=token_loss,
        example=example,
        batch=8,
        seq=seq,
        tokens="input_ids",
        positions="position_ids",
        values=values,
    )


NAMES: dict[str, Callable[[str, torch.dtype, float], Model]] = {
    "mlp": _mlp,
    "llama-tiny": partial(_llama, "tiny", 16, 128),
    "llama-1b": partial(_llama, "1b", 8, 4096),
    "llama-8b": partial(_llama, "8b", 8, 8192),
    "llama-70b": partial(_llama, "70b", 8, 8192),
}
"""By name, with the default batch and sequence length of the Llamas."""
PREFIXES: dict[str, Callable[[str, str, torch.dtype, float], Model]] = {
    "hf-tiny": _hugging_face,
    "hf": _hugging_face_folder,
}
"""By what stands before the colon of a name."""


def _in_dtype(dtype: torch.dtype, make: Callable[[Any], nn.Module], config: object) -> nn.Module:
    """Build with `dtype` as the default, so that no float32 copy of a large model exists on the way."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make(config)
    finally:
        torch.set_default_dtype(before)


def _uncached(factory: Factory) -> nn.Module:
    """Without a key-value cache, beside which transformers leaves documents unmasked."""
    module = factory()
    if hasattr(module, "config") and hasattr(module.config, "use_cache"):
        module.config.use_cache = False
    return module


def _names(factory: Factory, example: Callable[[int, int, int], Mapping[str, Tensor]]) -> dict[str, str]:
    with torch.device("meta"):
        module = factory()
    return rules.table_for(module, example(1, 1, 0))
