"""What CUDA graphs of segments, and compiled graphs, gain on this GPU: `python -m phalanx.bench.cuda_graphs`.

First the GPU tests, if this is a checkout. Then, for a small Llama and one of the 1B class on one rank: seconds of a step, what that
is per action, and which part of it the device computed at all. The rest are gaps between kernels, the most that a capture can win.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import phalanx as phx
from phalanx.bench.compiled import on
from phalanx.derive.compile import compiled_program
from phalanx.derive.program import Program
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.run.cuda_graph import captured_program
from phalanx.run.executor import Executor

TESTS = Path(__file__).parents[3] / "tests" / "test_cuda.py"


@dataclass(frozen=True)
class Setting:
    """A model and its batch."""

    config: LlamaConfig
    batch: int
    seq: int
    microbatches: int
    dtype: torch.dtype = torch.bfloat16


SETTINGS = {
    "small": Setting(LlamaConfig(vocab=256, hidden=256, inner=768, layers=8, heads=8, kv_heads=4), 8, 128, 4),
    "1b": Setting(LlamaConfig.preset("1b", vocab=32000), 8, 1024, 4),
}
WAYS = ("plain", "captured", "compiled", "compiled and captured")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.cuda_graphs", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-tests", action="store_true")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    if not options.no_tests and TESTS.exists():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
        ended = subprocess.run(command, cwd=TESTS.parents[1], check=False)
        print(f"tests: {'passed' if ended.returncode == 0 else f'exit status {ended.returncode}'}", flush=True)
    for name in options.models:
        setting = SETTINGS[name]
        print(f"{name}: {setting}", flush=True)
        for way in options.ways:
            try:
                print(f"  {way:22} {measured(setting, way, options.steps)}", flush=True)
            except Exception:  # noqa: BLE001 - one way that does not run must not cost the numbers of the others
                print(f"  {way:22} does not run\n{traceback.format_exc()}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


def measured(setting: Setting, way: str, steps: int) -> str:
    torch.cuda.reset_peak_memory_stats()
    executor, batch, notes = made(setting, way)
    for _ in range(4):  # captures, and whatever torch chooses at first
        out = executor.step(batch)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        executor.step(batch)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    busy = device_seconds(lambda: executor.step(batch))
    return (
        f"{seconds * 1e3:8.2f} ms a step ({min(times) * 1e3:.2f} to {max(times) * 1e3:.2f}), "
        f"{seconds * 1e6 / len(executor.actions):.1f} us for each of {len(executor.actions)} actions, device busy "
        f"{busy * 1e3:.2f} ms ({100 * busy / seconds:.0f}%), peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, "
        f"loss {out.loss:.6f}{notes}"
    )


def made(setting: Setting, way: str) -> tuple[Executor, dict[str, Tensor], str]:
    world = phx.init(phx.Mesh(), device="cuda")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(setting.config).to(setting.dtype)
        shape = (setting.batch, setting.seq)
        batch = {key: torch.randint(0, setting.config.vocab, shape) for key in ("tokens", "targets")}
    step = phx.parallelize(
        model, world, example=batch, loss=loss, optimizer=phx.adamw(lr=1e-4), microbatches=setting.microbatches, layout={}
    )
    executor, notes = step.executors[0], ""
    program: Program = step.program
    if "compiled" in way:
        program, report = compiled_program(program)
        notes += f", compiled in {sum(row.seconds for row in report):.1f} s"
    if "captured" in way:
        program, left = captured_program(program)
        notes += f", not captured: {', '.join(left) or 'none'}"
    return (executor if program is step.program else on(executor, program)), batch, notes


def device_seconds(step: Callable[[], object]) -> float:
    """Sum of the times of all kernels and copies of a step; on one rank they do not overlap."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    total = 0.0
    for event in recorded.events() or ():
        annotation = getattr(event, "is_user_annotation", False) or event.name.startswith("##")
        if event.device_type == DeviceType.CUDA and not annotation:
            total += event.time_range.elapsed_us()
    return total / 1e6


if __name__ == "__main__":
    main()
