"""The executable graphs of a segment class: F, B, its split I and W, and E, cut from one trace of forward and backward.

`cut` walks the joint graph, `recompute` chooses what the backward makes again. Nothing else is computed on both sides of a cut,
except views and what parameters alone give; and of I and W only one makes a value again, the other is handed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from phalanx.derive.accumulate import WRITES, add_accumulators
from phalanx.derive.boxed import boxed
from phalanx.derive.clean import assert_functional, simplify
from phalanx.derive.cost import bytes_moved, flops, stored_bytes
from phalanx.derive.cut import Cut, label
from phalanx.derive.program import Graphs, Value
from phalanx.derive.recompute import Choice, masks_of_nothing, parse_choice, recomputed
from phalanx.derive.reuse import write_over_the_dead
from phalanx.derive.trace import trace_joint
from phalanx.mesh import Mesh


def split(
    lowered: fx.GraphModule,
    params: Sequence[Value],
    buffers: Sequence[Value],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    mesh: Mesh,
    device: torch.device | str,
    *,
    recompute: Choice = "none",
    accumulate: bool = False,
    segment: str = "the segment",
) -> Graphs:
    """Trace `lowered` forward and backward on `device` and cut it.

    lowered     placeholders world, step, microbatch, salt, params, buffers, inputs on local shapes; returns a tuple
    recompute   what B, I and W make again rather than being handed it; see `recompute`
    accumulate  make BA and WA too, which write gradients into accumulators
    segment     what messages call it

    After I all that waits for W are the operands of its products, or of less what gives them, and finished gradients of vectors.
    Without input gradients I computes nothing and hands the output gradients to W as `pending`. The gradient of an input that
    no output depends on is zeros. Outputs and input gradients are contiguous.
    """
    choice = parse_choice(recompute)
    joint = trace_joint(lowered, params, buffers, inputs, outputs, mesh, torch.device(device))
    simplify(joint.graph)
    masks_of_nothing(joint.graph)
    cut = Cut(joint)
    outs, grad_inputs, grads = (tuple(part) for part in joint.results)

    again = recomputed(cut, outs, (grad_inputs, grads), choice, segment)
    forward = cut.computed_for(outs, given=()) - again
    saved = [n for n in cut.crossing((grad_inputs, grads), forward, given=joint.inputs) if n not in joint.grad_outputs]
    given = (*saved, *joint.grad_outputs)
    early = cut.computed_for(grad_inputs, given=given)
    if grad_inputs:
        early |= cut.moved_to_i(grads, early, given)
    late_arguments = cut.crossing(grads, early, given=given)
    pending = tuple(n for n in late_arguments if n not in saved)
    saved_for_w = tuple(i for i, n in enumerate(saved) if n in late_arguments)

    arguments = (*joint.run, *joint.params, *joint.buffers)
    late = (*arguments, *(saved[i] for i in saved_for_w), *pending)
    plain = {
        "F": cut.build((*arguments, *joint.inputs), (outs, tuple(saved))),
        "B": cut.build((*arguments, *given), (grad_inputs, grads), lazily=again),
        "I": cut.build((*arguments, *given), (grad_inputs, pending), lazily=again),
        "W": cut.build(late, grads, lazily=again),
        "E": cut.build((*arguments, *joint.inputs), outs),
    }
    costs = {name: (flops(graph), bytes_moved(graph)) for name, graph in plain.items() if name != "E"}
    for graph in plain.values():
        assert_functional(graph)
    if accumulate:
        labels = [label(n) for n, value in zip(joint.params, params, strict=True) if value.requires_grad]
        plain["BA"] = cut.build((*arguments, *given), (grad_inputs, grads), lazily=again)
        plain["WA"] = cut.build(late, ((), grads), lazily=again)
        for name in ("BA", "WA"):
            output: Any = plain[name].output_node()
            results, last = output.args[0]
            add_accumulators(plain[name], last, labels)
            output.args = (results,)
            plain[name].eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node.target in WRITES)
    for graph in plain.values():
        write_over_the_dead(graph)
    modules = {name: boxed(graph, joint.constants, name) for name, graph in plain.items()}
    return Graphs(
        **modules,
        saved_for_w=saved_for_w,
        saved_bytes=stored_bytes(saved),
        flops={name: cost for name, (cost, _) in costs.items()},
        bytes={name: cost for name, (_, cost) in costs.items()},
    )
