"""What README, guide and the page on communication show is true: Python runs and prints what they say. Commands of all pages parse."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import tyro

from phalanx.cli import COMMANDS, explain, main, options, train, verify
from phalanx.comm import shm
from phalanx.train.config import TrainConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()
COMMUNICATION = (ROOT / "docs" / "communication.md").read_text()
LECTURE = (ROOT / "examples" / "lecture" / "README.md").read_text()
SCHEDULES = (ROOT / "docs" / "schedules.md").read_text()
MEMORY = (ROOT / "docs" / "memory.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
OF_A_RUN = "".join(
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("checkpoints", "data", "faults", "huggingface", "runs")
)
PYTHON = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
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
    blocks = PYTHON.findall(GUIDE)
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


def blocks_of_communication() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(code, what it prints) of the blocks that stand alone, and of the script for two ranks that the others are."""
    blocks = PYTHON.findall(COMMUNICATION)
    start = next(at for at, (code, _) in enumerate(blocks) if "init_process_group" in code)
    return blocks[:start], blocks[start:]


def test_the_page_on_communication_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    alone, _ = blocks_of_communication()
    assert alone
    for code, printed in alone:
        exec(compile(code, "communication.md", "exec"), {})
        alike(capsys.readouterr().out, printed)


@pytest.mark.skipif(shm.available() is not None, reason=str(shm.available()))
def test_its_script_for_two_ranks_prints_what_it_says(tmp_path: Path) -> None:
    _, blocks = blocks_of_communication()
    path = tmp_path / "script.py"
    path.write_text("".join(code for code, _ in blocks))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    around = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    around |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "PHALANX_RUN_DIR": str(tmp_path / "run")}
    with (tmp_path / "err").open("w+") as errors:
        command = [sys.executable, "-W", "ignore", str(path)]
        ranks = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**around, "RANK": str(rank)})
            for rank in range(2)
        ]
        try:
            shown = [process.communicate(timeout=100)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        errors.seek(0)
        assert [process.returncode for process in ranks] == [0, 0], errors.read()
    alike(shown[0].replace(f"{tmp_path}/", ""), "".join(printed for _, printed in blocks))
    assert not shown[1]


@pytest.mark.parametrize(("command", "shown"), re.findall(r"\$ phalanx (.*)\n((?:.*\n)*?)```", COMMUNICATION))
def test_its_commands_print_what_it_shows(
    command: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run of lines between `...` occurs in the output, in this order; how the output is broken into lines does not count."""
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == 0
    rest = " ".join(capsys.readouterr().out.split())
    for run in shown.split("...\n"):
        words = " ".join(run.split())
        assert words in rest, run
        rest = rest.partition(words)[2] if words else rest


@pytest.mark.parametrize(
    "line", dict.fromkeys(COMMAND.findall(README + GUIDE + COMMUNICATION + SCHEDULES + MEMORY + OF_A_RUN + LECTURE))
)
def test_commands_are_understood(line: str) -> None:
    name, *args = shlex.split(line)
    assert name in COMMANDS
    if name in ("bench", "data", "doctor"):
        tyro.cli(importlib.import_module(f"phalanx.cli.{name}.{args.pop(0)}").Options, args=args)
    if name in ("export", "runs", "schedule", "show"):
        tyro.cli(importlib.import_module(f"phalanx.cli.{name}").Options, args=args)
    if name == "launch":  # prints a recipe, which tests/launch looks at
        assert main([name, *args]) == 0
    rooms: dict[str, Any] = {
        "train": (train, TrainConfig),
        "verify": (verify, verify.Verified),
        "explain": (explain, explain.Explained),
    }
    if name in rooms and "--config" not in args:
        room, config = rooms[name]
        parsed = tyro.cli(room.Options, args=args, default=room.Options(run=options.defaults(args, config())))
        parsed.run.check()


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "examples/lecture/README.md"]
    + [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))],
)
def test_links_exist(page: str) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / link).exists(), link


def test_every_page_is_listed() -> None:
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == set(
        re.findall(r"^- \[docs/([\w.]+)\]", README, re.MULTILINE)
    )


@pytest.mark.parametrize("text", [README, CONTRIBUTING])
def test_make_targets_exist(text: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"^ +make ([a-z]+)", text, re.MULTILINE))
    assert used
    assert used <= targets


def test_rooms_that_are_named_exist() -> None:
    for path in set(re.findall(r"`(src/phalanx/[\w./]+|(?:comm|derive|run|train|hf)/[\w/]+\.py|tests/[\w./]*)`", CONTRIBUTING)):
        full = path if path.startswith(("src", "tests")) else f"src/phalanx/{path}"
        assert (ROOT / full).exists(), path


def test_files_that_the_page_on_communication_names_exist() -> None:
    named = set(re.findall(r"`((?:src|tests|examples|comm)/[\w./]+)`", COMMUNICATION))
    scripts = {
        f"examples/lecture/mistakes/stock/{name}" for name in re.findall(r"^\| `(\w+\.py)` \|", COMMUNICATION, re.MULTILINE)
    }
    assert len(named) > 5
    assert scripts == {str(path.relative_to(ROOT)) for path in (ROOT / "examples/lecture/mistakes/stock").glob("*.py")}
    for path in named:
        assert (ROOT / (f"src/phalanx/{path}" if path.startswith("comm") else path)).exists(), path
