"""Where else a run is told: TensorBoard's event files, Weights & Biases. On rank 0, beside metrics.jsonl, which has all they have.

Their packages are imported only if asked for. Whatever they raise while a run goes on is for the Recorder to catch.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from phalanx.train.config import TrainConfig
from phalanx.train.folder import replace_file
from phalanx.train.settings import dump

CHARTS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_per_second": "speed/tokens_per_second",
    "seconds": "speed/seconds",
    "skipped": "train/skipped",
    "held_out_loss": "held_out/loss",
    "perplexity": "held_out/perplexity",
}
"""Keys of metrics.jsonl → names that both sort into groups."""


class Sink(Protocol):
    """What a Recorder tells: numbers by the keys of metrics.jsonl."""

    name: str

    def open(self) -> None: ...

    def record(self, step: int, values: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """Steps after `step` will come again."""

    def close(self, *, failed: bool) -> None: ...


def sinks(config: TrainConfig, folder: Path, *, first_step: int = 1) -> list[Sink]:
    """Those that the configuration asks for. A run that begins at a later `first_step` goes on in the curves it had.

    Raises ValueError if a package is missing. What goes wrong later, a network that is down say, does not end a run.
    """
    made: list[Sink] = []
    if config.tensorboard:
        made.append(TensorBoard(folder, first_step))
    if config.wandb is not None:
        made.append(WeightsAndBiases(config.wandb, config, folder, first_step))
    return made


class TensorBoard:
    """Event files in the folder tensorboard of the run folder: `tensorboard --logdir runs` shows all runs."""

    name = "TensorBoard"

    def __init__(self, folder: Path, first_step: int = 1) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"--tensorboard needs the package tensorboard ({error}): pip install 'phalanx[tensorboard]'"
            ) from None
        self._make: Any = SummaryWriter
        self._home = folder / "tensorboard"
        self._first_step = first_step
        self._writer: Any = None

    def open(self) -> None:
        if self._first_step == 1:
            for old in self._home.glob("events.out.tfevents.*"):
                old.unlink()  # a new run in the folder of an older one replaces it, as in metrics.jsonl
        # Points from the step on that an earlier process wrote are not shown: they come again.
        purge = self._first_step if self._first_step > 1 else None
        self._writer = self._make(str(self._home), purge_step=purge, flush_secs=10)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(CHARTS.get(name, name), value, step)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._first_step = step + 1
        self._writer = self._make(str(self._home), purge_step=step + 1, flush_secs=10)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run of Weights & Biases for one run folder. wandb.json keeps its id, under which a resumed run goes on.

    The step is a value of its own, not W&B's counter, which only goes up: after a rewind the later curve lies over the first.
    """

    name = "Weights & Biases"

    def __init__(self, project: str, config: TrainConfig, folder: Path, first_step: int = 1) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(f"--wandb needs the package wandb ({error}): pip install 'phalanx[wandb]'") from None
        self._wandb: Any = wandb
        kept = folder / "wandb.json"
        known = _read_id(kept) if first_step > 1 else None
        identity = known or secrets.token_hex(4)
        replace_file(kept, json.dumps({"id": identity, "project": project}).encode() + b"\n")
        # "allow": the run of this id goes on if there is one.
        self._settings = {"project": project, "id": identity, "resume": "allow", "dir": str(folder)}
        self._settings |= {"name": folder.resolve().name, "config": yaml.safe_load(dump(config))}
        self._run: Any = None

    def open(self) -> None:
        try:
            self._run = self._wandb.init(**self._settings)
        except Exception as error:
            error.add_note("WANDB_MODE=offline keeps what it would send in the run folder, for `wandb sync`")
            raise
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{CHARTS.get(name, name): value for name, value in values.items()}})

    def rewind(self, step: int) -> None:
        """Nothing to do: see above."""

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _read_id(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):  # never told before, or the file was damaged: a new curve
        return None
