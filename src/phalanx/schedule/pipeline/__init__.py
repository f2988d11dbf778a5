"""Pipeline schedules, a file each, and the split of segments into stages. A new schedule is a file and a row in `SCHEDULES`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from phalanx.schedule.pipeline.gpipe import gpipe
from phalanx.schedule.pipeline.one_f_one_b import one_f_one_b
from phalanx.schedule.pipeline.order import COSTS, Order, Step, times

__all__ = ["COSTS", "SCHEDULES", "Order", "Step", "compute_order", "stages", "times"]

SCHEDULES: Mapping[str, Callable[[int, int], Order]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""By name: (pp, microbatches) -> Order over stages."""


def compute_order(name: str, pp: int, microbatches: int) -> Order:
    """The order of a named schedule. Raises ValueError with the closest name if there is none of that name."""
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name, SCHEDULES, n=1, cutoff=0.0)[0]
        raise ValueError(f"there is no schedule {name!r}; did you mean {close!r}? Known: {', '.join(SCHEDULES)}")
    if pp < 1 or microbatches < 1:
        raise ValueError(f"a step needs at least 1 stage and 1 microbatch, not pp={pp} and microbatches={microbatches}")
    # Without a pipeline every schedule is gradient accumulation, which needs the activations of one microbatch only.
    return SCHEDULES[name](pp, microbatches) if pp > 1 else one_f_one_b(1, microbatches)


def stages(segments: int, count: int, prologue: bool = True) -> tuple[tuple[int, ...], ...]:
    """Segments of each of `count` stages: equal numbers of blocks, what is left over going one each to the earliest stages.

    The last segment is the epilogue and the first the prologue, unless the model starts with a block; they join the last and the
    first stage and are not counted as blocks. Raises ValueError if there are more stages than blocks.
    """
    if count == 1:
        return (tuple(range(segments)),)
    blocks = segments - 1 - prologue
    if blocks < count:
        raise ValueError(f"{count} pipeline stages need at least {count} blocks, but the model has {max(blocks, 0)}")
    share, rest = divmod(blocks, count)
    sizes = [share + (stage < rest) for stage in range(count)]
    sizes[0] += prologue
    sizes[-1] += 1
    starts = [sum(sizes[:stage]) for stage in range(count)]
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
