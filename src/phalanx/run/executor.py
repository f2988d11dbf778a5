"""Runs one rank's list: the loop over actions, and the numbers that all ranks must agree on at its end.

The list is bound to closures once (`bind`). Here is what happens around it: the batch goes in, NORM adds up loss, norm and
count over the world in one message, a step that is not finite is refused before OPT changes anything, the result comes out.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm.transport import CommError, Handle
from phalanx.comm.world import World
from phalanx.derive.program import Program
from phalanx.derive.watch import Watched
from phalanx.event import Event
from phalanx.run.batch import microbatches
from phalanx.run.bind import Bound, tables
from phalanx.run.clock import Clock, Mark
from phalanx.run.gather import from_stage, gather
from phalanx.run.layout import contributes
from phalanx.run.non_finite import exits, first_in_forward
from phalanx.run.optimizer import Optimizer
from phalanx.run.origin import graph_origin
from phalanx.run.parameters import Parameters
from phalanx.run.precision import LossScale
from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.lower import forward_only
from phalanx.schedule.view import from_program

Judge = Callable[[float, float], str]
"""(loss, global norm of the gradients) of a step to what is to be done: "go" updates, any other word skips the update. Where one of the
two is not finite, "stop" is the FloatingPointError that names the tensor."""


@dataclass(frozen=True)
class Out:
    """What a training step returns; equal on every rank."""

    loss: float
    """Mean over the valid tokens of the whole global batch, before the update."""
    grad_norm: float
    """Global 2-norm of all gradients, before clipping."""
    tokens: int
    lr: float
    """Learning rate that this step used."""
    skipped: bool = False
    """True if nothing was updated: the gradients overflowed under the loss scale, and the next step has a smaller one, or a
    `judge` said so."""
    stop: bool = False
    """True if some rank has been asked to stop (`Executor.stop`)."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation returns; equal on every rank."""

    loss: float
    tokens: int


class Executor:
    """One rank of a training run.

    seed       of dropout
    max_norm   gradients are scaled down to this global norm, as torch.nn.utils.clip_grad_norm_ does; None never scales
    loss_scale  where it starts; None for dtypes that need none
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        world: World,
        parameters: Parameters,
        optimizer: Optimizer,
        *,
        max_norm: float | None = None,
        seed: int = 0,
        loss_scale: LossScale | None = None,
    ) -> None:
        if schedule.microbatches != program.microbatches:
            raise ValueError(f"the schedule has {schedule.microbatches} microbatches, the Program {program.microbatches}")
        if max_norm is not None and not max_norm > 0:  # not a number is not above 0
            raise ValueError(f"max_norm is {max_norm}; it must be above 0, or None")
        self.program, self.schedule, self.world = program, schedule, world
        self.parameters, self.optimizer, self.max_norm = parameters, optimizer, max_norm
        at = world.coordinates.get("pp", 0)
        self.actions = schedule.ranks[at]
        self._forward_actions = forward_only(schedule, from_program(program, schedule.storage, late=schedule.late)).ranks[at]
        self._seed = seed
        self.loss_scale = loss_scale
        self.record = False
        """Whether steps append to `events`."""
        self.events: list[Event] = []
        """One per action, with its lane: from its start to its end, for messages to their arrival."""
        self.reading: threading.Event | None = None
        """Set when whoever copies the weights and the optimizer's state has done so: no update before."""
        self.waited = 0.0
        """Seconds for which updates have waited for that."""
        self.judge: Judge | None = None
        """Asked before every update, with numbers that are equal on every rank."""
        self.stop = False
        """Whether this rank has been asked to stop; the step after it tells all ranks, in Out."""
        self._everybody = world.group(world.mesh.names)
        with torch.no_grad():
            self._tables = tables(program, world, parameters)
        self._training = self._bind(program, training=True)
        self._forward: dict[str | None, Bound] = {}
        """By the module that is watched; None is evaluation."""
        self._parts: list[dict[str, Tensor]] = []
        """This rank's microbatches of the last step."""
        self._step = 0
        self._result: tuple[float, float, int] = (0.0, 0.0, 0)
        self._stops = False
        self._lr, self._scale = 0.0, 1.0
        self._skipped = False

    @property
    def step_number(self) -> int:
        """Number of the next step, from 0; part of what dropout is a function of."""
        return self._step

    def seek(self, step: int) -> None:
        """Continue at a step number, after a checkpoint."""
        self._step = step

    @torch.no_grad()
    def reloaded(self) -> None:
        """Weights and buffers have new values: make anew what was made of them once. Collective."""
        for name, value in tables(self.program, self.world, self.parameters).items():
            self._tables[name].copy_(value)
        self._forward.clear()  # evaluation has tables of its own

    def settle(self) -> None:
        """Complete the update of the last step, which `late` may have left open. Collective."""

    @torch.no_grad()
    def step(self, batch: Mapping[str, Tensor], *, local: bool = False) -> Out:
        """One training step on a global batch, or on this rank's slices of it with `local`.

        Raises ValueError for a batch that does not fit, and FloatingPointError, on every rank and before any parameter changes,
        if the loss or a gradient is not finite. It names the step, counted from 1 as people do, and the first such tensor.
        Under a loss scale that can still fall such a step is skipped instead.
        """
        self._parts = microbatches(batch, self.program, self.world, local=local)
        self._training.start(self._step, self._parts)
        self._training.machine.loss_scale = self._factor
        self.parameters.begin()
        self._run(self._training)
        self._step += 1
        loss, norm, tokens = self._result
        return Out(loss, norm, tokens, self._lr, self._skipped, self._stops)

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Tensor], quiet: Program | None = None, *, local: bool = False) -> Evaluation:
        """Loss on a batch, forward only, through the same pipeline. Changes nothing.

        quiet  the Program in evaluation mode, the same in every call; left out if that does not differ
        """
        self.settle()
        bound = self._run_forward(batch, local, None, quiet or self.program)
        loss, count = self._add_up([self._loss(bound)], bound.count)
        return Evaluation(loss / count, int(count))

    @torch.no_grad()
    def watch(self, watched: Watched, batch: Mapping[str, Tensor], *, local: bool = False) -> tuple[Tensor, ...]:
        """Global values of what leaves a module, on every rank, forward only; microbatches joined along dimension 0."""
        self.settle()
        bound = self._run_forward(batch, local, watched, watched.program)
        found = []
        for exit in watched.exits:
            value, parts = exit.value, []
            for j in range(self.program.microbatches if exit.by_microbatch else 1):
                stage = 0 if exit.segment is None else self.schedule.at(exit.segment, j)
                mine = bound.watched(exit, j)
                part = None if mine is None else gather(mine, value.spec, self.world)
                parts.append(from_stage(part, value.shape, value.dtype, stage, self.world))
            if not exit.by_microbatch:
                found += parts
            else:
                found.append(torch.cat(parts) if value.shape else torch.stack(parts))
        return tuple(found)

    # The loop

    def _run(self, bound: Bound) -> None:
        if self.record or self.world.ledger.enabled:
            self._run_observed(bound)
            return
        wait = bound.machine.wait
        action = None
        try:
            for waits, operation, action in bound.operations:  # noqa: B007 - read below if one fails
                if waits:
                    wait(waits)
                operation()
            bound.machine.drain()
        except (CommError, TimeoutError) as error:
            raise type(error)(f"{error}{self._place(action, error)}") from error

    def _place(self, action: Action | None, error: Exception) -> str:
        """Where in the step a communication failed, and the user's line if it was inside a segment."""
        if action is None:
            return ""
        segment = "" if action.segment is None else f" of segment {self.program.segments[action.segment].name}"
        line = graph_origin(error.__traceback__)
        return f"; in {action}{segment}, step {self._step}" + (f", from {line}" if line else "")

    def _run_observed(self, bound: Bound) -> None:
        """The same, telling the ledger what each call is for and, if asked, when each action began and ended."""
        names = [segment.name for segment in self.program.segments]
        clock = Clock(self.world.device)
        times: list[tuple[Action, Mark, Mark, list[Handle] | None]] = []
        for waits, operation, action in bound.operations:
            if waits:
                bound.machine.wait(waits)
            if action is None:
                operation()
                continue
            segment = None if action.segment is None else names[action.segment]
            with self.world.ledger.origin(segment=segment, microbatch=action.microbatch):
                start = clock.now()
                issued = operation()
                times.append((action, start, clock.now(), issued))
        bound.machine.drain()
        if not self.record:
            return
        for action, start, end, issued in times:
            segment = None if action.segment is None else names[action.segment]
            seconds = clock.seconds(end)
            for handle in issued or ():
                handle.synchronize()
                seconds = max(seconds, handle.finished() or seconds)
            self.events.append(
                Event(
                    rank=self.world.rank,
                    lane=action.lane,
                    name=str(action),
                    start=clock.seconds(start),
                    end=seconds,
                    segment=segment,
                    microbatch=action.microbatch,
                )
            )

    def _bind(self, program: Program, *, training: bool, watched: Watched | None = None) -> Bound:
        others = {"NORM": self._norm, "OPT": self._opt_when_read}
        made = self._tables if program is self.program else tables(program, self.world, self.parameters)
        actions = self.actions if training else self._forward_actions
        return Bound(
            program, actions, self.world, self.parameters, training=training, tables=made, others=others,
            watch=() if watched is None else watched.exits, seed=self._seed,
        )  # fmt: skip

    def _origin_of_a_broken_loss(self) -> str | None:
        """The forward of the last step once more, keeping what crosses the cuts."""
        bound = Bound(
            self.program, self._forward_actions, self.world, self.parameters,
            training=False, tables=self._tables, watch=exits(self.program), seed=self._seed,
        )  # fmt: skip
        bound.start(self._step, self._parts)
        self._run(bound)
        return first_in_forward(bound, self.parameters, self._parts, self.world)

    def _run_forward(self, batch: Mapping[str, Tensor], local: bool, watched: Watched | None, program: Program) -> Bound:
        path = None if watched is None else watched.path
        if path not in self._forward:
            self._forward[path] = self._bind(program, training=False, watched=watched)
        bound = self._forward[path]
        bound.start(self._step, microbatches(batch, self.program, self.world, local=local))
        self._run(bound)
        return bound

    # What every rank must agree on

    def _norm(self) -> None:
        """Loss, norm and count to every rank, in one message; refuses a step that is not finite."""
        parameters, count = self.parameters, self._training.count
        parameters.finish()
        stop = torch.tensor(float(self.stop), dtype=torch.float64, device=self.world.device)
        loss, square, stops, tokens = self._add_up([self._loss(self._training), parameters.squared_norm(), stop], count)
        self._stops = stops > 0
        if not math.isfinite(loss + square):
            # Chunks of the norm overflow long before float64 does: look again before calling it infinite.
            loss, square, tokens = self._add_up([self._loss(self._training), parameters.finite_squared_norm()], count)
        norm = math.sqrt(square) / self._factor
        self._skipped = not math.isfinite(loss + square)
        scaled_down = self._skipped and self.loss_scale is not None and not self.loss_scale.is_smallest
        verdict = "stop" if self._skipped else "go"
        if self.judge is not None and not scaled_down:
            verdict = self.judge(loss / tokens, norm)
        if self._skipped and not scaled_down and verdict in ("go", "stop"):
            raise self._refusal(self._place_of_non_finite(math.isfinite(float(self._loss(self._training)))))
        self._skipped |= verdict != "go"
        self._result = loss / tokens, norm, int(tokens)

    def wait_until_read(self) -> None:
        """Until nobody copies weights and the optimizer's state any more: before they change."""
        if self.reading is not None:
            began = time.perf_counter()
            self.reading.wait()
            self.reading = None
            self.waited += time.perf_counter() - began

    def _opt_when_read(self) -> None:
        self.wait_until_read()
        self._opt()

    def _opt(self) -> None:
        norm, factor = self._result[1], self._factor
        if self._skipped:
            self._scale, self._lr = factor, self.optimizer.lr
        else:
            self._scale = self._clipping(norm)
            self._lr = self.optimizer.update(self._scale / factor)
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.update(math.isfinite(sum(self._result[:2])))

    def _clipping(self, norm: float) -> float:
        """What gradients of that global norm are multiplied by; torch's clip_grad_norm_ adds 1e-6 as well."""
        return 1.0 if self.max_norm is None else min(1.0, self.max_norm / (norm + 1e-6))

    @property
    def _factor(self) -> float:
        """What this step's loss and gradients are multiplied by."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """Global gradients of the last step on every rank, by first name, before clipping. Collective."""
        self.settle()
        return {name: gradient / self._scale for name, gradient in self.parameters.gradients().items()}

    def _loss(self, bound: Bound) -> Tensor:
        """Sum over the microbatches of the loss sum, on the ranks that contribute it; zero elsewhere."""
        counts = contributes(bound.program.segments[-1].cls.outputs[0].spec, self.world)
        losses = bound.losses() if counts else []
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self.world.device)
        return torch.stack(losses).sum(dtype=torch.float64)

    def _add_up(self, terms: list[Tensor], count: Tensor) -> list[float]:
        """Sums over the world of terms that each rank has a share of, then the count, which all have."""
        numbers, handle = self._issue(terms, count)
        handle.wait()
        sums: list[float] = numbers.tolist()
        self._check_count(sums[-1])
        return sums

    def _issue(self, terms: list[Tensor], count: Tensor) -> tuple[Tensor, Handle]:
        numbers = torch.stack([*terms, count.double() if self.world.rank == 0 else count.new_zeros((), dtype=torch.float64)])
        return numbers, self.world.transport.all_reduce(numbers, self._everybody)

    def _check_count(self, tokens: float) -> None:
        if not tokens > 0:  # 0, or not a number
            raise ValueError(f"step {self._step + 1}: the batch has {tokens:g} valid tokens, so its mean loss is not defined")

    def _place_of_non_finite(self, loss_is_finite: bool) -> int:
        """0 if this rank's share of the loss is not finite, else the number, from 1, of its first gradient that is not."""
        mine, names = self.parameters.first_non_finite(), list(self.program.parameters)
        if not loss_is_finite:
            return 0
        return len(names) + 1 if mine is None else names.index(mine) + 1

    def _refusal(self, place: int) -> FloatingPointError:
        """The same on every rank: names the first tensor, the loss before all gradients, that is not finite somewhere."""
        names = list(self.program.parameters)
        first = torch.tensor(place, device=self.world.device)
        self.world.transport.all_reduce(first, self._everybody, "min").wait()
        if int(first) == 0:
            origin = self._origin_of_a_broken_loss()
            what = "the loss is not finite" + (f"; the first tensor that is not is {origin}" if origin else "")
        elif int(first) > len(names):
            what = "the squares of the gradients, each finite, add up to more than float64 holds"
        else:
            what = f"the gradient of {names[int(first) - 1]} is not finite"
        return FloatingPointError(f"step {self._step + 1}: {what}; no parameter was changed")
