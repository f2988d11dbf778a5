"""Let backward graphs add parameter gradients to accumulators themselves, each as soon as it exists.

A weight gradient's last operator is nearly always a matrix product, which can write or add to its accumulator without a
temporary of the size of the weight; at a few hundred tokens that temporary costs as much as a tenth of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten


def add_accumulators(graph: fx.Graph, grads: Sequence[fx.Node | None], labels: Sequence[str]) -> None:
    """Append placeholders `fresh` and one accumulator per gradient to `graph`, and write each of `grads` into its accumulator.

    fresh         one bool per gradient: overwrite the accumulator (first microbatch) or add to it
    accumulators  shape of the parameter, contiguous, in the wider of float32 and its dtype

    Where a gradient is None the accumulator is set to zero if fresh.
    """
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_after(placeholders[-1]):
        fresh = graph.placeholder("fresh")
    after = fresh
    flags: list[fx.Node] = []
    accumulators: list[fx.Node] = []
    for label in labels:
        with graph.inserting_after(after):
            after = graph.placeholder(f"accumulator_{label}")
        after.target = after.name
        accumulators.append(after)
    for i in range(len(labels)):
        with graph.inserting_after(after):
            after = graph.call_function(getitem, (fresh, i))
        flags.append(after)
    for grad, flag, accumulator in zip(grads, flags, accumulators, strict=True):
        if grad is None:
            with graph.inserting_after(after):
                graph.call_function(forget, (accumulator, flag))
            continue
        alone = not [user for user in grad.users if user.op != "output"]
        with graph.inserting_after(max(grad, after)):
            if alone and grad.target is aten.mm.default and grad.meta["val"].dtype in (torch.float32, torch.float64):
                graph.call_function(add_product, (accumulator, *grad.args, flag))
            elif alone and _adds_rows(grad):
                graph.call_function(add_rows, (accumulator, *grad.args[:2], flag))
            else:
                graph.call_function(add, (accumulator, grad, flag))


def add_product(accumulator: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """accumulator = a @ b, or += ."""
    if fresh:
        torch.mm(a, b, out=accumulator)
    else:
        accumulator.addmm_(a, b)


def add_rows(accumulator: Tensor, rows: Tensor, indices: Tensor, fresh: bool) -> None:
    """The gradient of an embedding: add each row where its index says, in the order of the indices."""
    if fresh:
        accumulator.zero_()
    accumulator.index_add_(0, indices.reshape(-1), rows.reshape(-1, rows.shape[-1]))


def add(accumulator: Tensor, grad: Tensor, fresh: bool) -> None:
    if fresh:
        accumulator.copy_(grad)
    else:
        accumulator.add_(grad)


def forget(accumulator: Tensor, fresh: bool) -> None:
    if fresh:
        accumulator.zero_()


WRITES = frozenset({add_product, add_rows, add, forget})
"""Functions that write their first argument and return nothing: dead to fx, and not to be removed."""


def _adds_rows(grad: fx.Node) -> bool:
    """On CPU index_add_ adds in order, as embedding_dense_backward does; elsewhere it is not deterministic."""
    if grad.target is not aten.embedding_dense_backward.default:
        return False
    args: Any = grad.args
    rows, _, _, padding, scale_by_frequency = args
    value = grad.meta["val"]
    wide = value.dtype in (torch.float32, torch.float64) and rows.meta["val"].dtype == value.dtype
    return bool(wide and value.device.type == "cpu" and padding < 0 and not scale_by_frequency)
