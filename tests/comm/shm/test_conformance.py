"""The CPU part of PyTorch's own process group suite passes over shared memory, sub-groups of four ranks included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import phalanx.shm

pytest.importorskip("expecttest", reason="PyTorch's own test classes need it")

from .conformance import runner, skips

pytestmark = pytest.mark.skipif(phalanx.shm.available() is not None, reason=str(phalanx.shm.available()))


def assert_all_pass(tests: Sequence[str], folder: Path) -> None:
    results = list(runner.run("shm", tests, folder))
    assert [result.name for result in results] == list(tests)
    wrong = [str(result) for result in results if result.outcome != "passed"]
    assert not wrong, f"{len(wrong)} of {len(tests)} stock tests do not pass over shm\n" + "\n\n".join(wrong)


@pytest.mark.timeout(300)
def test_a_chosen_part_of_the_suite(tmp_path: Path) -> None:
    assert_all_pass(skips.CHOSEN, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_whole_suite(tmp_path: Path) -> None:
    names = runner.names("shm", tmp_path)
    skipped = skips.reasons("shm")
    if torch.__version__ >= "2.13":  # the lists are of this version; earlier ones have fewer tests
        unknown = set(skipped) - set(names)
        assert not unknown, f"skipped, but not in the suite: {sorted(unknown)}"
    tests = [name for name in names if name not in skipped]
    assert len(tests) > 200, "the suite was not read as a whole"
    assert_all_pass(tests, tmp_path)


@pytest.mark.timeout(180)
def test_a_failure_and_a_hang_are_named_and_the_next_test_goes_on(tmp_path: Path) -> None:
    """Of the three, gloo's rank 0 waits in vain for an all_to_all of lists it does not support, and a limit is too short."""
    results = list(runner.run("gloo", ["test_all_to_all", "test_barrier_timeout_group", "test_get_rank"], tmp_path, limit=2.0))
    assert [(result.name, result.outcome) for result in results] == [
        ("test_all_to_all", "failed"),
        ("test_barrier_timeout_group", "hung"),
        ("test_get_rank", "passed"),
    ]
    assert "invalid tensor size" in results[0].text
    assert "_test_barrier_timeout" in results[1].text
