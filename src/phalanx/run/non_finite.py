"""Which tensor stopped being a number first. Looked for only once a step has failed, so nothing is paid for it before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx.comm.world import World
from phalanx.derive.program import Program
from phalanx.derive.watch import Exit
from phalanx.run.bind import Bound
from phalanx.run.parameters import Parameters


def exits(program: Program) -> tuple[Exit, ...]:
    """Every value that crosses a cut, in order: the forward that `first_in_forward` looks at keeps them."""
    return tuple(Exit(segment.index, value, True) for segment in program.segments for value in segment.cls.outputs)


def first_in_forward(bound: Bound, parameters: Parameters, batch: Sequence[Mapping[str, Tensor]], world: World) -> str | None:
    """The first tensor of a finished forward that is not finite on some rank, as the end of a sentence; None if all are.

    Parameters and the batch come before what is computed from them. The same on every rank. `batch` has this rank's microbatches.
    """
    program = bound.program
    weights = parameters.held()
    found: list[tuple[str, list[Tensor]]] = [
        (f"the {kind} {name}", [weights[name]] if name in weights else [])
        for kind, names in (("parameter", program.parameters), ("buffer", program.buffers))
        for name in names
    ]
    found += [(f"the batch entry {name!r}", [part[name] for part in batch]) for name in program.batch]
    for exit in exits(program):
        assert exit.segment is not None
        made = (bound.watched(exit, j) for j in range(program.microbatches))
        found.append((f"the output of {program.segments[exit.segment].name}", [x for x in made if x is not None]))
    broken = (place for place, (_, tensors) in enumerate(found) if not all(bool(x.isfinite().all()) for x in tensors))
    first = torch.tensor(next(broken, len(found)), device=world.device)
    world.transport.all_reduce(first, world.group(world.mesh.names), "min").wait()
    return found[int(first)][0] if int(first) < len(found) else None
