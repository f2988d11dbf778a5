"""From the states of an operator's operands to the states it computes in: which label is split over which axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from phalanx.derive.form import WHOLE, Form, Label
from phalanx.mesh import Mesh
from phalanx.spec import Spec


@dataclass(frozen=True)
class Placed:
    """A captured value in the local graph: the node that holds this rank's piece of it, and what it is a piece of."""

    node: fx.Node
    spec: Spec
    shape: tuple[int, ...]
    grad: bool
    """A gradient flows through it."""
    weight: bool
    """It depends on parameters and constants only (and on at least one parameter)."""
    constant: bool
    """It depends on neither parameters nor the batch."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Placement:
    """The states in which one operator runs."""

    axes: dict[Label, tuple[str, ...]]
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    varying: frozenset[str]
    """Axes along which the operator computes different things on different ranks."""


def place(form: Form, operands: Sequence[Placed], result_shapes: Sequence[tuple[int, ...]], mesh: Mesh) -> Placement:
    """Parameters claim their axes first, then larger operands before smaller; whoever comes later moves."""
    axes, parts = _claims(form, operands, result_shapes, mesh)
    claimed = frozenset(axis for split in axes.values() for axis in split)
    kept = _kept_partial(form, operands, result_shapes, claimed)
    in_results = {label for labels in form.results for label in labels}
    contracted = frozenset(
        axis for label, split in axes.items() if label not in in_results and label not in form.finished for axis in split
    )
    partial = contracted.union(*kept)

    def spec(labels: Sequence[Label], shape: Sequence[int], partial: frozenset[str], optional: bool = False) -> Spec:
        dims: list[tuple[str, ...]] = []
        fused: list[tuple[int, tuple[int, ...]]] = []
        for dim, label in enumerate(labels):
            split = axes.get(label, ()) if label is not WHOLE else ()
            if optional and shape[dim] % mesh.extent(split):
                split = ()
            dims.append(split)
            sizes = parts.get(label)
            if split and sizes and sum(sizes) == shape[dim]:
                fused.append((dim, sizes))
        return Spec(tuple(dims), partial, tuple(fused))

    wanted = []
    for at, (labels, operand) in enumerate(zip(form.operands, operands, strict=True)):
        joins = partial if form.addend == at or form.linear == "sum" else kept[at]
        wanted.append(spec(labels, operand.shape, joins, at in form.may_stay_whole))
    results = tuple(spec(labels, shape, partial) for labels, shape in zip(form.results, result_shapes, strict=True))
    return Placement(axes, tuple(wanted), results, claimed | partial)


def _claims(
    form: Form, operands: Sequence[Placed], result_shapes: Sequence[tuple[int, ...]], mesh: Mesh
) -> tuple[dict[Label, tuple[str, ...]], dict[Label, tuple[int, ...]]]:
    sizes: dict[Label, set[int]] = {}
    fewer: dict[Label, set[int]] = {}
    for at, (labels, operand) in enumerate(zip(form.operands, operands, strict=True)):
        for label, size in zip(labels, operand.shape, strict=True):
            (fewer if at in form.may_stay_whole else sizes).setdefault(label, set()).add(size)
    for labels, shape in zip(form.results, result_shapes, strict=True):
        for label, size in zip(labels, shape, strict=True):
            sizes.setdefault(label, set()).add(size)
    taken_apart = dict(form.parts)
    for label, pieces in taken_apart.items():
        sizes[label] = set(pieces) | (sizes[label] - {sum(pieces)})

    axes: dict[Label, tuple[str, ...]] = {}
    parts: dict[Label, tuple[int, ...]] = {}
    order = sorted(range(len(operands)), key=lambda at: (not operands[at].weight, -operands[at].numel))
    for at in order:
        spec = operands[at].spec
        for dim, label in enumerate(form.operands[at]):
            split = spec.dims[dim]
            if label is WHOLE or not split:
                continue
            fused = spec.part_sizes(dim)
            if label in taken_apart and fused != taken_apart[label]:
                continue
            mine = axes.get(label, ())
            if mine and (split[: len(mine)] != mine or parts.get(label) != fused):
                continue
            elsewhere = {axis for other, others in axes.items() if other != label for axis in others}
            for axis in split[len(mine) :]:
                candidate = (*mine, axis)
                divisors = fused if fused and label not in taken_apart else tuple(sizes[label])
                ranks = mesh.extent(candidate)
                if axis in elsewhere or any(size % ranks for size in divisors):
                    break
                if any(size % ranks and ranks % size for size in fewer.get(label, ())):
                    break
                mine = candidate
            if mine:
                axes[label] = mine
                if fused:
                    parts[label] = fused
    return axes, parts


def _kept_partial(
    form: Form, operands: Sequence[Placed], result_shapes: Sequence[tuple[int, ...]], claimed: frozenset[str]
) -> list[frozenset[str]]:
    """Per operand, the axes over which it may stay partial. Never if that would make the value to be summed larger."""
    none: list[frozenset[str]] = [frozenset()] * len(operands)
    largest = max((math.prod(shape) for shape in result_shapes), default=0)
    candidates = [operand.spec.partial - claimed for operand in operands]
    if form.linear == "first" and candidates and candidates[0]:
        return [candidates[0], *none[1:]]
    if form.linear == "each":
        for at, candidate in enumerate(candidates):
            if candidate and at != form.addend and operands[at].numel >= largest:
                others = frozenset().union(*(o.spec.varying for other, o in enumerate(operands) if other != at))
                return [candidate - others if other == at else frozenset() for other in range(len(operands))]
    if form.linear == "sum":
        every = frozenset().union(*candidates)
        kept = frozenset(
            axis
            for axis in every
            if all(axis in o.spec.partial or (o.weight and axis not in o.spec.varying) for o in operands)
            and all(o.numel >= largest for o in operands if axis in o.spec.partial)
        )
        return [kept & operand.spec.partial for operand in operands]
    return none
