"""Timing the operations of a transport along the axes of a mesh: raw samples, for `fit`.

All groups along an axis work at once, as in training. A barrier of the whole world before every repetition stands outside the clock,
each repetition counts with its slowest rank, and a call is over when its bytes have arrived. Buffers are reused: what fits in a cache
is there, as it is just after it was computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from phalanx.comm.transport import Group, Handle, Transport
from phalanx.comm.world import World
from phalanx.hardware import Point

Call = Callable[[], None]
ELEMENT_BYTES = 4  # float32
WARM_UPS = 2


def samples(op: str, group: Group, world: World, sizes: Sequence[int], repeats: int) -> list[Point]:
    """What `op` takes within `group` at each size, in bytes as nccl-tests counts them; every rank of the world calls this.

    Sizes are rounded down to whole elements for every rank, and a size that occurs twice then is timed once.
    """
    unit = ELEMENT_BYTES * (1 if op in WHOLE else group.size)
    rounded = sorted({max(size // unit, 1) * unit for size in sizes})
    return [Point(size, timed(op, group, world, size, repeats)) for size in rounded]


def timed(op: str, group: Group, world: World, size: int, repeats: int) -> tuple[float, ...]:
    """The seconds of each repetition on the slowest rank."""
    call = OPERATIONS[op](world.transport, group, group.index(world.rank), size // ELEMENT_BYTES, world.device)
    everybody = world.group(world.mesh.names)
    for _ in range(WARM_UPS):
        call()
    found = []
    for _ in range(repeats):
        world.transport.barrier(everybody).synchronize()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    times = torch.tensor(found, dtype=torch.float64, device=world.device)
    world.transport.all_reduce(times, everybody, "max").synchronize()
    return tuple(seconds * (0.5 if op == "send" else 1.0) for seconds in times.tolist())


# Each makes its buffers once and returns what is timed. `count` is the number of elements of the operation's size.


def _whole(issue: Callable[[Transport, torch.Tensor, Group], Handle]) -> Callable[..., Call]:
    def made(wires: Transport, group: Group, place: int, count: int, device: torch.device) -> Call:
        x = _buffer(count, device)
        return lambda: issue(wires, x, group).synchronize()

    return made


def _all_gather(wires: Transport, group: Group, place: int, count: int, device: torch.device) -> Call:
    out, x = _buffer(count, device), _buffer(count // group.size, device)
    return lambda: wires.all_gather(out, x, group).synchronize()


def _reduce_scatter(wires: Transport, group: Group, place: int, count: int, device: torch.device) -> Call:
    out, x = _buffer(count // group.size, device), _buffer(count, device)
    return lambda: wires.reduce_scatter(out, x, group).synchronize()


def _all_to_all(wires: Transport, group: Group, place: int, count: int, device: torch.device) -> Call:
    outs, ins = (_buffer(count, device).tensor_split(group.size) for _ in range(2))
    return lambda: wires.all_to_all(outs, ins, group).synchronize()


def _gather(wires: Transport, group: Group, place: int, count: int, device: torch.device) -> Call:
    out, x = _buffer(count, device) if place == 0 else None, _buffer(count // group.size, device)
    return lambda: wires.gather(out, x, 0, group).synchronize()


def _scatter(wires: Transport, group: Group, place: int, count: int, device: torch.device) -> Call:
    out, x = _buffer(count // group.size, device), _buffer(count, device) if place == 0 else None
    return lambda: wires.scatter(out, x, 0, group).synchronize()


def _send(wires: Transport, group: Group, place: int, count: int, device: torch.device) -> Call:
    """From the first rank of the group to the second and back; the others rest. `timed` halves it."""
    x = _buffer(count, device)

    def there_and_back() -> None:
        if place == 0:
            wires.send(x, 1, group).synchronize()
            wires.recv(x, 1, group).synchronize()
        elif place == 1:
            wires.recv(x, 0, group).synchronize()
            wires.send(x, 0, group).synchronize()

    return there_and_back


def _sendrecv(wires: Transport, group: Group, place: int, count: int, device: torch.device) -> Call:
    """Every rank sends to its right and receives from its left."""
    x, y = _buffer(count, device), _buffer(count, device)
    right, left = (place + 1) % group.size, (place - 1) % group.size

    def shift() -> None:
        for handle in [wires.send(x, right, group), wires.recv(y, left, group)]:
            handle.synchronize()

    return shift


OPERATIONS: dict[str, Callable[[Transport, Group, int, int, torch.device], Call]] = {
    "send": _send,
    "sendrecv": _sendrecv,
    "all_reduce": _whole(lambda wires, x, group: wires.all_reduce(x, group)),
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _whole(lambda wires, x, group: wires.broadcast(x, 0, group)),
    "reduce": _whole(lambda wires, x, group: wires.reduce(x, 0, group)),
    "gather": _gather,
    "scatter": _scatter,
}
WHOLE = ("send", "sendrecv", "all_reduce", "broadcast", "reduce")
"""Operations whose size is one rank's buffer, not one that is split over the ranks."""
MESSAGES = ("send", "sendrecv")


def _buffer(count: int, device: torch.device) -> torch.Tensor:
    """Zeros, which no number of sums overflows, in pages that have been written: an untouched one would be read from no memory."""
    return torch.empty(count, dtype=torch.float32, device=device).zero_()
