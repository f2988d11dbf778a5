"""What the lecture's README shows is what its commands print, and as processes they print the same as on threads."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LECTURE = Path(__file__).parents[2] / "examples" / "lecture"
BLOCKS = re.findall(r"```\n\$ python examples/lecture/(\S+)\.py\n(.*?)```", (LECTURE / "README.md").read_text(), re.DOTALL)
# Durations depend on the machine, and the last bits of a sum on its CPU. So may the rank that notices a timeout first.
VARIABLE = re.compile(r"\d+\.\d{3} s|idle +\d+%( +\d+%)*|parameters [0-9a-f]{12}|rank \d waited")


def steady(line: str) -> str:
    return VARIABLE.sub("~", line.rstrip())


def printed(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setattr(sys, "argv", [name])
    importlib.import_module(name.replace("/", ".")).main()
    return {steady(line) for line in capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize(("name", "shown"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_command_prints_what_is_shown(
    name: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {steady(line) for line in shown.splitlines() if line != "..."}
    assert expected
    assert not expected - printed(name, capsys, monkeypatch)


def test_every_script_is_in_the_readme() -> None:
    scripts = {
        str(path.relative_to(LECTURE).with_suffix("")) for path in LECTURE.rglob("*.py") if "__main__" in path.read_text()
    }
    assert {name for name, _ in BLOCKS} == scripts


@pytest.mark.nightly  # four interpreters; on threads the same code is tested above
@pytest.mark.parametrize("name", ["collectives", "data_parallel", "tensor_parallel", "pipeline"])
def test_processes_print_the_same(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", "--ranks", "4", str(LECTURE / f"{name}.py"), "--processes"],
        capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(LECTURE.parents[1] / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    here = {line for line in printed(name, capsys, monkeypatch) if name != "pipeline" or "loss" in line}  # not the pictures
    assert {steady(line) for line in ended.stdout.splitlines()} == here
