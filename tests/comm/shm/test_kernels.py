"""The reduction and copy kernels, bit by bit against numpy: every dtype, operation, number of inputs, length and aliasing."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

CORE = Path(__file__).parents[3] / "src/phalanx/comm/shm/core"
GCC = shutil.which("gcc")
FLAGS = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-ffp-contract=off")

# In the order of enum phx_dtype: the numpy type of the stored bits.
DTYPES = {
    **{"f32": np.float32, "f64": np.float64, "f16": np.uint16, "bf16": np.uint16},
    **{"i8": np.int8, "u8": np.uint8, "i16": np.int16, "i32": np.int32, "i64": np.int64},
    **{"bool": np.uint8, "c64": np.complex64, "c128": np.complex128, "opaque": np.uint8},
}
REDOPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
FLOATS, HALVES, COMPLEX = ("f32", "f64"), ("f16", "bf16"), ("c64", "c128")
INTEGERS = ("i8", "u8", "i16", "i32", "i64")
SUPPORTED = [(dtype, op) for dtype in FLOATS + HALVES for op in REDOPS[:5]]
SUPPORTED += [(dtype, op) for dtype in COMPLEX for op in REDOPS[:3]]
SUPPORTED += [(dtype, op) for dtype in (*INTEGERS, "bool") for op in REDOPS if op != "avg"]

NINS = (1, 2, 3, 4, 7)
LENGTHS = (0, 1, 5, 63, 64, 1000, 4097)
LONGEST = max(LENGTHS)
GUARD = 0xA5  # fills the memory around the items

Array = np.ndarray[Any, np.dtype[Any]]
Reduce = Callable[[ctypes.Array[ctypes.c_void_p], int, ctypes.Array[ctypes.c_void_p], int, int], None]
REDUCE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

pytestmark = pytest.mark.skipif(GCC is None, reason="the kernels are C and there is no gcc to compile them")


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[ctypes.CDLL]:
    """The library as it is shipped, and one without vector code: no wide registers, no conversions by hardware."""
    folder = tmp_path_factory.mktemp("kernels")
    kinds = {"shipped": (), "scalar": ("-DPHX_NO_CLONES", "-O1")}
    compilers = [
        subprocess.Popen([str(GCC), *FLAGS, *extra, str(CORE / "kernels.c"), "-o", str(folder / f"{kind}.so")])
        for kind, extra in kinds.items()
    ]
    assert [compiler.wait() for compiler in compilers] == [0, 0]
    libraries = [ctypes.CDLL(str(folder / f"{kind}.so")) for kind in kinds]
    for library in libraries:
        library.phx_kernel.restype = ctypes.c_void_p
        library.phx_itemsize.restype = ctypes.c_size_t
        library.phx_copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        library.phx_copy.restype = None
    return libraries


def kernel(library: ctypes.CDLL, dtype: str, op: str) -> Reduce:
    address = library.phx_kernel(list(DTYPES).index(dtype), REDOPS.index(op))
    assert address, f"no kernel for {op} of {dtype}"
    return REDUCE(address)


def reduce(function: Reduce, outs: list[Array], ins: list[Array], n: int) -> None:
    def pointers(arrays: list[Array]) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))

    function(pointers(outs), len(outs), pointers(ins), len(ins), n)


def as_float32(dtype: str, bits: Array) -> Array:
    if dtype == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_half(dtype: str, values: Array) -> Array:
    """Rounded by numpy or torch, with the one NaN that the kernels make."""
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return np.where(np.isnan(values), np.uint16(0x7E00), values.astype(np.float16).view(np.uint16))
    rounded = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def folded(op: str, x: Array, y: Array) -> Array:
    if op in ("sum", "avg"):
        return x + y
    if op == "product" and np.iscomplexobj(x):
        result = np.empty_like(x)
        result.real = x.real * y.real - x.imag * y.imag
        result.imag = x.real * y.imag + x.imag * y.real
        return result
    if op == "product":
        return x * y
    if op in ("min", "max"):
        chosen = np.where(y < x if op == "min" else y > x, y, x)
        return np.where(y == y, chosen, y)
    return {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}[op](x, y)


def expected(dtype: str, op: str, ins: list[Array]) -> Array:
    """What the header promises, with every step in numpy's own arithmetic of the accumulation type."""
    if dtype == "bool":
        gate = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op)
        ins, op = [(array != 0).astype(np.uint8) for array in ins], gate
    values = [as_float32(dtype, array) for array in ins] if dtype in HALVES else ins
    with np.errstate(all="ignore"):
        total = values[0].copy()
        for value in values[1:]:
            total = folded(op, total, value)
        if op == "avg":
            parts = total.view(total.real.dtype)  # a complex number is divided part by part
            parts /= parts.dtype.type(len(ins))
    assert total.dtype == values[0].dtype
    if dtype in HALVES:
        return as_half(dtype, total)
    if total.dtype.kind in "fc":
        parts = total.view(total.real.dtype)
        parts[np.isnan(parts)] = np.nan
    return total


def inputs(dtype: str, op: str, nin: int, n: int = LONGEST) -> list[Array]:
    """Ordinary numbers, and any bits at all in every eighth place: subnormals, infinities, NaNs with payloads, signed zeros."""
    random = np.random.default_rng([list(DTYPES).index(dtype), REDOPS.index(op), nin])
    stored = np.dtype(DTYPES[dtype])
    made = []
    for _ in range(nin):
        array = random.integers(0, 256, n * stored.itemsize, dtype=np.uint8).view(stored)
        parts = array.view(array.real.dtype) if stored.kind in "fc" else array
        if dtype in HALVES:
            ordinary = as_half(dtype, random.standard_normal(n).astype(np.float32))
        else:
            ordinary = random.standard_normal(parts.size).astype(parts.dtype)
        if dtype not in (*INTEGERS, "bool"):
            parts[:] = np.where(random.random(parts.size) < 1 / 8, parts, ordinary)
            parts[random.random(parts.size) < 1 / 16] = 0
            parts[random.random(parts.size) < 1 / 16] = parts.dtype.type(-0.0) if parts.dtype.kind == "f" else 0x8000
        elif dtype == "bool":
            array[random.random(n) < 1 / 2] = 0
        made.append(array)
    return made


def placed(array: Array, n: int, misaligned: int) -> tuple[Array, Array]:
    """A copy of n items between two guards, `misaligned` components behind a multiple of 64 bytes; and the memory around it."""
    size, part = array.itemsize, array.real.dtype.itemsize
    memory = np.full((n + 2) * size + 192, GUARD, np.uint8)
    start = -(memory.ctypes.data + size) % 64 + size + misaligned * part
    view = memory[start : start + n * size].view(array.dtype)
    view[:] = array[:n]
    return view, memory


def check(function: Reduce, terms: list[Array], want: Array, n: int, aliases: tuple[int | None, ...], misaligned: int) -> None:
    """One call with len(aliases) outputs, of which output k is input aliases[k] or its own memory."""
    ins = [placed(term, n, misaligned) for term in terms]
    outs = [placed(np.zeros_like(want), n, misaligned) if j is None else ins[j] for j in aliases]
    before = [memory.copy() for _, memory in ins]
    reduce(function, [view for view, _ in outs], [view for view, _ in ins], n)
    label = f"{len(terms)} inputs of {n} items, outputs in {aliases}, misaligned by {misaligned}"
    for view, memory in outs:
        assert view.tobytes() == want[:n].tobytes(), label
        view[:] = 0
        assert np.count_nonzero(memory != GUARD) == n * view.itemsize, label + ": wrote beyond its items"
    for j, (_, memory) in enumerate(ins):
        assert j in aliases or np.array_equal(memory, before[j]), label + f": changed input {j}"


@pytest.mark.parametrize(("dtype", "op"), SUPPORTED)
def test_every_bit_is_that_of_numpy(builds: list[ctypes.CDLL], dtype: str, op: str) -> None:
    shipped, scalar = (kernel(library, dtype, op) for library in builds)
    for nin in NINS:
        terms = inputs(dtype, op, nin)
        want = expected(dtype, op, terms)
        for n in LENGTHS:
            check(shipped, terms, want, n, (None,), misaligned=n % 2)
        check(scalar, terms, want, LONGEST, (None,), misaligned=1)
        check(shipped, terms, want, LONGEST, (None, None), misaligned=1)
        check(shipped, terms, want, 1000, (None, None, None), misaligned=0)
        for j in range(nin):
            check(shipped, terms, want, LONGEST, (j,), misaligned=0)
            check(shipped, terms, want, 1000, (j, None), misaligned=1)
            check(shipped, terms, want, LONGEST, (None, j), misaligned=0)
        check(shipped, terms, want, LONGEST, tuple(range(min(nin, 3)))[::-1], misaligned=1)


@pytest.mark.parametrize("dtype", HALVES)
def test_all_65536_half_values_and_their_sums_in_both_builds(builds: list[ctypes.CDLL], dtype: str) -> None:
    every = np.arange(65536, dtype=np.uint16)
    partners = [np.random.default_rng(seed).permutation(every) for seed in range(6)]
    for library in builds:
        for terms in ([every], [every, partners[0]], [every, *partners]):
            got = np.empty_like(every)
            reduce(kernel(library, dtype, "sum"), [got], terms, every.size)
            np.testing.assert_array_equal(got, expected(dtype, "sum", terms))


def test_half_precision_is_rounded_once_after_a_thousand_inputs(builds: list[ctypes.CDLL]) -> None:
    # In bfloat16 256 + 1 is 256, in float16 2048 + 1 is 2048: rounding at every step would never leave them.
    ones = {"bf16": (0x3F80, 0x447A), "f16": (0x3C00, 0x63D0)}
    for dtype, (one, thousand) in ones.items():
        terms = [np.full(9, one, np.uint16)] * 1000
        got = np.empty(9, np.uint16)
        reduce(kernel(builds[0], dtype, "sum"), [got], terms, 9)
        assert (got == thousand).all()
        reduce(kernel(builds[0], dtype, "avg"), [got], terms, 9)
        assert (got == one).all()


def test_a_sum_is_taken_strictly_in_order(builds: list[ctypes.CDLL]) -> None:
    # 1 is lost beside 2^24 in float32, but not beside what two large numbers of opposite sign leave.
    large, one = np.full(100, 2.0**24, np.float32), np.ones(100, np.float32)
    for terms, value in (([large, one, -large, one, one], 2.0), ([large, -large, one, one, one], 3.0)):
        got = np.empty_like(one)
        reduce(kernel(builds[0], "f32", "sum"), [got], terms, 100)
        assert (got == value).all()


def test_a_nan_and_infinities_come_through(builds: list[ctypes.CDLL]) -> None:
    x = np.array([np.nan, 1.0, np.inf, np.inf, -np.inf, -0.0, 0.0], np.float32)
    y = np.array([1.0, np.nan, 1.0, -np.inf, -np.inf, 0.0, -0.0], np.float32)
    wanted = {
        "sum": [np.nan, np.nan, np.inf, np.nan, -np.inf, 0.0, 0.0],
        "min": [np.nan, np.nan, 1.0, -np.inf, -np.inf, -0.0, 0.0],
        "max": [np.nan, np.nan, np.inf, np.inf, -np.inf, -0.0, 0.0],
    }
    for op, values in wanted.items():
        got = np.empty_like(x)
        reduce(kernel(builds[0], "f32", op), [got], [x, y], x.size)
        assert got.tobytes() == np.array(values, np.float32).tobytes(), op


def test_what_has_no_meaning_has_no_kernel(builds: list[ctypes.CDLL]) -> None:
    offered = {
        (dtype, op) for i, dtype in enumerate(DTYPES) for j, op in enumerate(REDOPS) if builds[0].phx_kernel(i, j) is not None
    }
    assert offered == set(SUPPORTED)
    for i, j in ((-1, 0), (0, -1), (len(DTYPES), 0), (0, len(REDOPS))):
        assert builds[0].phx_kernel(i, j) is None


def test_item_sizes(builds: list[ctypes.CDLL]) -> None:
    sizes = [builds[0].phx_itemsize(i) for i in range(-1, len(DTYPES) + 1)]
    assert sizes == [0, *(np.dtype(stored).itemsize for stored in DTYPES.values()), 0]


@pytest.mark.parametrize("streaming", [0, 1])
def test_a_copy_moves_its_bytes_and_no_others(builds: list[ctypes.CDLL], streaming: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, (1 << 20) + 512, dtype=np.uint8)
    cases = [(size, to, size * 7 % 64) for size in range(301) for to in (0, 1, 15, 16, 33, 63)]
    cases += [(200, to, start) for to in range(64) for start in range(0, 64, 7)] + [(1 << 20, 3, 5), (1 << 20, 0, 0)]
    for size, to, start in cases:
        memory = np.full(size + 256, GUARD, np.uint8)
        to += -memory.ctypes.data % 64
        want = memory.copy()
        want[to : to + size] = source[start : start + size]
        builds[0].phx_copy(memory.ctypes.data + to, source.ctypes.data + start, size, streaming)
        assert np.array_equal(memory, want), f"{size} bytes from offset {start} to offset {to}"
