"""Receives moved later: which moves deadlock under which channel model, and how far `defer` goes without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.schedule import build
from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.check import ScheduleError, check
from phalanx.schedule.defer import defer
from phalanx.schedule.pipeline import SCHEDULES
from phalanx.schedule.waits import CHANNELS

from .oracle import judge
from .test_check import late_receives
from .toys import toy

# Whether every RECV may stand directly before what needs it, on host, rank, direction and edge. On an edge that two streams of
# messages share, as in the turn of a V, the receiver then disagrees with the sender about their order.
LATE_IS_SAFE = {
    "gpipe": (True, True, True, True),
    **dict.fromkeys(("1f1b", "zb-h1", "zb-h2"), (False, False, True, True)),
    **dict.fromkeys(("looped-bfs", "interleaved", "dualpipe"), (False, False, False, True)),
    **dict.fromkeys(("zb-v", "v-half"), (False, False, False, False)),
}
LATE_IS_SAFE_ON_TWO = LATE_IS_SAFE | dict.fromkeys(("v-min", "dualpipe-v"), (False, False, False, True))
LATE_IS_SAFE_ON_FOUR = LATE_IS_SAFE | dict.fromkeys(("v-min", "dualpipe-v"), (False, False, False, False))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_late_receives_by_channel_model(pp: int, name: str) -> None:
    view = toy(pp, blocks=2 * pp)
    schedule = build(view, name, pp, 2 * pp + 2)
    late = late_receives(schedule)
    table = LATE_IS_SAFE_ON_TWO if pp == 2 else LATE_IS_SAFE_ON_FOUR
    for channel, safe in zip(CHANNELS, table[name], strict=True):
        check(schedule, view, channel)
        if safe:
            check(late, view, channel)
        else:
            with pytest.raises(ScheduleError, match=r"deadlock|number \d+ is"):
                check(late, view, channel)


def early(schedule: Schedule) -> int:
    """How many actions stand between receives and what needs them, in all."""
    return sum(
        next(j for j, other in enumerate(actions) if i in other.needs) - i - 1
        for actions in schedule.ranks
        for i, action in enumerate(actions)
        if action.kind.startswith("RECV")
    )


def without_receives(actions: tuple[Action, ...]) -> list[str]:
    return [str(action) for action in actions if not action.kind.startswith("RECV")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_deferred_schedules_are_proved_and_later(name: str) -> None:
    view = toy(2, blocks=4)
    schedule = build(view, name, 2, 4)
    late = late_receives(schedule)
    for channel, safe in zip(CHANNELS, LATE_IS_SAFE_ON_TWO[name], strict=True):
        found = defer(schedule, view, channel)
        check(found, view, channel)
        assert early(found) < early(schedule)
        assert [without_receives(a) for a in found.ranks] == [without_receives(a) for a in schedule.ranks]
        if safe and channel != "edge":
            assert early(found) == early(late)
    # One queue per edge never needs a receive earlier than the order of its edge does.
    on_edges = defer(schedule, view, "edge")
    assert early(on_edges) <= 0.2 * early(schedule)


def test_the_executor_agrees_on_deferred_schedules() -> None:
    view = toy(2, blocks=4)
    for name in ("1f1b", "interleaved", "zb-v"):
        schedule = build(view, name, 2, 2)
        for channel in CHANNELS:
            assert judge(defer(schedule, view, channel), view, channel, True, seed=0) is None


def test_what_the_list_itself_gets_wrong_is_not_deferred() -> None:
    view = toy(2)
    schedule = build(view, "1f1b", 2, 2)
    short = replace(schedule, ranks=(schedule.ranks[0][:-1], schedule.ranks[1]))
    with pytest.raises(ScheduleError, match="pp 0 lacks OPT"):
        defer(short, view)
