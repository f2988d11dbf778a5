"""What a run ran on: versions, revision, machine and command, so that it can be repeated or told apart from another.

Written into the run folder, which people share: no value of a variable or of the command line that could be a secret.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("phalanx", "torch", "numpy", "safetensors", "transformers", "datasets", "tokenizers")
"""Their versions are told as far as this process has imported them."""

PREFIXES = (
    *(
        "OMP_",
        "MKL_",
        "KMP_",
        "GOMP_",
        "OPENBLAS_",
        "NCCL_",
        "GLOO_",
        "UCX_",
        "TORCH",
        "PYTORCH_",
        "CUDA_",
        "CUBLAS_",
        "NVIDIA_",
    ),
    *("SLURM_JOB", "SLURM_N", "SLURM_CPUS", "SLURM_GPUS", "SLURM_TASKS", "OMPI_COMM_WORLD_SIZE", "PHALANX_"),
    *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "LD_PRELOAD"),
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MALLOC_"),
)
"""Beginnings of the names of variables that change what a run does."""

SECRET = re.compile(r"secret|passw|credential|cookie|apikey|(?:^|[_-])(?:auth|key|pat|tokens?)(?:$|[_-])", re.IGNORECASE)
"""In the name of a variable or an option. --tokenizer is none."""


def describe(
    *, argv: Sequence[str], env: Mapping[str, str], mesh: str, launcher: str | None, gpus: Sequence[str] = ()
) -> dict[str, Any]:
    """environment.json of this process. `launcher` is None if no launcher started it, `gpus` are names of devices in use."""
    return {
        "versions": versions(),
        "git": revision(Path.cwd()),
        "command": command_line(argv),
        "folder": str(Path.cwd()),
        "launcher": launcher,
        "mesh": mesh,
        "machine": {
            "host": socket.gethostname(),
            "system": platform.platform(),
            "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "cores_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": _memory_bytes(),
            "gpus": list(gpus),
        },
        "variables": variables(env),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter and are imported. A package that is loaded knows best: 2.13.0+cpu."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        module = sys.modules.get(name)
        if module is None:
            continue
        try:
            found[name] = str(getattr(module, "__version__", None) or metadata.version(name))
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def revision(folder: Path) -> dict[str, Any] | None:
    """{"commit", "is_dirty"} of the git work tree around `folder`; None outside one, or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "is_dirty": None if changes is None else bool(changes.strip())}


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Those that change what a run does, by name; none that is named like a secret, or holds an address with a password."""
    kept = {name: value for name, value in env.items() if name.startswith(PREFIXES) and not SECRET.search(name)}
    return {name: without_password(kept[name]) for name in sorted(kept)}


def command_line(argv: Sequence[str]) -> list[str]:
    """`argv` with the value of every option that is named like a secret taken out, and the password of every address."""
    shown: list[str] = []
    hides_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        is_secret = name.startswith("-") and SECRET.search(name) is not None
        if hides_next and not word.startswith("-"):
            shown.append("…")
        elif is_secret and equals:
            shown.append(f"{name}=…")
        else:
            shown.append(without_password(word))
        hides_next = is_secret and not equals
    return shown


def without_password(text: str) -> str:
    """s3://user:secret@host/x → s3://…@host/x, and what a signed address has behind its question mark."""
    text = re.sub(r"(\w://)[^/@\s]+@", r"\1…@", text)
    return re.sub(r"(\w://[^?\s]*\?)\S+", r"\1…", text)


def _git(folder: Path, *args: str) -> str | None:
    try:
        # A status may want to refresh the index, which would disturb whoever works in the tree.
        command = ["git", "--no-optional-locks", "-C", str(folder), *args]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout if ended.returncode == 0 else None


def _field(path: str, name: str) -> str | None:
    """The first `name: value` of a file of the kernel's; None where there is no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), None)


def _memory_bytes() -> int | None:
    total = _field("/proc/meminfo", "MemTotal")  # as in 16384 kB
    return int(total.split()[0]) * 1024 if total else None
