"""Rooms import downwards only, models import nothing of ours, and third-party packages are the declared ones."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "phalanx"

PURE = ("mesh", "spec", "event", "hardware", "random")
# Each room may import itself, the pure types and what is listed. `cli` and the package's own __init__ may import everything.
MAY_IMPORT = {
    "comm": (),
    "shm": ("comm",),  # public names of comm/shm and comm/watch
    "watched": ("comm",),
    "rules": (),
    "models": None,  # nothing of ours at all, not even the pure types
    "derive": ("comm",),
    "schedule": ("comm", "derive"),
    "hf": ("comm", "derive"),
    "run": ("comm", "derive", "schedule", "rules", "hf"),
    "train": ("comm", "derive", "schedule", "run", "rules", "models", "hf"),
    "plan": ("comm", "derive", "schedule", "run", "train", "rules", "models", "hf"),
    "observe": ("comm", "derive", "schedule", "run", "train", "rules", "models", "hf"),
    "bench": ("comm", "shm", "derive", "schedule", "run", "train", "plan", "observe", "rules", "models", "hf"),
    "cli": ("comm", "derive", "schedule", "run", "train", "plan", "observe", "bench", "rules", "models", "hf"),
}
# tyro draws the command line, yaml and rich belong to a person's run: none of them below `train`.
THIRD_PARTY = {"torch": None, "numpy": None, "safetensors": None, "transformers": ("hf", "train", "bench")}
THIRD_PARTY |= {"pynvml": ("observe",), "matplotlib": ("bench", "observe"), "mpi4py": ("bench",), "jax": ("bench",)}
THIRD_PARTY |= {"fsspec": ("train",), "filelock": ("train",), "xxhash": ("run", "train"), "wandb": ("train",)}
THIRD_PARTY |= {"tokenizers": ("train", "bench"), "pyarrow": ("train",), "datasets": ("bench",)}
OPTIONAL = {"transformers", "pynvml", "matplotlib", "mpi4py", "jax"}  # extras: imported where they are used
OPTIONAL |= {"wandb", "tokenizers", "pyarrow", "datasets"}
THIRD_PARTY |= {"rich": ("train", "observe", "bench", "cli"), "yaml": ("train", "plan"), "tyro": ("bench", "cli")}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, those inside functions too; `from a import b` is a.b."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides its room"
            found += [(node.lineno, f"{node.module}.{name.name}") for name in node.names]
    return found


def complaints(path: Path, here: str) -> list[str]:
    wrong = []
    for line, name in imports(path):
        first, _, rest = name.partition(".")
        if first == "phalanx":
            there = rest.partition(".")[0]
            allowed = MAY_IMPORT.get(here, ())
            legal = allowed is not None and (there in PURE or there == here or there in allowed)
            # `import phalanx as phx` may mean any room: only those on top, which use the package as a user does.
            legal = legal or (not there and here in ("bench", "plan", "observe"))
            if here not in ("__init__", "__main__", "cli") and not legal:
                wrong.append(f"{path}:{line}: {here} may not import {name}")
        elif first not in sys.stdlib_module_names:
            if first not in THIRD_PARTY:
                wrong.append(f"{path}:{line}: {first} is not one of the packages that we build on")
            elif (rooms := THIRD_PARTY[first]) is not None and here not in rooms:
                wrong.append(f"{path}:{line}: {first} may only be imported in {', '.join(rooms)}")
    return wrong


def test_every_import_goes_downwards() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert files
    unknown = {room(path) for path in files} - set(MAY_IMPORT) - set(PURE) - {"__init__", "__main__"}
    assert not unknown, f"rooms without a rule: {sorted(unknown)}"
    assert not [complaint for path in files for complaint in complaints(path, room(path))]


@pytest.mark.parametrize(
    ("here", "line"),
    [
        ("comm", "from phalanx.derive import derive"),
        ("derive", "import phalanx.schedule.check"),
        ("schedule", "from phalanx.run.step import Step"),
        ("run", "from phalanx.train.config import TrainConfig"),
        ("run", "import phalanx as phx"),
        ("mesh", "from phalanx.comm.world import World"),
        ("models", "from phalanx.mesh import Mesh"),
        ("comm", "import scipy"),
        ("derive", "import transformers"),
        ("run", "def f():\n    import rich"),
    ],
)
def test_the_rule_can_fail(here: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "upward.py"
    path.write_text(line)
    assert len(complaints(path, here)) == 1


def test_third_party_packages_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name.split(">")[0].replace("pyyaml", "yaml") for name in project["dependencies"]}
    assert declared == set(THIRD_PARTY) - OPTIONAL


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from phalanx.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert ended.returncode == 0, ended.stderr
    assert "usage: phalanx" in ended.stdout


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
