"""Measuring, on backends that are made up: right, wrong and unable ones; one process stands for rank 0 of two."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.bench.buffers import Pool, buffer_bytes, check_memory, pool_bytes
from phalanx.bench.busbw import FORMS, Form
from phalanx.bench.clock import Start
from phalanx.bench.collectives import Bench, Refused, measure
from phalanx.bench.inputs import expected
from phalanx.bench.plot import plot
from phalanx.bench.results import Row
from phalanx.bench.session import require_right
from phalanx.bench.sweep import Case, Effort, Request
from phalanx.bench.table import Device, Setting, as_json, footer, header, line
from phalanx.train.launch import RankFailure

EFFORT = Effort(warm_up=1, iterations=3)
Spoil = Callable[[Tensor], object]


class MadeUp:
    """Receives what is expected of rank 0, then spoils it."""

    def __init__(self, spoil: Spoil = lambda recv: None, reason: str | None = None) -> None:
        self.spoil, self.reason, self.calls = spoil, reason, 0

    def call(self, case: Case, form: Form, send: Tensor, recv: Tensor) -> Callable[[], object]:
        def run() -> None:
            self.calls += 1
            want = expected(case, 0, recv)
            assert want is not None
            if send.any():  # zeros are the timed calls
                recv.copy_(want)
                self.spoil(recv)

        return run

    def refusal(self, case: Case, form: Form) -> str | None:
        return self.reason

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def bench(**wires: MadeUp) -> Bench:
    pool = Pool(1 << 16, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    return Bench(wires, {False: pool}, Start(torch.device("cpu")), 0, next(iter(wires)))


def request(*backends: str, op: str = "all_reduce", size: int = 1024) -> Request:
    return Request((op,), (size,), 2, backends, backends[0])


def rows(made: Bench, asked: Request, effort: Effort = EFFORT) -> list[Row | Refused]:
    return list(measure(made, asked.rounds(), effort))


def spoil_two(recv: Tensor) -> None:
    recv[5] += 1
    recv[7] = torch.nan


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather", "sendrecv"])
def test_wrong_elements_of_a_wrong_backend_are_counted(op: str) -> None:
    found = rows(bench(right=MadeUp(), wrong=MadeUp(spoil_two)), request("right", "wrong", op=op))
    right, wrong = found
    assert isinstance(right, Row) and isinstance(wrong, Row)
    assert [measured.wrong for measured in right.forms.values()] == [0] * len(right.forms)
    assert [measured.wrong for measured in wrong.forms.values()] == [2] * len(wrong.forms)


def test_wrong_elements_fail_the_run() -> None:
    found = [
        row for row in rows(bench(right=MadeUp(), wrong=MadeUp(spoil_two)), request("right", "wrong")) if isinstance(row, Row)
    ]
    require_right(found[:1])
    with pytest.raises(RankFailure, match=r"^4 elements are wrong: all_reduce on wrong$"):
        require_right(found)


def test_nothing_at_all_fails_the_run() -> None:
    found = rows(bench(unable=MadeUp(reason="never")), request("unable"))
    assert all(isinstance(each, Refused) for each in found) and len(found) == 2
    with pytest.raises(RankFailure, match="nothing was measured"):
        require_right([])


def test_a_backend_that_does_nothing_is_wrong() -> None:
    (row, _) = rows(bench(lazy=MadeUp(lambda recv: recv.fill_(101))), request("lazy"))
    assert isinstance(row, Row) and row.wrong > 400  # of 2 x 256 elements


def test_the_check_leaves_zeros_behind() -> None:
    made = bench(one=MadeUp())
    rows(made, request("one"))
    pool = made.pools[False]
    whole = Case("broadcast", pool.bytes // 2, pool.bytes // 2, "uint8", "none", 0, 2, "one", "hot")
    assert not any(cut.any() for cut in pool.take(whole, "out_of_place", 0))


def test_each_backend_goes_first_in_turn() -> None:
    said: list[str] = []

    class Says(MadeUp):
        def call(self, case: Case, form: Form, send: Tensor, recv: Tensor) -> Callable[[], object]:
            return lambda: said.append(case.backend)

    asked = request("a", "b", "c", op="all_to_all")
    rows(bench(a=Says(), b=Says(), c=Says()), asked, Effort(1, 3, check=False))
    assert "".join(said) == "abc" + "abc" + "bca" + "cab"


def test_calls_and_samples() -> None:
    wires = MadeUp()
    found = rows(bench(one=wires), request("one"), Effort(warm_up=2, iterations=3, pipelined=4))
    # 2 rows, itself and A/A, of 2 forms: 2 to warm up, 3 samples of 4, and 1 to check
    assert wires.calls == 4 * (2 + 3 * 4 + 1)
    assert [row.case.again for row in found if isinstance(row, Row)] == [False, True]
    first, again = found
    assert isinstance(first, Row) and isinstance(again, Row)
    assert all(len(measured.samples.slowest) == 3 for measured in first.forms.values())
    assert all(measured.ratio is None for measured in first.forms.values())
    assert all(measured.ratio is not None and measured.ratio.pairs == 3 for measured in again.forms.values())


def test_nothing_is_checked_if_not_asked() -> None:
    (row, _) = rows(bench(wrong=MadeUp(spoil_two)), request("wrong"), Effort(1, 1, check=False))
    assert isinstance(row, Row) and row.usual.wrong is None and row.wrong == 0


def test_an_operation_that_a_backend_lacks_is_told_once_and_left_out() -> None:
    def fail(recv: Tensor) -> None:
        raise RuntimeError("no such thing\nand more")

    class Fails(MadeUp):
        def call(self, case: Case, form: Form, send: Tensor, recv: Tensor) -> Callable[[], object]:
            return lambda: fail(recv)

    asked = Request(("all_reduce",), (64, 128), 2, ("able", "unable", "fails"), "able")
    found = rows(bench(able=MadeUp(), unable=MadeUp(reason="never"), fails=Fails()), asked)
    refused = [(each.case.backend, each.form, each.reason) for each in found if isinstance(each, Refused)]
    assert refused == [("unable", form, "never") for form in FORMS] + [
        ("fails", form, "RuntimeError: no such thing") for form in FORMS
    ]
    assert [(row.case.backend, row.case.size) for row in found if isinstance(row, Row)] == [("able", 64), ("able", 128)]


def a_case(op: str = "all_reduce", *, buffers: str = "cold", count: int = 64) -> Case:
    return Case(op, 4 * count, count, "float", "sum", -1, 2, "gloo", buffers)  # type: ignore[arg-type]


def test_cold_buffers_come_back_only_when_the_pool_is_used_up() -> None:
    case = a_case()
    pool = Pool(4 * buffer_bytes(case), lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    starts = [pool.take(case, "out_of_place", 0)[0].data_ptr() for _ in range(6)]
    assert len(set(starts)) == 4 and starts[4:] == starts[:2]
    hot = a_case(buffers="hot")
    assert len({pool.take(hot, "out_of_place", 0)[0].data_ptr() for _ in range(6)}) == 1
    assert pool_bytes([case], 1 << 20) >= 2 << 20 > pool_bytes([hot], 1 << 20)


def test_in_place_is_in_place() -> None:
    pool = Pool(1 << 14, lambda nbytes: torch.full((nbytes,), 7, dtype=torch.uint8))
    send, recv = pool.take(a_case(), "in_place", 1)
    assert send.data_ptr() == recv.data_ptr() and send.numel() == 64
    assert not send.any()  # so sums in place never overflow
    send, recv = pool.take(a_case("all_gather"), "in_place", 1)
    assert (send.numel(), recv.numel(), send.data_ptr() - recv.data_ptr()) == (64, 128, 256)
    send, recv = pool.take(a_case("reduce_scatter"), "in_place", 1)
    assert (send.numel(), recv.numel(), recv.data_ptr() - send.data_ptr()) == (128, 64, 256)
    send, recv = pool.take(a_case(), "out_of_place", 1)
    assert recv.data_ptr() - send.data_ptr() == 256


def test_buffers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the buffers need 1048576\.0 GiB on this host"):
        check_memory(1 << 40, 1024)


def setting() -> Setting:
    device = Device(0, 0, 12, "here", 0, "cpu", "a processor")
    return Setting(
        ("phalanx",), "phalanx", 2, "ranks=2", ("ranks",), (1024,), 2, "one", 1 << 16, 1 << 20, EFFORT, (device,), "now"
    )


def test_the_columns_stand_where_nccl_tests_has_them() -> None:
    found = [row for row in rows(bench(one=MadeUp(spoil_two)), request("one")) if isinstance(row, Row)]
    fields = line(found[0], "one").split()
    assert fields[:5] == ["1024", "256", "float", "sum", "-1"]
    median = found[0].forms["out_of_place"].samples.quantile(0.5) * 1e6
    assert float(fields[5]) == pytest.approx(median, abs=0.051)
    assert fields[8] == fields[12] == "2"
    assert len(fields) == 13 + len(["p50", "p95", "spread", "ratio", "low", "high", "buffers", "op", "backend"])
    assert fields[-3:] == ["cold", "all_reduce", "one"] and fields[16:19] == ["1.000", "nan", "nan"]
    again = line(found[1], "one").split()
    assert again[-1] == "one(A/A)" and float(again[17]) <= float(again[16]) <= float(again[18])
    # nothing is 1 times as fast as a baseline that was not measured
    assert line(found[0], "other").split()[16] == "nan"
    assert all(text.startswith("#") for text in (header(setting()) + "\n" + footer(setting(), found, 0.5)).splitlines())
    names = next(text for text in header(setting()).splitlines() if "algbw" in text)
    assert names.split()[1:14] == ["size", "count", "type", "redop", "root", *(["time", "algbw", "busbw", "#wrong"] * 2)]
    assert "# Out of bounds values : 8 FAILED" in footer(setting(), found, 0.0)


def test_a_form_that_does_not_exist_keeps_its_columns() -> None:
    row = rows(bench(one=MadeUp()), request("one", op="all_to_all"))[0]
    assert isinstance(row, Row)
    assert line(row, "one").split()[9:13] == ["nan", "nan", "nan", "N/A"]
    result = as_json(setting(), [row], [], "later")["results"][0]
    assert result["in_place"] is None and "in_place_per_iter" not in result


def test_json_has_the_keys_of_nccl_tests() -> None:
    found = [row for row in rows(bench(one=MadeUp()), request("one")) if isinstance(row, Row)]
    written = json.loads(json.dumps(as_json(setting(), found, [], "later")))
    assert {"version", "start_time", "args", "config", "results", "out_of_bounds", "average_bus_bandwidth", "end_time"} <= set(
        written
    )
    config = {"nthreads", "ngpus", "minimum_bytes", "maximum_bytes", "step_factor", "warmup_iters", "iterations", "validation"}
    assert config | {"aggregated_iterations", "devices"} <= set(written["config"])
    assert set(written["config"]["devices"][0]) == {"rank", "group", "pid", "hostname", "device", "device_hex", "device_info"}
    first, again = written["results"]
    assert (first["size"], first["count"], first["type"], first["redop"], first["root"]) == (1024, 256, "float", "sum", "-1")
    assert {"time", "alg_bw", "bus_bw", "nwrong"} <= set(first["out_of_place"]) and set(first["in_place"]) >= set(
        first["out_of_place"]
    )
    per_iteration = first["in_place_per_iter"]
    assert {"min_us", "max_us", "avg_us", "p50_us", "p95_us", "p99_us", "stdev_us", "cv_pct", "times_us"} <= set(per_iteration)
    assert per_iteration["per_process_max_times_us"] == [per_iteration["times_us"]] and len(per_iteration["times_us"]) == 3
    assert first["p50_us"] == first["in_place"]["time"] and first["p95_us"] >= first["p50_us"]
    assert (first["backend"], first["ratio"], first["a_a"], again["a_a"]) == ("one", None, False, True)
    assert again["ratio_low"] <= again["ratio"] <= again["ratio_high"]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_plot(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    asked = Request(("all_reduce", "all_to_all"), (64, 1024), 2, ("one", "two"), "one")
    found = [row for row in rows(bench(one=MadeUp(), two=MadeUp()), asked) if isinstance(row, Row)]
    plot(found, tmp_path / f"bench{suffix}", "title")
    begins = (tmp_path / f"bench{suffix}").read_bytes()[:5]
    assert begins == (b"<?xml" if suffix == ".svg" else b"\x89PNG\r")
