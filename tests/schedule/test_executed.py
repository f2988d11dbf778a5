"""A real step takes as long as its simulation says: every schedule, run by the executor over segments that sleep.

Ranks are threads and sleeping costs no processor, so they overlap as devices would. No step can be shorter than the sleeps allow.
An operating system with other work sometimes wakes a thread late, so the upper bound is the simulation with each action's own
measured time: what it does not explain are waits that the schedule does not ask for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from phalanx.bench.executor import empty_program
from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.derive.program import Graphs, Program, SegmentClass
from phalanx.event import Event
from phalanx.mesh import Mesh
from phalanx.run.executor import Executor
from phalanx.run.optimizer import AdamW, Optimizer, groups
from phalanx.run.parameters import Parameters
from phalanx.schedule import build, from_program
from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.pipeline import SCHEDULES
from phalanx.schedule.simulate import Costs, _Clock, simulate
from phalanx.schedule.values import Values
from phalanx.schedule.view import View

UNIT_SECONDS = 0.012
"""Of a rank's forward of one microbatch, whichever the number of its stages."""
SLOWER = 0.05
"""How much longer than simulated a step may be. Each message costs some 0.1 ms of waking and work."""
REPEATS = 6
"""At most: steps are repeated until one is quick enough, since other processes can only slow a step down."""
EQUAL, UNEQUAL = (1.0, 1.0, 1.0), (0.75, 1.25, 1.0)
"""Times of F, I and W in units; B takes both of the latter."""

Times = tuple[float, float, float]


def takes(name: str, pp: int, microbatches: int) -> bool:
    """DualPipe's two streams fill an even number of ranks."""
    return name != "dualpipe" or microbatches >= 2 * pp


def sleeping(cls: SegmentClass, seconds: Mapping[str, float]) -> SegmentClass:
    """The class with graphs that sleep before they return what those of `empty_program` return."""
    last, first = cls.outputs[0].name == "loss", not cls.inputs[0].requires_grad
    out, weight_grad = torch.ones(()) if last else torch.zeros(1, 4), (torch.zeros(2),)
    input_grad = () if first else (torch.zeros(1, 4),)
    returned: dict[str, Any] = {
        "F": ((out,), (out,)),
        "B": (input_grad, weight_grad),
        "I": (input_grad, ()),
        "W": weight_grad,
        "E": (out,),
    }

    def graph(kind: str) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            arguments.clear()
            time.sleep(seconds.get(kind, 0.0))
            return returned[kind]

        return run

    made: Any = {kind: graph(kind) for kind in returned}
    return replace(cls, graphs=Graphs(**made, saved_for_w=(), saved_bytes=0, flops={}, bytes={}))


def sleeping_program(
    pp: int, stages: int, microbatches: int, costs: Times
) -> tuple[Program, dict[tuple[str, int | None], float]]:
    """One segment for each stage, and an epilogue that takes no time; with the seconds of each (kind, segment)."""
    program = empty_program(stages + 1, microbatches, Mesh(pp=pp))
    forward, input_grad, weight_grad = (UNIT_SECONDS * pp / stages * cost for cost in costs)
    each = {"F": forward, "B": input_grad + weight_grad, "I": input_grad, "W": weight_grad}
    by_segment = [dict.fromkeys(each, 0.0) if segment.index == stages else each for segment in program.segments]
    segments = [
        replace(segment, cls=sleeping(segment.cls, seconds))
        for segment, seconds in zip(program.segments, by_segment, strict=True)
    ]
    durations = {(kind, k): seconds for k, found in enumerate(by_segment) for kind, seconds in found.items()}
    return replace(program, segments=tuple(segments)), durations


def recorded_steps(program: Program, schedule: Schedule, enough: Callable[[list[Event]], bool]) -> list[list[Event]]:
    """Events of all ranks of each step, until one is enough."""
    config = AdamW()

    def made(world: World) -> Executor:
        parameters = Parameters(program, world, schedule.places, lambda p: torch.ones(p.shape), groups(config, program))
        return Executor(program, schedule, world, parameters, Optimizer(config, parameters))

    def step(world: World, executor: Executor) -> list[Event]:
        executor.record = True
        executor.events.clear()
        executor.step({"x": torch.zeros(program.microbatches, 4)})
        return list(executor.events)

    steps: list[list[Event]] = []
    with LocalWorld(program.mesh, rendezvous=True, timeout=60) as worlds:
        executors = worlds.run(made)
        while len(steps) < REPEATS and not (steps and enough(steps[-1])):
            steps.append([event for events in worlds.run(step, executors) for event in events])
    return steps


def computed(events: Sequence[Event]) -> dict[tuple[int, str], Event]:
    """By rank and name, what computes for a microbatch."""
    return {(e.rank, e.name): e for e in events if e.lane == "compute" and e.microbatch is not None}


def span(events: Sequence[Event]) -> float:
    found = computed(events).values()
    return max(event.end for event in found) - min(event.start for event in found)


class Replay(_Clock):
    """The simulation in which every action takes as long as it took in a step."""

    def __init__(self, schedule: Schedule, view: View, events: Sequence[Event]) -> None:
        super().__init__(schedule, Values.of(view, schedule.chains, schedule.microbatches), Costs({}), "edge")
        # No two ranks compute one segment for one microbatch, so names tell them apart.
        self.taken = {name: event.end - event.start for (_, name), event in computed(events).items()}
        while self.advance():
            pass
        self.finish()

    def _seconds(self, action: Action) -> float:
        return self.taken.get(str(action), 0.0)


def assert_runs_as_simulated(name: str, pp: int, microbatches: int, costs: Times, chunks: int | None = None) -> None:
    program, durations = sleeping_program(pp, pp * (chunks or SCHEDULES[name].chunks), microbatches, costs)
    view = from_program(program)
    schedule = build(view, name, pp, microbatches, chunks)
    simulated = simulate(schedule, view, Costs(durations))

    def excess(events: Sequence[Event]) -> float:
        return span(events) / span(Replay(schedule, view, events).events) - 1

    steps = recorded_steps(program, schedule, lambda events: excess(events) <= SLOWER)
    for events in steps:
        assert computed(events).keys() == computed(simulated).keys()
        assert span(events) >= span(simulated)
    found = min(steps, key=excess)
    assert excess(found) <= SLOWER, f"{span(simulated):.3f} s simulated, and then {[span(events) for events in steps]}"
    # The times of the replay are the sleeps, but for the few that an operating system draws out.
    late = [e.end - e.start - durations[e.name[0], int(e.name[1:].split(".")[0])] for e in computed(found).values()]
    assert statistics.median(late) <= SLOWER * UNIT_SECONDS


CASES = [(name, pp, m) for name in SCHEDULES for pp in (2, 4) for m in (pp, 2 * pp) if takes(name, pp, m)]


@pytest.mark.parametrize(("name", "pp", "microbatches"), CASES)
def test_a_step_takes_as_long_as_simulated(name: str, pp: int, microbatches: int) -> None:
    assert_runs_as_simulated(name, pp, microbatches, EQUAL)


@pytest.mark.parametrize(("name", "pp", "microbatches"), [case for case in CASES if case[1:] == (4, 8)])
def test_and_where_the_times_are_unequal(name: str, pp: int, microbatches: int) -> None:
    assert_runs_as_simulated(name, pp, microbatches, UNEQUAL)


@pytest.mark.nightly
@pytest.mark.parametrize("costs", [EQUAL, UNEQUAL, (1.5, 0.5, 1.0)], ids=str)
@pytest.mark.parametrize(("name", "pp", "microbatches"), [(n, 8, m) for n in SCHEDULES for m in (8, 16, 24) if takes(n, 8, m)])
def test_more_ranks(name: str, pp: int, microbatches: int, costs: Times) -> None:
    assert_runs_as_simulated(name, pp, microbatches, costs)
