"""One rank's list of actions bound to its graphs, tensors and communicators: closures over numbered slots, made once.

Running a list is then a loop over closures. Which value each action reads and writes, which of them die with it, and which
messages it must wait for are all decided here, from the Program and the list alone.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm.transport import Group, Handle
from phalanx.comm.world import World
from phalanx.derive.program import Program, Segment, Value
from phalanx.run.gather import exclusive
from phalanx.run.parameters import Parameters
from phalanx.schedule.actions import Action

Operation = Callable[[], None]
Key = tuple[Hashable, ...]


@dataclass
class _Node:
    """An action, or a piece of work that the list implies, with the slots it touches."""

    action: Action
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    make: Callable[[_Node], Operation] = lambda node: _nothing
    dead: list[int] = field(default_factory=list)
    """Slots that nothing reads after this."""
    needs: list[int] = field(default_factory=list)
    """Nodes that the list wants complete before this one."""
    waits: list[int] = field(default_factory=list)
    """Nodes whose messages must be complete before this starts."""
    number: int = 0
    awaited: bool = False
    """True if some node waits for this one's messages by name."""


class Bound:
    """The executable form of one rank's list.

    tables    values of the Program's table graph, unless it reads the batch
    others    what NORM and OPT do
    training  False binds the forward actions only, with the graphs that save nothing
    watch     a segment whose outputs are kept for `watched`
    """

    def __init__(
        self,
        program: Program,
        actions: Sequence[Action],
        world: World,
        parameters: Parameters,
        *,
        training: bool,
        tables: Mapping[str, Tensor],
        others: Mapping[str, Operation] | None = None,
        watch: int | None = None,
    ) -> None:
        self.program, self.world, self.parameters, self.training = program, world, parameters, training
        self.others = dict(others or {})
        self._ids: dict[Key, int] = {}
        self._slots: list[Any] = []
        self._fixed: set[int] = set()
        self._last = len(program.segments) - 1
        self._watch = watch
        self._step = self._slot(("step",), fixed=0)
        self._count = self._slot(("count",), fixed=None)
        self._count_handle: Handle | None = None
        self._static_count: Tensor | None = None
        self._pool = _Pool(world.device)
        self._flying: dict[int, tuple[list[Handle], list[Tensor]]] = {}
        self._sent: deque[tuple[list[Handle], list[Tensor]]] = deque()
        # The communicator of messages between stages; absent without a pipeline.
        self._pipe: Group | None = world.group("pp") if world.mesh.shape.get("pp", 1) > 1 else None
        for name, value in tables.items():
            self._slot(("table", name, None), fixed=value)
        nodes = self._nodes(actions)
        self._link(nodes)
        self.operations: list[tuple[tuple[int, ...], Operation, Action]] = [
            (tuple(node.waits), node.make(node), node.action) for node in nodes
        ]
        self._transient = [i for i in range(len(self._slots)) if i not in self._fixed]

    # Running

    def start(self, step: int, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Take the step number and this rank's microbatches."""
        slots = self._slots
        for i in self._transient:  # left over only if the step before ended in an exception
            slots[i] = None
        self._flying.clear()
        self._sent.clear()
        self._count_handle = None
        slots[self._step] = step
        for j, part in enumerate(parts):
            for name, x in part.items():
                i = self._ids.get(("batch", name, j))
                if i is not None:
                    slots[i] = x

    def wait(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            for handle in self._flying.pop(node)[0]:
                handle.wait()

    def drain(self) -> None:
        """Wait for the sends that are still in flight."""
        while self._sent:
            for handle in self._sent.popleft()[0]:
                handle.wait()

    @property
    def count(self) -> Tensor:
        """Number of valid tokens in the step's global batch, once COUNT is complete."""
        if self._count_handle is not None:
            self._count_handle.wait()
            self._count_handle = None
        count: Tensor = self._slots[self._count]
        return count

    def losses(self) -> list[Tensor]:
        """The loss sum of every microbatch, as this rank holds it; empty on all but the last stage."""
        ids = [self._ids.get(("cut", self._last, self.program.segments[-1].outputs[0], j)) for j in range(self.program.microbatches)]
        return [self._slots[i] for i in ids if i is not None and self._slots[i] is not None]

    def watched(self, name: str, microbatch: int) -> Tensor | None:
        """A kept output, None if it is not made here."""
        i = self._ids.get(("cut", self._watch, name, microbatch))
        return None if i is None else self._slots[i]

    # Slots

    def _slot(self, key: Key, **fixed: Any) -> int:
        """The number of a slot; with `fixed=value` it is never emptied."""
        if key not in self._ids:
            self._ids[key] = len(self._slots)
            self._slots.append(fixed.get("fixed"))
        if fixed:
            self._fixed.add(self._ids[key])
        return self._ids[key]

    def _arguments(self, segment: Segment, microbatch: int) -> list[int]:
        """Slots of world, step, microbatch, salt, params and buffers."""
        salt = segment.index
        return [
            self._slot(("world",), fixed=self.world.name),
            self._step,
            self._slot(("number", microbatch), fixed=microbatch),
            self._slot(("number", salt), fixed=salt),
            *(self._slot(("parameter", name), fixed=self.parameters.views[name]) for name in segment.params),
            *(self._slot(("buffer", name), fixed=self.parameters.buffers[name]) for name in segment.buffers),
        ]

    def _inputs(self, segment: Segment, microbatch: int) -> list[int]:
        ids = []
        for source in segment.inputs:
            if source.kind == "cut":
                ids.append(self._slot(("cut", segment.index - 1, source.name, microbatch)))
            elif source.kind == "table":
                j = microbatch if self.program.tables_read_batch else None
                ids.append(self._slot(("table", source.name, j), fixed=None))
            else:
                ids.append(self._slot(("batch", source.name, microbatch), fixed=None))
        return ids

    def _gradient(self, segment: int, value: Value, name: str, microbatch: int) -> int:
        """Slot of the gradient of an output of a segment."""
        if segment == self._last:
            if name == self.program.segments[-1].outputs[0]:
                return self._slot(("seed",))
        elif any(source.kind == "cut" and source.name == name for source in self.program.segments[segment + 1].inputs):
            return self._slot(("grad", segment, name, microbatch))
        # Nothing reads this output, so its gradient is zero.
        shape = value.spec.local_shape(value.shape, self.world.mesh)
        zeros = torch.zeros(shape, dtype=value.dtype, device=self.world.device)
        return self._slot(("zero", segment, name), fixed=zeros)

    # Actions

    def _nodes(self, actions: Sequence[Action]) -> list[_Node]:
        nodes: list[_Node] = []
        position: dict[int, int] = {}  # from the index of an action in the list to its node
        tabled: set[int] = set()
        for index, action in enumerate(actions):
            if not self.training and action.kind not in ("COUNT", "F", "SEND_F", "RECV_F"):
                continue
            j = action.microbatch if action.microbatch is not None else 0
            if action.kind == "F" and self.program.tables_read_batch and j not in tabled:
                tabled.add(j)
                nodes.append(self._tables(action, j))
            if action.kind in ("B", "I") and action.segment == self._last and ("seed",) not in self._ids:
                nodes.append(_Node(action, writes=[self._slot(("seed",))], make=self._make_seed))
            node = self._node(action, j)
            node.needs = [position[need] for need in action.needs if need in position]
            position[index] = len(nodes)
            nodes.append(node)
        return nodes

    def _node(self, action: Action, j: int) -> _Node:
        if action.kind == "COUNT":
            return _Node(action, make=self._make_count)
        if action.kind in self.others:
            return _Node(action, make=lambda node: self.others[action.kind])
        if action.segment is None or action.kind not in ("F", "B", "I", "W", "SEND_F", "SEND_B", "RECV_F", "RECV_B", "REDUCE"):
            raise ValueError(f"this schedule has {action}, which the executor does not do: every rank stores its parameters whole")
        segment = self.program.segments[action.segment]
        match action.kind:
            case "F":
                return self._f(action, segment, j)
            case "B":
                return _Node(action, self._backward_reads(segment, j), self._input_gradients(segment, j), self._make_b)
            case "I":
                kept = [self._slot((kind, segment.index, j)) for kind in ("pending", "kept")]
                return _Node(action, self._backward_reads(segment, j), [*self._input_gradients(segment, j), *kept], self._make_i)
            case "W":
                kept = [self._slot((kind, segment.index, j)) for kind in ("kept", "pending")]
                return _Node(action, [*self._arguments(segment, j), *kept], [], self._make_w)
            case "REDUCE":
                return _Node(action, make=lambda node: lambda: self.parameters.reduce(segment.index))
        backward = action.kind.endswith("B")
        k = segment.index - backward  # the message crosses from segment k to k + 1, or back
        values = self._crossing(k, gradients=backward)
        slots = [self._slot(("grad" if backward else "cut", k, name, j)) for name, _ in values]
        if action.kind.startswith("SEND"):
            return _Node(action, slots, [], self._make_send)
        return _Node(action, [], slots, lambda node: self._make_recv(node, [value for _, value in values]))

    def _f(self, action: Action, segment: Segment, j: int) -> _Node:
        reads = [*self._arguments(segment, j), *self._inputs(segment, j)]
        kept = {"fixed": None} if segment.index in (self._watch, self._last) else {}
        writes = [self._slot(("cut", segment.index, name, j), **kept) for name in segment.outputs]
        if self.training:
            writes.append(self._slot(("saved", segment.index, j)))
        return _Node(action, reads, writes, self._make_f)

    def _backward_reads(self, segment: Segment, j: int) -> list[int]:
        outputs = zip(segment.outputs, segment.cls.outputs, strict=True)
        grads = [self._gradient(segment.index, value, name, j) for name, value in outputs if value.requires_grad]
        return [*self._arguments(segment, j), self._slot(("saved", segment.index, j)), *grads]

    def _input_gradients(self, segment: Segment, j: int) -> list[int]:
        inputs = zip(segment.inputs, segment.cls.inputs, strict=True)
        return [
            self._slot(("grad", segment.index - 1, source.name, j) if source.kind == "cut" else ("unused",))
            for source, value in inputs
            if value.requires_grad
        ]

    def _crossing(self, k: int, *, gradients: bool) -> list[tuple[str, Value]]:
        """The values that go from segment k to k + 1, or whose gradients come back, in the order of k's outputs."""
        producer, consumer = self.program.segments[k], self.program.segments[k + 1]
        read = {source.name for source in consumer.inputs if source.kind == "cut"}
        outputs = zip(producer.outputs, producer.cls.outputs, strict=True)
        return [(name, value) for name, value in outputs if name in read and (value.requires_grad or not gradients)]

    def _link(self, nodes: Sequence[_Node]) -> None:
        """Where slots die and messages are waited for.

        A slot dies at its last reader, and a value that nothing reads is not kept at all. A node waits for the messages that
        bring what it reads and for those that the list names, each once.
        """
        reader = {i: n for n, node in enumerate(nodes) for i in node.reads}
        writer: dict[int, int] = {}
        waited: set[int] = set()
        for n, node in enumerate(nodes):
            node.dead = sorted({i for i in node.reads if i not in self._fixed and reader[i] == n})
            wanted = {writer[i] for i in node.reads if i in writer} | {m for m in node.needs if _is_message(nodes[m])}
            node.waits = sorted(wanted - waited)
            waited |= wanted
            if node.action.kind.startswith("RECV"):
                writer.update((i, n) for i in node.writes)
        for n, node in enumerate(nodes):
            node.number, node.awaited = n, n in waited
            node.writes = [i if i in reader or i in self._fixed else UNREAD for i in node.writes]

    # Closures

    def _make_f(self, node: _Node) -> Operation:
        slots, dead, store = self._slots, node.dead, self._store
        graphs = self._segment(node).cls.graphs
        assert graphs is not None
        read = operator.itemgetter(*node.reads)
        if not self.training:
            evaluate = _callable(graphs.E)

            def forward() -> None:
                arguments = list(read(slots))
                for i in dead:
                    slots[i] = None
                store(node.writes, evaluate(arguments))

            return forward
        compute, outputs_, saved_ = _callable(graphs.F), node.writes[:-1], node.writes[-1]

        def forward_saving() -> None:
            arguments = list(read(slots))
            for i in dead:
                slots[i] = None
            outputs, saved = compute(arguments)
            store(outputs_, outputs)
            if saved_ != UNREAD:
                slots[saved_] = saved

        return forward_saving

    def _make_b(self, node: _Node) -> Operation:
        graphs = self._segment(node).cls.graphs
        assert graphs is not None and node.action.segment is not None
        slots, store, accumulate, k = self._slots, self._store, self.parameters.accumulate, node.action.segment
        compute, arguments_of = _callable(graphs.B), self._backward_arguments(node)

        def backward() -> None:
            grad_inputs, grads = compute(arguments_of())
            accumulate(k, grads, grad_inputs)
            store(node.writes, grad_inputs)

        return backward

    def _make_i(self, node: _Node) -> Operation:
        graphs = self._segment(node).cls.graphs
        assert graphs is not None
        slots, store, kept_indices = self._slots, self._store, graphs.saved_for_w
        compute, arguments_of = _callable(graphs.I), self._backward_arguments(node)
        saved_ = self._ids[("saved", node.action.segment, node.action.microbatch)]
        *inputs_, pending_, kept_ = node.writes

        def input_gradient() -> None:
            kept = [slots[saved_][i] for i in kept_indices]
            grad_inputs, pending = compute(arguments_of())
            store(inputs_, grad_inputs)
            slots[pending_], slots[kept_] = pending, kept

        return input_gradient

    def _make_w(self, node: _Node) -> Operation:
        graphs = self._segment(node).cls.graphs
        assert graphs is not None and node.action.segment is not None
        slots, dead, accumulate, k = self._slots, node.dead, self.parameters.accumulate, node.action.segment
        compute, (*fixed, kept_, pending_) = _callable(graphs.W), node.reads
        read = operator.itemgetter(*fixed)

        def weight_gradient() -> None:
            arguments = list(read(slots))
            arguments += slots[kept_]
            arguments += slots[pending_]
            for i in dead:
                slots[i] = None
            accumulate(k, compute(arguments))

        return weight_gradient

    def _backward_arguments(self, node: _Node) -> Callable[[], list[Any]]:
        saved_ = self._ids[("saved", node.action.segment, node.action.microbatch)]
        place = node.reads.index(saved_)
        slots, dead, read = self._slots, node.dead, operator.itemgetter(*node.reads[:place])
        grads_ = node.reads[place + 1 :]

        def arguments_of() -> list[Any]:
            arguments = list(read(slots))
            arguments += slots[saved_]
            arguments += [slots[i] for i in grads_]
            for i in dead:
                slots[i] = None
            return arguments

        return arguments_of

    def _make_send(self, node: _Node) -> Operation:
        slots, dead, reads, sent, peer = self._slots, node.dead, node.reads, self._sent, node.action.peer
        pipe = self._pipe
        assert pipe is not None and peer is not None, f"{node.action} without a pipeline"

        def send() -> None:
            while sent and all(handle.done() for handle in sent[0][0]):
                sent.popleft()
            tensors = [slots[i] for i in reads]
            for i in dead:
                slots[i] = None
            message = [self.world.transport.send(x, peer, pipe) for x in tensors], tensors
            if node.awaited:
                self._flying[node.number] = message
            else:
                sent.append(message)

        return send

    def _make_recv(self, node: _Node, values: Sequence[Value]) -> Operation:
        slots, writes, peer = self._slots, node.writes, node.action.peer
        pipe, take = self._pipe, self._pool.take
        assert pipe is not None and peer is not None, f"{node.action} without a pipeline"
        kinds = [(value.spec.local_shape(value.shape, self.world.mesh), value.dtype) for value in values]

        def receive() -> None:
            buffers = [take(shape, dtype) for shape, dtype in kinds]
            self._flying[node.number] = [self.world.transport.recv(x, peer, pipe) for x in buffers], buffers
            for i, x in zip(writes, buffers, strict=True):
                if i != UNREAD:
                    slots[i] = x

        return receive

    def _make_count(self, node: _Node) -> Operation:
        segment, m, slots = self.program.count, self.program.microbatches, self._slots
        graphs = segment.cls.graphs
        assert graphs is not None
        compute = _callable(graphs.E)
        reads = [operator.itemgetter(*self._arguments(segment, j), *self._inputs(segment, j)) for j in range(m)]
        group = self.world.group([axis for axis in self.world.mesh.names if axis in segment.cls.outputs[0].spec.partial])

        def count() -> None:
            if self._static_count is not None:
                slots[self._count] = self._static_count
            else:
                counts = [compute(list(read(slots)))[0].reshape(()) for read in reads]
                total = torch.stack(counts).sum(dtype=torch.float64 if counts[0].is_floating_point() else torch.int64)
                slots[self._count] = total
                if group.size > 1:
                    self._count_handle = self.world.transport.all_reduce(total, group)
                if not segment.inputs:
                    self._static_count = self.count

        return count

    def _make_seed(self, node: _Node) -> Operation:
        seed_, dtype = self._ids[("seed",)], self.program.segments[-1].cls.outputs[0].dtype

        def seed() -> None:
            self._slots[seed_] = self.count.double().reciprocal().to(dtype)

        return seed

    def _tables(self, action: Action, j: int) -> _Node:
        """The tables of one microbatch, before its first forward."""
        segment = self.program.tables
        assert segment is not None and segment.cls.graphs is not None
        compute, writes = _callable(segment.cls.graphs.E), [self._slot(("table", name, j), fixed=None) for name in segment.outputs]
        reads = [*self._arguments(segment, j), *self._inputs(segment, j)]
        read = operator.itemgetter(*reads)
        return _Node(action, reads, writes, lambda node: lambda: self._store(writes, compute(list(read(self._slots)))))

    def _segment(self, node: _Node) -> Segment:
        assert node.action.segment is not None
        return self.program.segments[node.action.segment]

    def _store(self, ids: Sequence[int], values: Sequence[Tensor]) -> None:
        """What crosses a boundary is dense: graphs are traced for dense tensors, and messages need them."""
        for i, x in zip(ids, values, strict=True):
            if i != UNREAD:
                self._slots[i] = x.contiguous()


UNREAD = -1
"""In place of a slot: the value is dropped at once."""


class _Pool:
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


def tables(program: Program, world: World, parameters: Parameters) -> dict[str, Tensor]:
    """The values of the table graph, computed once; empty if there is none or it reads the batch."""
    segment = program.tables
    if segment is None or program.tables_read_batch:
        return {}
    assert segment.cls.graphs is not None and not segment.inputs, "tables that read the batch must say so"
    weights = [*(parameters.views[name] for name in segment.params), *(parameters.buffers[name] for name in segment.buffers)]
    values = _callable(segment.cls.graphs.E)([world.name, 0, 0, segment.index, *weights])
    return dict(zip(segment.outputs, values, strict=True))


def _callable(graph: Any) -> Callable[[list[Any]], Any]:
    """The graph without the hooks that a module's call goes through."""
    return graph.forward if isinstance(graph, nn.Module) else graph  # type: ignore[no-any-return]


def _is_message(node: _Node) -> bool:
    return node.action.kind.startswith(("SEND", "RECV"))


def _nothing() -> None: ...
