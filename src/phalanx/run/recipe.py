"""Recipes: how the elements of one tensor get their first values, as a function of their position.

A recipe is a small immutable expression over whole tensors. `recipe.at(index, keys)` evaluates it at any positions (row-major,
in the recipe's own shape), so a shard costs its own size and nothing more. Pure: no modules, no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from phalanx import random

VECTOR = 64
"""Elementwise operations run on multiples of this many elements. torch's vectorised and scalar versions of pow, log2 and
sigmoid differ in the last bit and the remainder of a block is scalar; where it falls would depend on the layout."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """Base of all: the shape and dtype of the tensor described."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def at(self, index: Tensor, keys: Mapping[int, int]) -> Tensor:
        """Values at the positions `index` (int64, one dimension); `keys` holds the random key of each draw."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Empty(Recipe):
    """Allocated and not written."""

    def at(self, index: Tensor, keys: Mapping[int, int]) -> Tensor:
        if index.numel():
            raise ValueError(f"elements of a tensor of shape {self.shape} are used but never written (torch.empty)")
        return index.to(self.dtype)


@dataclass(frozen=True, eq=False)
class Failed(Recipe):
    """Written by an operation that is not a function of position; must be refused before anything is evaluated."""

    operation: str
    where: str

    def at(self, index: Tensor, keys: Mapping[int, int]) -> Tensor:
        raise AssertionError(f"evaluated a recipe that contains {self.operation} ({self.where})")


@dataclass(frozen=True, eq=False)
class Fill(Recipe):
    """One number everywhere."""

    value: float | int | bool

    def at(self, index: Tensor, keys: Mapping[int, int]) -> Tensor:
        return torch.full(index.shape, self.value, dtype=self.dtype, device=index.device)


@dataclass(frozen=True, eq=False)
class Constant(Recipe):
    """A tensor that was computed for real."""

    value: Tensor

    def at(self, index: Tensor, keys: Mapping[int, int]) -> Tensor:
        return self.value.reshape(-1).to(index.device)[index]


@dataclass(frozen=True, eq=False)
class Draw(Recipe):
    """Random numbers, independent per position: normal (mean, std), uniform (low, high) or trunc_normal (mean, std, a, b)."""

    number: int
    kind: str
    arguments: tuple[float, ...]

    def at(self, index: Tensor, keys: Mapping[int, int]) -> Tensor:
        key = keys[self.number]
        if self.kind == "trunc_normal":
            return truncated_normal(key, index, *self.arguments).to(self.dtype)
        first, second = self.arguments
        if self.kind == "normal":
            return random.normal(key, index, torch.float64).mul_(second).add_(first).to(self.dtype)
        assert self.kind == "uniform", self.kind
        return random.uniform(key, index, torch.float64).mul_(second - first).add_(first).to(self.dtype)


@dataclass(frozen=True, eq=False)
class Map(Recipe):
    """An elementwise operation on recipes of this shape (or of no dimension) and plain arguments, cast to `dtype`."""

    operation: Any
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def at(self, index: Tensor, keys: Mapping[int, int]) -> Tensor:
        def operand(value: Any) -> Any:
            if not isinstance(value, Recipe):
                return value
            if not value.shape:
                return value.at(index.new_zeros(1), keys).reshape(())
            values = value.at(index, keys)
            return torch.cat([values, values[:1].expand(-len(index) % VECTOR)])

        result: Tensor = self.operation(*tree_map(operand, self.arguments), **dict(self.options))
        return result[: len(index)].to(self.dtype) if result.dim() else result.to(self.dtype).expand(len(index))


@dataclass(frozen=True)
class Strides:
    """Where a view's elements lie in a contiguous base: position = offset + sum of coordinate * stride."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: Tensor) -> Strides:
        return cls(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))

    @property
    def contiguous(self) -> bool:
        return all(size == 1 or stride == math.prod(self.shape[dim + 1 :]) for dim, (size, stride) in enumerate(self._dims()))

    def _dims(self) -> list[tuple[int, int]]:
        return list(zip(self.shape, self.stride, strict=True))

    @property
    def invertible(self) -> bool:
        """True if each base position belongs to at most one element and the dimensions nest, as all but exotic views do."""
        reach = 0
        for stride, size in sorted((stride, size) for size, stride in self._dims() if size > 1):
            if stride <= reach:
                return False
            reach += (size - 1) * stride
        return True

    def base_index(self, index: Tensor) -> Tensor:
        if self.contiguous:
            return index + self.offset if self.offset else index
        base = torch.full_like(index, self.offset)
        for dim, (size, stride) in enumerate(self._dims()):
            if size > 1 and stride:
                base += (index // math.prod(self.shape[dim + 1 :]) % size) * stride
        return base

    def view_index(self, base: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each base position is in the view, and its position there, which is meaningless where it is not."""
        rest = base - self.offset
        inside = rest >= 0
        index = torch.zeros_like(base)
        for dim in sorted(range(len(self.shape)), key=lambda dim: -self.stride[dim]):
            if self.shape[dim] > 1:
                coordinate = rest // self.stride[dim]
                inside &= coordinate < self.shape[dim]
                index += coordinate * math.prod(self.shape[dim + 1 :])
                rest -= coordinate * self.stride[dim]
        return inside & (rest == 0), index


@dataclass(frozen=True, eq=False)
class Read(Recipe):
    """A view of another recipe; stride 0 repeats."""

    base: Recipe
    strides: Strides

    def at(self, index: Tensor, keys: Mapping[int, int]) -> Tensor:
        return self.base.at(self.strides.base_index(index), keys)


@dataclass(frozen=True, eq=False)
class Write(Recipe):
    """`base` with the elements of one view replaced by those of `value`."""

    base: Recipe
    strides: Strides
    value: Recipe

    def at(self, index: Tensor, keys: Mapping[int, int]) -> Tensor:
        inside, position = self.strides.view_index(index)
        # Each element is evaluated on one side only, so that an Empty below is an error exactly if it shows through.
        out = torch.empty(index.shape, dtype=self.dtype, device=index.device)
        out[inside] = self.value.at(position[inside], keys).to(self.dtype)
        out[~inside] = self.base.at(index[~inside], keys)
        return out


def viewed(base: Recipe, strides: Strides) -> Recipe:
    """`base` seen through a view."""
    if strides.shape == base.shape and strides.contiguous and not strides.offset:
        return base
    return Read(strides.shape, base.dtype, base, strides)


def reshaped(recipe: Recipe, shape: tuple[int, ...]) -> Recipe:
    """The same elements in row-major order under another shape."""
    assert math.prod(shape) == recipe.numel, (shape, recipe.shape)
    return viewed(recipe, Strides(shape, tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))), 0))


def broadcast(recipe: Recipe, shape: tuple[int, ...]) -> Recipe:
    """`recipe` repeated to `shape` by torch's rules."""
    sizes = (1,) * (len(shape) - len(recipe.shape)) + recipe.shape
    stride = tuple(0 if size == 1 else math.prod(sizes[dim + 1 :]) for dim, size in enumerate(sizes))
    return viewed(recipe, Strides(shape, stride, 0))


def cast(recipe: Recipe, dtype: torch.dtype) -> Recipe:
    return recipe if recipe.dtype == dtype else Map(recipe.shape, dtype, torch.ops.aten.clone.default, (recipe,))


def nodes(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe and everything it is made of, in a fixed order."""
    yield recipe
    if isinstance(recipe, Map):
        for value in tree_flatten(recipe.arguments)[0]:
            if isinstance(value, Recipe):
                yield from nodes(value)
    if isinstance(recipe, Read | Write):
        yield from nodes(recipe.base)
    if isinstance(recipe, Write):
        yield from nodes(recipe.value)


def is_settled(recipe: Recipe) -> bool:
    """True if the values depend on nothing random and can be made now."""
    bottom = recipe
    while isinstance(bottom, Read):
        bottom = bottom.base
    return not isinstance(bottom, Empty) and not any(isinstance(node, Draw | Failed) for node in nodes(recipe))


def whole(recipe: Recipe) -> Tensor:
    """All values of a settled recipe, on CPU."""
    return recipe.at(torch.arange(recipe.numel), {}).reshape(recipe.shape)


def truncated_normal(key: int, index: Tensor, mean: float, std: float, a: float, b: float) -> Tensor:
    """Normal draws conditioned on [a, b], float64, by rejection: attempt n at a position is a function of (key, n, position).

    Proposes normals when at least 0.3 of them fall inside, else uniforms on [a, b] accepted by the density.
    """
    if not a < b or std <= 0:
        raise ValueError(f"trunc_normal_ needs a < b and std > 0, not a={a}, b={b}, std={std}")
    low, high = (a - mean) / std, (b - mean) / std
    proposes_normals = (math.erf(high / math.sqrt(2.0)) - math.erf(low / math.sqrt(2.0))) / 2.0 > 0.3
    peak = min(max(0.0, low), high)
    value = torch.empty(index.shape, dtype=torch.float64, device=index.device)
    pending = torch.arange(len(index), device=index.device)
    attempt = 0
    while pending.numel():
        position, draw = index[pending], random.key(key, attempt)
        if proposes_normals:
            z = random.normal(draw, position, torch.float64)
            accepted = (z >= low) & (z <= high)
        else:
            z = random.uniform(draw, position, torch.float64).mul_(high - low).add_(low)
            chance = random.uniform(random.key(draw, "accept"), position, torch.float64).neg_().add_(1.0)
            accepted = random.log(chance) <= (peak * peak - z * z) / 2.0
        value[pending] = z
        pending = pending[~accepted]
        attempt += 1
    return value.mul_(std).add_(mean).clamp_(a, b)
