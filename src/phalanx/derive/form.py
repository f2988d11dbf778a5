"""What an operator does to dimensions: the one description from which specs, moves and local arguments are derived.

A rule in `derive/ops` maps a captured node to a Form. Dimensions that go together carry the same label; a label may be split over
mesh axes, `WHOLE` may not. Nothing here knows of collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import fx

Label = Hashable
WHOLE: Label = None
"""A dimension that every rank needs in full."""

Labels = tuple[Label, ...]

Linearity = Literal["none", "first", "each", "sum"]
"""Where a partial operand may stay partial: nowhere; in operand 0; in any one operand (a product); in all operands at once (a sum)."""


class Emit(Protocol):
    """What a rule's `emit` sees of the local graph. Filled in by `lower`.

    operands      local nodes, in the order of Form.operands
    world         the local graph's world argument
    partial       axes over which the results are partial
    axes(label)   mesh axes that split the label, major first
    ranks(label)  number of ranks along them
    shape(i)      local shape of result i
    call(...)     append a local node
    """

    operands: list[fx.Node]
    world: fx.Node
    partial: frozenset[str]
    sizes: dict[str, int]

    def axes(self, label: Label) -> tuple[str, ...]: ...

    def ranks(self, label: Label) -> int: ...

    def shape(self, result: int = 0) -> list[int]: ...

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node: ...

    def again(self, **changed: Any) -> fx.Node:
        """The captured operator on the local operands, its other arguments as captured but for those `changed`, by schema name."""
        ...

    def reduce(self, x: fx.Node, label: Label) -> fx.Node:
        """Sum over the ranks along a label, as the table's P to R."""
        ...

    def offset(self, x: fx.Node, label: Label, size: int) -> fx.Node:
        """Global indices into a dimension of `size` split along a label, counted from this rank's first."""
        ...

    def dropout_mask(self, like: fx.Node, probability: float, labels: Labels, shape: tuple[int, ...]) -> fx.Node:
        """The scaled keep mask for a tensor of global `shape` whose dimensions are split along `labels`."""
        ...


@dataclass(frozen=True)
class Form:
    """Labels of every tensor operand and result of one node.

    A label that operands have and results lack is summed over: its axes become partial in the results.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    linear: Linearity = "none"
    emit: Callable[[Emit], fx.Node | Sequence[fx.Node]] | None = None
    """None: the captured operator on the local operands with its other arguments unchanged."""
    addend: int | None = None
    """Operand that is added to the result once, such as a bias: where the result is partial it becomes partial too."""
    parts: tuple[tuple[Label, tuple[int, ...]], ...] = ()
    """Labels of fused dimensions that this operator takes apart, with the global sizes of the parts."""
    finished: frozenset[Label] = frozenset()
    """Labels that `emit` sums over itself, or that no result depends on: they leave nothing partial."""
    averaged: frozenset[Label] = frozenset()
    """Summed labels whose global size divides the sum."""
    may_stay_whole: tuple[int, ...] = ()
    """Operands that `emit` accepts whole where a split label does not divide them (few key-value heads)."""


Rule = Callable[[fx.Node], Form]


def tensors(node: fx.Node) -> list[fx.Node]:
    """Tensor operands of a node in argument order, repeats included."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return [n for n in found if isinstance(n.meta.get("val"), (torch.Tensor, list, tuple))]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def valid_shape(node: fx.Node) -> tuple[int, ...]:
    """The true shape of a value, without the padding that `derive.padding` gave it."""
    true: tuple[int, ...] | None = node.meta.get("valid")
    return shape_of(node) if true is None else true


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument of an operator call by its name in the schema, with the schema's default; `default` if the overload has none such.

    The overloads of one operator have their arguments in different places: var(x, unbiased), var(x, dim, unbiased).
    """
    if isinstance(node.target, torch._ops.OpOverload):
        for position, declared in enumerate(node.target._schema.arguments):
            if declared.name == name:
                given = node.args[position] if len(node.args) > position else node.kwargs.get(name, declared.default_value)
                return default if given is None else given
    return default


def dim_index(dim: int, ndim: int) -> int:
    """A dimension counted from the front."""
    return dim + ndim if dim < 0 else dim
