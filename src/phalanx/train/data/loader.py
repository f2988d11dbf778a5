"""Batches of token windows at any cursor. A sample is seq + 1 tokens that follow one another, the last seq of them its targets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from phalanx.train.data.blend import Blend, block_slots
from phalanx.train.data.folder import Starts
from phalanx.train.data.source import Stretch

IGNORED = -100
"""The target of a token that predicts nothing; cross entropy's own default."""


class Loader:
    """Batches of {"tokens", "targets"}, int64 (batch, seq), by cursor. Holds no position: any cursor can be asked for.

    With `mask_documents` also "positions", int64 (batch, seq): the place of a token in its document, counted from 0 where the document
    or the window begins; and the last token of a document has the target -100.
    """

    def __init__(self, stretches: Sequence[Stretch], batch: int, seq: int, seed: int, *, mask_documents: bool = False) -> None:
        for stretch in stretches:
            if batch < 1 or seq < 1 or stretch.windows(seq) < 1:
                raise ValueError(
                    f"a batch of {batch} sequences of {seq} + 1 tokens cannot be taken from {stretch.tokens} tokens of "
                    f"{stretch.source.name}"
                )
            if mask_documents and stretch.source.documents is None:
                raise ValueError(
                    f"--mask-documents: nothing says where documents begin in {stretch.source.name}; `phalanx data pack` does"
                )
        sources = [stretch.source for stretch in stretches]
        weights = [source.weight for source in sources if source.weight is not None]
        slots = block_slots([source.name for source in sources], weights) if weights and len(sources) > 1 else None
        self.blend = Blend(tuple(stretch.windows(seq) for stretch in stretches), slots, seed)
        self.stretches, self.size, self.seq, self.mask_documents = tuple(stretches), batch, seq, mask_documents

    def batch(self, cursor: int) -> dict[str, Tensor]:
        """The global batch whose first sample is number `cursor`."""
        return self._read(torch.arange(self.size) + cursor)

    def local(self, cursor: int, microbatches: int, part: int, parts: int) -> dict[str, Tensor]:
        """The samples of the global batch that data rank `part` of `parts` works on, microbatch after microbatch.

        Microbatch j holds the samples [jB/m, (j+1)B/m) of the B that begin at `cursor`, split contiguously over the data ranks.
        """
        if self.size % (microbatches * parts) or not 0 <= part < parts:
            raise ValueError(
                f"a batch of {self.size} does not divide into {microbatches} microbatches for {parts} data ranks, "
                f"of which this is number {part}, counting from 0"
            )
        mine = torch.arange(self.size).view(microbatches, parts, -1)[:, part].reshape(-1)
        return self._read(mine + cursor)

    def _read(self, cursor: Tensor) -> dict[str, Tensor]:
        source, window = self.blend.at(cursor)
        rows = np.empty((len(cursor), self.seq + 1), np.int64)
        starts: list[Starts] = []
        for row, which, at in zip(rows, source.tolist(), window.tolist(), strict=True):
            stretch = self.stretches[which]
            begin = stretch.begin + at * self.seq
            row[:] = stretch.source.tokens[begin : begin + self.seq + 1]
            if self.mask_documents:
                assert stretch.source.documents is not None
                starts.append(starts_inside(stretch.source.documents, begin, self.seq + 1))
        both = torch.from_numpy(rows)  # (batch, seq + 1)
        # Clones: one row alone is contiguous as it is, and targets that share its memory would be written into tokens below.
        batch = {"tokens": both[:, :-1].clone(), "targets": both[:, 1:].clone()}
        if self.mask_documents:
            batch["positions"] = torch.from_numpy(np.stack([positions(each, self.seq) for each in starts]))
            for row_targets, each in zip(batch["targets"], starts, strict=True):
                row_targets[torch.from_numpy(each - 1)] = IGNORED
        return batch


def starts_inside(documents: Starts, begin: int, length: int) -> Starts:
    """Where documents begin in the window [begin, begin + length), counted from its begin, which is not one of them."""
    low, high = np.searchsorted(documents, [begin, begin + length], side="left")
    inside = np.asarray(documents[low:high], np.int64) - begin
    return inside[inside > 0]


def positions(starts: Starts, seq: int) -> Starts:
    """(seq,): how far each token is from the last start at or before it, the window's own begin if there is none."""
    place = np.arange(seq, dtype=np.int64)
    last = np.zeros(seq, np.int64)
    inside = starts[starts < seq]
    last[inside] = inside
    return place - np.maximum.accumulate(last)
