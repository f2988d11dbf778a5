"""What README and guide show is true: their Python runs and prints what they say, commands parse, links exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tyro

from phalanx.cli import COMMANDS, explain, main, options, train, verify
from phalanx.train.config import TrainConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
COMMAND = re.compile(r"^ +(?:\.venv/bin/)?phalanx ([^#\n]+)", re.MULTILINE)


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(block, scope)
    shown = capsys.readouterr().out
    assert "512" in shown.splitlines()[0]  # tokens: 8 × 64
    assert "REDUCE" in shown
    assert shown.endswith("torch.Size([8, 64, 128])\n")
    scope["world"].close()


@pytest.mark.filterwarnings("ignore:replicated, since no name matches")
def test_the_guide_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Its Python as one session, then `explain`. Losses are float32 of another machine: four digits of seven."""
    scope: dict[str, Any] = {"__name__": "guide"}
    blocks = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", GUIDE, re.DOTALL)
    assert len(blocks) > 5
    for code, printed in blocks:
        exec(compile(code, "guide.md", "exec"), scope)
        alike(capsys.readouterr().out, printed)
    for command, printed in re.findall(r"\$ phalanx (explain .*)\n((?:.*\n)*?)```", GUIDE):
        assert main(shlex.split(command)) == 0
        alike(capsys.readouterr().out, printed)


def alike(shown: str, said: str) -> None:
    """Equal word by word; numbers with a decimal point to 1e-3."""
    words, expected = re.findall(r"[\w.]+|\S", shown), re.findall(r"[\w.]+|\S", said)
    assert len(words) == len(expected), shown
    for word, other in zip(words, expected, strict=True):
        if re.fullmatch(r"\d+\.\d+", other):
            assert float(word) == pytest.approx(float(other), rel=1e-3)
        else:
            assert word == other, shown


@pytest.mark.parametrize("line", COMMAND.findall(README + GUIDE))
def test_commands_are_understood(line: str) -> None:
    name, *args = shlex.split(line)
    assert name in COMMANDS
    rooms: dict[str, Any] = {
        "train": (train, TrainConfig),
        "verify": (verify, verify.Verified),
        "explain": (explain, explain.Explained),
    }
    if name in rooms and "--config" not in args:
        room, config = rooms[name]
        parsed = tyro.cli(room.Options, args=args, default=room.Options(run=options.defaults(args, config())))
        parsed.run.check()


@pytest.mark.parametrize("text", [README, CONTRIBUTING, GUIDE])
def test_links_exist(text: str) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("text", [README, CONTRIBUTING])
def test_make_targets_exist(text: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"^ +make ([a-z]+)", text, re.MULTILINE))
    assert used
    assert used <= targets


def test_rooms_that_are_named_exist() -> None:
    for path in set(re.findall(r"`(src/phalanx/[\w./]+|(?:comm|derive|run|train)/[\w]+\.py|tests/[\w./]*)`", CONTRIBUTING)):
        full = path if path.startswith(("src", "tests")) else f"src/phalanx/{path}"
        assert (ROOT / full).exists(), path
