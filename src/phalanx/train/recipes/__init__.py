"""Launch recipes: what Slurm, torchrun, MPI and Kubernetes are to be told so that a run starts, stops and goes on. Text from data.

Nothing is started here, and nothing but the run's own settings is read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.train.config import TrainConfig

PORT = 29500
"""Where ranks meet, on the first host; torchrun's own default."""
LARGEST_NODE = 8
LONGEST_NAME = 40
"""Kubernetes makes names of pods from it, of at most 63 characters (RFC 1123)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every launcher is told."""

    out: Path | None = None
    """Write the recipe to this file instead of printing it."""
    name: str = "phalanx"
    """Of the job: lower-case letters, digits and hyphens."""
    per_node: int | None = None
    """Ranks on each host, as many as it has GPUs. Left out: all on one if they are at most 8, else 8."""


@dataclass(frozen=True)
class Job:
    """A run to be launched: `command` is that of each of its ranks, and goes on with the run folder where it ended."""

    name: str
    command: tuple[str, ...]
    folder: str
    ranks: int
    per_node: int
    gpus: bool

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node


def job(args: Sequence[str], config: TrainConfig, recipe: Recipe) -> Job:
    """The job of `phalanx train ARGS`, whose settings are `config`. Raises ValueError for what cannot be started again and again."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", recipe.name) or len(recipe.name) > LONGEST_NAME:
        raise ValueError(
            f"name is {recipe.name!r}; it is at most {LONGEST_NAME} lower-case letters, digits and hyphens, a letter first, as in my-run"
        )
    ranks = config.parsed_mesh().size
    per_node = min(ranks, LARGEST_NODE) if recipe.per_node is None else recipe.per_node
    if per_node < 1:
        raise ValueError(f"per-node is {per_node}; it is a number of at least 1")
    if ranks % per_node:
        fits = ", ".join(str(fit) for fit in range(1, ranks + 1) if ranks % fit == 0)
        raise ValueError(
            f"mesh {config.mesh} has {ranks} ranks, which do not divide into hosts of {per_node}; --per-node may be {fits}"
        )
    if config.out is None:
        raise ValueError(
            "a job that is started again goes on with its run folder: say which, as in --out runs/mine, behind `train`"
        )
    if not config.checkpoint_every:
        raise ValueError(
            f"checkpoint_every is {config.checkpoint_every}, and a job that is started again goes on from its newest checkpoint: say how "
            "often it writes one, as in --checkpoint-every 500"
        )
    if config.resume not in (None, "auto"):
        raise ValueError(
            f"resume is {config.resume!r}: every start would begin there. Leave it out, and the run goes on with its own folder; "
            f"weights to begin with are --init-from {config.resume}"
        )
    if config.restarts:
        raise ValueError(
            f"restarts is {config.restarts}, but local ranks alone are started anew by us: say it before `-- train`"
        )
    resume = () if config.resume else ("--resume", "auto")
    return Job(recipe.name, ("phalanx", "train", *args, *resume), str(config.out), ranks, per_node, config.device != "cpu")


def hosts(named: Sequence[str], nodes: int) -> tuple[str, ...]:
    """The job's hosts by name; node0 and so on where none are named."""
    if named and len(named) != nodes:
        raise ValueError(f"hosts are {' '.join(named)}, {len(named)} of them, but the job has {nodes}")
    for host in named:
        if host.isdigit() or not re.fullmatch(r"[A-Za-z0-9]([-.A-Za-z0-9]*[A-Za-z0-9])?", host):
            raise ValueError(f"hosts has {host!r}; a host is a name or an address, as in node0 or 10.0.0.1")
    return tuple(named) or tuple(f"node{at}" for at in range(nodes))


def at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"{name.replace('_', '-')} is {number}; it is a number of at least {least}")


def folded(*parts: Iterable[str], indent: str = "    ", width: int = 100) -> str:
    """A shell command of these words, quoted, over as many lines as it needs: every part begins one, and an option and its value
    stay together."""
    lines: list[str] = []
    for part in parts:
        pieces: list[str] = []
        for word in part:
            takes = (
                bool(pieces) and pieces[-1].startswith("-") and not re.search("[ =]", pieces[-1]) and not word.startswith("-")
            )
            if takes:
                pieces[-1] += f" {shlex.quote(word)}"
            else:
                pieces.append(shlex.quote(word))
        line = ""
        for piece in pieces:
            if line and len(line) + len(piece) > width:
                lines.append(line)
                line = piece
            else:
                line += f" {piece}" if line else piece
        lines.append(line)
    return f" \\\n{indent}".join(lines)
