"""Every transport passes the one suite in cases.py; and what is particular to threads and to processes."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import re
import runpy
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.comm import CommError, Delay, DryTransport, Fabric, Group, local
from phalanx.mesh import Mesh

HERE = Path(__file__).parent


def load_cases():
    spec = importlib.util.spec_from_file_location("comm_cases", HERE / "cases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases = load_cases()


def run_ranks(size: int, body, **options) -> list:
    """body(transport, group of all) in one thread per rank; the first exception aborts the others."""

    def rank(world):
        return body(world.transport, world.group(world.mesh.names))

    with local(Mesh(dp=size), **options) as world:
        return world.run(rank)


@pytest.mark.parametrize("rendezvous", [False, True], ids=["buffered", "rendezvous"])
@pytest.mark.parametrize("name", cases.CASES)
def test_threads(name: str, rendezvous: bool) -> None:
    run_ranks(cases.SIZE, cases.CASES[name], rendezvous=rendezvous, timeout=10.0)


class Processes:
    """Ranks as real processes that run a file with JOB set; forked from a server that has torch imported already."""

    def __init__(self, path: Path, jobs: list[tuple]) -> None:
        context = multiprocessing.get_context("forkserver")
        # Only what is installed: the server of Python 3.11 does not get pytest's sys.path and would skip our own in silence.
        context.set_forkserver_preload(["torch.distributed", "torch.testing", "pytest"])
        self.processes = [
            context.Process(target=runpy.run_path, args=(str(path), {"JOB": job}, "__rank__"), daemon=True) for job in jobs
        ]
        for process in self.processes:
            process.start()

    def join(self, seconds: float) -> list[int | None]:
        """The exit codes; processes that are late are killed."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()
        return [process.exitcode for process in self.processes]


@pytest.fixture(scope="session", params=["gloo", "shm"])
def process_results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of four processes reports after all cases: one start for the whole session."""
    folder = tmp_path_factory.mktemp(request.param)
    report = folder / "report"
    jobs = [(rank, str(folder / "store"), str(report), request.param) for rank in range(cases.SIZE)]
    Processes(HERE / "cases.py", jobs).join(90.0)
    paths = [Path(f"{report}.{rank}") for rank in range(cases.SIZE)]
    return [json.loads(path.read_text()) if path.exists() else {"failure": "no report"} for path in paths]


@pytest.mark.parametrize("name", cases.CASES)
def test_processes(name: str, process_results: list[dict[str, str]]) -> None:
    for rank, results in enumerate(process_results):
        assert results.get(name) == "passed", f"rank {rank}: {results.get('failure', 'not reached')}"


@pytest.mark.parametrize(
    ("backend", "end", "code", "blame"),
    [
        ("gloo", "dies", 1, r"no sign of life within 3 s from rank 2:"),
        ("gloo", "raises", 0, r"rank 2 gave up with KeyError\('my own mistake'\):"),
        ("shm", "dies", 1, r"rank 2 \(process \d+\) died"),
        ("shm", "raises", 0, r"rank 2 gave up with KeyError\('my own mistake'\)"),
    ],
)
def test_a_process_that_ends_is_named_by_every_survivor(tmp_path: Path, backend: str, end: str, code: int, blame: str) -> None:
    """The others get an error that names it, the call and the group, long before the timeout of 30 s."""
    report = tmp_path / "report"
    jobs = [(rank, str(tmp_path / "store"), str(report), backend, end) for rank in range(3)]
    assert Processes(HERE / "deserter.py", jobs).join(60.0) == [0, 0, code], "survivors end by themselves"
    for rank in (0, 1):
        told = json.loads(Path(f"{report}.{rank}").read_text())
        assert told["type"] == "CommError", told
        call = r"all_reduce\(sum\) of (\(4,\)|4) float32 on group 'world@0' \(ranks 0, 1, 2\).* failed"
        assert re.search(f"{call}.*{blame}", told["message"]), told["message"]
        assert told["seconds"] < 20
        assert "refused" in told["later"]
        assert told["closed"]


def test_processes_join_as_torchrun_starts_them(tmp_path: Path) -> None:
    """The agent's store is ours, on a port that the system chose; so no two runs can collide."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    report = tmp_path / "report"
    jobs = []
    for rank in range(4):
        environment = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 1}
        jobs.append((rank, {name: str(value) for name, value in environment.items()}, str(report)))
    Processes(HERE / "joiner.py", jobs).join(60.0)
    for rank in range(4):
        told = json.loads(Path(f"{report}.{rank}").read_text())
        assert "mesh dp=3 has 3 ranks, but torchrun started 4; nearest that fit: dp=4" in told["refused"]
        tp, dp = divmod(rank, 2)  # Mesh(tp=2, dp=2): tp is the slower axis
        assert told["sums"] == [(1 + dp) + (3 + dp), (1 + 2 * tp) + (2 + 2 * tp), 10]
        assert told["grad"] == [[2 * 2 * (1.0 + rank), 2 * 2 * 2.0]]  # both ranks square the whole: twice 2x
        assert told["totals"] == [["tp", "all_gather", 1, 32], ["tp", "reduce_scatter", 1, 32]]
        assert told["complete"] == 2
        assert told["epoch"] == 1
        assert told["closed"]


# Threads alone.


def test_ranks_that_diverge_are_told_both_calls() -> None:
    seen: list[str] = []

    def body(t, g):
        size, op = (3, "max") if t.rank == 1 else (4, "sum")
        with pytest.raises(ValueError, match="disagree") as caught:
            t.all_reduce(torch.zeros(size), g, op).wait()
        seen.append(str(caught.value))

    run_ranks(3, body)
    assert len(seen) == 3
    for message in seen:
        assert "rank 1 issued all_reduce(max) of (3,) float32" in message
        assert "issued all_reduce(sum) of (4,) float32" in message
        assert "'dp@0'" in message


@pytest.mark.parametrize(
    "other",
    [
        lambda t, g: t.all_reduce(torch.zeros(4, dtype=torch.float64), g),
        lambda t, g: t.all_reduce(torch.zeros(2, 2), g),
        lambda t, g: t.all_reduce(torch.zeros(4), g, "mean"),
        lambda t, g: t.broadcast(torch.zeros(4), 0, g),
        lambda t, g: t.barrier(g),
    ],
    ids=["dtype", "shape", "reduction", "operation", "barrier"],
)
def test_every_part_of_the_signature_counts(other) -> None:
    def body(t, g):
        (other(t, g) if t.rank else t.all_reduce(torch.zeros(4), g)).wait()

    with pytest.raises(ValueError, match="disagree"):
        run_ranks(2, body)


def test_roots_must_agree() -> None:
    with pytest.raises(ValueError, match=r"root 0.*root 1|root 1.*root 0"):
        run_ranks(2, lambda t, g: t.broadcast(torch.zeros(4), t.rank, g).wait())


def test_a_message_of_another_shape_is_refused() -> None:
    def body(t, g):
        if t.rank == 0:
            t.send(torch.zeros(3), 1, g).wait()
        else:
            t.recv(torch.zeros(4), 0, g).wait()

    with pytest.raises(ValueError, match=r"\(3,\).*\(4,\)|\(4,\).*\(3,\)"):
        run_ranks(2, body)


def test_all_to_all_sizes_must_match_across_ranks() -> None:
    def body(t, g):
        t.all_to_all([torch.zeros(2)] * 2, [torch.zeros(2), torch.zeros(2 + t.rank)], g).wait()

    with pytest.raises(ValueError, match=r"position 1 sends \(3,\) to position 1, which expects \(2,\)"):
        run_ranks(2, body)


def test_a_rank_that_does_not_come_is_named() -> None:
    def body(t, g):
        if t.rank != 2:
            t.all_gather(torch.zeros(4, 2), torch.zeros(1, 2), g).wait()

    with pytest.raises(TimeoutError, match=r"all_gather of \(1, 2\) float32 on group 'dp@0'.*waited 0.2 s for rank 2, which"):
        run_ranks(4, body, timeout=0.2)


def test_a_message_that_is_not_sent_is_named() -> None:
    def body(t, g):
        if t.rank == 0:
            t.recv(torch.zeros(2), 1, g).wait()

    with pytest.raises(TimeoutError, match="for rank 1"):
        run_ranks(2, body, timeout=0.2)


@pytest.mark.parametrize("culprit", range(3))
def test_the_first_failure_wakes_every_rank(culprit: int) -> None:
    """Blocked and later calls of the others raise with the reason; nobody waits for the timeout of 60 s."""
    seen: dict[int, list[BaseException]] = {}
    cause = KeyError("my own mistake")

    def body(t, g):
        if t.rank == culprit:
            raise cause
        with pytest.raises(CommError, match="my own mistake") as blocked:
            t.all_reduce(torch.zeros(2), g).wait()
        with pytest.raises(CommError, match="my own mistake") as later:
            t.barrier(Group("alone", (t.rank,)))
        seen[t.rank] = [blocked.value, later.value]

    started = time.monotonic()
    with pytest.raises(KeyError, match="my own mistake") as caught:
        run_ranks(3, body)
    assert time.monotonic() - started < 30
    assert caught.value is cause
    assert f"raised on rank {culprit}" in caught.value.__notes__
    assert len(seen) == 2
    for errors in seen.values():
        for error in errors:
            chain = error
            while chain.__cause__ is not None:
                chain = chain.__cause__
            assert chain is cause


def test_half_precision_is_summed_in_float32() -> None:
    """256 + 1 + 1 is 258 in bfloat16's own grid of 2, but 256 + 1 rounds back to 256: adding in bfloat16 gives 256."""

    def body(t, g):
        x = torch.tensor([256.0 if t.rank == 0 else 1.0], dtype=torch.bfloat16)
        piece = torch.empty(1, dtype=torch.bfloat16)
        t.reduce_scatter(piece, x.expand(3).contiguous(), g).wait()
        t.all_reduce(x, g).wait()
        return x.item(), piece.item()

    assert run_ranks(3, body) == [(258.0, 258.0)] * 3


def test_the_sum_is_taken_in_rank_order_whoever_comes_last() -> None:
    """1e16 + 1 - 1e16 is 0 in this order and 1 in others: the bits show the order."""
    terms = [1e16, 1.0, -1e16]
    for last in range(3):
        turn = threading.Barrier(3)

        def body(t, g, last=last, turn=turn):
            x = torch.tensor([terms[t.rank]], dtype=torch.float64)
            if t.rank == last:
                turn.wait()
                handle = t.all_reduce(x, g)
            else:
                handle = t.all_reduce(x, g)
                turn.wait()
            handle.wait()
            return x.item()

        assert run_ranks(3, body) == [0.0] * 3


def test_issuing_does_not_block() -> None:
    """Both ranks receive before they send, which a blocking call would never survive."""

    def body(t, g):
        x = torch.zeros(2)
        handle = t.recv(x, 1 - t.rank, g)
        early = handle.done()
        t.barrier(g).wait()
        t.send(torch.ones(2), 1 - t.rank, g)
        handle.wait()
        return early, x.sum().item()

    assert run_ranks(2, body) == [(False, 2.0)] * 2


def test_a_rendezvous_send_completes_only_when_it_is_received() -> None:
    def body(t, g):
        if t.rank == 0:
            handle = t.send(torch.ones(1), 1, g)
            before = handle.done()
            t.barrier(g).wait()
            handle.wait()
            return before
        t.barrier(g).wait()
        t.recv(torch.zeros(1), 0, g).wait()
        return None

    assert run_ranks(2, body, rendezvous=True)[0] is False
    assert run_ranks(2, body, rendezvous=False)[0] is True


def test_a_buffered_send_lets_the_sender_write_its_tensor_again() -> None:
    def body(t, g):
        if t.rank == 0:
            x = torch.ones(1)
            t.send(x, 1, g).wait()
            x.fill_(5)
            t.barrier(g).wait()
            return None
        t.barrier(g).wait()
        x = torch.zeros(1)
        t.recv(x, 0, g).wait()
        return x.item()

    assert run_ranks(2, body)[1] == 1.0


def test_two_ranks_that_both_send_first_deadlock_only_with_rendezvous() -> None:
    def body(t, g):
        t.send(torch.ones(1), 1 - t.rank, g).wait()
        t.recv(torch.zeros(1), 1 - t.rank, g).wait()

    run_ranks(2, body)
    with pytest.raises(TimeoutError, match="did not arrive"):
        run_ranks(2, body, rendezvous=True, timeout=0.2)


def test_a_delayed_call_is_done_when_its_time_has_passed() -> None:
    """0.05 s each, one behind the other on one channel; bounds from below only, since a busy machine may be late."""

    def body(t, g):
        start = time.perf_counter()
        first, second = t.all_reduce(torch.zeros(1), g), t.all_reduce(torch.zeros(1), g)
        early = first.done()
        second.wait()
        waited = time.perf_counter() - start
        ends = first.finished(), second.finished()
        return early, waited, ends[1] - ends[0]

    for early, waited, apart in run_ranks(2, body, delay=Delay(seconds=0.05)):
        assert not early
        assert waited >= 0.05
        assert apart >= 0.05 - 1e-9


def test_a_delay_counts_bytes() -> None:
    assert Delay(seconds=1.0, seconds_per_byte=0.5).of(4) == 3.0

    def body(t, g):
        start = time.perf_counter()
        t.all_reduce(torch.zeros(1000), g).wait()
        return time.perf_counter() - start

    assert all(seconds >= 0.04 for seconds in run_ranks(2, body, delay=Delay(seconds_per_byte=1e-5)))


def test_nothing_is_left_behind_on_a_fabric() -> None:
    fabric = Fabric(2)
    group = Group("g", (0, 1))
    transports = [fabric.transport(rank) for rank in range(2)]
    x = [torch.ones(2), torch.ones(2)]
    handles = [t.all_reduce(y, group) for t, y in zip(transports, x, strict=True)]
    for handle in handles:
        handle.wait()
        assert handle._meeting.posts == []  # the tensors are let go
    assert fabric.meetings == {}
    assert x[0].tolist() == [2.0, 2.0]


@pytest.fixture
def dry() -> Iterator[DryTransport]:
    transport = DryTransport(5, 8)
    yield transport
    transport.close()


def test_dry_fills_zeros_and_counts(dry: DryTransport) -> None:
    group = dry.group("tp@4", (4, 5, 6, 7))
    out = torch.ones(8, 3)
    dry.all_gather(out, torch.ones(2, 3), group).wait()
    assert out.sum() == 0
    piece = torch.ones(2, 3)
    assert dry.reduce_scatter(piece, torch.ones(8, 3), group).done()
    assert piece.sum() == 0
    x = torch.ones(5)
    dry.all_reduce(x, group).wait()
    dry.all_reduce(x, group).wait()
    assert x.tolist() == [1.0] * 5
    dry.recv(x, 0, group).wait()
    assert x.sum() == 0
    assert dry.counts == {
        ("tp@4", "all_gather"): (1, 96),
        ("tp@4", "reduce_scatter"): (1, 96),
        ("tp@4", "all_reduce"): (2, 40),
        ("tp@4", "recv"): (1, 20),
    }


def test_dry_refuses_what_others_refuse(dry: DryTransport) -> None:
    cases.what_does_not_fit_is_refused(dry, dry.group("g", (4, 5, 6, 7)))
    with pytest.raises(ValueError, match="rank 8 is outside a world of 8"):
        DryTransport(8, 8)


def test_dry_in_a_group_of_one(dry: DryTransport) -> None:
    cases.a_group_of_one_moves_nothing(dry, dry.group("g", (4, 5, 6, 7)))
    assert dry.counts == {}
