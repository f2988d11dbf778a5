"""A token folder: what `phalanx data pack` writes and training maps into memory.

    tokens.npy     (tokens,) uint8, uint16 or uint32, the smallest that holds the vocabulary: the documents one after another, each
                   followed by the token that ends it, unless `eos` is null
    documents.npy  (documents + 1,) int64: where each document begins in tokens.npy, and at last the number of tokens
    meta.json      the fields of Meta

meta.json is the last file to be written and the folder gets its name when all three are on disk: what was cut short is no folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import numpy as np
from numpy.typing import NDArray

FORMAT = 1
FILES = ("tokens.npy", "documents.npy", "meta.json")
Tokens = NDArray[Any]
"""One dimension, unsigned integers."""
Starts = NDArray[np.int64]
Existing = Literal["refuse", "replace", "keep"]
"""What happens to a folder that has the name already: refuse it, replace it (only a token folder or an empty one), or keep it and
drop what was written, for caches."""


@dataclass(frozen=True, kw_only=True)
class Meta:
    """meta.json."""

    format: int
    """The number of this layout of the folder."""
    tokenizer: str
    """`bytes`, or the name of the tokenizer's file or folder."""
    tokenizer_digest: str
    """blake2b of the tokenizer.json; empty for bytes. Two folders with the same name and digest can be blended."""
    vocab: int
    """One more than the largest token that the tokenizer knows."""
    eos: int | None
    """The token after each document; null if there is none."""
    dtype: str
    tokens: int
    documents: int
    largest: int
    """The largest token that occurs."""
    text_bytes: int
    """UTF-8 bytes of the text that was packed."""
    digest: str
    """blake2b of dtype, tokens and lengths of documents: equal for equal content, however it was packed."""


@dataclass(frozen=True)
class Folder:
    """A token folder, mapped."""

    path: Path
    meta: Meta
    tokens: Tokens
    documents: Starts


def is_folder(path: Path) -> bool:
    """Whether `path` is a token folder or what is left of one."""
    return path.is_dir() and any((path / name).is_file() for name in ("tokens.npy", "documents.npy"))


def read_folder(path: Path) -> Folder:
    """Map a token folder. Raises ValueError, with the file, if it is not whole or its files contradict one another."""
    if not (path / "meta.json").is_file():
        raise ValueError(f"{path} is no whole token folder: it has no meta.json; pack it again")
    try:
        content = json.loads((path / "meta.json").read_text())
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is {content.get('format')}; this version reads format {FORMAT}")
        meta = Meta(**content)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read {path / 'meta.json'}: {error}") from None
    tokens, documents = mapped(path / "tokens.npy"), mapped(path / "documents.npy", kind="i")
    if (len(tokens), str(tokens.dtype)) != (meta.tokens, meta.dtype):
        raise ValueError(
            f"{path / 'tokens.npy'} holds {len(tokens)} {tokens.dtype}; meta.json says {meta.tokens} {meta.dtype}: pack it again"
        )
    if len(documents) != meta.documents + 1 or documents[0] != 0 or documents[-1] != meta.tokens:
        raise ValueError(
            f"{path / 'documents.npy'} holds {len(documents) - 1} documents from {documents[0]} to {documents[-1]}; meta.json says "
            f"{meta.documents} of {meta.tokens} tokens: pack it again"
        )
    return Folder(path, meta, tokens, documents)


def mapped(path: Path, kind: Literal["u", "i"] = "u") -> NDArray[Any]:
    """The array of a .npy file, one dimension of (un)signed integers, read when it is looked at."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read tokens from {path}: {error}") from error
    if array.ndim != 1 or array.dtype.kind != kind or not array.size:
        what = "unsigned integers" if kind == "u" else "integers"
        raise ValueError(f"{path} holds {array.dtype} of shape {array.shape}; it should be {what} in one dimension")
    return array


def smallest_dtype(vocab: int) -> np.dtype[Any]:
    """uint8, uint16 or uint32, whichever is the smallest that holds the tokens 0 to vocab - 1."""
    for dtype in (np.uint8, np.uint16, np.uint32):
        if vocab - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise ValueError(f"a vocabulary of {vocab} tokens does not fit 32 bits")


class Writer:
    """Writes a token folder document by document in constant memory, under another name until it is whole.

    As a context manager: an exception leaves nothing behind.
    """

    def __init__(
        self,
        path: Path,
        *,
        tokenizer: str,
        tokenizer_digest: str,
        vocab: int,
        eos: int | None,
        existing: Existing = "refuse",
    ) -> None:
        check_name(path, existing)
        self._path, self._existing = path, existing
        self._tokenizer, self._tokenizer_digest, self._vocab, self._eos = tokenizer, tokenizer_digest, vocab, eos
        self.dtype = smallest_dtype(vocab)
        self._largest = self._text_bytes = 0

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._partial = Path(tempfile.mkdtemp(prefix=f"{self._path.name}.partial-", dir=self._path.parent))
        except OSError as error:
            raise ValueError(f"cannot write beside {self._path}: {error.strerror}") from error
        try:
            self._partial.chmod(0o777 & ~_umask())  # mkdtemp's own is for secrets
            self._tokens = _Array(self._partial / "tokens.npy", self.dtype)
            self._documents = _Array(self._partial / "documents.npy", np.dtype(np.int64))
        except OSError as error:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise ValueError(f"cannot write {self._path}: {error.strerror}") from error
        return self

    def write(self, tokens: Tokens, lengths: Starts, text_bytes: int) -> None:
        """Append whole documents. tokens: all of them; lengths: tokens of each; text_bytes: of the text that they were."""
        if int(lengths.sum()) != len(tokens):
            raise ValueError(f"documents of {int(lengths.sum())} tokens together are said to be {len(tokens)}")
        if len(tokens):
            self._largest = max(self._largest, int(tokens.max()))
            if self._largest >= self._vocab:
                raise ValueError(f"token {self._largest} is above the vocabulary, which ends at {self._vocab - 1}")
        begin = self._tokens.count
        try:
            self._tokens.append(tokens)
            self._documents.append(begin + np.cumsum(lengths) - lengths)
        except OSError as error:
            raise ValueError(f"cannot write {self._path}: {error.strerror} after {self._tokens.count:,} tokens") from error
        self._text_bytes += text_bytes

    def finish(self) -> Meta:
        """The folder gets its name. Raises ValueError if nothing was written into it."""
        if not self._tokens.count:
            raise ValueError("there is no text: every document is empty")
        documents = self._documents.count
        try:
            self._documents.append(np.array([self._tokens.count]))
            digests = [array.close() for array in (self._tokens, self._documents)]
            meta = Meta(
                format=FORMAT,
                tokenizer=self._tokenizer,
                tokenizer_digest=self._tokenizer_digest,
                vocab=self._vocab,
                eos=self._eos,
                dtype=str(self.dtype),
                tokens=self._tokens.count,
                documents=documents,
                largest=self._largest,
                text_bytes=self._text_bytes,
                digest=hashlib.blake2b(" ".join([str(self.dtype), *digests]).encode(), digest_size=16).hexdigest(),
            )
            with (self._partial / "meta.json").open("w") as file:
                file.write(json.dumps(asdict(meta), indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._rename()
        except OSError as error:
            raise ValueError(f"cannot write {self._path}: {error.strerror}") from error
        return meta

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._tokens.abandon()
        self._documents.abandon()
        shutil.rmtree(self._partial, ignore_errors=True)  # gone already if it was renamed

    def _rename(self) -> None:
        check_name(self._path, self._existing)
        if self._existing == "replace" and self._path.is_dir():
            # Two renames: for an instant there is no folder of this name, but never a broken one.
            old = Path(tempfile.mkdtemp(prefix=f"{self._path.name}.old-", dir=self._path.parent))
            os.rename(self._path, old)
            os.rename(self._partial, self._path)
            shutil.rmtree(old)
        elif self._existing != "keep" or not (self._path / "meta.json").is_file():
            try:
                os.rename(self._partial, self._path)
            except OSError:
                # Ranks that start together each write a cache of their own; all are equal and the first one stays.
                if self._existing != "keep" or not (self._path / "meta.json").is_file():
                    raise


def check_name(path: Path, existing: Existing) -> None:
    """Raise ValueError if a folder may not get this name."""
    if not path.exists() or existing == "keep":
        return
    if existing == "refuse":
        raise ValueError(f"{path} is there already; --overwrite replaces it")
    if not path.is_dir() or not {entry.name for entry in path.iterdir()} <= set(FILES):
        raise ValueError(f"{path} is no token folder, so it is not replaced; give another --out")


class _Array:
    """A .npy file that grows: numpy's header leaves room for the final shape, which is written at the end."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.count = 0
        self._dtype = dtype
        self._digest = hashlib.blake2b(digest_size=16)
        self._file: BinaryIO = path.open("wb")
        self._header()
        self._begin = self._file.tell()

    def append(self, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, dtype=self._dtype.newbyteorder("<"))
        self._file.write(data.data)
        self._digest.update(data.data)
        self.count += len(data)

    def close(self) -> str:
        """Finish the file and see that it is on disk; the digest of its values."""
        self._file.seek(0)
        self._header()
        assert self._file.tell() == self._begin
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        with suppress(OSError):  # the disk is full, which has been told already
            self._file.close()

    def _header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self._dtype.newbyteorder("<"))
        np.lib.format.write_array_header_1_0(self._file, {"descr": descr, "fortran_order": False, "shape": (self.count,)})


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
