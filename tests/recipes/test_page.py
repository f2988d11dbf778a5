"""docs/launching.md prints what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.test_pages import BLOCK, DOCS, commands, run

PAGE = (DOCS / "launching.md").read_text()
SHOWN = [each for _, block in BLOCK.findall(PAGE) for each in commands(block)]


@pytest.mark.parametrize(("command", "said"), SHOWN, ids=[command[:30] for command, _ in SHOWN])
def test_a_recipe_is_the_one_that_is_shown(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(command, said, capsys)


def test_every_launcher_is_shown() -> None:
    from phalanx.cli.launch import RECIPES

    assert {command.split()[2] for command, _ in SHOWN} == set(RECIPES)
