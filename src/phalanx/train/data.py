"""Training data: text as bytes in one memory-mapped file, and samples in an order that depends on seed and position only.

A sample is a run of seq + 1 tokens. Which one comes at the global cursor c (step * batch + position) is a function of
(seed, c), so neither the mesh nor a restart changes what is learned from.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx import random

Tokens = NDArray[Any]
"""One dimension, unsigned integers."""
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
    ".jsonl",
)
SEPARATOR = b"\0"
"""Between files: a byte that no text holds."""


def byte_tokens(source: Path | None = None, cache: Path | None = None) -> Tokens:
    """The bytes of a text file, or of the text files in a folder by sorted path, as a memory-mapped uint8 array.

    Without a source, the sources of the running Python's standard library. A `.npy` file of token numbers is mapped as it is.
    The file behind the map is written once to `cache`, a folder (the system's temporary one if left out), under a name that
    changes when the sources do. Raises ValueError, with the path, if there is nothing to read or it cannot be read.
    """
    if source is not None and source.suffix == ".npy":
        return _mapped(source)
    root = source if source is not None else Path(sysconfig.get_path("stdlib"))
    suffixes = TEXT if source is not None else (".py",)
    try:
        files = [root] if root.is_file() else sorted(_text_files(root, suffixes))
        digest = hashlib.blake2b(digest_size=8)
        for file in files:
            status = file.stat()
            digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    except OSError as error:
        raise ValueError(f"cannot read the text in {root}: {error}") from error
    if not files:
        raise ValueError(f"{root} is no file and holds no text: no file in it ends in {', '.join(suffixes)}")
    folder = cache if cache is not None else Path(tempfile.gettempdir()) / f"phalanx-tokens-{os.getuid()}"
    path = folder / f"bytes-{digest.hexdigest()}.npy"
    if not path.exists():
        try:
            text = np.frombuffer(SEPARATOR.join(file.read_bytes() for file in files), dtype=np.uint8)
        except OSError as error:
            raise ValueError(f"cannot read the text in {root}: {error}") from error
        if not text.size:
            raise ValueError(f"the text in {root} is empty")
        _write(path, text)
    return _mapped(path)


def split(tokens: Tokens, held_out: float = 0.05) -> tuple[Tokens, Tokens]:
    """(training, held-out): the last `held_out` fraction is kept from training."""
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"the held-out fraction is {held_out}; it lies between 0 and 1")
    cut = len(tokens) - max(1, round(len(tokens) * held_out))
    return tokens[:cut], tokens[cut:]


class Loader:
    """Batches of {"tokens", "targets"}, int64 (batch, seq), by step number. Holds no position: any step can be asked for."""

    def __init__(self, tokens: Tokens, batch: int, seq: int, seed: int) -> None:
        self.samples = (len(tokens) - 1) // seq
        if batch < 1 or seq < 1 or self.samples < 1:
            raise ValueError(f"a batch of {batch} sequences of {seq} + 1 tokens cannot be taken from {len(tokens)} tokens")
        self.tokens, self.size, self.seq, self.seed = tokens, batch, seq, seed

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of a step, numbered from 0."""
        return self._read(torch.arange(self.size) + step * self.size)

    def local(self, step: int, microbatches: int, part: int, parts: int) -> dict[str, Tensor]:
        """The samples of the global batch that data rank `part` of `parts` works on, microbatch after microbatch.

        Microbatch j holds the samples [jB/m, (j+1)B/m) of the step's B, split contiguously over the data ranks.
        """
        if self.size % (microbatches * parts) or not 0 <= part < parts:
            raise ValueError(
                f"a batch of {self.size} does not divide into {microbatches} microbatches for {parts} data ranks, "
                f"of which this is number {part}, counting from 0"
            )
        mine = torch.arange(self.size).view(microbatches, parts, -1)[:, part].reshape(-1)
        return self._read(mine + step * self.size)

    def order(self, cursor: Tensor) -> Tensor:
        """Which sample comes at each global cursor: every epoch is a permutation of all samples of its own."""
        epoch, position = cursor // self.samples, cursor % self.samples
        chosen = torch.empty_like(cursor)
        for number in sorted(set(epoch.tolist())):
            here = epoch == number
            chosen[here] = random.permutation(random.key(self.seed, "order", number), self.samples, position[here])
        return chosen

    def _read(self, cursor: Tensor) -> dict[str, Tensor]:
        starts = (self.order(cursor) * self.seq).tolist()
        rows = np.stack([self.tokens[start : start + self.seq + 1] for start in starts]).astype(np.int64)
        both = torch.from_numpy(rows)  # (batch, seq + 1)
        return {"tokens": both[:, :-1].contiguous(), "targets": both[:, 1:].contiguous()}


def _text_files(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Files of these suffixes below `root`, without hidden folders and installed packages."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, below, names in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if not name.startswith(".") and name != "site-packages"]
        yield from (Path(folder, name) for name in names if name.endswith(suffixes))


def _write(path: Path, tokens: Tokens) -> None:
    """Atomic: ranks that start together each write a file of their own and the last one stays; all are equal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".npy")
    with os.fdopen(handle, "wb") as file:
        np.save(file, tokens)
    os.replace(name, path)


def _mapped(path: Path) -> Tokens:
    try:
        tokens: Tokens = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read tokens from {path}: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind != "u" or not tokens.size:
        raise ValueError(f"{path} holds {tokens.dtype} of shape {tokens.shape}; tokens are unsigned integers in one dimension")
    return tokens
