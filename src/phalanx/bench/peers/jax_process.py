"""The other end of in_jax: starts it with the weights and batch of a shape, and has it take a step for each call."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.bench.peers.frameworks import llama
from phalanx.bench.peers.jobs import LEARNING_RATE, WEIGHT_DECAY, Shape


def check_jax() -> None:
    """Raise ValueError if there is no JAX."""
    if importlib.util.find_spec("jax") is None:
        raise ValueError("--with-jax needs JAX, which is not installed: pip install jax")


@contextmanager
def jax_step(shape: Shape, axis: str, devices: int) -> Iterator[Callable[[], float]]:
    """A training step over `devices` host devices of one process; it returns the loss of the whole batch.

    Raises RuntimeError, with what it said, if the process ends.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx_jax_") as name:
        folder = Path(name)
        arrays: dict[str, Any] = {name: x.numpy() for name, x in llama(shape).state_dict().items()}
        np.savez(folder / "weights.npz", **arrays)
        arrays = {name: x.numpy().astype(np.int32) for name, x in shape.example().items()}
        np.savez(folder / "batch.npz", **arrays)
        settings = {**asdict(shape.model), "lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
        (folder / "settings.json").write_text(json.dumps(settings))
        flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.bench.peers.in_jax", str(folder), axis],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "said").open("w"),
            text=True,
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        asks, answers = process.stdin, process.stdout

        def answer() -> object:
            if not (line := answers.readline()):
                raise RuntimeError(f"the process of JAX ended:\n{(folder / 'said').read_text()[-2000:]}")
            return json.loads(line)

        def step() -> float:
            asks.write("step\n")
            asks.flush()
            found = answer()
            assert isinstance(found, list)
            return float(found[0])

        try:
            found = answer()
            assert isinstance(found, dict)
            assert found["devices"] == devices, f"JAX has {found['devices']} devices, not {devices}"
            yield step
        finally:
            asks.close()
            process.wait()
            answers.close()
