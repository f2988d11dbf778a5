"""The same step where ranks are processes and messages are Gloo's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

EXACT = 1e-13  # as in test_step


def test_a_pipeline_of_processes_is_one_process() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = Path(__file__).parents[2] / "src"
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(source),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ranks.py"))],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for number, rank in enumerate(ranks):
        out, err = rank.communicate(timeout=100)
        assert rank.returncode == 0, err
        said = json.loads(out.splitlines()[-1])
        assert said["rank"] == number and said["error"] < EXACT
        assert "different values of 'blocks.1.up.bias' (1 of" in said["refusal"]
