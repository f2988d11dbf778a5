"""The profile type: what it predicts, to the digit, and that a file comes back as it was or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.hardware import ALGORITHMS, BACKENDS, OPERATIONS, Copy, Fit, Level, Line, Point, Profile, predict

ALPHA, BETA = 1e-5, 1e-9


def line(algorithm: str, alpha: float = ALPHA, beta: float = BETA) -> Line:
    return Line(algorithm, alpha, beta, (alpha, alpha), (beta, beta))


def fitted(op: str, algorithm: str, *, axis: str = "tp", backend: str = "gloo", ranks: int = 2, **more: Any) -> Fit:
    return Fit(op, axis, backend, ranks, line(algorithm), **more)


def profile(*links: Fit) -> Profile:
    return Profile(
        "a machine", "cpu", 2, {"float32": 1e11}, (Level("memory", 1 << 30, 2e10, 1e-7, 2),), (Copy(4096, 2e11),), links
    )


@pytest.mark.parametrize(
    ("op", "algorithm", "ranks", "latencies", "volume"),
    [
        ("send", "direct", 8, 1, 1),
        ("all_reduce", "ring", 4, 6, 1.5),
        ("all_reduce", "doubling", 8, 3, 3),
        ("all_reduce", "halving", 8, 6, 1.75),
        ("all_reduce", "one_shot", 4, 1, 3),
        ("all_reduce", "two_shot", 4, 2, 1.5),
        ("all_gather", "ring", 4, 3, 0.75),
        ("reduce_scatter", "ring", 5, 4, 0.8),
        ("all_to_all", "pairwise", 4, 3, 0.75),
        ("broadcast", "chain", 4, 3, 1),
        ("broadcast", "tree", 5, 3, 3),
        ("reduce", "scatter_gather", 4, 4, 1.5),
        ("gather", "direct", 4, 1, 0.75),
    ],
)
def test_the_cost_of_an_algorithm(op: str, algorithm: str, ranks: int, latencies: float, volume: float) -> None:
    """Counted by hand: steps that wait for one another, and times the size that the busiest rank's link carries."""
    k, f = ALGORITHMS[op, algorithm]
    assert (k(ranks), f(ranks)) == (latencies, pytest.approx(volume, rel=1e-15))
    assert line(algorithm).seconds(op, ranks, 1e6) == pytest.approx(latencies * ALPHA + volume * BETA * 1e6, rel=1e-15)


def test_every_backend_has_an_algorithm_for_every_operation() -> None:
    for backend, table in BACKENDS.items():
        assert set(table) == set(OPERATIONS), backend
        assert all((op, name) in ALGORITHMS for op, names in table.items() for name in names), backend


def test_one_rank_costs_nothing() -> None:
    assert predict(profile(fitted("all_reduce", "ring")), "all_reduce", 1, 1 << 20) == 0.0


def test_a_link_carries_over_to_more_ranks() -> None:
    measured = profile(fitted("all_reduce", "ring"))
    assert predict(measured, "all_reduce", 2, 1e6) == pytest.approx(2 * ALPHA + 1 * BETA * 1e6, rel=1e-15)
    assert predict(measured, "all_reduce", 8, 1e6) == pytest.approx(14 * ALPHA + 1.75 * BETA * 1e6, rel=1e-15)


def test_the_nearest_number_of_ranks_is_used() -> None:
    few, many = fitted("all_gather", "ring"), Fit("all_gather", "dp", "gloo", 16, line("ring", alpha=7.0))
    assert predict(profile(few, many), "all_gather", 8, 0) == 7 * 7.0
    assert predict(profile(few, many), "all_gather", 4, 0) == 3 * ALPHA
    assert predict(profile(few, many), "all_gather", 8, 0, axis="tp") == 7 * ALPHA


def test_above_the_knee_the_second_line_holds() -> None:
    shm = fitted("all_reduce", "one_shot", backend="shm", above=line("two_shot", beta=2e-9), knee_bytes=1e4)
    assert predict(profile(shm), "all_reduce", 4, 9999) == pytest.approx(ALPHA + 3 * BETA * 9999, rel=1e-15)
    assert predict(profile(shm), "all_reduce", 4, 10000) == pytest.approx(2 * ALPHA + 1.5 * 2e-9 * 10000, rel=1e-15)


def test_what_was_not_measured_is_made_of_messages() -> None:
    measured = profile(fitted("send", "direct"))
    assert predict(measured, "broadcast", 4, 1e6) == pytest.approx(2 * ALPHA + 2 * BETA * 1e6, rel=1e-15)  # gloo's tree
    assert predict(measured, "all_reduce", 4, 1e6) == pytest.approx(6 * ALPHA + 1.5 * BETA * 1e6, rel=1e-15)


def test_where_nothing_fits_it_says_what_there_is() -> None:
    measured = profile(fitted("all_reduce", "ring"))
    with pytest.raises(ValueError, match=r"neither all_gather nor messages on axis dp; it has all_reduce on tp over gloo"):
        predict(measured, "all_gather", 4, 1, axis="dp")
    with pytest.raises(ValueError, match="there is no operation 'allreduce'"):
        predict(measured, "allreduce", 4, 1)
    with pytest.raises(ValueError, match="over 0 ranks"):
        predict(measured, "all_reduce", 0, 1)


def test_half_bandwidth() -> None:
    assert line("ring").half_bytes == pytest.approx(1e4, rel=1e-15)


def full() -> Profile:
    points = (Point(64, (1e-5, 2e-5)), Point(128, (3e-5,)))
    bent = fitted("all_reduce", "ring", above=line("ring"), knee_bytes=96.0, error_by_decade={"1": 0.1}, points=points)
    return profile(bent, fitted("send", "direct"))


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    full().save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == full()


def _set(*place: Any, to: Any) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        for key in place[:-1]:
            found = found[key]
        found[place[-1]] = to

    return change


def _drop(*place: Any) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        for key in place[:-1]:
            found = found[key]
        del found[place[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("version", to=99), "is of version 99, this Phalanx reads 1"),
        (_drop("version"), "has no version"),
        (_drop("arithmetic"), "the profile lacks arithmetic"),
        (_drop("links", 1, "below", "seconds_per_byte"), r"links\[1\]\.below lacks seconds_per_byte"),
        (_set("links", 0, "speed", to=3), r"links\[0\] has unknown speed"),
        (_set("links", 0, "op", to="allreduce"), r"links\[0\]\.op is 'allreduce'"),
        (_set("links", 0, "below", "algorithm", to="rnig"), r"links\[0\]\.below\.algorithm is 'rnig'; all_reduce has ring"),
        (
            _set("links", 0, "below", "latency_seconds", to="fast"),
            r"links\[0\]\.below\.latency_seconds is 'fast'; expected a number",
        ),
        (_set("links", 0, "below", "latency_seconds", to=-1.0), "latency_seconds is -1.0"),
        (_set("links", 0, "knee_bytes", to=None), "come together"),
        (_set("links", 0, "ranks", to=1), "at least 2 ends"),
        (_set("memory", 0, "bytes_per_second", to=0), "level memory: bytes_per_second is 0"),
        (_set("memory", to={}), "memory is {}; expected a list"),
        (_set("links", 0, "below", "latency_interval", to=[1.0]), "an interval has 2"),
    ],
)
def test_a_wrong_file_is_refused_by_name(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    full().save(path)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=message) as error:
        Profile.load(path)
    assert str(path) in str(error.value)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for text, message in (("{", "is not JSON"), ("[]", "is not a hardware profile")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            Profile.load(path)
