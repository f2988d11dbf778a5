"""Pipeline schedules, a file each. A new schedule is a file and a row in `SCHEDULES`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phalanx.schedule.pipeline.dualpipe import dualpipe
from phalanx.schedule.pipeline.dualpipe_v import dualpipe_v
from phalanx.schedule.pipeline.gpipe import gpipe
from phalanx.schedule.pipeline.interleaved import interleaved
from phalanx.schedule.pipeline.looped_bfs import looped_bfs
from phalanx.schedule.pipeline.one_f_one_b import one_f_one_b
from phalanx.schedule.pipeline.order import COSTS, Order, Step, times
from phalanx.schedule.pipeline.v_half import v_half
from phalanx.schedule.pipeline.v_min import v_min
from phalanx.schedule.pipeline.zb_h1 import zb_h1
from phalanx.schedule.pipeline.zb_h2 import zb_h2
from phalanx.schedule.pipeline.zb_v import zb_v

__all__ = ["COSTS", "SCHEDULES", "Order", "Published", "Step", "compute_order", "times"]


@dataclass(frozen=True)
class Published:
    """A schedule of the literature."""

    generate: Callable[..., Order]
    """(pp, microbatches), and chunks if any number is allowed, to the Order."""
    line: str
    """What it is, in one line."""
    paper: str
    chunks: int = 1
    """Stages of one copy of the model on each rank."""
    any_chunks: bool = False
    """Whether `chunks` is only the default."""
    splits: bool = False
    """Whether backwards are divided into I and W."""
    vee: bool = False
    """Whether the stages go to the last rank and back, rather than around."""
    copies: int = 1
    """Of the model, each on all ranks."""


_ZERO_BUBBLE = "Qi et al. 2023, arXiv 2401.10241"
_CONTROLLABLE = "Qi et al. 2024, arXiv 2405.15362"

SCHEDULES: Mapping[str, Published] = {
    "gpipe": Published(gpipe, "all forwards, then all backwards", "Huang et al. 2019, arXiv 1811.06965"),
    "1f1b": Published(
        one_f_one_b, "each backward as soon as it can, for fewer activations", "Narayanan et al. 2021, arXiv 2104.04473"
    ),
    "looped-bfs": Published(
        looped_bfs, "GPipe over several stages a rank", "Lamy-Poirier 2022, arXiv 2211.05953", chunks=2, any_chunks=True
    ),
    "interleaved": Published(
        interleaved, "1F1B over several stages a rank", "Narayanan et al. 2021, arXiv 2104.04473", chunks=2, any_chunks=True
    ),
    "zb-h1": Published(zb_h1, "1F1B with weight gradients in its last bubble", _ZERO_BUBBLE, splits=True),
    "zb-h2": Published(zb_h2, "no bubble on any rank, for twice the activations of 1F1B", _ZERO_BUBBLE, splits=True),
    "zb-v": Published(zb_v, "no bubble on any rank, with the activations of 1F1B", _ZERO_BUBBLE, 2, splits=True, vee=True),
    "v-half": Published(
        v_half, "half of 1F1B's activations, less than half of its bubble", _CONTROLLABLE, 2, splits=True, vee=True
    ),
    "v-min": Published(
        v_min, "a third of 1F1B's activations, two thirds of its bubble", _CONTROLLABLE, 2, splits=True, vee=True
    ),
    "dualpipe-v": Published(
        dualpipe_v,
        "a forward beside every backward, on a V",
        "DeepSeek 2025, github.com/deepseek-ai/DualPipe",
        2,
        splits=True,
        vee=True,
    ),
    "dualpipe": Published(
        dualpipe, "a forward beside every backward, on two copies", "DeepSeek-AI 2024, arXiv 2412.19437", splits=True, copies=2
    ),
}


def compute_order(name: str, pp: int, microbatches: int, chunks: int | None = None) -> Order:
    """The order of a named schedule, with its own number of stages a rank unless `chunks` says another.

    Raises ValueError with the closest name if there is none of that name, and for numbers that the schedule does not take.
    """
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name, SCHEDULES, n=1, cutoff=0.0)[0]
        raise ValueError(f"there is no schedule {name!r}; did you mean {close!r}? Known: {', '.join(SCHEDULES)}")
    if pp < 1 or microbatches < 1:
        raise ValueError(f"a step needs at least 1 stage and 1 microbatch, not pp={pp} and microbatches={microbatches}")
    row = SCHEDULES[name]
    chunks = row.chunks if chunks is None else chunks
    if chunks < 1 or (chunks != row.chunks and not row.any_chunks):
        free = ", ".join(other for other, published in SCHEDULES.items() if published.any_chunks)
        takes = "at least 1 stage" if row.any_chunks else f"exactly {row.chunks} stage{'s' * (row.chunks > 1)}"
        raise ValueError(f"{name} has {takes} on each rank, not chunks={chunks}; {free} take any number of them")
    if pp == 1:
        # Without a pipeline every schedule is gradient accumulation, which needs the activations of one microbatch only.
        return one_f_one_b(1, microbatches)
    return row.generate(pp, microbatches, chunks) if row.any_chunks else row.generate(pp, microbatches)
