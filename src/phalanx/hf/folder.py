"""A local folder of Hugging Face's, config.json beside safetensors: its untouched model class, and its weights shard by shard.

Every rank opens the folder itself and reads only the bytes of what it holds. What does not fit is refused when the folder is opened.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm.world import World
from phalanx.derive.program import Parameter
from phalanx.hf.weights import Ranges, Stored, read, weights, whole
from phalanx.spec import dim_ranges

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BESIDE_THE_WEIGHTS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a folder that say nothing of its weights and go with them wherever they go."""

BESIDE_THE_FUNCTION = (
    "architectures", "transformers_version", "_name_or_path", "dtype", "use_cache", "initializer_range", "bos_token_id", "eos_token_id",
    "pad_token_id", "max_position_embeddings",
)  # fmt: skip
"""Settings of a config.json that say where a model comes from and how it is used."""


class Folder:
    """A causal language model in a local folder.

    Raises ValueError for a folder without config or weights, a model that is no causal language model or is quantized, files that
    contradict themselves, and tensors that the model lacks, has not, or has in another shape.
    """

    def __init__(self, path: Path | str, *, dropout: float = 0.0) -> None:
        self.path = Path(path)
        stored = check_folder(self.path)
        self.config = read_config(self.path)
        """A transformers configuration."""
        set_dropout(self.config, dropout)
        self.bytes_read = 0
        """Of tensors, over all ranks of this process."""
        self._lock = threading.Lock()
        with _settings_of(str(self.path)):
            model = skeleton(self.config)
        self._stored = matched(model, stored, self.path)

    def module(self, dtype: torch.dtype) -> nn.Module:
        """The model in `dtype` and in training mode.

        Built without memory (under phx.deferred_init or on meta) it has only shapes, and `values` has the weights; otherwise it
        holds them.
        """
        module = build(self.config, dtype)
        with torch.no_grad():
            for names in groups_of(module):
                value = module.state_dict(keep_vars=True)[names[0]]
                if not value.is_meta:
                    value.copy_(self._read(names[0], whole(value.shape)))
        return module

    def values(self, parameter: Parameter, world: World) -> Tensor:
        """The shard of a parameter that a rank holds, on the rank's device, in the dtype in which the parameter is stored.

        Only its bytes are read. A parameter that was padded holds zeros behind the valid rows. Raises ValueError if the folder has
        no such tensor, or if it holds a tied one twice and the two differ.
        """
        name = next((name for name in (parameter.name, *parameter.aliases) if name in self._stored), None)
        if name is None:
            raise ValueError(f"{self.path} has no tensor {parameter.name}")
        local = parameter.spec.local_shape(parameter.shape, world.mesh)
        coordinates = world.mesh.coordinates(world.rank)
        dtype = parameter.stored or parameter.dtype
        if any(coordinates.get(axis, 0) for axis in parameter.spec.partial):
            return torch.zeros(local, dtype=dtype, device=world.device)
        if self._stored[name][0].shape != parameter.given:
            raise ValueError(f"{name} is {self._stored[name][0].shape} in {self.path} and {parameter.given} in the model")
        value = self._read(
            name,
            [
                _within(dim_ranges(parameter.spec, parameter.shape, world.mesh, world.rank, dim), size)
                for dim, size in enumerate(parameter.given)
            ],
        )
        missing = [size - have for size, have in zip(local, value.shape, strict=True)]
        if any(missing):
            value = F.pad(value, [n for size in reversed(missing) for n in (0, size)])
        return value.to(world.device, dtype)

    def check_holds(self, module: Any) -> None:
        """Raise ValueError unless the folder has the tensors of this model of transformers and no others, tied where its are."""
        groups = groups_of(module)
        own = {name for names in groups for name in names}
        extra = [f"{name} {places[0].shape}" for name, places in self._stored.items() if name not in own]
        if extra:
            raise ValueError(f"{self.path} has {_listed(extra)}, which {type(module).__name__} has not")
        missing = [names[0] for names in groups if not any(name in self._stored for name in names)]
        if missing:
            raise ValueError(f"{self.path} lacks {_listed(missing)}, which {type(module).__name__} has")
        for names in groups:
            if len({self._stored[name] for name in names if name in self._stored}) > 1:
                raise ValueError(
                    f"{self.path} has {' and '.join(names)} apart, which are one tensor in {type(module).__name__}: "
                    "set tie_word_embeddings to false in the config.json of the model"
                )

    def otherwise(self, config: Any) -> list[str]:
        """Lines that say which settings another configuration has otherwise, of those that may decide which function a model is."""
        names = (name for name in config.to_dict() if name not in BESIDE_THE_FUNCTION and "drop" not in name)
        return differences(self.config, config, names)

    def _read(self, name: str, pieces: Sequence[Ranges]) -> Tensor:
        first, *others = self._stored[name]
        value = read(first, pieces)
        copies = [read(other, pieces) for other in others]
        with self._lock:
            self.bytes_read += value.nbytes + sum(copy.nbytes for copy in copies)
        if not all(torch.equal(_bits(value), _bits(each)) for each in copies):
            raise ValueError(
                f"{name} is tied to another tensor in {type(self.config).__name__}, but {self.path} has both with different values: "
                "set tie_word_embeddings to false in its config.json"
            )
        return value


def _within(pieces: Ranges, size: int) -> Ranges:
    """What of the pieces of a padded dimension is in its first `size` places, as one piece where pieces touch."""
    found: list[tuple[int, int]] = []
    for start, length in pieces:
        length = max(0, min(start + length, size) - start)
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + length
        else:
            found.append((min(start, size), length))
    return tuple(found)


def _bits(value: Tensor) -> Tensor:
    """NaN equals NaN."""
    return value.reshape(-1).view(torch.uint8)


def check_folder(folder: Path) -> dict[str, Stored]:
    """The tensors in a folder's files. Raises ValueError for what can be known to be wrong without transformers: no folder, no config,
    weights that do not fit.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        could_be_of_the_hub = not folder.exists() and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", str(folder), re.ASCII) is not None
        hub = f". If it is a model of the hub, fetch it first: hf download {folder} --local-dir FOLDER" * could_be_of_the_hub
        moved = "; if it has moved, say where with --model hf:FOLDER" * (not folder.exists())
        raise ValueError(f"{folder} {what}; hf: takes a local folder with config.json and safetensors{hub}{moved}")
    _raw_config(folder)
    return weights(folder)


def read_config(folder: Path) -> Any:
    """The transformers configuration of a folder. Raises ValueError if it is not that of a causal language model."""
    return parsed_config(_raw_config(folder), str(folder))


def _raw_config(folder: Path) -> Any:
    try:
        return json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json; is it the folder of a model?") from None
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from None


def parsed_config(raw: Any, where: str) -> Any:
    """The transformers configuration of a config.json. Raises ValueError, saying `where` it is, if it is not a causal language model's."""
    try:
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as HEADS
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES as BODIES
    except ImportError:
        raise ValueError("Hugging Face folders need transformers: pip install 'phalanx[hf]'") from None
    family = str(raw.get("model_type")) if isinstance(raw, dict) else ""
    if family not in HEADS:
        raise ValueError(
            f"the config.json of {where} has model_type {family!r}, which is no causal language model of transformers"
        )
    wanted = [
        name for names in (HEADS[family], BODIES.get(family, ())) for name in ((names,) if isinstance(names, str) else names)
    ]
    said = raw.get("architectures") or wanted
    said = said if isinstance(said, list) else [said]
    if not any(name in wanted for name in said):
        raise ValueError(
            f"the config.json of {where} is of {', '.join(map(str, said))}, no causal language model; that of its family is {wanted[0]}"
        )
    if raw.get("quantization_config"):
        raise ValueError(
            f"{where} is quantized ({raw['quantization_config']}); training needs the weights as floating-point numbers"
        )
    config = type(AutoConfig.for_model(family))
    with _settings_of(where):
        return config.from_dict(raw)


@contextlib.contextmanager
def _settings_of(where: str) -> Iterator[None]:
    """Settings that make no model raise whatever the line that meets them raises."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"the config.json of {where} makes no model: {type(error).__name__}: {error}") from error


def differences(there: Any, here: Any, names: Iterable[str]) -> list[str]:
    """Lines that say which of these settings two configurations have otherwise; of two families, only that they are."""
    theirs, ours = there.to_dict(), here.to_dict()
    names = ("model_type",) if theirs["model_type"] != ours["model_type"] else names
    return [
        f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} in the model"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def set_dropout(config: Any, dropout: float) -> None:
    """Give every dropout of a configuration this probability. Raises ValueError if there is none to give it to."""
    settings = [
        name for name, value in config.to_dict().items()
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool)
    ]  # fmt: skip
    if dropout and not settings:
        raise ValueError(f"dropout is {dropout}, but a {config.model_type} has none")
    for name in settings:
        setattr(config, name, dropout)


def build(config: Any, dtype: torch.dtype) -> nn.Module:
    """The untouched class of a configuration, in training mode."""
    from transformers import AutoModelForCausalLM

    module: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)  # type: ignore[no-untyped-call]
    return module.train()


def skeleton(config: Any) -> Any:
    """The model without memory: its names, shapes and ties."""
    with torch.device("meta"):
        return build(config, torch.float32)


def groups_of(model: Any) -> list[tuple[str, ...]]:
    """The names of what a state dict of `model` holds, those of one tensor together, in its order."""
    groups: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(value), []).append(name)
    return [tuple(names) for names in groups.values()]


def matched(model: Any, stored: Mapping[str, Stored], folder: Path) -> dict[str, tuple[Stored, ...]]:
    """Where each of the model's tensors is, under whichever name from_pretrained would find it; several times if a tied one is.

    Raises ValueError for what from_pretrained would warn of: tensors that are missing, unexpected, or of another shape.
    """
    values = model.state_dict(keep_vars=True)
    found: dict[str, Stored] = {}
    origin: dict[str, str] = {}
    unexpected = []
    for key, name in model_names(model, stored, folder).items():
        if name in found:
            raise ValueError(f"{folder} has {name} twice: as {origin[name]} and as {key}")
        if name in values:
            found[name], origin[name] = stored[key], key
            if found[name].shape != tuple(values[name].shape):
                raise ValueError(
                    f"{key} is {found[name].shape} in {folder}, and {tuple(values[name].shape)} by its config.json"
                )
            if values[name].is_floating_point() and found[name].dtype not in FLOATS:
                raise ValueError(f"{key} is of {found[name].dtype} in {found[name].path}; weights to train are floating-point")
        elif not _is_known_buffer(model, name):
            unexpected.append(f"{key} {stored[key].shape}")
    if unexpected:
        raise ValueError(f"{folder} has {_listed(unexpected)}, which {type(model).__name__} has not")
    groups = {names: tuple(found[name] for name in names if name in found) for names in groups_of(model)}
    missing = [f"{names[0]} {tuple(values[names[0]].shape)}" for names, places in groups.items() if not places]
    if missing:
        raise ValueError(f"{folder} lacks {_listed(missing)}, which {type(model).__name__} has")
    return {name: places for names, places in groups.items() for name in names}


def model_names(model: Any, keys: Iterable[str], folder: Path) -> dict[str, str]:
    """The names in files to those that from_pretrained would give them: families rename, and a prefix may be there or not."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    transforms = get_model_conversion_mapping(model)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings: list[Any] = [each for each in transforms if not isinstance(each, WeightConverter)]
    own = model.state_dict()
    names: dict[str, str] = {}
    for key in sorted(keys):
        names[key], converted = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if converted is not None:
            raise ValueError(
                f"{key} in {folder} is converted when transformers loads it, which cannot be done shard by shard: write the folder again "
                "with from_pretrained(...).save_pretrained(..., save_original_format=False)"
            )
    return names


def _is_known_buffer(model: Any, name: str) -> bool:
    """What older files hold and the model computes by itself, by the same patterns as from_pretrained."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    return any(re.search(pattern, name) for pattern in patterns)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
