"""The batches of a run: which samples a step takes, and of those only the ones that this rank works on.

By cursor, the samples that the whole run has taken before, so that neither mesh, batch size nor a restart changes their order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from torch import Tensor

from phalanx.comm.world import World
from phalanx.run.step import Step
from phalanx.spec import dim_ranges, shard
from phalanx.train.config import TrainConfig
from phalanx.train.data.ahead import DEPTH, Ahead
from phalanx.train.data.blend import BLOCK
from phalanx.train.data.loader import Loader
from phalanx.train.data.source import Source, Stretch, open_sources, split
from phalanx.train.models import Model

HELD_OUT_SEED = 0
"""Runs of any seed are evaluated on the same samples."""


class Batches:
    """Batches from text for a language model, and made up for any other.

    On processes each rank reads its own samples (`is_local`); threads of one process share the global batch. Text is read `ahead`
    batches early by a thread of its own; 0 reads when asked.

    size         samples of a step
    source       what is learned from, in words
    fingerprint  a digest of it: runs with the same one and the same seed take the same sample at each cursor
    """

    def __init__(self, config: TrainConfig, model: Model, step: Step, *, ahead: int = DEPTH) -> None:
        """Raises ValueError if the text, the model and --mask-documents do not fit one another."""
        assert config.batch is not None
        assert config.seq is not None
        self._config, self._model, self._step = config, model, step
        self.size, self._seq = config.batch, config.seq
        self.is_local = model.tokens is not None and isinstance(step.world, World)
        self.source = "random points"
        self.fingerprint = _digest(["example", config.model])
        self._training: Loader | None = None
        self._held_out: Loader | None = None
        self._ahead: Ahead | None = None
        if model.tokens is not None:
            self._open(model.tokens, ahead)
        elif config.data or config.mask_documents:
            what = f"--data {' '.join(config.data)}" if config.data else "--mask-documents"
            raise ValueError(f"{what}: model {config.model} does not read text")

    def training(self, cursor: int) -> Mapping[str, Tensor]:
        """The batch of a step, of which all ranks together have taken `cursor` samples before."""
        if self._ahead is not None:
            return self._ahead(cursor)
        return self._at(self._training, cursor) if self._training is not None else self._example(cursor // self.size)

    def held_out(self, number: int) -> Mapping[str, Tensor]:
        """Batch `number` of the samples that training never sees: the same ones at every evaluation, and in every run."""
        return self._at(self._held_out, number * self.size) if self._held_out is not None else self._example(-1 - number)

    def close(self) -> None:
        """End the thread that reads ahead."""
        if self._ahead is not None:
            self._ahead.close()

    def _open(self, key: str, ahead: int) -> None:
        config = self._config
        sources = open_sources(config.data)
        self._check(sources, key)
        parts = [split(source) for source in sources]
        self._training = training = self._loader([part for part, _ in parts], config.seed)
        if config.held_out:
            self._held_out = self._loader([part for _, part in parts], HELD_OUT_SEED)
            samples, asked = sum(part.windows(self._seq) for _, part in parts), config.held_out * self.size
            if asked > samples:
                raise ValueError(
                    f"held_out is {config.held_out} batches of {self.size}, but the text that is kept from training has {samples} samples "
                    f"of {self._seq} tokens: at most {samples // self.size} batches; "
                    "lower --batch or --seq, or give more text"
                )
        slots = training.blend.slots
        self.source = _described(training)
        # A sample is seq tokens: with another seq a cursor stands for other samples.
        self.fingerprint = _digest([[source.digest for source in sources], slots, self._seq])
        if ahead:
            self._ahead = Ahead(lambda cursor: self._at(training, cursor), self.size, ahead)

    def _loader(self, stretches: list[Stretch], seed: int) -> Loader:
        return Loader(stretches, self.size, self._seq, seed, mask_documents=self._config.mask_documents)

    def _check(self, sources: tuple[Source, ...], key: str) -> None:
        model = self._config.model
        if self._config.mask_documents and self._model.positions is None:
            raise ValueError(f"--mask-documents: model {model} does not take the positions of tokens in their documents")
        bounds = [bound.size for name, bound in self._step.program.bounds.items() if name in (key, "targets")]
        for source in sources:
            if bounds and source.largest is not None and source.largest >= min(bounds):
                raise ValueError(
                    f"{source.name} holds token {source.largest} of {source.tokenizer}; the vocabulary of model {model} ends at "
                    f"{min(bounds) - 1}"
                )

    def _at(self, loader: Loader, cursor: int) -> dict[str, Tensor]:
        key = self._model.tokens
        assert key is not None
        batch = self._mine(loader, cursor, key) if self.is_local else loader.batch(cursor)
        batch[key] = batch.pop("tokens")
        if self._config.mask_documents:
            assert self._model.positions is not None
            batch[self._model.positions] = batch.pop("positions")
        return batch

    def _example(self, number: int) -> dict[str, Tensor]:
        return self._model.example(self.size, self._seq, self._config.seed * 1_000_003 + number)

    def _mine(self, loader: Loader, cursor: int, key: str) -> dict[str, Tensor]:
        """This rank's slice of each microbatch: read by sample, cut along the other dimensions if the layout splits them."""
        world, program = self._step.world, self._step.program
        assert isinstance(world, World)
        value = program.batch[key]  # all entries have the same names and so the same Spec
        [(start, length)] = dim_ranges(value.spec, value.shape, world.mesh, world.rank, 0)
        local = loader.local(cursor, program.microbatches, start // length, value.shape[0] // length)
        rest = value.spec.with_dim(0, ())
        return {name: shard(x, rest, world.mesh, world.rank) for name, x in local.items()}


def _described(training: Loader) -> str:
    """12,345 bytes of a (70%), 678 bytes of b (30%)"""
    slots = training.blend.slots
    shares = [""] * len(training.stretches) if slots is None else [f" ({count / BLOCK:.1%} of samples)" for count in slots]
    return ", ".join(
        f"{stretch.tokens:,} {stretch.source.unit} of {stretch.source.name}{share}"
        for stretch, share in zip(training.stretches, shares, strict=True)
    )


def _digest(content: object) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
