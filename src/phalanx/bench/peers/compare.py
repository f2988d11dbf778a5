"""One bout: a peer and Phalanx on the same job and shape, step by step in turn, and the rows that come of it.

Every way of training takes four steps from the same weights first. Their losses are compared, the third is audited for memory and
messages, and that each side used the transport that it claims is asserted from the calls its process groups counted. Then all ways are
timed in turn; a barrier before each step stands outside the clock, and the slowest rank's time counts.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from phalanx.bench.pairs import Ratio, ratio
from phalanx.bench.peers.audit import Tracker, sent_bytes, sequence_numbers
from phalanx.bench.peers.frameworks import Step, peer_step, plain_step
from phalanx.bench.peers.jobs import Job, Shape
from phalanx.bench.peers.ours import open_world, our_step
from phalanx.comm.world import World

STEPS = 4
"""Whose losses are compared."""
WARM_UP = 2
"""Rounds that are not timed."""


@dataclass
class Way:
    """One way of training, and what its first steps showed. Numbers are of the rank that has most."""

    step: Step
    losses: list[float] = field(default_factory=list)
    """Of the whole batch."""
    peak_bytes: float | None = None
    sent_bytes: float | None = None


@dataclass(frozen=True)
class Row:
    """A peer against Phalanx. Milliseconds are medians of steps; spreads are from the first to the third quartile.

    ratio        the peer's seconds over ours, above 1 where ours is faster; its ends are those of the 95% interval of the median
    a_a          a second instance of the peer over the first: no ratio closer to 1 than that means anything
    no_comm_ms   Phalanx's step with messages that are done at once and move nothing: the same compute of each rank
    exposed_ms   what a step takes beyond that: communication, waiting and, for the peer, what it computes more slowly
    gap_closed   (peer - ours) / (peer - no_comm): 1 where ours costs no more than computing alone; None where there is no gap
    single_ms    the whole batch in one plain process, the other ranks idle
    mib          peak of live tensors; sent_mib what a rank has to send in a step
    loss_diff    the most that the losses of the first four steps differ
    """

    peer: str
    shape: str
    transport_peer: str
    transport: str
    peer_ms: float
    phalanx_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    peer_spread_ms: float
    phalanx_spread_ms: float
    a_a: float
    a_a_low: float
    a_a_high: float
    no_comm_ms: float
    single_ms: float
    gap_closed: float | None
    peer_exposed_ms: float
    phalanx_exposed_ms: float
    peer_tokens_per_second: float
    phalanx_tokens_per_second: float
    peer_mib: float | None
    phalanx_mib: float | None
    peer_sent_mib: float | None
    phalanx_sent_mib: float | None
    loss_diff: float
    pairs: int


@dataclass(frozen=True)
class Refused:
    """What could not be compared, and why."""

    peer: str
    shape: str
    reason: str


def bout(job: Job, shape: Shape, transports: Sequence[str], pairs: int, foreign: Step | None = None) -> list[Row] | Refused:
    """The rows of a peer on gloo against Phalanx on each of `transports`; the same on every rank, all of which call this.

    `foreign` is the step of a peer that is no framework of PyTorch's, made already, and does nothing on ranks that it does not use.
    """
    with ExitStack() as stack:
        ways: dict[str, Way] = {}
        try:
            for transport in (*transports, "none"):
                world = stack.enter_context(open_world(job, transport))
                ways[transport] = our_way(job, shape, transport, world)
            for label in ("peer", "again"):
                if foreign is not None:
                    ways[label] = Way(foreign)
                    continue
                group = dist.new_group(backend="gloo")
                stack.callback(dist.destroy_process_group, group)
                ways[label] = peer_way(job, shape, group, f"{job.peer}_{shape.name}_{label}")
        except ValueError as error:
            return Refused(job.peer, shape.name, str(error))
        if foreign is not None:
            ways["peer"].losses = whole_batch([foreign() for _ in range(STEPS)])
        ways["single"] = Way(plain_step(shape) if dist.get_rank() == 0 else lambda: None)
        seconds = in_turn({name: way.step for name, way in ways.items()}, pairs)
        rows = [_row(job, shape, "gloo" if foreign is None else "xla", transport, ways, seconds) for transport in transports]
        ways.clear()
    gc.collect()
    return rows


def our_way(job: Job, shape: Shape, transport: str, world: World) -> Way:
    tracker = Tracker()
    step = our_step(job, shape, world)
    if transport == "none":
        return Way(step)
    losses = watched(step, tracker)
    on_shm = sequence_numbers("shm")
    # Apart from the watched step, because a ledger keeps its messages alive.
    with world.ledger.recording() as ledger:
        losses.append(step())
    totals, on_shm = ledger.totals(), sequence_numbers("shm") - on_shm
    ledger.clear()
    assert_used(transport, {"gloo": tracker.calls["gloo"], "shm": on_shm}, f"Phalanx in the place of {job.peer}")
    return Way(step, whole_batch(losses), most(tracker.peak_bytes), most(sent_bytes(totals, world.size)))


def peer_way(job: Job, shape: Shape, group: dist.ProcessGroup, name: str) -> Way:
    tracker = Tracker()
    on_shm = sequence_numbers("shm")
    step = peer_step(job, shape, group, name)
    losses = watched(step, tracker)
    losses.append(step())
    assert_used("gloo", {"gloo": tracker.calls["gloo"], "shm": sequence_numbers("shm") - on_shm}, job.peer)
    assert set(tracker.groups) == {group.group_name}, (
        f"{job.peer} ran on the groups {tracker.groups}, not on {group.group_name}"
    )
    return Way(step, whole_batch(losses), most(tracker.peak_bytes), most(tracker.sent_bytes))


def watched(step: Step, tracker: Tracker) -> list[float | None]:
    """The losses of three steps, of which the last is counted: DDP still arranges its buckets anew in its second."""
    with tracker:
        settling = [step(), step()]
        tracker.begin()
        return [*settling, step()]


def assert_used(transport: str, calls: Mapping[str, int], who: str) -> None:
    """That a step made calls on its transport, and none on the other."""
    other = next(name for name in calls if name != transport)
    assert calls[transport] > 0, f"{who} made no call on {transport}"
    assert calls[other] == 0, f"{who} is to be on {transport} and made {calls[other]} calls on {other}"


def whole_batch(losses: Sequence[float | None]) -> list[float]:
    """The mean over the ranks that know one: of their own samples, or all of the whole batch. The same on every rank."""
    known = torch.tensor([[0.0, 0.0] if loss is None else [loss, 1.0] for loss in losses], dtype=torch.float64)
    dist.all_reduce(known)
    return [float(total / count) for total, count in known]


def most(number: float) -> float:
    """Of all ranks."""
    numbers = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return float(numbers)


def in_turn(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step in every round, of the slowest rank; who goes first, and in which direction, changes every round."""
    names = list(steps)
    taken = torch.zeros(rounds, len(names), dtype=torch.float64)
    for at in range(-WARM_UP, rounds):
        first = at // 2 % len(names)
        order = [*range(first, len(names)), *range(first)]
        for column in order if at % 2 == 0 else reversed(order):
            dist.barrier()
            start = time.perf_counter()
            steps[names[column]]()
            if at >= 0:
                taken[at, column] = time.perf_counter() - start
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return {name: taken[:, column].tolist() for column, name in enumerate(names)}


def _row(
    job: Job, shape: Shape, transport_peer: str, transport: str, ways: Mapping[str, Way], seconds: Mapping[str, list[float]]
) -> Row:
    peer, ours = ways["peer"], ways[transport]
    speed = compared(seconds[transport], seconds["peer"])
    a_a = compared(seconds["again"], seconds["peer"])
    alone = statistics.median(seconds["none"])
    return Row(
        peer=job.peer,
        shape=shape.name,
        transport_peer=transport_peer,
        transport=transport,
        peer_ms=speed.theirs_seconds * 1e3,
        phalanx_ms=speed.ours_seconds * 1e3,
        ratio=speed.median,
        ratio_low=speed.low,
        ratio_high=speed.high,
        peer_spread_ms=quartiles(seconds["peer"]) * 1e3,
        phalanx_spread_ms=quartiles(seconds[transport]) * 1e3,
        a_a=a_a.median,
        a_a_low=a_a.low,
        a_a_high=a_a.high,
        no_comm_ms=alone * 1e3,
        single_ms=statistics.median(seconds["single"]) * 1e3,
        gap_closed=gap_closed(speed.theirs_seconds, speed.ours_seconds, alone),
        peer_exposed_ms=(speed.theirs_seconds - alone) * 1e3,
        phalanx_exposed_ms=(speed.ours_seconds - alone) * 1e3,
        peer_tokens_per_second=shape.tokens / speed.theirs_seconds,
        phalanx_tokens_per_second=shape.tokens / speed.ours_seconds,
        peer_mib=mib(peer.peak_bytes),
        phalanx_mib=mib(ours.peak_bytes),
        peer_sent_mib=mib(peer.sent_bytes),
        phalanx_sent_mib=mib(ours.sent_bytes),
        loss_diff=max(abs(a - b) for a, b in zip(peer.losses, ours.losses, strict=True)),
        pairs=speed.pairs,
    )


def compared(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    return ratio(list(zip(ours, theirs, strict=True)))


def quartiles(seconds: Sequence[float]) -> float:
    """From the first to the third; 0 of a single sample."""
    if len(seconds) < 2:
        return 0.0
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return third - first


def gap_closed(peer: float, ours: float, alone: float) -> float | None:
    return (peer - ours) / (peer - alone) if peer > alone else None


def mib(number: float | None) -> float | None:
    return None if number is None else number / 2**20
