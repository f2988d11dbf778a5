"""What the README shows is true: its Python runs, its commands parse, its links exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tyro

from phalanx.cli import COMMANDS, explain, options, train, verify
from phalanx.train.config import TrainConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
COMMAND = re.compile(r"^ +(?:\.venv/bin/)?phalanx ([^#\n]+)", re.MULTILINE)


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(block, scope)
    shown = capsys.readouterr().out
    assert "512" in shown.splitlines()[0]  # tokens: 8 × 64
    assert "REDUCE" in shown
    scope["world"].close()


@pytest.mark.parametrize("line", COMMAND.findall(README))
def test_commands_are_understood(line: str) -> None:
    name, *args = shlex.split(line)
    assert name in COMMANDS
    rooms: dict[str, Any] = {"train": train, "verify": verify, "explain": explain}
    if name in rooms and "--config" not in args:
        room = rooms[name].Options
        parsed = tyro.cli(room, args=args, default=room(run=options.defaults(args, TrainConfig())))
        parsed.run.check()


@pytest.mark.parametrize("text", [README, CONTRIBUTING])
def test_links_and_make_targets_exist(text: str) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / link).exists(), link
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"^ +make ([a-z]+)", text, re.MULTILINE))
    assert used
    assert used <= targets


def test_rooms_that_are_named_exist() -> None:
    for path in set(re.findall(r"`(src/phalanx/[\w./]+|(?:comm|derive|run|train)/[\w]+\.py|tests/[\w./]*)`", CONTRIBUTING)):
        full = path if path.startswith(("src", "tests")) else f"src/phalanx/{path}"
        assert (ROOT / full).exists(), path
