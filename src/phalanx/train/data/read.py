"""From sources to documents: which files there are, how they are cut into chunks that can be read by themselves, what is in them.

One document is one text file, one line of JSONL or one row of parquet. A mistake in a file is told with its line or row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from phalanx.train.data.folder import is_folder

TEXT = (
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".c",
    ".h",
    ".cpp",
    ".rs",
    ".go",
    ".java",
    ".js",
    ".ts",
    ".html",
    ".tex",
    ".json",
)
JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
CHUNK_BYTES = 1 << 20
"""Of text files and JSONL: small enough that all workers end at about the same time, large enough to be worth sending."""


@dataclass(frozen=True)
class Chunk:
    """Whole documents that one worker reads at a time."""

    kind: Literal["text", "jsonl", "parquet"]
    paths: tuple[Path, ...]
    """One file, or several of text."""
    begin: int
    """jsonl: the lines whose first byte lies in [begin, end); parquet: the row groups [begin, end)."""
    end: int
    size: int
    """Bytes on disk."""


def files_below(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Files of these suffixes in a folder, by sorted path, without hidden folders, installed packages and token folders."""

    def refuse(error: OSError) -> None:
        raise error

    found = []
    for folder, below, names in os.walk(root, onerror=refuse):
        below[:] = [
            name for name in below if not name.startswith(".") and name != "site-packages" and not is_folder(Path(folder, name))
        ]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(found)


def files(sources: Sequence[Path]) -> list[Path]:
    """Every file of the sources, in the order given. Raises ValueError, with the path, for one that holds none."""
    suffixes = (*TEXT, *JSONL, *PARQUET)
    found: list[Path] = []
    for source in sources:
        try:
            here = files_below(source, suffixes) if source.is_dir() else [source]
            if not here:
                raise ValueError(f"{source} holds nothing to pack: no file in it ends in {', '.join(suffixes)}")
            for file in here:
                file.stat()
        except OSError as error:
            raise ValueError(f"cannot read {source}: {error.strerror}") from None
        found += here
    return found


def chunks(paths: Sequence[Path]) -> Iterator[Chunk]:
    """The files cut up, in order. A text file is never cut, nor is a line; a row group of parquet is one chunk."""
    together: list[Path] = []
    size = 0
    for path in paths:
        here = path.stat().st_size
        is_text = path.suffix not in (*JSONL, *PARQUET)
        if together and (not is_text or size + here > CHUNK_BYTES):
            yield Chunk("text", tuple(together), 0, 0, size)
            together, size = [], 0
        if is_text:
            together.append(path)
            size += here
        elif path.suffix in JSONL:
            for begin in range(0, here, CHUNK_BYTES):
                end = min(begin + CHUNK_BYTES, here)
                yield Chunk("jsonl", (path,), begin, end, end - begin)
        else:
            groups = parquet(path).metadata.num_row_groups
            yield from (Chunk("parquet", (path,), at, at + 1, here // groups) for at in range(groups))
    if together:
        yield Chunk("text", tuple(together), 0, 0, size)


def documents(chunk: Chunk, key: str) -> Iterator[tuple[str, bytes]]:
    """(text, its UTF-8) of every document of a chunk, empty ones too. `key` names the text in an object or a row."""
    if chunk.kind == "text":
        return _texts(chunk.paths)
    return _lines(chunk, key) if chunk.kind == "jsonl" else _rows(chunk, key)


def parquet(path: Path) -> Any:
    """The file as pyarrow opens it."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(
            f"{path} is read by the package pyarrow, which is not installed: pip install 'phalanx[data]'"
        ) from None
    from pyarrow import ArrowException

    try:
        return ParquetFile(path)
    except (OSError, ArrowException) as error:
        raise ValueError(f"cannot read {path} as parquet: {error}") from None


def _texts(paths: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        try:
            yield data.decode(), data
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise ValueError(f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8 text") from None


def _lines(chunk: Chunk, key: str) -> Iterator[tuple[str, bytes]]:
    [path] = chunk.paths
    try:
        with path.open("rb") as file:
            at = chunk.begin
            if at:  # the line that begins before this chunk belongs to the one before
                file.seek(at - 1)
                at += len(file.readline()) - 1
            while at < chunk.end:
                line = file.readline()
                if line.strip():
                    yield _of_object(line, key, path, at)
                at += len(line)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _of_object(line: bytes, key: str, path: Path, at: int) -> tuple[str, bytes]:
    try:
        content = json.loads(line.decode())
    except UnicodeDecodeError as error:
        _wrong_line(path, at, f"byte 0x{line[error.start]:02x} is not UTF-8 text")
    except ValueError as error:
        _wrong_line(path, at, f"not JSON: {error}")
    if not isinstance(content, dict):
        _wrong_line(path, at, f"a {type(content).__name__}; each line is an object, as in {{{json.dumps(key)}: ...}}")
    if key not in content:
        from phalanx.train.config import closest

        _wrong_line(path, at, f"no key {key!r}; it has {closest(key, content)}. --text-key says which is the text")
    text = content[key]
    if not isinstance(text, str):
        _wrong_line(path, at, f"{key!r} is a {type(text).__name__}, not text")
    try:
        return text, text.encode()
    except UnicodeEncodeError as error:
        _wrong_line(path, at, f"{key!r} holds {text[error.start]!a}, half a character, which no UTF-8 has")


def _wrong_line(path: Path, at: int, what: str) -> NoReturn:
    """Lines are counted only now: chunks know where they begin in bytes."""
    number, left = 1, at
    with path.open("rb") as file:
        while left and (data := file.read(min(left, CHUNK_BYTES))):
            number += data.count(b"\n")
            left -= len(data)
    raise ValueError(f"{path}, line {number}: {what}") from None


def _rows(chunk: Chunk, key: str) -> Iterator[tuple[str, bytes]]:
    [path] = chunk.paths
    file = parquet(path)
    if key not in file.schema_arrow.names:
        from phalanx.train.config import closest

        raise ValueError(
            f"{path} has no column {key!r}; it has {closest(key, file.schema_arrow.names)}. --text-key says which is the text"
        )
    row = sum(file.metadata.row_group(group).num_rows for group in range(chunk.begin))
    for batch in file.iter_batches(batch_size=1024, row_groups=list(range(chunk.begin, chunk.end)), columns=[key]):
        for text in batch.column(0).to_pylist():
            row += 1
            if not isinstance(text, str):
                what = "null" if text is None else f"a {type(text).__name__}"
                raise ValueError(f"{path}, row {row}: {key!r} is {what}, not text")
            yield text, text.encode()
