"""The picture of a step, character by character."""

from __future__ import annotations

import re

from phalanx.event import Event
from phalanx.schedule import build
from phalanx.schedule.draw import draw
from phalanx.schedule.simulate import Costs, simulate

from .toys import toy

# 3 stages, 4 microbatches: 3 x (4 + 3 - 1) = 18 forwards of 4 columns each, after a label of 5.
WIDTH = 5 + 18 * 4 + 1
TEXTBOOK = [
    "F0- F1- F2- ................B0----- F3- B1----- ....B2----- ....B3----- ",
    "....F0- F1- ........B0----- F2- B1----- F3- B2----- ....B3----- ........",
    "........F0- B0----- F1- B1----- F2- B2----- F3- B3----- ................",
]


def test_schedule_is_the_textbook_picture() -> None:
    text = draw(build(toy(3), "1f1b", 3, 4), WIDTH)
    assert text.splitlines() == [f"pp {r} {row}" for r, row in enumerate(TEXTBOOK)] + ["     0" + "18 forwards".rjust(71)]


def test_simulation_is_drawn_in_the_same_picture() -> None:
    view = toy(3, dp=2)
    ends = {(kind, k): 0.0 if k in (0, view.last) else cost for (kind, k), cost in Costs.units(view).seconds.items()}
    rows = draw(simulate(build(view, "1f1b", 3, 4), view, Costs(ends)), WIDTH + 2).splitlines()
    # Rows are named by the first rank of each pp coordinate.
    assert rows == [f"rank {2 * r} {row}" for r, row in enumerate(TEXTBOOK)] + [" " * 7 + "0" + "18 s".rjust(71)]


def test_colour_changes_no_character() -> None:
    schedule = build(toy(2), "gpipe", 2, 2)
    coloured = draw(schedule, 60, colour=True)
    assert "\x1b[" in coloured and re.sub(r"\x1b\[\d+m", "", coloured) == draw(schedule, 60)


def test_narrow_and_empty_pictures() -> None:
    narrow = draw(build(toy(2), "1f1b", 2, 64), 40)
    assert max(map(len, narrow.splitlines())) <= 40 and set("FB") <= set(narrow)
    assert draw([]) == ""
    assert draw([Event(0, "reduce:dp", "REDUCE0", 0.0, 1.0)]) == ""
