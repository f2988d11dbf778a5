"""The shared-memory core without Python against what the machine can do: `python -m phalanx.bench.core`.

An all_reduce of tensors in private and in shared memory, beside a ping-pong of messages over the same transport, a memcpy that all
ranks make at once and, with --mpi, the all_reduce of an MPI (built with mpicc, started with mpirun). All are alternated in one run;
a time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("core.c")
CORE = Path(__file__).parents[1] / "comm" / "shm" / "core"
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno")
WAYS = ("ping_pong", "staged", "resident", "memcpy", "mpi")
SIZES = {1024: 3000, 65536: 1000, 4 << 20: 100, 64 << 20: 15}
"""Bytes of a tensor, and how often it is summed."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.core", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mpi", action="store_true", help="build with mpicc and time MPI_Allreduce as well")
    options = parser.parse_args(argv)
    compiler = "mpicc" if options.mpi else "gcc"
    if shutil.which(compiler) is None:
        parser.error(f"there is no {compiler} here, which builds what is to be measured")
    if not 2 <= options.ranks <= 64:
        parser.error(f"--ranks {options.ranks}: 2 to 64 can be measured")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "core"
        build(program, compiler)
        print(f"{options.ranks} ranks, microseconds: median (5th to 95th percentile) of the slowest rank")
        print(f"{'bytes':>10}" + "".join(f"{way:>32}" for way in WAYS if shown(way, options.ranks, options.mpi)))
        for size, iterations in SIZES.items():
            row = measured(program, options.ranks, size, iterations, options.mpi)
            print(f"{size:>10}" + "".join(f"{cell(row[way]):>32}" for way in WAYS if shown(way, options.ranks, options.mpi)))


def build(program: Path, compiler: str) -> None:
    sources = [path for path in sorted(CORE.glob("*.c")) if path.name != "module.c"]
    more = ["-DWITH_MPI"] if compiler == "mpicc" else []
    subprocess.run([compiler, *FLAGS, *more, f"-I{CORE}", "-o", program, SOURCE, *sources, "-lpthread"], check=True)


def measured(program: Path, ranks: int, size: int, iterations: int, mpi: bool) -> dict[str, list[float]]:
    """{way: [5th percentile, median, 95th percentile]} in microseconds."""
    words = [str(program), str(ranks), str(size), str(iterations)]
    if mpi:
        words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *words]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    row: dict[str, list[float]] = json.loads(said)
    return row


def shown(way: str, ranks: int, mpi: bool) -> bool:
    return (way != "mpi" or mpi) and (way != "ping_pong" or ranks == 2)


def cell(times: Sequence[float]) -> str:
    low, median, high = times
    return f"{median:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
