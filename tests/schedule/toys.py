"""Programs that do not exist, as Views: a prologue, blocks and an epilogue with the loss."""

from __future__ import annotations

from phalanx.mesh import Mesh
from phalanx.schedule.view import Message, SegmentView, View, Weight


def toy(
    pp: int = 1,
    blocks: int | None = None,
    dp: int = 1,
    tied: bool = False,
    grad: bool = True,
    width: int = 8,
) -> View:
    """`blocks` defaults to one a stage. `tied` shares one weight between the prologue and the epilogue; without `grad` the
    prologue's output carries no gradient, as that of a frozen embedding does."""
    blocks = pp if blocks is None else blocks
    axes = ("dp",) if dp > 1 else ()
    hidden = (Message("h", (2, width), "float32", 2 * width * 4),)
    shared = (Weight("embed", 400, axes),) if tied else ()
    segments = []
    for k in range(blocks + 2):
        first, last = k == 0, k == blocks + 1
        segments.append(
            SegmentView(
                name=f"segment{k}",
                inputs=() if first else hidden,
                outputs=() if last else hidden,
                input_grads=() if first or (k == 1 and not grad) else hidden,
                output_grads=() if last or (k == 0 and not grad) else hidden,
                weights=(*(shared if first or last else ()), Weight(f"w{k}", 100 * (k + 1), axes)),
                saved_bytes=1000,
            )
        )
    return View(Mesh(pp=pp, dp=dp), tuple(segments), axes)
