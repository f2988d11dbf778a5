"""The sums of a unit's gradients over mesh axes, issued: whole on every rank, or scattered so that each is left with its slice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from phalanx.comm.transport import Handle
from phalanx.comm.world import World
from phalanx.run.flat import Unit, runs
from phalanx.run.sums import Call, in_turn
from phalanx.schedule.data import sum_order


def all_reduced(world: World, unit: Unit, dtype: torch.dtype | None) -> list[Handle]:
    """All ranks of the axes end with the sum. `dtype` is what travels, if it is narrower than the gradients."""
    issued = []
    for places, start, stop in runs(unit, lambda place: place.axes or None):
        x = unit.gradient.data[start:stop]
        travelling, calls = _narrowed(x, dtype)
        calls += _all_reduces(world, travelling, sum_order(places[0].axes, ())[0])
        issued.append(in_turn(world, _joined(calls, _widened(x, travelling))))
    return issued


def scattered(world: World, unit: Unit, whole: Tensor, dtype: torch.dtype | None, *, add: bool = False) -> Handle:
    """Every rank of the split axes ends with its slice of the sum of `whole` in the unit's own gradient, or added to it."""
    travelling, calls = _narrowed(whole, dtype)
    own = unit.own_gradient if travelling is whole and not add else travelling.new_empty(unit.slice_numel)
    after: list[Call] = []
    for places, start, stop in runs(unit, lambda place: sum_order(place.axes, unit.split)[0]):
        calls += _all_reduces(world, travelling[start:stop], sum_order(places[0].axes, unit.split)[0])
    for places, start, stop in runs(unit, lambda place: sum_order(place.axes, unit.split)[1]):
        first, last = max(0, start - unit.start), min(unit.slice_numel, stop - unit.start)
        if len(places) == len(unit.places):
            first, last = 0, unit.slice_numel
        # Ranks along these axes have slices of one place, so all of them leave out an empty one.
        if first < last:
            after += _all_reduces(world, own[first:last], sum_order(places[0].axes, unit.split)[1])
    calls.append(partial(world.transport.reduce_scatter, own, travelling, world.group(unit.split)))
    end: list[Call] = [partial(_add, unit.own_gradient, own)] if add else _widened(unit.own_gradient, own)
    return in_turn(world, _joined(calls + after, end))


def _all_reduces(world: World, x: Tensor, axes: Sequence[str]) -> list[Call]:
    return [partial(world.transport.all_reduce, x, world.group(axis)) for axis in axes]


def _narrowed(x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, list[Call]]:
    """What travels in place of x, and what fills it."""
    if dtype is None or dtype.itemsize >= x.dtype.itemsize:
        return x, []
    narrow = torch.empty_like(x, dtype=dtype)
    return narrow, [partial(_copy, narrow, x)]


def _widened(x: Tensor, came: Tensor) -> list[Call]:
    return [] if came.dtype == x.dtype else [partial(_copy, x, came)]


def _joined(calls: list[Call], last: list[Call]) -> list[Call]:
    """The row of calls, with what fills the first message done when that is issued."""
    if len(calls) > 1 and isinstance(calls[0], partial) and calls[0].func is _copy:
        fill, issue = calls[:2]

        def both() -> Handle | None:
            fill()
            return issue()

        calls = [both, *calls[2:]]
    return calls + last


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _add(target: Tensor, source: Tensor) -> None:
    target.add_(source)
