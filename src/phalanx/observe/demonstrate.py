"""One collective, run on tensors small enough to read: before, after, who got what from whom, and its backward.

Nothing here is calculated that a transport can tell. The numbers are what a real call on the threads transport left on every
rank, and the data flow is found by a second call, whose inputs mark every slice of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.collectives import PAIRS, move
from phalanx.comm.local import LocalWorld
from phalanx.comm.transport import Group, Transport
from phalanx.comm.world import World
from phalanx.mesh import Mesh
from phalanx.observe.show import DTYPES, Case, complete, numbers

Numbers = list[float] | None
"""The elements on one rank; None where it has no tensor, or one that the collective leaves unspecified."""


@dataclass(frozen=True)
class Flow:
    """Slice `piece` of rank `source` became slice `place` of rank `target`, or a term of it; bytes are 0 if it stayed."""

    source: int
    piece: int
    target: int
    place: int
    bytes: int


@dataclass(frozen=True)
class Backward:
    """The gradients at the output of every rank, and what became of them at its input.

    pair        the row of PAIRS, "" for send
    collective  what moves the gradients
    """

    pair: str
    collective: str
    text: str
    before: list[Numbers]
    after: list[Numbers]


@dataclass(frozen=True)
class Shown:
    """What was seen. `least` is what the best algorithm costs the busiest rank, in bytes sent or received."""

    case: Case
    element_bytes: int
    before: list[Numbers]
    after: list[Numbers]
    flows: list[Flow]
    least: float
    backwards: list[Backward]
    notes: list[str]

    def sent(self, rank: int) -> int:
        """Bytes that others have from a rank, if each gets them from where they were and nothing is reduced on the way."""
        return sum(flow.bytes for flow in self.flows if flow.source == rank)

    def received(self, rank: int) -> int:
        return sum(flow.bytes for flow in self.flows if flow.target == rank)

    def as_json(self) -> dict[str, Any]:
        ranks = range(self.case.ranks)
        return asdict(self) | {"bytes": [{"rank": r, "sent": self.sent(r), "received": self.received(r)} for r in ranks]}


def demonstrate(case: Case) -> Shown:
    """Run a collective on threads, and every pair that has it as its forward. Raises ValueError as `complete` does."""
    case = complete(case)
    dtype: torch.dtype = getattr(torch, case.dtype)
    with LocalWorld(Mesh(ranks=case.ranks)) as local:
        arrived = [False] * case.ranks
        seen = local.run(lambda world: _on_rank(world, case, dtype, arrived))
        backwards = _backwards(local, case, dtype)
    before, after = [x for x, _, _ in seen], [y for _, y, _ in seen]
    whole_bytes = max(len(x) for x in (*before, *after) if x is not None) * dtype.itemsize
    return Shown(
        case=case,
        element_bytes=dtype.itemsize,
        before=before,
        after=after,
        flows=_flows(case, [marks for _, _, marks in seen], case.elements // case.pieces * dtype.itemsize),
        least=float(case.kind.least(case.ranks) * whole_bytes),
        backwards=backwards,
        notes=_notes(case, after, backwards),
    )


# What every rank does.


def _on_rank(world: World, case: Case, dtype: torch.dtype, arrived: list[bool]) -> tuple[Numbers, Numbers, Tensor | None]:
    """What this rank had before and after, and the marks that reached it: (slices of the output, slices of all inputs)."""
    if case.collective == "barrier":
        return _barrier(world, arrived)
    call, group = _CALLS[case.collective], world.group("ranks")
    x = torch.tensor(numbers(world.rank, case.elements), dtype=dtype)
    y = call(world.transport, group, x, case)
    marks = call(world.transport, group, _marked(case, world.rank), case)
    before = None if case.collective == "scatter" and world.rank != case.root else x.tolist()
    return before, None if y is None else y.tolist(), marks


def _barrier(world: World, arrived: list[bool]) -> tuple[Numbers, Numbers, None]:
    """Before, a 1 for every rank that this one knows has arrived: itself. After, one for each that it finds has."""
    arrived[world.rank] = True
    before = [int(rank == world.rank) for rank in range(world.size)]
    world.transport.barrier(world.group("ranks")).wait()
    return list(before), [int(there) for there in arrived], None


def _marked(case: Case, rank: int) -> Tensor:
    """(slices of my input, slices of all inputs), not zero where both are the same: a slice that can be followed.

    The least of all is changed only by a mark below zero, the largest only by one above.
    """
    marks = torch.zeros(case.pieces, case.ranks * case.pieces, dtype=torch.float64)
    marks[:, rank * case.pieces : (rank + 1) * case.pieces].fill_diagonal_(-1 if case.op == "min" else 1)
    return marks


def _flows(case: Case, marks: list[Tensor | None], piece_bytes: int) -> list[Flow]:
    flows = []
    for target, reached in enumerate(marks):
        for place, column in reached.nonzero().tolist() if reached is not None else []:
            source, piece = divmod(column, case.pieces)
            flows.append(Flow(source, piece, target, place, 0 if source == target else piece_bytes))
    return flows


# The calls. None is a result that only the root has.


def _all_reduce(transport: Transport, group: Group, x: Tensor, case: Case) -> Tensor:
    y = x.clone()
    transport.all_reduce(y, group, case.op or "sum").wait()
    return y


def _all_gather(transport: Transport, group: Group, x: Tensor, case: Case) -> Tensor:
    y = _joined(x, group)
    transport.all_gather(y, x, group).wait()
    return y


def _reduce_scatter(transport: Transport, group: Group, x: Tensor, case: Case) -> Tensor:
    y = _slice(x, group)
    transport.reduce_scatter(y, x, group, case.op or "sum").wait()
    return y


def _all_to_all(transport: Transport, group: Group, x: Tensor, case: Case) -> Tensor:
    y = torch.empty_like(x)
    transport.all_to_all(y.tensor_split(group.size), x.tensor_split(group.size), group).wait()
    return y


def _broadcast(transport: Transport, group: Group, x: Tensor, case: Case) -> Tensor:
    y = x.clone()
    transport.broadcast(y, case.root or 0, group).wait()
    return y


def _reduce(transport: Transport, group: Group, x: Tensor, case: Case) -> Tensor | None:
    y = x.clone()
    transport.reduce(y, case.root or 0, group, case.op or "sum").wait()
    return y if transport.rank == case.root else None


def _gather(transport: Transport, group: Group, x: Tensor, case: Case) -> Tensor | None:
    y = _joined(x, group) if transport.rank == case.root else None
    transport.gather(y, x, case.root or 0, group).wait()
    return y


def _scatter(transport: Transport, group: Group, x: Tensor, case: Case) -> Tensor:
    y = _slice(x, group)
    transport.scatter(y, x if transport.rank == case.root else None, case.root or 0, group).wait()
    return y


def _send(transport: Transport, group: Group, x: Tensor, case: Case) -> Tensor:
    source = case.root or 0
    return _message(transport, group, x, source, (source + 1) % group.size)


def _message(transport: Transport, group: Group, x: Tensor, source: int, target: int) -> Tensor:
    y = x.clone()
    if transport.rank == source:
        transport.send(x, target, group).wait()
    elif transport.rank == target:
        transport.recv(y, source, group).wait()
    return y


def _joined(x: Tensor, group: Group) -> Tensor:
    return x.new_empty(group.size * x.shape[0], *x.shape[1:])


def _slice(x: Tensor, group: Group) -> Tensor:
    return x.new_empty(x.shape[0] // group.size, *x.shape[1:])


_CALLS: dict[str, Callable[[Transport, Group, Tensor, Case], Tensor | None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
}


# The backward: rows of PAIRS, differentiated by autograd.

# Where the result is read by the same computation on every rank, its gradient is the same on every rank.
_SAME_GRADIENT = ("identity", "shard")
_BACKWARD = {
    "identity": "the result is used alike everywhere, so every rank has its whole gradient already; nothing moves",
    "shard": "the result is used alike everywhere, so every rank keeps its slice of the gradient; nothing moves",
    "reduce_scatter": "every rank uses the result in its own way, so the gradients are added up, and each rank keeps its slice",
    "all_gather": "every rank has the gradient of its slice, and needs that of the whole",
    "all_to_all_back": "every slice of the gradient goes back to where the slice came from",
}


def _backwards(local: LocalWorld, case: Case, dtype: torch.dtype) -> list[Backward]:
    if not dtype.is_floating_point or case.op not in (None, "sum"):
        return []
    if case.collective == "send":
        return [_send_back(local, case, dtype)]
    found = []
    for pair, (forward, backward) in PAIRS.items():
        if forward == case.collective:
            seen = local.run(lambda world, pair=pair: _gradients(world, case, dtype, pair))
            before, after = [given for given, _ in seen], [came for _, came in seen]
            found.append(Backward(pair, backward, _BACKWARD[backward], before, after))
    return found


def _gradients(world: World, case: Case, dtype: torch.dtype, pair: str) -> tuple[Numbers, Numbers]:
    x = torch.tensor(numbers(world.rank, case.elements), dtype=dtype, requires_grad=True)
    y = move(x, pair, world, "ranks")
    owner = 0 if PAIRS[pair][1] in _SAME_GRADIENT else world.rank
    given = torch.tensor(numbers(owner, y.numel()), dtype=dtype)
    y.backward(given)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return given.tolist(), x.grad.tolist()


def _send_back(local: LocalWorld, case: Case, dtype: torch.dtype) -> Backward:
    source = case.root or 0
    target = (source + 1) % case.ranks

    def on_rank(world: World) -> tuple[Numbers, Numbers]:
        given = torch.tensor(numbers(world.rank, case.elements), dtype=dtype)
        came = _message(world.transport, world.group("ranks"), given, target, source)
        return given.tolist() if world.rank == target else None, came.tolist() if world.rank == source else None

    seen = local.run(on_rank)
    text = f"the gradient of what rank {target} received goes back to rank {source}"
    return Backward("", "send", text, [given for given, _ in seen], [came for _, came in seen])


def _notes(case: Case, after: list[Numbers], backwards: list[Backward]) -> list[str]:
    if case.collective == "barrier":
        return ["a 1 in place i: this rank can be sure that rank i has arrived"]
    notes = []
    exact_to = DTYPES[case.dtype].exact_to
    largest = max(abs(value) for x in after if x is not None for value in x)
    if largest > exact_to:
        notes.append(f"{case.dtype} has every whole number only up to {exact_to}: larger ones are rounded, as in training")
    as_backward = [pair for pair, (_, backward) in PAIRS.items() if backward == case.collective]
    if as_backward:
        rows = ", ".join(f"{pair} (forward {PAIRS[pair][0]})" for pair in as_backward)
        notes.append(f"{case.collective} is itself the backward in the pair{'s' * (len(as_backward) > 1)} {rows}")
    if backwards:
        return notes
    if case.collective not in {forward for forward, _ in PAIRS.values()} | {"send"}:
        notes.append(f"no row of PAIRS has {case.collective}: it moves state, outside of autograd, and has no backward")
    elif not DTYPES[case.dtype].floating:
        notes.append(f"{case.dtype} has no gradient; a floating point --dtype shows the backward")
    else:
        notes.append(f"gradients are defined for the sum: --op sum shows the backward, {case.op} has none")
    return notes
