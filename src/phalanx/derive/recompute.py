"""Recomputation: which values of the forward are made again in the backward rather than saved for it.

Every choice is a set of values of the joint graph. Which is best is a minimum cut: on its early side a value is saved and costs
its bytes, on its late side it is made again and costs the time of one operator. The price of a byte in time decides between them.

    none         saves what autograd would, except products of what is saved anyhow
    selective    makes again what is cheap for the bytes that it frees: norms, activations, dropout masks and the inside of
                 attention (Korthikanti et al. 2022, section 5); never a product with a weight and never a collective
    full         saves the inputs of a segment and makes all else again, collectives too
    "64MiB"      or a number of bytes: at most that per segment and microbatch on each rank, for the least time

A value made again is bit for bit what it was: the same kernel of the same operands, and dropout masks are functions of the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import fx

import phalanx.derive.ops.dropout  # noqa: F401 - registers the operator
from phalanx.derive.clean import is_view
from phalanx.derive.cost import bytes_of, flops_of, is_collective, recompute_price, stored_bytes
from phalanx.derive.cut import Cut, Results, minimum_cut

aten = torch.ops.aten

CHOICES = ("none", "selective", "full")
Choice = str | int
"""One of CHOICES, or a limit: bytes, or text such as "64MiB"."""
Recompute = Choice | Mapping[str, Choice]
"""A choice for all segments, or choices by pattern of segment names, of which the first that matches counts."""

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SELECTIVE_WORTH = 16
"""Bytes that selective reads and writes at most to free one saved byte. An activation takes 2 or 3 and attention 4, its operands and
its result; a norm's statistics, one number for a row of hidden, twice that row."""


def parse_choice(choice: object) -> Choice:
    """One of CHOICES or a number of bytes. Raises ValueError for anything else."""
    if isinstance(choice, str):
        if choice in CHOICES:
            return choice
        size = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})", choice.strip())
        if size:
            return int(float(size[1]) * UNITS[size[2]])
    elif isinstance(choice, int) and not isinstance(choice, bool) and choice >= 0:
        return choice
    known = ", ".join(map(repr, CHOICES))
    raise ValueError(
        f"recompute is {choice!r}; it is {known}, a limit on the bytes saved per segment such as '64MiB', "
        "or a dict from patterns of segment names to these"
    )


def choices(recompute: object, segments: Sequence[str]) -> dict[str, Choice]:
    """The choice of every segment by name; `none` for those that no pattern matches. Raises ValueError for a bad choice or pattern."""
    if not isinstance(recompute, Mapping):
        return dict.fromkeys(segments, parse_choice(recompute))
    parsed = {pattern: parse_choice(choice) for pattern, choice in recompute.items()}
    for pattern in parsed:
        if not any(fnmatchcase(name, str(pattern)) for name in segments):
            raise ValueError(f"recompute has {pattern!r}, which matches no segment; there are {', '.join(segments)}")
    return {name: next((c for pattern, c in parsed.items() if fnmatchcase(name, str(pattern))), "none") for name in segments}


def recomputed(cut: Cut, outputs: Results, backward: Results, choice: Choice, segment: str) -> frozenset[fx.Node]:
    """Values of the forward to `outputs` that the graphs with the goals `backward` make again. `segment` is for the error message.

    Raises ValueError if a limit is below the least that can be saved.
    """
    forward = cut.computed_for(outputs, given=())
    if choice == "full":
        return forward
    alone = _products(cut, forward, backward)
    if choice == "none":
        return alone
    if choice == "selective":
        return _cheapest(cut, forward, backward, SELECTIVE_WORTH, {node: _selective_price(cut, node) for node in forward})
    assert isinstance(choice, int)
    if _saved_bytes(cut, forward, backward, alone) <= choice:
        return alone
    return _within(cut, forward, backward, choice, segment)


def masks_of_nothing(graph: fx.Graph) -> None:
    """Let a dropout mask read a value of the right shape and no memory, so that making it again needs no activation."""
    for node in list(graph.nodes):
        if node.target is torch.ops.phx.dropout_mask.default:
            like = node.args[0].meta["val"]
            with graph.inserting_before(node):
                element = graph.call_function(aten.empty.memory_format, ([],), {"dtype": like.dtype, "device": like.device})
                shaped = graph.call_function(aten.expand.default, (element, list(like.shape)))
            element.meta = {**node.meta, "val": like.new_empty(())}
            shaped.meta = {**node.meta, "val": element.meta["val"].expand(like.shape)}
            node.args = (shaped, *node.args[1:])


def _products(cut: Cut, forward: Collection[fx.Node], backward: Results) -> frozenset[fx.Node]:
    """What is the product of others that are saved: a third of a transformer block's saved bytes, for 1% of its time."""
    saved = cut.crossing(backward, forward, given=cut.joint.inputs)
    at_hand = {*saved, *cut.free}

    def comes_from(node: fx.Node) -> bool:
        return node in at_hand or (is_view(node) and all(comes_from(operand) for operand in node.all_input_nodes))

    return frozenset(node for node in saved if node.target is aten.mul.Tensor and all(map(comes_from, node.all_input_nodes)))


def _cheapest(
    cut: Cut, forward: Collection[fx.Node], backward: Results, worth: float, price: Mapping[fx.Node, float]
) -> frozenset[fx.Node]:
    """What to make again if a saved byte is `worth` so much and making a value again has a `price`; of equals, the fewest."""
    goals = cut.crossing(backward, forward, given=cut.joint.inputs)
    edges: dict[tuple[Hashable, Hashable], float] = {}
    # From the late side to the early one, since the late side is to be small.
    for node in cut.ancestors(goals, given=cut.joint.inputs) - cut.free:
        kept = cut.keep_bytes(node)
        edges[(node, "out"), node] = kept if kept == math.inf else round(kept * worth)
        if node in cut.joint.inputs:
            edges[node, "early"] = math.inf
            continue
        edges[node, "early"] = price.get(node, 0)
        for operand in node.all_input_nodes:
            if operand not in cut.free:
                edges[node, (operand, "out")] = math.inf
    for goal in goals:
        edges["late", (goal, "out")] = math.inf
    late = minimum_cut(edges, "late", "early")
    return frozenset(node for node in forward if node in late)


def _within(cut: Cut, forward: Collection[fx.Node], backward: Results, limit: int, segment: str) -> frozenset[fx.Node]:
    """The least worth of a byte at which what is saved fits; then what can be saved after all, the most time per byte first.

    The cut alone would leave room: what costs alike, the projections of a block for instance, it gives up all at once.
    """
    price = {node: recompute_price(node) for node in forward}

    def at(exponent: float) -> frozenset[fx.Node]:
        return _cheapest(cut, forward, backward, 2.0**exponent, price)

    low, high = 0.0, 64.0
    again = at(high)
    least = _saved_bytes(cut, forward, backward, again)
    if least > limit:
        raise ValueError(f"recompute is {limit} bytes, but {segment} saves at least {least}, whatever is made again")
    while high - low > 1 / 16:
        middle = (low + high) / 2
        found = at(middle)
        if _saved_bytes(cut, forward, backward, found) <= limit:
            high, again = middle, found
        else:
            low = middle

    def needed(again: frozenset[fx.Node]) -> frozenset[fx.Node]:
        return again & cut.ancestors(backward, given=_saved(cut, forward, backward, again))

    again = needed(again)
    spare = limit - _saved_bytes(cut, forward, backward, again)
    for node in sorted(
        (n for n in again if cut.keep_bytes(n) < math.inf), key=lambda n: price[n] / max(1, cut.keep_bytes(n)), reverse=True
    ):
        fewer = needed(again - {node})
        more = _saved_bytes(cut, forward, backward, fewer) - (limit - spare)
        if node in again and more <= spare:
            again, spare = fewer, spare - more
    return again


def _saved(cut: Cut, forward: Collection[fx.Node], backward: Results, again: Collection[fx.Node]) -> list[fx.Node]:
    saved = cut.crossing(backward, set(forward) - set(again), given=cut.joint.inputs)
    return [node for node in saved if node not in cut.joint.grad_outputs]


def _saved_bytes(cut: Cut, forward: Collection[fx.Node], backward: Results, again: Collection[fx.Node]) -> int:
    return stored_bytes(_saved(cut, forward, backward, again))


def _selective_price(cut: Cut, node: fx.Node) -> float:
    """Bytes moved, attention's flops being free; infinite for collectives and products with a weight."""
    weighs = flops_of(node) > 0 and any(n in cut.free for n in node.all_input_nodes)
    return math.inf if weighs or is_collective(node) else bytes_of(node)
