"""The formulas of nccl-tests, against values computed by hand."""

from __future__ import annotations

import pytest

from phalanx.bench.busbw import OPS, actual_size, bandwidths, count, smallest_size
from phalanx.bench.results import Samples


@pytest.mark.parametrize(
    ("op", "two", "four", "eight"),
    [
        ("all_reduce", 1.0, 1.5, 1.75),
        ("all_gather", 0.5, 0.75, 0.875),
        ("reduce_scatter", 0.5, 0.75, 0.875),
        ("all_to_all", 0.5, 0.75, 0.875),
        ("gather", 0.5, 0.75, 0.875),
        ("scatter", 0.5, 0.75, 0.875),
        ("broadcast", 1.0, 1.0, 1.0),
        ("reduce", 1.0, 1.0, 1.0),
        ("sendrecv", 1.0, 1.0, 1.0),
    ],
)
def test_busbw_over_algbw(op: str, two: float, four: float, eight: float) -> None:
    # 4 GB in 2 s are 2 GB/s, and a GB is 1e9 bytes
    assert [bandwidths(op, 4_000_000_000, 2.0, n) for n in (2, 4, 8)] == [(2.0, 2 * f) for f in (two, four, eight)]


def test_every_operation_has_a_factor() -> None:
    assert all(op.factor(2) > 0 for op in OPS.values()) and len(OPS) == 9


def test_size_is_the_larger_of_what_is_sent_and_received() -> None:
    # 1000 bytes are 250 floats; a third of them is 83, in pieces of 16 bytes 80
    assert count("all_reduce", 1000, 3, 4) == 250
    assert actual_size("all_reduce", 250, 3, 4) == 1000
    for op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        assert count(op, 1000, 3, 4) == 80
        assert actual_size(op, 80, 3, 4) == 960
    assert count("all_gather", 1000, 3, 2) == 160  # 166 halves in pieces of 8
    assert count("sendrecv", 1002, 3, 4) == 250


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("element", [1, 2, 4, 8])
def test_the_smallest_size_is_the_smallest(op: str, element: int) -> None:
    least = smallest_size(op, 3, element)
    assert count(op, least, 3, element) > 0 == count(op, least - 1, 3, element)


def test_the_slowest_rank_of_each_iteration_counts() -> None:
    samples = Samples(((1.0, 5.0, 2.0, 1.0, 1.0), (2.0, 1.0, 4.0, 3.0, 9.0)))
    assert samples.slowest == (2.0, 5.0, 4.0, 3.0, 9.0)
    assert samples.quantile(0.5) == 4.0
    assert samples.quantile(0.95) == 9.0
    assert samples.quantile(0.25) == 3.0
    assert samples.spread == (5.0 - 3.0) / 4.0


def test_the_95th_of_a_hundred() -> None:
    samples = Samples((tuple(float(i) for i in range(100, 0, -1)),))
    assert samples.quantile(0.95) == 95.0
    assert samples.quantile(0.5) == 50.5
