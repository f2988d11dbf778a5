"""V-Half (Qi et al. 2024, arXiv 2405.15362, section 3): half of 1F1B's activations and less than half of its bubble.

On a V of two stages a rank, where the way down takes two units a rank and the way up one. Every rank holds the activations of
p/2 + 1 microbatches, of (p+1)/2 if p is odd.
"""

from __future__ import annotations

from phalanx.schedule.pipeline.building_block import Block, repeated
from phalanx.schedule.pipeline.order import Order

BLOCKS = (Block(2, 0, 3, 1), Block(2, 0, 0, 1))
"""By the remainder of pp by 2."""


def v_half(pp: int, microbatches: int) -> Order:
    """Stages r and 2 pp - 1 - r on coordinate r. Any number of microbatches works."""
    return repeated(pp, microbatches, BLOCKS[pp % 2])
