"""What --data names, opened: token folders, token files, and text, which is read as bytes and cached as a token folder."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import numpy as np

from phalanx.train.data.folder import Folder, Starts, Tokens, Writer, is_folder, mapped, read_folder
from phalanx.train.data.read import JSONL, PARQUET, TEXT, files_below
from phalanx.train.data.tokenizer import BYTES_EOS

SAMPLED_PAGES, PAGE = 64, 4096
"""What the digest of a token file is taken from: to read all of it could take an hour."""
STANDARD_LIBRARY = "the Python standard library"


@dataclass(frozen=True)
class Source:
    """Tokens to learn from, mapped into memory."""

    name: str
    tokens: Tokens
    documents: Starts | None
    """Where documents begin, and the number of tokens; None if nobody knows."""
    tokenizer: str | None
    """Name, digest and vocabulary; None if nobody knows."""
    largest: int | None
    """The largest token that occurs, if it is known."""
    digest: str
    """Of the content, wherever it lies."""
    weight: float | None
    """The share of samples that is asked for, relative to those of the other sources."""

    @property
    def unit(self) -> str:
        return "bytes" if self.tokens.dtype == np.uint8 else "tokens"


@dataclass(frozen=True)
class Stretch:
    """A part of a source: the tokens [begin, end)."""

    source: Source
    begin: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.begin

    def windows(self, seq: int) -> int:
        """Samples of seq tokens, each of which has a target after it."""
        return max(0, self.tokens - 1) // seq


def open_sources(data: Sequence[str], cache: Path | None = None) -> tuple[Source, ...]:
    """What each `PATH` or `PATH=WEIGHT` names; without any, the sources of the running Python's standard library.

    A path is a token folder, a .npy file of tokens, a text file or a folder of them. Text is read as bytes and cached in `cache`
    (the system's temporary folder if left out). Raises ValueError, with the path, for what cannot be read or is to be packed first,
    weights for some sources only, and tokenizers that differ.
    """
    if not data:
        return (_folder_source(STANDARD_LIBRARY, byte_folder(None, cache), None),)
    named = [_weighted(text) for text in data]
    if 0 < sum(weight is not None for _, weight in named) < len(named):
        without = next(path for path, weight in named if weight is None)
        raise ValueError(f"--data {' '.join(data)}: {without} has no weight, others have: give every source one, or none")
    sources = tuple(_open(path, weight, cache) for path, weight in named)
    for other in sources[1:]:
        if other.tokenizer != sources[0].tokenizer:
            told = [
                f"{source.name} is of {source.tokenizer or 'a tokenizer that nothing tells'}" for source in (sources[0], other)
            ]
            raise ValueError(f"sources of different tokenizers cannot be blended: {told[0]}, {told[1]}")
    return sources


def split(source: Source, held_out: float = 0.05) -> tuple[Stretch, Stretch]:
    """(training, held-out): the last `held_out` fraction of the tokens is kept from training, whatever the length of a sample."""
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"the held-out fraction is {held_out}; it lies between 0 and 1")
    count = len(source.tokens)
    cut = count - max(1, round(count * held_out))
    return Stretch(source, 0, cut), Stretch(source, cut, count)


def byte_folder(source: Path | None = None, cache: Path | None = None) -> Folder:
    """The bytes of a text file, or of the text files in a folder by sorted path, as a token folder; one byte 0 ends each file.

    It is written once to `cache`, under a name that changes when the files do. Bytes are taken as they are, UTF-8 or not.
    """
    root = source if source is not None else Path(sysconfig.get_path("stdlib"))
    suffixes = (*TEXT, *JSONL) if source is not None else (".py",)
    try:
        files = [root] if root.is_file() else files_below(root, suffixes)
        digest = hashlib.blake2b(digest_size=8)
        for file in files:
            status = file.stat()
            digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        if not files:
            raise ValueError(f"{root} is no file and holds no text: no file in it ends in {', '.join(suffixes)}")
        folder = cache if cache is not None else Path(tempfile.gettempdir()) / f"phalanx-tokens-{os.getuid()}"
        path = folder / f"bytes-{digest.hexdigest()}"
        if not (path / "meta.json").is_file():
            if not any(file.stat().st_size for file in files):
                raise ValueError(f"the text in {root} is empty")
            with Writer(path, tokenizer="bytes", tokenizer_digest="", vocab=256, eos=BYTES_EOS, existing="keep") as writer:
                for file in files:
                    if data := file.read_bytes():
                        ended = np.frombuffer(data + bytes([BYTES_EOS]), np.uint8)
                        writer.write(ended, np.array([len(ended)]), len(data))
                writer.finish()
    except OSError as error:
        moved = "; if it has moved, say where with --data" if isinstance(error, FileNotFoundError) else ""
        raise ValueError(f"cannot read the text in {root}: {error}{moved}") from error
    return read_folder(path)


def _weighted(text: str) -> tuple[Path, float | None]:
    """A path may hold `=` itself: what exists is a path."""
    path, equals, after = text.rpartition("=")
    if not equals or Path(text).exists():
        return Path(text), None
    try:
        weight = float(after)
    except ValueError:
        raise ValueError(f"--data {text}: {after!r} is no weight; a source is PATH or PATH=WEIGHT, as in wiki=0.7") from None
    if not 0 < weight < math.inf:
        raise ValueError(f"--data {text}: the weight is {weight}; it is above 0")
    return Path(path), weight


def _open(path: Path, weight: float | None, cache: Path | None) -> Source:
    name = str(path)
    if is_folder(path):
        return _folder_source(name, read_folder(path), weight)
    if path.suffix in (*JSONL, *PARQUET) and path.is_file():
        raise ValueError(f"{path} is not text: pack it first, phalanx data pack {quote(name)} --out FOLDER")
    if path.suffix == ".npy":
        tokens = mapped(path)
        return Source(name, tokens, None, None, None, _sampled_digest(tokens), weight)
    return _folder_source(name, byte_folder(path, cache), weight)


def _folder_source(name: str, folder: Folder, weight: float | None) -> Source:
    meta = folder.meta
    tokenizer = f"{meta.tokenizer} {meta.tokenizer_digest[:8]}".strip() + f" with {meta.vocab} tokens"
    return Source(name, folder.tokens, folder.documents, tokenizer, meta.largest, meta.digest, weight)


def _sampled_digest(tokens: Tokens) -> str:
    digest = hashlib.blake2b(f"{tokens.dtype} {len(tokens)}".encode(), digest_size=16)
    for begin in np.linspace(0, max(0, len(tokens) - PAGE), SAMPLED_PAGES).astype(np.int64).tolist():
        digest.update(tokens[begin : begin + PAGE].tobytes())
    return digest.hexdigest()
