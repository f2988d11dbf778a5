"""A data-parallel step over a slow link, against its computation and its communication alone: `python -m phalanx.bench.link`.

Without a launcher it makes two hosts of one rank each out of network namespaces (needs root) and runs itself there; under torchrun on
real hosts it measures those. For plain data parallelism and each level of ZeRO, three ways alternate in one run, a barrier before each
stands outside the clock, and the slower rank's time counts:

computation    the same step on both ranks at once, but only its scalars are sent: a gather repeats this rank's own slice
communication  the step's own collectives: the same calls, sizes, order and waits on the same groups, as one step left them on a tape
step           the step

Both ranks of this bed share one machine, so the processor time that the transport takes comes out of the computation's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

import phalanx as phx
from phalanx.bench.bed import NotPermitted, two_hosts
from phalanx.bench.hierarchy import link_rate
from phalanx.bench.overlap import sampled
from phalanx.bench.tape import Alone, Tape, replay
from phalanx.comm.launch import launch_from
from phalanx.comm.world import World
from phalanx.event import Event
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.schedule.actions import COMPUTE, Schedule, Storage
from phalanx.schedule.simulate import Costs, Link, simulate
from phalanx.schedule.view import View, from_program

WAYS = "dp,zero1,zero2,zero3"
CLASSES = ("reduce", "gather", "count", "world")
"""Of lanes: what a data-parallel step sends."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.link", description=__doc__)
    parser.add_argument("--ways", default=WAYS, help="dp, zero1, zero2, zero3; zero3:2 gathers two segments ahead")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="samples of both ranks together")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rate", default="1gbit", help="of the link between the two namespaces")
    parser.add_argument("--quick", action="store_true", help="two rounds of the half of the layers")
    options = parser.parse_args(argv)
    for way in options.ways.split(","):
        storage(way)
    launched = launch_from(os.environ)
    if launched is None:
        apart([*(sys.argv[1:] if argv is None else argv)], options.rate)
        return
    torch.set_num_threads(1)
    layers, rounds = (max(1, options.layers // 2), 2) if options.quick else (options.layers, options.rounds)
    with phx.init(phx.Mesh(dp=launched.size), device="cpu") as world:
        rate = link_rate(PrefixStore("bench", _get_default_store()), world.rank, 0, world.size - 1)
        config = LlamaConfig(
            vocab=options.vocab, hidden=options.hidden, inner=3 * options.hidden, layers=layers, heads=8, kv_heads=4
        )  # fmt: skip
        shape = (options.batch, options.seq)
        lines = [
            f"Llama of hidden {options.hidden}, {layers} layers, vocabulary {options.vocab}, global batch {shape}, float32, AdamW, "
            f"{world.size} ranks of one thread, {rate / 1e6:.1f} MB/s each way at once, medians of {rounds} rounds"
        ]
        for name in options.ways.split(","):
            lines += measured(world, config, shape, name, rounds, rate).lines()
        if world.rank == 0:
            print("\n".join(lines))


def apart(arguments: Sequence[str], rate: str) -> None:
    """This benchmark on two hosts of one rank each."""
    try:
        with two_hosts(rate) as bed:
            ends = bed.torchrun(["-P", "-m", "phalanx.bench.link", *arguments], per_host=(1, 1), seconds=600.0)
    except NotPermitted as why:
        raise SystemExit(
            f"two hosts cannot be made here: {why}\nnetwork namespaces need root, or run it under torchrun"
        ) from why
    for end in ends:
        print(end.out, end="")
    if any(end.code for end in ends):
        raise SystemExit("\n".join(end.err for end in ends))


def storage(way: str) -> int | Storage:
    """What `phx.parallelize` takes as `zero`. Raises ValueError for a word that is no way."""
    name, _, ahead = way.partition(":")
    level = {"dp": 0, "zero1": 1, "zero2": 2, "zero3": 3}.get(name)
    if level is None or (ahead and not (level and ahead.isdigit())):
        raise ValueError(
            f"{way!r} is no way to train; they are dp, zero1, zero2, zero3, and zero3:2 to gather two segments ahead"
        )
    return Storage(level, ("dp",), prefetch=int(ahead)) if ahead else level


# One way


def measured(world: World, config: LlamaConfig, shape: tuple[int, int], way: str, rounds: int, rate: float) -> Measured:
    """Every rank calls this. `rate` is the link's, in bytes per second each way."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batch = {key: torch.randint(0, config.vocab, shape, generator=generator) for key in ("tokens", "targets")}
    mine = {key: value.chunk(world.size)[world.rank].contiguous() for key, value in batch.items()}
    step = phx.parallelize(
        Llama(config), world, loss=loss, example=batch, optimizer=phx.adamw(lr=1e-4), zero=storage(way), layout={"batch": "dp"}
    )

    def whole() -> None:
        step(mine, local=True)

    alone = Alone(world.transport.inner)

    def computed() -> None:
        with alone.of(world):
            whole()

    whole()  # what is gathered once and what is gathered in every step
    whole()
    tape = Tape(world.transport.inner)
    with tape.of(world):
        whole()
    communicated = replay(tape, world.transport.inner)
    samples = sampled({"computation": computed, "communication": communicated, "step": whole}, rounds, warm_up=1)
    with step.recording() as events:
        computed()
    view = from_program(step.program, step.schedule.storage)
    seconds = {name: statistics.median(took for took, _ in rows) for name, rows in samples.items()}
    floor = Floor.of(
        step.schedule, view, actions_seconds(step.schedule, events, seconds["computation"]), seconds["communication"]
    )
    return Measured(way, samples, floor, tape, tape.crossing / rate)


@dataclass(frozen=True)
class Floor:
    """What no way to carry out a list of actions avoids, from the seconds of its computation and of its communication alone."""

    unhideable_seconds: float
    """What is left to send after the last backward, and what the first forward waits for: nothing computes meanwhile."""
    list_seconds: float
    """The list carried out with computation and wire that do not slow each other."""

    @classmethod
    def of(
        cls, schedule: Schedule, view: View, seconds: dict[tuple[str, int | None], float], communication_seconds: float
    ) -> Floor:
        routes = dict.fromkeys(CLASSES, "wire")

        def events(computing: float, wire: Link) -> list[Event]:
            costs = Costs({key: computing * value for key, value in seconds.items()}, {"wire": wire}, routes)
            return simulate(schedule, view, costs)

        # Bytes over the wire, asked of the simulator: it moves one a second while nothing computes.
        crossing = span(events(0.0, Link(bytes_per_second=1.0)))
        found = events(1.0, Link(bytes_per_second=crossing / communication_seconds))
        forward = min(event.start for event in found if event.name.startswith("F"))
        backward = max(event.end for event in found if event.name[0] in "BIW")
        update = min(event.start for event in found if event.name == "OPT")
        start = min(event.start for event in found)
        return cls(forward - start + update - backward, span(found))


def span(events: Sequence[Event]) -> float:
    return max(event.end for event in events) - min(event.start for event in events)


def actions_seconds(schedule: Schedule, events: Sequence[Event], total: float) -> dict[tuple[str, int | None], float]:
    """Seconds of each (kind, segment) that computes. What no action accounts for, such as the norm, comes with the update."""
    took = {event.name: event.end - event.start for event in events}
    seconds: dict[tuple[str, int | None], float] = {}
    for action in schedule.ranks[0]:
        if action.kind in COMPUTE:
            key = (action.kind, action.segment)
            seconds[key] = seconds.get(key, 0.0) + took[str(action)]
    seconds["OPT", None] += max(0.0, total - sum(seconds.values()))
    return seconds


@dataclass(frozen=True)
class Measured:
    """One way to train. samples: by part, (seconds, processor seconds) of every round."""

    way: str
    samples: dict[str, list[tuple[float, float]]]
    floor: Floor
    tape: Tape
    wire_seconds: float
    """The time of the bytes that must cross, at the link's rate."""

    def median(self, part: str, column: int = 0) -> float:
        return statistics.median(row[column] for row in self.samples[part])

    def ratio(self, limit: Callable[[float, float], float]) -> float:
        """Median over rounds of the step's seconds over a limit, which is a function of the two parts' seconds."""
        parts = ([seconds for seconds, _ in self.samples[part]] for part in ("computation", "communication", "step"))
        return float(statistics.median(step / limit(a, b) for a, b, step in zip(*parts, strict=True)))

    def lines(self) -> list[str]:
        left, burden = self.floor.unhideable_seconds, self.median("communication", 1)
        rows = []
        for part, samples in self.samples.items():
            spread = [seconds for seconds, _ in samples]
            rows.append(
                f"  {part:14}{self.median(part) * 1e3:8.1f} ms ({min(spread) * 1e3:.1f} to {max(spread) * 1e3:.1f}), "
                f"{self.median(part, 1) * 1e3:.1f} ms of processor time"
            )
        rows[1] += f", {self.median('communication') / self.wire_seconds:.2f} of the wire's {self.wire_seconds * 1e3:.1f} ms"
        stops = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in self.tape.stops(4))
        return [
            f"{self.way}: {self.tape}",
            *rows,
            f"  step / max(both) {self.ratio(max):.3f}, / sum {self.ratio(lambda a, b: a + b):.3f}",
            f"  unhideable {left * 1e3:.1f} ms: step / max(computation + it, communication) "
            f"{self.ratio(lambda a, b: max(a + left, b)):.3f}",
            f"  the list at best {self.floor.list_seconds * 1e3:.1f} ms: step / it {self.ratio(lambda a, b: self.floor.list_seconds):.3f}",
            f"  step / max(computation + the transport's processor time, communication) {self.ratio(lambda a, b: max(a + burden, b)):.3f}",
            f"  a step waited longest for: {stops or 'nothing'}",
        ]


if __name__ == "__main__":
    main()
