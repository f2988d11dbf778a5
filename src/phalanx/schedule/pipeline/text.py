"""Compute orders in the CSV form of torch.distributed.pipelining: a row for each rank, a cell for each step, as in 2F0.

2F0 is the forward of microbatch 0 on stage 2; B is the whole backward, I and W its halves. An empty cell is idle time, which an
Order does not hold: it follows from the order. What torch writes about parameters and messages is left out in the same way.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence

from phalanx.schedule.pipeline.order import Compute, Order, Step

_COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
_LEFT_OUT = re.compile(r"\d+(?:UNSHARD|RESHARD|REDUCE_GRAD|(?:SEND|RECV)_[FB]\d+)")
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_KINDS: dict[str, Compute] = {"F": "F", "B": "B", "I": "I", "W": "W"}


def read_csv(text: str) -> Order:
    """The Order of a compute_only or compute_comms schedule; the parts of an OVERLAP_F_B follow each other.

    Raises ValueError, with the row and the cell counted from 1, for a cell that is no action, a stage on two ranks and a step
    that is there twice; and for a step that is missing. Whether the order can run is for `times` to say.
    """
    seen: dict[Step, str] = {}
    host: dict[int, int] = {}
    ranks = []
    for rank, row in enumerate(csv.reader(io.StringIO(text))):
        ranks.append(list[Step]())
        for cell, action in enumerate(row, 1):
            where = f"row {rank + 1}, cell {cell}"
            for step in _steps(action.strip(), where):
                if host.setdefault(step.stage, rank) != rank:
                    raise ValueError(
                        f"{where}: stage {step.stage} is on rank {host[step.stage]}, but {action!r} is on rank {rank}"
                    )
                if step in seen:
                    raise ValueError(f"{where}: {action!r} repeats what {seen[step]} does")
                seen[step] = where
                ranks[-1].append(step)
    if not seen:
        raise ValueError("the text has no compute actions, such as 2F0")
    _check_complete(seen)
    return Order(tuple(host[stage] for stage in sorted(host)), tuple(map(tuple, ranks)))


def write_csv(order: Order) -> str:
    """The text that torch's schedules load as compute_only. Raises ValueError for two copies of the model, which torch's form
    cannot say."""
    if order.copies > 1:
        raise ValueError(f"the order has {order.copies} copies of the model, but the CSV form describes one chain of stages")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([f"{step.stage}{step.kind}{step.microbatch}" for step in steps] for steps in order.ranks)
    return out.getvalue()


def _steps(action: str, where: str) -> Sequence[Step]:
    if match := _TOGETHER.fullmatch(action):
        return [step for part in match[1].split(";") for step in _steps(part.strip(), where)]
    if match := _COMPUTE.fullmatch(action):
        return [Step(_KINDS[match[2]], int(match[1]), int(match[3]))]
    if not action or _LEFT_OUT.fullmatch(action):
        return []
    raise ValueError(f"{where}: {action!r} is no action such as 2F0, 2B0, 2I0, 2W0 or (0F1;3B0)OVERLAP_F_B")


def _check_complete(seen: dict[Step, str]) -> None:
    """Every microbatch is on every stage: one F, and one B or one I and one W."""
    stages = 1 + max(step.stage for step in seen)
    microbatches = 1 + max(step.microbatch for step in seen)
    kinds = Counter[tuple[int, int, str]]()
    for kind, stage, microbatch in seen:
        # A whole backward and its two halves come to the same.
        kinds.update((stage, microbatch, part) for part in ("IW" if kind == "B" else kind))
    for stage in range(stages):
        for microbatch in range(microbatches):
            for part, needed in (("F", "F"), ("I", "B or I"), ("W", "B or W")):
                number = kinds[stage, microbatch, part]
                if number != 1:
                    raise ValueError(
                        f"microbatch {microbatch} has {number} {needed} on stage {stage}, not 1, of {stages} stages and "
                        f"{microbatches} microbatches"
                    )
