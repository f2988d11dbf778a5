"""No hang and no wrong result in random programs over shared memory, and whoever dies is named by everybody within a second."""

from __future__ import annotations

from pathlib import Path

import pytest

import phalanx.shm

from . import soak
from .soak_program import GROUPS, KINDS, program

pytestmark = pytest.mark.skipif(phalanx.shm.available() is not None, reason=str(phalanx.shm.available()))

# Of a nightly soak: 10,000 operations as ten programs, and forty ends. A tenth of both at every change.
PROGRAMS = [pytest.param(seed, marks=pytest.mark.nightly if seed else ()) for seed in range(10)]
ENDS = [pytest.param(seed, marks=pytest.mark.nightly if seed >= 4 else ()) for seed in range(40)]
OPERATIONS = 1000
OPERATIONS_BEFORE_AN_END = 60
SECONDS = 1.0
BUSY_SECONDS = 5.0
"""How long a survivor may be kept from the processor by the other tests."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", PROGRAMS)
def test_random_operations(seed: int, tmp_path: Path) -> None:
    soak.soak("shm", seed, OPERATIONS, tmp_path, 240.0)


@pytest.mark.parametrize("seed", ENDS)
def test_a_killed_rank_is_named_by_every_survivor(seed: int, tmp_path: Path) -> None:
    survived = soak.survivors("shm", seed, OPERATIONS_BEFORE_AN_END, tmp_path)
    for rank, message in survived.message.items():
        assert f"rank {survived.victim} (process " in message, f"seed {seed}, rank {rank}: {message}"
        assert " died" in message.partition(f"rank {survived.victim} (process ")[2], f"seed {seed}, rank {rank}: {message}"
    late = {rank: seconds for rank, seconds in survived.seconds.items() if seconds > SECONDS + BUSY_SECONDS}
    assert not late, f"seed {seed}: from the end of rank {survived.victim} to the errors {late} s"


def test_a_program_is_that_of_its_seed_and_has_everything() -> None:
    made = program(0, OPERATIONS)
    assert made == program(0, OPERATIONS)
    assert made != program(1, OPERATIONS)
    assert {operation.kind for operation in made} == set(KINDS)
    assert {operation.group for operation in made} == set(range(len(GROUPS)))
    assert {operation.asynchronous for operation in made} == {False, True}
    assert {operation.count for operation in made} > {0, 1}
    assert max(operation.count * operation.dtype.itemsize for operation in made) >= 1 << 18


@pytest.mark.timeout(180)
def test_a_wrong_result_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over Gloo with one rank that plays another seed: the very first operations disagree."""
    monkeypatch.setattr(soak, "__file__", str(Path(__file__).with_name("soak_wrong.py")))
    with pytest.raises(AssertionError, match=r"seed 0 of 50 operations over gloo(.|\n)*operation \d+.*elements are wrong"):
        soak.soak("gloo", 0, 50, tmp_path, 60.0)
