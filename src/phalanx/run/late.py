"""The optimizer step without a barrier: OPT updates before anybody knows the norm of all ranks (Qi et al. 2023, Zero Bubble, section 4).

NORM issues its sum and does not wait for it. OPT updates as if nothing had to be clipped and everything were finite, and keeps what
it changes. The sum is read when the next step is about to write its first gradient, by when every stage has long sent its share. If it
says otherwise, the update is taken back and made again with the right scale. The step that had begun then runs to its end, so that
every message meets its counterpart, forgets what it has computed, and runs once more. All ranks read the same sum, so all do alike,
and every bit is what it is with a barrier. A step that has to be clipped so costs the next one twice: worth it where few are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.transport import CommError, Handle
from phalanx.event import Event
from phalanx.run.batch import microbatches
from phalanx.run.executor import Executor, Out
from phalanx.run.optimizer import Config, Torch
from phalanx.run.precision import LossScale
from phalanx.schedule.repeat import WRITES_GRADIENTS


class Sums:
    """Loss sum, squared norm, how many ranks were asked to stop, and count of a step, on their way from all ranks."""

    def __init__(self, numbers: Tensor, handle: Handle) -> None:
        self._numbers, self.handle = numbers, handle
        self._read: tuple[float, float, float, float] | None = None

    def read(self) -> tuple[float, float, float, float]:
        """Wait for them. Raises CommError or TimeoutError if they do not come."""
        if self._read is None:
            self._read = self._on_the_host()
        return self._read

    def _on_the_host(self) -> tuple[float, float, float, float]:
        if self._numbers.is_cuda:
            # On a stream of its own, or the host would wait for all that the next step has queued as well.
            with torch.cuda.stream(torch.cuda.Stream(self._numbers.device)):  # type: ignore[no-untyped-call]
                self.handle.wait()
                loss, square, stops, tokens = self._numbers.tolist()
        else:
            self.handle.wait()
            loss, square, stops, tokens = self._numbers.tolist()
        return loss, square, stops, tokens


class LateOut(Out):
    """An Out whose numbers come later: reading one waits until all ranks have ended the step, and for nothing else.

    So any rank may read it at any time. A step that is not finite reads as such here; the FloatingPointError is raised by the next step,
    or by whatever comes first of those that need the update complete. Numbers that are read only after the next step has been
    taken are there by then, so reading them does not put the barrier back.
    """

    def __init__(self, sums: Sums, lr: float, scale: LossScale | None) -> None:
        self._sums, self._lr, self._loss_scale = sums, lr, scale

    @property
    def out(self) -> Out:
        """The same as numbers."""
        loss, square, stops, tokens = self._sums.read()
        scale = self._loss_scale
        skipped = scale is not None and not scale.is_smallest and not math.isfinite(loss + square)
        norm = math.sqrt(square) / (1.0 if scale is None else scale.value)
        return Out(loss / tokens, norm, int(tokens), self._lr, skipped, stops > 0)

    @property
    def loss(self) -> float:  # type: ignore[override]
        return self.out.loss

    @property
    def grad_norm(self) -> float:  # type: ignore[override]
        return self.out.grad_norm

    @property
    def tokens(self) -> int:  # type: ignore[override]
        return self.out.tokens

    @property
    def lr(self) -> float:  # type: ignore[override]
        return self._lr

    @property
    def skipped(self) -> bool:  # type: ignore[override]
        return self.out.skipped

    @property
    def stop(self) -> bool:  # type: ignore[override]
        return self.out.stop

    def __eq__(self, other: object) -> bool:
        return self.out == (other.out if isinstance(other, LateOut) else other)

    def __hash__(self) -> int:
        return hash(self.out)


@dataclass(eq=False)
class Unsettled:
    """A step whose update was made before its sums were known."""

    step: int
    parts: list[dict[str, Tensor]]
    """This rank's microbatches."""
    sums: Sums
    loss_is_finite: bool
    """This rank's share, as `is_finite` is of loss and gradients: what is not finite here is not finite in the sum either."""
    is_finite: bool
    loss_scale: LossScale | None
    """That the step used."""
    event: Event | None = None
    """Of its NORM, which ends when the sums arrive, if it is recorded."""


class LateExecutor(Executor):
    """An Executor that takes a schedule without a barrier. It keeps copies of what this rank updates: weights (or their masters) and
    moments, and the gradients as well under a loss scale or if the optimizer is a torch class. The gradients of a step stay until
    the first backward of the next."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._open: Unsettled | None = None
        self._is_wrong = False
        """The list that runs has begun on weights that were then corrected."""
        self._broken: tuple[Unsettled, int] | None = None
        """A step that must be refused, with the place of what is not finite here."""
        operations = self._training.operations
        self._gathers = [n for n, (_, _, action) in enumerate(operations) if action is not None and action.kind == "GATHER"]
        first = next(n for n, (_, _, a) in enumerate(operations) if a is not None and a.kind in WRITES_GRADIENTS)
        waits, operation, action = operations[first]
        operations[first : first + 1] = [(waits, self._settle_inside, None), ((), operation, action)]

    @torch.no_grad()
    def step(self, batch: Mapping[str, Tensor], *, local: bool = False) -> Out:
        """One training step; see Executor.step. Returns at the end of this rank's own list, and raises FloatingPointError for the step
        before: then this step was not taken, and is the next one's number again."""
        if self._broken is not None:
            raise self._refused(*self._broken)
        try:
            parts = microbatches(batch, self.program, self.world, local=local)
            recorded = len(self.events)
            self._once(parts)
            if self._is_wrong:
                self._is_wrong = False
                if self._broken is not None:
                    raise self._refused(*self._broken)
                del self.events[recorded:]
                self._once(parts)
        except Exception:
            self._abandon()
            raise
        self._step += 1
        last = self._open
        assert last is not None, "NORM has not run"
        if self.record:
            last.event = next(event for event in reversed(self.events) if event.name == "NORM")
        return LateOut(last.sums, self._lr, last.loss_scale)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the sums of the last step and complete its update; collective. Raises FloatingPointError as `step` does."""
        if self._open is not None:
            self._judge(self._open)
            self._is_wrong = False  # nothing has begun on it
        if self._broken is not None:
            raise self._refused(*self._broken)

    def _once(self, parts: list[dict[str, Tensor]]) -> None:
        self._parts = parts
        self._training.start(self._step, parts)
        self._training.machine.loss_scale = self._factor
        self.parameters.begin(keep=self._open is not None)
        self._run(self._training)

    # What the list calls

    def _norm(self) -> None:
        """Issue the sum of loss, norm and count; with a list that began on wrong weights only complete what it has issued."""
        self.parameters.finish()
        count = self._training.count
        if self._is_wrong:
            return
        self._check_count(float(count))
        loss, square = self._loss(self._training), self.parameters.finite_squared_norm()
        loss_is_finite = math.isfinite(float(loss))
        stop = torch.tensor(float(self.stop), dtype=torch.float64, device=self.world.device)
        sums = Sums(*self._issue([loss, square, stop], count))
        is_finite = loss_is_finite and math.isfinite(float(square))
        self._open = Unsettled(self._step, self._parts, sums, loss_is_finite, is_finite, self.loss_scale)

    def _opt(self) -> None:
        if self._is_wrong:
            return
        assert self._open is not None
        self._lr, factor = self.optimizer.lr, self._factor
        if self._open.is_finite:
            self.optimizer.keep(gradients=factor != 1.0)
            self.optimizer.update(1.0 / factor)
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.update(True)

    def _settle_inside(self) -> None:
        """Before the first gradient of a list is written: those of the step before are still there for its update."""
        if self._open is not None:
            self._judge(self._open)
            self.parameters.release()

    # The verdict

    def _judge(self, last: Unsettled) -> None:
        """Read the sums of a step and, where its update was wrong, take it back and make the right one."""
        try:
            loss, square, _, _ = last.sums.read()
        except (CommError, TimeoutError) as error:
            raise type(error)(f"{error}; in NORM, step {last.step}") from error
        self._open = None
        if last.event is not None and last.event in self.events:
            arrived = last.sums.handle.finished() or last.event.end
            self.events[self.events.index(last.event)] = replace(last.event, end=max(last.event.end, arrived))
        factor = 1.0 if last.loss_scale is None else last.loss_scale.value
        is_finite = math.isfinite(loss + square)
        self._scale = self._clipping(math.sqrt(square) / factor) if is_finite else factor
        if is_finite and self._scale == 1.0:
            return
        self._is_wrong = True
        self._undo(last)
        if is_finite:
            self.optimizer.update(self._scale / factor)
        elif last.loss_scale is not None and not last.loss_scale.is_smallest:
            self.loss_scale = last.loss_scale.update(False)
        else:
            self.loss_scale = last.loss_scale
            self._broken = last, self._place_of_non_finite(last.loss_is_finite)

    def _undo(self, last: Unsettled) -> None:
        flying = self._training.machine.flying
        for handle in (handle for n in self._gathers if n in flying for handle in flying[n][0]):
            handle.wait()  # it reads the weights
        if last.is_finite:
            self.optimizer.undo()
        self.parameters.updated()

    def _refused(self, last: Unsettled, place: int) -> FloatingPointError:
        """The error of a step whose update was taken back; the next step has its number. Collective, between two lists."""
        self._broken = None
        self._step, self._parts = last.step, last.parts
        return self._refusal(place)

    def _abandon(self) -> None:
        """A step has failed: judge the one before, so that every rank has, wherever it was when this one ended."""
        if self._open is not None and self._open.step < self._step:
            with suppress(CommError, TimeoutError):
                self._judge(self._open)
        self._open, self._is_wrong = None, False


def check_late(config: Config) -> None:
    """Raise ValueError for an optimizer whose update cannot be taken back."""
    if isinstance(config, Torch) and config.kind.__module__.split(".")[:2] != ["torch", "optim"]:
        raise ValueError(
            f"barrier=False takes updates back, but what {config.kind.__module__}.{config.kind.__qualname__} keeps outside of its "
            "states is not known: use a class of torch.optim, phx.adamw or phx.sgd, or keep the barrier"
        )
