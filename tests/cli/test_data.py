"""`phalanx data pack` says what it did, refuses in one line, and docs/data.md is true from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.test_pages import BLOCK, DOCS, commands, run

from phalanx.cli import main


def test_a_pack_tells_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text")
    assert main(["data", "pack", "a.txt", "--out", "out"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    *lines, speed = told.out.splitlines()
    assert lines == [
        "1 document, 9 bytes of text",
        "10 tokens (uint8) of a vocabulary of 256",
        "token folder: out",
    ]
    assert re.fullmatch(r"\d+\.\d s, \d+\.\d MB/s", speed)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["pack", "--out", "out"], "phalanx: name what to pack: text files, .jsonl, .parquet, or folders of them"),
        (["pack", "a.txt", "--out", "a.txt"], "phalanx: a.txt is there already; --overwrite replaces it"),
        (["pack", "a.txt", "--out", "a.txt", "--overwrite"], "phalanx: a.txt is no token folder, so it is not replaced"),
        (["pack", "missing", "--out", "out"], "phalanx: cannot read missing: No such file or directory"),
        (
            ["pack", "a.txt", "--out", "out", "--tokenizer", "gpt2"],
            "phalanx: there is no tokenizer gpt2: --tokenizer is bytes, ",
        ),
        (["pack", "a.txt", "--out", "a.txt/out"], "phalanx: cannot write beside a.txt/out: "),
        (["pakc"], "phalanx: data has no command 'pakc'; did you mean 'pack'?"),
    ],
)
def test_a_mistake_is_one_line(
    args: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text")
    assert main(["data", *args]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(told)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_the_page_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python as one session, its commands in between."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "data"}
    blocks = BLOCK.findall((DOCS / "data.md").read_text())
    assert len(blocks) >= 8
    for at, (language, text) in enumerate(blocks):
        if language == "python":
            exec(compile(text, "data.md", "exec"), scope)
            said = blocks[at + 1][1] if at + 1 < len(blocks) and blocks[at + 1][0] == "text" else ""
            assert capsys.readouterr().out == said
        for command, said in commands(text) if not language else ():
            run(command, said, capsys)
