"""Rings survive their process, say what was written, and cost what a record costs; boards show who disagrees."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
from pathlib import Path

import pytest

from phalanx.cli.doctor import run as doctor
from phalanx.comm.watch import ring as rings
from phalanx.comm.watch.board import Board
from phalanx.comm.watch.collect import ring_path, with_life
from phalanx.comm.watch.ring import GROUP, OP, Ring, group_text
from phalanx.comm.watch.sites import Sites
from phalanx.comm.watch.snapshot import Site, latest, parse
from phalanx.comm.watch.source import guard, is_store_wait

HERE = Path(__file__).parent


def new_ring(folder: Path, rank: int = 0) -> tuple[Ring, int]:
    path = ring_path(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    ring = Ring(path, "job", rank, 2, "host")
    return ring, ring.text(GROUP, group_text("w", "dp", [3, 7], "cpu"))


def record(ring: Ring, group: int, seq: int, op: str = "all_reduce", site: int = 0, waits: bool = True) -> int:
    return ring.record(OP[op], group, seq, rings.DTYPES.index("float32"), 10, 0, 1, 5, site, waits)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    ring, group = new_ring(tmp_path)
    site = Sites(lambda text: ring.text(rings.SITE, text)).here(0)
    done, failed, waiting = (record(ring, group, seq, site=site) for seq in (1, 2, 3))
    issued = record(ring, group, 4, "send", waits=False)
    ring.end(done)
    ring.fail(failed)
    ring.write_area("reason", "why")
    view = parse(ring.path.read_bytes())
    assert [op.number for op in view.ops] == [done, failed, waiting, issued]
    first = view.ops[0]
    assert (first.op, first.group, first.seq, first.dtype, first.elements) == ("all_reduce", "w", 1, "float32", 10)
    assert (first.reduction, first.root, first.tag) == ("sum", 7, 5), "the root is a global rank"
    assert first.site.path == __file__
    assert first.site.function == "test_what_is_written_is_read"
    assert 0 < first.issued == first.waited <= first.ended
    assert [op.is_stuck for op in view.ops] == [False, True, True, False]
    assert view.ops[3].waited == 0
    assert view.groups["w"].ranks == (3, 7)
    assert (view.reason, view.pid, view.life, view.job) == ("why", os.getpid(), "running", "job")
    assert ring.waited_since() == view.ops[2].waited


def test_a_ring_keeps_the_last_records(tmp_path: Path) -> None:
    ring, group = new_ring(tmp_path)
    numbers = [record(ring, group, seq) for seq in range(1, rings.CAPACITY + 101)]
    ring.end(numbers[0])  # overwritten long ago: must not touch the record that is there now
    view = parse(ring.path.read_bytes())
    assert [op.number for op in view.ops] == numbers[100:]
    assert not any(op.ended for op in view.ops)
    assert [op.number for op in parse(latest(ring.bytes(), 8)).ops] == numbers[-8:]


def test_texts_without_room_are_dropped(tmp_path: Path) -> None:
    ring, group = new_ring(tmp_path)
    assert ring.text(rings.SITE, "x" * rings.TEXT_BYTES) == 0
    record(ring, group, 1, site=ring.text(rings.SITE, "a.py:3:f"))
    assert parse(ring.path.read_bytes()).ops[0].site == Site("a.py", 3, "f")


@pytest.mark.parametrize("data", [b"", b"PHXRING1" + bytes(5000), bytes(9000)])
def test_what_is_no_ring_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="flight ring"):
        parse(data)


def test_a_killed_process_leaves_its_ring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 is killed by itself before the second call, rank 0 while it waits there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch.testing", "pytest"])
    processes = [
        context.Process(target=runpy.run_path, args=(str(HERE / "killed.py"), {"JOB": (rank, str(tmp_path))}, "__rank__"))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
        process.join(30)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2
    views = [with_life(parse(ring_path(tmp_path, rank).read_bytes())) for rank in range(2)]
    assert [view.life for view in views] == ["died", "died"]
    assert [[op.seq for op in view.ops] for view in views] == [[1, 2], [1]]
    assert doctor.main([str(tmp_path)]) == doctor.WRONG
    out = capsys.readouterr().out
    assert out.startswith("rank 1 is gone: rank 0 waits in all_reduce(sum) of 10 float32 at killed.py:")
    assert "all_reduce 1 of group 'w', done" in out


def test_the_doctor_of_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no flight rings .*flight"):
        doctor.main([str(tmp_path)])


def test_boards_name_who_disagrees(tmp_path: Path) -> None:
    boards = [Board(tmp_path / "board", 3, rank) for rank in range(3)]
    same = [board.enter(1, 0, 6, 100, 0, -1) for board in boards]
    assert len(set(same)) == 1
    assert [board.disagreeing(1, entry) for board, entry in zip(boards, same, strict=True)] == [[], [], []]
    calls = [(0, 6, 100, 0, -1), (0, 6, 101, 0, -1)]
    first, second = (board.enter(2, *call) for board, call in zip(boards, calls, strict=False))
    assert boards[0].disagreeing(2, first) == [1]
    assert boards[1].disagreeing(2, second) == [0], "rank 2 is still at 1 and is not compared"


@pytest.mark.parametrize(
    "other", [(1, 6, 100, 0, -1), (0, 7, 100, 0, -1), (0, 6, 101, 0, -1), (0, 6, 100, 4, -1), (0, 6, 100, 0, 2)]
)
def test_everything_that_must_agree_is_in_the_entry(other: tuple[int, ...], tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 2, 0)
    assert board.enter(1, 0, 6, 100, 0, -1) != board.enter(1, *other)


def test_the_ends_of_a_message(tmp_path: Path) -> None:
    sender, receiver = (Board(tmp_path / "board", 2, rank) for rank in range(2))
    for seq in range(1, 20):
        sent = sender.enter_message(0, 1, seq, 6, 100)
        assert not sender.message_disagrees(0, 1, seq, sent), "the other end has not come"
        got = receiver.enter_message(0, 1, seq, 6, 100 if seq < 19 else 99)
        assert receiver.message_disagrees(0, 1, seq, got) == (seq == 19)


def test_guards_and_store_waits() -> None:
    lines = [
        "def f(rank):",
        "    if rank == 0:",
        "        if x:",
        "            g()",
        "    else:",
        "        h()",
        "    store.get('k')",
    ]
    sites = {line: guard(Site("a.py", line, "f"), lambda path: lines) for line in (4, 6, 7)}
    assert sites == {4: ("if rank == 0:", 2), 6: ("if rank == 0:", 2), 7: None}
    assert is_store_wait([Site("a.py", 7, "f")], lambda path: lines)
    assert not is_store_wait([Site("a.py", 4, "f")], lambda path: lines)
