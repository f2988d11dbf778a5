"""The executable graphs of a segment class: F, B, its split I and W, and E, cut from one trace of forward and backward.

A cut is a choice of which values cross it. Parameters are arguments on both sides, so neither they nor anything computed from
them alone crosses, nor do two views of one storage; everything else is a walk over the joint graph. No value is computed on
both sides, except views and what parameters alone give (and, by request, the whole forward).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Literal

import torch
from torch import fx

from phalanx.derive.accumulate import WRITES, add_accumulators
from phalanx.derive.boxed import boxed
from phalanx.derive.clean import assert_functional, is_view, simplify
from phalanx.derive.cost import bytes_moved, flops, stored_bytes
from phalanx.derive.program import Graphs, Value
from phalanx.derive.reuse import write_over_the_dead
from phalanx.derive.trace import Joint, trace_joint
from phalanx.mesh import Mesh

Results = Any
"""Nested tuples of nodes of the joint graph, and None."""


def split(
    lowered: fx.GraphModule,
    params: Sequence[Value],
    buffers: Sequence[Value],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    mesh: Mesh,
    device: torch.device | str,
    *,
    recompute: Literal["none", "full"] = "none",
    accumulate: bool = False,
) -> Graphs:
    """Trace `lowered` forward and backward on `device` and cut it.

    lowered     placeholders world, step, microbatch, salt, params, buffers, inputs on local shapes; returns a tuple
    recompute   "none" saves what autograd would; "full" saves the inputs only, and B and I compute the forward again first
    accumulate  make BA and WA too, which write gradients into accumulators

    Without input gradients I computes nothing and hands the output gradients to W as `pending`. The gradient of an input that
    no output depends on is zeros. Outputs and input gradients are contiguous.
    """
    if recompute not in ("none", "full"):
        raise ValueError(f"recompute is {recompute!r}; it is 'none' or 'full'")
    joint = trace_joint(lowered, params, buffers, inputs, outputs, mesh, torch.device(device))
    simplify(joint.graph)
    cut = _Cut(joint)
    outs, grad_inputs, grads = (tuple(part) for part in joint.results)

    if recompute == "none":
        cut.leave_products_to_backward(outs, (grad_inputs, grads))
    forward = cut.computed_for(outs, given=()) if recompute == "none" else frozenset[fx.Node]()
    saved = [n for n in cut.crossing((grad_inputs, grads), forward, given=joint.inputs) if n not in joint.grad_outputs]
    given = (*saved, *joint.grad_outputs)
    early = cut.computed_for(grad_inputs, given=given)
    late_arguments = cut.crossing(grads, early, given=given)
    pending = tuple(n for n in late_arguments if n not in saved)
    saved_for_w = tuple(i for i, n in enumerate(saved) if n in late_arguments)

    arguments = (*joint.run, *joint.params, *joint.buffers)
    late = (*arguments, *(saved[i] for i in saved_for_w), *pending)
    plain = {
        "F": cut.build((*arguments, *joint.inputs), (outs, tuple(saved))),
        "B": cut.build((*arguments, *given), (grad_inputs, grads)),
        "I": cut.build((*arguments, *given), (grad_inputs, pending)),
        "W": cut.build(late, grads),
        "E": cut.build((*arguments, *joint.inputs), outs),
    }
    costs = {name: (flops(graph), bytes_moved(graph)) for name, graph in plain.items() if name != "E"}
    for graph in plain.values():
        assert_functional(graph)
    if accumulate:
        labels = [_label(n) for n, value in zip(joint.params, params, strict=True) if value.requires_grad]
        plain["BA"] = cut.build((*arguments, *given), (grad_inputs, grads))
        plain["WA"] = cut.build(late, ((), grads))
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


@dataclass
class _Cut:
    """Walks over a joint graph."""

    joint: Joint

    def __post_init__(self) -> None:
        self.order = {node: i for i, node in enumerate(self.joint.graph.nodes)}
        self.free = self._free()
        self.products: frozenset[fx.Node] = frozenset()
        """Values that are made again rather than saved, since that is one multiplication of what is saved anyhow."""

    def _free(self) -> frozenset[fx.Node]:
        """What exists on both sides of any cut: arguments other than the inputs, constants, and what these alone give.

        A value of run arguments and no tensor is not among them: it is a mask, and dear to make again.
        """
        free = {*self.joint.run, *self.joint.params, *self.joint.buffers}
        for node in self.joint.graph.nodes:
            needed = node.all_input_nodes
            mask = needed and all(n in self.joint.run for n in needed)
            if node.op == "get_attr" or (node.op == "call_function" and free.issuperset(needed) and not mask):
                free.add(node)
        return frozenset(free)

    def rebuilt(self, node: fx.Node) -> bool:
        """True if a value is made where it is used rather than carried across a cut."""
        return node in self.free or node in self.products or is_view(node)

    def leave_products_to_backward(self, outs: Results, backward: Results) -> None:
        """Drop from the saved set what is the product of others in it: a third of a transformer block's, for 1% of its time."""
        saved = self.crossing(backward, self.computed_for(outs, given=()), given=self.joint.inputs)
        at_hand = {*saved, *self.free}

        def comes_from(node: fx.Node) -> bool:
            return node in at_hand or (is_view(node) and all(comes_from(operand) for operand in node.all_input_nodes))

        self.products = frozenset(
            node for node in saved if node.target is torch.ops.aten.mul.Tensor and all(map(comes_from, node.all_input_nodes))
        )

    def ancestors(self, goals: Results, given: Collection[fx.Node]) -> set[fx.Node]:
        """`goals` and what they need, not looking behind what is `given`."""
        found, stack = set[fx.Node](), _nodes(goals)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                if node not in given:
                    stack.extend(node.all_input_nodes)
        return found

    def computed_for(self, goals: Results, given: Collection[fx.Node]) -> frozenset[fx.Node]:
        """Values that a graph with these `goals` has in hand, other than arguments and what is rebuilt anywhere."""
        found = {n for n in self.ancestors(goals, given) if n.op == "call_function" and n not in given and not self.rebuilt(n)}
        others = {user for n in found for user in n.users if user.target is getitem and not is_view(user)}
        return frozenset(found | others)

    def crossing(self, goals: Results, before: Collection[fx.Node], given: Collection[fx.Node]) -> list[fx.Node]:
        """What a graph with these `goals` must be handed, in order: what is `given`, and what was computed `before` it."""
        found, seen, stack = set[fx.Node](), set[fx.Node](), _nodes(goals)
        given = {*given, *self.joint.inputs, *self.joint.grad_outputs}
        while stack:
            node = stack.pop()
            if node in seen or node in self.free:
                continue
            seen.add(node)
            if node in given or node in before:
                found.add(node)
            else:
                stack.extend(node.all_input_nodes)
        return sorted(found, key=self.order.__getitem__)

    def build(self, arguments: Sequence[fx.Node], results: Results) -> fx.Graph:
        """A graph from `arguments` to `results` in joint order, but with rebuilt values made just before their first use."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for node in arguments:
            new[node] = graph.placeholder(_label(node))
            # Where the two differ fx binds the value to a second name, which would keep it alive.
            new[node].target = new[node].name
            new[node].meta = dict(node.meta)

        def make(node: fx.Node) -> fx.Node:
            if node not in new:
                assert node.op != "placeholder", f"{node} crosses the cut but is not handed over"
                for needed in node.all_input_nodes:
                    make(needed)
                new[node] = graph.node_copy(node, new.__getitem__)
            return new[node]

        needed = self.ancestors(results, given=new)
        for node in self.joint.graph.nodes:
            if node in needed and not self.rebuilt(node):
                make(node)
        for node in _nodes(results):
            make(node)
        graph.output(fx.node.map_arg(results, new.__getitem__))
        return graph


def _label(node: fx.Node) -> str:
    return re.sub(r"\W", "_", str(node.meta.get("label", node.name)))


def _nodes(results: Results) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(results, lambda n: found.append(n))
    return found
