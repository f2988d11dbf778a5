"""Runs a model's constructor without memory and notes how each tensor is filled.

Allocations become meta tensors with recipes; views share them; writes and elementwise operations extend them; whatever touches
no such tensor runs for real, on CPU. Two torch modes and no patching.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from phalanx.derive.reject import calling_line
from phalanx.run import recipe as rc
from phalanx.run.recipe import Constant, Draw, Empty, Failed, Fill, Map, Recipe, Strides, Write

aten = torch.ops.aten
HINT = "initialise it elementwise (normal_, uniform_, trunc_normal_, constants) or pass a module that has its weights"

PLACEMENT = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
"""Options that say where a result lies, not what it is."""


class NoMetaShortcuts(TorchFunctionMode):
    """Makes torch.nn.init do its work: several of its functions return at once when a tensor `is_meta`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            caller = sys._getframe(1)
            if caller.f_code.co_filename == nn.init.__file__ and self.recorder.knows(args[0]):
                if "trunc_normal" not in caller.f_code.co_name:
                    return False
                # Its loop redraws until nothing is out of bounds and cannot be recorded; its arguments say what it would do.
                bounds = (caller.f_locals[argument] for argument in ("mean", "std", "a", "b"))
                self.recorder.overwrite(args[0], self.recorder.draw("trunc_normal", args[0], *bounds))
                return True
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`recipes` maps the storage of every allocation to how its elements came about, in order of writing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recipes: dict[int, Recipe] = {}
        self.alive: list[Tensor] = []  # an address names a storage only while the storage lives
        self.draws = 0

    def knows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == "meta" and _storage(value) in self.recipes

    def draw(self, kind: str, like: Tensor, *arguments: float) -> Draw:
        self.draws += 1
        return Draw(tuple(like.shape), like.dtype, self.draws, kind, tuple(float(argument) for argument in arguments))

    def read(self, value: Tensor) -> Recipe:
        """The recipe of a tensor: its storage's, seen through its strides. A real tensor is a constant."""
        if not self.knows(value):
            return Constant(tuple(value.shape), value.dtype, value.detach().clone())
        base = self.recipes[_storage(value)]
        if value.dtype != base.dtype:
            return Failed(tuple(value.shape), value.dtype, f"a view of {base.dtype} as {value.dtype}", _here())
        return rc.viewed(base, Strides.of(value))

    def overwrite(self, target: Tensor, recipe: Recipe) -> None:
        """Every element of `target`, which may be a view of part of a storage, becomes that of `recipe`."""
        base = self.recipes[_storage(target)]
        strides = Strides.of(target)
        new: Recipe
        if target.dtype != base.dtype or not strides.invertible:
            new = Failed(base.shape, base.dtype, f"a write through a view of strides {strides.stride}", _here())
        elif strides.contiguous and target.numel() == base.numel:
            new = rc.reshaped(recipe, base.shape)
        else:
            new = Write(base.shape, base.dtype, base, strides, recipe)
        self.recipes[_storage(target)] = new

    def track(self, value: Tensor, recipe: Recipe) -> Tensor:
        """A new contiguous meta tensor of `value`'s shape with this recipe."""
        meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
        self.recipes[_storage(meta)] = recipe
        self.alive.append(meta)
        return meta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        recorded = [value for value in tree_flatten((args, kwargs))[0] if self.knows(value)]
        packet = func.overloadpacket
        if packet in ALLOCATIONS and func._overloadname != "out":
            like = func(*_on_meta(args), **_on_meta(kwargs, device="meta"))
            return self.track(like, ALLOCATIONS[packet](self, like, args, kwargs))
        if not recorded:
            if torch.Tag.nondeterministic_seeded in func.tags:
                return self.fail(func, args, kwargs)
            return func(*args, **({**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs))
        if packet in WRITES:
            self.overwrite(args[0], WRITES[packet](self, *args))
            return args[0]
        if (torch.Tag.pointwise in func.tags or packet is aten._to_copy) and "out" not in kwargs:
            return self.pointwise(func, args, kwargs)
        if packet is aten._unsafe_view:
            result = func(*args)
            return self.track(result, rc.reshaped(self.read(args[0]), tuple(result.shape)))
        if any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
            return func(*args, **kwargs)  # a view: the storage, and so the recipe, is shared
        if all(rc.is_settled(self.read(value)) or _is_output_only(func, value, kwargs) for value in recorded):
            return self.run_for_real(func, args, kwargs)
        return self.fail(func, args, kwargs)

    def pointwise(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """An operation that treats elements one by one, whichever it is: the recipe calls it on the elements of a shard."""
        in_place = bool(_written(func, args, kwargs))
        functional = _functional(func) if in_place else func
        if functional is None:
            return self.fail(func, args, kwargs)  # type: ignore[no-any-return]
        options = {name: value for name, value in kwargs.items() if name not in PLACEMENT}
        result = functional(*_on_meta(args), **_on_meta(options))
        shape = tuple(args[0].shape if in_place else result.shape)

        def operand(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return rc.broadcast(self.read(value), shape) if value.dim() else self.read(value)

        dtype = args[0].dtype if in_place else result.dtype
        made = Map(shape, dtype, functional, tree_map(operand, tuple(args)), tuple(tree_map(operand, options).items()))
        if not in_place:
            return self.track(result, made)
        self.overwrite(args[0], made)
        return args[0]  # type: ignore[no-any-return]

    def run_for_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation on values that hold nothing random: make them, compute, and keep what it wrote as constants."""
        real: dict[int, Tensor] = {}
        for value in tree_flatten((args, kwargs))[0]:
            if self.knows(value):
                recipe = self.read(value)
                real[id(value)] = rc.whole(recipe) if rc.is_settled(recipe) else torch.empty(value.shape, dtype=value.dtype)
        options = {**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs
        result = func(*tree_map(lambda v: real.get(id(v), v), args), **tree_map(lambda v: real.get(id(v), v), options))
        targets = {id(real[id(target)]): target for target in _written(func, args, kwargs) if self.knows(target)}
        for target in targets.values():
            value = real[id(target)]
            self.overwrite(target, Constant(tuple(value.shape), value.dtype, value))
        return tree_map(lambda v: targets.get(id(v), v), result)

    def fail(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Mark what this operation makes or writes as unrecordable; an error only if that reaches a parameter or buffer."""
        where = _here()
        if not all("Tensor" in str(result.type) for result in func._schema.returns):
            raise ValueError(f"{where}: {func} needs the value of a tensor that is random or not yet made; {HINT}")
        written = [target for target in _written(func, args, kwargs) if self.knows(target)]
        for target in written:
            self.overwrite(target, Failed(tuple(target.shape), target.dtype, str(func), where))
        if written:
            return written[0] if len(func._schema.returns) == 1 else tuple(written)
        takes_device = any(argument.name == "device" for argument in func._schema.arguments)
        options = {name: value for name, value in kwargs.items() if name != "generator"}
        try:
            result = func(*_on_meta(args), **_on_meta(options, device="meta" if takes_device else None))
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{where}: {func} cannot be recorded: {error}; {HINT}") from error

        def mark(value: Any) -> Any:
            made = Failed(tuple(value.shape), value.dtype, str(func), where) if isinstance(value, Tensor) else None
            return value if made is None else self.track(value, made)

        return tree_map(mark, result)


def _fill(value: float | None) -> Callable[..., Recipe]:
    """A recipe of one number: the given one, or the operation's own last argument."""
    return lambda recorder, like, args, kwargs: Fill(
        tuple(like.shape), like.dtype, kwargs.get("fill_value", args[-1]) if value is None else value
    )


def _empty(recorder: Recorder, like: Tensor, args: Any, kwargs: Any) -> Recipe:
    return Empty(tuple(like.shape), like.dtype)


def _random(kind: str) -> Callable[..., Recipe]:
    return lambda recorder, like, args, kwargs: recorder.draw(kind, like, 0.0, 1.0)


def _copied(recorder: Recorder, target: Tensor, source: Tensor | float, *_: Any) -> Recipe:
    if not isinstance(source, Tensor):
        return Fill(tuple(target.shape), target.dtype, source)
    return rc.cast(rc.broadcast(recorder.read(source), tuple(target.shape)), target.dtype)


ALLOCATIONS: dict[Any, Callable[..., Recipe]] = {
    **dict.fromkeys((aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided), _empty),
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), _fill(0)),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), _fill(1)),
    **dict.fromkeys((aten.full, aten.full_like, aten.new_full), _fill(None)),
    **dict.fromkeys((aten.rand, aten.rand_like), _random("uniform")),
    **dict.fromkeys((aten.randn, aten.randn_like), _random("normal")),
}
WRITES: dict[Any, Callable[..., Recipe]] = {
    aten.zero_: lambda recorder, target: Fill(tuple(target.shape), target.dtype, 0),
    aten.fill_: _copied,
    aten.copy_: _copied,
    aten.normal_: lambda recorder, target, mean=0.0, std=1.0: recorder.draw("normal", target, mean, std),
    aten.uniform_: lambda recorder, target, low=0.0, high=1.0: recorder.draw("uniform", target, low, high),
}


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _on_meta(tree: Any, device: str | None = None) -> Any:
    """Arguments for asking only for shapes and dtypes."""
    moved = tree_map(lambda v: v.to("meta") if isinstance(v, Tensor) else v, tree)
    if device is not None:
        moved = {name: value for name, value in moved.items() if name not in ("pin_memory", "generator")} | {"device": device}
    return moved


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation mutates, by its schema."""
    values = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor):
                values.append(value)
    return values


def _functional(func: Any) -> Any:
    """The operation of the same arguments that returns a new tensor: `pow` for `pow_`; None if there is none."""

    def arguments(overload: Any) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in overload._schema.arguments]

    packet = getattr(aten, func.overloadpacket.__name__.removesuffix("_"), None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return next((overload for overload in overloads if arguments(overload) == arguments(func)), None)


def _is_output_only(func: Any, value: Tensor, kwargs: Any) -> bool:
    """True if the operation overwrites `value` without reading it: an out= argument."""
    return any(argument.is_out and kwargs.get(argument.name) is value for argument in func._schema.arguments)


def _here() -> str:
    return calling_line() or "an unknown line"
