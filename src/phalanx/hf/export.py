"""A trained model out, as save_pretrained would write it: config.json, safetensors shards and their index, tokenizer files.

Tensors are asked for one by one and written at once, so that memory holds one of them. The folder appears when it is complete.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.hf.folder import BESIDE_THE_WEIGHTS, groups_of, skeleton
from phalanx.hf.weights import INDEX, SINGLE, write

SHARD_BYTES = 50 * 10**9
"""Of one file, as save_pretrained has it by default."""
Shape = tuple[int, ...]


def export(
    config: Any,
    tensors: Iterable[tuple[str, Shape, torch.dtype]],
    read: Callable[[str], Tensor],
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    source: Path | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Write `out`, a folder that AutoModelForCausalLM.from_pretrained loads; returns the names of its files.

    config     a transformers configuration
    tensors    names, of the model's state dict, with global shapes and dtypes; of tied ones any name
    read       name to the global value
    dtype      to convert floating-point tensors to; None: as they are
    shard_bytes  most bytes of tensors in a file, but for a single tensor that is larger
    source     the folder that the model came from, whose tokenizer and generation settings are copied
    overwrite  replace `out`, if it is the folder of a model
    Raises ValueError for tensors that the model of `config` lacks, has not or has in another shape, for an `out` that exists or a disk
    without room. Until all is written there is no `out`, or the old one.
    """
    _check_place(out, overwrite, source)
    model = skeleton(config)
    given = {name: (tuple(shape), dtype if dtype and own.is_floating_point else own) for name, shape, own in tensors}
    places = file_names(model, given)
    kinds = {key: given[name] for key, name in places.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    needed, free = sum(map(_nbytes, kinds.values())), shutil.disk_usage(out.parent).free
    if needed > free:
        raise ValueError(f"{out} needs {needed} bytes; its disk has {free} left")
    building = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        files = divided(kinds, shard_bytes)
        for file, keys in files.items():
            write(building / file, {key: kinds[key] for key in keys}, _values(keys, places, kinds, read))
        if len(files) > 1:
            _write_index(building, files, kinds)
        described = copy.deepcopy(config)
        described.dtype = next((kind for _, kind in kinds.values() if kind.is_floating_point), torch.float32)
        described.architectures = [type(model).__name__]
        described.save_pretrained(building)
        model.generation_config.save_pretrained(building)
        if source is not None:
            copy_beside(source, building)
        _move_into_place(building, out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return sorted(path.name for path in out.iterdir())


def copy_beside(source: Path, target: Path) -> None:
    """Copy what a folder has beside its weights: tokenizer and generation settings."""
    for name in BESIDE_THE_WEIGHTS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def file_names(model: Any, given: dict[str, tuple[Shape, torch.dtype]]) -> dict[str, str]:
    """The names that save_pretrained gives to tensors in files, in its order, to the names that they are given by.

    Raises ValueError for tensors that are missing, not the model's, or of another shape.
    """
    from transformers.core_model_loading import revert_weight_conversion

    known = {name for names in groups_of(model) for name in names}
    foreign = [f"{name} {given[name][0]}" for name in given if name not in known]
    if foreign:
        raise ValueError(f"{type(model).__name__} has no {', '.join(foreign[:5])}")
    own = model.state_dict(keep_vars=True)
    kept: dict[str, Tensor] = {}
    places: dict[int, str] = {}
    for names in groups_of(model):
        here = next((name for name in names if name in given), None)
        if here is None:
            raise ValueError(f"{names[0]} {tuple(own[names[0]].shape)} of {type(model).__name__} was not given")
        if given[here][0] != tuple(own[here].shape):
            raise ValueError(f"{here} is {given[here][0]}; {type(model).__name__} has it as {tuple(own[here].shape)}")
        # Of tied names the one that is not declared to follow another.
        first = next((name for name in names if name not in model.all_tied_weights_keys), names[0])
        kept[first] = own[here].detach()
        places[id(kept[first])] = here
    renamed = revert_weight_conversion(model, kept)
    if {id(value) for value in renamed.values()} != places.keys():
        # A family whose files are arranged otherwise: from_pretrained knows its own names as well.
        renamed = kept
    return {key: places[id(value)] for key, value in renamed.items()}


def divided(kinds: dict[str, tuple[Shape, torch.dtype]], shard_bytes: int) -> dict[str, list[str]]:
    """File names to the tensors in them, as save_pretrained divides them: in order, a new file where one would grow too large.

    A tensor that is larger than a file has one to itself.
    """
    if shard_bytes < 1:
        raise ValueError(f"a shard of {shard_bytes} bytes holds nothing")
    shards: list[list[str]] = []
    open_shard: list[str] = []
    for key, kind in kinds.items():
        if _nbytes(kind) > shard_bytes:
            shards.append([key])
            continue
        if sum(_nbytes(kinds[other]) for other in open_shard) + _nbytes(kind) > shard_bytes:
            shards.append(open_shard)
            open_shard = []
        open_shard.append(key)
    if open_shard:
        shards.append(open_shard)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    stem, _, suffix = SINGLE.partition(".")
    return {f"{stem}-{at:05d}-of-{len(shards):05d}.{suffix}": keys for at, keys in enumerate(shards, start=1)}


def _values(
    keys: list[str], places: dict[str, str], kinds: dict[str, tuple[Shape, torch.dtype]], read: Callable[[str], Tensor]
) -> Iterator[Tensor]:
    for key in keys:
        yield read(places[key]).to(kinds[key][1])


def _nbytes(kind: tuple[Shape, torch.dtype]) -> int:
    return math.prod(kind[0]) * kind[1].itemsize


def _write_index(folder: Path, files: dict[str, list[str]], kinds: dict[str, tuple[Shape, torch.dtype]]) -> None:
    sizes = {
        "total_parameters": sum(math.prod(shape) for shape, _ in kinds.values()),
        "total_size": sum(map(_nbytes, kinds.values())),
    }
    index = {"metadata": sizes, "weight_map": {key: file for file, keys in files.items() for key in keys}}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _check_place(out: Path, overwrite: bool, source: Path | None) -> None:
    if not out.name:
        raise ValueError(f"--out {out} is no folder that can be made")
    if source is not None and out.exists() and out.samefile(source):
        raise ValueError(f"{out} is the folder that the model came from; write to another")
    if not out.exists():
        return
    if not overwrite:
        raise ValueError(f"{out} exists already; write to another folder, or say --overwrite")
    if not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").is_file()):
        raise ValueError(f"{out} is not the folder of a model, so it is not overwritten")


def _move_into_place(building: Path, out: Path) -> None:
    """From a folder that only this process could read to one like any other, in one step; an old one makes room first."""
    umask = os.umask(0)
    os.umask(umask)
    building.chmod(0o777 & ~umask)
    if not out.exists():
        building.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    out.rename(old / out.name)
    try:
        building.rename(out)
    except OSError:
        (old / out.name).rename(out)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
