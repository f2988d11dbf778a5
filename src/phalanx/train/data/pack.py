"""Text into a token folder: chunks are read and encoded by several processes, and written in the order of the sources.

The output does not depend on the number of workers, and memory does not grow with the text: one document, one chunk (a row group
of parquet is one) and the results of the next few chunks are held.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.train.data.folder import Existing, Meta, Starts, Tokens, Writer, check_name, smallest_dtype
from phalanx.train.data.read import Chunk, chunks, documents, files
from phalanx.train.data.tokenizer import Encode, Tokenizer
from phalanx.train.leash import PR_SET_PDEATHSIG

AHEAD = 4
"""Chunks under way for each worker: what is finished waits for the one that is first in order."""


@dataclass(frozen=True)
class Encoded:
    """A chunk's documents as tokens."""

    tokens: Tokens
    lengths: Starts
    text_bytes: int
    size: int
    """Bytes on disk."""


@dataclass(frozen=True)
class Progress:
    """How far a pack is."""

    documents: int
    text_bytes: int
    done: int
    """Bytes of files that are packed."""
    total: int
    """Bytes of all files."""


def pack(
    sources: Sequence[Path],
    out: Path,
    tokenizer: Tokenizer,
    *,
    text_key: str = "text",
    workers: int = 1,
    overwrite: bool = False,
    progress: Callable[[Progress], object] = lambda progress: None,
) -> Meta:
    """Pack text files, JSONL and parquet, or folders of them, into the token folder `out`; empty documents are left out.

    One worker is this process. The tokenizers library starts threads of its own besides unless TOKENIZERS_PARALLELISM=false.
    Raises ValueError, with file and line or row, for what cannot be packed; then there is no `out`.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; it is a number of at least 1")
    existing: Existing = "replace" if overwrite else "refuse"
    check_name(out, existing)
    paths = files(sources)
    total = sum(path.stat().st_size for path in paths)
    done, text_bytes, count = 0, 0, 0
    with Writer(
        out,
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        vocab=tokenizer.vocab,
        eos=tokenizer.eos,
        existing=existing,
    ) as writer:
        for encoded in _encoded(chunks(paths), tokenizer, text_key, workers):
            writer.write(encoded.tokens, encoded.lengths, encoded.text_bytes)
            done, text_bytes, count = done + encoded.size, text_bytes + encoded.text_bytes, count + len(encoded.lengths)
            progress(Progress(count, text_bytes, done, total))
        if not count:
            raise ValueError(f"there is no text in {', '.join(map(str, sources))}: every document is empty")
        return writer.finish()


def encode_chunk(chunk: Chunk, encode: Encode, tokenizer: Tokenizer, key: str) -> Encoded:
    """Read a chunk and encode its documents, each with the token that ends it."""
    texts = [(text, data) for text, data in documents(chunk, key) if text]
    end = np.array([] if tokenizer.eos is None else [tokenizer.eos], smallest_dtype(tokenizer.vocab))
    tokens = encode(texts)
    lengths = np.array([len(each) + len(end) for each in tokens], np.int64)
    joined = np.concatenate([piece for each in tokens for piece in (each, end)]) if tokens else end[:0]
    return Encoded(joined, lengths, sum(len(data) for _, data in texts), chunk.size)


def _encoded(pieces: Iterable[Chunk], tokenizer: Tokenizer, key: str, workers: int) -> Iterator[Encoded]:
    """The chunks encoded, in order."""
    if workers == 1:
        encode = tokenizer.encode()
        yield from (encode_chunk(chunk, encode, tokenizer, key) for chunk in pieces)
        return
    # Not forked: this process may have threads, and those of tokenizers do not live through a fork.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_prepare, initargs=(os.getpid(), tokenizer, key)
    )
    under_way: deque[Future[Encoded]] = deque()
    try:
        for chunk in pieces:
            under_way.append(pool.submit(_work, chunk))
            if len(under_way) == AHEAD * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool:
        raise ValueError(f"one of {workers} packing processes was killed, perhaps for memory: try fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker: Callable[[Chunk], Encoded]
"""Of a packing process: set once by _prepare, since a tokenizer takes long to build."""


def _prepare(parent: int, tokenizer: Tokenizer, key: str) -> None:
    """What each packing process does first: it ends with its parent, and leaves an interrupt to it."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    encode = tokenizer.encode()
    _worker = lambda chunk: encode_chunk(chunk, encode, tokenizer, key)  # noqa: E731


def _work(chunk: Chunk) -> Encoded:
    return _worker(chunk)
