"""Measures collectives: every backend in turn within one iteration, all ranks starting together, the slowest rank counting.

Neighbours in time are compared, so a machine that gets busier does so for all of them. `measure` is run by every rank.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.bench.buffers import Pool
from phalanx.bench.busbw import OPS, Form
from phalanx.bench.clock import Start
from phalanx.bench.inputs import expected, fill_inputs, wrong_elements
from phalanx.bench.pairs import Ratio, ratio
from phalanx.bench.results import Measured, Row, Samples
from phalanx.bench.sweep import Case, Effort
from phalanx.bench.wires import Wires
from phalanx.comm.transport import CommError


@dataclass(frozen=True)
class Bench:
    """What this rank measures with.

    pools     ordinary memory under False, memory that is resident in the backend's arena under True
    baseline  the backend that the others are held against
    """

    wires: Mapping[str, Wires]
    pools: Mapping[bool, Pool]
    start: Start
    group_rank: int
    baseline: str


@dataclass(frozen=True)
class Refused:
    """A backend does not have an operation; the reason is its own."""

    case: Case
    form: Form
    reason: str


Way = tuple[Case, Form]


def measure(bench: Bench, rounds: Sequence[Sequence[Case]], effort: Effort) -> Iterator[Row | Refused]:
    """A Row for each case that its backend can run, and a Refused for each form that it cannot, as they are done.

    Every rank gets the same ones. Raises CommError if a call fails on some of the ranks only.
    """
    refused: set[tuple[str, str, Form]] = set()
    for cases in rounds:
        ways: list[Way] = []
        for case in cases:
            for form in OPS[case.op].forms:
                key = (case.op, case.backend, form)
                if key in refused:
                    continue
                reason = _warm_up(bench, case, form, effort)
                if reason is None:
                    ways.append((case, form))
                else:
                    refused.add(key)
                    yield Refused(case, form, reason)
        if not ways:
            continue
        samples = _times(bench, ways, effort)
        wrong = {way: _wrong(bench, *way) if effort.check else None for way in ways}
        baseline = next(case for case in cases if case.backend == bench.baseline and not case.again)
        for case in cases:
            forms = {
                form: Measured(samples[case, form], wrong[case, form], _relative(samples, case, form, baseline))
                for form in OPS[case.op].forms
                if (case, form) in samples
            }
            if forms:
                yield Row(case, forms)


def _warm_up(bench: Bench, case: Case, form: Form, effort: Effort) -> str | None:
    """Pages, connections and thread pools are made at first use, by size and by operation. Returns why it cannot run, if so."""
    wires = bench.wires[case.backend]
    failure = wires.refusal(case, form)
    if failure is None:
        try:
            for _ in range(effort.warm_up):
                wires.call(case, form, *bench.pools[case.resident].take(case, form, bench.group_rank))()
            bench.start.finish()
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    failed = {rank: text for rank, text in enumerate(failures) if text is not None}
    if not failed:
        return None
    rank, reason = next(iter(failed.items()))
    if len(failed) < len(failures):
        raise CommError(f"{case.op} of {case.size} bytes on {case.label} failed on rank {rank} but not on all: {reason}")
    return reason


def _times(bench: Bench, ways: Sequence[Way], effort: Effort) -> dict[Way, Samples]:
    seconds = torch.zeros(len(ways), effort.iterations, dtype=torch.float64)
    collects = gc.isenabled()
    gc.disable()
    try:
        for iteration in range(effort.iterations):
            for turn in range(len(ways)):
                # Each goes first in turn: the one behind a barrier of another backend may find its peers' cores asleep.
                at = (turn + iteration) % len(ways)
                seconds[at, iteration] = _seconds(bench, *ways[at], effort.pipelined)
    finally:
        if collects:
            gc.enable()
    everyone = [torch.empty_like(seconds) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, seconds)
    by_way = torch.stack(everyone, dim=1).tolist()  # [way][rank][iteration]
    return {way: Samples(tuple(map(tuple, by_way[at]))) for at, way in enumerate(ways)}


def _seconds(bench: Bench, case: Case, form: Form, calls: int) -> float:
    pool, wires = bench.pools[case.resident], bench.wires[case.backend]
    bound = [wires.call(case, form, *pool.take(case, form, bench.group_rank)) for _ in range(calls)]
    bench.start.together()
    begin = time.perf_counter_ns()
    for call in bound:
        call()
    bench.start.finish()
    return (time.perf_counter_ns() - begin) / calls * 1e-9


def _wrong(bench: Bench, case: Case, form: Form) -> int:
    """One call on inputs with an exact result: elements that differ, of all ranks. The buffers are zero again afterwards."""
    send, recv = bench.pools[case.resident].take(case, form, bench.group_rank)
    fill_inputs(case, bench.group_rank, send, recv)
    bench.start.together()
    bench.wires[case.backend].call(case, form, send, recv)()
    bench.start.finish()
    wrong = torch.tensor([wrong_elements(case, recv, expected(case, bench.group_rank, recv))])
    dist.all_reduce(wrong)
    send.zero_()
    recv.zero_()
    return int(wrong)


def _relative(samples: Mapping[Way, Samples], case: Case, form: Form, baseline: Case) -> Ratio | None:
    """How fast a case is relative to the baseline in the same iterations."""
    if case == baseline or (baseline, form) not in samples:
        return None
    return ratio(list(zip(samples[case, form].slowest, samples[baseline, form].slowest, strict=True)))
