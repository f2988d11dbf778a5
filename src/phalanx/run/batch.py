"""From the batch that a step is given to the slices that one rank computes on. Says what is wrong before any rank computes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.comm.world import World
from phalanx.derive.program import IndexBound, Program, Value
from phalanx.run.arguments import check_batch
from phalanx.spec import shard


def microbatches(
    batch: Mapping[str, Tensor], program: Program, world: World, *, local: bool = False
) -> list[dict[str, Tensor]]:
    """This rank's slice of every microbatch, for the entries that the Program reads.

    Microbatch j of m holds samples [jB/m, (j+1)B/m) of the B in a global batch, each cut over the ranks by the entry's Spec.
    With `local` the batch holds this rank's slices only, one microbatch after another. An entry without dimensions goes whole
    to every microbatch. Ids outside the Program's bounds raise ValueError here, instead of reading foreign memory on a device or
    counting as zero where rows or classes are split.
    """
    check_batch(batch)
    parts: list[dict[str, Tensor]] = [{} for _ in range(program.microbatches)]
    for name, value in program.batch.items():
        given = _entry(batch, name, value, program, world, local)
        if name in program.bounds:
            _check_bound(given, name, program.bounds[name])
        for j, part in enumerate(parts):
            x = given
            if given.dim():
                rows = given.shape[0] // program.microbatches
                x = given.narrow(0, j * rows, rows)
            if not local:
                x = shard(x, value.spec, world.mesh, world.rank)
            part[name] = x.contiguous().to(world.device, non_blocking=True)
    return parts


def _entry(batch: Mapping[str, Tensor], name: str, value: Value, program: Program, world: World, local: bool) -> Tensor:
    if name not in batch:
        close = difflib.get_close_matches(name, list(batch), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"the batch has no entry {name!r}; it has {sorted(batch)}{hint}")
    given = batch[name]
    if not isinstance(given, Tensor):
        raise ValueError(f"batch entry {name!r} is a {type(given).__name__}; it must be a tensor")
    if given.is_meta or given.layout != torch.strided:
        what = "on the device meta, so it has no values" if given.is_meta else f"stored as {given.layout}"
        raise ValueError(f"batch entry {name!r} is {what}; it must be a dense tensor")
    shape = value.spec.local_shape(value.shape, world.mesh) if local else value.shape
    expected = (shape[0] * program.microbatches, *shape[1:]) if shape else ()
    if tuple(given.shape) != expected:
        whose = f"rank {world.rank}'s local" if local else "global"
        raise ValueError(
            f"batch entry {name!r} has shape {tuple(given.shape)}; the {whose} batch of this step is {expected}: "
            f"{program.microbatches} microbatches of {shape}. Shapes are fixed when the model is captured"
        )
    if given.dtype != value.dtype:
        raise ValueError(f"batch entry {name!r} is {given.dtype}; the model was captured with {value.dtype}")
    return given


def _check_bound(ids: Tensor, name: str, bound: IndexBound) -> None:
    wrong = ~bound.holds(ids)
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        also = "" if bound.ignored is None else f", or {bound.ignored} to ignore one"
        raise ValueError(
            f"batch entry {name!r} holds {int(ids[at])} at {list(at)}; valid are 0 to {bound.size - 1}{also} "
            f"({int(wrong.sum())} of {ids.numel()} are not)"
        )
