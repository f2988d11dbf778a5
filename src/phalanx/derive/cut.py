"""Walks over a joint graph: what a graph must be handed, which of several cuts is the smallest, and how to write one side of it.

A cut is a choice of which values cross from an earlier graph to a later one. Parameters are arguments on both sides, so neither
they nor anything computed from them alone crosses, nor do two views of one storage.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import Tensor, fx

from phalanx.derive.clean import is_view
from phalanx.derive.cost import flops_of, stored_bytes
from phalanx.derive.trace import Joint

Results = Any
"""Nested tuples of nodes of the joint graph, and None."""
Edges = Mapping[tuple[Hashable, Hashable], float]
"""Capacity of each directed edge; infinite where it must not be cut."""


@dataclass
class Cut:
    """A joint graph with the order of its nodes and what of it exists on both sides of any cut."""

    joint: Joint

    def __post_init__(self) -> None:
        self.order = {node: i for i, node in enumerate(self.joint.graph.nodes)}
        self.free = self._free()

    def _free(self) -> frozenset[fx.Node]:
        """Arguments other than the inputs, constants, and what these alone give.

        What depends on step, microbatch or salt is not among them: it is a mask, and dear to make again.
        """
        free = {*self.joint.run, *self.joint.params, *self.joint.buffers}
        for node in self.joint.graph.nodes:
            needed = node.all_input_nodes
            mask = any(n in self.joint.run[1:] for n in needed)
            if node.op == "get_attr" or (node.op == "call_function" and free.issuperset(needed) and not mask):
                free.add(node)
        return frozenset(free)

    def rebuilt(self, node: fx.Node) -> bool:
        """True if a value is made where it is used rather than carried across a cut."""
        return node in self.free or is_view(node)

    def ancestors(self, goals: Results, given: Collection[fx.Node]) -> set[fx.Node]:
        """`goals` and what they need, not looking behind what is `given`."""
        found, stack = set[fx.Node](), nodes_of(goals)
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
        found, seen, stack = set[fx.Node](), set[fx.Node](), nodes_of(goals)
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

    def keep_bytes(self, node: fx.Node) -> float:
        """What it takes to carry a value across a cut; infinite for a view, whose root is carried, and for several in one."""
        return stored_bytes([node]) if isinstance(node.meta.get("val"), Tensor) and not is_view(node) else math.inf

    def moved_to_i(self, goals: Results, early: Collection[fx.Node], given: Collection[fx.Node]) -> frozenset[fx.Node]:
        """What I should compute of what only `goals`, the parameter gradients, need, so that the fewest bytes wait for W.

        early   what I computes for the input gradients
        given   what both are handed: the saved values and the output gradients

        The products are W's work, so all that waits are their operands. A norm's weight gradient is a sum that waits as a vector.
        """
        edges: dict[tuple[Hashable, Hashable], float] = {}
        late = set[fx.Node]()
        for node in self.ancestors(goals, {*given, *early}) - self.free:
            edges[node, (node, "out")] = self.keep_bytes(node)
            if node in early or node in given:
                edges["I", node] = math.inf
                continue
            late.add(node)
            if flops_of(node):
                edges[node, "W"] = math.inf
            for operand in node.all_input_nodes:
                if operand not in self.free:
                    edges[node, operand] = edges[(operand, "out"), node] = math.inf
        for goal in nodes_of(goals):
            edges[(goal, "out"), "W"] = math.inf
        return frozenset(late & minimum_cut(edges, "I", "W"))  # type: ignore[arg-type]

    def build(self, arguments: Sequence[fx.Node], results: Results, lazily: Collection[fx.Node] = ()) -> fx.Graph:
        """A graph from `arguments` to `results` in joint order, but what is rebuilt or in `lazily` just before its first use."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for node in arguments:
            new[node] = graph.placeholder(label(node))
            # Where the two differ fx binds the value to a second name, which would keep it alive.
            new[node].target = new[node].name
            new[node].meta = dict(node.meta)

        def make(node: fx.Node) -> None:
            for needed in sorted(self.ancestors((node,), given=new), key=self.order.__getitem__):
                if needed not in new:
                    assert needed.op != "placeholder", f"{needed} crosses the cut but is not handed over"
                    new[needed] = graph.node_copy(needed, new.__getitem__)

        needed = self.ancestors(results, given=new)
        for node in self.joint.graph.nodes:
            if node in needed and not self.rebuilt(node) and node not in lazily:
                make(node)
        for node in nodes_of(results):
            make(node)
        graph.output(fx.node.map_arg(results, new.__getitem__))
        return graph


def minimum_cut(edges: Edges, source: Hashable, sink: Hashable) -> set[Hashable]:
    """The fewest nodes at the side of `source` of a cut to `sink` of least capacity (Edmonds and Karp 1972)."""
    residual: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)
    for (a, b), capacity in edges.items():
        residual[a][b] = residual[a].get(b, 0) + capacity
        residual[b].setdefault(a, 0)
    while True:
        before: dict[Hashable, Hashable] = {source: source}
        queue = deque([source])
        while queue and sink not in before:
            a = queue.popleft()
            for b, capacity in residual[a].items():
                if capacity > 0 and b not in before:
                    before[b] = a
                    queue.append(b)
        if sink not in before:
            return set(before)
        path = [sink]
        while path[-1] != source:
            path.append(before[path[-1]])
        steps = [(path[i + 1], path[i]) for i in range(len(path) - 1)]
        flow = min(residual[a][b] for a, b in steps)
        assert flow < math.inf, f"no cut separates {source} from {sink}"
        for a, b in steps:
            residual[a][b] -= flow
            residual[b][a] += flow


def label(node: fx.Node) -> str:
    return re.sub(r"\W", "_", str(node.meta.get("label", node.name)))


def nodes_of(results: Results) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(results, lambda n: found.append(n))
    return found
