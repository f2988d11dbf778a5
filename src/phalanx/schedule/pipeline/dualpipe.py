"""DualPipe (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1): two copies of the model, filled from both ends at once.

Half of the microbatches enter at rank 0, half at the last rank; each rank has a stage of either stream, so that every forward
has a backward of the other to hide behind. Steps are those of DualPipeV on a stream of p/2 ranks: the bubble is half of the
published (p/2-1)(F&B+B-3W) because forward and backward are two steps. Every rank holds the activations of p + 1 microbatches
and two stages' parameters.
"""

from __future__ import annotations

from phalanx.schedule.pipeline.dualpipe_v import dual
from phalanx.schedule.pipeline.order import Order, Step, numbered, vee


def dualpipe(pp: int, microbatches: int) -> Order:
    """Stages 0 to pp - 1 are the first copy of the model, stage r on coordinate r; stages pp to 2 pp - 1 the second, stage
    pp + s on coordinate pp - 1 - s. The first half of the microbatches goes through the first copy.

    Raises ValueError unless pp and microbatches are even and there are two microbatches or more for each rank.
    """
    if pp % 2 or microbatches % 2 or microbatches < 2 * pp:
        raise ValueError(
            f"dualpipe needs an even pp and an even number of microbatches of at least 2 pp = {2 * pp}, not pp={pp} and "
            f"microbatches={microbatches}; dualpipe-v takes any"
        )
    return Order(vee(pp), tuple(_rank(r, pp, microbatches) for r in range(pp)), copies=2)


def _rank(r: int, pp: int, microbatches: int) -> tuple[Step, ...]:
    copies = [r, 2 * pp - 1 - r]
    # On the second half of the ranks the second copy is the one that begins.
    near, far = copies if r < pp // 2 else reversed(copies)
    from_end = min(r, pp - 1 - r)
    steps = numbered(dual(near, far, pp // 2 - 1 - from_end, from_end + 1, microbatches // 2 - pp))
    return tuple(step._replace(microbatch=step.microbatch + step.stage // pp * (microbatches // 2)) for step in steps)
