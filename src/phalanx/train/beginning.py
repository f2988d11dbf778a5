"""Where a run begins: with new weights, with those of a checkpoint or a Hugging Face folder, or where a run was.

Rank 0 looks for checkpoints and says what it has found, so that all ranks read the same one.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.derive.program import Parameter
from phalanx.hf import is_hf_model
from phalanx.hf.folder import Folder
from phalanx.hf.llama import LlamaFolder
from phalanx.models.llama import Llama
from phalanx.run.step import Step
from phalanx.run.values import Values
from phalanx.train.checkpoint import Damaged, Saved, find, load
from phalanx.train.checkpoint.blocks import Place
from phalanx.train.checkpoint.load import config_of, find_resumed
from phalanx.train.checkpoint.manifest import Manifest, read_manifest
from phalanx.train.config import TrainConfig

SAME = ("model", "dtype", "seq", "seed", "mask_documents")
"""Settings that a run cannot change when it goes on: it would not be the same model, or not the same samples."""

Kind = Literal["new", "resume", "checkpoint", "hf"]


@dataclass
class Progress:
    """How far a run has come: what a checkpoint holds beside tensors."""

    step: int = 0
    """Steps that were taken."""
    cursor: int = 0
    """Samples that were taken, over all ranks: the place in the data."""
    tokens: int = 0
    """That counted in a loss."""


@dataclass(frozen=True)
class Beginning:
    """Where a run begins.

    addresses  of checkpoints, the one to take first; of a Hugging Face folder
    note       what a person should know of how it was found
    """

    kind: Kind = "new"
    addresses: tuple[str, ...] = ()
    note: str = ""

    def values(self, module: nn.Module) -> Values | None:
        """What the step of `module` is built with: nothing is made that will be replaced. Raises ValueError for a Hugging Face folder
        of another model.
        """
        if self.kind == "hf":
            return folder_values(Folder(self.addresses[0]), module)
        return None if self.kind == "new" else nothing

    def fill(self, step: Step, config: TrainConfig, tell: Callable[[str], None]) -> Saved | None:
        """Fill the step from the newest checkpoint that is whole, which is returned. Every rank calls this.

        Raises ValueError for one that does not fit, and Damaged if none is whole.
        """
        if self.kind in ("new", "hf") or not self.addresses:
            return None
        keeps = self.kind == "resume" or config.init_optimizer == "kept"
        damage: list[str] = []
        for address in self.addresses:
            try:
                saved = load(step, address, optimizer=keeps, cast=self.kind == "checkpoint")
            except Damaged as error:
                damage.append(str(error))
                if address != self.addresses[-1]:
                    tell(f"WARNING: {error}; taking the checkpoint before it")
                continue
            if self.kind == "checkpoint" and keeps:
                for executor in step.executors:
                    executor.seek(0)
                    executor.optimizer.before = executor.optimizer.steps
            return saved
        raise Damaged("no checkpoint can be read:\n  " + "\n  ".join(damage))


def beginning(config: TrainConfig, world: World | LocalWorld) -> Beginning:
    """Where the run that `config` describes begins, the same on every rank. Raises ValueError if it says so and there is nothing."""
    if config.resume is None and config.init_from is None:
        return Beginning()
    here = world if isinstance(world, World) else world.worlds[0]
    kind, found, note = "new", [""], ""
    if here.rank == 0:
        try:
            kind, found, note = look(config)
        except ValueError as error:
            kind, found, note = "error", [""], str(error)
    if isinstance(world, World) and world.mesh.size > 1:
        kind, note, *found = said(world, "\0".join([kind, note, *found])).split("\0")
    if kind == "error":
        raise ValueError(note)
    return Beginning(kind, tuple(found), note)  # type: ignore[arg-type]


def look(config: TrainConfig) -> tuple[str, list[str], str]:
    """(kind, addresses, note) of a Beginning, by what is in the folders. Raises ValueError as `beginning` does."""
    if config.resume is not None:
        try:
            if config.resume == "auto":
                addresses, note = find(config.checkpoints or str(config.out))
            else:
                addresses, note = find_resumed(config.resume, config.checkpoints)
        except ValueError as error:
            if config.resume != "auto" or isinstance(error, Damaged):
                raise
        else:
            check_settings(config, addresses[0], read_manifest(Place(addresses[0])))
            return "resume", addresses, note
    if config.init_from is None:
        return "new", [""], ""
    if is_hf_folder(Path(config.init_from)):
        if config.init_optimizer == "kept":
            raise ValueError(
                f"init_optimizer is kept, but {config.init_from} is a Hugging Face folder, which has no optimizer's state"
            )
        return "hf", [config.init_from], ""
    addresses, note = find(config.init_from)
    return "checkpoint", addresses, note


def folder_values(folder: Folder, module: nn.Module) -> Values:
    """The weights of a Hugging Face folder for this model. Raises ValueError if they are those of another one."""
    if isinstance(module, Llama):
        return LlamaFolder(folder, module.config).values
    if not is_hf_model(module):
        raise ValueError(
            f"{folder.path} is a folder of Hugging Face's, whose {folder.config.model_type} is no {type(module).__name__}: "
            "begin with the checkpoint of a run"
        )
    folder.check_holds(module)
    if otherwise := folder.otherwise(module.config):
        warnings.warn(
            f"the weights of {folder.path} come to a model with other settings: {'; '.join(otherwise)}",
            UserWarning,
            stacklevel=2,
        )
    return folder.values


def is_hf_folder(path: Path) -> bool:
    return (path / "config.json").is_file() and not (path / "phalanx.json").exists()


def nothing(parameter: Parameter, world: World) -> Tensor:
    """The shard of a parameter that a checkpoint is about to fill."""
    shape = parameter.spec.local_shape(parameter.shape, world.mesh)
    return torch.zeros(shape, dtype=parameter.stored or parameter.dtype)


def check_settings(config: TrainConfig, address: str, manifest: Manifest) -> None:
    """Raise ValueError for a setting that makes it another run than the one that is to be gone on with, or if that one has ended."""
    before = config_of(address, manifest)
    for field in fields(config):
        was, now = getattr(before, field.name), getattr(config, field.name)
        if now is None:  # the model's own; asked again when the model is known
            continue
        if field.name in SAME and was != now and not (field.name == "model" and is_moved(now, manifest)):
            raise ValueError(
                f"{address} is of a run with {field.name} {was!r}, which --resume goes on with; to begin a new run with {now!r} "
                "from its weights, use --init-from"
            )
    if manifest.step >= config.steps:
        raise ValueError(
            f"the run has taken all its {manifest.step} steps; ask for more with --steps, which is the total from its beginning, "
            "or train on other data with --init-from"
        )


def is_moved(model: str, manifest: Manifest) -> bool:
    """Whether a model is the Hugging Face folder that a run was started with, under another path."""
    before, here = manifest.facts.get("hf_config"), Path(model.removeprefix("hf:")) / "config.json"
    return model.startswith("hf:") and before is not None and here.is_file() and bool(json.loads(here.read_bytes()) == before)


def check_same_data(saved: Saved, fingerprint: str) -> None:
    """Raise ValueError for other data than that of the run which is to be gone on with."""
    before = saved.config
    if saved.facts["data"] != fingerprint:
        raise ValueError(
            f"{saved.address} was learning from other data (--data {' '.join(before.data) or 'left out'}, or what is there has changed): "
            "to go on from its weights with this data, use --init-from"
        )


def progress_of(facts: Mapping[str, Any]) -> Progress:
    return Progress(**{field.name: int(facts[field.name]) for field in fields(Progress)})


def said(world: World, text: str) -> str:
    """What rank 0 says, on every rank. Collective."""
    everybody = world.group(world.mesh.names)
    content = text.encode() if world.rank == 0 else b""
    length = torch.tensor(len(content), device=world.device)
    world.transport.broadcast(length, 0, everybody).wait()
    letters = torch.zeros(int(length), dtype=torch.uint8)
    if world.rank == 0 and content:
        letters = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    letters = letters.to(world.device)
    world.transport.broadcast(letters, 0, everybody).wait()
    return bytes(letters.cpu().numpy()).decode()
