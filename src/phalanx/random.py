"""Random numbers that do not depend on layout: each is a hash of a key and a counter, never the next of a sequence.

A rank that holds elements 7 and 9 of a tensor draws exactly what one process draws for them. Only integer arithmetic and the
floating-point operations that IEEE 754 rounds exactly (+, -, *, /, sqrt) are used, so a value is the same bit for bit on every
device, thread count and vector length. Pure.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.mesh import Mesh
from phalanx.spec import Spec, clipped_ranges

# Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators": the increment and Stafford's mix 13.
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MANTISSA_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
FEISTEL_ROUNDS = 8


def key(*parts: int | str) -> int:
    """A 64-bit key from names and numbers, the same in every process and version of Python; `1` and `"1"` differ."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{'i' if isinstance(part, int) else 's'}{part}".encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(digest.digest(), "little")


def salt(seed: int, segment: int) -> int:
    """What makes the dropout of one segment differ from that of another and of other seeds; fits an operator's int argument."""
    return key(seed, "dropout", segment) >> 1


def bits(key: int, index: Tensor) -> Tensor:
    """64 random bits, as int64, for each counter in `index` (int64)."""
    z = leading_bits(key, index)
    return _xor_shift(z, 31, torch.empty_like(z))


def leading_bits(key: int, index: Tensor) -> Tensor:
    """`bits` of which only the leading 31 are good, for a fifth less time.

    splitmix64 at position `index`, without its last shift, and with a second word derived from the key between its two rounds:
    without that, all keys would read one sequence of 2^64 at different offsets, and long streams of many keys would overlap.
    """
    z = index * _signed(GAMMA)
    z += _signed(key)
    scratch = torch.empty_like(z)
    _xor_shift(z, 30, scratch).mul_(_signed(MIX_1)).bitwise_xor_(_signed(_second_word(key)))
    return _xor_shift(z, 27, scratch).mul_(_signed(MIX_2))


def uniform(key: int, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform on [0, 1): the leading 53, 24, 11 or 8 bits (float64, float32, float16, bfloat16) of `bits`, as a fraction.

    A narrower value is the wider one truncated, not rounded: rounding could give 1.
    """
    mantissa = _mantissa_bits(dtype)
    leading = bits(key, index).bitwise_right_shift_(64 - mantissa).bitwise_and_((1 << mantissa) - 1)
    return leading.to(torch.float64).mul_(2.0**-mantissa).to(dtype)


def normal(key: int, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal by Box and Muller 1958 from two independent streams, computed in float64 and rounded to `dtype`."""
    _mantissa_bits(dtype)
    radius = log(uniform(key, index, torch.float64).neg_().add_(1.0)).mul_(-2.0).sqrt_()
    angle = uniform(_second_word(key ^ GAMMA), index, torch.float64)
    return radius.mul_(_cos_turns(angle)).to(dtype)


def permutation(key: int, n: int, index: Tensor) -> Tensor:
    """Where each `index` in [0, n) goes under the permutation named by `key`; no table is kept.

    A balanced Feistel network over the next even number of bits, walked until the value falls inside [0, n)
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains": cycle walking).
    """
    if n < 1 or (index.numel() and (int(index.min()) < 0 or int(index.max()) >= n)):
        raise ValueError(f"permutation of {n} elements asked for indices outside [0, {n})")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    flat = index.reshape(-1).clone()
    pending = torch.arange(flat.numel(), device=index.device)
    while pending.numel():
        x = flat[pending]
        left, right = x >> half, x & low
        for turn in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (bits(_second_word(key + turn), right) & low)
        x = (left << half) | right
        flat[pending] = x
        pending = pending[x >= n]
    return flat.reshape(index.shape)


def global_index(spec: Spec, shape: Sequence[int], mesh: Mesh, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """Row-major position in the global `shape` of each element of the shard that `rank` holds, int64, in the shard's shape."""
    local = spec.local_shape(shape, mesh)
    rows, columns = index_factors(spec, shape, mesh, rank, device)
    return (rows[:, None] + columns).reshape(local)


def index_factors(
    spec: Spec,
    shape: Sequence[int],
    mesh: Mesh,
    rank: int,
    device: torch.device | str = "cpu",
    *,
    padded: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`global_index` as an outer sum, rows[:, None] + columns, with one column per element of the last dimension.

    Two vectors in place of a tensor of the shard's size. Of a value that is stored in the larger shape `padded`, the elements of the
    shard that are not padding; their positions are those in `shape`.
    """
    padded = shape if padded is None else padded
    spec.check(padded, mesh)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    columns = rows
    for dim in range(len(shape)):
        rows = (rows[:, None] + columns).reshape(-1)
        stride = math.prod(shape[dim + 1 :])
        pieces = clipped_ranges(spec, shape, padded, mesh, rank, dim)
        columns = torch.cat([torch.arange(start, start + length, device=device) * stride for start, length in pieces])
    return rows, columns


def blocks(rows: int, columns: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Cut a (rows, columns) box into pieces of at most `limit` elements, in row-major order; whole rows where they fit."""
    width = min(columns, limit)
    height = max(1, limit // max(1, columns))
    for row in range(0, rows if columns else 0, height):
        for column in range(0, columns, width):
            yield slice(row, min(row + height, rows)), slice(column, min(column + width, columns))


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64 by exactly rounded operations, to 1e-11 of its value.

    x = m * 2^e with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh(s) with s = (m-1)/(m+1), |s| < 0.172. The first omitted term of
    the series is s^14/15 < 2e-12 of the sum: no sample that fits a machine could tell, and the values are defined by this.
    """
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    power = exponent.to(torch.float64) - small.to(torch.float64)
    s = (mantissa - 1.0).div_(mantissa.add_(1.0))
    series = _polynomial(s * s, [2.0 / (2 * k + 1) for k in range(7)])
    return power.mul_(math.log(2.0)).add_(series.mul_(s))


def _cos_turns(turns: Tensor) -> Tensor:
    """cos(2 pi t) for float64 t in [0, 1), within 1e-11: sin of x = 2 pi (|t - 1/2| - 1/4), which lies in [-pi/2, pi/2]."""
    x = (turns - 0.5).abs_().sub_(0.25).mul_(2.0 * math.pi)
    return _polynomial(x * x, [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(8)]).mul_(x)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's rule in separate multiplications and additions: a fused one would round differently from device to device."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value.mul_(x).add_(coefficient)
    return value


def _xor_shift(z: Tensor, places: int, scratch: Tensor) -> Tensor:
    """z ^= z >>> places, in place; int64 shifts copy the sign, so the copies are masked away."""
    torch.bitwise_right_shift(z, places, out=scratch)
    return z.bitwise_xor_(scratch.bitwise_and_((1 << (64 - places)) - 1))


def _second_word(key: int) -> int:
    """splitmix64 of one number, in Python."""
    z = (key + GAMMA) % 2**64
    z = (z ^ (z >> 30)) * MIX_1 % 2**64
    z = (z ^ (z >> 27)) * MIX_2 % 2**64
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    return (word + 2**63) % 2**64 - 2**63


def _mantissa_bits(dtype: torch.dtype) -> int:
    if dtype not in MANTISSA_BITS:
        raise ValueError(f"random numbers of {dtype} are not defined; choose one of {', '.join(map(str, MANTISSA_BITS))}")
    return MANTISSA_BITS[dtype]
