"""What torch.distributed calls: every operation of c10d on a SharedGroup, under the names of torch 2.11 to 2.13.

Both spellings of a renamed operation exist, since callers in Python use one and callers in C++ the other. A caller that says
asyncOp=False is served at once and gets None; everybody else gets a Work. Tensors that are not contiguous travel as copies, and
results are copied back when the operation is done, not when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._dynamo import eval_frame

from phalanx.comm.shm import _core
from phalanx.comm.shm.arena import empty
from phalanx.comm.shm.bootstrap import WAYS, Host, open_group
from phalanx.comm.shm.group import KERNELS
from phalanx.comm.shm.tensors import (
    Copies,
    addresses,
    both,
    code_of,
    copy_back,
    is_plain,
    pieces,
    require,
    sizes,
    source,
    target,
    why_no_kernel,
)
from phalanx.comm.shm.work import Flight, Work, WorkFuture

_ALL_GATHER, _ALL_REDUCE, _ALL_TO_ALL = c10d.AllgatherOptions(), c10d.AllreduceOptions(), c10d.AllToAllOptions()
_BARRIER, _BROADCAST, _GATHER = c10d.BarrierOptions(), c10d.BroadcastOptions(), c10d.GatherOptions()
_REDUCE, _REDUCE_SCATTER, _SCATTER = c10d.ReduceOptions(), c10d.ReduceScatterOptions(), c10d.ScatterOptions()
_CPU = torch.device("cpu")
_Base: Any = dist.ProcessGroup  # its annotations have overloads for callers that c10d no longer has


@dataclass
class Options:
    """`pg_options` of init_process_group and new_group."""

    ways: tuple[str, ...] = tuple(WAYS)
    """In what order to try to reach the memory of the other ranks: proc, socket, file."""
    host: Host | None = None
    """What to call this host; None finds out."""
    name: str | None = None
    """What to call the group in messages; None is c10d's name of it."""
    _timeout: timedelta = timedelta(minutes=30)


def create(backend: Any, options: Options | None) -> ProcessGroup:
    """The creator that c10d is told of: `backend` is its DistributedBackendOptions."""
    ranks = tuple(backend.global_ranks_in_group) or tuple(range(backend.group_size))
    return ProcessGroup(backend.store, backend.group_rank, ranks, backend.group_id, backend.timeout, options)


class ProcessGroup(_Base):  # type: ignore[misc]
    """Ranks of one host, through shared memory. `rank` is a position in `ranks`, which are global."""

    supports_splitting = False
    supports_coalescing = True

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        ranks: tuple[int, ...],
        name: str,
        timeout: timedelta,
        options: Options | None = None,
    ) -> None:
        super().__init__(rank, len(ranks))
        self._store = store
        options = options if options is not None else Options()
        self.options = Options(options.ways, options.host, options.name, timeout)
        self._rank, self._size = rank, len(ranks)
        self._name, self._description = name, "undefined"
        self._sequence = 0
        self._batch: list[Work] | None = None  # of a coalesced call that is being collected
        # DDP's join hands the Work of a count to its reducer in C++ and drops it here. C++ then holds but half of the object, whose
        # other half, with `wait`, is Python's: so the last few Works of counts stay alive.
        self._recent: deque[Work] = deque(maxlen=8)
        self._set_default_timeout(timeout)
        self.group = open_group(store, rank, ranks, options.name or name, self._seconds, options.ways, options.host)

    # Collectives

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: c10d.AllreduceOptions = _ALL_REDUCE) -> Work | None:
        (x,) = tensors = [tensors] if isinstance(tensors, Tensor) else tensors  # DDP's join uses C++'s overload for one
        dtype, reduce = self._kernel("all_reduce", x, opts.reduceOp)
        if is_plain(x):
            address = x.data_ptr()
            return self._run(_core.ALL_REDUCE, reduce, dtype, 0, address, address, x.numel(), opts, x, tensors)
        copies: Copies = []
        y = both(x, copies)
        return self._run(_core.ALL_REDUCE, reduce, dtype, 0, y.data_ptr(), y.data_ptr(), y.numel(), opts, y, tensors, copies)

    def broadcast(self, tensors: list[Tensor], opts: c10d.BroadcastOptions = _BROADCAST) -> Work | None:
        (x,) = tensors
        dtype, units = code_of("broadcast", x)
        root, copies = opts.rootRank, Copies()
        y = source(x) if root == self._rank else target(x, copies)
        address = y.data_ptr()
        return self._run(_core.BROADCAST, 0, dtype, root, address, address, y.numel() * units, opts, y, tensors, copies)

    def reduce(self, tensors: list[Tensor], opts: c10d.ReduceOptions = _REDUCE) -> Work | None:
        (x,) = tensors
        dtype, reduce = self._kernel("reduce", x, opts.reduceOp)
        root, copies = opts.rootRank, Copies()
        y = both(x, copies) if root == self._rank else source(x)
        out = y.data_ptr() if root == self._rank else 0
        return self._run(_core.REDUCE, reduce, dtype, root, y.data_ptr(), out, y.numel(), opts, y, tensors, copies)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: c10d.AllgatherOptions = _ALL_GATHER
    ) -> Work | None:
        (x,), (outs,) = inputs, outputs
        dtype, units = code_of("all_gather", x)
        require("all_gather", "output", outs, x, self._size)
        copies: Copies = []
        y, ys = source(x), [target(out, copies) for out in outs]
        count = y.numel() * units
        return self._run(_core.ALL_GATHER, 0, dtype, 0, y.data_ptr(), addresses(ys), count, opts, (y, ys), outs, copies)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: c10d.AllgatherOptions = _ALL_GATHER) -> Work | None:
        dtype, units = code_of("all_gather_single", x)
        require("all_gather_single", "output", out, x, self._size)
        copies: Copies = []
        y, ys = source(x), target(out, copies)
        count = y.numel() * units
        return self._run(_core.ALL_GATHER, 0, dtype, 0, y.data_ptr(), ys.data_ptr(), count, opts, (y, ys), [out], copies)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER
    ) -> Work | None:
        (out,), (ins,) = outputs, inputs
        dtype, reduce = self._kernel("reduce_scatter", out, opts.reduceOp)
        require("reduce_scatter", "input", ins, out, self._size)
        copies: Copies = []
        y, ys = target(out, copies), [source(x) for x in ins]
        count = y.numel()
        return self._run(
            _core.REDUCE_SCATTER, reduce, dtype, 0, addresses(ys), y.data_ptr(), count, opts, (y, ys), outputs, copies
        )

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER) -> Work | None:
        dtype, reduce = self._kernel("reduce_scatter_single", out, opts.reduceOp)
        require("reduce_scatter_single", "input", x, out, self._size)
        copies: Copies = []
        y, ys = target(out, copies), source(x)
        return self._run(
            _core.REDUCE_SCATTER, reduce, dtype, 0, ys.data_ptr(), y.data_ptr(), y.numel(), opts, (y, ys), [out], copies
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: c10d.GatherOptions = _GATHER) -> Work | None:
        (x,) = inputs
        dtype, units = code_of("gather", x)
        root, copies = opts.rootRank, Copies()
        outs: list[Tensor] = []
        if root == self._rank:
            (outs,) = outputs
            require("gather", "output", outs, x, self._size)
        y, ys = source(x), [target(out, copies) for out in outs]
        dst = addresses(ys) if outs else 0
        return self._run(_core.GATHER, 0, dtype, root, y.data_ptr(), dst, y.numel() * units, opts, (y, ys), outs, copies)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: c10d.ScatterOptions = _SCATTER) -> Work | None:
        (out,) = outputs
        dtype, units = code_of("scatter", out)
        root, copies = opts.rootRank, Copies()
        ins: list[Tensor] = []
        if root == self._rank:
            (ins,) = inputs
            require("scatter", "input", ins, out, self._size)
        y, ys = target(out, copies), [source(x) for x in ins]
        src = addresses(ys) if ins else 0
        return self._run(_core.SCATTER, 0, dtype, root, src, y.data_ptr(), y.numel() * units, opts, (y, ys), outputs, copies)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int], opts: c10d.AllToAllOptions = _ALL_TO_ALL
    ) -> Work | None:
        dtype, _ = code_of("all_to_all_single", x, out)
        copies: Copies = []
        y, ys = source(x), target(out, copies)
        src, send = pieces("input", y, in_splits, self._size)
        dst, recv = pieces("output", ys, out_splits, self._size)
        return self._exchange(dtype, src, dst, send, recv, opts, (y, ys), [out], copies)

    def alltoall(self, outs: list[Tensor], ins: list[Tensor], opts: c10d.AllToAllOptions = _ALL_TO_ALL) -> Work | None:
        if not len(outs) == len(ins) == self._size:
            raise ValueError(f"all_to_all: {len(ins)} inputs and {len(outs)} outputs in a group of {self._size}")
        dtype, _ = code_of("all_to_all", *ins, *outs)
        copies: Copies = []
        xs, ys = [source(x) for x in ins], [target(out, copies) for out in outs]
        return self._exchange(dtype, addresses(xs), addresses(ys), sizes(xs), sizes(ys), opts, (xs, ys), outs, copies)

    def barrier(self, opts: c10d.BarrierOptions = _BARRIER) -> Work | None:
        return self._run(_core.BARRIER, 0, 0, 0, 0, 0, 0, opts, None, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose failure names the ranks that did not come, as that of all barriers here does: all of them, always."""
        opts = c10d.BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # Several at once

    def allreduce_coalesced(self, tensors: list[Tensor], opts: c10d.AllreduceOptions = _ALL_REDUCE) -> Work | None:
        return self._coalesced([partial(self.allreduce, [x], opts) for x in tensors], opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: c10d.AllgatherOptions = _ALL_GATHER
    ) -> Work | None:
        """outputs[rank][i] becomes inputs[i] of that rank."""
        each = zip(*outputs, strict=True)
        return self._coalesced(
            [partial(self.allgather, [list(outs)], [x], opts) for outs, x in zip(each, inputs, strict=True)], opts
        )

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: c10d.AllgatherOptions = _ALL_GATHER
    ) -> Work | None:
        pairs = zip(outputs, inputs, strict=True)
        return self._coalesced([partial(self.all_gather_single, out, x, opts) for out, x in pairs], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER
    ) -> Work | None:
        pairs = zip(outputs, inputs, strict=True)
        return self._coalesced([partial(self.reduce_scatter_single, out, x, opts) for out, x in pairs], opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_coalescing(self, device: torch.device = _CPU) -> None:
        """Until _end_coalescing every operation starts at once and none is waited for."""
        self._batch = []

    def _end_coalescing(self, device: torch.device = _CPU) -> Work:
        works, self._batch = self._batch or [], None
        flights = tuple(flight for work in works for flight in work._flights)
        return Work(flights, [x for work in works for x in work.tensors])

    def _coalesced(self, calls: Sequence[Callable[[], Work | None]], opts: Any) -> Work | None:
        outer = self._batch
        self._start_coalescing()
        try:
            for call in calls:
                call()
        finally:
            work = self._end_coalescing()
            self._batch = outer
        return self._deliver(work, opts.asyncOp)

    # Messages. In a batch they give no Work: c10d would wait for it, and two ranks that both send first for ever.

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work | None:
        (x,) = tensors
        dtype, _ = code_of("send", x)
        y = source(x)
        op = self.group.send(dst, tag, y.data_ptr(), y.nbytes, dtype, self._seconds)
        return self._deliver(self._work(op, y, tensors), self._batch is None)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work | None:
        (x,) = tensors
        dtype, _ = code_of("recv", x)
        copies: Copies = []
        y = target(x, copies)
        op = self.group.recv(src, tag, y.data_ptr(), y.nbytes, dtype, self._seconds)
        return self._deliver(self._work(op, y, tensors, copies), self._batch is None)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work | None:
        return self.recv(tensors, -1, tag)

    # How they run

    def _kernel(self, call: str, x: Tensor, op: Any) -> tuple[int, int]:
        kernel = KERNELS.get((x.dtype, hash(op)))
        if kernel is None:
            raise ValueError(why_no_kernel(call, x, op))
        return kernel

    def _run(
        self,
        op: int,
        reduce: int,
        dtype: int,
        root: int,
        src: int | tuple[int, ...],
        dst: int | tuple[int, ...],
        count: int,
        opts: Any,
        keep: object,
        result: list[Tensor],
        copies: Copies | None = None,
    ) -> Work | None:
        self._sequence += 1
        limit = opts.timeout
        seconds = self._seconds if limit.days < 0 else limit.total_seconds()
        wait = not opts.asyncOp and self._batch is None
        handle = self.group.collective(op, reduce, dtype, root, src, dst, count, seconds, wait)
        if wait:
            if copies:
                copy_back(copies)
            return None
        return self._deliver(self._work(handle, keep, result, copies), opts.asyncOp)

    def _exchange(
        self,
        dtype: int,
        src: tuple[int, ...],
        dst: tuple[int, ...],
        send: tuple[int, ...],
        recv: tuple[int, ...],
        opts: Any,
        keep: object,
        result: list[Tensor],
        copies: Copies,
    ) -> Work | None:
        self._sequence += 1
        limit = opts.timeout
        seconds = self._seconds if limit.days < 0 else limit.total_seconds()
        wait = not opts.asyncOp and self._batch is None
        handle = self.group.all_to_all(dtype, src, dst, send, recv, seconds, wait)
        if wait:
            copy_back(copies)
            return None
        return self._deliver(self._work(handle, keep, result, copies), opts.asyncOp)

    def _work(self, op: int, keep: object, result: list[Tensor], copies: Copies | None = None) -> Work:
        return Work((Flight(self.group, op, keep, partial(copy_back, copies) if copies else None),), result)

    def _deliver(self, work: Work, asynchronous: bool) -> Work | None:
        """Hand it to a caller that wants it. The others are waited for here, or by the end of the batch that is being collected."""
        if self._batch is not None:
            self._batch.append(work)
        elif not asynchronous:
            work.wait()
        elif sum(x.nbytes for x in work.tensors) <= 64:
            self._recent.append(work)
        return work if asynchronous else None

    # What c10d asks of a process group and of its backend, which is this too

    def getBackendName(self) -> str:
        return "shm"

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    rank, size, name = getRank, getSize, getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the shm backend serves tensors on the CPU, not on {device}")
        return self

    def get_group_store(self) -> c10d.Store:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        self.options._timeout = timeout

    set_timeout = _set_default_timeout

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
        """A tensor of `size` elements in shared memory."""
        return empty(size, dtype=dtype)

    def shutdown(self) -> None:
        """Leave the group; what is in flight fails. Called by destroy_process_group."""
        self.group.close()

    def abort(self, reason: str = "aborted the group") -> None:
        """Make everything in flight fail on every rank of the group, then leave it. The others are told this rank's `reason`."""
        self.group.abort(f"rank {self.group.ranks[self._rank]} {reason}")
        self.group.close("was aborted on this rank")


def _hide_from_compiler() -> None:
    """torch.compile of a DDP model would trace into these methods when the reducer, in C++, calls them."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for cls in (ProcessGroup, Work, WorkFuture):
        for member in vars(cls).values():
            if isinstance(member, FunctionType):
                eval_frame.set_code_exec_strategy(member.__code__, skip)


_hide_from_compiler()
