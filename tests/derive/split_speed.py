"""How fast the graphs are against eager autograd, alternated so that a busy machine slows all alike.

PYTHONPATH=src OMP_NUM_THREADS=1 python -m tests.derive.split_speed
"""

from __future__ import annotations

import statistics
import sys
import time
import timeit
from collections.abc import Callable

import torch
from tests.derive.split_cases import RUN, Case, GeluBlock, LlamaBlock, make_case
from torch import Tensor

from phalanx.derive.boxed import BINDINGS


def llama(hidden: int, batch: int, seq: int, heads: int) -> Case:
    width = hidden // heads
    angles = torch.arange(float(seq))[:, None] / 1e4 ** (torch.arange(0, width, 2) / width)[None]
    angles = torch.cat((angles, angles), -1)
    inputs = [torch.randn(batch, seq, hidden), angles.cos(), angles.sin()]
    return make_case(LlamaBlock(hidden, heads, heads // 2), inputs, [True, False, False], torch.float32)


def medians(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each way, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            result = way()
            del result
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def overhead(case: Case, repeats: int) -> dict[str, float]:
    """Seconds for a forward and backward that leaves the gradients in a parameter's `grad`, in a list or in accumulators."""
    graphs = case.split(accumulate=True)
    trainable = [p for p in case.module.parameters() if p.requires_grad]
    accumulators = [torch.zeros_like(p) for p in trainable]
    x = [i.clone().requires_grad_(v.requires_grad) for i, v in zip(case.inputs, case.input_values, strict=True)]

    def eager(add: bool) -> None:
        for tensor in (*x, *(() if add else trainable)):
            tensor.grad = None
        torch.autograd.backward(case.module(*x), case.grad_outputs)

    def forward() -> tuple[tuple[Tensor, ...], list[object]]:
        outputs, saved = graphs.F.forward([*RUN, *case.arguments, *case.inputs])
        return outputs, [*RUN, *case.arguments, *saved, *case.grad_outputs]

    @torch.no_grad()
    def plain(fresh: bool | None) -> object:
        outputs, arguments = forward()
        grad_inputs, grads = graphs.B.forward(arguments)
        if fresh is not None:
            for accumulator, grad in zip(accumulators, grads, strict=True):
                accumulator.copy_(grad) if fresh else accumulator.add_(grad)
        return outputs, grad_inputs, grads

    @torch.no_grad()
    def writing(fresh: bool) -> object:
        outputs, arguments = forward()
        arguments += [[fresh] * len(accumulators), *accumulators]
        return outputs, graphs.BA.forward(arguments)  # type: ignore[union-attr]

    ways: dict[str, Callable[[], object]] = {
        "eager, first": lambda: eager(False),
        "plain": lambda: plain(None),
        "copied": lambda: plain(True),
        "written": lambda: writing(True),
        "eager, next": lambda: eager(True),
        "added": lambda: plain(False),
        "added in place": lambda: writing(False),
    }
    return medians(ways, repeats)


def main() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    for op, binding in ((op, BINDINGS[op]) for op in (torch.ops.aten.mm.default, torch.ops.aten.add.Tensor)):
        for label, call in (("torch.ops", op), ("inner", op._op), ("binding", binding)):
            seconds = min(timeit.repeat(lambda call=call: call(a, b), number=5000, repeat=5)) / 5000  # type: ignore[misc]
            sys.stdout.write(f"{op!s:20} {label:10} {seconds * 1e6:.2f} us\n")
    for hidden, batch, seq, heads, repeats in ((32, 2, 16, 4, 200), (512, 2, 64, 8, 40), (512, 4, 128, 8, 15)):
        cases = {"llama": llama(hidden, batch, seq, heads)}
        cases["gelu"] = make_case(GeluBlock(hidden), [torch.randn(batch, seq, hidden)], [True], torch.float32)
        for name, case in cases.items():
            times = overhead(case, repeats)
            first, later = times["eager, first"], times["eager, next"]
            line = " · ".join(
                f"{way} {(later if way.startswith('added') else first) / seconds:.3f}"
                for way, seconds in times.items()
                if not way.startswith("eager")
            )
            sys.stdout.write(
                f"{name} hidden {hidden}, {batch * seq} tokens, eager {first * 1e3:.2f} ms; speed over eager: {line}\n"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
