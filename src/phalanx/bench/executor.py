"""What an action costs when it computes nothing: `python -m phalanx.bench.executor`.

A pipeline rank's list over empty segments on the dry transport, where every message is done at once. What is left is our own
work per action.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.dry import DryTransport
from phalanx.comm.world import World
from phalanx.derive.program import Graphs, Parameter, Program, Segment, SegmentClass, Source, Value
from phalanx.mesh import Mesh
from phalanx.run.executor import Executor
from phalanx.run.optimizer import AdamW, Group, Optimizer
from phalanx.run.parameters import Parameters
from phalanx.schedule import build, from_program
from phalanx.spec import Spec


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.executor", description=__doc__)
    parser.add_argument("--segments", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"{options.segments} segments, {options.microbatches} microbatches, median of {options.steps} steps on one thread")
    for pp in (1, 2):
        executor = idle_executor(options.segments, options.microbatches, pp)
        seconds = step_seconds(executor, options.microbatches, options.steps)
        kinds = Counter(action.kind for action in executor.actions)
        print(f"pp={pp}: {len(executor.actions)} actions, {seconds * 1e6 / len(executor.actions):.1f} us each; {dict(kinds)}")
        for kind, each in seconds_by_kind(executor, options.microbatches).items():
            print(f"  {kind:8} {each * 1e6:6.1f} us")


def idle_executor(segments: int, microbatches: int, pp: int, device: torch.device | str = "cpu") -> Executor:
    """The executor of rank 0 of a Program whose segments do nothing, on wires that are always done."""
    mesh = Mesh(pp=pp)
    with torch.device(device):
        program = empty_program(segments, microbatches, mesh)
        world = World(mesh, 0, DryTransport(0, pp), device=torch.device(device))
        schedule = build(from_program(program), "1f1b", pp, microbatches)
        alike = dict.fromkeys(program.parameters, Group(1e-3, 0.0))
        parameters = Parameters(program, world, schedule.places, lambda p: torch.ones(p.shape), alike)
        return Executor(program, schedule, world, parameters, Optimizer(AdamW(), parameters))


def step_seconds(executor: Executor, microbatches: int, steps: int) -> float:
    batch = {"x": torch.zeros(microbatches, 4)}
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        executor.step(batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def seconds_by_kind(executor: Executor, microbatches: int) -> dict[str, float]:
    """Mean host time of each kind of action in one recorded step."""
    executor.record = True
    executor.step({"x": torch.zeros(microbatches, 4)})
    executor.record = False
    total: dict[str, list[float]] = {}
    for event in executor.events:
        total.setdefault(event.name.rstrip("0123456789."), []).append(event.end - event.start)
    executor.events.clear()
    return {kind: sum(each) / len(each) for kind, each in total.items()}


def empty_program(segments: int, microbatches: int, mesh: Mesh) -> Program:
    """Segments of one parameter that hand their input on."""
    whole = Spec.replicated(2)
    entry = Value("x", (1, 4), torch.float32, whole)
    cut = replace(entry, name="h", requires_grad=True)
    loss = Value("loss", (), torch.float32, Spec(()), True)
    count = Value("count", (), torch.int64, Spec(()))
    grad, scalar = torch.zeros(2), torch.ones(())

    def forward(out: Tensor | None) -> Any:
        def run(arguments: list[Any]) -> Any:
            x = arguments[-1] if out is None else out
            arguments.clear()
            return (x,), (x,)

        return run

    def backward(returns: tuple[Tensor, ...]) -> Any:
        def run(arguments: list[Any]) -> Any:
            arguments.clear()
            return returns, (grad,)

        return run

    def make(index: int, kind: str) -> Segment:
        first, last = index == 0, index == segments - 1
        outs = scalar if last else None
        returns = () if first else (torch.zeros(1, 4),)
        nothing: Any = None
        graphs = Graphs(forward(outs), backward(returns), nothing, nothing, lambda a: forward(outs)(a)[0], (), 0, {}, {})  # type: ignore[arg-type]
        name = f"p{index}"
        cls = SegmentClass(
            kind, nothing, (Value(name, (2,), torch.float32, Spec.replicated(1), True),), (),
            (entry if first else cut,), (loss if last else cut,), (frozenset(),), graphs=graphs,
        )  # fmt: skip
        source = Source("batch", "x") if first else Source("cut", "h")
        return Segment(index, kind, cls, (name,), (), (source,), ("loss" if last else "h",))

    one = torch.ones((), dtype=torch.int64)
    counted: Any = lambda arguments: (one,)  # noqa: E731
    counter = Graphs(counted, counted, counted, counted, counted, (), 0, {}, {})
    none: Any = None
    counting = Segment(
        -1, "count", SegmentClass("count", none, (), (), (), (count,), (), graphs=counter), (), (), (), ("count",)
    )
    made = tuple(make(index, f"segment{index}") for index in range(segments))
    parameters = {f"p{index}": Parameter(f"p{index}", (2,), torch.float32, Spec.replicated(1)) for index in range(segments)}
    return Program(mesh, microbatches, made, parameters, {}, {"x": entry}, None, False, counting, ())


if __name__ == "__main__":
    main()
