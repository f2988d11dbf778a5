"""What makes a folder a checkpoint: one small file that is written last and says what all the others must be.

A folder without it is what a killed run has left. Its order, not a clock, says which checkpoint is the newest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from phalanx.train.checkpoint.blocks import Damaged, Place

MANIFEST = "phalanx.json"
METADATA = ".metadata"
"""DCP's own."""
FORMAT = 1
FOLDER = re.compile(r"step-(\d{8,})-[0-9a-f]{8,}$")
OWNER = "owner.json"
NO_DIGEST = "0" * 32

Ranges = tuple[tuple[int, int], ...]
"""Of orders, from and to."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint's manifest."""

    step: int
    """Steps that were taken."""
    order: int
    """Counts up with every checkpoint in a folder."""
    facts: Mapping[str, Any]
    """What the run wants to know again: its configuration, the cursor in the data."""
    numbers: Mapping[str, float]
    """Of the optimizer and the loss scale."""
    specs: Mapping[str, str]
    """Where each tensor lay, for people."""
    mesh: str
    aliases: Mapping[str, str]
    """Other names of tied tensors to the first one."""
    versions: Mapping[str, str]
    files: Mapping[str, tuple[int, str]]
    """Bytes and hash of the files that are read whole; the others have hashes in the parts."""
    parts: tuple[str, ...]
    """A file for each rank that wrote: what it wrote where, with the hash of every block."""
    format: int = field(default=FORMAT)

    def dumped(self) -> bytes:
        """As a file, with its hash in it: of its bytes with zeros in that place."""
        content = json.dumps(asdict(self) | {"digest": NO_DIGEST}).encode()
        return _with_digest(content, NO_DIGEST, hash_of(content))


def others_of(root: Place) -> Ranges:
    """The orders of checkpoints in a folder that the run which writes there now neither wrote nor went on from."""
    try:
        return tuple((int(first), int(last)) for first, last in json.loads(root.read(OWNER)).get("others", ()))
    except (ValueError, TypeError, AttributeError):  # nobody's folder
        return ()


def is_among(manifest: Manifest | ValueError, others: Ranges) -> bool:
    """Whether a checkpoint is of another run. Of one whose manifest is damaged nobody knows."""
    return isinstance(manifest, Manifest) and any(first <= manifest.order <= last for first, last in others)


def read_manifest(place: Place) -> Manifest:
    """The manifest of a checkpoint folder. Raises Damaged if it is not what was written, ValueError if there is none."""
    if not place.exists(MANIFEST):
        raise ValueError(f"{place.address} is no complete checkpoint: it has no {MANIFEST}")
    where = f"{place.address}/{MANIFEST}"
    raw = place.read(MANIFEST)
    try:
        content = json.loads(raw)
        digest = str(content.pop("digest"))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{where} is damaged: {error}") from None
    if digest != hash_of(_with_digest(raw, digest, NO_DIGEST)):
        raise Damaged(f"{where} is damaged: its content does not have the hash that it was written with")
    if content["format"] != FORMAT:
        raise ValueError(f"{where} has format {content['format']}; this version of Phalanx reads format {FORMAT}")
    content["files"] = {name: (size, digest) for name, (size, digest) in content["files"].items()}
    return Manifest(**content | {"parts": tuple(content["parts"])})


def verified(place: Place, manifest: Manifest, name: str) -> bytes:
    """A file that is read whole, as it was written."""
    size, digest = manifest.files[name]
    content = place.read(name)
    if len(content) != size or hash_of(content) != digest:
        raise Damaged(f"{place.address}/{name} is damaged: it is not what was written ({len(content):,} of {size:,} bytes)")
    return content


def hash_of(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def complete(root: Place) -> list[tuple[str, Manifest | ValueError]]:
    """The checkpoints in a folder, newest first: (name, manifest), or what is wrong with it. Half-written ones are not among them."""
    found: list[tuple[str, Manifest | ValueError]] = []
    for name in root.folders():
        if not FOLDER.match(name) or not root.exists(f"{name}/{MANIFEST}"):
            continue
        try:
            found.append((name, read_manifest(root.at(name))))
        except ValueError as error:
            found.append((name, error))
    return sorted(found, key=lambda entry: _age(*entry), reverse=True)


def _age(name: str, manifest: Manifest | ValueError) -> tuple[float, int]:
    """Of one whose manifest is damaged only the step is known, by its name: it may be the newest."""
    match = FOLDER.match(name)
    assert match is not None
    return (float("inf"), int(match[1])) if isinstance(manifest, ValueError) else (manifest.order, manifest.step)


def _with_digest(content: bytes, old: str, new: str) -> bytes:
    before, _, after = content.rpartition(old.encode())
    return before + new.encode() + after
