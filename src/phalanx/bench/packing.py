"""How fast text becomes tokens, and whether a step ever waits for them: `python -m phalanx.bench.packing`, and with `--feeding`.

Packing: JSONL to tokens on disk by `phalanx data pack` and by `datasets` (load_dataset, then map with batches), both with the same
tokenizer, a byte-level BPE of 8,192 tokens that the tokenizers library trains on the spot on the standard library's sources, and
with as many processes as named. They are alternated; each process has one thread. Reading the JSONL counts for both, and so does
starting processes: ours import this package anew, those of `datasets` are forked.

Feeding: the ranks of `make train` take steps, ten with the thread that reads ahead and ten without, alternated; the slowest rank
counts. Told are the speed of a step with the thread relative to one without, and what a step waits for its batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from phalanx.bench.pairs import alternated, ratio

VOCAB = 8192
STEPS = 10
"""In one measurement: enough that the thread is in its stride."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.packing", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=16, help="of text to pack")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--feeding", action="store_true", help="measure what a step waits for its batch instead")
    parser.add_argument("--mesh", default="dp=2,tp=2", help="of --feeding")
    parser.add_argument("--model", default="llama-tiny", help="of --feeding")
    options = parser.parse_args(argv)
    if options.feeding:
        feeding(options, sys.argv[1:] if argv is None else argv)
    else:
        packing(options)


def packing(options: argparse.Namespace) -> None:
    """Print the comparison for each number of workers. Raises ValueError if `datasets` or `tokenizers` is not installed."""
    try:
        import datasets
        import tokenizers
    except ImportError as error:
        raise ValueError(f"this comparison needs the package {error.name}: pip install 'phalanx[data]'") from None
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, size = jsonl(folder / "text.jsonl", options.megabytes * 1_000_000)
        tokenizer = trained(text, folder / "tokenizer.json")
        print(
            f"{size / 1e6:.1f} MB of the standard library's sources, BPE of {VOCAB} tokens, datasets {datasets.__version__}, "
            f"tokenizers {tokenizers.__version__}",
            flush=True,
        )
        for workers in options.workers:
            ours, theirs = packed(text, tokenizer, folder, workers), mapped(text, tokenizer, folder, workers)
            assert ours() == theirs(), "the two do not make the same tokens"
            result = ratio(alternated(ours, theirs, options.pairs, warm_up=0))
            mine, other = (size / 1e6 / seconds for seconds in (result.ours_seconds, result.theirs_seconds))
            count = f"{workers} worker{'s' * (workers > 1)}"
            print(f"{count}: {mine:.2f} MB/s, datasets {other:.2f} MB/s; speed relative to it: {result}", flush=True)


def jsonl(path: Path, most: int) -> tuple[Path, int]:
    """Modules of the standard library that are UTF-8, a line each, up to `most` bytes; the file and the bytes of text in it."""
    size = 0
    with path.open("w") as out:
        for module in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            if size >= most or "site-packages" in module.parts:
                continue
            try:
                text = module.read_bytes().decode()
            except UnicodeDecodeError:
                continue
            if text:
                out.write(json.dumps({"text": text}) + "\n")
                size += len(text.encode())
    return path, size


def trained(text: Path, path: Path) -> Path:
    """A byte-level BPE, trained on the text and written to `path`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    with text.open() as lines:
        tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    tokenizer.save(str(path))
    return path


def packed(text: Path, tokenizer: Path, folder: Path, workers: int) -> Callable[[], int]:
    """Pack with ours; returns the number of tokens without those that end documents."""
    from phalanx.train.data.pack import pack
    from phalanx.train.data.tokenizer import open_tokenizer

    def once() -> int:
        meta = pack([text], folder / "ours", open_tokenizer(str(tokenizer), "<end>"), workers=workers, overwrite=True)
        return meta.tokens - meta.documents

    return once


def mapped(text: Path, tokenizer: Path, folder: Path, workers: int) -> Callable[[], int]:
    """Tokenize with `datasets`; returns the number of tokens when asked the first time only, since it costs time."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    library = Tokenizer.from_file(str(tokenizer))
    counted: list[int] = []

    def encode(batch: Mapping[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"tokens": [each.ids for each in library.encode_batch_fast(batch["text"], add_special_tokens=False)]}

    def once() -> int:
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            read = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=cache)
            result = read.map(
                encode,
                batched=True,
                num_proc=workers if workers > 1 else None,
                remove_columns=["text"],
                features=datasets.Features({"tokens": datasets.Sequence(datasets.Value("uint16"))}),
                load_from_cache_file=False,
            )
            if not counted:
                counted.append(sum(len(row["tokens"]) for row in result))
        return counted[0]

    return once


def feeding(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Start the ranks, or be one of them."""
    from phalanx.comm.launch import launch_from
    from phalanx.mesh import Mesh
    from phalanx.train.launch import launch

    mesh = Mesh.parse(options.mesh)
    if launch_from(os.environ) is None:
        launch(mesh.size, [sys.executable, "-P", "-m", "phalanx.bench.packing", *argv])
        return
    import phalanx as phx

    with phx.init(mesh) as world:
        lines = waits(options, world)
        if world.rank == 0:
            print("\n".join(lines), flush=True)


def waits(options: argparse.Namespace, world: object) -> list[str]:
    """What a step waits for its batch, in words; every rank calls this."""
    import torch
    import torch.distributed as dist

    from phalanx.comm.world import World
    from phalanx.run.initialize import deferred_init
    from phalanx.train.assembly import parallel_step
    from phalanx.train.batches import Batches
    from phalanx.train.config import TrainConfig
    from phalanx.train.models import build

    assert isinstance(world, World)
    torch.set_num_threads(1)
    model = build(options.model, "float32")
    config = TrainConfig(model=options.model, mesh=options.mesh, batch=model.batch, seq=model.seq)
    step = parallel_step(config, world, model, deferred_init(model.factory))
    ways = {"ahead": Batches(config, model, step), "when asked": Batches(config, model, step, ahead=0)}
    waited: dict[str, list[float]] = {name: [] for name in ways}
    cursors = dict.fromkeys(ways, 0)

    def steps(name: str) -> None:
        for _ in range(STEPS):
            began = time.perf_counter()
            batch = ways[name].training(cursors[name])
            waited[name].append(time.perf_counter() - began)
            step(batch, local=ways[name].is_local)
            cursors[name] += ways[name].size

    times = torch.tensor(
        alternated(lambda: steps("ahead"), lambda: steps("when asked"), options.pairs, before=dist.barrier), dtype=torch.float64
    )
    dist.all_reduce(times, dist.ReduceOp.MAX)
    lines = [
        f"{options.model} on mesh {options.mesh}, batch {config.batch}, seq {config.seq}, {options.pairs} pairs of {STEPS} steps"
    ]
    for at, name in enumerate(ways):
        ways[name].close()
        seconds = torch.tensor(statistics.median(waited[name][STEPS:]), dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        share = float(seconds) / (float(times[:, at].median()) / STEPS)
        lines.append(f"read {name}: a step waits {float(seconds) * 1e6:.0f} µs for its batch, {share:.2%} of it")
    compared = ratio([(float(ours), float(theirs)) for ours, theirs in times])
    return [*lines, f"speed of {STEPS} steps that read ahead relative to {STEPS} that do not: {compared}"]


if __name__ == "__main__":
    main()
