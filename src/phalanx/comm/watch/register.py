"""The names under which watched groups are asked for: `watched:gloo`, `watched:nccl`, `watched:shm`, `watched:cpu:gloo,cuda:nccl`.

torch takes a name that is registered as it is, colon and all, before it looks for a device in it. Importing this registers them.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.transport import CommError
from phalanx.comm.watch.monitor import Options
from phalanx.comm.watch.process_group import ProcessGroup
from phalanx.comm.watch.ring import NO_REDUCTION, OP
from phalanx.comm.watch.sockets import streams
from phalanx.comm.watch.watch import Watch

PREFIX = "watched:"
BACKENDS = {"gloo": ["cpu", "cuda"], "nccl": ["cuda"], "shm": ["cpu"], "cpu:gloo,cuda:nccl": ["cpu", "cuda"]}
"""What is registered by default, and the devices that it serves."""


class Registry:
    """Makes watched groups. One per process: its groups share a ring and a monitor as long as one of them lives."""

    def __init__(self) -> None:
        self.options = Options()
        self._watch: Watch | None = None

    def add(self, backend: str, devices: Sequence[str]) -> None:
        """Register `watched:backend`."""

        def create(opts: Any, backend_options: Any) -> ProcessGroup:
            return self.make(backend, devices, opts, backend_options)

        dist.Backend.register_backend(f"{PREFIX}{backend}", create, extended_api=True, devices=list(devices))

    def make(self, backend: str, devices: Sequence[str], opts: Any, backend_options: Any) -> ProcessGroup:
        """A watched group. `backend_options` may be the inner backend's, or `Options` of the watch with the first group."""
        options = self.options
        if isinstance(backend_options, Options):
            options, backend_options = backend_options, None
        watch = self._current(opts, options)
        ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
        on_cuda = torch.cuda.is_available() and "cuda" in devices and backend != "gloo"
        group = watch.open(opts.group_id, "", ranks, "cuda" if on_cuda else "cpu")
        number = watch.ring.record(OP["new_group"], group[0], 0, 0, 0, NO_REDUCTION, -1, 0, watch.sites.here(2), True)
        before = streams()
        try:
            meet(opts.store, ranks, opts.group_rank, opts.timeout, watch)
            inner, backends = inner_group(backend, devices, opts, backend_options)
        except RuntimeError as error:
            # The others may have failed already while this rank was still connecting to them.
            found = watch.monitor.explain(error)
            watch.ring.fail(number)
            watch.leave(group[1])
            if found is None or isinstance(error, CommError):
                raise
            raise CommError(f"rank {watch.rank}: {found.text}") from error
        except BaseException:
            watch.ring.fail(number)
            watch.leave(group[1])
            raise
        watch.ring.end(number)
        opened = {descriptor: inode for descriptor, inode in streams().items() if before.get(descriptor) != inode}
        return ProcessGroup(inner, backends, opts.store, watch, ranks, group, opened, on_cuda)

    def begin(self, store: Any, rank: int, size: int, options: Options) -> Watch:
        """The watch of this process, begun with these options if there is none: groups that are opened from now on belong to it.

        `store` reaches all `size` ranks; each of them calls this.
        """
        if self._watch is None or not self._watch.is_open:
            self._watch = Watch(store, rank, size, options)
        return self._watch

    def _current(self, opts: Any, options: Options) -> Watch:
        if dist.is_initialized():  # the default group is not watched, this one is the first that is
            return self.begin(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), options)
        return self.begin(opts.store, opts.group_rank, opts.group_size, options)


def meet(store: Any, ranks: Sequence[int], me: int, timeout: timedelta, watch: Watch) -> None:
    """Wait for every member of a new group, here rather than in the backend's constructor, where no verdict could reach us.

    Raises CommError with the verdict, or TimeoutError with the ranks that did not come.
    """
    # The list is part of the key: ranks that were given different lists must not take each other for members.
    members = zlib.crc32(",".join(map(str, ranks)).encode())
    keys = [f"watch/member/{members:08x}/{rank}" for rank in ranks]
    store.set(keys[me], "")
    until, pause = time.monotonic() + timeout.total_seconds(), 0.0005
    while not store.check(keys):
        if watch.monitor.final is not None:
            raise CommError(f"rank {watch.rank}: {watch.monitor.final.text}")
        if time.monotonic() > until:
            absent = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
            raise TimeoutError(
                f"rank {watch.rank} waited {timeout} for ranks {absent} to join the group of ranks {list(ranks)}"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def inner_group(
    backend: str, devices: Sequence[str], opts: Any, backend_options: Any
) -> tuple[dist.ProcessGroup, list[tuple[str, Any, Any]]]:
    """The group that does the work, as torch would have made it, and its (device, type, backend)."""
    parts = dict(part.split(":") for part in backend.split(",")) if ":" in backend else dict.fromkeys(devices, backend)
    made: dict[str, Any] = {}
    backends: list[tuple[str, Any, Any]] = []
    for device, name in parts.items():
        if name not in made:
            made[name] = _backend(name, device, opts, backend_options)
        if isinstance(made[name], dist.ProcessGroup):
            return made[name], []
        backends.append((device, dist.Backend.backend_type_map[name], made[name]))
    inner = dist.ProcessGroup(opts.store, opts.group_rank, opts.group_size)
    inner._set_default_backend(backends[-1][1])
    for device, type, instance in backends:
        inner._register_backend(torch.device(device), type, instance)
    return inner, backends


def _backend(name: str, device: str, opts: Any, backend_options: Any) -> Any:
    store = dist.distributed_c10d.PrefixStore(f"{name}/", opts.store)
    if name == "gloo":
        gloo = dist.ProcessGroupGloo(store, opts.group_rank, opts.group_size, timeout=opts.timeout)
        gloo.options.global_ranks_in_group = opts.global_ranks_in_group
        gloo.options.group_name = opts.group_id
        gloo._set_sequence_number_for_group()
        return gloo
    if name == "nccl":
        options = backend_options if backend_options is not None else dist.ProcessGroupNCCL.Options()
        options._timeout = opts.timeout or timedelta(minutes=10)
        options.global_ranks_in_group = opts.global_ranks_in_group
        options.group_name = opts.group_id
        nccl = dist.ProcessGroupNCCL(store, opts.group_rank, opts.group_size, options)
        nccl._set_sequence_number_for_group()
        return nccl
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        raise ValueError(f"{PREFIX}{name}: there is no backend {name!r}; import the package that registers it first")
    if plugin.extended_api:
        return plugin.creator_fn(opts, backend_options)
    return plugin.creator_fn(store, opts.group_rank, opts.group_size, opts.timeout)


# torch's table of backends is of the process as well, and keeps this object whether it has a name or not.
registry = Registry()
for _name, _devices in BACKENDS.items():
    registry.add(_name, _devices)
