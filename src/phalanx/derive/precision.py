"""Computing in a narrower dtype than the parameters are kept in: what is cast, and where. The user's module stays float32.

What is captured is a twin of the module. Its floating parameters have the compute dtype, and every floating batch entry that the
forward takes is cast on the way in. Buffers keep their own dtype (a rotary table rounded to bfloat16 has wrong positions), and so
does all that the forward casts itself. Losses are float32: the loss function gets the batch as it was given and the outputs widened,
and a loss or log_softmax inside the forward widens its operands, as under torch.autocast. One process computes the same with

    for p in module.parameters(): p.data = p.data.bfloat16()
    outputs = module(x.bfloat16())
    sum, count = loss(outputs.float(), batch)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from phalanx.derive import reject
from phalanx.derive.canonical import schema_name

Precision = Literal["bf16", "fp16"]
COMPUTE: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype that a precision computes in."""

WIDE_LOSSES = frozenset(
    {
        F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.gaussian_nll_loss,
        F.poisson_nll_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.soft_margin_loss,
        F.log_softmax, torch.log_softmax, Tensor.log_softmax,
    }
)  # fmt: skip
"""Functions that are computed in float32 wherever they are called: they sum over a batch, or feed what does."""

_OF_ONE_DTYPE = frozenset(
    f"aten::{name}"
    for name in (
        "linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "mv", "dot", "einsum", "scaled_dot_product_attention",
        "layer_norm", "group_norm", "conv1d", "conv2d", "conv3d", "convolution",
    )
)  # fmt: skip
"""Operators whose kernels refuse operands of several dtypes. Tracing lets them pass."""
HINT = (
    "under a precision parameters and batch entries are narrow and buffers are not: cast what is made of buffers and constants to "
    "the dtype of what it meets, as in cos.to(x.dtype)"
)


def compute_dtype(precision: str | None) -> torch.dtype | None:
    """The dtype of a precision by name; None computes in the dtypes that the module has."""
    if precision is not None and precision not in COMPUTE:
        raise ValueError(
            f"precision is {precision!r}; it is {' or '.join(map(repr, COMPUTE))}, or None for the module's own dtypes"
        )
    return None if precision is None else COMPUTE[precision]


def check_widths(module: nn.Module, compute: torch.dtype) -> None:
    """Raise ValueError for a floating parameter that is neither float32, to be kept as master, nor of the compute dtype."""
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in (torch.float32, compute):
            raise ValueError(
                f"{name} is {parameter.dtype}; to compute in {compute} parameters are float32 (or {compute} already): call "
                f"model.float() first, or leave precision out to compute in {parameter.dtype}"
            )


def narrowed(tensor: Tensor, compute: torch.dtype | None) -> torch.dtype:
    """The dtype that a parameter or batch entry is computed with."""
    return compute if compute is not None and tensor.is_floating_point() else tensor.dtype


def twin(module: nn.Module, compute: torch.dtype | None) -> dict[str, nn.Parameter]:
    """Parameters by first name as the captured graph takes them; the module's own if nothing is cast."""
    own = dict(module.named_parameters())
    if compute is None:
        return own
    return {name: nn.Parameter(p.detach().to(narrowed(p, compute)), requires_grad=p.requires_grad) for name, p in own.items()}


def call(forward: Callable[..., Any], args: Sequence[Tensor], kwargs: Mapping[str, Any], compute: torch.dtype | None) -> Any:
    """What a forward returns for batch entries in the compute dtype."""
    if compute is None:
        return forward(*args, **kwargs)
    args, kwargs = tree_map_only(Tensor, lambda x: x.to(narrowed(x, compute)), (tuple(args), dict(kwargs)))
    return forward(*args, **kwargs)


def widened(outputs: Any, compute: torch.dtype | None) -> Any:
    """Outputs with each tensor of the compute dtype in float32, in containers that torch knows."""
    if compute is None:
        return outputs
    return tree_map_only(Tensor, lambda x: x.float() if x.dtype == compute else x, outputs)


@contextlib.contextmanager
def computing(compute: torch.dtype | None) -> Iterator[None]:
    """Around a forward and its loss: losses are wide, and an error about dtypes says what this file casts."""
    if compute is None:
        yield
        return
    try:
        with _WideLosses(compute):
            yield
    except RuntimeError as error:
        if "dtype" not in str(error):
            raise
        place = reject.line_of_error(error) or "the model"
        raise ValueError(f"{place}: {str(error).rstrip('.')}; {HINT}") from error


class _WideLosses(TorchFunctionMode):
    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WIDE_LOSSES:
            args, kwargs = widened((tuple(args), dict(kwargs or {})), self.compute)
        return func(*args, **(kwargs or {}))


def check_graph(graph: fx.Graph, compute: torch.dtype | None) -> None:
    """Raise ValueError, with the user's line, for operands that no kernel takes together, and for a loss sum that is not wide."""
    if compute is None:
        return
    for node in graph.nodes:
        if node.op == "call_function" and schema_name(node) in _OF_ONE_DTYPE:
            values = (operand.meta["val"] for operand in node.all_input_nodes)
            dtypes = sorted({str(x.dtype) for x in values if isinstance(x, Tensor) and x.is_floating_point()})
            if len(dtypes) > 1:
                raise ValueError(f"{reject.where(node)} has operands of {' and '.join(dtypes)}: {HINT}")
    loss: Any = graph.output_node().args[0][0]  # type: ignore[index]
    if loss.meta["val"].dtype == compute:
        raise ValueError(
            f"{reject.where(loss)}: the loss sum is {compute}, which has too few digits to add up a batch: "
            "write outputs.float() before the loss, or compute the loss in a loss function"
        )
