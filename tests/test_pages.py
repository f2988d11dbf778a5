"""Pages of docs are true: each runs from top to bottom and prints what it shows; formulas are the code's; what is named exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.test_readme import alike

from phalanx.cli import main
from phalanx.schedule.pipeline import SCHEDULES, compute_order
from phalanx.schedule.pipeline.bubbles import RankTimes, idle, peak
from phalanx.schedule.study import study

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SESSIONS = ("schedules", "memory", "checkpoints", "runs", "faults", "huggingface")
"""Each is one session of Python and commands."""
SLOW = "--model llama-8b"
"""A command that takes some ten seconds runs nightly, by itself."""


def commands(block: str) -> Iterator[tuple[str, str]]:
    """(command, what is shown below it) of a block whose commands stand behind `$ `."""
    for part in block.split("$ ")[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def assert_shown(shown: str, said: str) -> None:
    """Each run of lines between `...` occurs in what was printed, in this order; how it is broken into lines does not count."""
    rest = " ".join(shown.split())
    for run in said.split("...\n"):
        words = " ".join(run.split())
        assert words in rest, f"{run}\nis not in\n{shown}"
        rest = rest.partition(words)[2] if words else rest


def run(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command of ours; or `cat`, which makes the file that it shows unless it is there."""
    name, *args = shlex.split(command)
    if name == "cat":
        path = Path(args[0])
        if not path.exists():
            path.write_text(said)
        assert path.read_text() == said
        return
    assert name == "phalanx"
    assert main(args) == (2 if said.startswith("phalanx: ") else 0)
    assert_shown("".join(capsys.readouterr()), said)


@pytest.mark.filterwarnings("ignore:replicated, since no name matches")
@pytest.mark.parametrize("page", SESSIONS)
def test_a_page_prints_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python as one session; numbers with a decimal point may be those of another machine, to 1e-3."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": page}
    blocks = BLOCK.findall((DOCS / f"{page}.md").read_text())
    assert sum(language == "python" for language, _ in blocks) >= 5
    for at, (language, text) in enumerate(blocks):
        if language == "python":
            exec(compile(text, f"{page}.md", "exec"), scope)
            said = blocks[at + 1][1] if at + 1 < len(blocks) and blocks[at + 1][0] == "text" else ""
            alike(capsys.readouterr().out, said)
        for command, said in commands(text) if not language else ():
            if SLOW not in command:
                run(command, said, capsys)


@pytest.mark.nightly
def test_what_takes_longer_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    every = [block for page in SESSIONS for _, block in BLOCK.findall((DOCS / f"{page}.md").read_text())]
    slow = [each for block in every for each in commands(block) if SLOW in each[0]]
    assert slow
    for command, said in slow:
        run(command, said, capsys)


@pytest.mark.parametrize("times", [RankTimes(1, 1, 1), RankTimes(1, 1.25, 0.75)])
@pytest.mark.parametrize("p", [4, 6])
def test_the_table_of_schedules_has_the_formulas_of_the_code(p: int, times: RankTimes) -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| `(.+?)`( \*)? \| `(.+?)`(?: \*)? \| `(.+?)` \| `(.+?)` \|", page("schedules"), re.MULTILINE
    )
    assert [name for name, *_ in rows] == list(SCHEDULES)
    for name, whole, only_equal, own, activations, messages in rows:
        chunks, m = (3 if SCHEDULES[name].any_chunks else None), 4 * p
        letters = {"p": p, "m": m, "v": chunks, **dict(zip("FIW", times, strict=True))}
        if not (only_equal and len(set(times)) > 1):
            assert eval(whole, letters) == pytest.approx(idle(name, p, m, times, chunks)), (name, whole)
            assert eval(own, letters) == pytest.approx(idle(name, p, m, times, chunks, "rank")), (name, own)
        held = max(peak(name, p, m, rank, chunks) for rank in range(p))
        assert eval(activations, letters) == pytest.approx(held), (name, activations)
        assert eval(messages, letters) == sum(study(compute_order(name, p, m, chunks), m).sent), (name, messages)


@pytest.mark.parametrize(
    ("precision", "kinds"), [("float32", "values gradients moments"), ("bf16", "values master gradients moments")]
)
def test_the_tables_of_memory_say_what_the_page_counts(precision: str, kinds: str) -> None:
    """What is counted stands in the page and was printed by its code; it is of four ranks."""
    columns = kinds.split()
    cells = " \\| ".join(["`(.+?)`"] * (len(columns) + 1))
    rows = re.findall(rf"^\| ([0-3]) \| {cells} \|", page("memory"), re.MULTILINE)
    rows = [row for row in rows if len(row) == len(columns) + 2]
    rows = rows[:4] if precision == "float32" else rows[-4:]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for zero, *formulas, together in rows:
        values = [eval(formula, {"n": 4}) for formula in formulas]
        assert sum(values) == eval(together, {"n": 4})
        said = " ".join(f"{kind} {float(value)}" for kind, value in zip(columns, values, strict=True))
        assert f"\n{precision} {zero} {said}\n" in page("memory")


@pytest.mark.parametrize("name", [*SESSIONS, "guide", "data", "launching"])
def test_what_is_named_exists(name: str) -> None:
    """Links with their headings, files, and the modules that are to be run."""
    for link, anchor in re.findall(r"\]\(([\w./]+\.md)#([\w-]+)\)", page(name)):
        assert anchor in headings(DOCS / link), (link, anchor)
    for path in re.findall(r"`((?:src/phalanx|tests)/[\w./]+)`", page(name)):
        assert (DOCS.parent / path).exists(), path
    for module in re.findall(r"python -m (phalanx[\w.]+)", page(name)):
        assert importlib.util.find_spec(module), module


def headings(path: Path) -> set[str]:
    """As GitHub links to them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()
