"""Generated schedules, whole and with planted faults: `check` and the oracle must say the same of every one.

A case is a random placement, a random valid compute order, random shared weights, gathers, deferred receives and batches under a
random channel model. Seeds are the numbers of the cases, so a failure names what to run again.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from phalanx.mesh import Mesh
from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.check import ScheduleError, check
from phalanx.schedule.lower import lower
from phalanx.schedule.pipeline import Order, Step
from phalanx.schedule.values import Values, link
from phalanx.schedule.view import Message, SegmentView, View, Weight
from phalanx.schedule.waits import CHANNELS

from .oracle import judge
from .test_check import moved, reorder, with_list

MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")


@dataclass(frozen=True)
class Case:
    schedule: Schedule
    view: View
    channel: str
    rendezvous: bool
    batches: dict[int, list[tuple[int, ...]]]
    safe: bool
    """Made by rules that must be proved: nothing was deferred or batched."""
    fault: str = "none"
    certain: bool = False
    """The fault is one that no run of a good schedule survives."""


# Whole schedules


def generate(rng: random.Random) -> Case:
    pp, m = rng.choice([1, 2, 2, 2, 3, 3, 4]), rng.randint(1, 3)
    copies = 2 if pp % 2 == 0 and rng.random() < 0.15 else 1
    m = 2 if copies == 2 else m
    chunks = 1 if copies == 2 or pp * m > 6 else rng.choice([1, 1, 2, 3])
    host = placement(rng, pp, chunks)
    stages = pp * chunks
    sizes = [1 + (rng.random() < 0.2) for _ in range(stages)]
    placed = [tuple(range(sum(sizes[:s]), sum(sizes[: s + 1]))) for s in range(stages)]
    view = random_view(rng, pp, sum(sizes))
    host = (*host, *(pp - 1 - at for at in host)) if copies == 2 else host
    schedule = lower(view, random_order(rng, host, m, copies), placed, m, "generated")
    if rng.random() < 0.4:
        schedule = stored(rng, schedule, view)
    safe = True
    if rng.random() < 0.5:
        schedule, safe = deferred(rng, schedule), False
    batches: dict[int, list[tuple[int, ...]]] = {}
    if rng.random() < 0.4:
        batches, safe = random_batches(rng, schedule), False
    return Case(schedule, view, rng.choice(list(CHANNELS)), rng.random() < 0.6, batches, safe)


def placement(rng: random.Random, pp: int, chunks: int) -> tuple[int, ...]:
    loop = tuple(range(pp)) * chunks
    match rng.choice(["loop", "vee", "any"]):
        case "vee":
            return tuple(at if chunk % 2 == 0 else pp - 1 - at for chunk in range(chunks) for at in range(pp))
        case "any":
            return tuple(rng.sample(loop, len(loop)))
    return loop


def random_view(rng: random.Random, pp: int, segments: int) -> View:
    """Cuts of one tensor; the first few may carry no gradient, as after frozen layers."""
    dp = rng.choice([1, 2])
    axes = ("dp",) if dp > 1 else ()
    hidden = (Message("h", (2, 8), "float32", 64),)
    without = rng.choice([0, 0, 0, 1, 2])
    weights: list[list[Weight]] = [
        [Weight(f"w{k}", 100, axes if rng.random() < 0.8 else ())] if rng.random() < 0.8 else [] for k in range(segments)
    ]
    for name in rng.sample(["z", "y", "x"], rng.choice([0, 0, 1, 2])):
        if segments > 1:
            over = axes if rng.random() < 0.7 else ()
            for k in sorted(rng.sample(range(segments), rng.randint(2, min(3, segments)))):
                weights[k].append(Weight(name, 8, over))
    views = []
    for k in range(segments):
        before, after = k > 0, k < segments - 1
        views.append(
            SegmentView(
                f"segment{k}",
                inputs=hidden if before else (),
                outputs=hidden if after else (),
                input_grads=hidden if before and k > without else (),
                output_grads=hidden if after and k >= without else (),
                weights=tuple(weights[k]),
                param_bytes=100,
                saved_bytes=10,
            )
        )
    return View(Mesh(pp=pp, dp=dp), tuple(views), axes)


def random_order(rng: random.Random, host: tuple[int, ...], m: int, copies: int) -> Order:
    """Any order in which the steps can be done one after another, seen from each rank."""
    length = len(host) // copies
    split = rng.choice([0.0, 0.0, 0.5, 1.0])
    eager = rng.choice([0.2, 1.0, 5.0])  # how much a backward is preferred to a forward
    chains = {j: j * copies // m * length for j in range(m)}  # first stage of the copy that a microbatch goes through
    ready = [Step("F", first, j) for j, first in chains.items()]
    ranks: list[list[Step]] = [[] for _ in range(max(host) + 1)]
    divided = {(s, j): rng.random() < split for j, first in chains.items() for s in range(first, first + length)}
    while ready:
        step = rng.choices(ready, [1.0 if step.kind == "F" else eager for step in ready])[0]
        ready.remove(step)
        ranks[host[step.stage]].append(step)
        first, stage, j = chains[step.microbatch], step.stage, step.microbatch
        if step.kind == "F":
            up = stage + 1 < first + length
            ready.append(Step("F", stage + 1, j) if up else Step("I" if divided[stage, j] else "B", stage, j))
        elif step.kind != "W":
            ready += [Step("W", stage, j)] if step.kind == "I" else []
            ready += [Step("I" if divided[stage - 1, j] else "B", stage - 1, j)] if stage > first else []
    return Order(host, tuple(tuple(steps) for steps in ranks), copies)


def stored(rng: random.Random, schedule: Schedule, view: View) -> Schedule:
    """Gathers for some segments: before each run of uses and freed after it, or once, at the start or after the optimizer."""
    values = Values.of(view, schedule.chains, schedule.microbatches)
    lists = []
    for at, actions in enumerate(schedule.ranks):
        keyed = [(float(i), action) for i, action in enumerate(actions)]
        for k in {a.segment for a in actions if a.kind == "F"}:
            uses = [i for i, a in enumerate(actions) if a.segment == k and a.kind in ("F", "B", "I", "W")]
            gather, free = Action("GATHER", k, lane="gather:dp"), Action("FREE", k)
            match rng.choice(["none", "start", "end", "periods", "periods"]):
                case "start":
                    keyed.append((rng.uniform(0, uses[0]), gather))
                case "end":
                    keyed.append((len(actions) + rng.random(), gather))
                case "periods":
                    ends = sorted({len(uses), *rng.sample(range(1, len(uses)), rng.randint(0, len(uses) - 1))})
                    clear = 0.0
                    for start, end in zip([0, *ends], ends, strict=False):
                        keyed.append((rng.uniform(max(clear, uses[start] - 4), uses[start]), gather))
                        until = uses[end] if end < len(uses) else uses[-1] + 2
                        clear = rng.uniform(uses[end - 1], min(until, uses[end - 1] + 3))
                        keyed.append((clear, free))
        lists.append(link(values, at, [action for _, action in sorted(keyed, key=lambda pair: pair[0])]))
    return replace(schedule, ranks=tuple(lists))


def deferred(rng: random.Random, schedule: Schedule) -> Schedule:
    """Some receives some places later, at most to just before the action that needs them."""
    often = rng.choice([0.1, 0.5, 1.0])
    for rank in range(len(schedule.ranks)):
        for name in [(a.kind, a.segment, a.microbatch) for a in schedule.ranks[rank] if a.kind.startswith("RECV")]:
            actions = schedule.ranks[rank]
            i = next(i for i, a in enumerate(actions) if (a.kind, a.segment, a.microbatch) == name)
            user = next(j for j, action in enumerate(actions) if i in action.needs)
            if rng.random() < often:
                schedule = with_list(schedule, rank, moved(actions, i, rng.randint(i, user - 1)))
    return schedule


def random_batches(rng: random.Random, schedule: Schedule) -> dict[int, list[tuple[int, ...]]]:
    found = defaultdict(list)
    for at, actions in enumerate(schedule.ranks):
        i = 0
        while i < len(actions):
            end = i
            while end < len(actions) and actions[end].communicates and end - i < 4 and rng.random() < 0.8:
                end += 1
            if end > i:
                found[at].append(tuple(range(i, end)))
            i = max(end, i + 1)
    return dict(found)


# Faults: each changes a list of a rank, or is None where it cannot be planted. True if no run survives it.

Fault = Callable[[random.Random, tuple[Action, ...], Schedule], tuple[list[Action], bool] | None]


def drop(rng: random.Random, actions: tuple[Action, ...], _: Schedule) -> tuple[list[Action], bool]:
    lost = rng.randrange(len(actions))
    stays = actions[lost].kind in ("GATHER", "FREE")
    return reorder(actions, [i for i in range(len(actions)) if i != lost]), not stays


def duplicate(rng: random.Random, actions: tuple[Action, ...], _: Schedule) -> tuple[list[Action], bool]:
    order = list(range(len(actions)))
    order.insert(rng.randrange(len(order) + 1), rng.randrange(len(actions)))
    return reorder(actions, order), True


def swap_kind(*kinds: str) -> Fault:
    def swap(rng: random.Random, actions: tuple[Action, ...], _: Schedule) -> tuple[list[Action], bool] | None:
        found = [i for i, a in enumerate(actions) if a.kind in kinds]
        if len(found) < 2:
            return None
        i, j = rng.sample(found, 2)
        order = list(range(len(actions)))
        order[i], order[j] = j, i
        edges = {(actions[n].kind, actions[n].peer) for n in (i, j)}
        return reorder(actions, order), len(edges) == 1 and actions[i].peer is not None

    return swap


def neighbours(rng: random.Random, actions: tuple[Action, ...], _: Schedule) -> tuple[list[Action], bool]:
    i = rng.randrange(len(actions) - 1)
    return moved(actions, i, i + 1), False


def earlier(*kinds: str) -> Fault:
    def move(rng: random.Random, actions: tuple[Action, ...], _: Schedule) -> tuple[list[Action], bool] | None:
        found = [i for i, a in enumerate(actions) if a.kind in kinds and i]
        return (moved(actions, i := rng.choice(found), rng.randrange(i)), False) if found else None

    return move


def later(*kinds: str) -> Fault:
    def move(rng: random.Random, actions: tuple[Action, ...], _: Schedule) -> tuple[list[Action], bool] | None:
        found = [i for i, a in enumerate(actions) if a.kind in kinds and i < len(actions) - 1]
        return (moved(actions, i := rng.choice(found), rng.randint(i + 1, len(actions) - 1)), False) if found else None

    return move


def w_before_i(rng: random.Random, actions: tuple[Action, ...], _: Schedule) -> tuple[list[Action], bool] | None:
    found = [i for i, a in enumerate(actions) if a.kind == "W"]
    if not found:
        return None
    w = rng.choice(found)
    i = next(i for i, a in enumerate(actions) if a == replace(actions[i], kind="I") and _same(a, actions[w]))
    return moved(actions, w, i), True


def _same(a: Action, b: Action) -> bool:
    return (a.segment, a.microbatch) == (b.segment, b.microbatch)


def changed(pick: Callable[[Action], bool], change: Callable[[random.Random, Action, Schedule], Action | None]) -> Fault:
    def apply(rng: random.Random, actions: tuple[Action, ...], schedule: Schedule) -> tuple[list[Action], bool] | None:
        found = [i for i, a in enumerate(actions) if pick(a)]
        if not found:
            return None
        i = rng.choice(found)
        new = change(rng, actions[i], schedule)
        return None if new is None else ([new if n == i else a for n, a in enumerate(actions)], True)

    return apply


def other_peer(rng: random.Random, action: Action, schedule: Schedule) -> Action | None:
    others = [at for at in range(len(schedule.ranks)) if at != action.peer]
    return replace(action, peer=rng.choice(others))


def other_microbatch(rng: random.Random, action: Action, schedule: Schedule) -> Action | None:
    return replace(action, microbatch=(action.microbatch or 0) + 1)


def other_segment(rng: random.Random, action: Action, schedule: Schedule) -> Action | None:
    segments = len(schedule.stages) // schedule.copies
    return replace(action, segment=((action.segment or 0) + 1) % segments) if segments > 1 else None


def release_nothing(rng: random.Random, action: Action, schedule: Schedule) -> Action:
    return replace(action, releases=action.releases[1:])


def release_twice(rng: random.Random, action: Action, schedule: Schedule) -> Action:
    return replace(action, releases=(*action.releases, action.releases[0]))


def release_elsewhere(rng: random.Random, actions: tuple[Action, ...], _: Schedule) -> tuple[list[Action], bool]:
    source = rng.choice([i for i, a in enumerate(actions) if a.releases])
    target = rng.randrange(len(actions))
    name, *rest = actions[source].releases
    without = [replace(a, releases=tuple(rest)) if i == source else a for i, a in enumerate(actions)]
    without[target] = replace(without[target], releases=(*without[target].releases, name))
    return without, False


def need_less(rng: random.Random, actions: tuple[Action, ...], _: Schedule) -> tuple[list[Action], bool]:
    i = rng.choice([i for i, a in enumerate(actions) if a.needs])
    lost = rng.choice(actions[i].needs)
    new = replace(actions[i], needs=tuple(need for need in actions[i].needs if need != lost))
    return [new if n == i else a for n, a in enumerate(actions)], False


def need_other(rng: random.Random, actions: tuple[Action, ...], _: Schedule) -> tuple[list[Action], bool]:
    i = rng.randrange(len(actions))
    new = replace(actions[i], needs=tuple(sorted({*actions[i].needs, need := rng.randrange(len(actions))})))
    certain = need >= i and not actions[need].communicates
    return [new if n == i else a for n, a in enumerate(actions)], certain


def message(action: Action) -> bool:
    return action.peer is not None


FAULTS: dict[str, Fault] = {
    "drop": drop,
    "duplicate": duplicate,
    "swap sends": swap_kind("SEND_F", "SEND_B"),
    "swap receives": swap_kind("RECV_F", "RECV_B"),
    "swap compute": swap_kind("F", "B", "I", "W"),
    "swap collectives": swap_kind("REDUCE", "NORM", "COUNT"),
    "swap neighbours": neighbours,
    "send early": earlier("SEND_F", "SEND_B"),
    "send late": later("SEND_F", "SEND_B"),
    "receive late": later("RECV_F", "RECV_B"),
    "W before I": w_before_i,
    "REDUCE early": earlier("REDUCE"),
    "REDUCE late": later("REDUCE"),
    "NORM or OPT early": earlier("NORM", "OPT"),
    "COUNT late": later("COUNT"),
    "GATHER early": earlier("GATHER"),
    "GATHER late": later("GATHER"),
    "FREE early": earlier("FREE"),
    "FREE late": later("FREE"),
    "wrong peer": changed(message, other_peer),
    "wrong microbatch": changed(lambda a: a.microbatch is not None, other_microbatch),
    "wrong segment": changed(lambda a: a.microbatch is not None, other_segment),
    "release nothing": changed(lambda a: bool(a.releases), release_nothing),
    "release twice": changed(lambda a: bool(a.releases), release_twice),
    "release elsewhere": release_elsewhere,
    "missing need": need_less,
    "other need": need_other,
}


def planted(rng: random.Random, case: Case) -> Case:
    while True:
        fault, rank = rng.choice(list(FAULTS)), rng.randrange(len(case.schedule.ranks))
        found = FAULTS[fault](rng, case.schedule.ranks[rank], case.schedule)
        if found is not None:
            actions, certain = found
            # The batches of a list are indices in it.
            batches = {at: groups for at, groups in case.batches.items() if at != rank}
            schedule = with_list(case.schedule, rank, actions)
            return replace(case, schedule=schedule, batches=batches, safe=False, fault=fault, certain=certain and case.safe)


def compare(seed: int) -> tuple[Case, str | None]:
    """The case of a seed and what is wrong with it, on which check and oracle must agree."""
    rng = random.Random(seed)
    case = generate(rng)
    if rng.random() < 0.7:
        case = planted(rng, case)
    found = judge(case.schedule, case.view, case.channel, case.rendezvous, seed, case.batches)
    proof: str | None = None
    try:
        check(case.schedule, case.view, case.channel, case.rendezvous, case.batches)
    except ScheduleError as error:
        proof = str(error)
    where = f"seed {seed}, {case.fault}, {case.channel}, rendezvous={case.rendezvous}, batches={case.batches}"
    assert (found is None) == (proof is None), f"{where}: oracle {found!r}, check {proof!r}\n{case.schedule}"
    assert proof is None or not case.safe, f"{where}: {proof}"
    assert proof is not None or not case.certain, f"{where}: proved in spite of it"
    return case, proof


def run(seeds: range) -> Counter[tuple[str, bool]]:
    verdicts: Counter[tuple[str, bool]] = Counter()
    for seed in seeds:
        case, proof = compare(seed)
        verdicts[case.fault, proof is None] += 1
        verdicts["deadlock" if proof and proof.startswith("deadlock") else "", proof is None] += 1
    return verdicts


@pytest.mark.parametrize("part", range(5))
def test_check_and_oracle_agree(part: int) -> None:
    verdicts = run(range(100 * part, 100 * part + 100))
    # Agreement is only worth something if every verdict occurs.
    assert verdicts["", True] > 20 and verdicts["", False] > 20 and verdicts["deadlock", False] > 5, verdicts


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_check_and_oracle_agree_on_many(part: int) -> None:
    verdicts = run(range(1000 * part + 500, 1000 * part + 1500))
    assert all(verdicts[fault, False] > 0 for fault in FAULTS), verdicts


def kinds(schedule: Schedule) -> Iterator[str]:
    return (a.kind for actions in schedule.ranks for a in actions)


def test_generated_schedules_cover_the_vocabulary() -> None:
    cases = [generate(random.Random(seed)) for seed in range(200)]
    seen = Counter(kind for case in cases for kind in set(kinds(case.schedule)))
    assert (
        set(seen) == {*MESSAGES, "F", "B", "I", "W", "GATHER", "FREE", "REDUCE", "COUNT", "NORM", "OPT"}
        and min(seen.values()) > 20
    )
    assert any(case.schedule.copies == 2 for case in cases) and any(case.batches for case in cases)
