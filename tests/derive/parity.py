"""The oracle for derived programs: run one on local threads, without a schedule, and join its gradients to global tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.derive.program import Captured, Program, Segment
from phalanx.derive.segment import run_pieces
from phalanx.spec import shard, unshard

Tensors = Mapping[str, Tensor]


@dataclass
class Result:
    loss: Tensor
    count: Tensor
    grads: dict[str, Tensor]


def one_process(captured: Captured, params: Tensors, buffers: Tensors, batch: Tensors) -> Result:
    """Loss sum, count and every gradient of the captured pieces on global tensors."""
    leaves = {n: p.detach().clone().requires_grad_(captured.parameters[n].trainable) for n, p in params.items()}
    loss, count = run_pieces(captured, leaves, buffers, batch)
    loss.backward()
    return Result(loss.detach(), count, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in leaves.items()})


def on_mesh(program: Program, params: Tensors, buffers: Tensors, batch: Tensors, *, how: str = "graphs") -> Result:
    """The same of a program on threads: `how` is "eager" (autograd of the lowered graphs), "graphs" (F, B) or "split" (F, I, W)."""
    with LocalWorld(program.mesh) as world:
        ranks = world.run(lambda w: _rank(program, w, params, buffers, batch, how))
    mesh = program.mesh
    loss = unshard([r[0] for r in ranks], program.segments[-1].cls.outputs[0].spec, mesh)
    count = unshard([r[1] for r in ranks], program.count.cls.outputs[0].spec, mesh)
    grads = {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in program.parameters.items()}
    for segment in program.segments:
        for at, (name, deferred) in enumerate(zip(segment.params, segment.cls.deferred, strict=True)):
            local = [r[2][segment.index][at] for r in ranks]
            if local[0] is not None:
                grads[name] += unshard(local, program.parameters[name].spec.with_partial(deferred), mesh)
    return Result(loss, count, grads)


def _rank(program: Program, world: World, params: Tensors, buffers: Tensors, batch: Tensors, how: str):  # type: ignore[no-untyped-def]
    def mine(values: Tensors, infos):  # type: ignore[no-untyped-def]
        return {n: shard(values[n], infos[n].spec, program.mesh, world.rank) for n in infos}

    p, b, x = mine(params, program.parameters), mine(buffers, program.buffers), mine(batch, program.batch)
    values: dict[tuple[str, str], Tensor] = {("batch", n): t for n, t in x.items()}
    run = (world.name, 0, 0)

    def arguments(s: Segment) -> list:  # type: ignore[type-arg]
        return [
            *run,
            s.index,
            *(p[n] for n in s.params),
            *(b[n] for n in s.buffers),
            *(values[i.kind, i.name] for i in s.inputs),
        ]

    def forward_only(s: Segment):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            return s.cls.graphs.E(arguments(s)) if s.cls.graphs else s.cls.lowered(*arguments(s))

    if program.tables is not None:
        values.update((("table", n), t) for n, t in zip(program.tables.outputs, forward_only(program.tables), strict=True))
    (count,) = forward_only(program.count)
    kept = {}
    for s in program.segments:
        given = arguments(s)
        if how == "eager":
            with torch.enable_grad():
                flags = [v.requires_grad for v in (*s.cls.params, *s.cls.buffers, *s.cls.inputs)]
                leaves = [t.detach().requires_grad_(f) for t, f in zip(given[4:], flags, strict=True)]
                outputs = s.cls.lowered(*given[:4], *leaves)
            kept[s.index] = (leaves, outputs)
            outputs = [t.detach() for t in outputs]
        else:
            with torch.no_grad():
                outputs, saved = s.cls.graphs.F(given)
            kept[s.index] = list(saved)
        values.update((("cut", n), t) for n, t in zip(s.outputs, outputs, strict=True))
    loss = values["cut", "loss"]
    flowing: dict[str, Tensor] = {"loss": torch.ones_like(loss)}
    grads = {}
    for s in reversed(program.segments):
        seeds = [flowing[n] for n, v in zip(s.outputs, s.cls.outputs, strict=True) if v.requires_grad]
        wanted = [i.name for i, v in zip(s.inputs, s.cls.inputs, strict=True) if v.requires_grad]
        if how == "eager":
            leaves, outputs = kept.pop(s.index)
            roots = [t for t, v in zip(outputs, s.cls.outputs, strict=True) if v.requires_grad]
            needed = [t for t in leaves if t.requires_grad]
            found = torch.autograd.grad(roots, needed, seeds, allow_unused=True) if needed else ()
            by_leaf = dict(zip(map(id, needed), found, strict=True))
            n = len(s.params)
            grads[s.index] = [by_leaf.get(id(t)) for t in leaves[:n]]
            back = [by_leaf[id(t)] for t in leaves[n + len(s.buffers) :] if t.requires_grad]
        else:
            head = [*run, s.index, *(p[n] for n in s.params), *(b[n] for n in s.buffers)]
            saved = kept.pop(s.index)
            with torch.no_grad():
                if how == "graphs":
                    back, mine_ = s.cls.graphs.B([*head, *saved, *seeds])
                else:
                    back, pending = s.cls.graphs.I([*head, *saved, *seeds])
                    mine_ = s.cls.graphs.W([*head, *(saved[i] for i in s.cls.graphs.saved_for_w), *pending])
            trainable = iter(mine_)
            grads[s.index] = [next(trainable) if program.parameters[n].trainable else None for n in s.params]
        flowing.update(zip(wanted, back, strict=True))
    return loss, count, grads


def close(a: Tensor, b: Tensor) -> float:
    """max |a - b| / max |b|."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) if b.numel() else 0.0


def worst(result: Result, reference: Result) -> tuple[float, str]:
    """The largest relative error of loss, count and gradients, and where it is."""
    errors = {"loss": close(result.loss, reference.loss), "count": close(result.count.double(), reference.count.double())}
    errors |= {n: close(result.grads[n], g) for n, g in reference.grads.items()}
    return max((e, n) for n, e in errors.items())


def values(module: nn.Module, captured: Captured) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers of a module by first name."""
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    return {n: params[n].detach() for n in captured.parameters}, {n: buffers[n].detach() for n in captured.buffers}
