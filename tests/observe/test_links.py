"""The doctor of links on made-up machines: it names what was made slow, all of it and nothing else; and one run with a slow sender."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import phalanx as phx
from phalanx.cli import main
from phalanx.comm.threads import Fabric, ThreadTransport
from phalanx.comm.transport import Group, Handle
from phalanx.observe.links import Links, judge, matrix_table
from phalanx.observe.tournament import measure_links, rounds

Slow = Callable[[int, int], bool]


def made_up(
    hosts: Sequence[str],
    slow: Slow = lambda a, b: False,
    *,
    by: float = 4.0,
    latency_by: float = 1.0,
    noise: float = 0.05,
    seed: int = 0,
) -> Links:
    """Links of 4 MiB at 10 GB/s and 2 µs inside hosts, 1 GB/s and 20 µs between, with lognormal noise; slow ones slower `by`."""
    rng = np.random.default_rng(seed)
    n = len(hosts)
    latency, bytes_seconds = np.zeros((n, n)), np.zeros((n, n))
    for a, b in itertools.permutations(range(n), 2):
        distance = 1 if hosts[a] == hosts[b] else 10
        bytes_seconds[a, b] = (4 << 20) * 1e-10 * distance * (by if slow(a, b) else 1) * np.exp(noise * rng.standard_normal())
        latency[a, b] = 2e-6 * distance * (latency_by if slow(a, b) else 1) * np.exp(noise * rng.standard_normal())
    return Links(
        tuple(hosts),
        4 << 20,
        tuple(map(tuple, latency.tolist())),
        tuple(map(tuple, bytes_seconds.tolist())),
        bytes_seconds.max(),
    )


ONE_HOST, TWO_HOSTS, THREE_HOSTS = ["a"] * 4, ["a"] * 4 + ["b"] * 4, ["a", "a", "b", "b", "c", "c"]

CASES: list[tuple[str, Sequence[str], Slow, list[tuple[str, str]]]] = [
    ("nothing", ONE_HOST, lambda a, b: False, []),
    ("nothing, two hosts", TWO_HOSTS, lambda a, b: False, []),
    ("a link", ONE_HOST, lambda a, b: {a, b} == {1, 3}, [("link", "1 ↔ 3")]),
    ("a direction", ONE_HOST, lambda a, b: (a, b) == (3, 1), [("direction", "3 → 1")]),
    ("a rank", ONE_HOST, lambda a, b: 2 in (a, b), [("rank", "rank 2")]),
    ("a rank of three", ["a"] * 3, lambda a, b: 2 in (a, b), [("rank", "rank 2")]),
    ("a link of three", ["a"] * 3, lambda a, b: {a, b} == {0, 2}, [("link", "0 ↔ 2")]),
    ("a direction of two", ["a"] * 2, lambda a, b: a == 1, [("direction", "1 → 0")]),
    ("a sender", ONE_HOST, lambda a, b: a == 1, [("sender", "rank 1")]),
    ("a receiver", ONE_HOST, lambda a, b: b == 1, [("receiver", "rank 1")]),
    ("a link between hosts", TWO_HOSTS, lambda a, b: {a, b} == {1, 6}, [("link", "1 ↔ 6")]),
    ("a rank among hosts", TWO_HOSTS, lambda a, b: 5 in (a, b), [("rank", "rank 5")]),
    ("a host", THREE_HOSTS, lambda a, b: (a in (2, 3)) != (b in (2, 3)), [("host", "host b")]),
    ("a host of one rank", ["a", "b", "c"], lambda a, b: 1 in (a, b), [("rank", "rank 1")]),
    ("a rank and a link", ["a"] * 6, lambda a, b: 2 in (a, b) or {a, b} == {0, 5}, [("rank", "rank 2"), ("link", "0 ↔ 5")]),
    ("two ranks", ["a"] * 8, lambda a, b: a in (2, 7) or b in (2, 7), [("rank", "rank 2"), ("rank", "rank 7")]),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("hosts", "slow", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_it_names_what_was_made_slow(hosts: Sequence[str], slow: Slow, expected: list[tuple[str, str]], seed: int) -> None:
    links = made_up(hosts, slow, seed=seed)
    findings = judge(links).findings
    assert [(finding.kind, finding.name) for finding in findings] == expected
    assert {link for finding in findings for link in finding.links} == {link for link in links.pairs() if slow(*link)}
    assert all(finding.measure == "bandwidth" and finding.factor == pytest.approx(4, rel=0.3) for finding in findings)


def test_latency_is_judged_too() -> None:
    verdict = judge(made_up(ONE_HOST, lambda a, b: 3 in (a, b), by=1.0, latency_by=10.0))
    assert [(f.kind, f.name, f.measure) for f in verdict.findings] == [("rank", "rank 3", "latency")]
    assert verdict.line.startswith("rank 3 is slow: small messages take 10.")


def test_one_cause_is_told_once() -> None:
    verdict = judge(made_up(ONE_HOST, lambda a, b: 3 in (a, b), latency_by=10.0))
    assert [(f.name, f.measure) for f in verdict.findings] == [("rank 3", "bandwidth")]


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3, 1.0])
def test_noise_alone_is_not_a_verdict(noise: float) -> None:
    """Of 20 machines of 8 ranks, 56 links each, at most one may be blamed."""
    blamed = [seed for seed in range(20) if judge(made_up(["a"] * 8, noise=noise, seed=seed)).findings]
    assert len(blamed) <= 1


def test_too_much_noise_is_said() -> None:
    assert "scatter too much to tell" in judge(made_up(["a"] * 8, noise=1.0)).line
    assert "no rank, host or link stands out among 8 ranks: no bandwidth is 1.5 times below" in judge(made_up(["a"] * 8)).line


def test_a_crowded_ring_is_said() -> None:
    quiet = made_up(ONE_HOST)
    crowded = Links(quiet.hosts, quiet.bytes, quiet.latency_seconds, quiet.bytes_seconds, 8 * quiet.ring_seconds)
    assert "in a ring" not in judge(quiet).line
    assert "in a ring, they take" in judge(crowded).line


def test_the_line_says_how_much() -> None:
    assert judge(made_up(ONE_HOST, lambda a, b: (a, b) == (3, 1), noise=0.0)).line == (
        "link 3 → 1 is slow: bytes take 4.0 times as long as usual in this direction only"
    )


def test_slow_links_have_a_star_in_the_matrix() -> None:
    links = made_up(ONE_HOST, lambda a, b: (a, b) == (3, 1), noise=0.0)
    table = matrix_table(links, judge(links).findings)
    cells = [list(column.cells) for column in table.columns[1:]]  # [to][from]
    assert cells[1][3] == "[bold red]2.5 2*[/bold red]"
    assert cells[0][3] == "10 2"
    assert sum("*" in str(cell) for column in cells for cell in column) == 1


@pytest.mark.parametrize("hosts", [["a"] * n for n in range(2, 10)] + [TWO_HOSTS, THREE_HOSTS, list("aabbbcd")])
def test_every_pair_meets_once_and_none_disturbs_another(hosts: list[str]) -> None:
    schedule = rounds(hosts)
    assert sorted(itertools.chain(*schedule)) == list(itertools.combinations(range(len(hosts)), 2))
    for pairs in schedule:
        ranks = list(itertools.chain(*pairs))
        assert len(ranks) == len(set(ranks))
        leaving = [host for a, b in pairs if hosts[a] != hosts[b] for host in (hosts[a], hosts[b])]
        assert len(leaving) == len(set(leaving))
    if len(set(hosts)) == 1:
        assert len(schedule) == len(hosts) - 1 + len(hosts) % 2  # the least that is possible


class SlowSender(ThreadTransport):
    """A rank whose bytes take 20 ns each on their way out: 5 ms for 256 KiB, far above what this machine does meanwhile."""

    def send(self, x: Tensor, peer: int, group: Group) -> Handle:
        time.sleep(20e-9 * x.numel())
        return super().send(x, peer, group)


def test_a_slow_sender_is_found_alive() -> None:
    fabric = Fabric(3)
    wires = [SlowSender(fabric, rank) if rank == 1 else fabric.transport(rank) for rank in range(3)]
    with phx.local(phx.Mesh(dp=3)) as ranks:  # its threads; the bytes go over the wires above
        measured = ranks.run(lambda world, own: measure_links(own, torch.device("cpu"), size=256 << 10, repeats=3), wires)
    assert measured[0] == measured[1] == measured[2]
    links = measured[0]
    assert all(links.bytes_seconds[1][to] > 4e-3 for to in (0, 2))
    assert links.latency_seconds[0][1] == links.latency_seconds[1][0]
    slow = {link for finding in judge(links).findings if finding.measure == "bandwidth" for link in finding.links}
    assert {(1, 0), (1, 2)} <= slow


def test_recorded_measurements_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "links.json"
    links = made_up(ONE_HOST, lambda a, b: 2 in (a, b))
    links.save(path)
    assert Links.load(path) == links
    assert main(["doctor", "links", "--from", str(path)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("rank 2 is slow: bytes take ")
    assert shown.count("*") == 6 + 1  # in the title too
    made_up(ONE_HOST).save(path)
    assert main(["doctor", "links", "--from", str(path), "--no-matrix"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", 7, "has version 7, this Phalanx reads links of version 1"),
        ("hosts", None, "lacks hosts"),
        ("hosts", ["a"] * 3, "for 3 ranks; expected 3 × 3"),
        ("hosts", ["a"], "at least 2 ranks, there are 1"),
        ("latency_seconds", [[0.0] * 4] * 4, "from rank 0 to rank 1 is 0.0"),
        ("bytes_seconds", [["x"] * 4] * 4, "could not convert"),
    ],
)
def test_a_wrong_file_is_refused(
    key: str, value: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "links.json"
    made_up(ONE_HOST).save(path)
    found = json.loads(path.read_text())
    found[key] = value
    if value is None:
        del found[key]
    path.write_text(json.dumps(found))
    assert main(["doctor", "links", "--from", str(path)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "say how many ranks to start, at least 2"),
        (["--ranks", "1"], "say how many ranks to start, at least 2"),
        (["--ranks", "2", "--repeats", "0"], "--repeats 0"),
        (["--ranks", "2", "--backend", "tcp"], "no backend 'tcp'"),
        (["--ranks", "2", "--from", "x.json"], "leave --ranks out"),
        (["--from", "no.json"], "no.json"),
    ],
)
def test_nonsense_is_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "links", *args]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.nightly
def test_links_of_real_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "links.json"
    code = main(["doctor", "links", "--ranks", "2", "--mib", "1", "--repeats", "2", "--out", str(out)])
    links = Links.load(out)
    assert code == (1 if judge(links).findings else 0)
    assert len(links.hosts) == 2
    assert judge(links).line in capfd.readouterr().out
