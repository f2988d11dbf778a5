"""`phalanx schedule`: numbers as in the papers, pictures without torch, and one line for what cannot be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import main
from phalanx.schedule.pipeline import SCHEDULES

SOURCE = Path(__file__).parents[2] / "src"
KEYS = ["bubble_global", "bubble_own", "span", "peak_activations", "volume", "deadlock", "idle"]


def numbers(capsys: pytest.CaptureFixture[str], *args: str) -> Mapping[str, Any]:
    assert main(["schedule", *args, "--json"]) == 0
    shown: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    return shown


# In units of F + I + W of one rank: idle time by the whole span and by a rank's own, activations of the first rank and the last.
@pytest.mark.parametrize(
    ("args", "whole", "own", "first", "last"),
    [
        (["gpipe"], 3.0, 3.0, 8, 8),
        (["1f1b"], 3.0, 3.0, 4, 1),
        (["looped-bfs"], 1.5, 1.5, 8, 8),
        (["interleaved"], 1.5, 1.5, 5.5, 2.5),
        (["interleaved", "--chunks", "4"], 0.75, 0.75, 4.75, 3.25),
        (["zb-h1"], 1.0, 1.0, 4, 4),
        (["zb-h2"], 1.0, 0.0, 7, 7),
        (["zb-v"], 0.5, 0.0, 4, 4),
    ],
)
def test_numbers_are_the_published_ones(
    args: list[str], whole: float, own: float, first: float, last: float, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = numbers(capsys, *args, "--stages", "4", "--microbatches", "8")
    assert list(shown) == KEYS and shown["deadlock"] is None
    assert shown["span"] == pytest.approx(3 * (8 + whole)) and shown["bubble_global"] == pytest.approx(whole / (8 + whole))
    assert shown["bubble_own"] == pytest.approx(own / (8 + own), abs=1e-12)  # a sum of thirds
    assert (shown["peak_activations"][0], shown["peak_activations"][-1]) == (first, last)
    assert sum(shown["idle"].values()) == pytest.approx(1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", name, "--costs", "1,1.3,0.7,0.1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{name}: 4 ranks") and "\x1b" not in shown
    reasons = [float(share) for share in re.findall(r"^  (?:warm-up|drain|waiting|imbalance|barrier) +([\d.]+)%", shown, re.M)]
    assert sum(reasons) == pytest.approx(100, abs=0.26)  # five roundings to a tenth
    assert "messages through all" not in shown and "microbatch through all layers of a rank takes F=1, I=1.3, W=0.7" in shown


def test_messages_are_counted_and_their_time_costs(capsys: pytest.CaptureFixture[str]) -> None:
    plain, slow = numbers(capsys, "1f1b"), numbers(capsys, "1f1b", "--costs", "1,1,1,0.5")
    assert plain["volume"] == slow["volume"] == 2 * 3 * 8 and numbers(capsys, "zb-v")["volume"] == 2 * 2 * 3 * 8
    assert slow["span"] > plain["span"] and slow["idle"]["waiting"] > 0 == plain["idle"]["waiting"]
    assert numbers(capsys, "1f1b", "--costs", "2,2,2")["span"] == 2 * plain["span"]


def test_two_are_compared_on_one_scale(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--compare", "gpipe,zb-h1", "--stages", "2", "--microbatches", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("rank ")]
    assert len(rows) == 4 and len({len(row) for row in rows}) == 1
    assert all(row.endswith(".") for row in rows[2:]), "the shorter step ends earlier"
    table = lines[-2:]
    assert table[0].split()[:6] == ["gpipe", "9", "33.3%", "33.3%", "2", "4"]
    assert table[1].split()[:6] == ["zb-h1", "7", "14.3%", "14.3%", "2", "4"]
    by_name = numbers(capsys, "1f1b", "--compare", "zb-v,interleaved", "--chunks", "4")
    assert list(by_name) == ["1f1b", "zb-v", "interleaved"] and all(list(each) == KEYS for each in by_name.values())


def test_auto_stays_within_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--stages", "2", "--microbatches", "4"]
    free, tight = numbers(capsys, "auto", *args), numbers(capsys, "auto", *args, "--memory", "1")
    assert free["span"] <= numbers(capsys, "zb-v", *args)["span"] and max(tight["peak_activations"]) <= 1
    assert free["span"] < tight["span"]


def test_list_names_all_with_their_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown and row.paper in shown for name, row in SCHEDULES.items()) and "\nauto " in shown


def test_an_order_goes_through_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "order.csv"
    written = numbers(capsys, "zb-v", "--stages", "2", "--microbatches", "4", "--csv", str(path))
    assert numbers(capsys, "--csv", str(path)) == written
    assert main(["schedule", "1f1b", "--csv", str(path)]) == 2, "it would replace the order of a person"
    assert "exists" in capsys.readouterr().err
    assert main(["schedule", "--csv", str(path), "--stages", "4"]) == 2
    assert "--stages is 4, but" in capsys.readouterr().err


def test_a_deadlock_is_told_with_its_circle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dead.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert main(["schedule", "--csv", str(path)]) == 2
    told = capsys.readouterr()
    circle = ["pp 0 B0.0", "pp 1 B1.0", "pp 1 F1.0", "pp 1 B1.1", "pp 1 F1.1", "pp 0 F0.1"]
    assert told.out == "" and told.err == f"phalanx: deadlock: {' waits for '.join([*circle, circle[0]])}\n"
    assert main(["schedule", "--csv", str(path), "--json"]) == 2
    told = capsys.readouterr()
    assert json.loads(told.out) == {**dict.fromkeys(KEYS), "deadlock": circle} and told.err == ""


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "say which schedule"),
        (["1f1"], "there is no schedule '1f1'; did you mean '1f1b'?"),
        (["--compare", "1f1b,gpip"], "did you mean 'gpipe'?"),
        (["1f1b", "--stages", "0"], "pp=0"),
        (["1f1b", "--microbatches", "0"], "microbatches=0"),
        (["dualpipe", "--microbatches", "4"], "at least 2 pp = 8"),
        (["zb-v", "--chunks", "3"], "exactly 2 stages"),
        (["1f1b", "--costs", "1,2"], "costs '1,2' are 2 numbers"),
        (["1f1b", "--costs", "1,x,1"], "are not numbers"),
        (["1f1b", "--costs", "1,-1,1"], "the cost input is -1.0"),
        (["1f1b", "--costs", "0,0,0"], "no time to draw"),
        (["1f1b", "--costs", "nan,1,1"], "the cost forward is nan"),
        (["1f1b", "--draw", "picture.png"], "neither .svg nor .html"),
        (["1f1b", "--memory", "2"], "--memory is for auto"),
        (["auto", "--memory", "0.5"], "infeasible"),
        (["--csv", "no/such.csv"], "no/such.csv"),
        (["1f1b", "--run", "no/such"], "leave out NAME"),
        (["--run", "no/such", "--stages", "8", "--memory", "2"], "leave out --stages, --memory"),
        (["--run", "no/such"], "phalanx train --trace N"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *args]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("phalanx: ") and told.err.count("\n") == 1 and said in told.err


def test_drawings_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.svg", "a.html"):
        assert main(["schedule", "--compare", "1f1b,zb-v", "--lanes", "--draw", str(tmp_path / name)]) == 0
        assert f"drawn in {tmp_path / name}" in capsys.readouterr().out
        page = (tmp_path / name).read_text(encoding="utf-8")
        assert "1f1b: 4 ranks" in page and "zb-v: 4 ranks with 2 stages each" in page and "units" in page


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_is_for_terminals(
    environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["schedule", "1f1b"]) == 0
    assert ("\x1b[" in capsys.readouterr().out) == coloured


def test_it_does_not_wait_for_torch() -> None:
    code = "import sys; from phalanx.cli import main; main(['schedule', 'zb-v']); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("zb-v: 4 ranks with 2 stages each, 8 microbatches")
