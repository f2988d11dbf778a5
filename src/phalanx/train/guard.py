"""What to do about a step whose loss is not finite, or far above those before it: policy alone, on numbers that every rank has.

Every rank asks with the same numbers and gets the same answer, so nothing is communicated. What was seen is kept as plain numbers,
which a checkpoint holds, so that a run which is continued judges as one that was never stopped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from phalanx.train.config import TrainConfig

Action = Literal["go", "skip", "rewind", "stop"]

WINDOW = 64
"""Good losses that a new one is compared with."""
ENOUGH = 16
"""Losses before which nothing is called a spike: a median of fewer moves with each of them, and a run falls fastest at its start."""
FLOOR = 0.01
"""Of the median: what a deviation counts at least. On a plateau of little noise any loss would be a spike without it; with the
factor 6 a loss that is less than 6 % above the median never is."""
SKIPS = 10
"""Steps in a row that may be left out. A bad batch or a flipped bit is one step; ten of them with none good between are a level that the
loss has moved to, or weights that are broken already, which no skipping mends."""
REWINDS = 3
"""Times that a run goes back to one checkpoint. The way from it is the same each time but for samples that were left out: what three
ways do not get past lies in the checkpoint, in the data as a whole or in the machine."""


@dataclass(frozen=True)
class Verdict:
    """What a step is worth.

    go      update
    skip    do not update; the step counts, as those do that a loss scale skips
    rewind  do not update; go back to the newest checkpoint and leave out the samples of this step
    stop    do not update; raise an error with the reason
    """

    action: Action
    reason: str = ""


GO = Verdict("go")


class Guard:
    """Judges the steps of a run one after another, as `on_non_finite`, `on_spike` and `spike_factor` of its settings say."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._losses: deque[float] = deque(maxlen=WINDOW)
        """Of good steps, oldest first."""
        self._skips = 0
        """Steps left out since the last good one."""
        self._checkpoint: int | None = None
        """Step of the checkpoint to which the run has gone back last."""
        self._rewinds = 0
        """How many times, with no other in between."""

    def verdict(self, loss: float, grad_norm: float) -> Verdict:
        """Judge the next step by its global loss and gradient norm, before its update; a good loss is remembered.

        Steps that a loss scale skips are not shown: they are its own affair.
        """
        reason, wanted = self._wrong(loss, grad_norm)
        if wanted == "go":
            self._losses.append(loss)
            self._skips = 0
            return GO
        if wanted != "skip":
            return Verdict(wanted, reason)
        self._skips += 1
        if self._skips > SKIPS:
            return Verdict("stop", f"{reason}; the {SKIPS} steps before it were skipped as well: {ADVICE}")
        return Verdict("skip", f"{reason}; skip {self._skips} of at most {SKIPS} in a row")

    def rewind(self, step: int | None, state: Mapping[str, Any] | None = None) -> Verdict:
        """Whether to follow a verdict "rewind" to the newest checkpoint: that of `step`, with the `state` of the guard that it holds.

        "go", and the losses are those that the checkpoint had seen; or "stop" if there is none, or if the run has gone back to the same
        one before too often.
        """
        if step is None:
            return Verdict(
                "stop", "there is no checkpoint to go back to yet; set checkpoint_every below the number of this step"
            )
        times = self._rewinds + 1 if step == self._checkpoint else 1
        if times > REWINDS:
            return Verdict("stop", f"the run has gone back to the checkpoint of step {step} {REWINDS} times: {ADVICE}")
        if state is not None:
            self.load_state_dict(state)
        self._checkpoint, self._rewinds = step, times
        return Verdict("go", f"back to the checkpoint of step {step}, time {times} of at most {REWINDS}")

    def state_dict(self) -> dict[str, Any]:
        """What it has seen, as plain numbers that JSON holds without loss."""
        return {
            "losses": list(self._losses),
            "skips": self._skips,
            "checkpoint": self._checkpoint,
            "rewinds": self._rewinds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; ValueError for anything else."""
        keys = self.state_dict().keys()
        if missing := [key for key in keys if key not in state]:
            raise ValueError(f"the state of the guard has no {missing[0]!r}; it has {', '.join(state) or 'nothing'}")
        losses = [float(loss) for loss in state["losses"]]
        if len(losses) > WINDOW or not all(map(math.isfinite, losses)):
            raise ValueError(f"the state of the guard has {len(losses)} losses; it keeps at most {WINDOW}, all of them finite")
        self._losses = deque(losses, WINDOW)
        self._skips, self._rewinds = int(state["skips"]), int(state["rewinds"])
        self._checkpoint = None if state["checkpoint"] is None else int(state["checkpoint"])

    def _wrong(self, loss: float, grad_norm: float) -> tuple[str, Action]:
        """What is wrong with a step, and what the settings want to be done about it."""
        if not math.isfinite(loss):
            return f"the loss is {loss}", self.config.on_non_finite
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm} at a loss of {loss:.6g}", self.config.on_non_finite
        if self.config.on_spike == "ignore" or len(self._losses) < ENOUGH:
            return "", "go"
        middle = median(self._losses)
        deviation = median(abs(x - middle) for x in self._losses)
        bound = middle + self.config.spike_factor * max(deviation, FLOOR * abs(middle))
        if loss <= bound:
            return "", "go"
        return (
            f"the loss is {loss:.6g}, above {bound:.6g}: the median {middle:.6g} of the last {len(self._losses)} losses by "
            f"{self.config.spike_factor:g} times {max(deviation, FLOOR * abs(middle)):.3g}, their deviation"
        ), self.config.on_spike


ADVICE = (
    "this is no single bad step. If the loss is right for these samples, raise spike_factor or set on_spike to ignore; else look at "
    "the learning rate, the data from here on, and whether replicas are equal (check_replicas)"
)
