"""What a step keeps alive and what it sends, counted alike for every way of training: one dispatch mode sees all operators.

Bytes are those of storages that are alive: weights, gradients, optimizer state, activations, messages and their buffers, in ordinary
or shared memory; not what a kernel uses inside itself. A storage counts with the size that it has at that moment, so FSDP2's, which
are emptied and filled again, count only while they are full. Watching makes a step many times slower: no watched step is timed.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = str
Storage = Any

SENT: Mapping[Kind, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
    "recv": lambda n: 0.0,
    "barrier": lambda n: 0.0,
}
"""Bytes that a rank has to send over the larger of a call's input and output, among n ranks and on average over them.

Thakur, Rabenseifner and Gropp 2005, section 4; what a library sends beyond that is its own.
"""


@dataclass(frozen=True)
class Call:
    """How an operator of torch.distributed is read: what it is, which argument has its bytes, and how often they count."""

    kind: Kind
    bytes_in: int
    times_ranks: bool = False


OPERATORS = {
    "c10d::allreduce_": Call("all_reduce", 0),
    "c10d::allreduce_coalesced_": Call("all_reduce", 0),
    "c10d::broadcast_": Call("broadcast", 0),
    "c10d::allgather_": Call("all_gather", 0),
    "c10d::_allgather_base_": Call("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": Call("all_gather", 0),
    "c10d::reduce_scatter_": Call("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": Call("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": Call("reduce_scatter", 1),
    "c10d::alltoall_base_": Call("all_to_all", 1),
    "c10d::alltoall_": Call("all_to_all", 1),
    "c10d::send": Call("send", 0),
    "c10d::recv_": Call("recv", 0),
    "c10d::recv_any_source_": Call("recv", 0),
    "c10d::barrier": Call("barrier", 0),
    "_c10d_functional::all_reduce": Call("all_reduce", 0),
    "_c10d_functional::all_reduce_": Call("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": Call("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": Call("all_gather", 0, times_ranks=True),
    "_c10d_functional::all_gather_into_tensor_coalesced": Call("all_gather", 0, times_ranks=True),
    "_c10d_functional::reduce_scatter_tensor": Call("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": Call("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": Call("all_to_all", 0),
    "_c10d_functional::broadcast": Call("broadcast", 0),
    "_c10d_functional::broadcast_": Call("broadcast", 0),
}
NO_CALLS = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows storages and messages while it is entered. What is alive when it is made is none of its business."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.sent_bytes = 0.0
        self.calls: Counter[str] = Counter()
        """By backend."""
        self.groups: set[str] = set()
        self._outside: dict[int, weakref.ref[Storage]] = {}
        self._alive: dict[int, weakref.ref[Storage]] = {}
        self._sizes: dict[int, int] = {}
        for storage in live_storages():
            _remember(storage, self._outside)

    def begin(self) -> None:
        """Forget what was counted, and begin with what is alive now."""
        self.sent_bytes = 0.0
        self.calls.clear()
        self.groups.clear()
        for storage in live_storages():
            self._follow(storage)
        self.peak_bytes = self.live_bytes()

    def live_bytes(self) -> int:
        return sum(storage.nbytes() for reference in list(self._alive.values()) if (storage := reference()) is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the operator of a DTensor comes again, on what it holds
        name = func.name().partition(".")[0]
        if name.startswith(("c10d::", "_c10d_functional::")) and name not in NO_CALLS:
            self._count(name, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        touched = [x for x in tree_leaves((args, kwargs, result)) if type(x) in (Tensor, nn.Parameter)]
        # Only a storage that is new, or has another size than when it was last seen, can raise the peak.
        if sum(self._follow(x.untyped_storage()) for x in touched):
            self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return result

    def _count(self, name: str, args: Any, kwargs: Any) -> None:
        assert name in OPERATORS, f"{name} is not counted: add how it is read to OPERATORS"
        call, group = OPERATORS[name], process_group(name, (*args, *kwargs.values()))
        tensors = [x for x in tree_leaves(args[call.bytes_in]) if isinstance(x, Tensor)] if call.kind != "barrier" else []
        size = sum(x.numel() * x.element_size() for x in tensors) * (group.size() if call.times_ranks else 1)
        self.sent_bytes += size * SENT[call.kind](group.size())
        self.calls[dist.get_backend(group)] += 1
        self.groups.add(group.group_name)

    def _follow(self, storage: Storage) -> bool:
        """Whether it is new or has another size."""
        key = storage._cdata
        if key in self._outside or storage.device.type == "meta":
            return False
        size = storage.nbytes()
        if key in self._alive and self._sizes.get(key) == size:
            return False
        self._sizes[key] = size
        _remember(storage, self._alive)
        return True


def _remember(storage: Storage, where: dict[int, weakref.ref[Storage]]) -> None:
    """Until its memory goes, after which another storage may have its address."""
    key = storage._cdata
    if key not in where:
        where[key] = weakref.ref(storage, lambda _: where.pop(key, None))


def process_group(name: str, args: Iterable[Any]) -> dist.ProcessGroup:
    """The group of a call: an object of torch's dispatcher, or for functional collectives the last text, its name."""
    if name.startswith("c10d::"):
        boxed: list[Any] = [x for x in args if isinstance(x, torch.ScriptObject)]
        return dist.ProcessGroup.unbox(next(x for x in boxed if "ProcessGroup" in str(x._type())))
    resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009 - not among c10d's stubs
    found: dist.ProcessGroup = resolve([x for x in args if isinstance(x, str)][-1])
    return found


def live_storages() -> list[Storage]:
    """Of every tensor that Python can see."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided]
    return [x.untyped_storage() for x in found]


def sequence_numbers(backend: str) -> int:
    """Calls so far on the groups of a backend that this process has, as the groups themselves number them."""
    groups: Mapping[Any, tuple[str, Any]] = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group, (kind, _) in groups.items() if kind == backend)


def sent_bytes(totals: Mapping[tuple[str, str], tuple[int, int]], ranks: int) -> float:
    """The same from a ledger of ours, whose groups all have that many ranks."""
    return sum(total * SENT[op](ranks) for (_, op), (_, total) in totals.items())
