"""Opening a group through shared memory: every way to reach memory, and what is said where it cannot be."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("phalanx.comm.shm._core", reason="the compiled core is missing")

from tests.comm.shm.rank_set import Raised, RankSet, rank_set

FILE = Path(__file__).parent / "meeting.py"
LIMIT_SECONDS = 40.0


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankSet]:
    """Three ranks that have met nobody yet."""
    with rank_set(FILE, tmp_path, 3) as started:
        yield started


def ask(ranks: RankSet, *question: object) -> dict[int, Any]:
    answers = ranks.ask(question, LIMIT_SECONDS)
    assert answers.complete, answers.complaint
    return answers.told


@pytest.mark.parametrize("way", ["proc", "socket", "file"])
def test_every_way_works_alone(way: str, ranks: RankSet) -> None:
    assert set(ask(ranks, "through", way).values()) == {"works"}
    assert set(ask(ranks, "through", way).values()) == {"works"}, "and among ranks that know each other"
    assert ask(ranks, "files_of_ours")[0] == []


def test_all_take_the_way_that_serves_everybody(ranks: RankSet) -> None:
    for told in ask(ranks, "without_proc_on_rank_1").values():
        alone, _, both = told.partition(" | ")
        assert alone.startswith("Unavailable") and "through proc, rank 1: cannot map" in alone and "not for you" in alone
        assert both == "works"


def test_a_way_that_does_not_exist(ranks: RankSet) -> None:
    for told in ask(ranks, "through", "pigeon").values():
        assert told.startswith("ValueError") and "'pigeon'; there are proc, socket, file" in told


def test_a_file_may_follow_another_segment(ranks: RankSet) -> None:
    assert set(ask(ranks, "file_after_all").values()) == {"works"}
    assert ask(ranks, "files_of_ours")[0] == []


@pytest.mark.parametrize(
    ("what", "words"), [("boot", "hosts (boot id)"), ("processes", "PID namespaces"), ("user", "users (uid)")]
)
def test_ranks_on_different_hosts_are_named(what: str, words: str, ranks: RankSet) -> None:
    for told in ask(ranks, "on_another_host", what).values():
        assert told.startswith("Unavailable after 0 s"), told
        assert f"ranks 0 and 1 run in different {words}" in told


def test_a_rank_that_does_not_come_is_named(ranks: RankSet) -> None:
    told = ask(ranks, "late", 1.5)
    for rank in (0, 2):
        assert told[rank].startswith("CommError") and "rank 1 did not come within 1.5 s" in told[rank]


def test_a_rank_that_dies_on_the_way_is_named(ranks: RankSet) -> None:
    answers = ranks.ask(("dies",), LIMIT_SECONDS)
    assert isinstance(answers.told[1], Raised) and answers.seconds < 20, answers.complaint
    for rank in (0, 2):
        assert answers.told[rank].startswith("CommError") and "rank 1 died" in answers.told[rank]


def test_one_store_may_serve_one_group_after_another(ranks: RankSet) -> None:
    assert set(ask(ranks, "same_store_again").values()) == {"works"}


def test_ranks_that_know_each_other_open_a_group_in_one_exchange(ranks: RankSet) -> None:
    for first, second in ask(ranks, "traffic").values():
        once = ["set", "wait", "multi_get"]
        assert first == ["add", *once * 3]
        assert second == ["add", *once]


def test_another_pid_namespace_is_refused(tmp_path: Path) -> None:
    """As in containers: the second rank is alone in a namespace, where process numbers mean other processes."""
    alone = ["unshare", "--pid", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("may not make a PID namespace")
    (tmp_path / "store").mkdir()
    started = [
        subprocess.Popen(
            [*prefix, sys.executable, str(FILE), str(rank), "2", str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, prefix in enumerate(([], alone))
    ]  # fmt: skip
    for process in started:
        try:
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        assert said.startswith("Unavailable"), said
        assert "ranks 0 and 1 run in different PID namespaces" in said
