"""Example calls of every operator that has a rule. Sizes are multiples of 4, so that most dimensions can be split."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class T:
    """A tensor argument. Floats lie between 0.1 and 0.9, inside the domain of every function."""

    shape: tuple[int, ...]
    kind: str = "float"
    high: int = 2
    """Of integers, exclusive."""

    def make(self, generator: torch.Generator) -> Tensor:
        if self.kind in ("int", "bool"):
            value = torch.randint(self.high, self.shape, generator=generator)
            return value.bool() if self.kind == "bool" else value
        if self.kind == "places":  # no place twice, so that writes do not depend on their order
            return torch.argsort(torch.rand(self.shape, generator=generator), -1) % self.high
        real = torch.rand(self.shape, dtype=torch.float64, generator=generator) * 0.8 + 0.1
        value = torch.polar(real, 4 * real) if self.kind == "complex" else real
        return value.requires_grad_(self.kind != "constant")


@dataclass(frozen=True)
class Example:
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    free: tuple[tuple[int, int], ...] = ()
    """(operand, dimension) that stay split, and are not gathered, if only they are."""

    def __str__(self) -> str:
        shapes = [f"{'x'.join(map(str, a.shape))}" for a in tensors_of(self.args)]
        return f"{str(self.target).removeprefix('aten.')}-{','.join(shapes)}"


def tensors_of(value: Any) -> list[T]:
    if isinstance(value, T):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    return []


def t(*shape: int) -> T:
    return T(shape)


def ints(*shape: int, high: int) -> T:
    return T(shape, "int", high)


def bools(*shape: int) -> T:
    return T(shape, "bool")


def places(*shape: int, high: int) -> T:
    return T(shape, "places", high)


def c(*shape: int) -> T:
    """A float that no gradient is wanted of."""
    return T(shape, "constant")


def z(*shape: int) -> T:
    return T(shape, "complex")


X, ROW, SCALAR = t(4, 8), t(8), t()
ALL = ((0, 0), (0, 1))


def e(target: Any, *args: Any, free: tuple[tuple[int, int], ...] = (), **kwargs: Any) -> Example:
    return Example(target, args, kwargs, free)


UNARY = [
    e(getattr(aten, name).default, X, free=ALL)
    for name in """relu gelu silu sigmoid tanh exp exp2 log log1p expm1 sqrt rsqrt reciprocal sin cos erf abs sign square softplus
    leaky_relu elu mish hardswish hardtanh isnan isinf floor ceil round trunc log_sigmoid hardsigmoid relu6 selu celu logit
    hardshrink softshrink erfc log2 log10 isfinite frac angle sgn tan asin acos atan sinh cosh nan_to_num neg contiguous clone
    alias detach lift_fresh_copy positive logical_not zeros_like ones_like empty_like resolve_conj resolve_neg conj
    conj_physical""".split()  # noqa: SIM905
]
BINARY = [
    e(getattr(getattr(aten, name), overload), *operands)
    for names, overload in (
        ("atan2 maximum minimum logaddexp hypot logical_and logical_or logical_xor isclose complex polar", "default"),
        ("fmod remainder eq ne lt le gt ge xlogy copysign rsub div true_divide add sub subtract mul multiply", "Tensor"),
    )
    for name in names.split()
    for operands in ((X, X), (X, ROW), (t(4, 1), X))
    if name != "polar" or operands == (X, X)
]
POINTWISE = [
    *UNARY,
    *BINARY,
    *(e(aten.floor_divide.default, c(4, 8), c(*shape)) for shape in ((4, 8), (8,))),
    e(aten.max.other, X, ROW),
    e(aten.min.other, X, ROW),
    e(aten.add.Scalar, X, 3.0),
    e(aten.sub.Scalar, X, 3.0),
    e(aten.rsub.Scalar, X, 3.0),
    e(aten.add.Tensor, X, ROW, alpha=2),
    e(aten.mul.Scalar, X, 3.0, free=ALL),
    e(aten.mul.Tensor, z(4, 8), z(1, 8)),
    e(aten.add.Tensor, X, SCALAR),
    e(aten.div.Scalar, X, 3.0),
    e(aten.div.Tensor_mode, X, ROW, rounding_mode="floor"),
    e(aten.div.Tensor_mode, X, ROW, rounding_mode="trunc"),
    e(aten.div.Scalar_mode, X, 0.2, rounding_mode="floor"),
    e(aten.pow.Tensor_Scalar, X, 2),
    e(aten.pow.Tensor_Scalar, X, 1),
    e(aten.pow.Tensor_Tensor, X, ROW),
    e(aten.pow.Scalar, 2.0, X),
    e(aten.clamp.default, X, 0.3, 0.6),
    e(aten.clamp.Tensor, X, ROW),
    e(aten.clamp_min.default, X, 0.3),
    e(aten.clamp_max.default, X, 0.3),
    e(aten.threshold.default, X, 0.3, 0.0),
    e(aten.where.self, bools(4, 8), X, ROW),
    e(aten.where.ScalarOther, bools(4, 1), X, 0.0),
    e(aten.masked_fill.Scalar, X, bools(8), 0.0),
    e(aten.masked_fill.Tensor, X, bools(4, 8), SCALAR),
    e(aten.lerp.Scalar, X, X, 0.3),
    e(aten.lerp.Tensor, X, X, ROW),
    e(aten.addcmul.default, X, ROW, X, value=2.0),
    e(aten.addcdiv.default, X, ROW, X, value=2.0),
    e(aten.prelu.default, X, t(8)),
    e(aten.prelu.default, t(4, 8, 8), t(8)),
    e(aten.prelu.default, t(4, 8, 4), t(1)),
    e(aten.bitwise_not.default, bools(4, 8)),
    *(e(getattr(aten, f"bitwise_{name}").Tensor, bools(4, 8), bools(8)) for name in ("and", "or", "xor")),
    *(e(getattr(aten, f"__{name}__").Tensor, bools(4, 8), bools(8)) for name in ("and", "or", "xor")),
    *(e(getattr(aten, f"bitwise_{name}_shift").Tensor, ints(4, 8, high=5), ints(8, high=3)) for name in ("left", "right")),
    e(aten.to.dtype, X, torch.float32),
    e(aten.to.dtype, ints(4, 8, high=9), torch.float64),
    e(aten._to_copy.default, X, dtype=torch.float64),
    e(aten.full_like.default, X, 2.0),
    e(aten.conj.default, z(4, 8)),
    e(aten.conj_physical.default, z(4, 8)),
    e(aten.abs.default, z(4, 8)),
    e(aten.angle.default, z(4, 8)),
    e(aten.real.default, z(4, 8)),
    e(aten.imag.default, z(4, 8)),
    e(aten.view_as_complex.default, t(4, 8, 2), free=ALL),
    e(aten.view_as_real.default, z(4, 8), free=ALL),
    e(aten.view.dtype, ints(4, 8, high=9), torch.float64),
    e(aten.view.dtype, ints(4, 8, high=9), torch.int32),
]
MATMUL = [
    e(aten.linear.default, t(4, 4, 8), t(12, 8), free=((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))),
    e(aten.linear.default, t(4, 8), t(12, 8), t(12), free=((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))),
    e(aten.linear.default, t(8), t(12, 8), t(12)),
    e(aten.addmm.default, t(12), t(4, 8), t(8, 12)),
    e(aten.addmm.default, t(4, 12), t(4, 8), t(8, 12), beta=0.5, alpha=3),
    e(aten.addmm.default, t(1, 12), t(4, 8), t(8, 12)),
    e(aten.mm.default, t(4, 8), t(8, 12), free=((0, 0), (0, 1), (1, 0), (1, 1))),
    e(aten.bmm.default, t(4, 4, 8), t(4, 8, 4)),
    e(aten.baddbmm.default, t(4, 4, 4), t(4, 4, 8), t(4, 8, 4), beta=0.5),
    e(aten.baddbmm.default, t(1, 4), t(4, 4, 8), t(4, 8, 4), alpha=2.0),
    e(aten.matmul.default, t(4, 8), t(8, 4)),
    e(aten.matmul.default, t(4, 4, 8), t(8, 12)),
    e(aten.matmul.default, t(4, 1, 4, 8), t(2, 8, 4)),
    e(aten.matmul.default, t(8), t(4, 8, 4)),
    e(aten.matmul.default, t(4, 4, 8), t(8)),
    e(aten.matmul.default, t(8), t(8)),
    e(aten.mv.default, t(4, 8), t(8)),
    e(aten.addmv.default, t(4), t(4, 8), t(8), beta=2.0),
    e(aten.dot.default, t(8), t(8)),
    e(aten.vdot.default, t(8), t(8)),
    e(aten.outer.default, t(4), t(8)),
    e(aten.ger.default, t(4), t(8)),
    e(aten.inner.default, t(4, 8), t(4, 4, 8)),
    e(aten.inner.default, t(4, 8), SCALAR),
    e(aten.tensordot.default, t(4, 8, 2), t(2, 4, 4), [0, 2], [1, 0]),
    e(aten.bilinear.default, t(4, 8), t(4, 4), t(12, 8, 4)),
    e(aten.bilinear.default, t(4, 8), t(4, 4), t(12, 8, 4), t(12)),
    e(aten.cdist.default, t(4, 4, 8), t(4, 12, 8)),
    e(aten.einsum.default, "bqhd,bkhd->bhqk", [t(4, 4, 2, 8), t(4, 8, 2, 8)]),
    e(aten.einsum.default, "...ij,...jk->...ik", [t(4, 1, 4, 8), t(2, 8, 4)]),
    e(aten.einsum.default, "i...j,jk", [t(4, 2, 8), t(8, 4)]),
    e(aten.einsum.default, "ij, jk", [t(4, 8), t(8, 4)]),
    e(aten.einsum.default, "bii->bi", [t(4, 8, 8)]),
    e(aten.einsum.default, "bi,ij,bj->b", [t(4, 8), t(8, 4), t(4, 4)]),
    e(aten.einsum.default, "be,ebd->bd", [t(4, 2), t(2, 4, 8)]),
    e(aten.einsum.default, "ij,j->i", [t(4, 8), t(1)]),
]
VIEW = [
    e(aten.view.default, t(4, 8), [4, 2, 4], free=ALL),
    e(aten.view.default, t(4, 2, 4), [4, 8], free=((0, 0), (0, 1))),
    e(aten.view.default, t(2, 4, 8), [8, 8], free=((0, 0), (0, 2))),
    e(aten.view.default, t(4, 8), [8, 4]),
    e(aten.view.default, t(4, 1, 8), [1, 4, 8, 1]),
    e(aten.view.default, t(4, 6), [4, 3, 2]),
    e(aten.reshape.default, t(4, 8), [-1]),
    e(aten._unsafe_view.default, t(4, 8), [4, 8]),
    e(aten.flatten.using_ints, t(4, 2, 4), 1, -1),
    e(aten.unflatten.int, t(4, 8), 1, [2, 4]),
    e(aten.ravel.default, t(4, 8)),
    e(aten.view_as.default, t(4, 8), t(4, 2, 4)),
    e(aten.reshape_as.default, t(4, 8), t(8, 4)),
    e(aten.permute.default, t(2, 4, 8), [2, 0, -2]),
    e(aten.transpose.int, t(2, 4, 8), -1, 0),
    e(aten.swapaxes.default, t(2, 4, 8), 1, 2),
    e(aten.swapdims.default, t(2, 4, 8), 0, 2),
    e(aten.movedim.int, t(2, 4, 8), 0, -1),
    e(aten.movedim.intlist, t(2, 4, 8), [0, 1], [2, 0]),
    e(aten.moveaxis.int, t(2, 4, 8), 2, 0),
    e(aten.t.default, t(4, 8)),
    e(aten.numpy_T.default, t(2, 4, 8)),
    e(aten.mT.default, t(2, 4, 8)),
    e(aten.unsqueeze.default, t(4, 8), -1),
    e(aten.unsqueeze.default, t(4, 8), 0),
    e(aten.squeeze.default, t(4, 1, 8)),
    e(aten.squeeze.dim, t(4, 1, 8), 1),
    e(aten.squeeze.dim, t(4, 1, 8), 0),
    e(aten.squeeze.dims, t(1, 4, 1, 8), [0, 1, -2]),
    e(aten.expand.default, t(4, 1, 8), [4, 2, 8]),
    e(aten.expand.default, t(4, 8), [2, -1, 8]),
    e(aten.expand_as.default, t(4, 1), t(2, 4, 8)),
    e(aten.broadcast_to.default, t(4, 1), [2, 4, 8]),
    e(aten.slice.Tensor, t(4, 8), 1, 2, 6, 2),
    e(aten.slice.Tensor, t(4, 8), 1, 0, 9223372036854775807),
    e(aten.slice.Tensor, t(4, 8), -1, -4),
    e(aten.narrow.default, t(4, 8), 1, 2, 4),
    e(aten.select.int, t(4, 8), -1, -2),
    e(aten.split.Tensor, t(4, 8), 4, 1),
    e(aten.split.Tensor, t(4, 8), 3, -1),
    e(aten.split_with_sizes.default, t(4, 8), [2, 6], 1),
    e(aten.chunk.default, t(4, 8), 2, 1),
    e(aten.tensor_split.sections, t(4, 8), 3, 1),
    e(aten.tensor_split.indices, t(4, 8), [2, 4], 1),
    e(aten.unsafe_chunk.default, t(4, 8), 2, 0),
    e(aten.unsafe_split.Tensor, t(4, 8), 2, 0),
    e(aten.unsafe_split_with_sizes.default, t(4, 8), [2, 2], 0),
    e(aten.unbind.int, t(4, 2, 8), 1),
    e(aten.cat.default, [t(4, 8), t(2, 8)], 0),
    e(aten.concat.default, [t(4, 8), t(4, 4)], -1),
    e(aten.concatenate.default, [t(4, 8), t(4, 4)], 1),
    e(aten.hstack.default, [t(4, 8), t(4, 4)]),
    e(aten.hstack.default, [t(4), t(8)]),
    e(aten.stack.default, [t(4, 8), t(4, 8)], 1),
    e(aten.stack.default, [t(4, 8), t(4, 8)], -1),
    e(aten.pad.default, t(4, 8), [1, 2]),
    e(aten.pad.default, t(4, 2, 8), [1, 2, 0, 0], "replicate"),
    e(aten.constant_pad_nd.default, t(4, 8), [1, 2, 0, 1], 3.0),
    e(aten.repeat.default, t(4, 8), [2, 1, 3]),
    e(aten.tile.default, t(4, 8), [2]),
    e(aten.repeat_interleave.self_int, t(4, 4, 8), 3, 1, free=((0, 0), (0, 1), (0, 2))),
    e(aten.repeat_interleave.self_int, t(4, 8), 2, -1, output_size=16),
    e(aten.flip.default, t(4, 8), [-1]),
    e(aten.roll.default, t(4, 8), [3], [1]),
    e(aten.roll.default, t(4, 8), [3]),
    e(aten.tril.default, t(2, 4, 8)),
    e(aten.triu.default, t(4, 8), 1),
    e(aten.diagonal.default, t(4, 4, 8), 0, 0, 1),
    e(aten.unfold.default, t(4, 8), -1, 4, 2),
]
REDUCE = [
    e(aten.sum.default, X),
    e(aten.sum.dim_IntList, X, [1], free=ALL),
    e(aten.sum.dim_IntList, X, [-1, 0], True),
    e(aten.sum.dim_IntList, X, [], True),
    e(aten.sum.dim_IntList, t(4, 8), [1], dtype=torch.float64),
    e(aten.sum.default, bools(4, 8)),
    e(aten.mean.default, X, free=ALL),
    e(aten.mean.dim, X, [-1], free=ALL),
    e(aten.mean.dim, ints(4, 8, high=9), [1], True, dtype=torch.float64),
    e(aten.nansum.default, X),
    e(aten.nansum.default, X, [1]),
    e(aten.count_nonzero.default, ints(4, 8, high=2)),
    e(aten.count_nonzero.dim_IntList, bools(4, 8), [1]),
    *(e(op.default, X, [-1], True) for op in (aten.amax, aten.amin)),
    e(aten.amax.default, X),
    e(aten.aminmax.default, X, dim=1),
    e(aten.max.default, X),
    e(aten.max.dim, X, 1),
    e(aten.min.default, X),
    e(aten.min.dim, X, 0, True),
    e(aten.median.default, t(3, 8)),
    e(aten.median.dim, X, 1),
    e(aten.nanmedian.dim, X, 1),
    *(e(op.default, t(2, 4, 8), False) for op in (aten.var, aten.std, aten.var_mean, aten.std_mean)),
    *(e(op.dim, t(2, 4, 8), [2], False, True) for op in (aten.var, aten.std, aten.var_mean, aten.std_mean)),
    *(e(op.correction, X, [1], correction=0) for op in (aten.var, aten.std, aten.var_mean, aten.std_mean)),
    e(aten.var.correction, X),
    *(e(op.default, bools(4, 8)) for op in (aten.any, aten.all)),
    *(e(op.dim, bools(4, 8), 1) for op in (aten.any, aten.all)),
    e(aten.prod.default, X),
    e(aten.prod.dim_int, X, 1),
    e(aten.argmax.default, X),
    e(aten.argmax.default, X, -1),
    e(aten.argmin.default, X, 0, True),
    e(aten.logsumexp.default, X, [-1], True),
    e(aten.norm.Scalar, t(2, 4, 8), 2),
    e(aten.norm.ScalarOpt_dim, t(2, 4, 8), 2, [1]),
    e(aten.linalg_vector_norm.default, t(2, 4, 8), 2, [-1], True),
    e(aten.linalg_vector_norm.default, X),
    e(aten.softmax.int, t(4, 4, 8), -1),
    e(aten.softmax.int, X, 0, torch.float64),
    e(aten._softmax.default, X, 1, False),
    e(aten._safe_softmax.default, X, 1),
    e(aten.log_softmax.int, X, 1),
    e(aten._log_softmax.default, X, 1, False),
    e(aten.sort.default, X),
    e(aten.sort.stable, X, stable=True, dim=0),
    e(aten.argsort.default, X, 0),
    e(aten.topk.default, X, 2, 0),
    e(aten.topk.default, X, 2),
    e(aten.glu.default, X),
    e(aten.glu.default, X, 0),
    *(e(op.default, X, 0) for op in (aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin)),
    e(aten.diff.default, X, free=((0, 0),)),
    e(aten.diff.default, X, 2, 0, free=((0, 1),)),
    e(aten.diff.default, X, 1, -1, t(4, 1)),
    e(aten.diff.default, X, 1, 1, t(4, 1), t(4, 2)),
    e(aten.diff.default, ints(4, 8, high=9), dim=-1, prepend=ints(4, 1, high=9)),
    e(aten.cumsum.default, bools(4, 8), -1, free=((0, 0),)),
    e(aten.cosine_similarity.default, t(4, 8), t(4, 8)),
    e(aten.cosine_similarity.default, t(4, 1, 8), t(4, 8), -1),
    e(aten.layer_norm.default, t(4, 4, 8), [8], t(8), t(8)),
    e(aten.layer_norm.default, t(4, 4, 8), [4, 8]),
    e(aten.rms_norm.default, t(4, 4, 8), [8], t(8)),
]
SPATIAL = [
    e(aten.conv1d.default, t(4, 8, 8), t(4, 8, 3), t(4), free=((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))),
    e(aten.conv1d.default, t(8, 8), t(4, 8, 3)),
    e(aten.conv1d.padding, t(4, 4, 8), t(8, 2, 3), t(8), [1], "same", [1], 2),
    e(aten.conv2d.default, t(4, 4, 4, 4), t(8, 4, 2, 2), t(8), [2, 2]),
    e(aten.conv2d.default, t(4, 4, 4, 4), t(4, 1, 3, 3), t(4), [1, 1], [1, 1], [1, 1], 4),
    e(aten.conv3d.default, t(2, 2, 2, 2, 2), t(4, 2, 1, 1, 1)),
    e(aten.convolution.default, t(4, 4, 8), t(4, 8, 3), t(8), [1], [0], [1], True, [0], 1),
    e(aten.convolution.default, t(4, 4, 8), t(8, 4, 3), t(8), [1], [0], [1], False, [0], 1),
    e(aten.conv_transpose1d.default, t(4, 4, 8), t(4, 8, 2), t(8), [2]),
    e(aten.conv_transpose2d.input, t(4, 4, 4, 4), t(4, 2, 2, 2), t(4), [2, 2], [0, 0], [0, 0], 2),
    e(aten.conv_transpose3d.input, t(2, 2, 2, 2, 2), t(2, 4, 1, 1, 1)),
    e(aten.max_pool1d.default, t(4, 4, 8), [2]),
    e(aten.avg_pool1d.default, t(4, 4, 8), [2]),
    e(aten.adaptive_avg_pool1d.default, t(4, 4, 8), [2]),
    e(aten.adaptive_max_pool1d.default, t(4, 4, 8), [2]),
    e(aten.max_pool2d.default, t(4, 4, 4, 4), [2, 2]),
    e(aten.max_pool2d_with_indices.default, t(4, 4, 4, 4), [2, 2]),
    e(aten.avg_pool2d.default, t(4, 4, 4, 4), [2, 2]),
    e(aten.adaptive_avg_pool2d.default, t(4, 4, 4, 4), [1, 1]),
    e(aten.adaptive_max_pool2d.default, t(4, 4, 4, 4), [2, 2]),
    e(aten.max_pool3d.default, t(2, 2, 2, 2, 2), [2, 2, 2]),
    e(aten.avg_pool3d.default, t(2, 2, 2, 2, 2), [2, 2, 2]),
    e(aten.adaptive_avg_pool3d.default, t(2, 2, 2, 2, 2), [1, 1, 1]),
    e(aten.upsample_nearest1d.vec, t(4, 4, 4), [8], None),
    e(aten.upsample_linear1d.vec, t(4, 4, 4), [8], False, None),
    e(aten.upsample_nearest2d.vec, t(4, 4, 2, 2), None, [2.0, 2.0]),
    e(aten.upsample_bilinear2d.vec, t(4, 4, 2, 2), [4, 4], False, None),
    e(aten.upsample_bicubic2d.vec, t(4, 4, 2, 2), [4, 4], False, None),
    e(aten.upsample_nearest3d.vec, t(2, 2, 2, 2, 2), [4, 4, 4], None),
    e(aten.upsample_trilinear3d.vec, t(2, 2, 2, 2, 2), [4, 4, 4], False, None),
    e(aten.group_norm.default, t(4, 8, 4), 2, t(8), t(8)),
    e(aten.batch_norm.default, t(4, 8, 4), t(8), t(8), None, None, True, 0.1, 1e-5, False),
    e(aten.batch_norm.default, t(4, 8, 4), t(8), t(8), c(8), c(8), False, 0.1, 1e-5, False, free=((0, 0), (0, 1))),
    e(aten.instance_norm.default, t(4, 8, 4), t(8), t(8), None, None, True, 0.1, 1e-5, False),
    e(aten.pixel_shuffle.default, t(4, 2, 8, 4, 4), 2),
    e(aten.pixel_unshuffle.default, t(4, 8, 4, 4), 2),
    e(aten.im2col.default, t(4, 4, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]),
    e(aten.im2col.default, t(4, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]),
]
ATTENTION = [
    e(
        aten.scaled_dot_product_attention.default,
        t(4, 4, 8, 4),
        t(4, 4, 8, 4),
        t(4, 4, 8, 2),
        None,
        0.0,
        True,
        free=((0, 0), (0, 1)),
    ),
    e(aten.scaled_dot_product_attention.default, t(4, 4, 4, 4), t(4, 4, 8, 4), t(4, 4, 8, 4), t(4, 1, 4, 8), scale=0.3),
    e(aten.scaled_dot_product_attention.default, t(4, 4, 4, 4), t(4, 4, 8, 4), t(4, 4, 8, 4), bools(4, 8)),
    e(aten.scaled_dot_product_attention.default, t(4, 4, 4, 4), t(4, 2, 4, 4), t(4, 2, 4, 4), enable_gqa=True),
    e(aten.scaled_dot_product_attention.default, t(4, 4, 4, 4), t(4, 1, 4, 4), t(4, 1, 4, 4), enable_gqa=True, free=((0, 1),)),
    e(aten.scaled_dot_product_attention.default, t(4, 4, 4), t(4, 8, 4), t(4, 8, 4)),
    e(aten.scaled_dot_product_attention.default, t(4, 4), t(8, 4), t(8, 4)),
    e(aten.scaled_dot_product_attention.default, t(4, 4, 4, 4), t(4, 2, 4, 4), t(4, 2, 4, 4), None, 0.5, True, enable_gqa=True),
    e(aten.scaled_dot_product_attention.default, t(4, 4, 4, 4), t(4, 4, 8, 4), t(4, 4, 8, 4), t(4, 4, 4, 8), 0.5),
]
INDEXING = [
    e(aten.embedding.default, t(8, 4), ints(4, 4, high=8), free=((0, 0), (0, 1), (1, 0))),
    e(aten.embedding.default, t(8, 4), ints(4, 4, high=8), 3),
    e(aten.one_hot.default, ints(4, 4, high=8), 8),
    e(aten.gather.default, t(4, 8), 1, ints(4, 4, high=8)),
    e(aten.gather.default, t(8, 4), 0, ints(4, 2, high=8)),
    e(aten.take_along_dim.default, t(4, 8), ints(1, 4, high=8), 1),
    e(aten.take_along_dim.default, t(4, 8), ints(4, 2, high=8), -1),
    e(aten.scatter.src, t(4, 8), 1, places(4, 4, high=8), t(4, 4)),
    e(aten.scatter.src, c(4, 8), 0, places(4, 2, high=1), c(4, 4)),
    e(aten.scatter.value, t(4, 8), 1, places(4, 4, high=8), 3.0),
    e(aten.scatter_add.default, t(4, 8), 1, ints(4, 4, high=8), t(4, 4)),
    e(aten.scatter_reduce.two, t(4, 8), 1, ints(4, 4, high=8), t(4, 4), "sum"),
    e(aten.index_select.default, t(4, 8), 1, ints(4, high=8)),
    e(aten.index_add.default, t(4, 8), -1, ints(4, high=8), t(4, 4), alpha=2),
    e(aten.index_copy.default, t(4, 8), -1, places(4, high=8), t(4, 4)),
    e(aten.index_fill.int_Scalar, t(4, 8), 1, ints(4, high=8), 3.0),
    e(aten.index_fill.int_Tensor, t(4, 8), 1, ints(4, high=8), SCALAR),
    e(aten.select_scatter.default, t(4, 8), t(4), 1, 2),
    e(aten.slice_scatter.default, t(4, 8), t(4, 4), 1, 2, 6),
    e(aten.slice_scatter.default, t(4, 8), t(2, 8), 0, 1, 3),
    e(aten.index.Tensor, t(4, 8), [ints(4, 2, high=4)], free=((0, 1), (1, 0))),
    e(aten.index.Tensor, t(4, 4, 8), [None, ints(4, high=4)]),
    e(aten.index.Tensor, t(4, 4, 8), [None, ints(4, 1, high=4), ints(2, high=8)]),
    e(aten.index.Tensor, t(4, 4, 8), [ints(4, high=4), None, ints(4, high=8)]),
    e(aten.index_put.default, t(4, 8), [places(4, high=4)], t(4, 8)),
    e(aten.index_put.default, t(4, 8), [None, ints(4, high=8)], t(4, 4), True),
    e(aten.index_put.default, t(4, 8), [ints(4, high=4)], t(8), True),
    e(aten.index_put.default, t(4, 4, 8), [ints(4, high=4), None, ints(4, high=8)], t(4, 1), True),
    e(aten.index_put.default, t(4, 8), [bools(4, 8)], SCALAR),
    e(aten.index_put.default, t(4, 4, 8), [None, bools(4)], t(1)),
]
LOSS = [
    *(
        e(aten.cross_entropy_loss.default, t(4, 8), ints(4, high=8), None, reduction, *rest)
        for reduction in (0, 1, 2)
        for rest in ((), (3,), (-100, 0.1))
    ),
    e(aten.cross_entropy_loss.default, t(4, 8), ints(4, high=8), c(8), 1, 3, 0.1),
    e(aten.cross_entropy_loss.default, t(4, 8), ints(4, high=8), c(8), 2),
    e(aten.cross_entropy_loss.default, t(4, 8, 2), ints(4, 2, high=8), None, 2, free=((0, 0), (0, 1), (1, 1))),
    e(aten.cross_entropy_loss.default, t(4, 8), t(4, 8), None, 1),
    e(aten.cross_entropy_loss.default, t(8), ints(high=8), None, 2),
    *(e(op.default, t(4, 8), ints(4, high=8), None, r) for op in (aten.nll_loss, aten.nll_loss_nd) for r in (0, 1, 2)),
    e(aten.nll_loss.default, t(4, 8), ints(4, high=8), c(8), 1, 3),
    e(aten.nll_loss2d.default, t(4, 8, 2, 2), ints(4, 2, 2, high=8), None, 2),
    *(
        e(op.default, X, target, reduction)
        for op in (aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss, aten.kl_div)
        for reduction in (0, 1, 2)
        for target in (c(4, 8) if op is aten.soft_margin_loss else X,)
    ),
    e(aten.mse_loss.default, X, X),
    e(aten.huber_loss.default, X, X, 1, 0.1),
    e(aten.smooth_l1_loss.default, X, X, 1, 0.1),
    e(aten.kl_div.default, X, X, 1, log_target=True),
    *(e(aten.binary_cross_entropy.default, X, X, weight, r) for weight in (None, c(8)) for r in (0, 1, 2)),
    *(
        e(aten.binary_cross_entropy_with_logits.default, X, X, weight, positive, r)
        for weight, positive in ((None, None), (None, c(8)), (c(4, 8), c(8)))
        for r in (0, 1, 2)
    ),
    e(aten.hinge_embedding_loss.default, X, X, 1.0, 1),
    e(aten.poisson_nll_loss.default, X, X, True, False, 1e-8, 1),
    e(aten.margin_ranking_loss.default, X, X, X, 0.5, 1),
]
CREATE = [
    e(aten.arange.default, 4),
    e(aten.zeros.default, [4, 8]),
    e(aten.ones.default, [4, 8]),
    e(aten.full.default, [4, 8], 2.0),
    e(aten.empty.memory_format, [4, 8]),
    e(aten.eye.default, 4),
    e(aten.linspace.default, 0.0, 1.0, 4),
    e(aten.scalar_tensor.default, 3.0),
    e(aten.tril_indices.default, 4, 4),
    e(aten.triu_indices.default, 4, 4),
    e(aten.new_ones.default, X, [4]),
    e(aten.new_zeros.default, X, [4]),
    e(aten.new_full.default, X, [4], 2.0),
    e(aten.new_empty.default, X, [4]),
]
REGULARIZE = [e(aten.dropout.default, t(4, 8), 0.5, True, free=ALL)]

EXAMPLES: list[Example] = [
    *POINTWISE, *MATMUL, *VIEW, *REDUCE, *SPATIAL, *ATTENTION, *INDEXING, *LOSS, *CREATE, *REGULARIZE
]  # fmt: skip
