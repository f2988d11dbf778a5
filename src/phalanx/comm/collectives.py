"""Collectives as tensor operators, each with an explicit forward/backward pair.

Library "phx", defined with torch.library.Library("phx", "DEF"). `world` is the name of a World (a run-time argument), `axis` a
mesh axis, `size` its number of ranks, so that shapes follow from the arguments alone (Meta kernels need no world). None returns
its input; primitives return no view of it either. An axis of one rank still works. Results of primitives are contiguous.

Primitives (what traced graphs contain; no autograd):
  phx::all_reduce(Tensor x, str world, str axis, str op) -> Tensor
  phx::all_gather(Tensor x, str world, str axis, int size, int dim) -> Tensor        concatenates along dim, rank-major
  phx::reduce_scatter(Tensor x, str world, str axis, int size, int dim) -> Tensor
  phx::shard(Tensor x, str world, str axis, int size, int dim) -> Tensor              my slice of dim; no communication
  phx::all_to_all(Tensor x, str world, str axis, int size, int split_dim, int cat_dim) -> Tensor
  phx::keep_first(Tensor x, str world, str axis) -> Tensor                            x on index 0, zeros elsewhere
  phx::offset(Tensor x, str world, str axis, int stride) -> Tensor                    integer x - index * stride
  phx::take(Tensor x, str world, str axis, int size, int dim, int length, int group) -> Tensor
        x.narrow(dim, (index // group) * length, length)
  phx::put(Tensor x, str world, str axis, int size, int dim, int length, int group, int total) -> Tensor
        its transpose: a dim of size total, zeros elsewhere
The pair (has an autograd rule that calls primitives, so that make_fx sees them in forward and backward):
  phx::move(Tensor x, str pair, str world, str axis, int size, int dim, int dim2) -> Tensor
        pair is a key of PAIRS, the move table of the design as data. `exchange` takes S(dim) to S(dim2)
  phx::take has an autograd rule too (backward phx::put).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.signature import divide
from phalanx.comm.transport import ReduceOp
from phalanx.comm.world import World, find_world

PAIRS: dict[str, tuple[str, str]] = {
    # pair               forward           backward           from -> to
    "reduce": ("all_reduce", "identity"),  # P -> R
    "vary": ("identity", "all_reduce"),  # R -> R, consumed by a varying op
    "reduce_scatter": ("reduce_scatter", "all_gather"),  # P -> S(dim)
    "gather": ("all_gather", "shard"),  # S(dim) -> R
    "gather_vary": ("all_gather", "reduce_scatter"),  # S(dim) -> R, consumed by a varying op
    "shard": ("shard", "all_gather"),  # R -> S(dim)
    "exchange": ("all_to_all", "all_to_all_back"),  # S(dim) -> S(dim2)
    "keep_first": ("keep_first", "identity"),  # R -> P
}


# For people and examples: a World in the place of its name. All but `move` are outside autograd.


def all_reduce(x: Tensor, world: World, axis: str, op: ReduceOp = "sum") -> Tensor:
    """The reduction of every rank's x along `axis`, as a new tensor."""
    return _all_reduce(x, world.name, axis, op)


def all_gather(x: Tensor, world: World, axis: str, dim: int = 0) -> Tensor:
    """Every rank's x, concatenated along `dim`."""
    return _all_gather(x, world.name, axis, world.place(axis)[0].size, dim)


def reduce_scatter(x: Tensor, world: World, axis: str, dim: int = 0) -> Tensor:
    """My slice along `dim` of the sum of every rank's x."""
    return _reduce_scatter(x, world.name, axis, world.place(axis)[0].size, dim)


def all_to_all(x: Tensor, world: World, axis: str, split_dim: int, cat_dim: int) -> Tensor:
    """Slice i of x along `split_dim` goes to rank i; what arrives is concatenated along `cat_dim`."""
    return _all_to_all(x, world.name, axis, world.place(axis)[0].size, split_dim, cat_dim)


def shard(x: Tensor, world: World, axis: str, dim: int = 0) -> Tensor:
    """My slice of x along `dim`."""
    return _shard(x, world.name, axis, world.place(axis)[0].size, dim)


def broadcast(x: Tensor, world: World, axis: str, root: int = 0) -> Tensor:
    """x of the rank at position `root` along `axis`, as a new tensor."""
    with torch.no_grad():
        y = _fresh(x)
        world.transport.broadcast(y, root, world.place(axis)[0]).wait()
    return y


def move(x: Tensor, pair: str, world: World, axis: str, dim: int = 0, dim2: int = 0) -> Tensor:
    """x in another state along `axis`: a row of PAIRS, with its gradient."""
    y: Tensor = torch.ops.phx.move(x, pair, world.name, axis, world.place(axis)[0].size, dim, dim2)
    return y


# Kernels of the primitives.


def _all_reduce(x: Tensor, world: str, axis: str, op: str) -> Tensor:
    running = find_world(world)
    group, _ = running.place(axis)
    y = _fresh(x)
    if group.size > 1:
        running.transport.all_reduce(y, group, op).wait()  # type: ignore[arg-type]  # a text from the schema; checked there
    return y


def _all_gather(x: Tensor, world: str, axis: str, size: int, dim: int) -> Tensor:
    if size == 1:
        return _fresh(x)
    running = find_world(world)
    group, _ = running.place(axis)
    dim = _dim(x, dim)
    x = x.contiguous()
    if math.prod(x.shape[:dim]) == 1:
        # The slices lie one behind the other in the result already.
        y = x.new_empty(_times(x.shape, dim, size))
        running.transport.all_gather(y.view(-1), x.view(-1), group).wait()
        return y
    parts = x.new_empty((size, *x.shape))
    running.transport.all_gather(parts.view(-1), x.view(-1), group).wait()
    return torch.cat(parts.unbind(0), dim)


def _reduce_scatter(x: Tensor, world: str, axis: str, size: int, dim: int) -> Tensor:
    if size == 1:
        return _fresh(x)
    running = find_world(world)
    group, _ = running.place(axis)
    slices = _slices(x, size, dim, axis)
    y = slices.new_empty(slices.shape[1:])
    running.transport.reduce_scatter(y.view(-1), slices.view(-1), group).wait()
    return y


def _all_to_all(x: Tensor, world: str, axis: str, size: int, split_dim: int, cat_dim: int) -> Tensor:
    if size == 1:
        return _fresh(x)
    running = find_world(world)
    group, _ = running.place(axis)
    ins = _slices(x, size, split_dim, axis)
    outs = torch.empty_like(ins)
    running.transport.all_to_all(outs.unbind(0), ins.unbind(0), group).wait()
    return torch.cat(outs.unbind(0), cat_dim)


def _shard(x: Tensor, world: str, axis: str, size: int, dim: int) -> Tensor:
    length = divide(f"dimension {dim}", x.shape[dim], size, f"axis {axis!r}")
    index = find_world(world).place(axis)[1] if size > 1 else 0
    return _fresh(x.narrow(dim, index * length, length))


def _keep_first(x: Tensor, world: str, axis: str) -> Tensor:
    if find_world(world).place(axis)[1] == 0:
        return _fresh(x)
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def _offset(x: Tensor, world: str, axis: str, stride: int) -> Tensor:
    return (x - find_world(world).place(axis)[1] * stride).contiguous()


def _take(x: Tensor, world: str, axis: str, size: int, dim: int, length: int, group: int) -> Tensor:
    return _fresh(x.narrow(dim, _start(world, axis, length, group), length))


def _put(x: Tensor, world: str, axis: str, size: int, dim: int, length: int, group: int, total: int) -> Tensor:
    y = x.new_zeros(_with(x.shape, dim, total))
    y.narrow(dim, _start(world, axis, length, group), length).copy_(x)
    return y


def _start(world: str, axis: str, length: int, group: int) -> int:
    return find_world(world).place(axis)[1] // group * length


def _fresh(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dimension {dim} does not exist in shape {tuple(x.shape)}")
    return dim % x.dim()


def _slices(x: Tensor, size: int, dim: int, axis: str) -> Tensor:
    """x cut along `dim` into (size, *slice), contiguous; copies only if it must."""
    dim = _dim(x, dim)
    divide(f"dimension {dim}", x.shape[dim], size, f"axis {axis!r}")
    cut = x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return cut.movedim(dim, 0).contiguous()


def _with(shape: torch.Size, dim: int, length: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] = length
    return sizes


def _times(shape: torch.Size, dim: int, size: int) -> list[int]:
    return _with(shape, dim, shape[dim] * size)


# Shapes without a world, for meta and fake tensors. They refuse what the kernels refuse.


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _meta_all_gather(x: Tensor, world: str, axis: str, size: int, dim: int) -> Tensor:
    return x.new_empty(_times(x.shape, _dim(x, dim), size))


def _meta_slice(x: Tensor, world: str, axis: str, size: int, dim: int) -> Tensor:
    dim = _dim(x, dim)
    return x.new_empty(_with(x.shape, dim, divide(f"dimension {dim}", x.shape[dim], size, f"axis {axis!r}")))


def _meta_all_to_all(x: Tensor, world: str, axis: str, size: int, split_dim: int, cat_dim: int) -> Tensor:
    piece = _meta_slice(x, world, axis, size, split_dim)
    return x.new_empty(_times(piece.shape, _dim(x, cat_dim), size))


def _meta_take(x: Tensor, world: str, axis: str, size: int, dim: int, length: int, group: int) -> Tensor:
    places = -(-size // group)
    if places * length > x.shape[dim]:
        raise ValueError(f"take: {places} pieces of {length} exceed dimension {dim} of size {x.shape[dim]}")
    return x.new_empty(_with(x.shape, dim, length))


def _meta_put(x: Tensor, world: str, axis: str, size: int, dim: int, length: int, group: int, total: int) -> Tensor:
    return x.new_empty(_with(x.shape, dim, total))


# The table and the autograd rules.


def _apply(primitive: str, x: Tensor, world: str, axis: str, size: int, dim: int, dim2: int) -> Tensor:
    """One entry of PAIRS, through the dispatcher so that tracing sees the primitive."""
    y: Tensor
    ops = torch.ops.phx
    if primitive == "identity":
        y = torch.ops.aten.alias(x)
    elif primitive == "all_reduce":
        y = ops.all_reduce(x, world, axis, "sum")
    elif primitive == "keep_first":
        y = ops.keep_first(x, world, axis)
    elif primitive == "all_to_all":
        y = ops.all_to_all(x, world, axis, size, dim2, dim)
    elif primitive == "all_to_all_back":
        y = ops.all_to_all(x, world, axis, size, dim, dim2)
    else:
        y = getattr(ops, primitive)(x, world, axis, size, dim)
    return y


def _pair(name: str) -> tuple[str, str]:
    if name not in PAIRS:
        raise ValueError(f"no pair is called {name!r}; the table has {', '.join(PAIRS)}")
    return PAIRS[name]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: str, *where: Any) -> Tensor:
        ctx.pair, ctx.where = pair, where
        return _apply(_pair(pair)[0], x, *where)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _apply(_pair(ctx.pair)[1], grad, *ctx.where), *[None] * 6


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *where: Any) -> Tensor:
        ctx.where, ctx.total = where, x.shape[where[3]]
        with torch._C._AutoDispatchBelowAutograd():
            y: Tensor = torch.ops.phx.take(x, *where)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return torch.ops.phx.put(grad, *ctx.where, ctx.total), *[None] * 6


def _move_autograd(x: Tensor, pair: str, world: str, axis: str, size: int, dim: int, dim2: int) -> Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _move_forward(x, pair, world, axis, size, dim, dim2)
    y: Tensor = _Move.apply(x, pair, world, axis, size, dim, dim2)  # type: ignore[no-untyped-call]
    return y


def _move_forward(x: Tensor, pair: str, world: str, axis: str, size: int, dim: int, dim2: int) -> Tensor:
    return _apply(_pair(pair)[0], x, world, axis, size, dim, dim2)


def _take_autograd(x: Tensor, *where: Any) -> Tensor:
    y: Tensor = _Take.apply(x, *where)  # type: ignore[no-untyped-call]
    return y


_SLICE = "str world, str axis, int size, int dim"
_PRIMITIVES: dict[str, tuple[str, Callable[..., Tensor], Callable[..., Tensor]]] = {
    # name: (arguments after the tensor, kernel, shape)
    "all_reduce": ("str world, str axis, str op", _all_reduce, _like),
    "all_gather": (_SLICE, _all_gather, _meta_all_gather),
    "reduce_scatter": (_SLICE, _reduce_scatter, _meta_slice),
    "shard": (_SLICE, _shard, _meta_slice),
    "all_to_all": ("str world, str axis, int size, int split_dim, int cat_dim", _all_to_all, _meta_all_to_all),
    "keep_first": ("str world, str axis", _keep_first, _like),
    "offset": ("str world, str axis, int stride", _offset, _like),
    "take": (f"{_SLICE}, int length, int group", _take, _meta_take),
    "put": (f"{_SLICE}, int length, int group, int total", _put, _meta_put),
}

_LIBRARY: Any = torch.library.Library("phx", "DEF")  # type: ignore[no-untyped-call]
for _name, (_arguments, _kernel, _shape) in _PRIMITIVES.items():
    _LIBRARY.define(f"{_name}(Tensor x, {_arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _kernel, _device)
    _LIBRARY.impl(_name, _shape, "Meta")
_LIBRARY.define(f"move(Tensor x, str pair, {_SLICE}, int dim2) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("move", _move_forward, "CompositeExplicitAutograd")
_LIBRARY.impl("move", _move_autograd, "Autograd")
_LIBRARY.impl("take", _take_autograd, "Autograd")
