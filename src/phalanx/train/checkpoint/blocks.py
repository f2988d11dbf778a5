"""Files whose every block is known by its hash: written once, and verified wherever a part of one is read.

Any address that fsspec opens. A block is what is read and verified at once, so a reader of a part of a file reads little more than that.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import fsspec
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemBase

BLOCK = 1 << 15
"""Bytes. A rank of tp=4 reads 1.06 of its bytes of a checkpoint of tp=2, with 256 KiB 1.5 (python -m phalanx.bench.checkpoint)."""
KEPT_BLOCKS = 512


class Damaged(ValueError):
    """A file is not what was written."""


class Unreachable(ValueError):
    """A file system did not do what it can do, as far as anybody knows: another try may pass."""


class Place:
    """A folder at any address, local or not: what a checkpoint needs of a file system."""

    def __init__(self, address: str) -> None:
        try:
            self.system, self.path = fsspec.core.url_to_fs(str(address))
        except (ImportError, ValueError) as error:
            raise ValueError(f"checkpoints cannot be kept at {address}: {error}") from None
        self.address = str(address)
        self.is_local = "file" in (self.system.protocol if isinstance(self.system.protocol, tuple) else (self.system.protocol,))

    def at(self, name: str) -> Place:
        """A folder below this one."""
        return Place(f"{self.address.rstrip('/')}/{name}")

    def of(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"

    def make(self) -> None:
        with self.told(""):
            self.system.makedirs(self.path, exist_ok=True)

    def exists(self, name: str = "") -> bool:
        self.system.invalidate_cache()
        return bool(self.system.exists(self.of(name) if name else self.path))

    def is_folder(self) -> bool:
        return bool(self.system.isdir(self.path))

    def size(self, name: str) -> int:
        with self.told(name):
            return int(self.system.size(self.of(name)))

    def folders(self) -> list[str]:
        """Names of the folders in this one; none if it does not exist."""
        self.system.invalidate_cache()
        try:
            found = self.system.ls(self.path, detail=True)
        except FileNotFoundError:
            return []
        return sorted(PurePosixPath(entry["name"]).name for entry in found if entry["type"] == "directory")

    def read(self, name: str) -> bytes:
        with self.told(name), self.system.open(self.of(name), "rb") as file:
            return cast(bytes, file.read())

    def write(self, name: str, content: bytes) -> None:
        """Whole or not at all: an object store shows an object when it is complete, a file is renamed when it is on disk."""
        with self.told(name):
            if not self.is_local:
                self.system.pipe_file(self.of(name), content)
                return
            temporary = self.of(f".{name}.{os.getpid()}")
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.of(name))
            self.sync()

    def sync(self) -> None:
        """Names of files reach the disk, as their contents did."""
        if self.is_local:
            folder = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def remove(self, name: str) -> None:
        with self.told(name):
            if self.exists(name):
                self.system.rm(self.of(name), recursive=True)

    @contextmanager
    def told(self, name: str) -> Iterator[None]:
        """An OSError as a person's: what could not be done where, and what the system says."""
        try:
            yield
        except OSError as error:
            where = f"{self.address.rstrip('/')}/{name}" if name else self.address
            hint = HINTS.get(error.errno or 0)
            kind = Unreachable if hint is None else ValueError
            raise kind(f"{where}: {error.strerror or error}{hint or ''}") from error


HINTS = {
    errno.ENOSPC: "; free some space, or keep fewer checkpoints (--keep)",
    errno.EDQUOT: "; free some space, or keep fewer checkpoints (--keep)",
    errno.EROFS: "; choose a folder that can be written to, with --checkpoints or --out",
    errno.EACCES: "; choose a folder that can be written to, with --checkpoints or --out",
    errno.EPERM: "; choose a folder that can be written to, with --checkpoints or --out",
    errno.EEXIST: ", and is no folder; choose another name with --checkpoints",
    errno.ENOTDIR: "; choose a folder, with --checkpoints or --out",
    errno.ENOENT: "",
}
"""What a person can do about an error that stays until somebody does something."""


class HashedWriter(io.RawIOBase):
    """Writes through to a file and hashes every block on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size = file, 0
        self.digests: list[int] = []
        self.failed: OSError | None = None
        self._hash = xxhash.xxh3_64()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        while rest:
            part = rest[: BLOCK - self.size % BLOCK]
            self._hash.update(part)
            self.size += len(part)
            rest = rest[len(part) :]
            if self.size % BLOCK == 0:
                self._end_block()
        try:
            self.file.write(view)
        except OSError as error:
            self.failed = error
            raise
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        try:
            return self.file.fileno()
        except (AttributeError, OSError):
            raise io.UnsupportedOperation("fileno") from None

    def finish(self) -> None:
        if self.size % BLOCK:
            self._end_block()

    def _end_block(self) -> None:
        self.digests.append(self._hash.intdigest())
        self._hash.reset()


class HashedFiles(FileSystemBase):
    """What DCP's FileSystemWriter writes through: files of a Place, with their hashes in `written`."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.written: dict[str, HashedWriter] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        with self.place.system.open(str(path), mode) as file:
            stream = HashedWriter(file)
            try:
                yield stream
            except RuntimeError:
                # torch.save tells of a full disk as of a position in a file that it did not expect.
                raise stream.failed or RuntimeError from None
            stream.finish()
        self.written[PurePosixPath(str(path)).name] = stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.place.system.mv(str(path), str(new_path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self.place.system.makedirs(str(path), exist_ok=True)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return bool(self.place.system.exists(str(path)))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self.place.system.rm(str(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class VerifiedFile(io.RawIOBase):
    """Reads ranges of a file in whole blocks, each of which must have the hash that it was written with.

    `bytes_read` counts what has been read from the file.
    """

    def __init__(self, place: Place, name: str, size: int, digests: Sequence[int]) -> None:
        self.name, self.length, self._digests = f"{place.address.rstrip('/')}/{name}", size, digests
        self.bytes_read = 0
        self._place = 0
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        """The blocks that were used last."""
        found = place.size(name)
        if found != size:
            raise Damaged(f"{self.name} has {found:,} bytes; {size:,} were written")
        # A range is asked for once, or is in the blocks that are kept: no cache of fsspec's own.
        with place.told(name):
            self._file = place.system.open(place.of(name), "rb", **({} if place.is_local else {"cache_type": "none"}))
        self._folder, self._name = place, name

    def bytes_of(self, start: int, stop: int) -> memoryview:
        """Bytes start to stop; not for long. Raises Damaged, naming the file and the block, if they are not what was written."""
        assert 0 <= start <= stop <= self.length, (self.name, start, stop)
        if start == stop:
            return memoryview(b"")
        first, last = start // BLOCK, -(-stop // BLOCK)
        blocks: list[memoryview] = []
        for present, run in itertools.groupby(range(first, last), lambda number: number in self._kept):
            numbers = list(run)
            blocks += [self._kept[number] for number in numbers] if present else self._read(numbers[0], numbers[-1] + 1)
        for number, block in zip(range(first, last), blocks, strict=True):
            self._kept[number] = block
            self._kept.move_to_end(number)
        while len(self._kept) > KEPT_BLOCKS:
            self._kept.popitem(last=False)
        whole = blocks[0] if len(blocks) == 1 else memoryview(b"".join(blocks))
        return whole[start - first * BLOCK : stop - first * BLOCK]

    def _read(self, first: int, last: int) -> list[memoryview]:
        begin, end = first * BLOCK, min(last * BLOCK, self.length)
        with self._folder.told(self._name):
            self._file.seek(begin)
            content = memoryview(self._file.read(end - begin))
        self.bytes_read += len(content)
        if len(content) != end - begin:
            raise Damaged(f"{self.name} ended at byte {begin + len(content):,} of {self.length:,}")
        blocks = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
        for number, block in enumerate(blocks, first):
            if xxhash.xxh3_64_intdigest(block) != self._digests[number]:
                raise Damaged(
                    f"{self.name} is damaged: bytes {number * BLOCK:,} to {number * BLOCK + len(block):,} are not what was written"
                )
        return blocks

    # As a file, for whoever reads a part of it by itself

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.length}[whence]
        self._place = base + offset
        return self._place

    def read(self, size: int = -1) -> bytes:
        stop = self.length if size < 0 else min(self.length, self._place + size)
        found = bytes(self.bytes_of(min(self._place, stop), stop))
        self._place = stop
        return found

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
