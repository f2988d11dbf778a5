"""What the proof of a schedule costs, beside making, timing and explaining it: `python -m phalanx.bench.proof`.

The model has one segment per stage. Times are the fastest and the median of some repeats, in milliseconds of
one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from phalanx.mesh import Mesh
from phalanx.schedule.account import account
from phalanx.schedule.check import check
from phalanx.schedule.defer import defer
from phalanx.schedule.lower import lower
from phalanx.schedule.pipeline import compute_order
from phalanx.schedule.simulate import Costs, Link, simulate
from phalanx.schedule.view import Message, SegmentView, View, Weight

CASES = (("1f1b", 8, 32), ("zb-h1", 8, 32), ("zb-v", 8, 32), ("1f1b", 64, 256), ("zb-h1", 64, 256))
"""Schedule, stages a copy, microbatches."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.proof", description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="of the small cases; the large ones take a tenth of it")
    options = parser.parse_args(argv)
    columns = ("make", "check", "simulate", "account", "defer")
    print(f"{'schedule':10}{'pp':>4}{'m':>5}{'actions':>9}" + "".join(f"{column:>20}" for column in columns))
    for name, pp, microbatches in CASES:
        repeats = options.repeats if pp < 64 else max(1, options.repeats // 10)
        print(row(name, pp, microbatches, repeats), flush=True)


def row(name: str, pp: int, microbatches: int, repeats: int) -> str:
    order = compute_order(name, pp, microbatches)
    view = chain(pp, len(order.host))
    placed = [(k,) for k in range(len(order.host))]
    schedule = lower(view, order, placed, microbatches, name)
    costs = Costs(Costs.units(view).seconds, {"wire": Link(0.01, 1e4)}, dict.fromkeys(("pp", "reduce", "world"), "wire"))
    events = simulate(schedule, view, costs)
    cells = [
        milliseconds(lambda: lower(view, order, placed, microbatches, name), repeats),
        milliseconds(lambda: check(schedule, view), repeats),
        milliseconds(lambda: simulate(schedule, view, costs), repeats),
        milliseconds(lambda: account(schedule, view, events), repeats),
        milliseconds(lambda: defer(schedule, view), repeats),
    ]
    actions = sum(len(actions) for actions in schedule.ranks)
    return f"{name:10}{pp:>4}{microbatches:>5}{actions:>9}" + "".join(f"{cell:>20}" for cell in cells)


def chain(pp: int, segments: int) -> View:
    """A model whose segments pass on one tensor and have one parameter each."""
    hidden, last = (Message("hidden", (2, 8), "float32", 64),), segments - 1
    return View(
        Mesh(pp=pp),
        tuple(
            SegmentView(
                name=f"segment{k}",
                inputs=hidden if k else (),
                outputs=hidden if k < last else (),
                input_grads=hidden if k else (),
                output_grads=hidden if k < last else (),
                weights=(Weight(f"weight{k}", 100),),
                saved_bytes=1000,
            )
            for k in range(segments)
        ),
    )


def milliseconds(call: Callable[[], object], repeats: int) -> str:
    """Fastest and median time of a call, on its own core: others on the machine do not count."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append((time.process_time() - start) * 1e3)
    return f"{min(times):.1f} / {statistics.median(times):.1f}"


if __name__ == "__main__":
    main()
