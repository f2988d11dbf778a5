"""GPipe (Huang et al. 2019): all forwards, then all backwards.

Bubble (p-1)/(m+p-1). Every rank holds the activations of all m microbatches.
"""

from __future__ import annotations

from phalanx.schedule.pipeline.order import Order, Step


def gpipe(pp: int, microbatches: int) -> Order:
    """Stage r on coordinate r. Any number of microbatches works."""
    return Order(
        host=tuple(range(pp)),
        ranks=tuple(
            tuple(Step("F", r, j) for j in range(microbatches)) + tuple(Step("B", r, j) for j in range(microbatches))
            for r in range(pp)
        ),
    )
