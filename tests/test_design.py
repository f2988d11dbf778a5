"""docs/design.md is true: its example prints what it shows, its table of moves is the code's, and every file it names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from phalanx.comm.collectives import PAIRS

ROOT = Path(__file__).parents[1]
DESIGN = (ROOT / "docs" / "design.md").read_text()
PATH = re.compile(r"`((?:src/phalanx|comm|derive|schedule|run|train|hf|cli|plan|tests)/[\w/]+(?:\.py)?)`")
PLANNED = {"plan"}
"""Rooms that the page names as missing."""


def test_the_example_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", DESIGN, re.DOTALL)
    assert len(pairs) == DESIGN.count("```python") > 0
    scope: dict[str, Any] = {}
    for code, shown in pairs:
        exec(code, scope)
        printed = capsys.readouterr().out
        assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def test_the_table_of_moves_is_the_one_in_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([\w ]+) \| ([\w ]+) \|", DESIGN, re.MULTILINE)
    assert {row: (forward, backward.replace(" ", "_")) for row, forward, backward in rows} == PAIRS
    assert [row for row, _, _ in rows] == list(PAIRS)


def test_every_file_that_is_named_exists() -> None:
    named = set(PATH.findall(DESIGN))
    assert len(named) > 40
    for path in named:
        full = ROOT / path if path.startswith(("src", "tests")) else ROOT / "src" / "phalanx" / path
        assert full.exists(), path
    for path, name in re.findall(r"`(test_\w+)` in `(tests/[\w/]+\.py)`", DESIGN):
        assert f"def {path}(" in (ROOT / name).read_text(), path
