"""Operators over images and signals (batch, channels, *space): space is whole."""

from __future__ import annotations

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Form, Labels, Rule, argument, shape_of, tensors

aten = torch.ops.aten


def convolution(node: fx.Node) -> Form:
    """x (batch, in, *space), weight (out, in, *kernel), bias (out). Split input channels leave a partial sum; groups keep them whole."""
    return _convolution(node, transposed=bool(argument(node, "transposed", False)))


def transposed_convolution(node: fx.Node) -> Form:
    """As convolution, but for the weight, which is (in, out, *kernel)."""
    return _convolution(node, transposed=True)


def _convolution(node: fx.Node, transposed: bool) -> Form:
    x, weight, *_ = shapes = [shape_of(operand) for operand in tensors(node)]
    batched: Labels = ("batch",) if len(x) == len(weight) else ()
    space: Labels = (WHOLE,) * (len(weight) - 2)
    one = argument(node, "groups", 1) == 1
    inner, outer = ("in", "out") if one else (WHOLE, WHOLE)
    channels: Labels = (inner, outer) if transposed else (outer, inner)
    operands: tuple[Labels, ...] = ((*batched, inner, *space), (*channels, *space))
    result: Labels = (*batched, outer, *space)
    if len(shapes) == 2:
        return Form(operands, (result,), "each")
    # the bias is added once: where the sum over input channels is partial, on one rank
    return Form((*operands, (outer,)), (result,), "none", addend=2)


def plane(dims: int) -> Rule:
    """Pooling and interpolation: the last `dims` dimensions are whole, each plane is treated alone."""

    def rule(node: fx.Node) -> Form:
        lead = tuple(range(len(shape_of(tensors(node)[0])) - dims))
        value = node.meta["val"]
        labels: Labels = (*lead, *(WHOLE,) * dims)
        return Form((labels,), (labels,) * (len(value) if isinstance(value, (tuple, list)) else 1))

    return rule


def group_norm(node: fx.Node) -> Form:
    operands = [shape_of(operand) for operand in tensors(node)]
    x: Labels = (0,) + (WHOLE,) * (len(operands[0]) - 1)
    return Form((x, *((WHOLE,) * len(shape) for shape in operands[1:])), (x,))


def batch_norm(node: fx.Node) -> Form:
    """Weight, bias and statistics (channels,). Statistics of the batch need all samples; given ones do not."""
    operands = [shape_of(operand) for operand in tensors(node)]
    lead = WHOLE if argument(node, "training", True) else "batch"
    x: Labels = (lead, "channel", *(WHOLE,) * (len(operands[0]) - 2))
    return Form((x, *(("channel",) for _ in operands[1:])), (x,))


def instance_norm(node: fx.Node) -> Form:
    """Statistics of each sample and channel."""
    operands = [shape_of(operand) for operand in tensors(node)]
    x: Labels = ("batch", "channel", *(WHOLE,) * (len(operands[0]) - 2))
    return Form((x, *(("channel",) for _ in operands[1:])), (x,))


def pixels(node: fx.Node) -> Form:
    """pixel_shuffle, im2col and back: what is not channels or space is left alone."""
    before, after = len(shape_of(tensors(node)[0])), len(shape_of(node))
    lead: Labels = tuple(range(before - 3 if before == after else max(0, min(before, after) - 2)))
    return Form(((*lead, *(WHOLE,) * (before - len(lead))),), ((*lead, *(WHOLE,) * (after - len(lead))),))


RULES: dict[object, Rule] = {
    **dict.fromkeys((aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution), convolution),
    **dict.fromkeys((aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d), transposed_convolution),
    **dict.fromkeys((aten.max_pool1d, aten.avg_pool1d, aten.adaptive_avg_pool1d, aten.adaptive_max_pool1d), plane(1)),
    **dict.fromkeys(
        (aten.max_pool2d, aten.avg_pool2d, aten.adaptive_avg_pool2d, aten.adaptive_max_pool2d, aten.max_pool2d_with_indices),
        plane(2),
    ),
    **dict.fromkeys((aten.max_pool3d, aten.avg_pool3d, aten.adaptive_avg_pool3d), plane(3)),
    **dict.fromkeys((aten.upsample_nearest1d, aten.upsample_linear1d), plane(1)),
    **dict.fromkeys((aten.upsample_nearest2d, aten.upsample_bilinear2d, aten.upsample_bicubic2d), plane(2)),
    **dict.fromkeys((aten.upsample_nearest3d, aten.upsample_trilinear3d), plane(3)),
    aten.group_norm: group_norm,
    aten.batch_norm: batch_norm,
    aten.instance_norm: instance_norm,
    **dict.fromkeys((aten.pixel_shuffle, aten.pixel_unshuffle, aten.im2col), pixels),
}
