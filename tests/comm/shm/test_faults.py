"""Ranks of the shm backend that err, die or leave: every survivor is told, by name, soon, and what else works goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("phalanx.comm.shm._core", reason="the compiled core is missing")

from tests.comm.shm.rank_set import Raised, RankSet, rank_set

HERE = Path(__file__).parent
FILE = HERE / "faulty.py"
LIMIT_SECONDS = 40.0
SOON = 5.0
"""Seconds: a busy machine may take that long to run a rank at all; the timeouts of the groups are 30 and more."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankSet]:
    """Three ranks, for everything that all of them survive."""
    with rank_set(FILE, tmp_path_factory.mktemp("faults"), 3) as started:
        yield started


def ask(ranks: RankSet, *question: object) -> dict[int, Any]:
    answers = ranks.ask(question, LIMIT_SECONDS)
    assert answers.complete, answers.complaint
    return answers.told


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("kind", "call", "other"),
    [
        ("operation", "all_reduce(sum) of 4 float32", "broadcast"),
        ("size", "all_reduce(sum) of 4 float32", "all_reduce(sum) of 5 float32"),
        ("dtype", "all_reduce(sum) of 4 float32", "all_reduce(sum) of 4 int32"),
        ("reduction", "all_reduce(sum) of 4 float32", "all_reduce(max) of 4 float32"),
        ("root", "broadcast of 4 float32 with root 0", "broadcast of 4 float32 with root 1"),
        ("barrier", "all_reduce(sum) of 4 float32", "barrier"),
        ("splits", "rank 1 sends 8 bytes to rank 0", "which expects 4"),
        ("large size", "all_reduce(sum) of 300001 float32", "all_reduce(sum) of 300002 float32"),
    ],
)
def test_calls_that_differ_are_both_shown_to_all(kind: str, call: str, other: str, later: bool, ranks: RankSet) -> None:
    for told in ask(ranks, "mismatch", kind, later).values():
        text, seconds = told["first"]
        assert call in text and other in text, text
        assert text.count("faulty.py:") >= 2, f"both places are named: {text}"
        assert "rank 0" in text and "rank 1" in text
        assert seconds < SOON
        assert told["again"][0] == "nothing", "no byte was moved, so the group goes on"
        assert told["world"] == 3.0


def test_a_failed_work_says_so_in_every_way(ranks: RankSet) -> None:
    for told in ask(ranks, "failed_work").values():
        assert told["success"] is False
        assert "all_reduce(sum) of 5 float32" in told["exception"]
        assert "all_reduce(sum) of 5 float32" in told["future"]


@pytest.mark.parametrize(
    "how", ["all_reduce", "large all_reduce", "asynchronous", "barrier", "recv", "recv from anybody", "send"]
)
def test_a_killed_rank_is_named_by_every_survivor(how: str, tmp_path: Path) -> None:
    last = 1 if how == "recv from anybody" else 2  # with three ranks the message might still come from the third
    with rank_set(FILE, tmp_path, last + 1) as ranks:
        answers = ranks.ask(("killed", how), LIMIT_SECONDS)
        assert not answers.late, answers.complaint
        assert isinstance(answers.told[last], Raised)
        for rank in range(last):
            text, seconds = answers.told[rank]
            assert f"rank {last}" in text and "died" in text, text
            assert seconds < SOON


def test_a_timeout_names_who_did_not_come(ranks: RankSet) -> None:
    told = ask(ranks, "missing", 0.5)
    for rank in (0, 2):
        text, seconds = told[rank]
        assert "rank 1" in text and "0.5" in text, text
        assert 0.5 <= seconds < 0.5 + SOON


def test_a_wait_that_ends_early_leaves_the_operation_in_flight(ranks: RankSet) -> None:
    told = ask(ranks, "wait_that_ends_early")
    assert told[0]["early"][0] != "nothing" and told[0]["early"][1] >= 0.2
    assert told[0]["pending"]
    assert [told[rank]["sum"] for rank in range(3)] == [6.0, 6.0, 6.0]


@pytest.mark.parametrize("count", [10, 300_001], ids=["small", "large"])
def test_a_message_of_another_size_hurts_no_other(count: int, ranks: RankSet) -> None:
    told = ask(ranks, "wrong_message", count)
    received, sent = told[1]["received"], told[0]["sent"]
    assert [text == "nothing" for text, _ in received] == [True, False, True], received
    assert str(4 * count) in received[1][0] and str(4 * count + 4) in received[1][0]
    assert [told[1]["values"][i] for i in (0, 2)] == [0.0, 2.0]
    assert sent[0][0] == sent[2][0] == "nothing", sent
    if count > 10:
        assert "rank 1" in sent[1][0], sent


def test_a_group_may_be_destroyed_with_work_in_flight(ranks: RankSet) -> None:
    told = ask(ranks, "destroyed")
    assert told[0][0] != "nothing"
    for rank in (1, 2):
        assert "rank 0" in told[rank][0] and told[rank][1] < SOON, told[rank]


def test_an_abort_reaches_every_rank(ranks: RankSet) -> None:
    told = ask(ranks, "aborted")
    for rank in (0, 2):
        for text, seconds in told[rank].values():
            assert "rank 1 aborted the group" in text and seconds < SOON
    assert told[1]["call"][0] != "nothing"


def test_an_interrupt_ends_a_wait(ranks: RankSet) -> None:
    told = ask(ranks, "interrupted")
    assert told[0]["interrupted"] and told[0]["seconds"] < SOON
    for rank in (1, 2):
        assert "interrupted" in told[rank]["call"][0] and told[rank]["call"][1] < SOON, told[rank]


def test_a_forked_child_can_do_no_harm(ranks: RankSet) -> None:
    for rank, told in ask(ranks, "forked").items():
        refusals = told["child"][:-1]
        assert len(refusals) == (2 if rank == 0 else 1)
        assert all("is a fork of the rank" in text and "spawn or forkserver" in text for text in refusals)
        assert told["child"][-1] == "own memory True"
        assert told["status"] == 0 and told["world"] == 3.0


def test_the_interpreter_may_exit_with_work_in_flight(tmp_path: Path) -> None:
    """Both ranks wait for nothing; one has what the other never answers. Nothing hangs, crashes or complains."""
    code = (
        "import sys, time, torch, torch.distributed as dist, phalanx.shm\n"
        "rank = int(sys.argv[1])\n"
        "dist.init_process_group('shm', store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)\n"
        "works = [dist.all_reduce(torch.ones(300000), async_op=True) for _ in range(3)]\n"
        "future = dist.all_reduce(torch.ones(10, 10).t()[::2], async_op=True).get_future()\n"
        "kept = rank == 0 and dist.isend(torch.ones(300000), 1)\n"
        "del works[0]\n"
        "x = torch.zeros(5)\n"
        "rank == 1 and dist.irecv(x, 0, tag=7)\n"
        "rank == 0 and dist.all_reduce(torch.ones(300000), async_op=True)\n"
        "print('end', time.monotonic())\n"
    )
    source = str(HERE.parents[2] / "src")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": source},
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in started:
        try:
            said, complained = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0, complained
        word, _, moment = said.partition(" ")
        assert word == "end" and time.monotonic() - float(moment) < 8, "the exit waits for what never comes"
        assert "Traceback" not in complained and "Exception" not in complained, complained
