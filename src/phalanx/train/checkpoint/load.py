"""Reading checkpoints of any layout into any layout. A rank reads the byte ranges of what it holds, and verifies every block of them.

What does not fit (a tensor that is missing, one that nobody asks for, another shape or dtype) is refused with names and sizes.
"""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from phalanx.run.executor import Executor
from phalanx.run.pieces import Kind, Piece, kinds_of, state_of
from phalanx.run.step import Step
from phalanx.train.checkpoint.blocks import Damaged, Place, VerifiedFile
from phalanx.train.checkpoint.manifest import (
    FOLDER,
    MANIFEST,
    METADATA,
    Manifest,
    complete,
    is_among,
    others_of,
    read_manifest,
    verified,
)
from phalanx.train.checkpoint.part import part_of
from phalanx.train.checkpoint.save import unused
from phalanx.train.checkpoint.together import run_together
from phalanx.train.config import TrainConfig, closest
from phalanx.train.folder import read_settings
from phalanx.train.settings import from_text


class Saved:
    """One checkpoint, open for reading.

    address    of its folder
    bytes_read  so far, of the files of tensors
    """

    def __init__(self, address: str, manifest: Manifest | None = None) -> None:
        self.place = Place(str(address))
        self.manifest = read_manifest(self.place) if manifest is None else manifest
        content = verified(self.place, self.manifest, METADATA)
        # DCP's own format; what is unpickled is what was written.
        self._metadata = cast(Metadata, pickle.loads(content))
        self._files: dict[str, VerifiedFile] = {}

    @property
    def address(self) -> str:
        return self.place.address

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.manifest.facts

    @property
    def config(self) -> TrainConfig:
        """The settings of the run that wrote it."""
        return config_of(self.address, self.manifest)

    @property
    def kinds(self) -> dict[str, Kind]:
        """Every tensor in it, by key."""
        return {
            key: Kind(tuple(entry.size), entry.properties.dtype)
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    @property
    def model(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the model's tensors, by first name."""
        return {
            key.removeprefix("model."): (kind.shape, kind.dtype) for key, kind in self.kinds.items() if key.startswith("model.")
        }

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of tied tensors to the first one."""
        return self.manifest.aliases

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files.values())

    def tensor(self, name: str) -> Tensor:
        """The global value of a tensor of the model, by any of its names."""
        first = self.aliases.get(name, name)
        if f"model.{first}" not in self.kinds:
            raise ValueError(f"{self.address} has no tensor {name!r}; it has {closest(name, self.model)}")
        kind = self.kinds[f"model.{first}"]
        value = torch.empty(kind.shape, dtype=kind.dtype)
        self.fill([Piece(f"model.{first}", (0,) * len(kind.shape), value)])
        return value

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Read boxes of tensors into the memory that holds them, in the order of the files. Raises Damaged, naming the file."""
        wanted: list[tuple[str, int, ReadItem, Piece]] = []
        for piece in pieces:
            entry = self._entry(piece.key)
            box = ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.value.shape)
            items = create_read_items_for_chunk_list(piece.key, entry, [box])
            assert sum(math.prod(item.lengths) for item in items) == piece.value.numel(), piece.key
            for item in items:
                info = self._metadata.storage_data[item.storage_index]
                wanted.append((info.relative_path, info.offset, item, piece))
        by_item: dict[tuple[str, int], int] = {}
        for file, offset, item, piece in sorted(wanted, key=lambda row: row[:2]):
            info = self._metadata.storage_data[item.storage_index]
            source = self._file(file)
            if (file, offset) not in by_item:
                by_item[file, offset] = _first_byte(source, offset, info.length)
            entry, number = self._entry(piece.key), item.storage_index.index
            assert number is not None
            value = _box(source, by_item[file, offset], entry.chunks[number].sizes, entry.properties.dtype, item)
            target = piece.value
            for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(value)

    def _entry(self, key: str) -> TensorStorageMetadata:
        return cast(TensorStorageMetadata, self._metadata.state_dict_metadata[key])

    def _file(self, name: str) -> VerifiedFile:
        if name not in self._files:
            # Of a thousand ranks' parts a rank reads those of the files that it needs.
            part = json.loads(verified(self.place, self.manifest, part_of(name)))["files"][name]
            blocks = part["blocks"]
            digests = [int(blocks[k : k + 16], 16) for k in range(0, len(blocks), 16)]
            self._files[name] = VerifiedFile(self.place, name, part["bytes"], digests)
        return self._files[name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def config_of(address: str, manifest: Manifest) -> TrainConfig:
    """The settings of the run that wrote a checkpoint. Raises ValueError if that was not `phalanx train`."""
    if "config" not in manifest.facts:
        raise ValueError(f"{address} was not written by `phalanx train`: it has no configuration")
    return from_text(manifest.facts["config"], address)


def settings(address: str) -> TrainConfig:
    """Those of the run that wrote the newest checkpoint at an address."""
    newest = find(address)[0][0]
    return config_of(newest, read_manifest(Place(newest)))


def load(step: Step, address: str, *, optimizer: bool = True, cast: bool = False) -> Saved:
    """Fill the weights of a step, and its optimizer's state and counters, from a checkpoint of any layout. Every rank calls this.

    optimizer  False takes the weights alone
    cast       take tensors of another dtype
    Raises ValueError, on every rank, for what does not fit, before anything changes; Damaged if a file is not what was written: then
    what was filled by then is filled.
    """
    step.settle()
    for executor in step.executors:
        executor.wait_until_read()
    saved: Saved | None = None

    def look() -> None:
        nonlocal saved
        saved = Saved(address)
        check_fits(step, saved, optimizer=optimizer, cast=cast)

    def fill() -> None:
        assert saved is not None
        for executor in step.executors:
            _fill(step, executor, saved, optimizer=optimizer)
        saved.close()

    what = f"{address} is not read"
    run_together(step, look, what)
    run_together(step, fill, what)
    step.each(Executor.reloaded)
    assert saved is not None
    return saved


def _fill(step: Step, executor: Executor, saved: Saved, *, optimizer: bool) -> None:
    numbers = saved.manifest.numbers
    if optimizer:
        own = {key.removeprefix("optimizer."): x for key, x in numbers.items() if key.startswith("optimizer.")}
        executor.optimizer.resume(own)
    state = state_of(executor.parameters, executor.optimizer if optimizer else None, step.names)
    saved.fill([_named(piece, saved) for piece in (*state.reads, *unused(step)[1])])
    if optimizer:
        executor.seek(int(numbers["step"]))
        if executor.loss_scale is not None:
            scale = {key: torch.tensor(x, dtype=torch.float64) for key, x in numbers.items()}
            executor.loss_scale = executor.loss_scale.loaded(scale)


def check_fits(step: Step, saved: Saved, *, optimizer: bool, cast: bool) -> None:
    """Raise ValueError, with names and sizes, unless the checkpoint has exactly the tensors that the step wants."""
    executor = step.executors[0]
    steps = int(saved.manifest.numbers.get("optimizer.step", 0))
    wanted = kinds_of(executor.parameters, executor.optimizer if optimizer else None, step.names, steps)
    wanted.update(unused(step)[0])
    found = saved.kinds if optimizer else {key: kind for key, kind in saved.kinds.items() if key.startswith("model.")}
    named = {_name(key, saved): kind for key, kind in wanted.items()}
    wrong = []
    for key, kind in named.items():
        if key not in found:
            wrong.append(f"{key} {kind.shape} is not in it")
        elif found[key].shape != kind.shape:
            wrong.append(f"{key} has shape {found[key].shape} in it and {kind.shape} in the model")
        elif found[key].dtype != kind.dtype and not cast:
            wrong.append(f"{key} is {found[key].dtype} in it and {kind.dtype} in the run")
    wrong += [f"{key} {found[key].shape} is in it, but not in the run" for key in found if key not in named]
    if optimizer:
        wrong += _wrong_numbers(executor, saved.manifest.numbers)
    if wrong:
        more = f", and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(f"checkpoint {saved.address} does not fit:\n  " + "\n  ".join(wrong[:8]) + more)


def _wrong_numbers(executor: Executor, numbers: Mapping[str, float]) -> list[str]:
    """What does not fit of the numbers that some torch optimizers keep of each parameter."""
    kept = getattr(executor.optimizer.config, "numbers", ()) if numbers.get("optimizer.step") else ()
    wanted = {f"optimizer.{name}/{kind}" for name in executor.parameters.trained for kind in kept}
    found = {key for key in numbers if key.startswith("optimizer.") and "/" in key}
    missing = [f"the number {key} is not in it" for key in sorted(wanted - found)]
    return missing + [f"the number {key} is in it, but not in the run" for key in sorted(found - wanted)]


def _name(key: str, saved: Saved) -> str:
    """The key under which a checkpoint has it: that of a tied tensor may be by another of its names."""
    room, name = key.split(".", 1)
    return f"{room}.{saved.aliases[name]}" if room == "model" and key not in saved.kinds and name in saved.aliases else key


def _named(piece: Piece, saved: Saved) -> Piece:
    return Piece(_name(piece.key, saved), piece.offsets, piece.value)


def _first_byte(source: VerifiedFile, offset: int, length: int) -> int:
    """Where the elements of a tensor begin that torch.save has written at `offset`: an uncompressed record of a zip archive."""
    archive = zipfile.ZipFile(_Slice(source, offset, length))  # type: ignore[arg-type]
    (record,) = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
    assert record.compress_type == zipfile.ZIP_STORED, record
    header = source.bytes_of(offset + record.header_offset, offset + record.header_offset + 30)
    name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return offset + record.header_offset + 30 + name + extra


def _box(source: VerifiedFile, first: int, sizes: Sequence[int], dtype: torch.dtype, item: ReadItem) -> Tensor:
    """A box of a chunk that is stored row by row from byte `first`: the rows from its first to its last are read."""
    if not math.prod(item.lengths):
        return torch.empty(tuple(item.lengths), dtype=dtype)
    offsets, lengths = list(item.storage_offsets), list(item.lengths)
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    begin = sum(start * stride for start, stride in zip(offsets, strides, strict=True))
    end = sum((start + length - 1) * stride for start, length, stride in zip(offsets, lengths, strides, strict=True)) + 1
    content = source.bytes_of(first + begin * dtype.itemsize, first + end * dtype.itemsize)
    flat = torch.frombuffer(bytearray(content), dtype=dtype)
    return flat.as_strided(lengths, strides)


@dataclass
class _Slice:
    """A part of a file as a file."""

    source: VerifiedFile
    start: int
    length: int
    place: int = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = 0) -> int:
        self.place = offset + (0, self.place, self.length)[whence]
        return self.place

    def read(self, size: int = -1) -> bytes:
        stop = self.length if size < 0 else min(self.length, self.place + size)
        found = bytes(self.source.bytes_of(self.start + self.place, self.start + max(stop, self.place)))
        self.place = max(stop, self.place)
        return found


def find_resumed(resume: str, checkpoints: str | None) -> tuple[list[str], str]:
    """What `find` finds for --resume: a run whose checkpoints are not in its folder has them where its setting `checkpoints` says."""
    if checkpoints is not None and not Place(resume).exists(MANIFEST):
        try:
            return find(checkpoints)
        except Damaged:
            raise
        except ValueError:  # it may have been set only now
            pass
    return find(resume)


def find(address: str) -> tuple[list[str], str]:
    """Checkpoints at an address, newest first, and what is wrong with those that are damaged: of a run's folder, of a folder of
    checkpoints, or the one that the address is. Raises ValueError if there is none.

    In a folder that a run has taken over from another one, those of the other one are not looked at.
    """
    place = Place(address)
    if place.exists(MANIFEST):
        return [place.address], ""
    root = place.at("checkpoints") if place.exists("checkpoints") else place
    others = others_of(root)
    found = [(name, manifest) for name, manifest in complete(root) if not is_among(manifest, others)]
    good = [f"{root.address}/{name}" for name, manifest in found if isinstance(manifest, Manifest)]
    bad = "\n".join(str(manifest) for _, manifest in found if not isinstance(manifest, Manifest))
    if not good and bad:
        raise Damaged(f"{address} has no checkpoint that is whole: {bad}")
    if not good:
        why = "none is in it" if place.exists() else "there is no such folder"
        if place.exists() and not place.is_folder():
            why = "it is a file"
        if read_settings(Path(address) / "config.yaml").values.get("checkpoint_every") == 0:
            why = "its run had checkpoint_every 0"
        if any(map(FOLDER.match, root.folders())):
            why = "it has only half-written ones"
        if foreign := [name for name, manifest in complete(root) if is_among(manifest, others)]:
            why = f"those in it are of an earlier run there; to go on with that one, say which, as in --resume {root.address}/{foreign[0]}"
        raise ValueError(f"{address} has no checkpoint: {why}")
    return good, bad
