"""How ranks that a launcher started come to one transport: they meet at its store, agree, and open the best one that serves all."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from phalanx.comm import shm
from phalanx.comm.c10d import C10dTransport
from phalanx.comm.hierarchy import HierarchicalTransport
from phalanx.comm.hosts import hosts_of, node_from
from phalanx.comm.launch import Launch
from phalanx.comm.transport import CommError, Transport
from phalanx.comm.watch.monitor import Options
from phalanx.comm.watch.register import PREFIX, registry
from phalanx.comm.watch.transport import WatchedTransport
from phalanx.comm.wires import Wire, Wires

logger = logging.getLogger("phalanx")


@dataclass(frozen=True)
class Terms:
    """What rank 0 decides for all ranks.

    wires    what the collectives across hosts are chosen by
    watch    where the flight rings go; None watches nothing
    watched  the backends whose groups are watched
    """

    wires: Wires | None = None
    watch: str | None = None
    watched: tuple[str, ...] = ()

    def watches(self, backend: str) -> bool:
        return self.watch is not None and backend in self.watched


@dataclass(frozen=True)
class Connecting:
    """This rank on its way. `timeout` is in seconds, for one communication; `options` are those of a watch, but for its folder."""

    launch: Launch
    place: torch.device
    timeout: float
    options: Options

    def on_default(self, terms: Terms) -> Transport:
        """On the default process group that there is."""
        store, name = dist.distributed_c10d._get_default_store(), dist.get_backend()
        terms = agree(store, self.launch.rank, terms, self.timeout)
        backend = name.removeprefix(PREFIX)
        if terms.watches(backend):
            self._watch(store, terms)
        kind = WatchedTransport if terms.watches(backend) or backend != name else C10dTransport
        return kind(self.place, backend=backend, timeout=self.timeout)

    def best(self, terms: Terms) -> Transport:
        """Open the default process group and the best transport that serves all ranks."""
        launch, on_cpu = self.launch, self.place.type == "cpu"
        store, words = self._meet((shm.available() or "") if on_cpu else "")
        terms = agree(store, self.launch.rank, terms, self.timeout)
        if not on_cpu:
            return self._open("nccl", store, terms)
        reason = next((f"on rank {rank}, {word}" for rank, word in enumerate(words) if word), None)
        if reason is None:
            hosts = hosts_of(
                PrefixStore("hosts", store), launch.rank, launch.size, node=node_from(os.environ), timeout=self.timeout
            )
            if len(set(hosts)) > 1 and len(set(hosts)) < launch.size:
                between = self._open("gloo", store, terms)
                return HierarchicalTransport(self._over("shm", store, terms), between, hosts, wires=terms.wires)
            reason = "every rank is on a host of its own"
            if len(set(hosts)) == 1:
                try:
                    return self._open("shm", store, terms)
                except shm.Unavailable as unavailable:
                    reason = str(unavailable)
        if launch.rank == 0:
            logger.warning("CPU ranks communicate over Gloo, not through shared memory: %s", reason)
        return self._open("gloo", store, terms)

    def _open(self, backend: str, store: Store, terms: Terms) -> C10dTransport:
        """Open the default process group, and the transport over it."""
        if terms.watches(backend):
            self._watch(store, terms)
        dist.init_process_group(
            f"{PREFIX}{backend}" if terms.watches(backend) else backend,
            store=PrefixStore(backend, store),
            rank=self.launch.rank,
            world_size=self.launch.size,
            timeout=timedelta(seconds=self.timeout),
            device_id=None if self.place.type == "cpu" else self.place,
        )
        return self._over(backend, store, terms, owns_default=True)

    def _over(self, backend: str, store: Store, terms: Terms, *, owns_default: bool = False) -> C10dTransport:
        """The transport over a backend."""
        if not terms.watches(backend):
            return C10dTransport(self.place, backend=backend, timeout=self.timeout, owns_default=owns_default)
        self._watch(store, terms)
        return WatchedTransport(self.place, backend=backend, timeout=self.timeout, owns_default=owns_default)

    def _watch(self, store: Store, terms: Terms) -> None:
        """Begin the watch of this process, if it is not watched already."""
        assert terms.watch is not None
        registry.begin(store, self.launch.rank, self.launch.size, replace(self.options, run_dir=Path(terms.watch)))

    def _meet(self, word: str) -> tuple[PrefixStore, list[str]]:
        """The store of this launch, once every rank has been there, and what each left there."""
        launch, timeout = self.launch, self.timeout
        this, patience = f"rank {launch.rank} of {launch.size}", timedelta(seconds=timeout)
        try:
            # As if for one rank: torch would wait for all of them as well, but does not say which are missing.
            store, _, _ = next(rendezvous(launch.rendezvous, launch.rank, 1, timeout=patience))
            present = PrefixStore("phalanx/present", store)
            present.set(str(launch.rank), word)
        except dist.DistError as error:
            raise CommError(
                f"{this} did not reach the store at which ranks meet ({launch.rendezvous}) within {timeout:g} s: rank 0, which holds it "
                "unless the launcher does, did not come"
            ) from error
        everybody = [str(rank) for rank in range(launch.size)]
        try:
            present.wait(everybody, patience)
        except dist.DistError as error:
            missing = [rank for rank in everybody if not present.check([rank])]
            plural = "s" * (len(missing) > 1)
            raise CommError(
                f"{this} waited {timeout:g} s for rank{plural} {', '.join(missing)}, which did not come to phx.init"
            ) from error
        return PrefixStore("phalanx", store), [text.decode() for text in present.multi_get(everybody)]


def agree(store: Store, rank: int, terms: Terms, timeout: float) -> Terms:
    """The terms of rank 0. All ranks call this equally often: torch's default store may see several worlds."""
    turn = store.add(f"phalanx/terms/turn/{rank}", 1)
    key = f"phalanx/terms/{turn}"
    if rank == 0:
        store.set(key, json.dumps(asdict(terms)))
    store.wait([key], timedelta(seconds=timeout))
    told = json.loads(store.get(key))
    wires = told["wires"]
    if wires is not None:
        wires = Wires(**{**wires, "inside": Wire(**wires["inside"]), "between": Wire(**wires["between"])})
    return Terms(wires, told["watch"], tuple(told["watched"]))
