"""The batches of a run: which samples a step takes, and of those only the ones that this rank works on."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from phalanx.comm.world import World
from phalanx.run.step import Step
from phalanx.spec import dim_ranges, shard
from phalanx.train.config import TrainConfig
from phalanx.train.data import Loader, byte_tokens, split
from phalanx.train.models import Model


class Batches:
    """Batches by step number, from text for a language model and made up for any other.

    On processes each rank reads its own samples (`is_local`); threads of one process share the global batch.
    """

    def __init__(self, config: TrainConfig, model: Model, step: Step) -> None:
        assert config.batch is not None
        assert config.seq is not None
        self._config, self._model, self._step = config, model, step
        self.is_local = model.tokens is not None and isinstance(step.world, World)
        self.source = "random points"
        self._training: Loader | None = None
        self._held_out: Loader | None = None
        if model.tokens is not None:
            training, held_out = split(byte_tokens(Path(config.data[0]) if config.data else None))
            self.source = f"{len(training):,} bytes of {', '.join(config.data) or 'the Python standard library'}"
            self._training = Loader(training, config.batch, config.seq, config.seed)
            if config.held_out:
                self._held_out = Loader(held_out, config.batch, config.seq, config.seed)
        elif config.data:
            raise ValueError(f"--data {' '.join(config.data)}: model {config.model} does not read text")

    def training(self, number: int) -> dict[str, Tensor]:
        """The batch of a step, numbered from 0."""
        return self._batch(self._training, number)

    def held_out(self, number: int) -> dict[str, Tensor]:
        """A batch that training never sees."""
        return self._batch(self._held_out, number + self._config.steps)

    def _batch(self, loader: Loader | None, number: int) -> dict[str, Tensor]:
        config, key = self._config, self._model.tokens
        if loader is None or key is None:
            assert config.batch is not None
            assert config.seq is not None
            return self._model.example(config.batch, config.seq, config.seed * 1_000_003 + number)
        batch = self._mine(loader, number, key) if self.is_local else loader.batch(number)
        batch[key] = batch.pop("tokens")
        return batch

    def _mine(self, loader: Loader, number: int, key: str) -> dict[str, Tensor]:
        """This rank's slice of each microbatch: read by sample, cut along the other dimensions if the layout splits them."""
        world, program = self._step.world, self._step.program
        assert isinstance(world, World)
        value = program.batch[key]  # tokens and targets have the same names and so the same Spec
        [(start, length)] = dim_ranges(value.spec, value.shape, world.mesh, world.rank, 0)
        local = loader.local(number, program.microbatches, start // length, value.shape[0] // length)
        rest = value.spec.with_dim(0, ())
        return {name: shard(x, rest, world.mesh, world.rank) for name, x in local.items()}
