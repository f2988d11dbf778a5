"""The tokenizer of a token folder: bytes, or a Hugging Face tokenizer of the `tokenizers` library.

Nothing is added to a document but the token that ends it: no beginning token, no truncation, no padding, whatever the tokenizer's
file says of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.train.data.folder import Tokens, smallest_dtype

BYTES_EOS = 0
"""Ends a document of bytes: text files do not hold it. One that does is not cut there: documents.npy says where documents begin."""
Encode = Callable[[Sequence[tuple[str, bytes]]], list[Tokens]]
"""(text, its UTF-8) of documents to the tokens of each, without the one that ends it."""


@dataclass(frozen=True)
class Tokenizer:
    """What makes tokens of text; can be sent to another process."""

    name: str
    digest: str
    vocab: int
    eos: int | None
    file: str | None
    """The text of a tokenizer.json; None for bytes."""

    def encode(self) -> Encode:
        """The function that encodes; made once in each process."""
        if self.file is None:
            return lambda texts: [np.frombuffer(data, np.uint8) for _, data in texts]
        from tokenizers import Tokenizer as Library

        tokenizer = Library.from_str(self.file)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        dtype = smallest_dtype(self.vocab)

        def encode(texts: Sequence[tuple[str, bytes]]) -> list[Tokens]:
            found = tokenizer.encode_batch_fast([text for text, _ in texts], add_special_tokens=False)
            return [np.array(each.ids, dtype) for each in found]

        return encode


def open_tokenizer(name: str, eos: str | None = None) -> Tokenizer:
    """`bytes`, a tokenizer.json, or a folder that holds one (or anything that transformers' AutoTokenizer reads).

    `eos` is the token after each document, as text (a number for bytes), or `none`; left out, the tokenizer's own: 0 of bytes, else
    the eos_token of the tokenizer_config.json beside it. Raises ValueError if there is no such tokenizer or token.
    """
    if name == "bytes":
        return Tokenizer("bytes", "", 256, _byte(eos), None)
    path = Path(name)
    if not path.exists():
        raise ValueError(f"there is no tokenizer {name}: --tokenizer is bytes, a tokenizer.json, or a folder that holds one")
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise ValueError(f"--tokenizer {name}: the package tokenizers is not installed: pip install 'phalanx[data]'") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = file.read_text() if file.is_file() else _converted(path)
        known: dict[str, int] = Library.from_str(text).get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001 - tokenizers raises Exception itself
        raise ValueError(f"cannot read the tokenizer {file}: {error}") from None
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return Tokenizer(path.name, digest, max(known.values()) + 1, _ending(eos, known, file), text)


def _byte(eos: str | None) -> int | None:
    if eos == "none":
        return None
    if eos is not None and not (eos.isdecimal() and int(eos) < 256):
        raise ValueError(f"--eos {eos}: for bytes it is a number from 0 to 255, or none")
    return BYTES_EOS if eos is None else int(eos)


def _ending(eos: str | None, known: dict[str, int], file: Path) -> int | None:
    if eos == "none":
        return None
    said = eos if eos is not None else _own_eos(file.parent)
    if said is None:
        raise ValueError(f"{file} does not say which token ends a document: give --eos TOKEN, or --eos none for none")
    if said not in known:
        from phalanx.train.config import closest

        marked = sorted(token for token in known if token.startswith(("<", "[")) and token.endswith((">", "]")))
        raise ValueError(
            f"the tokenizer {file} has no token {said!r} to end documents with; it has {closest(said, marked[:20])}"
        )
    return known[said]


def _own_eos(folder: Path) -> str | None:
    """What tokenizer_config.json says, as text or as {"content": text}."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        said = json.loads(path.read_text()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    return said.get("content") if isinstance(said, dict) else said


def _converted(folder: Path) -> str:
    """The tokenizer.json that transformers makes of the older files of a folder."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError("there is no tokenizer.json, and older files need the package transformers") from None
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return str(tokenizer.backend_tokenizer.to_str())
