"""Any optimizer of torch.optim over what a rank stores: torch's parameters are views of the rank's ranges, updated in place.

An element-wise optimizer sees a range as one flat parameter, so it works on any slice. Any other (Adafactor, Muon) sees every
parameter in its own shape, and only if that is whole on the rank: what it made of a part would depend on the layout. States keep
torch's names, and go to any layout and come from any.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from phalanx.run.flat import Range, Unit
from phalanx.run.gather import from_stage
from phalanx.run.optimizer import Config, Constant, Group, Groups, Optimizer, Rate, Torch, check_numbers, copied, groups
from phalanx.run.parameters import Parameters
from phalanx.schedule.view import split_axes

ELEMENTWISE = frozenset(
    {
        optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
        optim.RAdam, optim.ASGD, optim.Rprop,
    }
)  # fmt: skip
"""Classes whose update of an element depends on that element alone and on the number of the step."""
SIZES = (2, 3, 5, 7, 11, 13)
"""Of the parameter that a class is tried on: different, so that the shape of a state says which dimensions it has."""


def optimizer(
    kind: type[optim.Optimizer],
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    no_decay: tuple[str, ...] | None = None,
    rate: Rate | None = None,
    groups: Groups | None = None,
    elementwise: bool | None = None,
    **options: Any,
) -> Torch:
    """A class of torch.optim, as in `phx.optimizer(torch.optim.RMSprop, lr=1e-3, momentum=0.9)`.

    lr, weight_decay  the class's own defaults if None
    no_decay, rate    as in phx.adamw; with no_decay=None, norms and biases do not decay
    groups            options by pattern of parameters, the first that matches, as in {"embed.*": {"lr": 1e-4, "momentum": 0.0}}
    elementwise       whether the update of an element depends on that element alone; None: true of the classes in ELEMENTWISE
    options           of the class's constructor

    Raises ValueError for a class that needs a closure or sparse gradients, and for options that it does not take.
    """
    flat = kind in ELEMENTWISE if elementwise is None else elementwise
    given = {name: value for name, value in (("lr", lr), ("weight_decay", weight_decay)) if value is not None}
    defaults, states = _tried(kind, {**given, **options}, dimensions=1 if flat else 2)
    if "lr" not in defaults:
        raise ValueError(f"optimizer({kind.__name__}): it has no learning rate, so no schedule could set it")
    config = Torch(
        kind=kind,
        options=options,
        accepts=tuple(defaults),
        elementwise=flat,
        lr=defaults["lr"],
        weight_decay=defaults.get("weight_decay", 0.0),
        no_decay=no_decay,
        rate=rate if rate is not None else Constant(),
        groups=groups if groups is not None else {},
        moments=tuple(name for name, state in states.items() if state.dim()) if flat else (),
        numbers=tuple(name for name, state in states.items() if not state.dim() and name != "step") if flat else (),
    )
    check_numbers(config.lr, config.weight_decay, config.groups, config.accepts)
    return config


def optimizer_of(config: Config, parameters: Parameters) -> Optimizer:
    """The optimizer that a configuration asks for, over the parameters of one rank."""
    return TorchOptimizer(config, parameters) if isinstance(config, Torch) else Optimizer(config, parameters)


def _tried(kind: Any, options: Mapping[str, Any], dimensions: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The options of a class with its defaults, and what it keeps of one small float64 parameter after a step."""
    if not (isinstance(kind, type) and issubclass(kind, optim.Optimizer)):
        raise ValueError(f"the optimizer is {kind!r}; it must be a class such as torch.optim.RMSprop")
    parameter = nn.Parameter(torch.zeros(SIZES[:dimensions], dtype=torch.float64))
    parameter.grad = torch.zeros_like(parameter)
    try:
        made = kind([parameter], **options)
        made.step()
    except (TypeError, ValueError, RuntimeError) as error:
        shown = "".join(f", {name}={value!r}" for name, value in options.items())
        raise ValueError(f"optimizer({kind.__name__}{shown}): {error}") from None
    return dict(made.defaults), {name: x for name, x in made.state[parameter].items() if isinstance(x, Tensor)}


@dataclass(frozen=True, eq=False)
class _Part:
    """One parameter of torch's: all of a range, or one of ours in it."""

    range: Range
    weights: nn.Parameter
    start: int = 0
    name: str = ""
    """Of ours, unless it is the whole range."""

    def of(self, own: Tensor) -> Tensor:
        """Its part of a buffer that is laid out like the own slice of the unit."""
        return self.cut(self.range.of(own))

    def cut(self, values: Tensor) -> Tensor:
        """Its part of a buffer that is laid out like the range."""
        return values[self.start : self.start + self.weights.numel()].view(self.weights.shape)


def _parts(found: Range, elementwise: bool) -> list[_Part]:
    """What torch updates of a range."""
    if elementwise:
        return [_Part(found, nn.Parameter(found.weights))]
    parts = []
    for place in found.places:
        start = place.start - found.unit.start - found.start
        weights = found.weights[start : start + place.numel].view(place.shape)
        parts.append(_Part(found, nn.Parameter(weights), start, place.parameter.name))
    return parts


def _check_whole(parameters: Parameters) -> None:
    """Raise ValueError, on every rank, if any rank has less than a whole parameter."""
    program = parameters.program
    for name in parameters.trained:
        shape, spec = program.parameters[name].shape, program.parameters[name].spec
        local, ranks = spec.local_shape(shape, program.mesh), program.mesh.extent(split_axes(program, name, parameters.storage))
        if local != shape or ranks > 1:
            how = f"shape {local} of it" if local != shape else f"1/{ranks} of its elements"
            raise ValueError(
                f"{name} of shape {shape} is not whole on a rank, which stores {how}; this optimizer is not "
                "element-wise, so its update would depend on the layout: keep the parameter whole, or take another optimizer"
            )


class TorchOptimizer(Optimizer):
    """One rank's optimizer of a torch class. Moments lie in buffers of the units, and torch's states are views of them."""

    def __init__(self, config: Torch, parameters: Parameters) -> None:
        self.config: Torch = config
        self.parameters = parameters
        self.steps = self.before = 0
        self._group_of = groups(config, parameters.program)
        if not config.elementwise:
            _check_whole(parameters)
        if not config.elementwise:
            self.whole_states = {name: _states_of(config, parameters, name) for name in parameters.trained}
        device = parameters.world.device
        # One element per group of the model, without a gradient, on every rank: what torch counts per parameter can be read there
        # by a rank that stores nothing of the group.
        self._witnesses = {
            group: nn.Parameter(torch.zeros(1, device=device)) for group in sorted(set(self._group_of.values()), key=str)
        }
        self._parts: dict[Group, list[_Part]] = {group: [] for group in self._witnesses}
        for found in parameters.updates:
            assert isinstance(found.group, Group)
            self._parts[found.group] += _parts(found, config.elementwise)
        self._all_parts = [part for parts in self._parts.values() for part in parts]
        self._changing, self._copies = [], []
        self._kept_states: dict[Any, dict[str, Any]] = {}
        self._kept_settings: list[dict[str, Any]] = []
        self._begin()

    def _begin(self) -> None:
        """As before the first step."""
        self.state: dict[str, dict[Unit, Tensor]] = {}
        self._is_adopted = False
        rows, self._updated = [], []
        for group, parts in self._parts.items():
            members = [part.weights for part in parts] + ([self._witnesses[group]] if self.config.elementwise else [])
            decay = {"weight_decay": group.weight_decay} if "weight_decay" in self.config.accepts else {}
            if members:
                rows.append({"params": members, "lr": group.lr, **decay, **dict(group.options)})
                self._updated.append(group)
        self._torch = self.config.kind(rows, **{"lr": self.config.lr, **self.config.options}) if rows else None

    def update(self, scale: float = 1.0) -> float:
        """Apply one step with the gradients times `scale`, below 1 when they are clipped. Returns the learning rate it used."""
        lr, rate = self.lr, self.config.rate(self.steps - self.before)
        self.steps += 1
        if scale != 1.0:
            torch._foreach_mul_([found.gradient for found in self.parameters.updates], scale)
        if self._torch is not None:
            for group, settings in zip(self._updated, self._torch.param_groups, strict=True):
                settings["lr"] = group.lr * rate
            for part in self._all_parts:
                part.weights.grad = part.cut(part.range.gradient)
            self._advance(self._torch)
            for part in self._all_parts:
                part.weights.grad = None  # gradients have memory within a step only
            self._adopt()
        self.parameters.updated()
        return lr

    def keep(self, *, gradients: bool = False) -> None:
        """Copy what the next `update` changes: weights, torch's states and settings, and the gradients, which a class may write to."""
        self._changing = [x for part in self._all_parts for x in (part.weights.data, part.cut(part.range.gradient))]
        self._copies = copied(self._changing, self._copies)
        states = {} if self._torch is None else self._torch.state
        self._kept_states = {
            weights: {key: x.clone() if isinstance(x, Tensor) else copy.deepcopy(x) for key, x in found.items()}
            for weights, found in states.items()
        }
        rows = [] if self._torch is None else self._torch.param_groups
        self._kept_settings = [{key: x for key, x in row.items() if key != "params"} for row in rows]

    def undo(self) -> None:
        """Take the last `update` back, bit for bit."""
        super().undo()
        if self._torch is None:
            return
        if not self._kept_states:  # there was none before it
            self._begin()
            return
        for row, settings in zip(self._torch.param_groups, self._kept_settings, strict=True):
            row.update(settings)
        for weights, kept in self._kept_states.items():
            states = self._states(weights)
            for key, value in kept.items():
                # Moments are views of the units' buffers, and stay that.
                states[key] = states[key].copy_(value) if isinstance(value, Tensor) else value

    def _advance(self, updates: optim.Optimizer) -> None:
        """torch's step: of what has a gradient, and of the witnesses."""
        for witness in self._witnesses.values():
            witness.grad = torch.zeros_like(witness)
        updates.step()

    def _adopt(self) -> None:
        """Move the moments that torch has made in its first step into buffers of the units, one at a time."""
        if self._is_adopted:
            return
        for moment in self.config.moments:
            for part in self._all_parts:
                mine, states = part.of(self.own(part.range.unit, moment)), self._states(part.weights)
                states[moment] = mine.copy_(states[moment])
        self._is_adopted = True

    def _states(self, weights: nn.Parameter) -> dict[str, Tensor]:
        assert self._torch is not None
        found: dict[str, Tensor] = self._torch.state[weights]
        return found

    # State, as global tensors by name

    def own(self, unit: Unit, moment: str) -> Tensor:
        """A moment of this rank's slice of a unit (zeros before the first step), or its master copy."""
        if moment == "master":
            return super().own(unit, moment)
        buffers = self.state.setdefault(moment, {})
        if unit not in buffers:
            buffers[unit] = torch.zeros_like(unit.own_values, dtype=unit.accumulator)
        return buffers[unit]

    def state_dict(self) -> dict[str, Tensor]:
        """torch's states as `name/state`, global, and `step`. Collective."""
        state = super().state_dict()
        if self.steps == 0:
            return state
        state.update((name, torch.tensor(value)) for name, value in self.numbers().items() if "/" in name)
        for name in self.whole_states:
            mine = next((self._states(part.weights) for part in self._all_parts if part.name == name), None)
            stage, world = self.parameters.stages[name][0], self.parameters.world
            for key, (shape, dtype) in self.whole_states[name].items():
                value = None if mine is None else mine[key].to(world.device)
                state[f"{name}/{key}"] = from_stage(value, shape, dtype, stage, world).clone()
        return state

    def kept(self, steps: int) -> list[tuple[str, str]]:
        whole = [(name, state) for name, states in self.whole_states.items() for state in states] if steps else []
        return super().kept(steps) + whole

    def numbers(self) -> dict[str, float]:
        found = super().numbers()
        if self.steps and self.config.elementwise:
            for name in self.parameters.trained:
                states = self._states(self._witnesses[self._group_of[name]])
                found.update((f"{name}/{key}", float(states[key])) for key in self.config.numbers)
        return found

    def resume(self, numbers: Mapping[str, float]) -> None:
        super().resume(numbers)
        self._begin()
        if not self.steps:
            return
        if self.config.elementwise:
            self._is_adopted = True
            self._load_ranges(numbers)
            return
        for part in self._all_parts:
            states = self._states(part.weights)
            states["step"] = torch.tensor(float(self.steps))
            for key, (shape, dtype) in self.whole_states[part.name].items():
                states[key] = torch.zeros(shape, dtype=dtype, device=part.weights.device)

    def whole(self, name: str, state: str) -> Tensor:
        return next(self._states(part.weights)[state] for part in self._all_parts if part.name == name)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state_dict` of any layout returned; ValueError for a missing tensor or another shape."""
        for name, states in self.whole_states.items() if state.get("step") else ():
            for key, (shape, _) in states.items():
                value = state.get(f"{name}/{key}")
                if value is None or tuple(value.shape) != shape:
                    found = "nothing" if value is None else f"shape {tuple(value.shape)}"
                    raise ValueError(f"the optimizer state has {found} for '{name}/{key}'; it must have shape {shape}")
        super().load_state_dict(state)
        for part in self._all_parts if self.steps else ():
            for key in self.whole_states.get(part.name, {}):
                self._states(part.weights)[key].copy_(state[f"{part.name}/{key}"])

    def _load_ranges(self, saved: Mapping[str, float]) -> None:
        assert self._torch is not None
        self._advance(self._torch)  # the witnesses alone: now they have every number, and in torch's dtype
        for group, parts in self._parts.items():
            names = [name for name in self.parameters.trained if self._group_of[name] == group]
            numbers = self._states(self._witnesses[group])
            numbers = {key: x for key, x in numbers.items() if key not in self.config.moments}
            for key, x in numbers.items():
                x.fill_(self.steps if key == "step" else _shared(saved, names, key))
            for part in parts:
                views = {moment: part.of(self.own(part.range.unit, moment)) for moment in self.config.moments}
                self._states(part.weights).update({**{key: x.clone() for key, x in numbers.items()}, **views})


def _states_of(config: Torch, parameters: Parameters, name: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what torch keeps of a parameter, told from a small one. Raises ValueError if it takes no such parameter."""
    shape, wide = parameters.program.parameters[name].shape, parameters.accumulator_of(name)
    try:
        _, states = _tried(config.kind, {"lr": config.lr, **config.options}, len(shape))
    except ValueError as error:
        raise ValueError(f"{name} of shape {shape}: {error}") from None
    return {
        key: (
            tuple(shape[i] if size == SIZES[i] else size for i, size in enumerate(x.shape)),
            wide if x.dtype == torch.float64 else x.dtype,
        )
        for key, x in states.items()
        if key != "step"
    }


def _shared(state: Mapping[str, float], names: list[str], key: str) -> float:
    """A number that torch keeps for each parameter of a group, equal for all of them."""
    missing = [name for name in names if f"{name}/{key}" not in state]
    if missing:
        raise ValueError(f"the optimizer state has no '{missing[0]}/{key}'")
    found = {state[f"{name}/{key}"]: name for name in names}
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise ValueError(
            f"the optimizer state has {key} {one:g} for {first} and {other:g} for {second}, which are one group here: keep the "
            "groups with which it was saved"
        )
    return next(iter(found), 0.0)
