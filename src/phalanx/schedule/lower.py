"""From the compute order of a pipeline schedule to every rank's flat list of actions over segments.

Messages are placed by the safe rule: walk one order of all compute, and where a producer is visited append SEND to its rank and
RECV to the consumer's at the same point. Take the earliest unfinished item of that order: if it computes, its inputs are
earlier, so they are done; if it is a message, everything earlier on both ranks is done, so both ends are at the head of their
queues. So something can always run, even with unbuffered sends and one queue per rank. `check` proves it again for each list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from phalanx.schedule.actions import Action, Kind, Schedule
from phalanx.schedule.balance import stages
from phalanx.schedule.data import count, finish, reduce, together
from phalanx.schedule.pipeline import Order, Step, compute_order, times
from phalanx.schedule.plan import planned
from phalanx.schedule.storage import place_storage
from phalanx.schedule.values import Values, link
from phalanx.schedule.view import View


def build(
    view: View,
    name: str,
    pp: int,
    microbatches: int,
    chunks: int | None = None,
    seconds: Mapping[int, float] | None = None,
    memory: float | None = None,
) -> Schedule:
    """The Schedule of one training step. `name` is a key of SCHEDULES, or auto; without a pipeline it is gradient accumulation.

    chunks   stages of each rank, where the schedule takes any number of them; auto takes 1 or 2 if it is None
    seconds  measured, of F and backward of each segment, by which stages are balanced; None: by the work that the View counts
    memory   of auto: the most activations of a rank, in units of one microbatch over all its segments

    Raises ValueError for an unknown name, more stages than segments, or a pp that is not the mesh's.
    """
    if pp != view.pp:
        raise ValueError(f"the schedule is for pp={pp}, but the mesh {view.mesh!r} has pp={view.pp}")
    if name == "auto" and pp > 1:
        order, placed = planned(view, pp, microbatches, chunks, seconds, memory)
    else:
        if memory is not None:
            raise ValueError(
                f"a limit on activations is for the schedule auto, which plans with it; {name} holds what it holds"
            )
        order = compute_order("1f1b" if name == "auto" else name, pp, microbatches, chunks)
        count = len(order.host) // order.copies
        # With two copies of the model a rank has a stage from each end.
        host = order.host if order.copies == 1 else [min(stage, count - 1 - stage) for stage in range(count)]
        placed = stages(view, count, seconds, host)
    return lower(view, order, placed, microbatches, name if pp > 1 else "accumulation")


def lower(view: View, order: Order, placed: Sequence[Sequence[int]], microbatches: int, name: str) -> Schedule:
    """The Schedule that follows a compute order over stages; `placed` are the segments of each stage of one copy of the model."""
    stages_of_all = tuple(tuple(stage) for stage in placed) * order.copies
    empty = Schedule(name, (), stages_of_all, order.host, microbatches, order.copies, view.storage, view.late)
    values = Values.of(view, empty.chains, microbatches)
    lists = [[count(view)] for _ in order.ranks]
    for at, action in _walk(values, order, stages_of_all):
        lists[at].append(action)
    for actions in lists:
        actions.extend(finish())
    return replace(empty, ranks=_linked(values, lists))


def forward_only(schedule: Schedule, view: View) -> Schedule:
    """What is left of a Schedule when nothing is trained. A part of an order without deadlock has none either."""
    values = Values.of(view, schedule.chains, schedule.microbatches)
    lists = [[a for a in actions if a.kind in ("COUNT", "F", "SEND_F", "RECV_F")] for actions in schedule.ranks]
    return replace(schedule, ranks=_linked(values, lists))


def _linked(values: Values, lists: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    return tuple(link(values, at, place_storage(values.view, actions)) for at, actions in enumerate(lists))


def _walk(values: Values, order: Order, placed: Sequence[Sequence[int]]) -> Iterator[tuple[int, Action]]:
    """(pp coordinate, action) in one global order: that of completion at default costs, ties to the lower stage."""
    due = _Due(values)
    spans = times(order.ranks, copies=order.copies)
    for step in sorted(spans, key=lambda step: (spans[step][1], step.stage)):
        at, segments = order.host[step.stage], placed[step.stage]
        for k in segments if step.kind == "F" else reversed(segments):
            yield at, Action(step.kind, k, step.microbatch)
            # A message leaves before the gradients of the same segment: the next stage waits for it, nobody waits for them yet.
            yield from _message(values, step, k)
            if step.kind in ("B", "W"):
                yield from due.after(k, step.microbatch)
    assert not due.waiting, f"no step finishes the gradients of {due.waiting}"


class _Due:
    """REDUCEs that are still to come: each follows the last backward whose gradients it sums."""

    def __init__(self, values: Values) -> None:
        self.values = values
        each = values.view.storage is not None and values.view.storage.by_microbatch
        self.groups = [({host for member in group for host in member.after}, group) for group in together(values.reductions)]
        self.waiting = {(n, j) for n in range(len(self.groups)) for j in (range(values.microbatches) if each else (None,))}
        self.each, self.done = each, set[tuple[int, int]]()
        self.left = [values.microbatches] * len(values.places)

    def after(self, segment: int, microbatch: int) -> Iterator[tuple[int, Action]]:
        """Those that need no more gradients once a segment has had its backward of a microbatch."""
        self.left[segment] -= 1
        self.done.add((segment, microbatch))
        j = microbatch if self.each else None
        for n, (needs, group) in enumerate(self.groups):
            if segment not in needs or (n, j) not in self.waiting:
                continue
            if any(self.left[host] if j is None else (host, j) not in self.done for host in needs):
                continue
            self.waiting.remove((n, j))
            for member in group:
                for at in self.values.places[member.segment]:
                    if j is None or self.values.at(member.segment, j) == at:
                        yield at, reduce(member, j)


def _message(values: Values, step: Step, k: int) -> Iterator[tuple[int, Action]]:
    """Both ends of the message that a segment's compute makes, if its reader is on another coordinate."""
    forward = step.kind == "F"
    reader = k + 1 if forward else k - 1
    segment = values.view.segments[k]
    tensors = segment.outputs if forward else segment.input_grads
    if step.kind == "W" or not tensors:
        return
    source, target = values.at(k, step.microbatch), values.at(reader, step.microbatch)
    if source == target:
        return
    ends: tuple[Kind, Kind] = ("SEND_F", "RECV_F") if forward else ("SEND_B", "RECV_B")
    lane = f"pp:{source}>{target}:{'F' if forward else 'B'}"
    yield source, Action(ends[0], k, step.microbatch, peer=target, lane=lane)
    yield target, Action(ends[1], k, step.microbatch, peer=source, lane=lane)
