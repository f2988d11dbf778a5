"""A pipeline schedule by itself: lowered, proved, timed and accounted for on a model of equal stages that exists nowhere.

Pure. Time is in the unit of the costs that are given. Everything else is in terms of one rank's whole layer set, so that schedules
with one stage on a rank and with several can be compared: costs are those of one microbatch through it, and activations are
counted in what one microbatch leaves behind in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.event import Event
from phalanx.mesh import Mesh
from phalanx.schedule.account import Account, account
from phalanx.schedule.actions import Schedule
from phalanx.schedule.check import check
from phalanx.schedule.circle import check_runs
from phalanx.schedule.lower import lower
from phalanx.schedule.pipeline import Order
from phalanx.schedule.simulate import Costs, Link, simulate
from phalanx.schedule.view import Message, SegmentView, View


@dataclass(frozen=True)
class Prices:
    """What one microbatch costs on one rank, over all stages that the rank holds; a whole backward costs input + weight.

    message  time of one message between neighbours, from when both ends are ready to its arrival
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    message: float = 0.0

    def __post_init__(self) -> None:
        for name, cost in vars(self).items():
            if not 0 <= cost < float("inf"):
                raise ValueError(f"the cost {name} is {cost}; it is a number of at least 0")
        if not self.forward + self.input + self.weight:
            raise ValueError("forward, input and weight cost 0: then there is no time to draw")

    @classmethod
    def parse(cls, text: str) -> Prices:
        """Read `F,I,W` or `F,I,W,message`."""
        parts = [part.strip() for part in text.split(",")]
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            raise ValueError(f"costs {text!r} are not numbers; they are F,I,W,message, as in 1,1,1,0.1") from None
        if len(numbers) not in (3, 4):
            raise ValueError(f"costs {text!r} are {len(numbers)} numbers; they are F,I,W or F,I,W,message, as in 1,1,1,0.1")
        return cls(*numbers)


@dataclass(frozen=True)
class Study:
    """A step and what it came to, of a schedule by itself or of a run."""

    schedule: Schedule
    view: View
    events: Sequence[Event]
    account: Account

    @property
    def bubble_own(self) -> float:
        """Idle fraction of the rank that has most of it, from its own first forward to its own last backward."""
        return max(self.account.bubble_own)

    @property
    def weights(self) -> dict[int, float]:
        """By segment: activations that its forward leaves, in units of one microbatch over a rank's equal share of the model."""
        saved = [segment.saved_bytes for segment in self.view.segments]
        return {k: size * self.view.pp / (sum(saved) or 1) for k, size in enumerate(saved)}

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """By pp coordinate, in the unit of `weights`."""
        total = sum(segment.saved_bytes for segment in self.view.segments) or 1
        return tuple(size * self.view.pp / total for size in self.account.peaks.peak_saved_bytes)

    @property
    def sent(self) -> tuple[int, ...]:
        """Boundary tensors that each pp coordinate sends in a step, by messages."""
        return tuple(sum(action.kind.startswith("SEND") for action in actions) for actions in self.schedule.ranks)

    def as_json(self) -> dict[str, object]:
        return {
            "bubble_global": self.account.bubble_global,
            "bubble_own": self.bubble_own,
            "span": self.account.span_seconds,
            "peak_activations": list(self.peak_activations),
            "volume": sum(self.sent),
            "deadlock": None,
            "idle": dict(self.account.idle),
        }


def deadlocked(cycle: Sequence[str]) -> dict[str, object]:
    """What `Study.as_json` has for a schedule that cannot run."""
    empty = ("bubble_global", "bubble_own", "span", "peak_activations", "volume", "deadlock", "idle")
    return {**dict.fromkeys(empty), "deadlock": list(cycle)}


def study(order: Order, microbatches: int, prices: Prices | None = None, name: str = "") -> Study:
    """The order on equal stages, through the same proof, timing and account as a real step.

    Raises ScheduleError for an order that deadlocks, with the cycle, or that is no step of a pipeline.
    """
    prices = prices or Prices()
    view = unit_view(len(order.ranks), len(order.host) // order.copies)
    check_runs(order)
    schedule = lower(view, order, [(k,) for k in range(len(view.segments))], microbatches, name)
    check(schedule, view)
    events = simulate(schedule, view, costs(view, prices))
    return Study(schedule, view, events, account(schedule, view, events))


def unit_view(pp: int, stages: int) -> View:
    """A model of equal segments, one a stage, whose boundary is one tensor."""
    boundary = (Message("boundary", (1,), "uint8", 1),)
    none: tuple[Message, ...] = ()
    segments = tuple(
        SegmentView(
            name=f"stage {k}",
            inputs=boundary if k else none,
            outputs=boundary if k < stages - 1 else none,
            input_grads=boundary if k else none,
            output_grads=boundary if k < stages - 1 else none,
            saved_bytes=1,
        )
        for k in range(stages)
    )
    return View(Mesh(pp=pp), segments)


def costs(view: View, prices: Prices) -> Costs:
    """The prices of a rank's layer set, each segment taking its equal part."""
    part = view.pp / len(view.segments)
    by_kind: Mapping[str, float] = {
        "F": prices.forward,
        "B": prices.input + prices.weight,
        "I": prices.input,
        "W": prices.weight,
    }
    seconds: dict[tuple[str, int | None], float] = {
        (kind, k): cost * part for kind, cost in by_kind.items() for k in range(len(view.segments))
    }
    return Costs(seconds, {"wire": Link(prices.message)}, {"pp": "wire"})
