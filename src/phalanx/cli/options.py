"""How a command reads a run: defaults, then the YAML file of --config, then the command line with dotted names."""

from __future__ import annotations

from pathlib import Path

from phalanx.train.config import TrainConfig, load


def defaults(args: list[str], otherwise: TrainConfig) -> TrainConfig:
    """What the run is before the command line has its say: the file that --config names in `args`, or `otherwise`.

    A key that the file leaves out has the value that it has in `otherwise`.
    """
    for position, word in enumerate(args):
        if word == "--config" and position + 1 < len(args):
            return load(Path(args[position + 1]), otherwise)
        if word.startswith("--config="):
            return load(Path(word.removeprefix("--config=")), otherwise)
    return otherwise
