"""`phalanx data pack`: checks what is asked, shows how far it is, and says what came of it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from phalanx.cli.options import Switch
from phalanx.train.data.folder import Meta
from phalanx.train.data.pack import Progress, pack
from phalanx.train.data.tokenizer import Tokenizer, open_tokenizer


@dataclass(frozen=True, kw_only=True)
class Options:
    """Pack text into a token folder, for `phalanx train --data`. A document is one text file, one line of JSONL or one row of parquet."""

    sources: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Text files, .jsonl, .parquet, or folders of them, in this order."""
    out: Path
    """The folder to write."""
    tokenizer: str = "bytes"
    """bytes, a tokenizer.json, or a folder that holds one."""
    text_key: str = "text"
    """The key or column of JSONL and parquet that holds the text."""
    eos: str | None = None
    """The token that ends each document, or none. Left out: the one that the tokenizer's folder names; byte 0 for bytes."""
    workers: int | None = None
    """Processes. Left out: one for each core; for bytes, which are faster copied than sent, only this one."""
    overwrite: Switch = False
    """Replace a token folder that is there already."""


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, prog="phalanx data pack")
    if not options.sources:
        raise ValueError("name what to pack: text files, .jsonl, .parquet, or folders of them")
    tokenizer = open_tokenizer(options.tokenizer, options.eos)
    workers = options.workers
    if workers is None:
        workers = 1 if tokenizer.file is None else len(os.sched_getaffinity(0))
    # --workers is all the parallelism there is, here and in the processes that inherit it.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    began = time.perf_counter()
    meta = shown(options, tokenizer, workers)
    for line in closing_lines(meta, options.out, time.perf_counter() - began):
        print(line)
    return 0


def shown(options: Options, tokenizer: Tokenizer, workers: int) -> Meta:
    """Pack under a bar that leaves nothing behind."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    began = time.perf_counter()
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting")

        def tell(progress: Progress) -> None:
            speed = progress.text_bytes / 1e6 / (time.perf_counter() - began)
            told = f"{progress.documents:,} documents, {speed:.1f} MB/s"
            bar.update(task, total=progress.total, completed=progress.done, description=told)

        return pack(
            options.sources,
            options.out,
            tokenizer,
            text_key=options.text_key,
            workers=workers,
            overwrite=options.overwrite,
            progress=tell,
        )


def closing_lines(meta: Meta, out: Path, seconds: float) -> list[str]:
    return [
        f"{meta.documents:,} document{'s' * (meta.documents != 1)}, {meta.text_bytes:,} bytes of text",
        f"{meta.tokens:,} tokens ({meta.dtype}) of a vocabulary of {meta.vocab:,}",
        f"token folder: {out}",
        f"{seconds:.1f} s, {meta.text_bytes / 1e6 / seconds:.1f} MB/s",
    ]
