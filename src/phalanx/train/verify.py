"""Does the mesh change what the model computes? Trains the same model twice and compares every number.

The reference is the untouched module in one process of plain PyTorch: its own forward, autograd, torch.optim.AdamW. It shares
nothing with the derived program but the initial weights, the batches and the loss function.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.comm.local import LocalWorld, local
from phalanx.comm.world import World
from phalanx.mesh import Mesh
from phalanx.run.step import Step
from phalanx.train.assembly import learning_rate, parallel_step
from phalanx.train.config import TrainConfig
from phalanx.train.models import Model, build
from phalanx.train.norms import rewrite_norms

TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2}
"""Largest relative error that passes, by dtype. Sums over a mesh round in another order: some 1e3 additions of relative
rounding 2e-16, 6e-8 and 4e-3, grown by three AdamW steps."""

NEGLIGIBLE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 1e-1}
"""A gradient below this fraction of the model's largest is measured against that fraction instead of against itself. Some
gradients are 0 in exact arithmetic (the bias of a key projection under softmax): both sides hold rounding and nothing else."""

KINDS = ("loss", "grad", "weight")

SMOOTH_EPS = {"float32": 1e-3, "bfloat16": 1.0}
"""AdamW's eps where rounding is coarse. The first updates are lr g / (|g| + eps): with the usual 1e-8 they are the sign of g, also
where g is nothing but rounding, and any two orders of summation end in different weights."""


@dataclass(frozen=True)
class Numbers:
    """What one step of training gives: the loss, and by parameter name its gradient before clipping and the weight after."""

    loss: float
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


class Trainer(Protocol):
    def step(self, batch: Mapping[str, Tensor]) -> Numbers: ...

    def at(self, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Numbers | None:
        """Loss and gradients at other weights than its own, which it keeps; None if it cannot tell."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first number that differs by more than the tolerance."""

    step: int
    kind: str
    """loss, grad or weight"""
    tensor: str | None
    segment: str | None
    error: float


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The largest error of each kind of number: max|Δ| / max|reference| of any tensor."""

    loss: float = 0.0
    grad: float = 0.0
    weight: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outcome. Errors are the largest max|Δ| / max|reference| of any tensor in any step.

    Loss and gradients are compared from equal weights: the reference is evaluated at those that the mesh began the step with.
    Weights are those of two runs that are left to themselves.
    """

    model: str
    mesh: str
    layout: Mapping[str, str | tuple[str, ...]]
    dtype: str
    steps: int
    reference: str
    """What it was compared with."""
    tolerance: float
    loss: float
    grad: float
    weight: float
    by_step: tuple[Errors, ...]
    """The same for each step."""
    worst: Mapping[str, str | None]
    """The tensor behind each of grad and weight."""
    first_divergence: Divergence | None
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.first_divergence is None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


class Eager:
    """The user's module as it is, on plain PyTorch."""

    def __init__(self, module: nn.Module, model: Model, config: TrainConfig) -> None:
        self.module, self.model, self.config = module, model, config
        self.accepted = set(inspect.signature(module.forward).parameters)
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # As everybody trains in bfloat16: what is updated is a float32 copy, whose rounding is the next step's weight.
        narrow = torch.bfloat16
        self.masters = [p.detach().float() if p.dtype == narrow else p for p in self.parameters]
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.masters if p.dim() >= 2], "weight_decay": settings.weight_decay},
                {"params": [p for p in self.masters if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate(config))

    def _loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        total, count = self.model.loss(outputs, batch)
        return total / count

    def _entries(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in batch.items() if name in self.accepted}

    def at(self, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Numbers:
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        leaves = {name: w.detach().clone().requires_grad_(name not in frozen) for name, w in weights.items()}
        outputs = torch.func.functional_call(self.module, leaves, kwargs=self._entries(batch))
        loss = self._loss(outputs, batch)
        trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        found = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(trained.items(), grads, strict=True)}
        return Numbers(loss.item(), found, weights)

    def step(self, batch: Mapping[str, Tensor]) -> Numbers:
        self.module.zero_grad()
        loss = self._loss(self.module(**self._entries(batch)), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        named = dict(self.module.named_parameters())
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items() if p.requires_grad
        }
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        if self.config.optimizer.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.masters, self.config.optimizer.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        return Numbers(loss.item(), gradients, {name: p.detach() for name, p in named.items()})


class Derived:
    """The derived program on a world."""

    def __init__(self, step: Step) -> None:
        self.program = step.program
        self._step = step

    def step(self, batch: Mapping[str, Tensor]) -> Numbers:
        out = self._step(dict(batch))
        gradients = self._step.gradients()
        weights = self._step.state_dict()
        # a copy: on one rank they are the live ones
        return Numbers(float(out.loss), gradients, {name: weights[name].clone() for name in self.program.parameters})

    def at(self, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        """Not told: its dropout depends on the number of the step."""


def verify(
    config: TrainConfig,
    world: World | LocalWorld,
    *,
    model: Model | None = None,
    rewrite: bool | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Train `config.steps` steps both ways and compare after each one.

    model      what to train, if it is not the one that `config.model` names; of the configured dtype and dropout
    rewrite    replace norms that round to float32 inside by ones that do not, on both sides; by default in float64, where their
               rounding would hide an error of 1e-7
    tolerance  largest relative error that passes; by default TOLERANCE of the dtype
    Under processes every rank takes part and returns the same Comparison.
    """
    if config.precision == "fp16":
        raise ValueError(
            "fp16 skips steps until its loss scale fits, which one process of plain PyTorch does not: verify bf16, or none"
        )
    rounding = config.dtype if config.precision is None else "bfloat16"
    tolerance = TOLERANCE[rounding] if tolerance is None else tolerance
    model = (
        build(config.model, config.dtype, dropout=config.dropout, documents=config.mask_documents) if model is None else model
    )
    config = replace(config, batch=config.batch or model.batch, seq=config.seq or model.seq)
    torch.manual_seed(config.seed)
    module = model.factory()
    notes = []
    if config.dtype == "float64" if rewrite is None else rewrite:
        notes += rewrite_norms(module)
    eps = max(config.optimizer.eps, SMOOTH_EPS.get(rounding, 0.0))
    if eps != config.optimizer.eps:
        notes.append(f"AdamW's eps is {eps:g} on both sides, so that weights do not follow the sign of rounding in {rounding}")
        config = replace(config, optimizer=replace(config.optimizer, eps=eps))
    reference: Trainer
    if config.dropout:
        described = "the derived program on one rank in one microbatch, whose dropout masks the mesh must reproduce"
        alone = replace(config, mesh="", layout=None, sequence_parallel=False, microbatches=1)
        alone = replace(alone, zero=0, zero_axes=None, schedule="1f1b", chunks=None)
        reference = Derived(parallel_step(alone, local(Mesh()), model, copy.deepcopy(module)))
    else:
        described = "one process of plain PyTorch"
        reference = Eager(copy.deepcopy(module), model, config)
    derived = Derived(parallel_step(config, world, model, module))
    tally = _Tally(derived.program.parameters, _segment_of(derived), rounding, tolerance)
    before: Mapping[str, Tensor] | None = None
    for step, batch in enumerate(batches(model, config), start=1):
        mine, theirs = derived.step(batch), reference.step(batch)
        # the first step begins with equal weights
        equal = reference.at(before, batch) if before is not None else None
        tally.compare(step, theirs if equal is None else replace(equal, weights=theirs.weights), mine)
        before = mine.weights
    return Comparison(
        model=model.name,
        mesh=config.mesh,
        layout=config.parsed_layout(model.dimensions),
        dtype=config.dtype,
        steps=config.steps,
        reference=described,
        tolerance=tolerance,
        loss=tally.largest["loss"],
        grad=tally.largest["grad"],
        weight=tally.largest["weight"],
        by_step=tuple(Errors(**errors) for errors in tally.by_step),
        worst={kind: tally.worst[kind] for kind in ("grad", "weight")},
        first_divergence=tally.first,
        notes=tuple(notes),
    )


def batches(model: Model, config: TrainConfig) -> Iterator[dict[str, Tensor]]:
    """Another global batch for every step."""
    assert config.batch is not None and config.seq is not None
    for step in range(config.steps):
        yield model.example(config.batch, config.seq, config.seed * 1_000_003 + step)


def relative_error(reference: Tensor, value: Tensor, floor: float = 0.0) -> float:
    """max|Δ| / max(max|reference|, floor); infinite when shapes differ or a number is not finite on one side only."""
    if reference.shape != value.shape:
        return float("inf")
    if reference.numel() == 0:
        return 0.0
    reference, value = reference.detach().cpu().double(), value.detach().cpu().double()
    difference = (reference - value).abs().max().item()
    if difference == 0.0:
        return 0.0
    scale = max(reference.abs().max().item(), floor)
    error = difference / scale if scale else float("inf")
    return error if error == error else float("inf")


class _Tally:
    """Largest errors so far, and the first one beyond the tolerance."""

    def __init__(self, names: Mapping[str, Any], segment_of: Callable[[str], str | None], dtype: str, tolerance: float) -> None:
        self.names, self.segment_of, self.tolerance = names, segment_of, tolerance
        self.negligible = NEGLIGIBLE[dtype]
        self.largest = dict.fromkeys(KINDS, 0.0)
        self.by_step: list[dict[str, float]] = []
        self.worst: dict[str, str | None] = dict.fromkeys(KINDS)
        self.first: Divergence | None = None

    def compare(self, step: int, reference: Numbers, derived: Numbers) -> None:
        self.by_step.append(dict.fromkeys(KINDS, 0.0))
        loss = torch.tensor(reference.loss, dtype=torch.float64)
        self._note(step, "loss", None, relative_error(loss, torch.tensor(derived.loss, dtype=torch.float64)))
        _same_names("gradients", reference.gradients, derived.gradients)
        _same_names("weights", reference.weights, derived.weights)
        largest = max(
            (gradient.abs().max().item() for gradient in reference.gradients.values() if gradient.numel()), default=0.0
        )
        for name in self.names:
            if name in reference.gradients:
                error = relative_error(reference.gradients[name], derived.gradients[name], self.negligible * largest)
                self._note(step, "grad", name, error)
        for name in self.names:
            self._note(step, "weight", name, relative_error(reference.weights[name], derived.weights[name]))

    def _note(self, step: int, kind: str, tensor: str | None, error: float) -> None:
        self.by_step[-1][kind] = max(self.by_step[-1][kind], error)
        if error > self.largest[kind]:
            self.largest[kind], self.worst[kind] = error, tensor
        if self.first is None and not error <= self.tolerance:
            segment = None if tensor is None else self.segment_of(tensor)
            self.first = Divergence(step=step, kind=kind, tensor=tensor, segment=segment, error=error)


def _same_names(what: str, reference: Mapping[str, Tensor], derived: Mapping[str, Tensor]) -> None:
    missing, extra = sorted(reference.keys() - derived.keys()), sorted(derived.keys() - reference.keys())
    assert not missing and not extra, f"the derived program's {what} lack {missing} and have {extra} that the module has not"


def _segment_of(derived: Derived) -> Callable[[str], str | None]:
    program = derived.program

    def segment(parameter: str) -> str | None:
        hosts = program.hosts(parameter)
        return program.segments[hosts[0]].name if hosts else None

    return segment
