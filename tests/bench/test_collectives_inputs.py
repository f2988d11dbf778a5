"""Inputs are exact in any order of summation, and the expected results are those of collectives written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.bench.busbw import OPS
from phalanx.bench.inputs import PERIOD, TORCH_DTYPES, UNWRITTEN, expected, fill_inputs, wrong_elements
from phalanx.bench.sweep import Case

N, COUNT = 5, 2 * PERIOD + 7  # longer than the period, and not a multiple of it


def a_case(op: str, dtype: str = "float", redop: str = "sum", count: int = COUNT) -> Case:
    what = OPS[op]
    return Case(op, 0, count, dtype, redop if what.reduces else "none", 3 if what.rooted else -1, N, "gloo", "cold")


def inputs(case: Case) -> list[Tensor]:
    """What every rank sends."""
    sends = []
    for rank in range(N):
        blocks = N if OPS[case.op].sends == "n" else 1
        send = torch.empty(blocks * case.count, dtype=TORCH_DTYPES[case.dtype])
        fill_inputs(case, rank, send, torch.empty(0, dtype=send.dtype))
        sends.append(send)
    return sends


def block(x: Tensor, at: int, case: Case) -> Tensor:
    return x[at * case.count : (at + 1) * case.count]


def by_hand(case: Case, rank: int, sends: list[Tensor], order: list[int]) -> Tensor | None:
    """The collective, one element-wise operation after the other in the dtype itself and in the given order of ranks."""
    if case.op in ("reduce", "gather") and rank != 3:
        return None
    match case.op:
        case "all_reduce" | "reduce":
            return one_by_one([sends[r] for r in order], case.redop)
        case "reduce_scatter":
            return one_by_one([block(sends[r], rank, case) for r in order], case.redop)
        case "all_gather" | "gather":
            return torch.cat(sends)
        case "all_to_all":
            return torch.cat([block(sends[r], rank, case) for r in range(N)])
        case "broadcast":
            return sends[3]
        case "scatter":
            return block(sends[3], rank, case)
    assert case.op == "sendrecv"
    return sends[rank - 1]


def one_by_one(parts: list[Tensor], redop: str) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        match redop:
            case "sum" | "avg":
                total += part
            case "prod":
                total *= part
            case "min":
                total = torch.minimum(total, part)
            case "max":
                total = torch.maximum(total, part)
    return total / N if redop == "avg" else total


@pytest.mark.parametrize("op", OPS)
def test_expected_is_the_collective(op: str) -> None:
    case = a_case(op)
    sends = inputs(case)
    for rank in range(N):
        want, hand = expected(case, rank, sends[0]), by_hand(case, rank, sends, list(range(N)))
        assert (want is None) == (hand is None)
        if want is not None and hand is not None:
            assert torch.equal(want, hand)


@pytest.mark.parametrize(
    ("dtype", "redop"),
    # an average of whole numbers is refused
    [(d, r) for d in TORCH_DTYPES for r in ("sum", "prod", "min", "max", "avg") if r != "avg" or "int" not in d],
)
def test_any_order_gives_the_expected_bits(dtype: str, redop: str) -> None:
    case = a_case("all_reduce", dtype, redop)
    sends = inputs(case)
    want = expected(case, 0, sends[0])
    assert want is not None
    assert want.double().max() > sends[0].double().min() + 1  # they are not all alike
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        hand = by_hand(case, 0, sends, order)
        assert hand is not None and wrong_elements(case, hand, want) == 0


def test_every_wrong_element_is_counted() -> None:
    case = a_case("all_reduce")
    want = expected(case, 0, torch.empty(0))
    assert want is not None
    got = want.clone()
    assert wrong_elements(case, got, want) == 0
    got[3] += 1
    got[COUNT - 1] = float("nan")
    assert wrong_elements(case, got, want) == 2
    assert wrong_elements(case, torch.full_like(want, UNWRITTEN), want) > COUNT * 0.9
    assert wrong_elements(case, want.roll(1024), want) > COUNT * 0.9  # a chunk in the wrong place
    assert wrong_elements(case, got, None) == 0


def test_an_average_may_be_off_by_two_units_in_the_last_place() -> None:
    case = a_case("all_reduce", redop="avg")
    want = expected(case, 0, torch.empty(0))
    assert want is not None
    eps = torch.finfo(torch.float32).eps
    assert wrong_elements(case, want * (1 + eps), want) == 0
    assert wrong_elements(case, want * (1 + 4 * eps), want) > COUNT * 0.5


def test_bfloat16_sums_of_the_most_ranks_are_exact() -> None:
    case = Case("all_reduce", 0, 100, "bfloat16", "sum", -1, 256, "gloo", "cold")
    total = torch.zeros(100, dtype=torch.bfloat16)
    for rank in reversed(range(256)):
        send = torch.empty(100, dtype=torch.bfloat16)
        fill_inputs(case, rank, send, torch.empty(0))
        total += send
    assert wrong_elements(case, total, expected(case, 0, total)) == 0
