"""Operators that treat every element alone, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from phalanx.derive.form import WHOLE, Form, Labels, Linearity, Rule, argument, shape_of, tensors

aten = torch.ops.aten


def broadcast_labels(shape: tuple[int, ...], result: tuple[int, ...]) -> Labels:
    """Labels of an operand that broadcasts to `result`: result dimension numbers; size-1 dimensions that stretch are whole."""
    lead = len(result) - len(shape)
    return tuple(dim + lead if size == result[dim + lead] else WHOLE for dim, size in enumerate(shape))


def broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that all broadcast to."""
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def pointwise(linear: Linearity = "none") -> Rule:
    def rule(node: fx.Node) -> Form:
        result = shape_of(node)
        operands = tensors(node)
        mode = linear
        if mode in ("sum", "each") and len(operands) == 1:
            # x + 3 is not linear in x, x * 3 is; x * x and x + x come with two operands
            mode = "none" if mode == "sum" else "first"
        return Form(
            operands=tuple(broadcast_labels(shape_of(operand), result) for operand in operands),
            results=(tuple(range(len(result))),),
            linear=mode,
        )

    return rule


def cast(node: fx.Node) -> Form:
    """A change of dtype. A partial value may be widened, not narrowed: the sum should be rounded once."""
    operand = tensors(node)[0]
    before, after = operand.meta["val"].dtype, node.meta["val"].dtype
    widens = before.is_floating_point and after.is_floating_point and torch.finfo(after).bits >= torch.finfo(before).bits
    labels = tuple(range(len(shape_of(node))))
    return Form((labels,), (labels,), "first" if widens else "none")


def power(node: fx.Node) -> Form:
    return pointwise("first" if argument(node, "exponent") == 1 else "none")(node)


def prelu(node: fx.Node) -> Form:
    """One slope for all, or one for each channel, which is dimension 1."""
    x, weight = (shape_of(operand) for operand in tensors(node))
    labels = tuple(range(len(x)))
    return Form((labels, tuple(1 if size > 1 else WHOLE for size in weight)), (labels,))


def conjugate(node: fx.Node) -> Form:
    """Conjugated at once: a lazy conjugate's memory, which is what a collective moves, holds the value before."""
    labels = tuple(range(len(shape_of(node))))
    return Form((labels,), (labels,), "first", lambda e: e.call(aten.conj_physical.default, e.operands[0]))


def real_view(node: fx.Node) -> Form:
    """A complex value as real numbers, whose new last dimension (real, imaginary) is whole, or back."""
    operand = tensors(node)[0]
    lead = tuple(range(min(len(shape_of(operand)), len(shape_of(node)))))
    before, after = (lead if x.meta["val"].is_complex() else (*lead, WHOLE) for x in (operand, node))
    return Form((before,), (after,), "first")


def reinterpret(node: fx.Node) -> Form:
    """view(dtype): the bytes of the last dimension are regrouped."""
    before, after = shape_of(tensors(node)[0]), shape_of(node)
    labels: Labels = (*range(len(before) - 1), len(before) - 1 if before == after else WHOLE) if before else ()
    return Form((labels,), (labels,))


def same_shape_factory(node: fx.Node) -> Form:
    """zeros_like and the like: only the shape and dtype of the operand matter."""
    labels = tuple(range(len(shape_of(node))))
    return Form((labels,), (labels,))


_NONLINEAR = (
    aten.relu, aten.gelu, aten.silu, aten.sigmoid, aten.tanh, aten.exp, aten.exp2, aten.log, aten.log1p, aten.expm1,
    aten.sqrt, aten.rsqrt, aten.reciprocal, aten.sin, aten.cos, aten.erf, aten.abs, aten.sign, aten.square, aten.softplus,
    aten.leaky_relu, aten.elu, aten.mish, aten.hardswish, aten.hardtanh, aten.clamp, aten.clamp_min, aten.clamp_max,
    aten.logical_not, aten.bitwise_not, aten.isnan, aten.isinf, aten.floor, aten.ceil, aten.round, aten.trunc,
    aten.log_sigmoid, aten.hardsigmoid, aten.relu6, aten.atan2, aten.maximum, aten.minimum, aten.fmod, aten.remainder,
    aten.floor_divide, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.logical_and, aten.logical_or,
    aten.logical_xor, aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.__and__, aten.__or__, aten.__xor__,
    aten.where, aten.masked_fill, aten.threshold, aten.selu, aten.celu, aten.logit, aten.hardshrink, aten.softshrink,
    aten.erfc, aten.log2, aten.log10, aten.logaddexp, aten.xlogy, aten.isfinite, aten.frac, aten.hypot, aten.copysign,
    aten.isclose, aten.polar, aten.angle, aten.sgn, aten.tan, aten.asin, aten.acos, aten.atan, aten.sinh, aten.cosh,
    aten.lerp, aten.bitwise_left_shift, aten.bitwise_right_shift, aten.rsub, aten.addcmul, aten.addcdiv, aten.nan_to_num,
)  # fmt: skip
_LINEAR = (
    aten.neg, aten.div, aten.true_divide, aten.contiguous, aten.clone, aten.alias, aten.detach, aten.lift_fresh_copy,
    aten.positive, aten.real, aten.imag, aten.resolve_conj, aten.resolve_neg,
)  # fmt: skip

RULES: dict[object, Rule] = {
    **dict.fromkeys(_NONLINEAR, pointwise()),
    **dict.fromkeys(_LINEAR, pointwise("first")),
    # with a rounding mode a quotient is not linear
    **dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), pointwise()),
    **dict.fromkeys((aten.add, aten.sub, aten.subtract, aten.complex), pointwise("sum")),
    **dict.fromkeys((aten.mul, aten.multiply), pointwise("each")),
    **dict.fromkeys((aten.to, aten._to_copy), cast),
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like), same_shape_factory),
    aten.pow: power,
    aten.prelu: prelu,
    **dict.fromkeys((aten.conj, aten.conj_physical), conjugate),
    **dict.fromkeys((aten.view_as_complex, aten.view_as_real), real_view),
    aten.view.dtype: reinterpret,
}
