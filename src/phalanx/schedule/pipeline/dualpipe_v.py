"""DualPipeV (DeepSeek 2025, github.com/deepseek-ai/DualPipe): half of DualPipe, folded into a V of two stages a rank.

In the steady state a rank has a forward of one stage and a backward of the other at hand, neither of which needs the other:
what one of them communicates inside hides behind the other's compute. Here they are two steps, the forward first. The output of
the forward leaves before the backward ends, which makes the bubble half of the published (p-1)(F&B+B-3W). Every rank holds the
activations of p + 1/2 microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from phalanx.schedule.pipeline.order import Compute, Order, numbered, turns, vee


def dualpipe_v(pp: int, microbatches: int) -> Order:
    """Stages r and 2 pp - 1 - r on coordinate r. Any number of microbatches works: fewer than 2 pp run as the first of those."""
    whole = max(microbatches, 2 * pp)
    ranks = tuple(numbered(dual(r, 2 * pp - 1 - r, pp - 1 - r, r + 1, whole - 2 * pp)) for r in range(pp))
    return Order(vee(pp), ranks).first(microbatches)


def dual(near: int, far: int, to_turn: int, from_start: int, more: int) -> Iterator[tuple[Compute, int]]:
    """What a rank computes on its two stages: `near` is nearer to the batch, `far` to the loss.

    to_turn     ranks between this one and where the stream of `near` turns back as that of `far`
    from_start  ranks from the start of the stream to this one, itself included
    more        microbatches in the stream beyond two for each rank of it
    """
    waiting = deque[int]()  # stages whose weight gradients are still to do, oldest first

    def split(stage: int) -> tuple[Compute, int]:
        waiting.append(stage)
        return "I", stage

    yield from turns(2 * to_turn, ("F", near))
    yield from turns(from_start, ("F", near), ("F", far))
    yield from turns(to_turn, ("I", far), ("W", far), ("F", far))
    yield from turns(more + from_start, ("F", near), ("B", far), ("F", far), ("B", near))
    yield from turns(to_turn, ("B", far), ("F", far), ("B", near))
    # The second half of the cool-down leaves weight gradients for the gaps at its end.
    for step in range(2 * from_start):
        stage = near if step % 2 else far
        yield split(stage) if step >= from_start else ("B", stage)
    for _ in range(to_turn):
        yield "W", waiting.popleft()
        yield split(near)
    for stage in waiting:
        yield "W", stage
