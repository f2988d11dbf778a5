"""Which sample comes at a cursor: a function of seed, weights and cursor, without a table and without a position to keep.

Samples come in blocks of 1,000. Each block has the same number from each source, its weight rounded by largest remainder, in an
order that is a keyed permutation of the block's places. So the n-th sample of a source has a number that follows from block and place;
number n is sample n mod w of the source's w, under a permutation of its own for each of its epochs n // w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from phalanx import random

BLOCK = 1000
"""Samples in which the proportions are exact, and the finest share: a thousandth."""


@dataclass(frozen=True)
class Blend:
    """The order of the samples of several sources."""

    windows: tuple[int, ...]
    """Samples of each source."""
    slots: tuple[int, ...] | None
    """Samples of each source in a block; None: all sources are one, so that an epoch has each sample of each once."""
    seed: int

    def at(self, cursor: Tensor) -> tuple[Tensor, Tensor]:
        """(source, sample of that source), int64 in the shape of `cursor`, which counts the run's samples from 0."""
        if self.slots is None:
            chosen = self._permuted(cursor, sum(self.windows))
            ends = torch.tensor(list(accumulate(self.windows)))
            source = torch.bucketize(chosen, ends, right=True)
            return source, chosen - _begins(ends)[source]
        ends = torch.tensor(list(accumulate(self.slots)))
        block, place = cursor // BLOCK, cursor % BLOCK
        for number in set(block.tolist()):
            here = block == number
            place[here] = random.permutation(random.key(self.seed, "blend", number), BLOCK, place[here])
        source = torch.bucketize(place, ends, right=True)
        number = block * torch.tensor(self.slots)[source] + place - _begins(ends)[source]
        window = torch.empty_like(number)
        for which in set(source.tolist()):
            here = source == which
            window[here] = self._permuted(number[here], self.windows[which])
        return source, window

    def _permuted(self, number: Tensor, windows: int) -> Tensor:
        """The sample that comes as number `number` of a source of that many: every epoch has a permutation of its own."""
        epoch, position = number // windows, number % windows
        chosen = torch.empty_like(number)
        for each in set(epoch.tolist()):
            here = epoch == each
            chosen[here] = random.permutation(random.key(self.seed, "order", each), windows, position[here])
        return chosen


def block_slots(names: Sequence[str], weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each source in a block: its share of BLOCK, rounded by largest remainder (Hamilton's method).

    Raises ValueError for a share that is too small to have one.
    """
    quotas = [BLOCK * weight / sum(weights) for weight in weights]
    slots = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda at: (slots[at] - quotas[at], at))
    for at in by_remainder[: BLOCK - sum(slots)]:
        slots[at] += 1
    for name, count, quota in zip(names, slots, quotas, strict=True):
        if not count:
            raise ValueError(
                f"{name} has {quota / BLOCK:.4%} of the weight, less than one sample in {BLOCK:,}: give it more, or leave it out"
            )
    return tuple(slots)


def _begins(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends[:-1]])
