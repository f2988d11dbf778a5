"""Collectives of groups that span hosts, in two levels: one transport inside each host, another between hosts.

An all_reduce, reduce_scatter or all_gather on such a group goes by one of the schemes of schemes.py, or flat where
`wires.choose` says so. Everything else, and every other group, passes through.

Terms are added inside each host first and then host by host, each in the order of the transport that does it (rank order, unless
Gloo's rings say otherwise). So all ranks end with the same bits, but not with those of a flat sum, and half precision is rounded
once more, in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm import schemes, signature
from phalanx.comm.hosts import by_host, ring_crossings
from phalanx.comm.pipeline import Worker
from phalanx.comm.schemes import Span
from phalanx.comm.transport import CommError, Group, Handle, ReduceOp, Transport
from phalanx.comm.wires import Collective, Scheme, Wires, choose


@dataclass(frozen=True)
class Route:
    """How calls on a group that spans hosts are carried out.

    crossings  ring_crossings of the group
    messages   its ranks on this host, if it was opened with p2p: not `span.inside`, which the worker's thread uses
    worker     runs its two-level calls
    """

    span: Span
    crossings: int
    messages: Group | None
    worker: Worker


class HierarchicalTransport(Transport):
    """Two transports of one world as one.

    inside   opens the groups of ranks of one host; `between` all others. They may be the same object
    hosts    the host number of every rank (`hosts_of`)
    wires    what the schemes are chosen by; equal on all ranks
    scheme   always this one instead, for tests and measurements; columns fall back to leader where hosts are uneven

    Tensors on CUDA pass through to `between`: NCCL knows the hosts and has schemes of its own.
    """

    def __init__(
        self,
        inside: Transport,
        between: Transport,
        hosts: Sequence[int],
        *,
        wires: Wires | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        if len(hosts) != between.world_size or inside.world_size != between.world_size:
            raise ValueError(
                f"hosts names {len(hosts)} ranks, inside has {inside.world_size} and between {between.world_size}: all three are "
                "of one world"
            )
        self.rank = between.rank
        self.world_size = between.world_size
        self.inside = inside
        self.between = between
        self.hosts = tuple(hosts)
        self.wires = wires if wires is not None else Wires()
        self.scheme = scheme
        self._routes: dict[str, Route] = {}

    @property
    def timed(self) -> bool:  # type: ignore[override]
        return self.between.timed

    @timed.setter
    def timed(self, value: bool) -> None:
        self.inside.timed = self.between.timed = value

    def group(self, name: str, ranks: Sequence[int], *, p2p: bool = False) -> Group:
        """Names that start with the group's own and a slash are taken for the smaller groups."""
        split = by_host(ranks, self.hosts)
        if len(split) == 1:
            return self.inside.group(name, ranks, p2p=p2p)
        whole = self.between.group(name, ranks, p2p=p2p)
        mine = [self.inside.group(f"{name}/inside@{ranks[0]}", ranks) for ranks in split]
        messages = [self.inside.group(f"{name}/messages@{ranks[0]}", ranks, p2p=True) for ranks in split if p2p]
        places = len(split[0]) if len(set(map(len, split))) == 1 else 1
        columns = [self.between.group(f"{name}/column{at}", sorted(members[at] for members in split)) for at in range(places)]
        if self.rank in whole.ranks:
            span = Span(
                self.rank,
                whole,
                split,
                self.inside,
                self.between,
                next(group for group in mine if self.rank in group.ranks),
                next((group for group in columns if self.rank in group.ranks), None),
                self.wires.chunk_bytes,
            )
            self._routes[name] = Route(
                span,
                ring_crossings(whole.ranks, self.hosts),
                next((group for group in messages if self.rank in group.ranks), None),
                Worker(name, self._failed),
            )
        return whole

    # In two levels, if that is cheaper.

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        signature.all_reduce(x, group, op)
        plan = self._plan("all_reduce", group, x)
        if plan is None:
            return self._of(group).all_reduce(x, group, op)
        scheme, span, worker = plan
        return worker.submit(lambda: schemes.ALL_REDUCE[scheme](x.detach().view(-1), span, op))

    def reduce_scatter(self, out: Tensor, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle:
        signature.reduce_scatter(out, x, group, op)
        plan = self._plan("reduce_scatter", group, x)
        if plan is None:
            return self._of(group).reduce_scatter(out, x, group, op)
        scheme, span, worker = plan
        flat, rows = out.detach().view(-1), x.detach().view(group.size, -1)
        return worker.submit(lambda: schemes.REDUCE_SCATTER[scheme](flat, rows, span, op))

    def all_gather(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        signature.all_gather(out, x, group)
        plan = self._plan("all_gather", group, out)
        if plan is None:
            return self._of(group).all_gather(out, x, group)
        scheme, span, worker = plan
        rows, flat = out.detach().view(group.size, -1), x.detach().view(-1)
        return worker.submit(lambda: schemes.ALL_GATHER[scheme](rows, flat, span))

    # As they are.

    def all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor], group: Group) -> Handle:
        return self._of(group).all_to_all(outs, ins, group)

    def broadcast(self, x: Tensor, root: int, group: Group) -> Handle:
        return self._of(group).broadcast(x, root, group)

    def reduce(self, x: Tensor, root: int, group: Group, op: ReduceOp = "sum") -> Handle:
        return self._of(group).reduce(x, root, group, op)

    def gather(self, out: Tensor | None, x: Tensor, root: int, group: Group) -> Handle:
        return self._of(group).gather(out, x, root, group)

    def scatter(self, out: Tensor, x: Tensor | None, root: int, group: Group) -> Handle:
        return self._of(group).scatter(out, x, root, group)

    def send(self, x: Tensor, peer: int, group: Group) -> Handle:
        signature.message("send", x, peer, group, self.rank)
        near = self._near(group, peer)
        if near is None:
            return self._of(group).send(x, peer, group)
        return self.inside.send(x, near.index(group.ranks[peer]), near)

    def recv(self, x: Tensor, peer: int, group: Group) -> Handle:
        signature.message("recv", x, peer, group, self.rank)
        near = self._near(group, peer)
        if near is None:
            return self._of(group).recv(x, peer, group)
        return self.inside.recv(x, near.index(group.ranks[peer]), near)

    def barrier(self, group: Group) -> Handle:
        return self._of(group).barrier(group)

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self.inside.shared(numel, dtype)

    def close(self) -> None:
        """Wait for the calls in flight, then release both transports; idempotent."""
        for route in self._routes.values():
            route.worker.close()
        self._routes = {}
        self.inside.close()
        if self.between is not self.inside:
            self.between.close()

    def abort(self, reason: BaseException) -> None:
        self.inside.abort(reason)
        if self.between is not self.inside:
            self.between.abort(reason)

    def _failed(self, error: BaseException) -> None:
        """A failure on one side must end the other too, or ranks of other hosts would wait until their timeout."""
        if isinstance(error, CommError):
            self.abort(error)

    def _of(self, group: Group) -> Transport:
        return self.between if group.name in self._routes else self.inside

    def _near(self, group: Group, peer: int) -> Group | None:
        """The group through which a message to that position stays on this host."""
        route = self._routes.get(group.name)
        if route is None or route.messages is None or group.ranks[peer] not in route.messages.ranks:
            return None
        return route.messages

    def _plan(self, op: Collective, group: Group, whole: Tensor) -> tuple[Scheme, Span, Worker] | None:
        """None: as it is."""
        route = self._routes.get(group.name)
        if route is None or whole.is_cuda or not whole.numel():
            return None
        sizes = route.span.sizes
        scheme = self.scheme
        if scheme is None:
            scheme = choose(signature.numbytes(whole), sizes, self.wires, op=op, crossings=route.crossings)
        elif scheme == "columns" and len(set(sizes)) > 1:
            scheme = "leader"
        return None if scheme == "flat" else (scheme, route.span, route.worker)
