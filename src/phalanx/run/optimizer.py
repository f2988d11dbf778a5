"""Optimizers over flat storage: a configuration that says what is wanted, and one object that applies it in few fused calls.

Every rank updates the shards that it holds; no communication happens here. Parameters narrower than their gradients' dtype
are updated through a master copy in that dtype.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from phalanx.derive.program import Parameter, Program
from phalanx.run.flat import Flat, Span
from phalanx.run.parameters import Parameters

Rate = Callable[[int], float]
"""Step, from 0, to a factor on the learning rate."""


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

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay)
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

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay)
        if not 0 <= self.momentum < 1 or (self.nesterov and not self.momentum):
            raise ValueError(f"sgd: momentum {self.momentum} must be in [0, 1), and above 0 for nesterov")

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()


adamw, sgd = AdamW, SGD
Config = AdamW | SGD


def _check(lr: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be a number of at least 0")


def groups(config: Config, program: Program) -> dict[str, float]:
    """Weight decay of every trainable parameter, decided on names and global shapes so that no layout changes it."""
    for pattern in config.no_decay or ():
        if not any(_named(p, pattern) for p in program.parameters.values()):
            raise ValueError(f"no_decay pattern {pattern!r} matches none of the {len(program.parameters)} parameters")
    return {
        name: 0.0 if _is_free_of_decay(config, parameter) else config.weight_decay
        for name, parameter in program.parameters.items()
        if parameter.trainable
    }


def _is_free_of_decay(config: Config, parameter: Parameter) -> bool:
    if config.no_decay is None:
        return len(parameter.shape) < 2
    return any(_named(parameter, pattern) for pattern in config.no_decay)


def _named(parameter: Parameter, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (parameter.name, *parameter.aliases))


@dataclass
class _Group:
    """Ranges with one weight decay and one dtype, as the lists that one fused call takes."""

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
        device = parameters.world.device
        self._step = torch.zeros((), dtype=torch.float32, device=device)
        trained = [flat for flat in parameters.flats if flat.trainable]
        self._masters = {id(f): f.values.to(f.accumulator) for f in trained if f.dtype != f.accumulator}
        self.state: dict[str, dict[int, Tensor]] = {
            moment: {id(flat): torch.zeros_like(flat.values, dtype=flat.accumulator) for flat in trained}
            for moment in config.moments
        }
        self._fused = device.type in _get_fused_kernels_supported_devices()
        by_kind: dict[tuple[float, torch.dtype], list[Span]] = {}
        for span in parameters.updates:
            by_kind.setdefault((float(span.places[0].group), span.flat.accumulator), []).append(span)  # type: ignore[arg-type]
        self._groups = [
            _Group(
                decay,
                [span.gradient for span in spans],
                [span.of(self._weights(span.flat)) for span in spans],
                {moment: [span.of(buffers[id(span.flat)]) for span in spans] for moment, buffers in self.state.items()},
            )
            for (decay, _), spans in by_kind.items()
        ]

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return self.config.lr * self.config.rate(self.steps)

    def update(self, scale: float = 1.0) -> float:
        """Apply one step with the gradients times `scale`, below 1 when they are clipped. Returns the learning rate it used."""
        lr = self.lr
        self.steps += 1
        self._step.fill_(self.steps)
        for group in self._groups:
            gradients = group.gradients
            if scale != 1.0:
                torch._foreach_mul_(gradients, scale)
            if isinstance(self.config, AdamW):
                self._adamw(self.config, group, gradients, lr)
            else:
                self._sgd(self.config, group, gradients, lr)
        for flat in self.parameters.flats:
            if id(flat) in self._masters:
                flat.values.copy_(self._masters[id(flat)])
        return lr

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

    def _weights(self, flat: Flat) -> Tensor:
        return self._masters.get(id(flat), flat.values)

    # State, as global tensors by name

    def state_dict(self) -> dict[str, Tensor]:
        """Moments (and master weights, where parameters are narrower) as `name/moment`, global, and `step`. Collective."""
        state: dict[str, Tensor] = {"step": torch.tensor(self.steps)}
        for moment in self._kinds():
            names = [name for name in self.parameters.trained if moment != "master" or self._has_master(name)]
            values = self.parameters.collect(names, lambda name, m=moment: self.local(name, m), self.parameters.accumulator_of)  # type: ignore[misc]
            state.update((f"{name}/{moment}", value) for name, value in values.items())
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the shards of what `state_dict` of any layout returned; ValueError for a missing tensor or another shape."""
        pairs = []
        for moment in self._kinds():
            for name, (flat, _) in self.parameters.places.items():
                if flat.trainable and (moment != "master" or self._has_master(name)):
                    pairs.append((self.local(name, moment), self.parameters.shard_of(state, f"{name}/{moment}", name)))
        if "step" not in state:
            raise ValueError("the optimizer state has no 'step'")
        for mine, value in pairs:
            mine.copy_(value)
        self.steps = int(state["step"])

    def local(self, name: str, moment: str) -> Tensor:
        """This rank's shard of a moment of a parameter, or of its master copy."""
        flat, place = self.parameters.places[name]
        buffer = self._masters[id(flat)] if moment == "master" else self.state[moment][id(flat)]
        return self.parameters.view(buffer, place)

    def reload(self) -> None:
        """Make the master copies again, after the parameters were given other values."""
        for flat in self.parameters.flats:
            if id(flat) in self._masters:
                self._masters[id(flat)].copy_(flat.values)

    def _kinds(self) -> Sequence[str]:
        return (*self.config.moments, "master")

    def _has_master(self, name: str) -> bool:
        dtype = self.parameters.program.parameters[name].dtype
        return dtype != self.parameters.accumulator_of(name)
