"""A measured profile becomes the wires that collectives across hosts are chosen by, or an error that says what it lacks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phalanx.comm.wires import Wire
from phalanx.hardware import Fit, Line, Profile
from phalanx.train.wires import measured_wires


def line(latency: float, per_byte: float) -> Line:
    return Line("direct", latency, per_byte, (latency, latency), (per_byte, per_byte))


def link(axis: str, backend: str, latency: float, per_byte: float, *, op: str = "sendrecv", ranks: int = 2) -> Fit:
    return Fit(op, axis, backend, ranks, line(latency, per_byte))


def wires(tmp_path: Path, at_once: int, *links: Fit):
    path = tmp_path / "profile.json"
    Profile("a machine", "cpu", at_once, {}, (), (), links).save(path)
    return measured_wires(path)


def test_the_last_axis_is_inside_and_the_first_between(tmp_path: Path) -> None:
    found = wires(
        tmp_path,
        8,
        link("pp", "gloo", 5e-4, 2**-27),
        link("dp", "gloo", 3e-4, 2**-29),
        link("dp", "shm", 3e-6, 2**-32),
        link("tp", "shm", 2e-6, 2**-33),
        link("pp+dp", "gloo", 9.0, 9.0),
    )
    assert found.inside == Wire(2e-6, 2.0**33)
    # four groups of two ranks along pp shared the card
    assert found.between == Wire(5e-4, 4 * 2.0**27)


def test_small_messages_give_the_latency_and_large_ones_the_rate(tmp_path: Path) -> None:
    bent = Fit("sendrecv", "tp", "shm", 2, line(1e-6, 2**-31), line(9e-6, 2**-34), 1e5)
    found = wires(tmp_path, 2, bent, link("dp", "gloo", 1e-4, 0.0))
    assert found.inside == Wire(1e-6, 2.0**34)
    assert found.between == Wire(1e-4, math.inf)  # a fit may find that bytes cost nothing


def test_one_way_messages_stand_in_for_those_of_both_ways(tmp_path: Path) -> None:
    found = wires(
        tmp_path,
        2,
        link("tp", "shm", 1e-6, 2**-30, op="send"),
        link("tp", "shm", 2e-6, 2**-31),
        link("dp", "gloo", 1e-4, 2**-26, op="send"),
    )
    assert (found.inside, found.between) == (Wire(2e-6, 2.0**31), Wire(1e-4, 2.0**26))


def test_what_is_missing_is_named_beside_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"profile\.json has no messages between hosts \(gloo\): it has sendrecv along tp over shm\. "
    ):
        wires(tmp_path, 2, link("tp", "shm", 1e-6, 1e-9))
    reduced = Fit("all_reduce", "tp", "shm", 2, Line("one_shot", 1e-6, 1e-9, (0, 1), (0, 1)))
    with pytest.raises(
        ValueError, match=r"no messages inside a host \(shm\): it has all_reduce along tp over shm, sendrecv along dp"
    ):
        wires(tmp_path, 2, reduced, link("dp", "gloo", 1e-4, 1e-8))
    with pytest.raises(FileNotFoundError):
        measured_wires(tmp_path / "nowhere.json")
