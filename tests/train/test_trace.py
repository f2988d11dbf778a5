"""A recorded step: every action of every rank, on one clock, of that step alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.comm.local import local
from phalanx.comm.world import World
from phalanx.event import Event
from phalanx.mesh import Mesh
from phalanx.schedule.measured import read
from phalanx.train.config import TrainConfig
from phalanx.train.loop import train
from phalanx.train.trace import Clocks, compare_clocks, gathered, on_one_clock


def test_one_step_of_all_ranks_is_recorded_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = TrainConfig(model="mlp", mesh="pp=2,dp=2", microbatches=2, steps=3, batch=8, trace=2, out=tmp_path / "run")
    with local(config.parsed_mesh()) as world:
        train(config, world)
    trace = read(tmp_path / "run")
    assert (trace.step, trace.view.mesh, trace.clock_error_seconds) == (2, Mesh(pp=2, dp=2), 0.0)
    names = {rank: sorted(event.name for event in trace.events if event.rank == rank) for rank in range(4)}
    lists = [sorted(map(str, actions)) for actions in trace.schedule.ranks]
    assert names == {0: lists[0], 1: lists[0], 2: lists[1], 3: lists[1]}
    assert trace.events[0].start == 0.0 and all(event.start <= event.end for event in trace.events)

    assert main(["schedule", "--run", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "measured: step 2, 1f1b on mesh pp=2,dp=2, 2 microbatches" in shown and "\npredicted: " in shown
    assert shown.count("rank 3 ") == 1 and shown.count("rank 2 ") == 2, "all ranks are measured, one of each stage predicted"
    assert main(["schedule", "--run", str(tmp_path / "run"), "--json", "--draw", str(tmp_path / "step.html")]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert 0 < numbers["bubble_global"] < 1 and sum(numbers["idle"].values()) == pytest.approx(1)
    assert numbers["span"] == pytest.approx(max(event.end for event in trace.events if event.rank in (0, 2)), rel=0.5)
    assert "measured: step 2" in (tmp_path / "step.html").read_text(encoding="utf-8")


def test_clocks_are_compared_to_within_what_is_said() -> None:
    def compared(world: World) -> Clocks:
        return compare_clocks(world, lambda: time.perf_counter() + 100.0 * world.rank, rounds=5)

    with local(Mesh(dp=3)) as world:
        for found in world.run(compared):
            assert found.ahead[0] == 0.0 and 0.0 < found.error < 10.0
            assert all(abs(found.ahead[rank] - 100.0 * rank) <= found.error + 1e-9 for rank in range(3))
            # The middle of an interval that holds the truth: its own clock is never taken for rank 0's.
            assert found.ahead[1] != 0.0
        assert world.run(lambda rank: compare_clocks(rank, rounds=3)) == [Clocks((0.0,) * 3, 0.0)] * 3


def test_events_of_all_ranks_come_together() -> None:
    def mine(rank: int) -> list[Event]:
        return [Event(rank, "compute", f"F{k}.0", 0.1 * k, 0.1 * k + 1e-7, microbatch=0, segment="é") for k in range(rank)]

    with local(Mesh(pp=3)) as world:
        found = world.run(lambda rank: gathered(mine(rank.rank), rank))
    assert found == [[*mine(0), *mine(1), *mine(2)]] * 3


def test_times_are_moved_to_the_clock_of_rank_0() -> None:
    events = [Event(1, "compute", "F1.0", 107.0, 108.5), Event(0, "compute", "F0.0", 5.0, 6.0)]
    moved = on_one_clock(events, Clocks((0.0, 100.0), 0.1))
    assert [(event.rank, event.start, event.end) for event in moved] == [(0, 0.0, 1.0), (1, 2.0, 3.5)]


@pytest.mark.parametrize("trace", [0, 4])
def test_a_step_that_is_not_taken_cannot_be_recorded(trace: int) -> None:
    with pytest.raises(ValueError, match=f"trace is {trace}; it is one of the steps 1 to 3"):
        TrainConfig(steps=3, trace=trace).check()
