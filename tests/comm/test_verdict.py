"""The verdict is a function of what the ranks recorded: every kind from rings made by hand, and none from rings that are well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.comm.watch.finding import KINDS
from phalanx.comm.watch.leftovers import leftovers
from phalanx.comm.watch.snapshot import GroupView, Op, RankView, Site
from phalanx.comm.watch.verdict import verdict

LINES = ["if rank == 0:", "    all_reduce(x)", "all_reduce(x)", "all_reduce(y)", "store.get('key')"]
WORLD = 3
NOW = 10_000_000_000


def op(name: str, seq: int, line: int = 3, group: str = "w", state: str = "done", **more: object) -> Op:
    """An operation that was issued at second `seq`."""
    waited, ended = {"issued": (0, 0), "waiting": (seq, 0), "done": (seq, seq), "raised": (seq, -seq), "unwaited": (0, seq)}[
        state
    ]
    fields = {"dtype": "float32", "elements": 4, "reduction": "sum" if name == "all_reduce" else ""} | more
    return Op(0, name, group, seq, site=Site("a.py", line, "f"), issued=seq, waited=waited, ended=ended, **fields)


def view(rank: int, *ops: Op, groups: dict[str, tuple[int, ...]] | None = None, **more: object) -> RankView:
    groups = {"w": tuple(range(WORLD))} | (groups or {})
    numbered = tuple(replace(op, number=number) for number, op in enumerate(ops, 1))
    named = {name: GroupView(name, "", ranks) for name, ranks in groups.items()}
    return RankView(rank, WORLD, numbered, named, now=NOW, **more)


def of(*views: RankView, **more: object):
    return verdict({view.rank: view for view in views}, lines=lambda path: LINES, **more)


DONE, WAITS = op("all_reduce", 1), op("all_reduce", 2, state="waiting")
FIRST = op("all_reduce", 1, state="waiting")
TWO = {"a": (0, 1), "b": (0, 1)}


def message(name: str, peer: int, seq: int = 1, state: str = "waiting", **more: object) -> Op:
    return op(name, seq, state=state, root=peer, **more)


# {kind: (views, culprits)}
CASES = {
    "op": ((view(0, WAITS), view(1, op("broadcast", 2, 4, root=0)), view(2, WAITS)), (1,)),
    "size": ((view(0, WAITS), view(1, WAITS), view(2, op("all_reduce", 2, elements=5))), (2,)),
    "dtype": ((view(0, op("all_reduce", 2, dtype="int32")), view(1, WAITS), view(2, WAITS)), (0,)),
    "reduction": ((view(0, op("all_reduce", 2, reduction="max")), view(1, WAITS), view(2, WAITS)), (0,)),
    "root": (tuple(view(rank, op("broadcast", 1, root=min(rank, 1))) for rank in range(3)), (0,)),
    "new_group": (
        tuple(view(rank, op("new_group", 0, group="g"), groups={"g": (1, 2) if rank else (0, 1)}) for rank in range(3)),
        (0, 1, 2),
    ),
    "branch": ((view(0, op("all_reduce", 1, 2, state="waiting")), view(1), view(2)), (1, 2)),
    "message": ((view(0, message("send", 1)), view(1, message("recv", 0, elements=2)), view(2)), (0, 1)),
    "tag": ((view(0, message("send", 1, tag=1)), view(1, message("recv", 0, tag=2)), view(2)), (0, 1)),
    "order": (
        (
            view(0, op("all_reduce", 1, group="a", state="waiting"), groups=TWO),
            view(1, op("all_reduce", 1, group="b", state="waiting"), groups=TWO),
            view(2),
        ),
        (0, 1),
    ),
    "sends": (tuple(view(rank, message("send", (rank + 1) % 3)) for rank in range(3)), (0, 1, 2)),
    "receives": (tuple(view(rank, message("recv", (rank + 1) % 3)) for rank in range(3)), (0, 1, 2)),
    "send": ((view(0, message("send", 1)), view(1, FIRST), view(2, FIRST)), (0, 1)),
    "receive": ((view(0, message("recv", 1)), view(1, FIRST), view(2, FIRST)), (0, 1)),
    "deadlock": ((view(0, message("send", 1)), view(1, message("recv", 2)), view(2, message("send", 0))), (0, 1, 2)),
    "died": ((view(0, DONE, WAITS), view(1, DONE, life="died", reason="killed by SIGKILL"), view(2, DONE, WAITS)), (1,)),
    "uneven": ((view(0, DONE, WAITS), view(1, DONE, life="closed"), view(2, DONE, WAITS)), (1,)),
    "left": ((view(0, WAITS), view(1, WAITS), view(2, life="ended", reason="KeyError: 'x'")), (2,)),
    "destroyed": ((view(0, WAITS), view(1, op("destroy", 0)), view(2, WAITS)), (1,)),
    "missing": ((view(0, WAITS), view(1, WAITS), view(2, DONE, stack=(Site("a.py", 4, "load"),))), (2,)),
    "store": ((view(0, WAITS), view(1, WAITS), view(2, DONE, stack=(Site("a.py", 5, "load"),))), (2,)),
    "raised": ((view(0, WAITS), view(1, op("all_reduce", 2, state="raised"), reason="no"), view(2, WAITS)), (1,)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_kind(kind: str) -> None:
    views, culprits = CASES[kind]
    found = of(*views)
    assert found is not None
    assert (found.kind, found.culprits) == (kind, culprits), found
    assert "\n" not in found.text
    assert "a.py:" in found.text
    assert found.fatal == (kind not in ("missing", "store", "branch"))


def test_a_straggler_is_one_that_has_recorded_something_since() -> None:
    views = (view(0, WAITS), view(1, WAITS), view(2, DONE, op("all_reduce", 7, group="g"), groups={"g": (2,)}))
    assert of(*views).kind == "missing"
    assert of(*views, before={2: view(2, DONE)}).kind == "straggler"
    assert of(*views, before={2: views[2]}).kind == "missing"


def test_leftovers() -> None:
    views = (
        view(0, message("send", 1, 1), message("send", 1, 2), life="closed"),
        view(1, message("recv", 0, 1, state="done"), life="closed"),
        view(2, op("all_reduce", 1, state="unwaited"), life="closed"),
    )
    found = leftovers({view.rank: view for view in views})
    assert [(one.kind, one.culprits, one.at[1]) for one in found] == [("unreceived", (0, 1), 2), ("never waited", (2,), 1)]


def test_every_kind_is_tested() -> None:
    assert set(KINDS) == {*CASES, "straggler", "never waited", "unreceived"}


def test_nothing_is_wrong() -> None:
    everybody = [view(rank, DONE, WAITS) for rank in range(3)]
    assert of(*everybody) is None, "all are there: the operation is slow, not stuck"
    assert of(*[view(rank, DONE) for rank in range(3)]) is None
    pair = view(0, message("send", 1)), view(1, message("recv", 0)), view(2)
    assert of(*pair) is None
    assert of(view(0, message("send", 1, state="issued")), view(1), view(2)) is None, "nobody waits for it yet"


def test_patience() -> None:
    views = (view(0, WAITS), view(1, DONE), view(2, DONE))
    assert of(*views, patience=11.0) is None
    assert of(*views, patience=9.0).culprits == (1, 2)


def test_the_end_of_the_chain_is_to_blame_not_who_waits() -> None:
    """Rank 0 waits for 1, which waits in another group for 2, which waits for nobody."""
    waits = replace(op("all_reduce", 1, 4, group="g", state="waiting"), waited=3)
    views = (view(0, WAITS), view(1, DONE, waits, groups={"g": (1, 2)}), view(2, WAITS, groups={"g": (1, 2)}))
    assert of(*views).kind == "order"
    found = of(views[0], views[1], view(2, op("all_reduce", 2), groups={"g": (1, 2)}))
    assert (found.kind, found.culprits) == ("missing", (2,))
    assert "and behind them rank 0" in found.text


def test_of_two_dead_the_one_that_did_not_give_up_is_named() -> None:
    told = view(0, DONE, op("all_reduce", 2, state="raised"), life="died", verdict="rank 1 is gone")
    found = of(told, view(1, DONE, life="died"), view(2, DONE, WAITS))
    assert (found.kind, found.culprits) == ("died", (1,))
