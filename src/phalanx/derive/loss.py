"""The loss as a sum and a count, so that any split of a batch adds up to the same number.

A loss that is one mean cross entropy is rewritten; nothing is guessed about any other mean.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, fx

from phalanx.derive.canonical import argument, emit, schema_name
from phalanx.derive.reject import where

aten = torch.ops.aten

_MEANS = frozenset(
    f"aten::{name}"
    for name in (
        "cross_entropy_loss", "nll_loss", "nll_loss_nd", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss",
    )
)  # fmt: skip
"""Losses that average unless they are told to sum (reduction 2)."""
HINT = """write the loss as (sum, count), two scalar tensors of which count is computed from the batch only, for example
    def loss(outputs, batch):
        losses = F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return losses, (batch["labels"] != -100).sum()
For a mean over samples the count is torch.ones_like(batch["x"][:, 0]).sum()"""


def loss_tensors(outputs: Any, explicit: bool) -> tuple[Tensor, ...]:
    """(sum, count), or (mean,), from what a loss function or a module returned. Raises ValueError for anything else."""
    if not explicit and not isinstance(outputs, Tensor | tuple):
        found = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
        if found is None:
            raise ValueError(f"the model returns {type(outputs).__name__} without a loss (no labels in the batch?): {HINT}")
        outputs = found
    tensors = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
    if len(tensors) == 2 and isinstance(tensors[0], Tensor) and isinstance(tensors[1], int | float):
        raise ValueError(
            f"the count that the loss returned is {tensors[1]}, a number, but a step counts what each rank has of the batch: {HINT}"
        )
    if len(tensors) > 2 or not all(isinstance(t, Tensor) and t.dim() == 0 for t in tensors):
        shown = ", ".join(f"tensor{tuple(t.shape)}" if isinstance(t, Tensor) else repr(t)[:40] for t in tensors)
        raise ValueError(f"the {'loss' if explicit else 'model'} returned ({shown}), not a scalar or (sum, count): {HINT}")
    return tensors


def sum_and_count(graph: fx.Graph) -> None:
    """Make the graph's output (sum, count). Raises ValueError if a single output is not a mean cross entropy."""
    output = graph.output_node()
    results = cast(tuple[fx.Node, ...], tuple(cast(Any, output.args[0])))
    if len(results) == 1:
        results = _split_mean(graph, results[0])
        output.args = (results,)
    else:
        _refuse_mean(results[0])
    _check(*results)


def _split_mean(graph: fx.Graph, mean: fx.Node) -> tuple[fx.Node, fx.Node]:
    node = mean
    while node.op == "call_function" and schema_name(node) != "aten::cross_entropy_loss":
        if not _keeps_a_mean(node):
            raise ValueError(f"the loss is one scalar, but not a mean cross entropy (it is {where(node)}): {HINT}")
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "call_function":
        raise ValueError(f"the loss is one scalar, but not a mean cross entropy: {HINT}")
    target = argument(node, "target")
    if argument(node, "reduction") != 1:
        raise ValueError(f"{where(node)}: the loss is one scalar that is not a mean, so its count is unknown: {HINT}")
    if argument(node, "weight") is not None:
        raise ValueError(f"{where(node)}: a mean with class weights divides by the summed weights: {HINT}")
    if target.meta["val"].dtype.is_floating_point:
        raise ValueError(f"{where(node)}: the targets are class probabilities, not class indices: {HINT}")
    # With label smoothing too the mean is over the targets that are not ignored, so the same count serves.
    ignored, smoothing = argument(node, "ignore_index"), argument(node, "label_smoothing")
    with graph.inserting_before(node):
        losses = emit(graph, node.target, (node.args[0], target, None, 2, ignored, smoothing), node)  # reduction 2 is sum
        count = emit(graph, aten.sum.default, (emit(graph, aten.ne.Scalar, (target, ignored), node),), node)
        losses.meta["requires_grad"] = node.meta["requires_grad"]
        for made in (count, *count.all_input_nodes):
            made.meta["requires_grad"] = False
    node.replace_all_uses_with(losses)
    graph.erase_node(node)
    return (losses if node is mean else mean), count


def _refuse_mean(losses: fx.Node) -> None:
    """Raise for a (mean, count): divided by the count once more it is no number that anyone wants, and splits of a batch change it."""
    node = losses
    while node.op == "call_function" and _keeps_a_mean(node):
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "call_function":
        return
    name = schema_name(node)
    if name == "aten::mean" or (name in _MEANS and argument(node, "reduction") == 1):
        raise ValueError(f"{where(node)}: the loss returned (mean, count), not (sum, count): {HINT}")


def _keeps_a_mean(node: fx.Node) -> bool:
    """Linear in a scalar, so that the mean's factors belong to the sum as well."""
    name = schema_name(node)
    if name in ("aten::mul", "aten::div"):
        factor = node.args[1]
        return (
            isinstance(node.args[0], fx.Node)
            and isinstance(factor, int | float)
            and math.isfinite(factor)
            and len(node.args) == 2
        )
    return name == "aten::to" and node.meta["val"].dtype.is_floating_point


def _check(losses: fx.Node, count: fx.Node) -> None:
    if not losses.meta["requires_grad"]:
        raise ValueError("the loss does not depend on any trainable parameter")
    if not _reads_batch(losses):
        raise ValueError("the loss does not depend on the batch")
    for node in ancestors(count):
        if node.meta.get("kind") in ("parameter", "buffer"):
            raise ValueError(f"the count of the loss depends on the {node.meta['kind']} {node.meta['name']!r}: {HINT}")
    if not _reads_batch(count):
        raise ValueError(f"the count of the loss is a constant, which says nothing about a part of the batch: {HINT}")


def _reads_batch(node: fx.Node) -> bool:
    return any(source.meta.get("kind") == "batch entry" for source in ancestors(node))


def ancestors(node: fx.Node) -> set[fx.Node]:
    """The node and everything it is computed from."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in found:
            found.add(current)
            stack.extend(current.all_input_nodes)
    return found
