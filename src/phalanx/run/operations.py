"""What each kind of action does when its turn comes: a closure per action over numbered slots, with nothing left to decide.

`bind` decides which slots an action reads and writes, which of them die with it, and what it waits for; then it calls these.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm.transport import Group, Handle
from phalanx.comm.world import World
from phalanx.derive.program import Graphs, Segment, Value
from phalanx.run.gather import exclusive
from phalanx.run.parameters import Parameters
from phalanx.run.sums import sum_over
from phalanx.schedule.actions import Action

Operation = Callable[[], list[Handle] | None]
"""Does its action; returns the messages it has issued, if any."""
Message = tuple[list[Handle], list[Tensor]]
"""A message in flight, with the tensors that must live until it is complete."""

UNREAD = -1
"""In place of a slot: the value is dropped at once."""


@dataclass
class Node:
    """An action, or a piece of work that the list implies before it, with the slots it touches."""

    action: Action
    make: Callable[[Node], Operation]
    reads: list[int] = field(default_factory=list)
    """Slots of the arguments, in order."""
    writes: list[int] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    """Nodes that the list wants complete before this one."""
    dead: list[int] = field(default_factory=list)
    """Slots that nothing reads after this."""
    waits: list[int] = field(default_factory=list)
    """Nodes whose messages must be complete before this starts."""
    implied: bool = False
    number: int = 0
    awaited: bool = False
    """True if some node waits for this one's messages by name."""

    @property
    def is_awaited(self) -> bool:
        """True of what later nodes wait for by name; all sums of a step are waited for at NORM."""
        return self.action.kind.startswith(("SEND", "RECV", "GATHER"))


class Machine:
    """What the closures of one list share: the slots, and what is in flight."""

    def __init__(self, world: World, parameters: Parameters) -> None:
        self.world, self.parameters = world, parameters
        self.slots: list[Any] = []
        self.flying: dict[int, Message] = {}
        """By node: what a later node waits for."""
        self.sent: deque[Message] = deque()
        """Sends that nobody waits for by name, oldest first."""
        self.pool = Pool(world.device)
        self.count_handle: Handle | None = None
        self.loss_scale = 1.0
        """What the seed of the backward is multiplied by."""
        self.pipe: Group | None = world.group("pp") if world.mesh.extent(("pp",)) > 1 else None

    def reset(self, transient: Sequence[int]) -> None:
        """Forget what a step that ended in an exception has left behind."""
        for i in transient:
            self.slots[i] = None
        self.flying.clear()
        self.sent.clear()
        self.count_handle = None

    def wait(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            for handle in self.flying.pop(node)[0]:
                handle.wait()

    def drain(self) -> None:
        """Wait for the sends that are still in flight."""
        while self.sent:
            for handle in self.sent.popleft()[0]:
                handle.wait()

    def store(self, ids: Sequence[int], values: Sequence[Tensor]) -> None:
        """What crosses a boundary is dense: graphs are traced for dense tensors, and messages need them."""
        for i, x in zip(ids, values, strict=True):
            if i != UNREAD:
                self.slots[i] = x.contiguous()


class Pool:
    """Buffers for what arrives. One is free again when no other tensor sees its memory, saved values and views included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffers = self.buffers.setdefault((shape, dtype), [])
        for buffer in buffers:
            if exclusive(buffer):
                return buffer.detach()
        buffers.append(torch.empty(shape, dtype=dtype, device=self.device))
        return buffers[-1].detach()


# Compute


def forward(machine: Machine, node: Node, graphs: Graphs, saved: int | None) -> Operation:
    """F, or E where nothing is saved."""
    slots, dead, writes, store = machine.slots, node.dead, node.writes, machine.store
    read = operator.itemgetter(*node.reads)
    if saved is None:
        evaluate = callable_of(graphs.E)

        def run_without_saving() -> None:
            arguments = list(read(slots))
            for i in dead:
                slots[i] = None
            store(writes, evaluate(arguments))

        return run_without_saving
    compute = callable_of(graphs.F)

    def run() -> None:
        arguments = list(read(slots))
        for i in dead:
            slots[i] = None
        outputs, slots[saved] = compute(arguments)
        store(writes, outputs)

    return run


def backward(machine: Machine, node: Node, graphs: Graphs, saved: int, grads: Sequence[int]) -> Operation:
    """B; parameter gradients go to their accumulators, written by the graph itself where it can."""
    writes, store, parameters, k = node.writes, machine.store, machine.parameters, _segment(node)
    arguments_of = _backward_arguments(machine, node, saved, grads)
    if graphs.BA is not None and parameters.writes_in_place(k):
        compute_in_place = callable_of(graphs.BA)

        def run_in_place() -> None:
            arguments = arguments_of()
            arguments.append(parameters.fresh(k))
            arguments += parameters.accumulators(k)
            store(writes, compute_in_place(arguments))

        return run_in_place
    compute = callable_of(graphs.B)

    def run() -> None:
        grad_inputs, grads = compute(arguments_of())
        parameters.accumulate(k, grads)
        store(writes, grad_inputs)

    return run


def input_gradient(
    machine: Machine, node: Node, graphs: Graphs, saved: int, grads: Sequence[int], pending: int, kept: int
) -> Operation:
    """I; leaves for W what it has made for it, and of the saved values those that W needs."""
    slots, writes, store = machine.slots, node.writes, machine.store
    compute, arguments_of = callable_of(graphs.I), _backward_arguments(machine, node, saved, grads)

    def run() -> None:
        slots[kept] = [slots[saved][i] for i in graphs.saved_for_w]
        grad_inputs, slots[pending] = compute(arguments_of())
        store(writes, grad_inputs)

    return run


def weight_gradient(machine: Machine, node: Node, graphs: Graphs, fixed: Sequence[int], kept: int, pending: int) -> Operation:
    """W."""
    slots, dead, parameters, k = machine.slots, node.dead, machine.parameters, _segment(node)
    read, in_place = operator.itemgetter(*fixed), graphs.WA is not None and parameters.writes_in_place(k)
    compute = callable_of(graphs.WA if in_place else graphs.W)

    def run() -> None:
        arguments = list(read(slots))
        arguments += slots[kept]
        arguments += slots[pending]
        for i in dead:
            slots[i] = None
        if in_place:
            arguments.append(parameters.fresh(k))
            arguments += parameters.accumulators(k)
            compute(arguments)
        else:
            parameters.accumulate(k, compute(arguments))

    return run


def _backward_arguments(machine: Machine, node: Node, saved: int, grads: Sequence[int]) -> Callable[[], list[Any]]:
    """Arguments of B and I. The slots let go of them, so that each value dies inside the graph at its last use."""
    slots, dead = machine.slots, node.dead
    read = operator.itemgetter(*node.reads[: len(node.reads) - 1 - len(grads)])

    def arguments_of() -> list[Any]:
        arguments = list(read(slots))
        arguments += slots[saved]
        arguments += [slots[i] for i in grads]
        for i in dead:
            slots[i] = None
        return arguments

    return arguments_of


# Parameters


def gather(machine: Machine, node: Node, ids: dict[str, int]) -> Operation:
    """GATHER: whole parameters to the slots of their names."""
    slots, parameters, k = machine.slots, machine.parameters, _segment(node)

    def run() -> list[Handle]:
        handles = parameters.gather(k)
        for name, i in ids.items():
            slots[i] = parameters.views[name]
        machine.flying[node.number] = handles, []
        return handles

    return run


def free(machine: Machine, node: Node, ids: dict[str, int]) -> Operation:
    """FREE: what no other segment of this rank still holds."""
    slots, parameters, k = machine.slots, machine.parameters, _segment(node)

    def run() -> None:
        parameters.free(k)
        for name, i in ids.items():
            slots[i] = parameters.views.get(name)

    return run


# Messages


def send(machine: Machine, node: Node) -> Operation:
    slots, dead, reads, sent, pipe, peer = machine.slots, node.dead, node.reads, machine.sent, machine.pipe, node.action.peer
    assert pipe is not None and peer is not None, f"{node.action} without a pipeline"

    def run() -> list[Handle]:
        while sent and all(handle.done() for handle in sent[0][0]):
            sent.popleft()
        tensors = [slots[i] for i in reads]
        for i in dead:
            slots[i] = None
        handles = [machine.world.transport.send(x, peer, pipe) for x in tensors]
        if node.awaited:
            machine.flying[node.number] = handles, tensors
        else:
            sent.append((handles, tensors))
        return handles

    return run


def receive(machine: Machine, node: Node, values: Sequence[Value]) -> Operation:
    slots, writes, pipe, peer = machine.slots, node.writes, machine.pipe, node.action.peer
    assert pipe is not None and peer is not None, f"{node.action} without a pipeline"
    kinds = [(value.spec.local_shape(value.shape, machine.world.mesh), value.dtype) for value in values]

    def run() -> list[Handle]:
        buffers = [machine.pool.take(shape, dtype) for shape, dtype in kinds]
        handles = [machine.world.transport.recv(x, peer, pipe) for x in buffers]
        machine.flying[node.number] = handles, buffers
        for i, x in zip(writes, buffers, strict=True):
            if i != UNREAD:
                slots[i] = x
        return handles

    return run


# The step's scalars


def count(machine: Machine, segment: Segment, reads: Sequence[Sequence[int]], total: int) -> Operation:
    """COUNT: valid tokens of all microbatches and data ranks. Once and for all if the count reads nothing of the batch."""
    graphs, slots = segment.cls.graphs, machine.slots
    assert graphs is not None
    compute, getters = callable_of(graphs.E), [operator.itemgetter(*ids) for ids in reads]
    partial = segment.cls.outputs[0].spec.partial
    known: Tensor | None = None

    def run() -> list[Handle] | None:
        nonlocal known
        if known is not None:
            slots[total] = known
            return None
        counts = [compute(list(read(slots)))[0].reshape(()) for read in getters]
        # A new tensor: the sum must not be written into the batch if the count is an entry of it.
        slots[total] = torch.stack(counts).sum(dtype=torch.float64 if counts[0].is_floating_point() else torch.int64)
        if machine.world.mesh.extent(partial) > 1:
            machine.count_handle = sum_over(machine.world, slots[total], sorted(partial))
        if not segment.inputs:
            known = slots[total]
        return None if machine.count_handle is None else [machine.count_handle]

    return run


def counted(machine: Machine, total: int) -> Tensor:
    """The count, waited for if it is still being summed."""
    if machine.count_handle is not None:
        machine.count_handle.wait()
        machine.count_handle = None
    value: Tensor = machine.slots[total]
    return value


def seed(machine: Machine, total: int, target: int, dtype: torch.dtype) -> Operation:
    """The gradient that the loss sum starts the backward with: 1/count, times the loss scale."""

    def run() -> None:
        machine.slots[target] = (machine.loss_scale / counted(machine, total).double()).to(dtype)

    return run


def callable_of(graph: Any) -> Callable[[list[Any]], Any]:
    """The graph without the hooks that a module's call goes through."""
    return graph.forward if isinstance(graph, nn.Module) else graph  # type: ignore[no-any-return,return-value,unused-ignore]


def _segment(node: Node) -> int:
    assert node.action.segment is not None
    return node.action.segment
