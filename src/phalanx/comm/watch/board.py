"""What the ranks of one host called last in a group, as fingerprints in a shared file: who arrives second sees a disagreement.

One column per rank and one row for each of the last `DEPTH` collectives; for messages the same per pair of ranks, for either end.
A rank writes its own fingerprint, then reads the others'. Ranks of other hosts never fill their columns and are never compared.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

DEPTH = 64
MESSAGE_DEPTH = 8
_MASK = 0xFFFFFFFF


class Board:
    """The columns of one group of `size` ranks. An entry is sequence number << 32 | fingerprint; 0 is empty."""

    def __init__(self, path: Path, size: int, rank: int) -> None:
        self.path, self._size, self._rank = path, size, rank
        words = DEPTH * size + 2 * MESSAGE_DEPTH * size * size
        # Whoever comes first makes the file; growing it to one length is harmless however many do it.
        with open(path, "a+b") as file:
            file.truncate(words * 8)
            self._map = mmap.mmap(file.fileno(), words * 8)
        self._words = memoryview(self._map).cast("Q")
        self._row = struct.Struct(f"={size}Q").unpack_from

    def enter(self, seq: int, op: int, dtype: int, elements: int, reduction: int, root: int) -> int:
        """Enter collective `seq` (from 1) as this call; returns the entry, to be compared.

        Entries are equal for equal calls and, for calls that differ in one thing, never equal below 2^32 of it.

        Between this and `disagreeing` the caller writes its record: hundreds of stores, after which the entry has left the
        processor's store buffer. So of two ranks that come at one moment at least one sees the other.
        """
        call = elements * 0x9E3779B1 + (((root + 1) * 257 + reduction) * 64 + dtype) * 32 + op
        entry = (seq & _MASK) << 32 | call & _MASK
        self._words[seq % DEPTH * self._size + self._rank] = entry
        return entry

    def disagreeing(self, seq: int, entry: int) -> list[int]:
        """The group ranks that have entered collective `seq` as another call."""
        others = self._row(self._map, seq % DEPTH * self._size * 8)
        if others.count(entry) == self._size:
            return []
        return [rank for rank, other in enumerate(others) if other != entry and other >> 32 == entry >> 32]

    def enter_message(self, source: int, target: int, seq: int, dtype: int, elements: int) -> int:
        """Enter message `seq` from source to target at this rank's end; returns the entry."""
        entry = (seq & _MASK) << 32 | (elements * 0x9E3779B1 + dtype) & _MASK
        self._words[self._message(source, target, seq) + (self._rank == target)] = entry
        return entry

    def message_disagrees(self, source: int, target: int, seq: int, entry: int) -> bool:
        """True if the other end has entered this message as another one."""
        other = self._words[self._message(source, target, seq) + (self._rank != target)]
        return other != entry and other >> 32 == entry >> 32

    def _message(self, source: int, target: int, seq: int) -> int:
        return DEPTH * self._size + 2 * (MESSAGE_DEPTH * (source * self._size + target) + seq % MESSAGE_DEPTH)
