"""V-Min (Qi et al. 2024, arXiv 2405.15362, section 3): a third of 1F1B's activations and about two thirds of its bubble.

On a V of two stages a rank, where each way takes a unit a rank: no microbatch can be through sooner, so none can hold less.
Every rank holds the activations of floor((p+1)/3) + 1 microbatches. The bubble grows with the number of microbatches if tF, tI
and tW differ.
"""

from __future__ import annotations

from phalanx.schedule.pipeline.building_block import Block, repeated
from phalanx.schedule.pipeline.order import Order

BLOCKS = (Block(1, 0, 2, 0), Block(1, 0, 0, 0), Block(1, 0, 4, 0))
"""By the remainder of pp by 3."""


def v_min(pp: int, microbatches: int) -> Order:
    """Stages r and 2 pp - 1 - r on coordinate r. Any number of microbatches works."""
    return repeated(pp, microbatches, BLOCKS[pp % 3])
