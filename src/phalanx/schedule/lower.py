"""From the compute order of a pipeline schedule to every rank's flat list of actions over segments.

Messages are placed by the safe rule: walk one order of all compute, and where a producer is visited append SEND to its rank and
RECV to the consumer's at the same point. Take the earliest unfinished item of that order: if it computes, its inputs are
earlier, so they are done; if it is a message, everything earlier on both ranks is done, so both ends are at the head of their
queues. So something can always run, even with unbuffered sends and one queue per rank. `check` proves it again for each list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.schedule.actions import Action, Kind, Schedule
from phalanx.schedule.data import count, finish, reduce, together
from phalanx.schedule.pipeline import Order, Step, compute_order, stages, times
from phalanx.schedule.values import Values, link
from phalanx.schedule.view import View


def build(view: View, name: str, pp: int, microbatches: int) -> Schedule:
    """The Schedule of one training step. `name` is a key of SCHEDULES; without a pipeline it is gradient accumulation.

    Raises ValueError for an unknown name, more stages than blocks, or a pp that is not the mesh's.
    """
    if pp != view.pp:
        raise ValueError(f"the schedule is for pp={pp}, but the mesh {view.mesh!r} has pp={view.pp}")
    order = compute_order(name, pp, microbatches)
    placed = stages(len(view.segments), len(order.host), prologue=view.prologue)
    return lower(view, order, placed, microbatches, name if pp > 1 else "accumulation")


def lower(view: View, order: Order, placed: Sequence[Sequence[int]], microbatches: int, name: str) -> Schedule:
    """The Schedule that follows a compute order over stages; `placed` are the segments of each stage."""
    coordinates = [at for stage, at in zip(placed, order.host, strict=True) for _ in stage]
    values = Values.of(view, coordinates, microbatches)
    lists = [[count(view)] for _ in order.ranks]
    for at, action in _walk(values, order, placed):
        lists[at].append(action)
    for actions in lists:
        actions.extend(finish())
    linked = tuple(link(values, at, actions) for at, actions in enumerate(lists))
    return Schedule(name, linked, tuple(tuple(stage) for stage in placed), order.host, microbatches)


def _walk(values: Values, order: Order, placed: Sequence[Sequence[int]]) -> Iterator[tuple[int, Action]]:
    """(pp coordinate, action) in one global order: that of completion at default costs, ties to the lower stage."""
    waiting = together(values.reductions)
    left = [values.microbatches] * len(values.coordinates)
    spans = times(order.ranks)
    for step in sorted(spans, key=lambda step: (spans[step][1], step.stage)):
        at, segments = order.host[step.stage], placed[step.stage]
        for k in segments if step.kind == "F" else reversed(segments):
            yield at, Action(step.kind, k, step.microbatch)
            # A message leaves before the gradients of the same segment: the next stage waits for it, nobody waits for them yet.
            yield from _message(values, step, k)
            if step.kind not in ("B", "W"):
                continue
            left[k] -= 1
            for group in [group for group in waiting if not any(left[host] for member in group for host in member.after)]:
                waiting.remove(group)
                yield from ((values.coordinates[member.segment], reduce(member)) for member in group)
    assert not waiting, f"no step finishes the gradients of {waiting}"


def _message(values: Values, step: Step, k: int) -> Iterator[tuple[int, Action]]:
    """Both ends of the message that a segment's compute makes, if its reader is on another coordinate."""
    forward = step.kind == "F"
    reader = k + 1 if forward else k - 1
    segment = values.view.segments[k]
    tensors = segment.outputs if forward else segment.input_grads
    if step.kind == "W" or not tensors or values.coordinates[reader] == values.coordinates[k]:
        return
    source, target = values.coordinates[k], values.coordinates[reader]
    ends: tuple[Kind, Kind] = ("SEND_F", "RECV_F") if forward else ("SEND_B", "RECV_B")
    lane = f"pp:{source}>{target}:{'F' if forward else 'B'}"
    yield source, Action(ends[0], k, step.microbatch, peer=target, lane=lane)
    yield target, Action(ends[1], k, step.microbatch, peer=source, lane=lane)
