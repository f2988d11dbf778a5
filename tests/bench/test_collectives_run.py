"""Real processes: `phalanx bench collectives` as a person runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


def collectives(*args: str) -> list[list[str]]:
    """The fields of every row."""
    command = [sys.executable, "-m", "phalanx", "bench", "collectives", "-n", "3", "-w", "1", *args]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [row.split() for row in ended.stdout.splitlines() if row and not row.startswith("#")]


def test_two_ranks_over_gloo(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    ops = ["all_reduce", "reduce_scatter", "all_to_all", "scatter", "sendrecv"]
    rows = collectives(
        "--ranks", "2", "--backends", "gloo", "-b", "64", "-e", "256", "--op", ",".join(ops), "--json", str(path)
    )
    assert [(row[0], row[-2], row[-1]) for row in rows] == [
        (size, op, backend) for op in ops for size in ("64", "256") for backend in ("gloo", "gloo(A/A)")
    ]
    written = json.loads(path.read_text())
    assert [device["rank"] for device in written["config"]["devices"]] == [0, 1]
    assert written["out_of_bounds"] == {"count": 0, "okay": "true"} and written["refused"] == []
    for result, row in zip(written["results"], rows, strict=True):
        assert result["out_of_place"]["nwrong"] == 0 and str(result["size"]) == row[0]
        ranks = result["out_of_place_per_iter"]["per_process_max_times_us"]
        assert result["out_of_place_per_iter"]["times_us"] == [max(both) for both in zip(*ranks, strict=True)]
        assert len(ranks) == 2 and all(time > 0 for rank in ranks for time in rank)
        busbw = result["size"] / result["out_of_place"]["time"] / 1e3
        factor = {"all_reduce": 1.0, "sendrecv": 1.0}.get(result["op"], 0.5)
        assert result["out_of_place"]["bus_bw"] == pytest.approx(busbw * factor, rel=1e-12)


@pytest.mark.nightly
def test_groups_of_a_mesh(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    rows = collectives(
        "--mesh", "dp=2,tp=2", "--axis", "dp", "--backends", "gloo", "--op", "all", "-b", "64", "-e", "64", "-r", "1",
        "-d", "bfloat16", "--redop", "avg", "--cache", "hot,cold", "--json", str(path),
    )  # fmt: skip
    assert len(rows) == 9 * 2 * 2 and all(row[8] == "0" for row in rows)
    devices = json.loads(path.read_text())["config"]["devices"]
    assert [device["group"] for device in devices] == [0, 1, 0, 1]


@pytest.mark.nightly
@pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None, reason="needs Open MPI and mpi4py"
)
@pytest.mark.parametrize("dtype", ["float", "half"])
def test_mpi_beside_gloo(dtype: str) -> None:
    rows = collectives("--ranks", "2", "--backends", "mpi,gloo", "--op", "all", "-b", "64", "-e", "64", "-r", "1", "-d", dtype)
    assert all(row[8] == "0" for row in rows)
    assert all(row[12] in ("0", "N/A") for row in rows)
    # MPI has no arithmetic on half: all_reduce, reduce_scatter and reduce are Gloo's alone
    assert sum(row[-1] == "mpi" for row in rows) == (9 if dtype == "float" else 6)
