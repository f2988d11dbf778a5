"""What a measurement leaves: seconds of every rank and iteration, and the figures that a row of the table is made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.bench.busbw import OPS, Form, bandwidths
from phalanx.bench.pairs import Ratio
from phalanx.bench.sweep import Case


@dataclass(frozen=True)
class Samples:
    """Seconds per call, of every rank in every iteration: by_rank[rank][iteration]."""

    by_rank: tuple[tuple[float, ...], ...]

    @property
    def slowest(self) -> tuple[float, ...]:
        """Of each iteration, the rank that took longest: a collective is done when all are."""
        return tuple(max(ranks) for ranks in zip(*self.by_rank, strict=True))

    def quantile(self, q: float) -> float:
        """The least sample of `slowest` that at least the fraction q of them does not exceed; the median for q=0.5."""
        ordered = sorted(self.slowest)
        if q == 0.5:
            return statistics.median(ordered)
        return ordered[max(0, math.ceil(q * len(ordered)) - 1)]

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median."""
        return (self.quantile(0.75) - self.quantile(0.25)) / self.quantile(0.5)


@dataclass(frozen=True)
class Measured:
    """One form of a case.

    wrong  elements that differ from the exact result, of all ranks together; None if nothing was checked
    ratio  how fast it is relative to the backend that the others are held against; None for that backend itself
    """

    samples: Samples
    wrong: int | None
    ratio: Ratio | None = None


@dataclass(frozen=True)
class Row:
    case: Case
    forms: Mapping[Form, Measured]

    @property
    def usual(self) -> Measured:
        """The form that callers use most, or the one there is."""
        return self.forms.get(OPS[self.case.op].usual) or next(iter(self.forms.values()))

    @property
    def wrong(self) -> int:
        return sum(measured.wrong or 0 for measured in self.forms.values())

    def bandwidths(self, form: Form, q: float = 0.5) -> tuple[float, float]:
        """(algbw, busbw) in GB/s at a quantile of the time."""
        return bandwidths(self.case.op, self.case.size, self.forms[form].samples.quantile(q), self.case.group)
