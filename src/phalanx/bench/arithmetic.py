"""How fast one rank multiplies matrices, by dtype: the most that any square size reaches, as training's products come near it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)
SIZES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192, 16384)}


def arithmetic(device: torch.device, seconds: float, repeats: int) -> dict[str, float]:
    """Multiplications and additions per second, 2n³ of a product, by dtype; dtypes that torch cannot multiply are left out.

    `seconds` is the longest that one product may be expected to take: sizes grow until it would.
    """
    rates = {dtype: rate(dtype, device, seconds, repeats) for dtype in DTYPES}
    return {str(dtype).removeprefix("torch."): found for dtype, found in rates.items() if found is not None}


def rate(dtype: torch.dtype, device: torch.device, seconds: float, repeats: int) -> float | None:
    """The best rate of one dtype over sizes, each the median of its repeats."""
    best: float | None = None
    for n in SIZES[device.type]:
        if best is not None and 2 * n**3 / best > seconds:
            break
        product = matmul(n, dtype, device)
        try:
            taken = timed(product, device, repeats)
        except (RuntimeError, NotImplementedError) as error:
            if "out of memory" in str(error):
                break
            return best  # this dtype has no product here
        best = max(best or 0.0, 2 * n**3 / taken)
    return best


def matmul(n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A product of two n × n matrices; of int8 it is summed in int32."""
    if dtype is torch.int8:
        a, b = (torch.randint(-8, 8, (n, n), dtype=dtype, device=device) for _ in range(2))
        return lambda: torch._int_mm(a, b)
    x, y = (torch.rand(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, dtype=dtype, device=device)
    return lambda: torch.mm(x, y, out=out)


def timed(work: Callable[[], object], device: torch.device, repeats: int, *, batch: int = 1) -> float:
    """Median seconds of one call among `batch` in a row, after one untimed; on CUDA the device has finished them."""
    work()
    samples = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(batch):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append((time.perf_counter() - start) / batch)
    return statistics.median(samples)
