"""How many bytes each rank reads to have its part of a model: `python -m phalanx.bench.reading --hf`.

A random Llama is written as a Hugging Face folder of three shards. On each mesh every rank opens the folder and reads its part. Read is
what the kernel counts (rchar of /proc/self/io), opening the folder with all its headers included, over the bytes of the part.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from phalanx.comm.local import local
from phalanx.hf import Folder, export
from phalanx.hf.folder import skeleton
from phalanx.hf.llama import hf_config
from phalanx.mesh import Mesh
from phalanx.models.llama import LlamaConfig
from phalanx.run.initialize import deferred_init
from phalanx.train.assembly import derived_program
from phalanx.train.config import TrainConfig
from phalanx.train.models import build

MESHES = ("tp=4", "dp=2,tp=2")
MODEL = LlamaConfig(vocab=32000, hidden=768, inner=2048, layers=4, heads=12, kv_heads=4)
"""74 million parameters: 297 MB in float32."""
SHARD_BYTES = 110 * 10**6


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.reading", description=__doc__)
    parser.add_argument("--hf", action="store_true", help="a Hugging Face folder")
    parser.add_argument("--meshes", nargs="+", default=MESHES)
    options = parser.parse_args(argv)
    if not options.hf:
        parser.error("say what to read: --hf")
    with tempfile.TemporaryDirectory() as scratch:
        of_hugging_face(Path(scratch) / "model", options.meshes)


def of_hugging_face(path: Path, meshes: Sequence[str]) -> None:
    write_folder(path)
    files = sorted(path.glob("*.safetensors"))
    print(f"{sum(file.stat().st_size for file in files):,} bytes in {len(files)} shards")
    print(f"{'mesh':<10} {'rank':>4} {'its part':>14} {'of tensors':>14} {'read in all':>14} {'over its part':>14}  seconds")
    for mesh in meshes:
        config = TrainConfig(model=f"hf:{path}", mesh=mesh, batch=4, seq=128)
        model = build(config.model, config.dtype)
        program = derived_program(config, model, deferred_init(model.factory))
        with local(Mesh.parse(mesh)) as world:
            for rank in world.worlds:
                before, began = bytes_read(), time.perf_counter()
                folder = Folder(path)
                part = sum(folder.values(parameter, rank).nbytes for parameter in program.parameters.values())
                seconds, read = time.perf_counter() - began, bytes_read() - before
                print(
                    f"{mesh:<10} {rank.rank:>4} {part:>14,} {folder.bytes_read:>14,} {read:>14,} {read / part:>14.5f}  {seconds:.2f}"
                )


def write_folder(path: Path) -> None:
    config = hf_config(MODEL, 1024)
    module = skeleton(config)
    tensors = [(name, tuple(value.shape), torch.float32) for name, value in module.named_parameters()]
    shapes = {name: shape for name, shape, _ in tensors}
    export(config, tensors, lambda name: torch.randn(shapes[name]), path, shard_bytes=SHARD_BYTES)


def bytes_read() -> int:
    """By this process so far, from files or caches."""
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    main()
