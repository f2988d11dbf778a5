"""The picture of a step: character by character as text, and what an SVG and a page hold."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from phalanx.event import Event
from phalanx.mesh import Mesh
from phalanx.schedule import build
from phalanx.schedule.draw import Picture, draw, html, picture, svg, text
from phalanx.schedule.draw.html import SCRIPT
from phalanx.schedule.draw.picture import Block, busiest, joined
from phalanx.schedule.draw.svg import scaled, thinned, ticks
from phalanx.schedule.pipeline import SCHEDULES, compute_order
from phalanx.schedule.simulate import Costs, simulate
from phalanx.schedule.study import Prices, Study, study

from .toys import toy

# 3 stages, 4 microbatches: 3 x (4 + 3 - 1) = 18 forwards of 4 columns each, after a label of 5.
WIDTH = 5 + 18 * 4 + 1
TEXTBOOK = [
    "F0- F1- F2- ................B0----- F3- B1----- ....B2----- ....B3----- ",
    "....F0- F1- ........B0----- F2- B1----- F3- B2----- ....B3----- ........",
    "........F0- B0----- F1- B1----- F2- B2----- F3- B3----- ................",
]


def test_schedule_is_the_textbook_picture() -> None:
    shown = draw(build(toy(3), "1f1b", 3, 4), WIDTH)
    assert shown.splitlines() == [f"pp {r} {row}" for r, row in enumerate(TEXTBOOK)] + ["     0" + "18 forwards".rjust(71)]


def test_simulation_is_drawn_in_the_same_picture() -> None:
    view = toy(3, dp=2)
    ends = {(kind, k): 0.0 if k in (0, view.last) else cost for (kind, k), cost in Costs.units(view).seconds.items()}
    rows = draw(simulate(build(view, "1f1b", 3, 4), view, Costs(ends)), WIDTH + 2).splitlines()
    # Rows are named by the first rank of each pp coordinate.
    assert rows == [f"rank {2 * r} {row}" for r, row in enumerate(TEXTBOOK)] + [" " * 7 + "0" + "18 s".rjust(71)]


def test_colour_changes_no_character() -> None:
    schedule = build(toy(2), "gpipe", 2, 2)
    coloured = draw(schedule, 60, colour=True)
    assert "\x1b[" in coloured and re.sub(r"\x1b\[[\d;]+m", "", coloured) == draw(schedule, 60)


def test_narrow_and_empty_pictures() -> None:
    narrow = draw(build(toy(2), "1f1b", 2, 64), 40)
    assert max(map(len, narrow.splitlines())) <= 40 and set("FB") <= set(narrow)
    assert draw([]) == ""
    assert draw([Event(0, "reduce:dp", "REDUCE0", 0.0, 1.0)]) == ""


def test_a_column_of_many_blocks_shows_what_takes_most_of_it() -> None:
    blocks = [Block("F", 0, 0, j, 0, j, j + 0.6) for j in range(4)] + [Block("B", 0, 0, j, 1, 4 + j, 4.4 + j) for j in range(4)]
    assert busiest(blocks, 8.0, 2) == [("F", 0), None]  # 60% and 40% of a column
    assert busiest(blocks, 8.0, 1) == [("F", 0)]  # 30% and 20%
    assert text(picture([Event(0, "compute", f"F0.{j}", j * 1.0, j + 1.0, microbatch=j) for j in range(64)]), 12).startswith(
        "rank 0 FFFF\n"
    )


def test_neighbouring_segments_are_one_block_and_other_stages_are_not() -> None:
    f = [Block("F", k, k, 0, 0, k, k + 1.0, 5) for k in range(2)]
    assert joined(f) == [Block("F", 0, 1, 0, 0, 0, 2.0, 10)]
    later = Block("F", 1, 1, 0, 0, 1.5, 2.0)
    assert joined([f[0], later]) == [f[0], later] and len(joined([f[0], later], gap=0.5)) == 1
    # The turn of a V: one microbatch in two stages of one rank, without a pause.
    rows = picture_of(named("zb-v", 2, 4)).rows
    assert [(b.label, b.first) for b in rows[1].compute[:2]] == [("F0", 1), ("f0", 2)]


def named(name: str, pp: int, microbatches: int, message: float = 0.0) -> Study:
    return study(compute_order(name, pp, microbatches), microbatches, Prices(message=message), name)


def picture_of(found: Study, title: str = "") -> Picture:
    return picture(
        found.events, title=title, unit="units", schedule=found.schedule, mesh=found.view.mesh, weights=found.weights
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_line_of_activations_peaks_where_the_proof_says(name: str) -> None:
    found = named(name, 4, 8)
    assert [row.peak for row in picture_of(found).rows] == pytest.approx(found.peak_activations, abs=1e-9)  # sums of halves
    assert all(row.memory[-1][1] == 0 for row in picture_of(found).rows)


def test_messages_go_from_the_sender_to_the_receiver() -> None:
    found = named("1f1b", 3, 2, message=0.5)
    flows = picture_of(found).flows
    assert len(flows) == sum(found.sent) == 2 * 2 * 2
    first = next(f for f in flows if (f.direction, f.segment, f.microbatch) == ("F", 0, 0))
    assert (first.source, first.target, first.start, first.end, first.bytes) == (0, 1, 1.0, 1.5, 1)
    back = next(f for f in flows if (f.direction, f.segment, f.microbatch) == ("B", 2, 0))
    assert (back.source, back.target, back.start, back.end) == (2, 1, 6.0, 6.5)  # after 3 forwards, 2 messages, one backward


def test_messages_stay_among_ranks_of_equal_other_coordinates() -> None:
    mesh = Mesh(pp=2, dp=2)
    ends = [(0, "SEND_F0.0", 0.0), (1, "SEND_F0.0", 1.0), (2, "RECV_F0.0", 0.0), (3, "RECV_F0.0", 0.0)]
    events = [Event(rank, "pp:0>1:F", name, at, at + 2.0, microbatch=0) for rank, name, at in ends]
    events += [Event(rank, "compute", "F0.0", 3.0, 4.0, microbatch=0) for rank in range(4)]
    assert [(flow.source, flow.target, flow.start) for flow in picture(events, mesh=mesh).flows] == [(0, 2, 0.0), (1, 3, 1.0)]


def test_svg_has_a_block_for_each_action_with_its_time() -> None:
    found = named("1f1b", 2, 3, message=0.1)
    root = ElementTree.fromstring(svg([picture_of(found, "a & <b>")]))
    said = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(said) == 2 * 2 * 3 and said[0] == "F0.0: forward, 0 to 1 units"
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a & <b>", "rank 1", "units", "F: forward", "line: activations held", "peak 2"} <= set(words)
    with_lanes = ElementTree.fromstring(svg([picture_of(found)], lanes=True))
    assert sum("bytes" in (t.text or "") for t in with_lanes.iter("{http://www.w3.org/2000/svg}title")) == 2 * sum(found.sent)
    assert "0→1 F" in [each.text for each in with_lanes.iter("{http://www.w3.org/2000/svg}text")]


def test_a_picture_of_many_microbatches_is_not_larger_than_its_pixels() -> None:
    def size(microbatches: int) -> int:
        work = enumerate((kind, j) for kind in "FB" for j in range(microbatches))
        events = [
            Event(rank, "compute", f"{kind}0.{j}", at, at + 1, microbatch=j) for at, (kind, j) in work for rank in range(2)
        ]
        return len(svg([picture(events)]))

    sizes = [size(1000), size(4000)]
    assert sizes[1] < 1.1 * sizes[0] < 100_000


def test_two_pictures_share_one_time_scale() -> None:
    short, long = picture_of(named("zb-h1", 2, 2)), picture_of(named("gpipe", 2, 2))
    assert (short.span, long.span) == (7.0, 9.0)
    row = text(short, 7 + 90 + 1, span=long.span).splitlines()[0]
    assert row.startswith("rank 0 F0------- F1-------") and len(row) == 7 + 90
    assert row.endswith("." * 20)
    backgrounds = re.findall(r'width="([\d.]+)" height="20" fill="#F2F2F2"', svg([short, long]))
    assert [float(width) for width in backgrounds] == pytest.approx([1070 * 7 / 9] * 2 + [1070.0] * 2, abs=0.01)  # two decimals


def test_page_holds_everything_and_fetches_nothing() -> None:
    found = named("interleaved", 2, 2, message=0.25)
    page = html([picture_of(found, "</script><b>")], notes="a < b")
    assert page.count("</script>") == 1 and "&lt;/script&gt;&lt;b&gt;" in page and "a &lt; b" in page
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(", page)
    data = json.loads(page.split("const data = ")[1].split(";\n")[0])
    [panel] = data["panels"]
    assert panel["title"] == "</script><b>" and panel["unit"] == "units" and len(panel["flows"]) == sum(found.sent)
    kind, first, last, microbatch, chunk, start, end, size = panel["rows"][0]["compute"][0]
    assert (data["kinds"][kind][0], first, last, microbatch, chunk, start, end, size) == ("F", 0, 0, 0, 0, 0, 0.5, 0)
    assert sum(len(row["compute"]) for row in panel["rows"]) == 2 * 2 * 2 * 2
    assert [row["peak"] for row in panel["rows"]] == list(found.peak_activations)


@pytest.mark.skipif(shutil.which("node") is None, reason="node reads the page's script")
def test_script_of_the_page_is_javascript(tmp_path: Path) -> None:
    (tmp_path / "script.js").write_text(SCRIPT)
    subprocess.run(["node", "--check", str(tmp_path / "script.js")], check=True, timeout=60)


def test_axis_and_line_keep_what_matters() -> None:
    assert ticks(33.0) == [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    assert [len(ticks(span)) >= 4 for span in (0.7, 1.0, 7.3, 44.0, 1234.0)] == [True] * 5
    assert (scaled(0.25, "s"), scaled(2e-5, "s"), scaled(0.25, "units")) == ((1e3, "ms"), (1e6, "µs"), (1.0, "units"))
    # A rise and fall within one step keeps its height, then shows where it ended.
    assert thinned([(0.0, 1.0), (0.1, 5.0), (0.2, 2.0), (3.0, 0.0)], 1.0) == [(0.0, 5.0), (1.0, 2.0), (3.0, 0.0)]
