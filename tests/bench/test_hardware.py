"""What `phalanx bench hardware` asks the machine, on made-up machines; what it sends, by the ledger; and one small run of it all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import phalanx as phx
from phalanx.bench import memory, native, operations
from phalanx.bench.arithmetic import arithmetic
from phalanx.bench.hardware import axes, slowest, time_text
from phalanx.cli import main
from phalanx.cli.bench.hardware import mesh_of, parse_bytes
from phalanx.hardware import Level, Profile, predict

CPU = torch.device("cpu")


def machine(folder: Path) -> tuple[Path, Path, Path]:
    """A CPU with 48 KiB of L1, 2 MiB of L2 for two cores and 60 MiB of L3 for eight; 256-bit registers; 16 GiB."""
    caches = [("1", "Data", "48K", "0"), ("1", "Instruction", "32K", "0"), ("2", "Unified", "2048K", "0,4")]
    caches.append(("3", "Unified", "60M", "0-3,8-11"))
    for i, (level, kind, size, shared) in enumerate(caches):
        index = folder / "cache" / f"index{i}"
        index.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
            (index / name).write_text(text + "\n")
    (folder / "cpuinfo").write_text("processor : 0\nflags : fpu avx avx2\n\nprocessor : 1\nflags : fpu avx512f\n")
    (folder / "meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    return folder / "cache", folder / "cpuinfo", folder / "meminfo"


def test_the_levels_of_a_made_up_machine(tmp_path: Path) -> None:
    assert memory.cpu_levels(*machine(tmp_path)) == [
        Level("registers", 512),
        Level("L1", 48 << 10, shared_by=1),
        Level("L2", 2 << 20, shared_by=2),
        Level("L3", 60 << 20, shared_by=8),
        Level("memory", 16 << 30, shared_by=8),
    ]


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert memory.cpu_levels(nothing, nothing, nothing) == [Level("registers", None), Level("memory", None)]


def test_working_sets_lie_in_their_level(tmp_path: Path) -> None:
    levels = memory.cpu_levels(*machine(tmp_path))
    assert [memory.set_bytes(level, levels) for level in levels[1:]] == [24 << 10, 1 << 20, 30 << 20, 240 << 20]


def test_a_chain_visits_every_line_once() -> None:
    lines, words = 1000, native.LINE_BYTES // 8
    chain, at, seen = native.cycle(lines), 0, set()
    for _ in range(lines):
        seen.add(at)
        at = int(chain[at])
    assert at == 0
    assert seen == {line * words for line in range(lines)}


def test_without_a_compiler_latency_and_small_sets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "loops", lambda: None)
    monkeypatch.setattr(memory, "set_bytes", lambda level, among: 4096 if level.name == "L1" else 2 << 20)
    found, copies = memory.levels(CPU, 1, latency=True, thorough=False)
    assert all(level.latency_seconds is None for level in found)
    rates = {level.name: level.bytes_per_second for level in found}
    assert rates["registers"] is None and rates.get("L1") is None
    assert rates["memory"] is not None
    assert [copy.set_bytes for copy in copies] == [2 << 20]


@pytest.mark.skipif(native.loops() is None, reason="needs gcc")
def test_the_loops_time_what_they_say() -> None:
    """Whatever the machine does, ten times the work of a loop takes longer, and a chain through 32 MiB is slower than one in 4 KiB."""
    library = native.loops()
    assert library is not None
    near, far = (min(native.load_seconds(library, size, 100_000) for _ in range(3)) for size in (4096, 32 << 20))
    assert 0 < near < far
    short, long = (min(native.multiply_add_seconds(library, steps) * steps for _ in range(3)) for steps in (100_000, 1_000_000))
    assert 0 < short < long
    assert native.copy_seconds(library, 4096, 100) > 0


def test_products_of_every_dtype_that_torch_multiplies() -> None:
    rates = arithmetic(CPU, 1e-9, 1)
    assert {"float64", "float32", "bfloat16"} <= set(rates)
    assert all(np.isfinite(rate) and rate > 0 for rate in rates.values())


@pytest.mark.parametrize("op", operations.OPERATIONS)
def test_an_operation_moves_the_bytes_that_its_samples_say(op: str) -> None:
    """The ledger counts the larger of a rank's input and output, as nccl-tests does. 100 bytes do not divide over three ranks."""

    def body(world: phx.World) -> tuple[list[int], dict[tuple[str, str], tuple[int, int]]]:
        with world.ledger.recording() as ledger:
            points = operations.samples(op, world.group("tp"), world, [100, 1000], 2)
        assert all(len(point.seconds) == 2 and min(point.seconds) > 0 for point in points)
        return [point.bytes for point in points], ledger.totals()

    with phx.local(phx.Mesh(tp=3)) as ranks:
        (sizes, totals), *_ = ranks.run(body)
    assert sizes == ([100, 1000] if op in operations.WHOLE else [96, 996])
    calls, moved = totals["tp", op if op not in operations.MESSAGES else "send"]
    runs = operations.WARM_UPS + 2
    if op == "all_reduce":  # the times of each size are reduced too
        calls, moved = calls - 2, moved - 2 * 2 * 8
    assert (calls, moved) == (2 * runs, runs * sum(sizes))


def test_the_slowest_rank_counts_and_hosts_of_two_kinds_are_refused() -> None:
    with phx.local(phx.Mesh(dp=2)) as ranks:
        assert (
            ranks.run(lambda world: slowest({"L1": 2.0 - world.rank, "L2": 5.0 + world.rank}, world))
            == [{"L1": 1.0, "L2": 5.0}] * 2
        )
        with pytest.raises(ValueError, match="on different machines"):
            ranks.run(lambda world: slowest({"L1": 1.0} if world.rank else {"L1": 1.0, "L2": 1.0}, world))


def test_axes_alone_and_together() -> None:
    with phx.local(phx.Mesh(pp=1, dp=2, tp=2)) as ranks:
        assert axes(ranks.worlds[0]) == ["dp", "tp", "dp+tp"]


def test_a_small_run_prints_and_saves_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile.json"
    args = ["--backend", "threads", "--mesh", "dp=2", "--quick", "--repeats", "2", "--max-bytes", "16K", "--out", str(out)]
    threads = torch.get_num_threads()
    try:
        assert main(["bench", "hardware", *args, "--ops", "send", "all_reduce"]) == 0
    finally:
        torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    for word in ("registers", "memory", "threads along dp", "float32", "all_reduce", "half at"):
        assert word in shown
    profile = Profile.load(out)
    assert [(fit.op, fit.axis, fit.backend, fit.ranks) for fit in profile.links] == [
        ("send", "dp", "threads", 2),
        ("all_reduce", "dp", "threads", 2),
    ]
    assert [point.bytes for point in profile.links[0].points] == [256, 1024, 4096, 16384]
    assert predict(profile, "all_reduce", 4, 4096) > 0


@pytest.mark.nightly
def test_a_run_over_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile.json"
    args = ["--mesh", "dp=2,tp=2", "--quick", "--repeats", "2", "--max-bytes", "64K", "--out", str(out)]
    assert main(["bench", "hardware", *args]) == 0
    assert " along tp " in capfd.readouterr().out
    profile = Profile.load(out)
    assert {fit.axis for fit in profile.links} == {"dp", "tp", "dp+tp"}
    assert profile.at_once == 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mesh", "dp=2", "--ranks", "4"], "--ranks is 4, but mesh dp=2 has 2"),
        (["--ranks", "0"], "--ranks is 0"),
        (["--repeats", "0"], "0 repeats measure nothing"),
        (["--backend", "glo"], "no backend 'glo'; did you mean 'gloo'?"),
        (["--ops", "allreduce"], "no operation 'allreduce'"),
        (["--max-bytes", "16Q"], "'16Q' is not a number of bytes"),
        (["--max-bytes", "16"], "need at least two"),
        (["--out", "no/such/folder/p.json"], "there is no folder no/such/folder"),
    ],
)
def test_nonsense_is_refused_in_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hardware", *args]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err and told.err.count("\n") == 1


def test_reading_options() -> None:
    assert [parse_bytes(text) for text in ("4096", "64K", "16m", "1G")] == [4096, 64 << 10, 16 << 20, 1 << 30]
    assert [str(mesh_of(None, None, 1)), str(mesh_of(None, 3, 1)), str(mesh_of(None, None, 4))] == ["", "dp=3", "dp=4"]
    assert [time_text(x) for x in (1.5e-9, 2e-6, 3.25e-3, 4.0, None)] == ["1.5 ns", "2 µs", "3.25 ms", "4 s", "-"]
