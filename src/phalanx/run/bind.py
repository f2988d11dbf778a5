"""One rank's list of actions bound to its graphs, tensors and communicators: closures over numbered slots, made once.

Running a list is then a loop over closures. Which value each action reads and writes, which of them die with it, and which
messages it must wait for are all decided here, from the Program and the list alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx import random
from phalanx.comm.world import World
from phalanx.derive.program import Graphs, Program, Segment, Value
from phalanx.derive.watch import Exit
from phalanx.run import operations
from phalanx.run.operations import UNREAD, Machine, Node, Operation, callable_of
from phalanx.run.parameters import Parameters
from phalanx.schedule.actions import Action

Key = tuple[Hashable, ...]


class Bound:
    """The executable form of one rank's list.

    tables    values of the Program's table graph, unless it reads the batch
    others    what NORM and OPT do
    training  False binds a list of forward actions, with the graphs that save nothing
    seed      of dropout
    watch     values that are kept for `watched`; `program` is then the one that outputs them
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
        others: Mapping[str, Callable[[], None]] | None = None,
        watch: Sequence[Exit] = (),
        seed: int = 0,
    ) -> None:
        self.seed = seed
        self.program, self.world, self.parameters, self.training = program, world, parameters, training
        self.machine = Machine(world, parameters)
        self._others, self._kept = dict(others or {}), {(exit.segment, exit.value.name) for exit in watch}
        self._last = len(program.segments) - 1
        self._ids: dict[Key, int] = {}
        self._fixed: set[int] = set()
        self._step = self._slot(("step",), fixed=0)
        self._count = self._slot(("count",), fixed=None)
        for name, value in tables.items():
            self._slot(("table", name, None), fixed=value)
        nodes = self._nodes(actions)
        self._link(nodes)
        self.operations: list[tuple[tuple[int, ...], Operation, Action | None]] = [
            (tuple(node.waits), node.make(node), None if node.implied else node.action) for node in nodes
        ]
        """(messages to wait for first, what to do, the action it is, None for work that the next one implies), in order."""
        self._transient = [i for i in range(len(self.machine.slots)) if i not in self._fixed]

    # Around a run

    def start(self, step: int, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Take the step number and this rank's microbatches."""
        slots = self.machine.slots
        self.parameters.let_go()
        self.machine.reset(self._transient)
        slots[self._step] = step
        for j, part in enumerate(parts):
            for name, x in part.items():
                i = self._ids.get(("batch", name, j))
                if i is not None:
                    slots[i] = x

    @property
    def count(self) -> Tensor:
        """Number of valid tokens in the step's global batch, once COUNT is complete."""
        return operations.counted(self.machine, self._count)

    def losses(self) -> list[Tensor]:
        """The loss sum of every microbatch, as this rank holds it; empty on all but the last stage."""
        name = self.program.segments[-1].outputs[0]
        keys = [("cut", self._last, name, j) for j in range(self.program.microbatches)]
        return [self.machine.slots[self._ids[key]] for key in keys if key in self._ids]

    def watched(self, exit: Exit, microbatch: int) -> Tensor | None:
        """A kept value, None if it is not made here."""
        table = exit.segment is None
        in_table = ("table", exit.value.name, microbatch if self.program.tables_read_batch else None)
        i = self._ids.get(in_table if table else ("cut", exit.segment, exit.value.name, microbatch))
        return None if i is None else self.machine.slots[i]

    # Slots

    def _slot(self, key: Key, **fixed: Any) -> int:
        """The number of a slot; with `fixed=value` it is never emptied."""
        place = self._ids.setdefault(key, len(self.machine.slots))
        if place == len(self.machine.slots):
            self.machine.slots.append(fixed.get("fixed"))
        if fixed:
            self._fixed.add(place)
        return place

    def _arguments(self, segment: Segment, microbatch: int) -> list[int]:
        """Slots of world, step, microbatch, salt, params and buffers."""
        salt = random.salt(self.seed, segment.index)
        return [
            self._slot(("world",), fixed=self.world.name),
            self._step,
            self._slot(("number", microbatch), fixed=microbatch),
            self._slot(("number", salt), fixed=salt),
            *(self._parameter(name) for name in segment.params),
            *(self._slot(("buffer", name), fixed=self.parameters.buffers[name]) for name in segment.buffers),
        ]

    def _parameter(self, name: str) -> int:
        """Slot of a whole parameter: filled once and for all if it is stored so, else by GATHER."""
        unit, place = self.parameters.places[name]
        if unit.sliced:
            return self._slot(("parameter", name), fixed=None)
        return self._slot(("parameter", name), fixed=place.of(unit.values))

    def _inputs(self, segment: Segment, microbatch: int) -> list[int]:
        ids = []
        for source in segment.inputs:
            if source.kind == "cut":
                ids.append(self._slot(("cut", segment.index - 1, source.name, microbatch)))
            elif source.kind == "table":
                ids.append(self._table(source.name, microbatch))
            else:
                ids.append(self._slot(("batch", source.name, microbatch), fixed=None))
        return ids

    def _table(self, name: str, microbatch: int) -> int:
        """Slot of a table: kept if every microbatch reads the same one, or it is watched; else until its last reader."""
        if not self.program.tables_read_batch:
            return self._slot(("table", name, None), fixed=None)
        keep = {"fixed": None} if (None, name) in self._kept else {}
        return self._slot(("table", name, microbatch), **keep)

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

    def _nodes(self, actions: Sequence[Action]) -> list[Node]:
        nodes: list[Node] = []
        position: dict[int, int] = {}  # from the index of an action in the list to its node
        tabled: set[int] = set()
        for index, action in enumerate(actions):
            j = action.microbatch if action.microbatch is not None else 0
            if action.kind == "F" and self.program.tables_read_batch and j not in tabled:
                tabled.add(j)
                nodes.append(self._tables(action, j))
            if action.kind in ("B", "I") and action.segment == self._last and ("seed",) not in self._ids:
                target, dtype = self._slot(("seed",)), self.program.segments[-1].cls.outputs[0].dtype
                make = partial(operations.seed, self.machine, self._count, target, dtype)
                nodes.append(Node(action, lambda node, make=make: make(), writes=[target], implied=True))  # type: ignore[misc]
            node = self._node(action, j)
            node.needs = [position[need] for need in action.needs if need in position]
            position[index] = len(nodes)
            nodes.append(node)
        return nodes

    def _node(self, action: Action, j: int) -> Node:
        if action.kind == "COUNT":
            counter = self.program.count
            reads = [[*self._arguments(counter, i), *self._inputs(counter, i)] for i in range(self.program.microbatches)]
            return Node(action, lambda node: operations.count(self.machine, counter, reads, self._count))
        if action.kind in self._others:
            return Node(action, lambda node: self._others[action.kind])
        assert action.segment is not None, f"{action} has no segment"
        segment = self.program.segments[action.segment]
        if action.kind in ("GATHER", "FREE"):
            make = operations.gather if action.kind == "GATHER" else operations.free
            sliced = [name for name in segment.params if self.parameters.places[name][0].sliced]
            ids = {name: self._parameter(name) for name in sliced}
            return Node(action, partial(make, self.machine, ids=ids))
        if action.kind in ("F", "B", "I", "W"):
            return self._compute(action, segment, j)
        if action.kind == "REDUCE":
            return Node(action, lambda node: lambda: self.parameters.reduce(segment.index))
        back = action.kind.endswith("B")
        k = segment.index - back  # the message crosses from segment k to k + 1, or back
        values = self._crossing(k, gradients=back)
        slots = [self._slot(("grad" if back else "cut", k, name, j)) for name, _ in values]
        if action.kind.startswith("SEND"):
            return Node(action, partial(operations.send, self.machine), reads=slots)
        return Node(action, lambda node: operations.receive(self.machine, node, [value for _, value in values]), writes=slots)

    def _compute(self, action: Action, segment: Segment, j: int) -> Node:
        k, machine, graphs = segment.index, self.machine, segment.cls.graphs
        assert isinstance(graphs, Graphs), f"{segment.name} has no graphs"
        fixed = self._arguments(segment, j)
        if action.kind == "F":
            kept = [k == self._last or (k, name) in self._kept for name in segment.outputs]
            fixing: list[dict[str, Any]] = [{"fixed": None} if keep else {} for keep in kept]
            writes = [self._slot(("cut", k, name, j), **fix) for name, fix in zip(segment.outputs, fixing, strict=True)]
            saved = self._slot(("saved", k, j)) if self.training else None
            make = partial(operations.forward, machine, graphs=graphs, saved=saved)
            return Node(action, make, [*fixed, *self._inputs(segment, j)], writes)
        pending, kept_for_w = self._slot(("pending", k, j)), self._slot(("kept", k, j))
        if action.kind == "W":
            make = partial(operations.weight_gradient, machine, graphs=graphs, fixed=fixed, kept=kept_for_w, pending=pending)
            return Node(action, make, [*fixed, kept_for_w, pending])
        saved = self._slot(("saved", k, j))
        outputs = zip(segment.outputs, segment.cls.outputs, strict=True)
        grads = [self._gradient(k, value, name, j) for name, value in outputs if value.requires_grad]
        inputs = zip(segment.inputs, segment.cls.inputs, strict=True)
        writes = [
            self._slot(("grad", k - 1, source.name, j) if source.kind == "cut" else ("unused",))
            for source, value in inputs
            if value.requires_grad
        ]
        if action.kind == "B":
            make = partial(operations.backward, machine, graphs=graphs, saved=saved, grads=grads)
        else:
            make = partial(
                operations.input_gradient, machine, graphs=graphs, saved=saved, grads=grads, pending=pending, kept=kept_for_w
            )
        return Node(action, make, [*fixed, saved, *grads], writes)

    def _crossing(self, k: int, *, gradients: bool) -> list[tuple[str, Value]]:
        """The values that go from segment k to k + 1, or whose gradients come back, in the order of k's outputs."""
        producer, consumer = self.program.segments[k], self.program.segments[k + 1]
        read = {source.name for source in consumer.inputs if source.kind == "cut"}
        outputs = zip(producer.outputs, producer.cls.outputs, strict=True)
        return [(name, value) for name, value in outputs if name in read and (value.requires_grad or not gradients)]

    def _tables(self, action: Action, j: int) -> Node:
        """The tables of one microbatch, before its first forward."""
        segment = self.program.tables
        assert segment is not None and segment.cls.graphs is not None
        compute, machine = callable_of(segment.cls.graphs.E), self.machine
        writes = [self._table(name, j) for name in segment.outputs]
        reads = [*self._arguments(segment, j), *self._inputs(segment, j)]
        read = operator.itemgetter(*reads)
        return Node(
            action,
            lambda node: lambda: machine.store(node.writes, compute(list(read(machine.slots)))),
            reads,
            writes,
            implied=True,
        )

    def _link(self, nodes: Sequence[Node]) -> None:
        """Where slots die and messages are waited for.

        A slot dies at its last reader, and a value that nothing reads is not kept at all. A node waits for the messages that
        bring what it reads and for those that the list names, each once.
        """
        reader = {i: n for n, node in enumerate(nodes) for i in node.reads}
        writer: dict[int, int] = {}
        waited: set[int] = set()
        for n, node in enumerate(nodes):
            node.dead = sorted({i for i in node.reads if i not in self._fixed and reader[i] == n})
            wanted = {writer[i] for i in node.reads if i in writer} | {m for m in node.needs if nodes[m].is_awaited}
            node.waits = sorted(wanted - waited)
            waited |= wanted
            if node.action.kind.startswith("RECV"):
                writer.update((i, n) for i in node.writes)
        for n, node in enumerate(nodes):
            node.number, node.awaited = n, n in waited
            node.writes = [i if i in reader or i in self._fixed else UNREAD for i in node.writes]


def tables(program: Program, world: World, parameters: Parameters) -> dict[str, Tensor]:
    """The values of the table graph, computed once; empty if there is none or it reads the batch."""
    segment = program.tables
    if segment is None or program.tables_read_batch:
        return {}
    assert segment.cls.graphs is not None and not segment.inputs, "tables that read the batch must say so"
    weights = [*(parameters.views[name] for name in segment.params), *(parameters.buffers[name] for name in segment.buffers)]
    values = callable_of(segment.cls.graphs.E)([world.name, 0, 0, segment.index, *weights])
    return dict(zip(segment.outputs, values, strict=True))
