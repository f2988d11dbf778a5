"""One rank against the eager module with the same optimizer: `python -m phalanx.bench.eager`.

Prints how fast a step is relative to eager, alternated, and the peak bytes of live tensors of both.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import phalanx as phx
from phalanx.bench.pairs import alternated, ratio
from phalanx.models.llama import Llama, LlamaConfig, loss


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.eager", description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    config = LlamaConfig(hidden=options.hidden, inner=3 * options.hidden, layers=options.layers, heads=8, kv_heads=4)
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.seq)
    batch = {key: torch.randint(0, config.vocab, shape, generator=generator) for key in ("tokens", "targets")}
    mine, eager = (peak_bytes(make, config, batch) for make in (derived_step, eager_step))
    ours, theirs = derived_step(config, batch), eager_step(config, batch)
    print(
        f"Llama of hidden {options.hidden}, {options.layers} layers, batch {shape}, float32, AdamW, {options.threads} thread(s)"
    )
    print(f"speed relative to eager: {ratio(alternated(ours, theirs, options.pairs))}")
    print(f"eager relative to itself (A/A): {ratio(alternated(theirs, eager_step(config, batch), options.pairs))}")
    print(f"peak live tensor bytes: {mine / 2**20:.1f} MiB, eager {eager / 2**20:.1f} MiB, {mine / eager:.3f} of it")


def derived_step(config: LlamaConfig, batch: dict[str, Tensor]) -> Callable[[], object]:
    torch.manual_seed(0)
    world = phx.init(phx.Mesh())
    step = phx.parallelize(
        Llama(config), world, loss=loss, example=batch, optimizer=phx.adamw(lr=3e-4, weight_decay=0.1), layout={}
    )
    return lambda: step(batch)


def eager_step(config: LlamaConfig, batch: dict[str, Tensor]) -> Callable[[], object]:
    torch.manual_seed(0)
    model = Llama(config)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, fused=True)

    def step() -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        total, count = loss(model(batch["tokens"]), batch)
        mean = total / count
        mean.backward()  # type: ignore[no-untyped-call]
        # what our step reports as well
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        return mean.item(), norm.item()

    return step


def peak_bytes(
    make: Callable[[LlamaConfig, dict[str, Tensor]], Callable[[], object]], config: LlamaConfig, batch: dict[str, Tensor]
) -> int:
    """Bytes of tensors that a way of training keeps between steps plus the most that a step adds, as the allocator records it."""
    before = _live_bytes()
    step = make(config, batch)
    step()
    kept = _live_bytes() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    assert recorded.profiler is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return kept + most


def _live_bytes() -> int:
    gc.collect()
    real = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in real}.values())


if __name__ == "__main__":
    main()
