"""`phalanx run`: your own script on several local ranks, as torchrun would start it but with one line when a rank dies."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from phalanx.train.launch import launch


@dataclass(frozen=True, kw_only=True)
class Options:
    """Start SCRIPT on several local ranks; `phx.init(mesh)` in it joins them. Everything behind SCRIPT is its own."""

    ranks: int
    """Number of processes, the size of the script's mesh."""
    watch: Path | None = None
    """A folder for what every rank calls, which `phalanx doctor run` reads; a hang or a disagreement gets a verdict. For scripts that
    call `phx.init` or open a `watched:` process group."""
    script: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT [ARGUMENT ...]")]
    """A Python file and its arguments."""


def main(args: list[str]) -> int:
    ours, script = split_at_script(args)
    options = tyro.cli(Options, args=[*ours, *script[:1]], prog="phalanx run")
    if options.ranks < 1:
        raise ValueError(f"--ranks is {options.ranks}; it is a number of at least 1")
    if not script:
        raise ValueError("phalanx run needs a script, as in `phalanx run --ranks 4 script.py`")
    if not Path(script[0]).is_file():
        raise ValueError(f"{script[0]} is not a file")
    if options.watch is not None:
        os.environ["PHALANX_RUN_DIR"] = str(options.watch.resolve())
    launch(options.ranks, [sys.executable, "-u", *script])
    return 0


def split_at_script(args: list[str]) -> tuple[list[str], list[str]]:
    """Our options, then the script with its own: the first word that is neither an option nor the value of one."""
    position = 0
    while position < len(args) and args[position].startswith("-"):
        position += 2 if args[position] in ("--ranks", "--watch") else 1
    return args[:position], args[position:]
