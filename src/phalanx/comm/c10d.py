"""Ranks as processes, over torch.distributed: NCCL on CUDA; on CPU shared memory or Gloo.

A group is a process group of its own, opened by all ranks in one order. On CUDA each group and each one-way channel is a lane
with its own stream: issuing makes the lane wait for the current stream, `wait` makes the current stream wait for the lane, and
the lane keeps its tensors until its event has passed, so `record_stream` is not needed. A peer that dies surfaces as CommError.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import signature
from phalanx.comm.lanes import CpuHandle, CudaHandle, Lane, exchange, new_event, new_stream
from phalanx.comm.reduction import reduced
from phalanx.comm.rollcall import leave_word, roll_call
from phalanx.comm.signature import Call
from phalanx.comm.transport import CommError, Done, Group, Handle, ReduceOp, Transport

_REDUCE = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# The names since torch 2.13; the older ones warn there.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_GLOO_NUMBERS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64
)  # fmt: skip


class C10dTransport(Transport):
    """This process's end of torch.distributed, whose default process group must be initialised.

    `backend` carries its groups: nccl, gloo or shm; by default that of the default process group. With `owns_default` close()
    destroys the default process group too.
    """

    prefix = ""
    """What stands before the backend's name where groups are opened."""

    def __init__(
        self, device: torch.device, *, backend: str | None = None, timeout: float = 60.0, owns_default: bool = False
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.backend = backend if backend is not None else dist.get_backend()
        if (device.type == "cuda") != (self.backend.removeprefix("watched:") == "nccl"):
            raise ValueError(f"backend {self.backend} does not carry tensors on {device.type}")
        self.timeout = timeout
        self._owns_default = owns_default
        self._lanes: dict[str, Lane] = {}
        self._channels: dict[tuple[str, int, int], Lane] = {}  # (group, from rank, to rank)
        self._failure: BaseException | None = None
        self._clock: tuple[Any, float] | None = None

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def group(self, name: str, ranks: Sequence[int], *, p2p: bool = False) -> Group:
        group = Group(name, tuple(ranks))
        if group.size == 1:
            return group
        lane = self._open(group.ranks, name)
        if lane is not None:
            if name in self._lanes:
                raise ValueError(f"group {name!r} is already open on rank {self.rank}")
            self._lanes[name] = lane
        if p2p and self.on_cuda:
            # NCCL runs the messages of one communicator in order, in both directions: two ranks that both send first would
            # wait for each other. So each direction of each pair is a communicator.
            for source in group.ranks:
                for target in group.ranks:
                    if source != target:
                        channel = self._open((source, target), name, one_way=True)
                        if channel is not None:
                            self._channels[name, source, target] = channel
        return group

    def _open(self, ranks: tuple[int, ...], name: str, *, one_way: bool = False) -> Lane | None:
        """A new communicator; None if this rank is not in it. Connects now, so that no order of first use can deadlock."""
        options = None
        if self.backend == "shm":
            from phalanx.comm.shm.process_group import Options

            options = Options(name=name)
        pg = dist.new_group(
            list(ranks), timedelta(seconds=self.timeout), f"{self.prefix}{self.backend}", options, group_desc=name
        )
        if self.rank not in ranks:
            return None
        lane = Lane(pg, new_stream(self.device) if self.on_cuda else None)
        if lane.stream is not None:
            with torch.cuda.stream(lane.stream):
                probe = torch.zeros(1, device=self.device)
                if not one_way:
                    dist.all_reduce(probe, group=pg)
                elif self.rank == ranks[0]:
                    dist.send(probe, group=pg, dst=ranks[1])
                else:
                    dist.recv(probe, group=pg, src=ranks[0])
            lane.stream.synchronize()
        return lane

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        call = signature.all_reduce(x, group, op)
        kind, finish = self._reduction(x, op, group)
        return self._issue(call, group, (x,), lambda pg: dist.all_reduce(x, kind, group=pg, async_op=True), finish)

    def reduce(self, x: Tensor, root: int, group: Group, op: ReduceOp = "sum") -> Handle:
        call = signature.reduce(x, root, group, op)
        kind, finish = self._reduction(x, op, group)
        return self._issue(
            call, group, (x,), lambda pg: dist.reduce(x, group.ranks[root], kind, group=pg, async_op=True), finish
        )

    def reduce_scatter(self, out: Tensor, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        call = signature.reduce_scatter(out, x, group, op)
        if self.backend != "gloo":
            return self._issue(call, group, (out, x), lambda pg: _reduce_scatter(out, x, _REDUCE[op], group=pg, async_op=True))
        # On Gloo: an exchange of slices and a sum in rank order. It moves (n-1)/n of x, as a ring does, knows every dtype and
        # rounds the same way on every run.
        mine, terms = group.index(self.rank), list(x.detach().view(group.size, x.numel() // group.size))
        sent = {at: _bytes(term) for at, term in enumerate(terms) if at != mine}
        for at in sent:
            terms[at] = torch.empty_like(terms[at])

        def finish() -> None:
            total = out.detach().view(-1)
            if op == "sum" and len(terms) == 2 and total.dtype not in (torch.float16, torch.bfloat16):
                torch.add(terms[0], terms[1], out=total)
            else:
                total.copy_(reduced(terms, op))

        came = {at: _bytes(terms[at]) for at in sent}
        return self._issue(call, group, (out, x, sent, came), lambda pg: exchange(pg, group, sent, came), finish)

    def all_gather(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        call = signature.all_gather(out, x, group)
        if self.backend != "gloo":
            return self._issue(
                call, group, (out, x), lambda pg: _all_gather(self._raw(out), self._raw(x), group=pg, async_op=True)
            )
        # On Gloo: slices go from each to each and arrive in place. Its own call copies all of them twice more.
        mine, piece = group.index(self.rank), _bytes(x)
        rows = _bytes(out).view(group.size, piece.numel())

        def start(pg: Any) -> Any:
            if rows[mine].data_ptr() != piece.data_ptr():
                rows[mine].copy_(piece)
            others = [at for at in range(group.size) if at != mine]
            return exchange(pg, group, dict.fromkeys(others, piece), {at: rows[at] for at in others})

        return self._issue(call, group, (out, x), start)

    def all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor], group: Group) -> Handle:
        call = signature.all_to_all(outs, ins, group)
        mine = group.index(self.rank)
        if outs[mine].shape != ins[mine].shape:
            raise ValueError(
                f"all_to_all: rank {self.rank} sends itself {tuple(ins[mine].shape)} but expects {tuple(outs[mine].shape)}"
            )
        if self.backend != "gloo" or group.size == 1:
            received, sent = list(outs), list(ins)
            return self._issue(
                call,
                group,
                (outs[0], ins[0], received, sent),
                lambda pg: dist.all_to_all(received, sent, group=pg, async_op=True),
            )
        # Gloo knows only the form with one buffer on each side: a view where the tensors lie in one already, else a copy.
        in_sizes, out_sizes = [signature.numbytes(x) for x in ins], [signature.numbytes(x) for x in outs]
        source, target = _adjacent(ins), _adjacent(outs)
        if source is None:
            source = torch.cat([_bytes(x) for x in ins])
        finish = None
        if target is None:
            target = source.new_empty(sum(out_sizes))
            pieces = torch.split(target, out_sizes)

            def finish() -> None:
                for out, piece in zip(outs, pieces, strict=True):
                    _bytes(out).copy_(piece)

        return self._issue(
            call,
            group,
            (outs, ins, source, target),
            lambda pg: dist.all_to_all_single(target, source, out_sizes, in_sizes, group=pg, async_op=True),
            finish,
        )

    def broadcast(self, x: Tensor, root: int, group: Group) -> Handle:
        call = signature.broadcast(x, root, group)
        return self._issue(
            call, group, (x,), lambda pg: dist.broadcast(self._raw(x), group.ranks[root], group=pg, async_op=True)
        )

    def gather(self, out: Tensor | None, x: Tensor, root: int, group: Group) -> Handle:
        call = signature.gather(out, x, root, group, self.rank)
        slots = None if out is None else [self._raw(slot) for slot in out.tensor_split(group.size)]
        return self._issue(
            call, group, (out, x), lambda pg: dist.gather(self._raw(x), slots, group.ranks[root], group=pg, async_op=True)
        )

    def scatter(self, out: Tensor, x: Tensor | None, root: int, group: Group) -> Handle:
        call = signature.scatter(out, x, root, group, self.rank)
        pieces = None if x is None else [self._raw(piece) for piece in x.tensor_split(group.size)]
        return self._issue(
            call, group, (out, x), lambda pg: dist.scatter(self._raw(out), pieces, group.ranks[root], group=pg, async_op=True)
        )

    def send(self, x: Tensor, peer: int, group: Group) -> Handle:
        call = signature.message("send", x, peer, group, self.rank)
        lane = self._channel(group, self.rank, group.ranks[peer])
        return self._issue(call, group, (x,), lambda pg: dist.isend(self._raw(x), group.ranks[peer], group=pg), lane=lane)

    def recv(self, x: Tensor, peer: int, group: Group) -> Handle:
        call = signature.message("recv", x, peer, group, self.rank)
        lane = self._channel(group, group.ranks[peer], self.rank)
        return self._issue(call, group, (x,), lambda pg: dist.irecv(self._raw(x), group.ranks[peer], group=pg), lane=lane)

    def barrier(self, group: Group) -> Handle:
        call = signature.barrier()
        if self.on_cuda:
            # An all_reduce orders streams as everything else here does; dist.barrier would block the host.
            token = torch.zeros(1, device=self.device)
            return self._issue(call, group, (token,), lambda pg: dist.all_reduce(token, group=pg, async_op=True))
        return self._issue(call, group, (), lambda pg: dist.barrier(group=pg, async_op=True))

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        if self.backend != "shm" or self.world_size == 1:
            return None
        from phalanx.comm.shm.arena import empty

        return empty(numel, dtype=dtype)

    def close(self) -> None:
        """Release the communicators. After a failure they are disconnected first: they would wait for the dead."""
        if dist.is_initialized():
            if self._failure is not None and self._owns_default:
                dist.distributed_c10d._get_default_group().abort()
            for lane in self._all_lanes():
                if lane.stream is not None and self._failure is None:
                    lane.stream.synchronize()
                dist.destroy_process_group(lane.pg)
            if self._owns_default:
                dist.destroy_process_group()
        self._lanes, self._channels, self._owns_default = {}, {}, False

    def abort(self, reason: BaseException) -> None:
        """Refuse later calls and drop the connections, so that ranks which wait for this one fail too."""
        if self._failure is None:
            self._failure = reason
            leave_word(self.rank, repr(reason))
            self._disconnect(f"gave up with {reason!r}")

    def _all_lanes(self) -> list[Lane]:
        return [*self._lanes.values(), *self._channels.values()]

    def _disconnect(self, reason: str) -> None:
        for lane in self._all_lanes():
            with suppress(RuntimeError):  # a communicator that is already broken has nothing left to drop
                if self.backend == "shm":
                    lane.pg.abort(reason)
                else:
                    lane.pg.abort()

    def _reduction(self, x: Tensor, op: ReduceOp, group: Group) -> tuple[Any, Callable[[], None] | None]:
        """The backend's reduction, and what is left to do after it."""
        if self.backend != "gloo":
            return _REDUCE[op], None
        if x.dtype not in _GLOO_NUMBERS:
            raise ValueError(f"Gloo cannot reduce {x.dtype}; convert to one of {', '.join(map(str, _GLOO_NUMBERS))}")
        if op != "mean" or group.size == 1:
            return _REDUCE[op], None

        def divide() -> None:
            x.div_(group.size)

        return _REDUCE["sum"], divide

    def _raw(self, x: Tensor) -> Tensor:
        """What to hand to an operation that moves x. Shared memory knows all types, and reports ranks that disagree on one."""
        return x.detach() if self.backend == "shm" else _bytes(x)

    def _channel(self, group: Group, source: int, target: int) -> Lane | None:
        if not self.on_cuda:
            return None
        if (group.name, source, target) not in self._channels:
            raise ValueError(f"group {group.name!r} was opened without p2p: no channel from rank {source} to rank {target}")
        return self._channels[group.name, source, target]

    def _issue(
        self,
        call: Call,
        group: Group,
        tensors: tuple[Any, ...],
        start: Callable[[Any], Any],
        finish: Callable[[], None] | None = None,
        lane: Lane | None = None,
    ) -> Handle:
        if self._failure is not None:
            raise CommError(f"{call.on(group)} refused: this rank was aborted by {self._failure!r}") from self._failure
        if group.size == 1:
            _alone(call, tensors)
            return Done()
        lane = lane if lane is not None else self._lanes.get(group.name)
        if lane is None:
            raise ValueError(f"group {group.name!r} is not open on rank {self.rank}")
        if call.shape is not None and 0 in call.shape:
            return Done()  # the same on all ranks, as the shape is
        if lane.stream is not None:
            return self._issue_on_stream(call, group, tensors, start, lane, lane.stream)
        try:
            with torch.no_grad():
                work = start(lane.pg)
        except RuntimeError as error:
            self._fail(call, group, error)
        return CpuHandle(self._fail, call, group, work, finish, tensors)

    def _issue_on_stream(
        self,
        call: Call,
        group: Group,
        tensors: tuple[Any, ...],
        start: Callable[[Any], Any],
        lane: Lane,
        stream: Any,
    ) -> Handle:
        if self.timed and self._clock is None:
            self._clock = self._start_clock()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream), torch.no_grad():
                start(lane.pg).wait()  # orders the lane's stream after NCCL's own; does not block the host
                event = new_event(self.timed)
                event.record(stream)
        except RuntimeError as error:
            self._fail(call, group, error)
        lane.keep(event, tensors)
        return CudaHandle(self._fail, call, group, event, self._clock if self.timed else None, self.device, self.timeout)

    def _start_clock(self) -> tuple[Any, float]:
        """An event and the host time at which it passed: ties the device's clock to the host's."""
        event = new_event(True)
        torch.cuda.synchronize(self.device)
        event.record(torch.cuda.current_stream(self.device))
        event.synchronize()
        return event, time.perf_counter()

    def _fail(self, call: Call, group: Group, error: RuntimeError) -> NoReturn:
        """Disconnect, so that the other ranks notice, and raise CommError with the ranks of the group that are to blame."""
        said = str(error).partition("\n")[0]
        first = self._failure is None
        if first:
            self._disconnect(f"failed before: {said}")
        if isinstance(error, CommError):  # shared memory knows who is to blame
            failure = error
        else:
            blame = roll_call(self.rank, group.ranks) if first else ""
            failure = CommError(f"rank {self.rank}: {call.on(group)} failed{blame}: {said}")
            failure.__cause__ = error
        if first:
            self._failure = failure
        raise failure


def _bytes(x: Tensor) -> Tensor:
    """The storage of a contiguous tensor as bytes: what moves needs no dtype, and backends do not know them all."""
    return x.detach().reshape(-1).view(torch.uint8)


def _adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """The bytes of tensors that lie one behind the other in one storage, as a view; None if they do not."""
    first = tensors[0].detach()
    expected = first.storage_offset()
    for x in tensors:
        if x.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or x.storage_offset() != expected:
            return None
        expected += x.numel()
    whole = first.as_strided((expected - first.storage_offset(),), (1,), first.storage_offset())
    return whole.view(torch.uint8)


def _alone(call: Call, tensors: tuple[Any, ...]) -> None:
    """A call in a group of one rank: nothing if it works in place, else a copy from the second buffer to the first."""
    if call.op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        with torch.no_grad():
            tensors[0].copy_(tensors[1])
