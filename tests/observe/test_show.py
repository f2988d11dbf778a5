"""`phalanx show`: what the transport left on every rank is what the definitions say, and the picture says the same."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from phalanx.cli import main
from phalanx.comm.collectives import PAIRS
from phalanx.comm.signature import REDUCE_OPS
from phalanx.observe.demonstrate import Shown, demonstrate
from phalanx.observe.picture import picture
from phalanx.observe.show import DTYPES, KINDS, OPS, Case, complete, numbers

N = 4


def shown(collective: str, **choices: object) -> Shown:
    return demonstrate(Case(collective=collective, **choices))  # type: ignore[arg-type]


def inputs(size: int, ranks: int = N) -> list[list[float]]:
    return [[10 * (rank + 1) + i for i in range(size)] for rank in range(ranks)]


def columnwise(op: str, rows: list[list[float]]) -> list[float]:
    combine = {"sum": sum, "mean": lambda column: sum(column) / len(column), "min": min, "max": max}[op]
    return [combine(column) for column in zip(*rows, strict=True)]


def edges(seen: Shown) -> set[tuple[int, int, int, int]]:
    return {(flow.source, flow.piece, flow.target, flow.place) for flow in seen.flows}


@pytest.mark.parametrize("op", REDUCE_OPS)
def test_reductions(op: str) -> None:
    rows = inputs(4)
    total = columnwise(op, rows)
    everywhere = {(s, 0, t, 0) for s in range(N) for t in range(N)}
    seen = shown("all_reduce", op=op)
    assert (seen.before, seen.after, edges(seen)) == (rows, [total] * N, everywhere)
    seen = shown("reduce", op=op, root=2)
    assert (seen.before, seen.after) == (rows, [None, None, total, None])
    assert edges(seen) == {(s, 0, 2, 0) for s in range(N)}
    seen = shown("reduce_scatter", op=op, size=8)
    total = columnwise(op, inputs(8))
    assert (seen.before, seen.after) == (inputs(8), [total[2 * r : 2 * r + 2] for r in range(N)])
    assert edges(seen) == {(s, t, t, 0) for s in range(N) for t in range(N)}


def test_what_only_moves() -> None:
    rows = inputs(2)
    joined = [value for row in rows for value in row]
    seen = shown("all_gather")
    assert (seen.before, seen.after) == (rows, [joined] * N)
    assert edges(seen) == {(s, 0, t, s) for s in range(N) for t in range(N)}
    seen = shown("gather", root=1)
    assert (seen.before, seen.after) == (rows, [None, joined, None, None])
    assert edges(seen) == {(s, 0, 1, s) for s in range(N)}
    seen = shown("scatter", root=3, size=8)
    mine = inputs(8)[3]
    assert (seen.before, seen.after) == ([None, None, None, mine], [mine[2 * r : 2 * r + 2] for r in range(N)])
    assert edges(seen) == {(3, t, t, 0) for t in range(N)}
    seen = shown("all_to_all")
    assert seen.after == [[row[r] for row in inputs(4)] for r in range(N)]
    assert edges(seen) == {(s, t, t, s) for s in range(N) for t in range(N)}
    seen = shown("broadcast", root=2)
    assert seen.after == [inputs(4)[2]] * N
    assert edges(seen) == {(2, 0, t, 0) for t in range(N)}
    seen = shown("send", root=3)
    assert seen.after == [inputs(4)[s] for s in (3, 1, 2, 3)]
    assert edges(seen) == {(3, 0, 0, 0), (1, 0, 1, 0), (2, 0, 2, 0), (3, 0, 3, 0)}


def test_a_barrier_knows_afterwards_that_all_have_arrived() -> None:
    seen = shown("barrier", ranks=3)
    assert seen.before == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert seen.after == [[1, 1, 1]] * 3
    assert seen.flows == []


def test_the_numbers_come_from_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport that loses rank 1's term is shown as it is, in the numbers and in the flow."""
    from phalanx.comm import threads

    honest = threads.reduced
    monkeypatch.setattr(threads, "reduced", lambda terms, op: honest([terms[0], *terms[2:]], op))
    seen = shown("all_reduce")
    assert seen.after == [columnwise("sum", [row for r, row in enumerate(inputs(4)) if r != 1])] * N
    assert 1 not in {flow.source for flow in seen.flows}


# (collective, bytes sent and received at rank 0 if all goes straight, least) of 4 ranks with the default sizes in float32,
# by hand: all_reduce 3 × 16 B and 2 · 3/4 · 16 B; all_gather 3 × 8 B and 3/4 · 32 B; the root is rank 0.
BYTES = [
    ("all_reduce", 48, 48, 24),
    ("all_gather", 24, 24, 24),
    ("reduce_scatter", 12, 12, 12),
    ("all_to_all", 12, 12, 12),
    ("broadcast", 48, 0, 16),
    ("reduce", 0, 48, 16),
    ("gather", 0, 24, 24),
    ("scatter", 12, 0, 12),
    ("send", 16, 0, 16),
    ("barrier", 0, 0, 0),
]


@pytest.mark.parametrize(("collective", "sent", "received", "least"), BYTES)
def test_bytes(collective: str, sent: int, received: int, least: int) -> None:
    seen = shown(collective)
    assert (seen.sent(0), seen.received(0), seen.least) == (sent, received, least)
    assert sum(map(seen.sent, range(N))) == sum(map(seen.received, range(N)))


def test_backwards_are_the_pairs_of_the_table() -> None:
    assert {row[0] for row in BYTES} == set(KINDS)
    for collective in KINDS:
        pairs = {b.pair: b.collective for b in shown(collective).backwards}
        expected = {pair: back for pair, (forward, back) in PAIRS.items() if forward == collective}
        assert pairs == ({"": "send"} if collective == "send" else expected)


def test_gradients() -> None:
    (reduce,) = shown("all_reduce").backwards
    assert reduce.before == reduce.after == [inputs(4)[0]] * N
    gather, gather_vary = shown("all_gather").backwards
    assert gather.before == [inputs(8)[0]] * N
    assert gather.after == [inputs(8)[0][2 * r : 2 * r + 2] for r in range(N)]
    total = columnwise("sum", inputs(8))
    assert gather_vary.before == inputs(8)
    assert gather_vary.after == [total[2 * r : 2 * r + 2] for r in range(N)]
    (scatter,) = shown("reduce_scatter").backwards
    assert (scatter.before, scatter.after) == (inputs(1), [[10, 20, 30, 40]] * N)
    (exchange,) = shown("all_to_all").backwards
    assert exchange.after == [[row[r] for row in exchange.before if row is not None] for r in range(N)]
    (send,) = shown("send", root=1).backwards
    assert (send.before, send.after) == ([None, None, inputs(4)[2], None], [None, inputs(4)[2], None, None])


@pytest.mark.parametrize(
    ("choices", "note"),
    [
        ({"op": "max"}, "gradients are defined for the sum"),
        ({"dtype": "int64"}, "int64 has no gradient"),
        ({"dtype": "bfloat16", "ranks": 8, "size": 3}, "only up to 256"),
    ],
)
def test_notes(choices: dict[str, object], note: str) -> None:
    assert any(note in line for line in shown("all_reduce", **choices).notes)
    assert not any(note in line for line in shown("all_reduce").notes)


def test_half_precision_is_shown_as_it_rounds() -> None:
    # 10 + 20 + ... + 80 + 8 i = 360 + 8 i: bfloat16 has only even numbers there, which these are; the sum for i = 1 with
    # 9 ranks, 450 + 9, is odd and goes to the even neighbour 460.
    assert shown("all_reduce", dtype="bfloat16", ranks=9, size=2).after[0] == [450, 460]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["all_redce"], "there is no collective 'all_redce'; did you mean 'all_reduce'?"),
        (["xyz"], "there is no collective 'xyz'; there are all_reduce, all_gather"),
        (["all_reduce", "--ranks", "1"], "a collective on 1 rank moves nothing; use --ranks 2 or more"),
        (["all_reduce", "--ranks", "17"], "17 ranks are too many to read; use --ranks 16 or fewer"),
        (["all_to_all", "--size", "6"], "all_to_all cuts --size 6 into 4 equal slices, which leaves 2; try --size 8"),
        (["all_reduce", "--size", "0"], "--size is 0"),
        (["all_gather", "--size", "17"], "all_gather of --size 17 has a tensor of 68 elements; more than 64"),
        (
            ["all_gather", "--op", "sum"],
            "all_gather reduces nothing, so --op sum means nothing; all_reduce, reduce_scatter, reduce",
        ),
        (["all_reduce", "--root", "1"], "all_reduce has no root, so --root 1 means nothing; broadcast, reduce"),
        (["broadcast", "--root", "4"], "--root 4 is not one of the ranks 0 to 3"),
        (["all_reduce", "--dtype", "float8"], "--dtype 'float8' is none of float64"),
        (["all_reduce", "--dtype", "int32", "--op", "mean"], "the mean of int32 would round"),
        (["all_reduce", "--dtype", "uint8", "--ranks", "8"], "the numbers would reach 384, but uint8 ends at 255"),
        (["barrier", "--size", "4"], "a barrier has no tensor, so --size 4 means nothing"),
    ],
)
def test_a_mistake_is_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"phalanx: {message}")
    assert err.count("\n") == 1


def test_the_tables_know_what_the_transport_knows() -> None:
    import torch

    assert OPS == REDUCE_OPS
    for name, number in DTYPES.items():
        dtype = getattr(torch, name)
        assert dtype.is_floating_point == number.floating
        if number.floating:
            assert torch.tensor([number.exact_to, number.exact_to + 1], dtype=dtype).double().tolist() == [number.exact_to] * 2
        else:
            assert torch.iinfo(dtype).max == number.exact_to


def test_every_case_completes_to_itself() -> None:
    for collective in KINDS:
        case = complete(Case(collective=collective))
        assert complete(case) == case


def test_the_first_digits_name_the_rank() -> None:
    assert numbers(2, 10) == list(range(30, 40))
    assert numbers(2, 11) == list(range(300, 311))
    assert numbers(15, 1) == [160]


def drawn(seen: Shown, width: int = 120) -> str:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(picture(seen))
    return capture.get()


def test_the_picture() -> None:
    lines = [line.rstrip() for line in drawn(shown("all_to_all", ranks=2)).splitlines()]
    assert lines[:13] == [
        "all_to_all on 2 ranks, float32: slice i of every rank goes to rank i",
        "",
        "        before   after",
        "rank 0  10 | 11  10 | 20",
        "rank 1  20 | 21  11 | 21",
        "",
        "who gets what  from 0  from 1  receives",
        "rank 0         (0→0)    0→1         4 B",
        "rank 1          1→0    (1→1)        4 B",
        "sends           4 B     4 B",
        "i→j: slice i of the sender becomes slice j of the receiver; (in brackets): its own, not sent; .: nothing",
        "sent straight: 4 B at the busiest rank; the best algorithms need 4 B",
        "",
    ]
    assert all(drawn(shown(collective)) for collective in KINDS)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "broadcast", "--ranks", "2", "--size", "1", "--root", "1", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["before"], seen["after"]) == ([[10], [20]], [[20], [20]])
    assert seen["bytes"] == [{"rank": 0, "sent": 0, "received": 4}, {"rank": 1, "sent": 4, "received": 0}]
    assert {"source": 1, "piece": 0, "target": 0, "place": 0, "bytes": 4} in seen["flows"]
    assert seen["case"]["root"] == 1
