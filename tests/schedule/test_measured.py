"""A recorded step survives its file, and its prediction is exact where durations are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.event import Event
from phalanx.schedule import build
from phalanx.schedule.measured import Trace, differences, observed, predict, read, segment_seconds, times, with_bytes, write
from phalanx.schedule.simulate import Costs, Link, simulate

from .toys import toy

VIEW = toy(2, blocks=4, dp=2, tied=True)
SCHEDULE = build(VIEW, "1f1b", 2, 4)
SECONDS = {(kind, k): 1e-3 * cost * (1 + k / 8) for (kind, k), cost in Costs.units(VIEW).seconds.items()}
COSTS = Costs(
    {**SECONDS, ("OPT", None): 5e-4},
    {"wire": Link(2e-4), "sum": Link(3e-4), "all": Link(1e-4)},
    {"pp": "wire", "reduce": "sum", "world": "all"},
)


def recorded(costs: Costs = COSTS) -> Trace:
    """A simulation on all ranks of each coordinate, as a run would have left it: without bytes, and a RECV from its issue on."""
    events = [replace(event, bytes=0, axis=None) for event in simulate(SCHEDULE, VIEW, costs)]
    every = [replace(event, rank=event.rank + other) for event in events for other in (0, 1)]
    return Trace(3, SCHEDULE, VIEW, tuple(every), 2e-6)


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace = recorded()
    write(trace, tmp_path / "trace.json")
    assert read(tmp_path) == read(tmp_path / "trace.json") == trace


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "step": 1}'])
def test_a_file_that_is_no_trace_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(ValueError, match=r"trace\.json is not a trace"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="phalanx train --trace N"):
        read(tmp_path / "elsewhere")


def test_a_wrong_value_in_a_trace_is_told(tmp_path: Path) -> None:
    write(recorded(), tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    content["schedule"]["ranks"][0][0]["kind"] = "G"
    (tmp_path / "trace.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="'G' is none of F, B, I"):
        read(tmp_path)


def test_equal_durations_are_predicted_exactly() -> None:
    trace = recorded()
    said = predict(trace)
    assert said.account.span_seconds == pytest.approx(trace.study.account.span_seconds, rel=1e-12)
    found = {each.kind: each for each in differences(trace, said)}
    assert list(found)[:2] == ["COUNT", "F"] and set(found) == {"COUNT", "F", "RECV_F", "B", "RECV_B", "REDUCE", "NORM", "OPT"}
    assert max(each.error for each in found.values()) < 1e-9 and max(e.start_error_seconds for e in found.values()) < 1e-12
    assert found["F"].number == 6 * 4 and found["RECV_F"].measured_seconds == pytest.approx(2e-4)


def test_an_error_of_durations_is_reported_by_kind() -> None:
    """Forward j of every segment takes (1 + j/10) times as long: the mean is right, each is off."""
    trace = recorded(Costs(SECONDS))
    late = tuple(
        replace(e, end=e.start + (e.end - e.start) * (1 + (e.microbatch or 0) / 10)) if e.name.startswith("F") else e
        for e in trace.events
    )
    found = {each.kind: each for each in differences(replace(trace, events=late), predict(replace(trace, events=late)))}
    # 1, 1.1, 1.2 and 1.3 of a mean of 1.15: off by 0.1 on average.
    assert found["F"].error == pytest.approx(0.1 / 1.15) and found["F"].predicted_seconds == pytest.approx(
        found["F"].measured_seconds
    )
    assert found["B"].error == pytest.approx(0, abs=1e-9)


def test_a_message_takes_its_time_from_when_both_ends_are_there() -> None:
    name = {"SEND_F2.0": (0, 0.003), "RECV_F2.0": (2, 0.001)}
    moved = [
        replace(e, start=e.start - name[e.name][1]) if e.name in name and e.rank == name[e.name][0] else e
        for e in recorded().events
    ]
    before, after = times(SCHEDULE, VIEW, recorded().events), times(SCHEDULE, VIEW, moved)
    # The RECV waited 3 ms less than it seems: it was ready 1 ms early, the SEND 3 ms.
    assert after[1, "RECV_F2.0"][0] == pytest.approx(before[1, "RECV_F2.0"][0] - 0.001)
    assert after[1, "RECV_F2.0"] == after[0, "SEND_F2.0"]


def test_what_arrives_during_compute_is_not_timed() -> None:
    """A message that took 0.2 ms and was found complete 1 ms later counts for nothing; the others give the 0.2 ms."""
    trace = recorded()
    times_of = times(SCHEDULE, VIEW, trace.events)
    seen = observed(SCHEDULE, VIEW, trace.events)
    busy = sorted(end for (at, name), (_, end) in times_of.items() if at == 0 and name[0] in "FB")
    noticed = next(each for each in busy if each > times_of[0, "RECV_B3.1"][1]) + 1e-6
    late = tuple(replace(e, end=noticed) if e.name == "RECV_B3.1" and e.rank in (0, 1) else e for e in trace.events)
    assert (0, "RECV_B3.1") in seen and (0, "RECV_B3.1") not in observed(SCHEDULE, VIEW, late)
    received = {d.kind: d for d in differences(replace(trace, events=late), predict(replace(trace, events=late)))}["RECV_B"]
    assert received.number == 3 and received.measured_seconds == pytest.approx(2e-4) == received.predicted_seconds


def test_bytes_are_those_of_the_list() -> None:
    trace = recorded()
    known: dict[str, Event] = {e.name: e for e in with_bytes(trace, predict(trace)) if e.rank == 3}
    assert (known["RECV_F2.0"].bytes, known["RECV_F2.0"].axis) == (2 * 8 * 4, "pp") and known["F3.0"].bytes == 0
    assert len(with_bytes(trace, predict(trace))) == len(trace.events)


def test_seconds_of_segments_balance_the_next_run() -> None:
    """In the simulation every F and B took what it costs; the last segment, made four times as dear, gets a stage for itself."""
    found = segment_seconds(recorded())
    for k, segment in enumerate(VIEW.segments):
        assert found[segment.name] == pytest.approx(SECONDS["F", k] + SECONDS["B", k], rel=1e-9)
    dear = dict(enumerate(found.values()))
    dear[5] *= 4
    assert build(VIEW, "1f1b", 2, 4, seconds=dear).stages == ((0, 1, 2, 3, 4), (5,))
    assert build(VIEW, "1f1b", 2, 4, seconds=dict.fromkeys(range(6), 1.0)).stages == ((0, 1, 2), (3, 4, 5))
