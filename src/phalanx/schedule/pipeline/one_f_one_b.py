"""1F1B, PipeDream-flush (Narayanan et al. 2021, section 2.2): as GPipe, but each backward runs as soon as it can.

Bubble (p-1)/(m+p-1), as GPipe. Rank r holds the activations of at most min(m, p-r) microbatches. With one stage it is gradient
accumulation: forward and backward of one microbatch after the other.
"""

from __future__ import annotations

from phalanx.schedule.pipeline.order import Order, Step


def one_f_one_b(pp: int, microbatches: int) -> Order:
    """Stage r on coordinate r. Fewer microbatches than stages work: there is then no steady state on the first ranks."""
    return Order(host=tuple(range(pp)), ranks=tuple(_rank(r, pp, microbatches) for r in range(pp)))


def _rank(r: int, pp: int, microbatches: int) -> tuple[Step, ...]:
    warm_up = min(microbatches, pp - 1 - r)
    steady = microbatches - warm_up
    steps = [Step("F", r, j) for j in range(warm_up)]
    for j in range(steady):
        steps.append(Step("F", r, warm_up + j))
        steps.append(Step("B", r, j))
    cool_down = range(steady, microbatches)
    steps.extend(Step("B", r, j) for j in cool_down)
    return tuple(steps)
