"""Which segments make each pipeline stage, so that the slowest rank is as fast as it can be. Pure.

A stage is a run of consecutive segments. What a segment costs is measured, or estimated from its Program; embedding and head are
segments like any other, so a heavy head gets fewer blocks beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from phalanx.schedule.view import SegmentView, View

EXACT_STATES = 20_000
"""Partitions that are looked at, at most, to find the best for ranks of several stages. Beyond it the search is local."""

SLIP = 1e-9
"""Of the whole cost: what two sums may differ by and be equal."""

Stages = tuple[tuple[int, ...], ...]


def stages(view: View, count: int, measured: Mapping[int, float] | None = None, host: Sequence[int] | None = None) -> Stages:
    """Segments of each of `count` stages of a Program. `measured` are seconds of F plus B by segment, all or none of them.

    Raises ValueError if some are missing or there are more stages than segments.
    """
    if measured is None:
        return balance(costs_of(view), count, host)
    missing = [view.segments[k].name for k in range(len(view.segments)) if k not in measured]
    if missing:
        raise ValueError(f"{len(missing)} of {len(view.segments)} segments were not measured: {', '.join(missing[:5])}")
    return balance([measured[k] for k in range(len(view.segments))], count, host)


def costs_of(view: View) -> list[float]:
    """By segment, in flops: those of F and B, or what it takes to move its bytes once each way if that is more.

    The bytes are the cuts on both sides and those of their gradients, what F saves for B, and the weights' gradients: what an
    embedding or a norm does, whose flops are none. A View has no times, so a byte counts as `view.flops_per_byte` flops.
    """
    return [max(_flops(segment), view.flops_per_byte * _bytes(segment)) for segment in view.segments]


def _flops(segment: SegmentView) -> float:
    flops = segment.flops
    return flops.get("F", 0.0) + flops.get("B", flops.get("I", 0.0) + flops.get("W", 0.0))


def _bytes(segment: SegmentView) -> float:
    cuts = (*segment.inputs, *segment.outputs, *segment.input_grads, *segment.output_grads)
    return sum(message.bytes for message in cuts) + 2 * segment.saved_bytes


def balance(costs: Sequence[float], count: int, host: Sequence[int] | None = None) -> Stages:
    """The partition of consecutive segments into `count` stages whose most expensive rank costs least.

    Without `host` each stage is a rank: exact, by dynamic programming in O(count n^2) for n segments. Of partitions with an equal
    maximum it is that of the smallest sum of squares, then that whose earlier stages are the longer. With `host`, the rank
    of each stage, a rank costs the sum of its stages: exact while there are no more than EXACT_STATES partitions, else the
    result of passing single segments between stages as long as that helps, from the partition that ignores `host`.
    Raises ValueError if there are more stages than segments, a cost is negative, or `host` is not of `count` stages.
    """
    if not 1 <= count <= len(costs):
        raise ValueError(f"{count} pipeline stages need at least as many segments and at least 1 stage; there are {len(costs)}")
    if any(not 0 <= cost < math.inf for cost in costs):
        raise ValueError(f"the cost of a segment is 0 or more and finite; segments {_wrong(costs)} are not")
    if host is None or len(set(host)) == count:
        return _cut(_even(costs, count), len(costs))
    if len(host) != count:
        raise ValueError(f"host places {len(host)} stages, but there are {count}")
    if math.comb(len(costs) - 1, count - 1) <= EXACT_STATES:
        return _cut(_exact(costs, host), len(costs))
    return _cut(_descend(costs, host, _even(costs, count)), len(costs))


def _wrong(costs: Sequence[float]) -> str:
    return ", ".join(f"{k} ({cost})" for k, cost in enumerate(costs) if not 0 <= cost < math.inf)


def _cut(cuts: Sequence[int], segments: int) -> Stages:
    """`cuts` are the first segments of all stages but the first."""
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise((0, *cuts, segments)))


def _even(costs: Sequence[float], count: int) -> list[int]:
    """The cuts of the best partition when each stage is a rank.

    First the least maximum, then the least sum of squares among the partitions that stay within it: of two partial partitions
    with one sum of squares under that maximum the rest can follow both alike, which is not so for pairs (maximum, squares).
    Works from the last segment to the first, so that the first stage is chosen last and is the longest of equal ones.
    """
    n = len(costs)
    total = [0.0, *itertools.accumulate(reversed(costs))]
    slip = SLIP * total[-1]
    most = [0.0, *[math.inf] * n]  # by k: least maximum of the last k segments in the stages so far
    for _ in range(count):
        most = [min((max(most[i], total[k] - total[i]) for i in range(k)), default=math.inf) for k in range(n + 1)]
    limit = most[n] + slip
    squares = [0.0, *[math.inf] * n]
    behind: list[list[int]] = []  # by stage from the last, and k: segments of the stages behind it
    for _ in range(count):
        best, kept = [math.inf] * (n + 1), [0] * (n + 1)
        for k in range(1, n + 1):
            for i in range(k - 1, -1, -1):
                load = total[k] - total[i]
                if load > limit:
                    break
                square = squares[i] + load * load
                if square < math.inf and square <= best[k] + slip * limit:
                    best[k], kept[k] = square, i
        squares = best
        behind.append(kept)
    left, cuts = n, []
    for kept in reversed(behind[1:]):
        left = kept[left]
        cuts.append(n - left)
    return cuts


def _key(total: Sequence[float], cuts: Sequence[int], host: Sequence[int]) -> tuple[float, float, float]:
    """(most expensive rank, sum of squares over ranks, over stages), rounded so that what is equal but for rounding compares equal."""
    loads = dict.fromkeys(host, 0.0)
    whole, even = total[-1] or 1.0, 0.0
    for at, (a, b) in zip(host, itertools.pairwise((0, *cuts, len(total) - 1)), strict=True):
        share = (total[b] - total[a]) / whole
        loads[at] += share
        even += share * share
    return round(max(loads.values()), 9), round(sum(load * load for load in loads.values()), 9), round(even, 9)


def _exact(costs: Sequence[float], host: Sequence[int]) -> Sequence[int]:
    total = [0.0, *itertools.accumulate(costs)]
    # The last of equal ones has the latest cuts: its earlier stages are the longer.
    choices = itertools.combinations(range(1, len(costs)), len(host) - 1)
    return min(reversed(list(choices)), key=lambda cuts: _key(total, cuts, host))


def _descend(costs: Sequence[float], host: Sequence[int], cuts: list[int]) -> Sequence[int]:
    """Passes one segment from any stage to any other, those between them handing one on, as long as that lowers the key."""
    total = [0.0, *itertools.accumulate(costs)]
    key = _key(total, cuts, host)
    runs = [(a, b, d) for a in range(len(cuts)) for b in range(a + 1, len(cuts) + 1) for d in (-1, 1)]
    since = 0
    for a, b, d in itertools.cycle(runs):
        moved = [*cuts[:a], *(cut + d for cut in cuts[a:b]), *cuts[b:]]
        room = (moved[a] > moved[a - 1] if a else moved[0] > 0) and moved[b - 1] < (moved[b] if b < len(cuts) else len(costs))
        if room and (now := _key(total, moved, host)) < key:
            cuts, key, since = moved, now, 0
        elif (since := since + 1) == len(runs):
            break
    return cuts
