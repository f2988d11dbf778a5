"""`phalanx show`: a collective on tensors small enough to read, run for real on threads of this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from phalanx.cli.options import Switch
from phalanx.observe.show import Case, complete


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show what a collective does: the tensors before and after, who sent what to whom, and the backward that belongs to it."""

    collective: Annotated[str, tyro.conf.Positional]
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send or barrier."""
    ranks: int = 4
    """Number of ranks, at most 16."""
    size: int | None = None
    """Elements of one rank's input (of the root's, for scatter); by default as few as show everything."""
    root: int | None = None
    """The rank that broadcast, scatter and send start from, and reduce and gather end at; 0 unless given."""
    op: Literal["sum", "mean", "min", "max"] | None = None
    """How all_reduce, reduce_scatter and reduce combine; sum unless given."""
    dtype: str = "float32"
    """float64, float32, bfloat16, float16, int64, int32, int16 or uint8."""
    json: Switch = False
    """Print everything as one JSON object and nothing else."""


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, prog="phalanx show")
    case = complete(
        Case(
            collective=options.collective,
            ranks=options.ranks,
            size=options.size,
            root=options.root,
            op=options.op,
            dtype=options.dtype,
        )
    )

    from phalanx.observe.demonstrate import demonstrate

    shown = demonstrate(case)
    if options.json:
        print(json.dumps(shown.as_json()))
        return 0

    from rich.console import Console

    from phalanx.observe.picture import picture

    Console(highlight=False).print(picture(shown))
    return 0
