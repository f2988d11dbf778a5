"""A process group that stands before another one, writes every call into the ring, and refuses calls that would do damage.

It holds the inner group's backends, so whatever is not overridden here (coalescing regions, timeouts, C++ callers) works as if
it were the inner group, unrecorded. c10d's old and new names of a call are both there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from phalanx.comm.transport import CommError
from phalanx.comm.watch.finding import Verdict
from phalanx.comm.watch.ring import DTYPE, GROUP, NO_REDUCTION, OP, group_text
from phalanx.comm.watch.sockets import shut_down
from phalanx.comm.watch.watch import Watch
from phalanx.comm.watch.work import StreamEnd, Work

_ALL_REDUCE = OP["all_reduce"]
Tensors = Sequence[torch.Tensor]


class ProcessGroup(dist.ProcessGroup):
    """`inner`, watched. `backends` are the (device, type, backend) of the inner group; they are registered here too.

    `ranks` are global. `group` is the id and name in the ring, `sockets` what the backend opened. `runs_ahead`: waiting orders
    a stream instead of blocking the host, so an operation is waited for from the start and its end is looked for now and then.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        backends: Sequence[tuple[str, Any, Any]],
        store: Any,
        watch: Watch,
        ranks: Sequence[int],
        group: tuple[int, str],
        sockets: dict[int, int],
        runs_ahead: bool,
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # what a subclass may call
        if backends:
            self._set_default_backend(backends[-1][1])
        for device, type, backend in backends:
            self._register_backend(torch.device(device), type, backend)
        self.inner, self.watch, self.ring = inner, watch, watch.ring
        self.runs_ahead = runs_ahead
        self._store, self._ranks, self._sockets = store, tuple(ranks), sockets
        self._group, self._unique = group
        self._name = self._description = ""  # until torch sets them
        self._rank = inner.rank()
        self._board = watch.board(self._unique, inner.size(), self._rank)
        self._seqs = count(1)
        self._messages: dict[tuple[int, int, int], Any] = {}
        self._from_anybody: dict[int, int] = {}  # receives in flight whose source is not known, and their tags
        self.refuses = False
        # Looked up once: these are called for every operation.
        self._record, self._here = self.ring.record, watch.sites.here
        self._enter, self._disagreeing = self._board.enter, self._board.disagreeing
        self._inner_allreduce = inner.allreduce
        self._all_gather_single = _either(inner, "all_gather_single", "_allgather_base")
        self._reduce_scatter_single = _either(inner, "reduce_scatter_single", "_reduce_scatter_base")
        self._all_to_all_single = _either(inner, "all_to_all_single", "alltoall_base")
        self._gather_coalesced = _either(inner, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        self._scatter_coalesced = _either(inner, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
        watch.join(self._unique, self)

    # Collectives. The reduction of c10d hashes to its number.

    def allreduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:  # type: ignore[override]
        if type(opts) is not AllreduceOptions or more or named:
            tensors, opts = _all_reduce_options(tensors, opts, *more, **named)
        x = tensors[0]
        elements = x.numel()
        if len(tensors) > 1:
            elements = sum(x.numel() for x in tensors)
        dtype, reduction, inline = DTYPE[x.dtype], hash(opts.reduceOp), not opts.asyncOp
        seq = next(self._seqs)
        entry = self._enter(seq, _ALL_REDUCE, dtype, elements, reduction, -1)
        number = self._record(
            _ALL_REDUCE, self._group, seq, dtype, elements, reduction, -1, 0, self._here(1), inline or self.runs_ahead
        )
        if others := self._disagreeing(seq, entry):
            raise self._refusal(number, others)
        if self.refuses or not inline or self.runs_ahead:
            return self._run(number, inline, self._inner_allreduce, tensors, opts)
        # The most frequent case, in a straight line: it costs what the machinery around it would.
        try:
            work = self._inner_allreduce(tensors, opts)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise self._broken(number, error) from error
        self.ring.end(number)
        return None

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts if opts is not None else AllreduceCoalescedOptions()
        return self._call("all_reduce_coalesced", tensors, opts, self.inner.allreduce_coalesced, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, *more: Any) -> Any:
        if not isinstance(opts, BroadcastOptions):
            root, opts, tensors = (0 if opts is None else int(opts)), BroadcastOptions(), _list(tensors)
            opts.rootRank = root
        return self._call("broadcast", tensors, opts, self.inner.broadcast, tensors, opts, root=opts.rootRank)

    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> Any:
        if not isinstance(opts, ReduceOptions):
            root, opts, tensors = (0 if opts is None else int(opts)), ReduceOptions(), _list(tensors)
            opts.rootRank = root
            if more:
                opts.reduceOp = more[0]
        return self._call("reduce", tensors, opts, self.inner.reduce, tensors, opts, root=opts.rootRank)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = opts if isinstance(opts, AllgatherOptions) else AllgatherOptions()
        # Slices may differ from rank to rank; what comes out is the same everywhere.
        return self._call("all_gather", [x for xs in outputs for x in xs], opts, self.inner.allgather, outputs, inputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else AllgatherOptions()
        return self._call("all_gather_coalesced", inputs, opts, self.inner.allgather_coalesced, outputs, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts if opts is not None else AllgatherOptions()
        return self._call("all_gather_into_tensor", (output,), opts, self._all_gather_single, output, input, opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = opts if opts is not None else AllgatherOptions()
        return self._call("all_gather_coalesced", outputs, opts, self._gather_coalesced, list(outputs), list(inputs), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        if not isinstance(opts, GatherOptions):
            root, opts = int(opts or 0), GatherOptions()
            outputs, inputs = [outputs] if outputs else [], _list(inputs)
            opts.rootRank = root
        return self._call("gather", inputs, opts, self.inner.gather, outputs, inputs, opts, root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        if not isinstance(opts, ScatterOptions):
            root, opts = int(opts or 0), ScatterOptions()
            outputs, inputs = _list(outputs), [inputs] if inputs else []
            opts.rootRank = root
        return self._call("scatter", outputs, opts, self.inner.scatter, outputs, inputs, opts, root=opts.rootRank)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        if not isinstance(opts, ReduceScatterOptions):
            op, opts = opts, ReduceScatterOptions()
            outputs, inputs = _list(outputs), [inputs] if isinstance(inputs[0], torch.Tensor) else inputs
            if op is not None:
                opts.reduceOp = op
        flat = [x for xs in inputs for x in xs]
        return self._call("reduce_scatter", flat, opts, self.inner.reduce_scatter, outputs, inputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts if opts is not None else ReduceScatterOptions()
        return self._call("reduce_scatter_tensor", (input,), opts, self._reduce_scatter_single, output, input, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = opts if opts is not None else ReduceScatterOptions()
        return self._call("reduce_scatter_coalesced", inputs, opts, self._scatter_coalesced, list(outputs), list(inputs), opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        opts = opts if opts is not None else AllToAllOptions()
        # With splits every rank may have another size, and only pairs must agree.
        even = not output_splits and not input_splits
        start = self._all_to_all_single
        splits = list(output_splits), list(input_splits)
        return self._call("all_to_all_single", (input,), opts, start, output, input, *splits, opts, counted=even)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = opts if opts is not None else AllToAllOptions()
        return self._call("all_to_all", inputs, opts, self.inner.alltoall, outputs, inputs, opts, counted=False)

    def barrier(self, opts: Any = None) -> Any:
        opts = opts if isinstance(opts, BarrierOptions) else BarrierOptions()
        return self._call("barrier", (), opts, self.inner.barrier, opts)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _call(
        self,
        name: str,
        tensors: Tensors,
        opts: Any,
        start: Callable[..., Any],
        *arguments: Any,
        root: int = -1,
        counted: bool = True,
    ) -> Any:
        """Record a collective on `tensors`, compare it, and start it. `counted`: all ranks must have as many elements."""
        op = OP[name]
        dtype = DTYPE[tensors[0].dtype] if tensors else 0
        elements = sum(x.numel() for x in tensors) if counted else 0
        reduction = hash(opts.reduceOp) if hasattr(opts, "reduceOp") else NO_REDUCTION
        inline = not getattr(opts, "asyncOp", True)
        seq = next(self._seqs)
        entry = self._enter(seq, op, dtype, elements, reduction, root)
        number = self._record(
            op, self._group, seq, dtype, elements, reduction, root, 0, self._here(2), inline or self.runs_ahead
        )
        if others := self._disagreeing(seq, entry):
            raise self._refusal(number, others)
        return self._run(number, inline, start, *arguments)

    def _run(self, number: int, inline: bool, start: Callable[..., Any], *arguments: Any) -> Any:
        if self.refuses:
            raise self._refused(number)
        try:
            inner = start(*arguments)
        except RuntimeError as error:
            raise self._broken(number, error) from error
        except BaseException as error:
            self._spoiled(number, error)
            raise
        if inner is None:
            if self.runs_ahead:
                self.watch.expect(number, StreamEnd(self.ring, number))
            else:
                self.completed(number, None)
            return None
        if not inline or self.runs_ahead:
            work = Work(self, number, inner)
            if self.runs_ahead:
                self.watch.expect(number, weakref.ref(work))
            return work
        try:
            inner.wait()
        except RuntimeError as error:
            raise self.failure(number, error) from error
        self.completed(number, inner)
        return None

    # Messages

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Any:
        return self._message("send", tensors, self._rank, to, tag, self.inner.send, tensors, to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        return self._message("recv", tensors, source, self._rank, tag, self.inner.recv, tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        x = tensors[0]
        number = self._record(
            OP["recv_any"],
            self._group,
            0,
            DTYPE[x.dtype],
            x.numel(),
            NO_REDUCTION,
            -1,
            tag,
            self._here(1),
            self.runs_ahead,
        )
        self._from_anybody[number] = tag
        return self._run(number, False, self.inner.recv_anysource, tensors, tag)

    def _message(
        self, name: str, tensors: Tensors, source: int, target: int, tag: int, start: Callable[..., Any], *arguments: Any
    ) -> Any:
        x = tensors[0]
        op, dtype, elements = OP[name], DTYPE[x.dtype], x.numel()
        peer = target if name == "send" else source
        seq = self._next_message(source, target, tag)
        entry = self._board.enter_message(source, target, seq, dtype, elements) if tag == 0 else 0
        number = self._record(op, self._group, seq, dtype, elements, NO_REDUCTION, peer, tag, self._here(2), self.runs_ahead)
        if entry and self._board.message_disagrees(source, target, seq, entry):
            raise self._refusal(number, [peer])
        return self._run(number, False, start, *arguments)

    def _next_message(self, source: int, target: int, tag: int) -> int:
        key = (source, target, tag)
        if key not in self._messages:
            self._messages[key] = count(1)
        return int(next(self._messages[key]))

    # What becomes of a call

    def completed(self, number: int, inner: Any) -> None:
        """Write down the end; and whose message it was, if it came from anybody."""
        self.ring.end(number)
        if self._from_anybody and (tag := self._from_anybody.pop(number, None)) is not None and inner is not None:
            source = inner._source_rank()
            self.ring.name_message(number, source, self._next_message(source, self._rank, tag))

    def _refusal(self, number: int, others: list[int]) -> CommError:
        """Ranks of this host have entered this position with another call: nothing of ours has been sent yet."""
        self.ring.fail(number)
        found = self.watch.monitor.judge_now()
        if found is None:
            ranks = ", ".join(str(self._ranks[rank]) for rank in others)
            found = self.watch.monitor.conclude(
                Verdict("op", f"this call differs from that of rank {ranks} at the same position")
            )
        return CommError(f"rank {self.watch.rank}: {found.text}")

    def _refused(self, number: int) -> CommError:
        self.ring.fail(number)
        assert self.watch.monitor.final is not None
        return CommError(f"rank {self.watch.rank}: refused after: {self.watch.monitor.final.text}")

    def _spoiled(self, number: int, error: BaseException) -> None:
        """This rank's own mistake; the others may wait for this call."""
        self.ring.write_area("reason", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300])
        self.ring.fail(number)

    def _broken(self, number: int, error: RuntimeError) -> RuntimeError:
        """What to raise for an operation that raised: the verdict, or the error itself if the backend refused the arguments."""
        if not self.refuses and not _is_connection(error):
            self._spoiled(number, error)
            return error
        return self.failure(number, error)

    def failure(self, number: int, error: BaseException) -> CommError:
        """The error of an operation that broke, with the verdict if there is one."""
        found = self.watch.monitor.explain(error)
        self.ring.fail(number)
        said = f"a communication failed and the rings do not say why: {str(error).partition(chr(10))[0]}"
        return CommError(f"rank {self.watch.rank}: {found.text if found is not None else said}")

    # The group itself

    def disconnect(self) -> None:
        """End every operation in flight, here and at the other ends, and refuse those that follow."""
        self.refuses = True
        shut_down(self._sockets)
        self.inner.abort()

    def abort(self, *reason: str) -> None:
        """As the inner group's, which over shared memory takes a reason."""
        self.inner.abort(*reason)

    def shutdown(self) -> None:
        number = self.ring.record(OP["destroy"], self._group, 0, 0, 0, NO_REDUCTION, -1, 0, self._here(1), False)
        self.ring.end(number)
        self.watch.leave(self._unique)
        self.inner.shutdown()

    def get_group_store(self) -> Any:
        return self._store

    # C++ asks a backend for the names, and a group in Python has none that it could ask.

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    group_name = property(getGroupName)  # type: ignore[assignment]
    group_desc = property(getGroupDesc)  # type: ignore[assignment]

    def _set_group_name(self, name: Any) -> None:
        super()._set_group_name(name)
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        super()._set_group_desc(description)
        self._description = description
        device = "cuda" if self.runs_ahead else "cpu"
        self.ring.amend(GROUP, self._group, group_text(self._unique, description, self._ranks, device))


def _either(inner: Any, new: str, old: str) -> Callable[..., Any]:
    """A call under the name that this torch knows."""
    found: Callable[..., Any] = getattr(inner, new, None) or getattr(inner, old)
    return found


def _is_connection(error: RuntimeError) -> bool:
    """True if the wires broke or time ran out, false if the backend did not like its arguments.

    Gloo's errors that concern the wires begin with the place in its transport; c10d has classes for both.
    """
    text = str(error)
    return isinstance(error, (dist.DistBackendError, dist.DistNetworkError)) or any(word in text for word in _WIRES)


_WIRES = (
    "third_party/gloo",
    "gloo/transport",
    "Connection",
    "Timed out",
    "timed out",
    "Timeout",
    "Broken pipe",
    "closed by peer",
)


def _list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _all_reduce_options(tensors: Any, op: Any = None, timeout: Any = None, **named: Any) -> tuple[list[torch.Tensor], Any]:
    """The overloads without options: all_reduce(tensor or tensors, op, timeout)."""
    if isinstance(op, AllreduceOptions):
        return _list(tensors), op
    options = named.get("opts") or AllreduceOptions()
    op = named.get("op", op)
    if op is not None:
        options.reduceOp = op
    if (timeout := named.get("timeout", timeout)) is not None:
        options.timeout = timeout
    return _list(tensors), options
