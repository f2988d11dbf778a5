"""The shared-memory engine, in C (core/). One segment of memory per process; groups, rings and tensors are offsets in it.

Addresses are integers (Tensor.data_ptr). Positions are places in a group, 0 to n-1. Every function releases the GIL where it may
block. Nothing here may be used in a forked child of the process that called `start`; `started` says so.
"""

class Error(RuntimeError):
    """A communication that cannot complete. The text is complete: call, group, global ranks, reason."""

# Operations
ALL_REDUCE: int
REDUCE_SCATTER: int
REDUCE: int
ALL_GATHER: int
BROADCAST: int
GATHER: int
SCATTER: int
ALL_TO_ALL: int
BARRIER: int

# Element types. OPAQUE + k (k < 32) is any other type that is moved but not reduced; k only tells them apart in signatures.
F32: int
F64: int
F16: int
BF16: int
I8: int
U8: int
I16: int
I32: int
I64: int
BOOL: int
C64: int
C128: int
OPAQUE: int

# Reductions
SUM: int
AVG: int
PRODUCT: int
MIN: int
MAX: int
BAND: int
BOR: int
BXOR: int

def reducible(dtype: int, reduce: int) -> bool:
    """True if there is a kernel for this combination."""

# The segment of this process

def started() -> bool:
    """True if this very process (not one it was forked from) has a segment."""

def start(path: str | None, size: int, nonce: int) -> int:
    """Make the segment: a memfd, or a new file at `path` (exclusive, mode 0600). `size` bytes, sparse. Returns its descriptor.

    A second call replaces the first as long as nothing was allocated or attached; in a forked child it starts afresh. OSError.
    """

def attach(descriptor: int, pid: int, nonce: int) -> int:
    """Map another process's segment and return its peer number; the descriptor may be closed afterwards.

    Raises Error if what is found there is not a segment with this nonce. The same nonce again gives the same number.
    """

def allocate(nbytes: int) -> int:
    """Address of a block in the segment, aligned to 64 bytes, contents undefined. MemoryError."""

def free(address: int) -> None:
    """Give a block back. Does nothing in a forked child."""

def is_resident(address: int, nbytes: int) -> bool:
    """True if the bytes lie in this process's segment."""

def site(text: str) -> int:
    """Store a call site, for messages on other ranks; the same text gives the same number. 0 stands for none."""

# Groups

def control(size: int) -> int:
    """Offset of a new control block for a group of `size` ranks, in the segment of this process; position 0 makes it."""

def open_group(offset: int, rank: int, peers: tuple[int, ...], ranks: tuple[int, ...], name: str) -> int:
    """Open a group. `peers` are peer numbers by position, -1 for this process; `ranks` the global ranks, for messages."""

def close_group(group: int) -> None:
    """Leave a group: pending operations fail, peers that wait for this rank are told. Idempotent per handle. Waits, up to 5 s, for a
    peer that is reading or writing a tensor of this rank just then."""

def abort(group: int, reason: str) -> None:
    """Make all pending and later calls of every member of the group fail with this reason."""

# Operations. With wait=True they return when complete (raising Error if they fail) and give 0, or for recv the position of the
# sender; with wait=False they give a handle at once. `timeout` in seconds counts from the call. `site` as from site().

def collective(
    group: int,
    op: int,
    reduce: int,
    dtype: int,
    root: int,
    src: int | tuple[int, ...],
    dst: int | tuple[int, ...],
    count: int,
    site: int,
    timeout: float,
    wait: bool,
    /,
) -> int:
    """A collective with equal sizes. `count` is in elements (bytes for OPAQUE + k):

    ALL_REDUCE, REDUCE, BROADCAST  of the tensor; dst may equal src. REDUCE writes dst on the root only (0 elsewhere);
                                   BROADCAST reads src on the root and writes dst elsewhere (pass both the same)
    REDUCE_SCATTER                 of dst; src has n times as many, or is a tuple of n addresses
    ALL_GATHER, GATHER             of src; dst has n times as many, or is a tuple of n addresses (0 where unused)
    SCATTER                        of dst; src has n times as many, or is a tuple of n addresses (0 where unused)
    ALL_TO_ALL                     of one piece; src and dst have n pieces, or are tuples
    BARRIER                        0

    `root` is a position, 0 where there is none; `reduce` is 0 where there is none. In place ALL_GATHER (src is piece `rank` of
    dst) and REDUCE_SCATTER (dst is piece `rank` of src) are legal. Ranks whose op, reduce, dtype, root or count differ all raise.
    """

def all_to_all(
    group: int,
    dtype: int,
    src: tuple[int, ...],
    dst: tuple[int, ...],
    send_bytes: tuple[int, ...],
    recv_bytes: tuple[int, ...],
    site: int,
    timeout: float,
    wait: bool,
    /,
) -> int:
    """The uneven exchange. Every recv_bytes must equal the sender's send_bytes, else all ranks raise."""

def send(
    group: int, peer: int, tag: int, address: int, nbytes: int, dtype: int, site: int, timeout: float, wait: bool, /
) -> int: ...
def recv(
    group: int, peer: int, tag: int, address: int, nbytes: int, dtype: int, site: int, timeout: float, wait: bool, /
) -> int:
    """`peer` is a position, or -1 for anybody. Messages of one pair and tag match in order. A message whose size or dtype is
    not the receiver's fails for both ends (for the receiver alone if it was small) and hurts no other."""

# Handles

def wait(op: int, timeout: float, /) -> None:
    """Block until the operation is done; Error if it failed. timeout < 0: only the operation's own. Else Error after it, the
    operation stays pending."""

def test(op: int, /) -> int:
    """0 pending, 1 done, 2 failed. Makes progress; never blocks."""

def error(op: int, /) -> str | None:
    """Why it failed."""

def source(op: int, /) -> int:
    """Position of the sender of a completed recv."""

def finished(op: int, /) -> float:
    """When it was done, in seconds on CLOCK_MONOTONIC (time.perf_counter)."""

def release(op: int, /) -> None:
    """Give the handle back. The operation goes on if it is pending: its memory must stay until it is done."""

def wait_any(ops: tuple[int, ...], timeout: float, /) -> int:
    """Sleep until one of the operations is done or failed: its index. -1 after the timeout (< 0: never), or if `nudge` was called
    since the last time.

    Passive: makes no progress of its own, so it costs the computing threads nothing."""

def nudge() -> None:
    """Wake wait_any."""
