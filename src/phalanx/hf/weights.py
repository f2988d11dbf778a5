"""The safetensors files of a folder: what they hold and where, and reading the part of a tensor that one rank needs.

A file is 8 bytes with the length of a JSON header, the header, and the tensors row by row, without gaps
(https://github.com/huggingface/safetensors). Nothing of a file is believed before its header fits its size.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""By the name in a header."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
HEADER_LIMIT = 100_000_000
"""Bytes; the format's own limit."""

Ranges = tuple[tuple[int, int], ...]
"""(start, length) pieces of a dimension, in the order in which a rank holds them."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""


def weights(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder by the names in its files: of model.safetensors, or of all shards that the index names.

    Raises ValueError, with names and sizes, if there are none, and for files that contradict themselves or the index.
    """
    if (folder / SINGLE).is_file():
        return header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES and path.is_file())
        if pickles:
            raise ValueError(
                f"{folder} has its weights in {', '.join(pickles[:3])}, which is pickled code and cannot be read in parts. Convert it: "
                f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)"
            )
        raise ValueError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")
    listed = _weight_map(folder / INDEX)
    shards = sorted(set(listed.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ValueError(f"{folder / INDEX} names {', '.join(missing)}: {len(missing)} of {len(shards)} files are not there")
    found: dict[str, Stored] = {}
    for shard in shards:
        here = header(folder / shard)
        absent = [name for name, place in listed.items() if place == shard and name not in here]
        extra = [name for name in here if listed.get(name) != shard]
        if absent or extra:
            said = (
                f"lacks {_some(absent)}, which the index says is there"
                if absent
                else f"has {_some(extra)}, of which the index says nothing"
            )
            raise ValueError(f"{folder / shard} {said}")
        found |= here
    return found


def header(path: Path) -> dict[str, Stored]:
    """The tensors of one file, in the order of their bytes. Raises ValueError for a header that does not fit the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise ValueError(
                f"{path} is truncated or no safetensors file: it has {size} bytes and its header is to have {length}"
            )
        text = file.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_once)
        if not isinstance(entries, dict):
            raise ValueError(f"it is a {type(entries).__name__}")
    except ValueError as error:
        raise ValueError(f"the header of {path} ({length} bytes) is not a JSON object: {error}") from None
    entries.pop("__metadata__", None)
    base, space = 8 + length, size - 8 - length
    found = [_entry(path, name, entry, base, space) for name, entry in entries.items()]
    found.sort(key=lambda each: each[1:3])
    at, before = 0, "the header"
    for name, begin, end, _ in found:
        if begin != at:
            what = "overlaps" if begin < at else "leaves a gap behind"
            raise ValueError(f"{path}: {name} at bytes {begin} to {end} {what} {before}, which ends at {at}")
        at, before = end, name
    if at != space:
        raise ValueError(f"{path} has {space} bytes of tensors; its header says {at}")
    return {name: stored for name, _, _, stored in found}


def _entry(path: Path, name: str, entry: Any, base: int, space: int) -> tuple[str, int, int, Stored]:
    """(name, first byte, byte behind the last, tensor) of a line of a header."""
    try:
        code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise ValueError(f"{path}: the header's entry of {name} has no dtype, shape and data_offsets: {str(entry)[:80]}")
    if code not in DTYPES:
        raise ValueError(f"{path}: {name} is of type {code}, which is not one of {', '.join(DTYPES)}")
    if end > space:
        raise ValueError(f"{path} is truncated: {name} is at bytes {begin} to {end}, and there are {space}")
    needed = math.prod(shape) * DTYPES[code].itemsize
    if end - begin != needed:
        raise ValueError(f"{path}: {name} of shape {shape} and type {code} needs {needed} bytes and has {end - begin}")
    return name, begin, end, Stored(path, DTYPES[code], shape, base + begin)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        listed = json.loads(path.read_bytes())["weight_map"]
        sound = isinstance(listed, dict) and all(isinstance(shard, str) for shard in listed.values())
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound or not listed:
        raise ValueError(f"{path} has no weight_map from tensors to files")
    outside = [shard for shard in listed.values() if Path(shard).name != shard]
    if outside:
        raise ValueError(f"{path} names {outside[0]!r}, which is outside of its folder")
    return dict(listed)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [a for (a, _), (b, _) in itertools.pairwise(sorted(pairs, key=lambda pair: pair[0])) if a == b]
    if twice:
        raise ValueError(f"{twice[0]} is there twice")
    return dict(pairs)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def read(stored: Stored, pieces: Sequence[Ranges]) -> Tensor:
    """The part of a tensor that `pieces` says by dimension, read from its file and no byte more, in the file's dtype.

    Raises ValueError if the file ends before it.
    """
    part = torch.empty([sum(length for _, length in ranges) for ranges in pieces], dtype=stored.dtype)
    if not part.numel():
        return part
    into: Any = part.reshape(-1).view(torch.uint8).numpy()
    at, width = 0, stored.dtype.itemsize
    file = os.open(stored.path, os.O_RDONLY)
    try:
        for first, count in runs(stored.shape, pieces):
            begin, end = stored.start + first * width, stored.start + (first + count) * width
            while begin < end:
                # one call moves at most 2 GiB, and a signal may cut it short
                got = os.preadv(file, [into[at : at + end - begin]], begin)
                if not got:
                    raise ValueError(f"{stored.path} ends at byte {begin}; a tensor that it says it has goes on to {end}")
                at, begin = at + got, begin + got
    finally:
        os.close(file)
    return part


def runs(shape: Sequence[int], pieces: Sequence[Ranges]) -> Iterator[tuple[int, int]]:
    """(first element, number) of every run of neighbouring elements that make up the part, in the order in which it holds them."""
    # The dimensions behind `inner` are whole, so that a slice of `inner` is one run.
    inner = len(shape) - 1
    while inner > 0 and pieces[inner] == ((0, shape[inner]),):
        inner -= 1
    if inner < 0:
        yield 0, 1
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    rows = [[start + i for start, length in ranges for i in range(length)] for ranges in pieces[:inner]]
    begin = count = 0
    for place in itertools.product(*rows):
        base = sum(index * stride for index, stride in zip(place, strides, strict=False))
        for start, length in pieces[inner]:
            first = base + start * strides[inner]
            if count and first == begin + count:
                count += length * strides[inner]
                continue
            if count:
                yield begin, count
            begin, count = first, length * strides[inner]
    if count:
        yield begin, count


def whole(shape: Sequence[int]) -> tuple[Ranges, ...]:
    """The pieces of all of a tensor."""
    return tuple(((0, size),) for size in shape)


def write(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], values: Iterator[Tensor]) -> None:
    """A file of `tensors`, whose values come one by one in their order, so that there is only one of them in memory."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (shape, dtype) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Padded, so that the tensors begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, (shape, dtype)), value in zip(tensors.items(), values, strict=True):
            if (tuple(value.shape), value.dtype) != (shape, dtype):
                raise ValueError(f"{name} is {tuple(value.shape)} of {value.dtype}; it was to be {shape} of {dtype}")
            value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(file)
        file.flush()
        os.fsync(file.fileno())
