"""A step on compiled graphs against plain graphs and against torch.compile of the module: `python -m phalanx.bench.compiled`.

One rank, a small Llama, the same optimizer; neighbours are alternated. Prints what compiling took and, on CPU, the peak bytes of live
tensors. `--device cuda` times the device's work as well, since every step ends with numbers that the host reads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import phalanx as phx
from phalanx.bench.eager import peak_bytes
from phalanx.bench.pairs import alternated, ratio
from phalanx.derive.compile import compiled_program
from phalanx.derive.program import Program
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.run.executor import Executor, Out

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.compiled", description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    config = LlamaConfig(hidden=options.hidden, inner=3 * options.hidden, layers=options.layers, heads=8, kv_heads=4)
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.seq)
    batch = {key: torch.randint(0, config.vocab, shape, generator=generator) for key in ("tokens", "targets")}
    print(
        f"Llama of hidden {options.hidden}, {options.layers} layers, batch {shape}, {options.dtype}, AdamW, {options.device}, "
        f"{options.threads} thread(s), torch {torch.__version__}"
    )
    ways = Ways(config, batch, torch.device(options.device), DTYPES[options.dtype])
    plain, ours, outside = ways.plain(), ways.compiled(), ways.compiled(inside=False)
    for row in ways.took:
        print(f"  {row}")
    theirs, eager = ways.module(compile_it=True), ways.module(compile_it=False)
    print(f"loss of the third step: {', '.join(f'{way()[0]:.9g}' for way in (plain, ours, outside, theirs, eager))}")
    for name, other in (
        ("plain graphs", plain),
        ("compiled graphs that return their gradients", outside),
        ("torch.compile of the module", theirs),
        ("the eager module", eager),
        ("itself (A/A)", ways.compiled()),
    ):
        print(f"speed of compiled graphs relative to {name}: {ratio(alternated(ours, other, options.pairs))}")
    if options.device == "cpu":
        for name, make in (("plain", ways.plain), ("compiled", ways.compiled), ("torch.compile", ways.compiled_module)):
            peak = peak_bytes(lambda c, b, make=make: make(), config, batch)  # type: ignore[misc]
            print(f"peak live tensor bytes, {name}: {peak / 2**20:.1f} MiB")


class Ways:
    """The same training run, made in several ways from the same weights. Each way has taken two steps when it is returned."""

    def __init__(self, config: LlamaConfig, batch: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.batch, self.dtype = config, batch, dtype
        self.device_batch = {name: x.to(device) for name, x in batch.items()}
        self.world = phx.init(phx.Mesh(), device=device.type)
        self.took: list[str] = []

    def model(self) -> Llama:
        torch.manual_seed(0)
        return Llama(self.config).to(self.world.device, self.dtype)

    def step(self) -> phx.Step:
        optimizer = phx.adamw(lr=3e-4, weight_decay=0.1)
        return phx.parallelize(self.model(), self.world, loss=loss, example=self.batch, optimizer=optimizer, layout={})

    def plain(self) -> Callable[[], tuple[float, float]]:
        return self.started(self.step().executors[0])

    def compiled(self, *, inside: bool = True) -> Callable[[], tuple[float, float]]:
        """`inside` False leaves out the graphs that write to accumulators: gradients are values, added afterwards."""
        step = self.step()
        program = step.program if inside else without_accumulators(step.program)
        start = time.perf_counter()
        program, report = compiled_program(program)
        seconds = ", ".join(f"{row.name} {row.seconds:.1f} s for {row.regions} regions" for row in report)
        self.took.append(f"compiled in {time.perf_counter() - start:.1f} s: {seconds}")
        return self.started(on(step.executors[0], program))

    def started(self, executor: Executor) -> Callable[[], tuple[float, float]]:
        def step() -> tuple[float, float]:
            out: Out = executor.step(self.device_batch)
            return out.loss, out.grad_norm

        step(), step()
        return step

    def compiled_module(self) -> Callable[[], tuple[float, float]]:
        return self.module(compile_it=True)

    def module(self, *, compile_it: bool) -> Callable[[], tuple[float, float]]:
        """What a user of PyTorch alone writes, with the numbers that our step reports."""
        model, batch = self.model(), self.device_batch
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-4, fused=True)

        def mean(tokens: Tensor) -> Tensor:
            total, count = loss(model(tokens), batch)
            return total / count

        forward = torch.compile(mean, fullgraph=True) if compile_it else mean

        def step() -> tuple[float, float]:
            optimizer.zero_grad(set_to_none=True)
            value = forward(batch["tokens"])
            value.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()
            return value.item(), norm.item()

        start = time.perf_counter()
        step(), step()
        if compile_it:
            print(f"  torch.compile of the module: first two steps in {time.perf_counter() - start:.1f} s")
        return step


def on(executor: Executor, program: Program) -> Executor:
    """The same rank with the same weights, on other graphs."""
    return Executor(program, executor.schedule, executor.world, executor.parameters, executor.optimizer)


def without_accumulators(program: Program) -> Program:
    made = {id(s.cls): replace(s.cls, graphs=replace(s.cls.graphs, BA=None, WA=None)) for s in program.segments if s.cls.graphs}
    return replace(program, segments=tuple(replace(s, cls=made[id(s.cls)]) for s in program.segments))


if __name__ == "__main__":
    main()
