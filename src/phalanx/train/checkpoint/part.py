"""What one rank writes of a checkpoint: a file of tensors in DCP's format, and the part that says what is in it, with its hashes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from phalanx.run.pieces import Kind, Piece, State
from phalanx.train.checkpoint.blocks import HashedFiles, Place

STRIP_BYTES = 1 << 20
"""A box with more than this is written in strips along its last dimension, so that a rank of a layout that splits that dimension
otherwise reads little of what it does not need."""
STRIPS = 8
ROW_BYTES = 1 << 10
"""A strip has at least so much of each row."""


def write_part(place: Place, rank: int, state: State, tensors: Sequence[Tensor]) -> None:
    """This rank's file, and the part that says what is in it: the sign that it is complete."""
    items, by_index = [], {}
    places = [(piece.key, offsets) for piece in state.writes for offsets, _ in strips(piece)]
    for (key, offsets), tensor in zip(places, tensors, strict=True):
        index = MetadataIndex(key, torch.Size(offsets))
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=tensor.shape)
        data = TensorWriteData(
            chunk=chunk,
            properties=TensorProperties(dtype=state.kinds[key].dtype),
            size=torch.Size(state.kinds[key].shape),
        )
        items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        by_index[index] = tensor
    writer, files = dcp_writer(place)
    (plan,) = writer.prepare_global_plan([SavePlan(items)])
    plan.storage_data.prefix = f"__{rank}_"
    results = writer.write_data(plan, _Staged(by_index)).wait()
    rows = []
    for result in results:
        info, tensor = result.storage_data, by_index[result.index]
        rows.append(
            [
                result.index.fqn,
                list(result.index.offset or ()),
                list(tensor.shape),
                info.relative_path,
                info.offset,
                info.length,
            ]
        )
    hashes = {name: {"bytes": file.size, "blocks": _hex(file.digests)} for name, file in files.written.items()}
    place.write(part_name(rank), json.dumps({"boxes": rows, "files": hashes}).encode())


def strips(piece: Piece) -> list[tuple[tuple[int, ...], Tensor]]:
    """(offsets, view) of the boxes in which a piece is written."""
    value, (*_, width) = piece.value, (1, *piece.value.shape)
    count = min(STRIPS, width * value.element_size() // ROW_BYTES)
    if value.dim() < 2 or value.numel() * value.element_size() <= STRIP_BYTES or count < 2:
        return [(piece.offsets, value)]
    while width % count:
        count -= 1
    step = width // count
    return [
        ((*piece.offsets[:-1], piece.offsets[-1] + start), value.narrow(-1, start, step)) for start in range(0, width, step)
    ]


def metadata_of(kinds: Mapping[str, Kind], parts: Sequence[Mapping[str, Any]]) -> tuple[Metadata, list[WriteResult]]:
    """DCP's metadata of all parts. An element that nobody or two ranks wrote is a mistake of ours."""
    entries = {
        key: TensorStorageMetadata(properties=TensorProperties(dtype=kind.dtype), size=torch.Size(kind.shape), chunks=[])
        for key, kind in kinds.items()
    }
    results = []
    for part in parts:
        for key, offsets, sizes, file, offset, length in part["boxes"]:
            chunks = entries[key].chunks
            index = MetadataIndex(key, torch.Size(offsets), len(chunks))
            chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))
            results.append(WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(file, offset, length)))
    for key, entry in entries.items():
        written = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        assert written == math.prod(entry.size), f"{key} has {math.prod(entry.size)} elements, {written} were written"
    paths: dict[str, Any] = {key: tuple(key.split(".", 1)) for key in entries}
    return Metadata(state_dict_metadata=dict(entries), planner_data=paths), results


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def part_of(file: str) -> str:
    """The part that has the hashes of a file of tensors, __3_0.distcp for example."""
    return part_name(int(file.removeprefix("__").partition("_")[0]))


def dcp_writer(place: Place) -> tuple[FileSystemWriter, HashedFiles]:
    """DCP's writer into a folder, and the files that it writes."""
    writer, files = FileSystemWriter(place.path, sync_files=place.is_local), HashedFiles(place)
    writer.fs, writer.path = files, place.path  # type: ignore[assignment]
    return writer, files


def _hex(digests: Sequence[int]) -> str:
    return "".join(f"{digest:016x}" for digest in digests)


class _Staged(DefaultSavePlanner):
    """Hands DCP's writer the copies."""

    def __init__(self, tensors: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]
