"""`phalanx export`: a checkpoint of any layout as the folder of a Hugging Face model, by one process that holds one tensor at a time."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from phalanx.cli.options import Switch

if TYPE_CHECKING:
    from phalanx.train.checkpoint import Saved

UNITS: dict[str, int] = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write the weights of a checkpoint as a folder that Hugging Face's from_pretrained loads."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_CHECKPOINT")]
    """A run folder (its newest good checkpoint) or one checkpoint."""
    to: Literal["hf"] = "hf"
    """The format."""
    out: Path
    """The folder to write."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """To convert the weights to. Left out: as they were trained."""
    shard_size: str = "5GB"
    """Most bytes of one file of weights, as in 500MB or 2GiB."""
    overwrite: Switch = False
    """Replace --out if it is the folder of a model."""


def main(args: list[str]) -> int:
    options = tyro.cli(Options, args=args, prog="phalanx export")
    shard_bytes = parse_size(options.shard_size)

    import torch

    from phalanx.hf import export
    from phalanx.train.checkpoint import Saved, find

    good, damaged = find(options.source)
    if damaged:
        print(f"phalanx: warning: passed over: {damaged}", file=sys.stderr)
    saved = Saved(good[0])
    config, names, source = described(saved)
    files = export(
        config,
        [(name, *saved.model[first]) for name, first in names.items()],
        lambda name: saved.tensor(names[name]),
        options.out,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        shard_bytes=shard_bytes,
        source=source,
        overwrite=options.overwrite,
    )
    kind, _, where = saved.config.model.partition(":")
    if source is None and kind == "hf":
        print(f"phalanx: warning: {where} is not there, so its tokenizer files do not come along", file=sys.stderr)
    print(f"step {saved.step} of {saved.config.model} is in {options.out}: {', '.join(files)}")
    print(f"load it with AutoModelForCausalLM.from_pretrained({str(options.out)!r})")
    return 0


def described(saved: Saved) -> tuple[Any, Mapping[str, str], Path | None]:
    """The transformers configuration of what a checkpoint holds, its names there to those in the checkpoint, and its origin.

    Raises ValueError for a model that transformers has no class for.
    """
    from phalanx.hf.folder import parsed_config, read_config
    from phalanx.hf.llama import hf_config, hf_name
    from phalanx.models.llama import LlamaConfig
    from phalanx.train import tiny

    run = saved.config
    kind, colon, rest = run.model.partition(":")
    same = {name: name for name in saved.model}
    if colon and kind == "hf-tiny":
        return tiny.config(rest), same, None
    if colon and kind == "hf":
        source = Path(rest) if Path(rest).is_dir() else None
        kept = saved.facts.get("hf_config")
        return (parsed_config(kept, saved.address) if kept else read_config(Path(rest))), same, source
    if kind.startswith("llama-"):
        from phalanx.train.models import build

        sizes = LlamaConfig.preset(kind.removeprefix("llama-"))
        positions = run.seq or build(run.model, run.dtype).seq
        return hf_config(sizes, positions), {hf_name(name): name for name in saved.model}, None
    raise ValueError(
        f"{saved.address} is of the model {run.model}, which transformers has no class for; llama-* and hf: models have"
    )


def parse_size(text: str) -> int:
    """Bytes of 500MB, 2GiB or 4096."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?i?B?)", text.strip())
    unit = match[2] if match else ""
    if not match or (unit and unit not in UNITS) or not int(match[1]):
        raise ValueError(f"--shard-size {text}: write a size such as 500MB, 5GB or 2GiB")
    return int(match[1]) * UNITS.get(unit, 1)
