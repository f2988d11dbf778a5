"""Three loops in C, compiled when they are first asked for: what a call of torch, at about a microsecond, is too coarse to time.

A chain of loads that each need the one before, a chain of multiply-adds likewise, and copies within a small set. Without a compiler
there are none of these, and what only they can measure is left out.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SOURCE = r"""
#include <stddef.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + 1e-9 * at.tv_nsec;
}

double chase_seconds(const size_t *next, size_t steps, size_t *end) {
    size_t at = *end;
    double start = now();
    for (size_t i = 0; i < steps; i++) at = next[at];
    double stop = now();
    *end = at;
    return stop - start;
}

double multiply_add_seconds(size_t steps, double by, double plus, double *end) {
    double x = *end;
    double start = now();
    for (size_t i = 0; i < steps; i++) x = x * by + plus;
    double stop = now();
    *end = x;
    return stop - start;
}

double copy_seconds(char *to, const char *from, size_t bytes, size_t times) {
    double start = now();
    for (size_t i = 0; i < times; i++) {
        memcpy(to, from, bytes);
        __asm__ volatile("" ::: "memory");
    }
    return now() - start;
}
"""

LINE_BYTES = 64
"""Loads of a chain are a cache line apart, the size of which is this on every CPU that torch supports (128 on some: then two loads
of a chain may share one, in random order)."""


@cache
def loops() -> ctypes.CDLL | None:
    """The compiled loops; None without gcc or if it fails."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="phalanx_native_") as folder:
        source, target = Path(folder, "loops.c"), Path(folder, "loops.so")
        source.write_text(SOURCE)
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(target), str(source)]
        if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode:
            return None
        library = ctypes.CDLL(str(target))  # stays mapped when the folder is gone
    for function in (library.chase_seconds, library.multiply_add_seconds, library.copy_seconds):
        function.restype = ctypes.c_double
    return library


def load_seconds(library: ctypes.CDLL, set_bytes: int, steps: int) -> float:
    """Seconds of one load that needs the one before, within a set of this size, after one pass over it.

    Lines are visited in one random cycle, so no prefetcher knows the next; misses of the TLB are part of it, as they are of life.
    """
    lines = max(set_bytes // LINE_BYTES, 2)
    chain = cycle(lines)
    at = ctypes.c_size_t(0)
    pointer = ctypes.c_void_p(chain.ctypes.data)
    library.chase_seconds(pointer, ctypes.c_size_t(min(lines, steps)), ctypes.byref(at))
    return float(library.chase_seconds(pointer, ctypes.c_size_t(steps), ctypes.byref(at))) / steps


def cycle(lines: int) -> NDArray[np.uintp]:
    """The first word of every line is the index of the next line's; following them visits each line once and comes back."""
    words = LINE_BYTES // np.dtype(np.uintp).itemsize
    order = np.random.default_rng(0).permutation(lines).astype(np.uintp) * words
    chain: NDArray[np.uintp] = np.zeros(lines * words, dtype=np.uintp)
    chain[order] = np.roll(order, -1)
    return chain


def multiply_add_seconds(library: ctypes.CDLL, steps: int) -> float:
    """Seconds of one multiply-add that needs the one before: how long a register's new value is waited for."""
    end = ctypes.c_double(1.0)
    taken: float = library.multiply_add_seconds(
        ctypes.c_size_t(steps), ctypes.c_double(0.5), ctypes.c_double(0.25), ctypes.byref(end)
    )
    return taken / steps


def copy_seconds(library: ctypes.CDLL, set_bytes: int, times: int) -> float:
    """Seconds of one copy from one half of a set to the other, on one core, after one copy."""
    half = max(set_bytes // 2, 1)
    buffer = np.ones(2 * half, dtype=np.uint8)
    to, source = ctypes.c_void_p(buffer.ctypes.data + half), ctypes.c_void_p(buffer.ctypes.data)
    library.copy_seconds(to, source, ctypes.c_size_t(half), ctypes.c_size_t(1))
    return float(library.copy_seconds(to, source, ctypes.c_size_t(half), ctypes.c_size_t(times))) / times
