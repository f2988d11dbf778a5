"""Optimizers over flat storage: a configuration that says what is wanted, and one object that applies it in few fused calls.

Every rank updates what it stores; no communication happens here. Parameters narrower than their gradients' dtype are updated
through a master copy in that dtype.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from phalanx.derive.program import Parameter, Program
from phalanx.run.flat import Range, Unit
from phalanx.run.parameters import Parameters

Rate = Callable[[int], float]
"""Step, from 0, to a factor on the learning rate."""
Groups = Mapping[str, Mapping[str, float]]
"""Pattern of parameters to the options in which they differ from the others."""


@dataclass(frozen=True)
class Constant:
    """Factor 1 after `warmup` steps of linear rise. The first step already has a factor above 0."""

    warmup: int = 0

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0


@dataclass(frozen=True)
class Linear:
    """Linear rise over `warmup` steps, then a straight line down to `final` at step `total` - 1."""

    total: int
    warmup: int = 0
    final: float = 0.0

    def __call__(self, step: int) -> float:
        return _fall(step, self.total, self.warmup, lambda part: 1 + (self.final - 1) * part)


@dataclass(frozen=True)
class Cosine:
    """Linear rise over `warmup` steps, then half a cosine down to `final` at step `total` - 1.

    Loshchilov and Hutter 2017, equation 5.
    """

    total: int
    warmup: int = 0
    final: float = 0.0

    def __call__(self, step: int) -> float:
        fallen = 1 - self.final
        return _fall(step, self.total, self.warmup, lambda part: self.final + fallen * (1 + math.cos(math.pi * part)) / 2)


def _fall(step: int, total: int, warmup: int, shape: Callable[[float], float]) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return shape(min(1.0, (step - warmup) / max(1, total - 1 - warmup)))


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), as torch.optim.AdamW computes it."""

    lr: float = 1e-3
    """Peak learning rate, multiplied by `rate`."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    no_decay: tuple[str, ...] | None = None
    """Patterns of parameters without weight decay; None: those with fewer than two dimensions (norms, biases); (): none."""
    rate: Rate = field(default_factory=Constant)
    groups: Groups = field(default_factory=dict)
    """Other `lr` and `weight_decay` by pattern of parameters, as in {"embed.*": {"lr": 1e-4}}; the first that matches counts."""

    def __post_init__(self) -> None:
        check_numbers(self.lr, self.weight_decay, self.groups)
        if not all(0 <= beta < 1 for beta in self.betas) or self.eps < 0:
            raise ValueError(f"adamw: betas {self.betas} must be in [0, 1) and eps {self.eps} at least 0")

    moments = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent with momentum and (coupled) weight decay, as torch.optim.SGD computes it."""

    lr: float = 1e-2
    """Peak learning rate, multiplied by `rate`."""
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] | None = None
    """As in AdamW."""
    rate: Rate = field(default_factory=Constant)
    groups: Groups = field(default_factory=dict)
    """As in AdamW."""

    def __post_init__(self) -> None:
        check_numbers(self.lr, self.weight_decay, self.groups)
        if not 0 <= self.momentum < 1 or (self.nesterov and not self.momentum):
            raise ValueError(f"sgd: momentum {self.momentum} must be in [0, 1), and above 0 for nesterov")

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()


@dataclass(frozen=True, kw_only=True)
class Torch:
    """A class of torch.optim, or one like them. `phx.optimizer` makes and checks it; `run.torch_optimizer` applies it."""

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    """Of its constructor, without lr and weight_decay."""
    accepts: tuple[str, ...]
    """All options that it takes, by name."""
    elementwise: bool
    """Whether elements are updated apart, so that any slice of a parameter may be; else it must be whole on a rank."""
    lr: float
    weight_decay: float
    no_decay: tuple[str, ...] | None
    rate: Rate
    groups: Groups
    moments: tuple[str, ...]
    """States of an element-wise one that have the parameter's shape."""
    numbers: tuple[str, ...]
    """States of an element-wise one that are one number for a group; `step` is not among them."""


adamw, sgd = AdamW, SGD
Config = AdamW | SGD | Torch


@dataclass(frozen=True)
class Group:
    """What parameters that are updated alike share."""

    lr: float
    """Peak learning rate, multiplied by the config's `rate`."""
    weight_decay: float
    options: tuple[tuple[str, float], ...] = ()
    """Other options of a torch optimizer in which they differ, by name."""


def check_numbers(lr: float, weight_decay: float, groups: Groups, allowed: Sequence[str] = ("lr", "weight_decay")) -> None:
    """Raise ValueError for a rate or decay below 0, and for an option of a group that is not `allowed`."""
    named = [("lr", lr), ("weight_decay", weight_decay)]
    for pattern, options in groups.items():
        for name in options:
            if name not in allowed:
                raise ValueError(f"groups[{pattern!r}] sets {name!r}; parameters can differ in {', '.join(allowed)}")
        named += [(f"{name} of groups[{pattern!r}]", options[name]) for name in ("lr", "weight_decay") if name in options]
    for name, value in named:
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be a number of at least 0")


def groups(config: Config, program: Program) -> dict[str, Group]:
    """The group of every trainable parameter, decided on names and global shapes so that no layout changes it."""
    for what, patterns in (("no_decay", config.no_decay or ()), ("groups", config.groups)):
        for pattern in patterns:
            if not any(_named(p, pattern) for p in program.parameters.values()):
                raise ValueError(f"{what} pattern {pattern!r} matches none of the {len(program.parameters)} parameters")
    return {name: _group(config, parameter) for name, parameter in program.parameters.items() if parameter.trainable}


def _group(config: Config, parameter: Parameter) -> Group:
    own = next((options for pattern, options in config.groups.items() if _named(parameter, pattern)), {})
    decay = 0.0 if _is_free_of_decay(config, parameter) else config.weight_decay
    others = sorted((name, value) for name, value in own.items() if name not in ("lr", "weight_decay"))
    return Group(own.get("lr", config.lr), own.get("weight_decay", decay), tuple(others))


def _is_free_of_decay(config: Config, parameter: Parameter) -> bool:
    if config.no_decay is None:
        return len(parameter.shape) < 2
    return any(_named(parameter, pattern) for pattern in config.no_decay)


def _named(parameter: Parameter, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (parameter.name, *parameter.aliases))


@dataclass
class _Group:
    """Ranges of one Group and one dtype, as the lists that one fused call takes."""

    lr: float
    weight_decay: float
    gradients: list[Tensor]
    weights: list[Tensor]
    """What is updated: the parameters, or their master copies."""
    moments: dict[str, list[Tensor]]


class Optimizer:
    """The state of one rank's optimizer. `update` applies one step to the parameters, using their gradients as they are."""

    def __init__(self, config: Config, parameters: Parameters) -> None:
        self.config, self.parameters = config, parameters
        self.steps = 0
        """Updates applied so far."""
        self.before = 0
        """How many of them the learning rate does not count: they were another run's."""
        device = parameters.world.device
        self._step = torch.zeros((), dtype=torch.float32, device=device)
        trained = [unit for unit in parameters.units if unit.trainable]
        self.state: dict[str, dict[Unit, Tensor]] = {
            moment: {unit: torch.zeros_like(unit.own_values, dtype=unit.accumulator) for unit in trained}
            for moment in config.moments
        }
        self._changing: list[Tensor] = []
        self._copies: list[Tensor] = []
        """Copies of `_changing` from before the last update."""
        self._fused = device.type in _get_fused_kernels_supported_devices()
        by_kind: dict[tuple[Group, torch.dtype], list[Range]] = {}
        for found in parameters.updates:
            assert isinstance(found.group, Group)
            by_kind.setdefault((found.group, found.unit.accumulator), []).append(found)
        self._groups = [
            _Group(
                group.lr,
                group.weight_decay,
                [found.gradient for found in ranges],
                [found.weights for found in ranges],
                {moment: [found.of(buffers[found.unit]) for found in ranges] for moment, buffers in self.state.items()},
            )
            for (group, _), ranges in by_kind.items()
        ]

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return self.config.lr * self.config.rate(self.steps - self.before)

    def update(self, scale: float = 1.0) -> float:
        """Apply one step with the gradients times `scale`, below 1 when they are clipped. Returns the learning rate it used."""
        lr, rate = self.lr, self.config.rate(self.steps - self.before)
        self.steps += 1
        self._step.fill_(self.steps)
        for group in self._groups:
            gradients = group.gradients
            if scale != 1.0:
                torch._foreach_mul_(gradients, scale)
            if isinstance(self.config, AdamW):
                self._adamw(self.config, group, gradients, group.lr * rate)
            elif isinstance(self.config, SGD):
                self._sgd(self.config, group, gradients, group.lr * rate)
        self.parameters.updated()
        return lr

    def keep(self, *, gradients: bool = False) -> None:
        """Copy what the next `update` changes, so that `undo` can put it back; the gradients too if they are to be scaled.

        That is as much memory again as the moments and the weights which this rank updates, taken at the first call.
        """
        changing = [
            x for group in self._groups for x in (*group.weights, *(x for each in group.moments.values() for x in each))
        ]
        if gradients:
            changing += [x for group in self._groups for x in group.gradients]
        self._copies = copied(changing, self._copies)
        self._changing = changing

    def undo(self) -> None:
        """Take the last `update` back, bit for bit; `keep` was called before it. The parameters must be told (`updated`)."""
        put_back(self._changing, self._copies)
        self.steps -= 1

    def _adamw(self, config: AdamW, group: _Group, gradients: list[Tensor], lr: float) -> None:
        beta1, beta2 = config.betas
        first, second = group.moments["exp_avg"], group.moments["exp_avg_sq"]
        if self._fused:
            torch._fused_adamw_(
                group.weights, gradients, first, second, [], [self._step] * len(gradients),
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=group.weight_decay, eps=config.eps, amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        torch._foreach_mul_(group.weights, 1 - lr * group.weight_decay)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, math.sqrt(1 - beta2**self.steps))
        torch._foreach_add_(roots, config.eps)
        torch._foreach_addcdiv_(group.weights, first, roots, -lr / (1 - beta1**self.steps))

    def _sgd(self, config: SGD, group: _Group, gradients: list[Tensor], lr: float) -> None:
        moments = group.moments.get("momentum", [])
        if self._fused:
            torch._fused_sgd_(
                group.weights, gradients, moments,
                weight_decay=group.weight_decay, momentum=config.momentum, lr=lr, dampening=0.0,
                nesterov=config.nesterov, maximize=False, is_first_step=self.steps == 1,
            )  # fmt: skip
            return
        steps = list(torch._foreach_add(gradients, group.weights, alpha=group.weight_decay))
        if config.momentum:
            torch._foreach_mul_(moments, config.momentum)
            torch._foreach_add_(moments, steps)
            steps = list(torch._foreach_add(steps, moments, alpha=config.momentum)) if config.nesterov else moments
        torch._foreach_add_(group.weights, steps, alpha=-lr)

    # State, by parameter

    whole_states: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]] = MappingProxyType({})
    """Shape and dtype of what is kept of parameters that are whole on a rank, by name and state; empty unless `Torch` says so."""

    def kept(self, steps: int) -> list[tuple[str, str]]:
        """(parameter, state) of all that any rank keeps after so many updates of what is trained, in one order everywhere."""
        return [
            (name, kind)
            for name in self.parameters.trained
            for kind in self._kinds()
            if kind != "master" or self._has_master(name)
        ]

    def numbers(self) -> dict[str, float]:
        """What is kept that is one number: the updates so far, as `step`, and `name/state` of a torch optimizer. Equal on every rank."""
        return {"step": self.steps, "before": self.before}

    def resume(self, numbers: Mapping[str, float]) -> None:
        """Continue at what `numbers` told on any layout. The tensors of `kept` exist from now on, for whoever is to fill them."""
        if "step" not in numbers:
            raise ValueError("the optimizer state has no 'step'")
        self.steps, self.before = int(numbers["step"]), int(numbers.get("before", 0))

    def whole(self, name: str, state: str) -> Tensor:
        """A state in `whole_states` of a parameter that this rank holds."""
        raise AssertionError(f"{name} is stored in slices")

    # State, as global tensors by name

    def state_dict(self) -> dict[str, Tensor]:
        """Moments (and master weights, where parameters are narrower) as `name/moment`, global, and `step`. Collective."""
        state: dict[str, Tensor] = {"step": torch.tensor(self.steps)}
        for moment in self._kinds():
            names = [name for name in self.parameters.trained if moment != "master" or self._has_master(name)]
            values = self.parameters.collect(names, lambda unit, m=moment: self.own(unit, m), self.parameters.accumulator_of)  # type: ignore[misc]
            state.update((f"{name}/{moment}", value) for name, value in values.items())
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the shards of what `state_dict` of any layout returned; ValueError for a missing tensor or another shape."""
        found = [
            (name, moment, self.parameters.shard_of(state, f"{name}/{moment}", name))
            for name, moment in self.kept(self.steps)
            if name in self.parameters.places and moment not in self.whole_states.get(name, {})
        ]
        self.resume({name: float(value) for name, value in state.items() if not value.dim()})
        for name, moment, value in found:
            self.parameters.store(name, self.own(self.parameters.places[name][0], moment), value)

    def own(self, unit: Unit, moment: str) -> Tensor:
        """A moment of this rank's slice of a unit, or its master copy."""
        if moment != "master":
            return self.state[moment][unit]
        assert unit.master is not None
        return unit.master

    def _kinds(self) -> Sequence[str]:
        return (*self.config.moments, "master")

    def _has_master(self, name: str) -> bool:
        """Whether there is more to a parameter than what the model's own state has of it."""
        parameter = self.parameters.program.parameters[name]
        return parameter.dtype != self.parameters.accumulator_of(name) and parameter.stored is None


def copied(tensors: Sequence[Tensor], into: list[Tensor]) -> list[Tensor]:
    """Copies of tensors, in the memory of an earlier row of copies of the same ones if there is one."""
    copies = into if len(into) == len(tensors) else [torch.empty_like(x) for x in tensors]
    put_back(copies, tensors)
    return copies


def put_back(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(list(tensors), list(values))
