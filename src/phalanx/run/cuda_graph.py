"""F and B of a segment as CUDA graphs: one launch in place of one per operator, for models so small that the host is the limit.

A CUDA graph reads and writes the memory that it was captured on. So a segment has slots, one per microbatch in flight: buffers for
the inputs and output gradients, which are copied in, and whatever the captured F and B wrote. A slot is free again when nobody
but it sees that memory, views and messages in flight included; then B of the slot reads what its F saved, without a copy.
What is not captured: segments with collectives, which order other streams by events, or with masks, which depend on the step;
BA and WA, since accumulators move from step to step: gradients are values, added afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from phalanx.derive.program import Graphs, Program, Segment
from phalanx.derive.trace import RUN

T = TypeVar("T")
Record = Callable[[Callable[[], T], Any], tuple[Callable[[], None], T]]
"""From work and a memory pool (None for a new one): what repeats the work, and the results that each repetition overwrites."""


def captured_program(program: Program, record: Record[Any] | None = None) -> tuple[Program, tuple[str, ...]]:
    """The same Program with the F and B of every segment captured when they first run, and the names of those that cannot be.

    For one rank's Executor whose parameters stay where they are: not under zero 3, which gathers them into changing buffers. Results
    are those of the graphs, bit for bit.
    """
    segments = tuple(captured(segment, record) if capturable(segment) else segment for segment in program.segments)
    left = tuple(before.name for before, after in zip(program.segments, segments, strict=True) if before is after)
    return replace(program, segments=segments), left


def capturable(segment: Segment) -> bool:
    """True if neither F nor B reads world, step, microbatch or salt, and F saves something by which B finds its slot."""
    graphs = segment.cls.graphs
    if graphs is None or graphs.saved_bytes == 0:
        return False
    placeholders = [n for graph in (graphs.F, graphs.B) for n in _placeholders(graph)[: len(RUN)]]
    return not any(node.users for node in placeholders)


def captured(segment: Segment, record: Record[Any] | None = None) -> Segment:
    graphs = segment.cls.graphs
    assert graphs is not None
    slots = Slots(graphs, len(RUN) + len(segment.params) + len(segment.buffers), record or record_on_cuda)
    made: Any = replace(graphs, F=slots.forward, B=slots.backward, BA=None, WA=None)  # type: ignore[arg-type]
    return replace(segment, cls=replace(segment.cls, graphs=made))


def record_on_cuda(work: Callable[[], T], pool: Any) -> tuple[Callable[[], None], T]:
    """Run the work once to warm up its kernels, and capture it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events in a thread of its own, which a capture in any other mode would take for an error.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        results = work()

    return _Replay(graph), results


@dataclass
class _Replay:
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> None:
        self.graph.replay()

    def pool(self) -> Any:
        return self.graph.pool()  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class Slot:
    """The memory of one microbatch in flight, and the graphs that were captured on it."""

    inputs: list[Tensor]
    replay_forward: Callable[[], None]
    outputs: tuple[Tensor, ...]
    saved: tuple[Tensor, ...]
    seeds: list[Tensor] = field(default_factory=list)
    """Output gradients."""
    replay_backward: Callable[[], None] | None = None
    grad_inputs: tuple[Tensor, ...] = ()
    grads: tuple[Tensor | None, ...] = ()
    alone: dict[int, int] = field(default_factory=dict)
    """By storage: references to it when only the slot has any."""

    def references(self) -> dict[int, int]:
        tensors = (*self.inputs, *self.outputs, *self.saved, *self.seeds, *self.grad_inputs, *self.grads)
        storages = dict.fromkeys(x.untyped_storage()._cdata for x in tensors if x is not None)
        return {storage: torch._C._storage_Use_Count(storage) for storage in storages}

    @property
    def free(self) -> bool:
        count = torch._C._storage_Use_Count
        return all(count(storage) == references for storage, references in self.alone.items())


class Slots:
    """F and B of one segment, in the calling convention of Graphs.

    fixed  how many arguments come before the inputs or the saved values: run arguments, parameters and buffers
    """

    def __init__(self, graphs: Graphs, fixed: int, record: Record[Any]) -> None:
        self.graphs, self.fixed, self.record = graphs, fixed, record
        self.slots: list[Slot] = []
        self.by_saved: dict[tuple[int, ...], Slot] = {}
        """By the addresses of what F saved."""

    def forward(self, arguments: list[Any]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        given = arguments[self.fixed :]
        slot = next((slot for slot in self.slots if slot.free), None)
        if slot is None:
            slot = self._capture_forward(arguments[: self.fixed], given)
        _copy(slot.inputs, given)
        arguments.clear()
        slot.replay_forward()
        return _seen(slot.outputs), tuple(x.detach() for x in slot.saved)

    def backward(self, arguments: list[Any]) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        count = len(self.slots[0].saved) if self.slots else 0
        late = self.fixed + count
        slot = self.by_saved.get(_addresses(arguments[self.fixed : late]))
        if slot is None:  # what was saved comes from elsewhere
            results: tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]] = _plain(self.graphs.B)(arguments)
            return results
        seeds = arguments[late:]
        if slot.replay_backward is None:
            self._capture_backward(slot, arguments[: self.fixed], seeds)
        assert slot.replay_backward is not None
        _copy(slot.seeds, seeds)
        arguments.clear()
        slot.replay_backward()
        return _seen(slot.grad_inputs), tuple(None if x is None else x.detach() for x in slot.grads)

    def _capture_forward(self, fixed: Sequence[Any], given: Sequence[Tensor]) -> Slot:
        inputs = [x.clone() for x in given]
        compute = _plain(self.graphs.F)
        replay, (outputs, saved) = self.record(lambda: compute([*fixed, *inputs]), None)
        slot = Slot(inputs, replay, tuple(outputs), tuple(saved))
        slot.alone = slot.references()
        self.slots.append(slot)
        self.by_saved[_addresses(slot.saved)] = slot
        return slot

    def _capture_backward(self, slot: Slot, fixed: Sequence[Any], seeds: Sequence[Tensor]) -> None:
        before = slot.references()
        slot.seeds = [x.clone() for x in seeds]
        compute = _plain(self.graphs.B)
        # B may use what F's captured temporaries have left: the two are always replayed in turn.
        pool = slot.replay_forward.pool() if isinstance(slot.replay_forward, _Replay) else None
        slot.replay_backward, results = self.record(lambda: compute([*fixed, *slot.saved, *slot.seeds]), pool)
        slot.grad_inputs, slot.grads = tuple(results[0]), tuple(results[1])
        # Others hold what F returned at this moment, and nobody what B did: only what was added counts.
        now = slot.references()
        slot.alone = {storage: slot.alone.get(storage, 0) + count - before.get(storage, 0) for storage, count in now.items()}


def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def _seen(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors of their own on the same memory, by which it is known to be in use.

    Scalars are copied: the executor keeps losses for a step, and each would keep the logits' slot.
    """
    return tuple(x.clone() if x.dim() == 0 else x.detach() for x in tensors)


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in tensors)


def _plain(graph: Any) -> Callable[[list[Any]], Any]:
    return graph.forward if isinstance(graph, fx.GraphModule) else graph  # type: ignore[no-any-return,return-value,unused-ignore]


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]
