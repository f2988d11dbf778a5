"""The proof of a schedule, against an executor that knows nothing of graphs, and against deadlocks that are known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from phalanx.mesh import Mesh
from phalanx.schedule import build
from phalanx.schedule.actions import Action, Schedule, Storage
from phalanx.schedule.check import ScheduleError, check
from phalanx.schedule.lower import lower
from phalanx.schedule.pipeline import SCHEDULES, Order, Step
from phalanx.schedule.values import Values, link
from phalanx.schedule.view import Gathered, Message, SegmentView, View, Weight
from phalanx.schedule.waits import CHANNELS

from .oracle import judge
from .toys import toy

MODELS = [(channel, rendezvous) for channel in CHANNELS for rendezvous in (True, False)]


def with_list(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    return replace(schedule, ranks=tuple(tuple(actions) if r == rank else old for r, old in enumerate(schedule.ranks)))


def reorder(actions: tuple[Action, ...], order: list[int]) -> list[Action]:
    """Actions at the old indices `order`, needs following them. An action that is left out is no longer needed; of one that is
    listed twice, the first is."""
    new = {old: order.index(old) for old in set(order)}
    return [replace(actions[old], needs=tuple(new[need] for need in actions[old].needs if need in new)) for old in order]


def moved(actions: tuple[Action, ...], source: int, target: int) -> list[Action]:
    order = list(range(len(actions)))
    order.insert(target, order.pop(source))
    return reorder(actions, order)


def mutate(schedule: Schedule, rng: random.Random) -> Schedule:
    rank = rng.randrange(len(schedule.ranks))
    actions = schedule.ranks[rank]
    order = list(range(len(actions)))
    i, j = rng.sample(order, 2)
    match rng.choice(["swap", "neighbours", "move", "drop", "twice", "need", "release", "early", "late"]):
        case "swap":
            order[i], order[j] = order[j], order[i]
        case "neighbours":
            i = min(i, len(order) - 2)
            order[i], order[i + 1] = order[i + 1], order[i]
        case "move":
            order.insert(j, order.pop(i))
        case "drop":
            del order[i]
        case "twice":
            order.insert(j, i)
        case "need":
            able = [k for k in order if actions[k].needs]
            k = rng.choice(able)
            lost = rng.choice(actions[k].needs)
            changed = replace(actions[k], needs=tuple(need for need in actions[k].needs if need != lost))
            return with_list(schedule, rank, [changed if index == k else a for index, a in enumerate(actions)])
        case "release":
            k = rng.choice([k for k in order if actions[k].releases])
            name, *rest = actions[k].releases
            without = [replace(a, releases=tuple(rest)) if index == k else a for index, a in enumerate(actions)]
            without[i] = replace(without[i], releases=(*without[i].releases, name))
            return with_list(schedule, rank, without)
        case "early" | "late" as when:
            # A message some places earlier or later is what a schedule's author would try.
            messages = [k for k in order if actions[k].peer is not None]
            if not messages:
                return schedule
            k = rng.choice(messages)
            target = k + rng.randint(1, 4) * (1 if when == "late" else -1)
            order.insert(min(max(target, 0), len(order)), order.pop(k))
    return with_list(schedule, rank, reorder(actions, order))


def gathered(schedule: Schedule, view: View) -> Schedule:
    """Sharded storage by hand: a GATHER before each forward or backward of a segment, FREE after it."""
    values = Values.of(view, schedule.chains, schedule.microbatches)
    lists = []
    for at, actions in enumerate(schedule.ranks):
        wide: list[Action] = []
        for action in actions:
            if action.kind in ("F", "B"):
                wide += [Action("GATHER", action.segment, lane="gather:dp"), action, Action("FREE", action.segment)]
            else:
                wide.append(action)
        lists.append(link(values, at, wide))
    return replace(schedule, ranks=tuple(lists))


def split(name: str, pp: int, m: int) -> Order:
    """A schedule with I and W apart: each W directly after its I, the last ones at the end."""
    assert name == "zero bubble"
    ranks = []
    for r in range(pp):
        warm = min(m, pp - 1 - r)
        steps = [Step("F", r, j) for j in range(warm)]
        for j in range(m):
            if j + warm < m:
                steps.append(Step("F", r, j + warm))
            steps.append(Step("I", r, j))
            if j >= r:
                steps.append(Step("W", r, j - r))
        steps += [Step("W", r, j) for j in range(max(m - r, 0), m)]
        ranks.append(tuple(steps))
    return Order(tuple(range(pp)), tuple(ranks))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("grad", [True, False])
def test_every_built_schedule_is_proved_and_runs(name: str, tied: bool, grad: bool) -> None:
    even = SCHEDULES[name].copies == 2
    for pp, m in ((2, 4), (4, 8)) if even else ((1, 3), (2, 1), (2, 4), (3, 2), (4, 2)):
        view = toy(pp, blocks=2 * pp + 1, dp=2, tied=tied, grad=grad)
        schedule = build(view, name, pp, m)
        for channel, rendezvous in MODELS:
            check(schedule, view, channel, rendezvous)
    view = toy(2, blocks=4, dp=2, tied=tied, grad=grad)
    assert judge(build(view, name, 2, 4 if even else 1), view, "host", True, seed=0) is None


def variants() -> list[tuple[Schedule, View]]:
    found = []
    for name, pp, m, tied, grad in (("1f1b", 2, 2, True, True), ("gpipe", 2, 2, False, False), ("1f1b", 3, 3, True, True)):
        view = toy(pp, dp=2, tied=tied, grad=grad)
        found.append((build(view, name, pp, m), view))
    found.append((gathered(*found[0]), found[0][1]))
    view = toy(2, dp=2)
    found.append((lower(view, split("zero bubble", 2, 3), ((0, 1), (2, 3)), 3, "zero bubble"), view))
    found.append((build(toy(1, blocks=1, dp=2), "1f1b", 1, 2), toy(1, blocks=1, dp=2)))
    return found


def late_receives(schedule: Schedule) -> Schedule:
    """Each RECV directly before the action that uses it: the obvious order, and the wrong one."""
    for rank in range(len(schedule.ranks)):
        for name in [str(action) for action in schedule.ranks[rank] if action.kind.startswith("RECV")]:
            actions = schedule.ranks[rank]
            at = next(i for i, action in enumerate(actions) if str(action) == name)
            user = next(i for i, action in enumerate(actions) if at in action.needs)
            schedule = with_list(schedule, rank, moved(actions, at, user - 1))
    return schedule


def test_both_send_first_is_found_and_its_cycle_named() -> None:
    view = toy(2)
    schedule = late_receives(build(view, "1f1b", 2, 2))
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        check(schedule, view, "host", rendezvous=True)
    # Rank 0 sends its second forward while rank 1 sends its first gradient, and neither receives.
    assert set(caught.value.cycle) == {"pp 0 SEND_F1.1", "pp 0 RECV_B2.0", "pp 1 SEND_B2.0", "pp 1 RECV_F1.1"}
    assert "pp 0 SEND_F1.1 waits for pp 1 RECV_F1.1" in str(caught.value)
    check(schedule, view, "host", rendezvous=False)  # buffered sends hide it, as small messages do in practice
    check(build(view, "1f1b", 2, 2), view, "host", rendezvous=True)


def test_a_batch_lets_both_send_first() -> None:
    """Why exchanges are issued as one: each rank's send and receive then wait for the other rank's, not for each other."""
    view = toy(2)
    schedule = late_receives(build(view, "1f1b", 2, 2))
    exchanges = (("SEND_F1.1", "RECV_B2.0"), ("SEND_B2.0", "RECV_F1.1"))
    batches = {at: [run_of(schedule, at, names)] for at, names in enumerate(exchanges)}
    check(schedule, view, "host", batches=batches)
    assert judge(schedule, view, "host", True, seed=0, batches=batches) is None
    for half in (0, 1):  # one rank that can do both at once is enough
        check(schedule, view, "host", batches={half: batches[half]})
    with pytest.raises(ScheduleError, match="deadlock"):
        check(schedule, view, "host")


def test_a_batch_completes_as_a_whole() -> None:
    """Rank 1 posts both receives as one and so has neither before the second is sent, after the first's backward."""
    view = toy(2)
    turns = tuple(tuple(Step(kind, s, j) for j in range(2) for kind in ("F", "B")) for s in range(2))
    schedule = lower(view, Order((0, 1), turns), ((0, 1), (2, 3)), 2, "in turn")
    names = [str(action) for action in schedule.ranks[1]]
    posted = with_list(schedule, 1, moved(schedule.ranks[1], names.index("RECV_F1.1"), names.index("RECV_F1.0") + 1))
    for channel in ("direction", "edge"):
        check(posted, view, channel)
    together = {1: [run_of(posted, 1, ("RECV_F1.0", "RECV_F1.1"))]}
    for rendezvous in (True, False):
        with pytest.raises(ScheduleError, match="deadlock") as caught:
            check(posted, view, "edge", rendezvous, together)
        assert "pp 1 RECV_F1.0" in caught.value.cycle and "pp 0 SEND_F1.1" in caught.value.cycle
        assert "deadlock" in (judge(posted, view, "edge", rendezvous, seed=0, batches=together) or "")


def run_of(schedule: Schedule, at: int, names: tuple[str, ...]) -> tuple[int, ...]:
    listed = [str(action) for action in schedule.ranks[at]]
    return tuple(listed.index(name) for name in names)


@pytest.mark.parametrize("members", [(0, 2), (3, 2), (3, 3), (-1, 0), (3, 4)])
def test_a_batch_is_a_run_of_communications(members: tuple[int, ...]) -> None:
    view = toy(2)
    schedule = build(view, "1f1b", 2, 2)
    assert [a.communicates for a in schedule.ranks[0][:5]] == [True, False, False, True, False]
    with pytest.raises(ValueError, match=r"batch \(.*\) of pp 0 is not a run of neighbouring communications"):
        check(schedule, view, batches={0: [members]})


def test_tied_reduce_right_after_its_backward_deadlocks() -> None:
    """Why the sum over hosts waits for the last host: the last stage would block before it has sent its gradients."""
    view = toy(2, tied=True)
    schedule = build(view, "1f1b", 2, 2)
    actions = schedule.ranks[1]
    reduce = next(i for i, a in enumerate(actions) if str(a) == "REDUCE3")
    backward = next(i for i, a in enumerate(actions) if str(a) == "B3.1")
    hasty = with_list(schedule, 1, moved(actions, reduce, backward + 1))
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        check(hasty, view, "rank")
    assert "pp 1 REDUCE3" in caught.value.cycle and "pp 0 REDUCE0" in caught.value.cycle
    check(schedule, view, "rank")


def test_any_set_of_tied_parameters_is_safe() -> None:
    rng = random.Random(1)
    for _ in range(60):
        pp = rng.choice([2, 3, 4])
        segments = [list(segment.weights) for segment in toy(pp, blocks=2 * pp, dp=2).segments]
        for name in "zyx":
            for k in sorted(rng.sample(range(len(segments)), rng.randint(2, 4))):
                segments[k].append(Weight(name, 8, ("dp",) if name != "y" else ()))
        base = toy(pp, blocks=2 * pp, dp=2)
        view = replace(base, segments=tuple(replace(s, weights=tuple(w)) for s, w in zip(base.segments, segments, strict=True)))
        schedule = build(view, "1f1b", pp, 2)
        check(schedule, view, "host")
        check(schedule, view, "edge", rendezvous=False)


def test_ends_of_a_cut_must_agree_on_shape_and_dtype() -> None:
    view = toy(2)
    wide = replace(view.segments[2], inputs=(Message("h", (2, 9), "float32", 72),))
    broken = replace(view, segments=(*view.segments[:2], wide, *view.segments[3:]))
    with pytest.raises(ScheduleError, match=r"segments 1 and 2.*\(2, 8\).*\(2, 9\)"):
        check(build(view, "1f1b", 2, 2), broken)


def test_report_counts_what_lives_at_once() -> None:
    view = toy(4)
    report = check(build(view, "1f1b", 4, 8), view)
    # The first and last stage have two segments each (prologue, epilogue); stage r holds min(m, p - r) microbatches.
    assert report.peak_live == (2 * 4, 3, 2, 2 * 1)
    assert report.peak_saved_bytes == (8000, 3000, 2000, 2000)
    gpipe = check(build(view, "gpipe", 4, 8), view)
    assert gpipe.peak_live == (16, 8, 8, 16)
    assert check(build(toy(2), "1f1b", 2, 1), toy(2)).in_flight == (1, 1)


def test_gathered_parameters_are_freed_after_use() -> None:
    view = toy(2, dp=2)
    schedule = gathered(build(view, "1f1b", 2, 2), view)
    check(schedule, view)
    actions = schedule.ranks[0]
    free = next(i for i, a in enumerate(actions) if a.kind == "FREE")
    for lost, complaint in ((free, "gathered already"), (free - 2, "no gathered parameters")):
        without = reorder(actions, [i for i in range(len(actions)) if i != lost])
        with pytest.raises(ScheduleError, match=complaint):
            check(with_list(schedule, 0, without), view)


def renewed(view: View, before: str) -> Schedule:
    """ZeRO 1 and 2 by hand: whole parameters are kept, and renewed by one GATHER for each segment before a named action."""
    schedule = build(view, "1f1b", 1, 2)
    values = Values.of(view, schedule.chains, 2)
    actions = list(schedule.ranks[0])
    at = next((i for i, action in enumerate(actions) if str(action) == before), len(actions))
    gathers = [Action("GATHER", k, lane="gather:dp") for k in range(len(view.segments))]
    return with_list(schedule, 0, list(link(values, 0, actions[:at] + gathers + actions[at:])))


@pytest.mark.parametrize(
    ("before", "complaint"),
    [("F0.0", None), ("", None), ("OPT", "renews parameters that are in use"), ("F0.1", "renews parameters that are in use")],
)
def test_kept_parameters_are_renewed_once_between_update_and_use(before: str, complaint: str | None) -> None:
    view = toy(1, blocks=1, dp=2)
    schedule = renewed(view, before)
    verdict = judge(schedule, view, "edge", True, seed=0)
    if complaint is None:
        check(schedule, view)
        assert verdict is None
        twice = with_list(schedule, 0, [*schedule.ranks[0], Action("GATHER", 0, lane="gather:dp")])
        with pytest.raises(ScheduleError, match=r"GATHER0 gathers what GATHER0 at \d+ has gathered already"):
            check(twice, view)
        return
    assert verdict is not None
    with pytest.raises(ScheduleError, match=complaint):
        check(schedule, view)


def test_a_use_waits_for_the_gather_that_renews() -> None:
    view = toy(1, blocks=1, dp=2)
    schedule = renewed(view, "F0.0")
    hasty = [replace(a, needs=()) if str(a) == "F1.0" else a for a in schedule.ranks[0]]
    with pytest.raises(ScheduleError, match=r"F1\.0 does not wait for GATHER1"):
        check(with_list(schedule, 0, hasty), view)


def test_the_last_gather_is_freed_if_any_is() -> None:
    view = toy(2, dp=2)
    schedule = gathered(build(view, "1f1b", 2, 2), view)
    actions = schedule.ranks[0]
    last = max(i for i, a in enumerate(actions) if a.kind == "FREE")
    with pytest.raises(ScheduleError, match=r"nothing frees the parameters that GATHER0 at \d+ gathered for segment 0"):
        check(with_list(schedule, 0, reorder(actions, [i for i in range(len(actions)) if i != last])), view)


def test_what_is_stored_in_slices_is_gathered() -> None:
    view = toy(1, blocks=1, dp=2)
    slices = Gathered(("w1",), 200, ("dp",))
    sharded = replace(
        view,
        storage=Storage(3, ("dp",)),
        segments=tuple(replace(s, gathers=(slices,)) if k == 1 else s for k, s in enumerate(view.segments)),
    )
    bare = build(view, "1f1b", 1, 2)
    with pytest.raises(ScheduleError, match="pp 0 never gathers the parameters of segment 1, which are stored in slices"):
        check(bare, sharded)
    assert judge(bare, sharded, "edge", True, seed=0) is not None


def test_a_gather_is_for_a_segment_of_its_own_rank() -> None:
    view = toy(2, dp=2)
    schedule = build(view, "1f1b", 2, 2)
    strange = with_list(schedule, 0, [*schedule.ranks[0], Action("GATHER", 3, lane="gather:dp")])
    with pytest.raises(ScheduleError, match="pp 0 lists GATHER3 which is not its to do"):
        check(strange, view)


def test_a_view_without_a_cut_gradient_sends_none_back() -> None:
    segments = (
        SegmentView("a", outputs=(Message("ids", (4,), "int64", 32),)),
        SegmentView(
            "b",
            inputs=(Message("ids", (4,), "int64", 32),),
            outputs=(Message("h", (4,), "float32", 16),),
            output_grads=(Message("h", (4,), "float32", 16),),
        ),
        SegmentView("c", inputs=(Message("h", (4,), "float32", 16),), input_grads=(Message("h", (4,), "float32", 16),)),
    )
    view = View(Mesh(pp=2), segments)
    order = Order((0, 1), ((Step("F", 0, 0), Step("B", 0, 0)), (Step("F", 1, 0), Step("B", 1, 0))))
    schedule = lower(view, order, ((0,), (1, 2)), 1, "by hand")
    check(schedule, view)
    assert not [a for actions in schedule.ranks for a in actions if a.kind in ("SEND_B", "RECV_B", "REDUCE")]


def test_unknown_channel_model() -> None:
    with pytest.raises(ValueError, match=r"'edges'.*host, rank, direction, edge"):
        check(build(toy(2), "1f1b", 2, 1), toy(2), channel="edges")
