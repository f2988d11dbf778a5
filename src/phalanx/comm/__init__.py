"""Moving bytes between ranks, and the tensor operators that do it."""

from phalanx.comm.collectives import (
    PAIRS,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    move,
    reduce_scatter,
    shard,
)
from phalanx.comm.dry import DryTransport
from phalanx.comm.ledger import Ledger, axis_of
from phalanx.comm.local import LocalWorld, local
from phalanx.comm.threads import Delay, Fabric
from phalanx.comm.transport import CommError, Group, Handle, ReduceOp, Transport
from phalanx.comm.world import World, find_world, init

__all__ = [
    "PAIRS",
    "CommError",
    "Delay",
    "DryTransport",
    "Fabric",
    "Group",
    "Handle",
    "Ledger",
    "LocalWorld",
    "ReduceOp",
    "Transport",
    "World",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_of",
    "broadcast",
    "find_world",
    "init",
    "local",
    "move",
    "reduce_scatter",
    "shard",
]
