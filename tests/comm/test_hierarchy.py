"""Two-level collectives: the conformance suite, random worlds against exact results, and two real hosts with a link between them."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.bench.bed import Bed
from phalanx.bench.hierarchy import link_rate
from phalanx.cli.doctor import run as doctor
from phalanx.comm import CommError, Fabric, Group, Ledger, local, shm
from phalanx.comm.c10d import C10dTransport
from phalanx.comm.hierarchy import HierarchicalTransport
from phalanx.comm.hosts import by_host, hosts_of, machine, node_from, ring_crossings
from phalanx.comm.ledger import Recorded
from phalanx.comm.pipeline import Worker, run
from phalanx.comm.transport import Done, Transport
from phalanx.comm.watch.snapshot import parse
from phalanx.comm.wires import Wire, Wires, choose, seconds
from phalanx.hardware import Fit, Line, Profile
from phalanx.mesh import Mesh
from phalanx.train.config import TrainConfig
from phalanx.train.loop import train

HERE = Path(__file__).parent


def load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases = load("comm_cases", HERE / "cases.py")


def run_ranks(hosts, body, *, timeout: float = 10.0, **options) -> list:
    """body(hierarchical transport) in one thread per rank, over one fabric inside and between."""

    def rank(world):
        transport = HierarchicalTransport(world.transport, world.transport, hosts, **options)
        try:
            return body(transport)
        except BaseException as error:
            transport.abort(error)
            raise
        finally:
            transport.close()

    with local(Mesh(dp=len(hosts)), timeout=timeout) as world:
        return world.run(rank)


# The contract.


@pytest.mark.parametrize("scheme", ["columns", "leader", None])
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (1, 0, 0, 1), (0, 0, 0, 1), (0, 1, 2, 3)], ids=str)
def test_conformance(hosts, scheme) -> None:
    """Chunks of 24 bytes: every case that is not tiny is of several."""

    def body(t):
        group = t.group("all", range(4))
        for case in cases.CASES.values():
            case(t, group)

    run_ranks(hosts, body, scheme=scheme, wires=Wires(chunk_bytes=24))


def random_call(draw: random.Random, ranks) -> tuple:
    """(collective, op, dtype, elements of a slice) and what every rank of the group holds."""
    collective = draw.choice(["all_reduce", "reduce_scatter", "all_gather"])
    dtype = draw.choice([torch.float64, torch.int64, torch.float32, torch.bfloat16])
    op = draw.choice(["sum", "min", "max"] + ["mean"] * dtype.is_floating_point)
    shape = draw.choice([(draw.randint(1, 40),), (draw.randint(1, 5), draw.randint(1, 7))])
    if collective == "reduce_scatter":
        shape = (shape[0] * len(ranks), *shape[1:])
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    # small whole numbers: sums are exact in every type, up to the division of a mean
    held = {rank: torch.randint(-8, 9, shape, generator=generator).to(dtype) for rank in ranks}
    return collective, op, held


def expected(collective: str, op: str, held: dict[int, Tensor], at: int) -> Tensor:
    terms = list(held.values())
    if collective == "all_gather":
        return torch.cat(terms)
    stack = torch.stack(terms).to(torch.float64)
    total = {"sum": stack.sum(0), "mean": stack.sum(0) / len(terms), "min": stack.amin(0), "max": stack.amax(0)}[op]
    total = total.to(terms[0].dtype)
    return total if collective == "all_reduce" else total.tensor_split(len(terms))[at]


def issue(t: Transport, group: Group, collective: str, op: str, held: dict[int, Tensor], aliased: bool) -> tuple:
    """The handle and the tensor that will hold the result."""
    x, at = held[t.rank].clone(), group.index(t.rank)
    if collective == "all_reduce":
        return t.all_reduce(x, group, op), x
    if collective == "reduce_scatter":
        out = x.tensor_split(group.size)[at] if aliased else torch.empty_like(x.tensor_split(group.size)[at])
        return t.reduce_scatter(out, x, group, op), out
    out = x.new_empty(x.shape[0] * group.size, *x.shape[1:])
    if aliased:
        x = out.tensor_split(group.size)[at].copy_(x)
    return t.all_gather(out, x, group), out


def fuzz(seed: int) -> None:
    """Random hosts, a random group and the world in flight at once, six calls on each in one random order per rank."""
    draw = random.Random(seed)
    size = draw.randint(2, 8)
    hosts = [draw.randrange(draw.randint(1, 4)) for _ in range(size)]
    if draw.random() < 0.3:
        hosts = [rank % 2 for rank in range(size)] if draw.random() < 0.5 else [rank * 2 // size for rank in range(size)]
    groups = {"all": tuple(range(size)), "some": tuple(sorted(draw.sample(range(size), draw.randint(1, size))))}
    options = {
        "scheme": draw.choice(["columns", "leader", None]),
        "wires": Wires(chunk_bytes=draw.choice([1, 16, 100, 1 << 20])),
    }
    calls = {name: [random_call(draw, ranks) for _ in range(6)] for name, ranks in groups.items()}
    aliased = draw.random() < 0.5

    def body(t):
        opened = {name: t.group(name, ranks) for name, ranks in groups.items()}
        mine = [name for name, ranks in groups.items() if t.rank in ranks for _ in range(6)]
        random.Random(seed * 100 + t.rank).shuffle(mine)
        turn, flying = dict.fromkeys(groups, 0), []
        for name in mine:
            call = calls[name][turn[name]]
            turn[name] += 1
            flying.append((name, call, issue(t, opened[name], *call, aliased)))
        for name, (collective, op, held), (handle, got) in reversed(flying):
            handle.wait()
            want = expected(collective, op, held, opened[name].index(t.rank))
            torch.testing.assert_close(got, want, rtol=0, atol=0, msg=f"{seed}: {collective} {op} on {name} of {hosts}")

    run_ranks(hosts, body, **options)


@pytest.mark.parametrize("seed", range(60))
def test_random_worlds(seed: int) -> None:
    fuzz(seed)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_many_random_worlds() -> None:
    for seed in range(1000, 3000):
        fuzz(seed)


@pytest.mark.parametrize("scheme", ["columns", "leader"])
def test_hosts_are_summed_inside_first(scheme: str) -> None:
    """(1e16 - 1e16) + (1 + 1) is 2; in rank order 1e16 + 1 - 1e16 + 1 is 1."""
    terms = [1e16, 1.0, -1e16, 1.0]

    def body(t):
        x = torch.full((5,), terms[t.rank], dtype=torch.float64)
        t.all_reduce(x, t.group("all", range(4))).wait()
        return x.tolist()

    assert run_ranks((0, 1, 0, 1), body, scheme=scheme) == [[2.0] * 5] * 4
    assert run_ranks((0, 1, 0, 1), body, scheme="flat") == [[1.0] * 5] * 4


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1, 2, 2), (0, 1, 2, 2, 0, 1), (0, 0, 0, 1, 2, 2)], ids=str)
def test_all_ranks_have_the_same_bits(hosts) -> None:
    def body(t):
        x = cases.values(t.rank, 999).to(torch.float32)
        t.all_reduce(x, t.group("all", range(6))).wait()
        return x

    first, *others = run_ranks(hosts, body, scheme="columns", wires=Wires(chunk_bytes=512))
    assert all(torch.equal(first, other) for other in others)


# What goes where.


class OneHost(Recorded):
    """Of ranks (0, 1) and (2, 3)."""

    def group(self, name, ranks, *, p2p=False):
        assert len({rank // 2 for rank in ranks}) == 1, f"{name} of {ranks} leaves its host"
        return super().group(name, ranks, p2p=p2p)


@pytest.mark.parametrize(
    ("scheme", "op", "between"),
    [
        ("columns", "all_reduce", [("all_reduce", 2, 48)] * 4),
        ("leader", "all_reduce", [("all_reduce", 2, 96), None] * 2),
        ("columns", "reduce_scatter", [("reduce_scatter", 2, 48)] * 4),
        ("leader", "reduce_scatter", [("all_to_all", 2, 96), None] * 2),
        ("columns", "all_gather", [("all_gather", 2, 48)] * 4),
        ("leader", "all_gather", [("all_to_all", 2, 96), None] * 2),
    ],
)
def test_only_what_must_cross_does(scheme: str, op: str, between: list) -> None:
    """96 bytes in chunks of 64; (calls, bytes) on the wire between hosts, of each rank. Inside, no group leaves a host."""
    hosts = (0, 0, 1, 1)
    fabric = Fabric(4)

    def body(world):
        wires = fabric.transport(world.rank)
        inside, outside = OneHost(wires, Ledger(wires)), Recorded(wires, Ledger(wires))
        t = HierarchicalTransport(inside, outside, hosts, scheme=scheme, wires=Wires(chunk_bytes=64))
        group = t.group("all", range(4))
        inside.ledger.start()
        outside.ledger.start()
        x = torch.ones(12, dtype=torch.float64)
        handle, _ = issue(t, group, op, "sum", {t.rank: x[:3] if op == "all_gather" else x}, False)
        handle.wait()
        t.close()
        assert inside.ledger.totals(), "nothing went inside"
        return [(name, *counted) for (_, name), counted in outside.ledger.totals().items()]

    with local(Mesh(dp=4)) as world:
        told = world.run(body)
    assert told == [[] if want is None else [want] for want in between]


def test_messages_and_groups_of_one_host_stay_inside() -> None:
    fabric = Fabric(4)

    def body(world):
        wires = fabric.transport(world.rank)
        inside, outside = (Recorded(wires, Ledger(wires)) for _ in range(2))
        t = HierarchicalTransport(inside, outside, (0, 0, 1, 1))
        ring = t.group("ring", range(4), p2p=True)
        pairs = [t.group(f"pair@{first}", (first, first + 1)) for first in (0, 2)]
        inside.ledger.start()
        outside.ledger.start()
        got = torch.zeros(1)
        handles = [t.send(torch.tensor([float(t.rank)]), (t.rank + 1) % 4, ring), t.recv(got, (t.rank - 1) % 4, ring)]
        for handle in handles:
            handle.wait()
        assert got.item() == (t.rank - 1) % 4
        t.all_reduce(got, pairs[t.rank // 2]).wait()
        t.close()
        return [sorted((axis, op) for axis, op in ledger.totals()) for ledger in (inside.ledger, outside.ledger)]

    with local(Mesh(dp=4)) as world:
        told = world.run(body)
    near, far = ("ring/messages", "recv"), ("ring", "recv")
    sent_near, sent_far = ("ring/messages", "send"), ("ring", "send")
    pair = ("pair", "all_reduce")
    assert told == [[[pair, sent_near], [far]], [[pair, near], [sent_far]]] * 2


def test_chunks_overlap() -> None:
    """Three chunks through three stages: what a stage hands on is waited for only when the stage before has its next chunk."""
    log: list[str] = []

    class Watched(Done):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def wait(self) -> None:
            log.append(f"wait {self.name}")

    def stage(name: str) -> Callable[[int], Watched]:
        def start(k: int) -> Watched:
            log.append(f"{name}{k}")
            return Watched(f"{name}{k}")

        return start

    run(3, [stage("in"), stage("wire"), stage("out")])
    assert log == [
        *("in0", "in1", "wait in0", "wire0"),
        *("in2", "wait in1", "wire1", "wait wire0", "out0"),
        *("wait in2", "wire2", "wait wire1", "out1", "wait out0"),
        *("wait wire2", "out2", "wait out1", "wait out2"),
    ]  # fmt: skip


# Failures.


def test_a_failure_ends_the_group_and_reaches_every_rank() -> None:
    """Rank 3 never comes: the others hear of it from their handles, and later calls on the group are refused."""

    def body(t):
        group = t.group("all", range(4))
        if t.rank == 3:
            raise KeyError("my own mistake")
        first, second = t.all_reduce(torch.zeros(9), group), t.all_reduce(torch.zeros(9), group)
        for handle in (first, second, first):
            with pytest.raises(CommError, match="my own mistake"):
                handle.wait()
        assert first.done()
        with pytest.raises(CommError, match="refused"):
            t.all_reduce(torch.zeros(9), group)

    with pytest.raises(KeyError, match="my own mistake"):
        run_ranks((0, 0, 1, 1), body, scheme="columns")


def test_a_failure_inside_one_host_ends_the_other() -> None:
    """Shared memory of host 1 breaks, which host 0 cannot see: it hears through the wire, not after its 60 s."""
    between, inside = Fabric(4), [Fabric(4), Fabric(4)]

    def body(world):
        t = HierarchicalTransport(
            inside[world.rank // 2].transport(world.rank), between.transport(world.rank), (0, 0, 1, 1), scheme="columns"
        )
        group = t.group("all", range(4))
        if world.rank == 3:
            inside[1].abort(KeyError("broken"))
        with pytest.raises(CommError, match="broken"):
            t.all_reduce(torch.zeros(8), group).wait()
        t.close()

    started = time.monotonic()
    with local(Mesh(dp=4)) as world:
        world.run(body)
    assert time.monotonic() - started < 30


def test_a_worker_tells_its_failure_once_and_runs_nothing_after_it() -> None:
    told, ran = [], []

    def fails() -> None:
        raise RuntimeError("broken")

    worker = Worker("g", told.append)
    jobs = [worker.submit(fails), worker.submit(lambda: ran.append(1))]
    worker.close()
    assert [str(error) for error in told] == ["broken"]
    assert ran == []
    for job in jobs:
        with pytest.raises(RuntimeError, match="broken"):
            job.wait()
    with pytest.raises(CommError, match=r"'g': refused.*broken"):
        worker.submit(fails)
    worker.close()


def test_close_waits_for_what_is_in_flight() -> None:
    def body(t):
        x = torch.ones(100)
        t.all_reduce(x, t.group("all", range(4)))
        t.close()
        return x.sum().item()

    assert run_ranks((0, 0, 1, 1), body, scheme="leader") == [400.0] * 4


def test_the_transports_must_be_of_one_world() -> None:
    four, two = Fabric(4).transport(0), Fabric(2).transport(0)
    with pytest.raises(ValueError, match="hosts names 3 ranks, inside has 2 and between 4"):
        HierarchicalTransport(two, four, (0, 0, 1))


# Hosts, and the choice of a scheme.


def test_hosts_are_numbered_by_their_lowest_ranks_on_every_rank_alike() -> None:
    nodes, told = ["7", "3", "7", "3", "5"], {}
    store = dist.HashStore()

    def rank(r: int) -> None:
        told[r] = hosts_of(store, r, 5, node=nodes[r])

    threads = [Thread(target=rank, args=(r,)) for r in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == dict.fromkeys(range(5), (0, 1, 0, 1, 2))
    assert hosts_of(dist.HashStore(), 0, 1) == (0,)
    assert machine() == machine()
    assert node_from({"GROUP_RANK": "1", "RANK": "3"}) == "1"
    assert node_from({"SLURM_PROCID": "3"}) is None


def test_a_rank_that_does_not_come_ends_the_search_for_hosts() -> None:
    with pytest.raises(dist.DistError):
        hosts_of(dist.HashStore(), 0, 2, timeout=0.05)


def test_groups_by_host() -> None:
    assert by_host((5, 1, 3, 4), (9, 2, 9, 1, 2, 1)) == ((1, 4), (3, 5))
    assert ring_crossings((0, 1, 2, 3), (0, 0, 1, 1)) == 1
    assert ring_crossings((0, 1, 2, 3), (0, 1, 0, 1)) == 2
    assert ring_crossings((0, 1), (0, 0)) == 0


FAST = Wires(inside=Wire(1e-5, 1e10), between=Wire(1e-3, 1e8), handover_seconds=5e-3, chunk_bytes=1 << 20)


@pytest.mark.parametrize(
    ("op", "bytes", "sizes", "scheme"),
    [
        ("all_reduce", 1 << 26, (2, 2), "columns"),
        ("all_reduce", 1 << 26, (1, 2), "leader"),
        ("all_reduce", 1 << 26, (4,), "flat"),
        ("all_reduce", 1 << 10, (2, 2), "flat"),
        ("all_reduce", 1 << 10, (8, 8), "columns"),  # 2 steps between hosts instead of 30
        ("reduce_scatter", 1 << 10, (8, 8), "flat"),  # an exchange is 2 steps already
        ("all_reduce", 1 << 26, (1, 1), "flat"),  # a ring of two puts no more on the wire, and has no handover
        ("reduce_scatter", 1 << 26, (1, 1), "columns"),  # in chunks, so that both directions are busy
    ],
)
def test_choice(op: str, bytes: int, sizes: tuple[int, ...], scheme: str) -> None:
    assert choose(bytes, sizes, FAST, op=op) == scheme


def test_predicted_seconds_by_hand() -> None:
    """S = 4 MiB on 2 hosts with 2 ranks each, FAST: the formulas with numbers in them."""
    s, handover = 4 << 20, 5e-3
    assert seconds("flat", s, (2, 2), FAST) == pytest.approx(6e-3 + 1.5 * s / 1e8)
    assert seconds("flat", s, (2, 2), FAST, crossings=2) == pytest.approx(6e-3 + 3 * s / 1e8)
    assert seconds("flat", s, (2, 2), FAST, op="reduce_scatter") == pytest.approx(2e-3 + 1.25 * s / 1e8)
    assert seconds("flat", s, (2, 2), FAST, op="all_gather") == pytest.approx(3e-3 + 1.25 * 0.75 * s / 1e8)
    wire = 4 * 2e-3 + s / 1e8
    assert seconds("columns", s, (2, 2), FAST) == pytest.approx(handover + wire + (4 * 2e-5 + s / 1e10) / 4)
    assert seconds("leader", s, (2, 2), FAST) == pytest.approx(handover + wire + (4 * 2e-5 + 2 * s / 1e10) / 4)
    assert seconds("leader", s, (1, 3), FAST, op="all_gather") == pytest.approx(
        handover + 4e-3 + 0.75 * s / 1e8 + (4 * 4e-5 + 1.5 * s / 1e10) / 4
    )


def test_slow_insides_are_left_alone() -> None:
    """Where the inside is slower than the wire, two levels only add to it."""
    slow = Wires(inside=Wire(1e-3, 1e7), between=Wire(1e-5, 1e9))
    assert choose(1 << 26, (2, 2), slow) == "flat"


# Two real hosts. What runs there is at the end of this file.


@pytest.fixture(scope="module")
def two_hosts():
    with load("hosts", HERE.parent / "hosts.py").two_hosts("1gbit") as bed:
        yield bed


def on_two_hosts(bed: Bed, folder: Path, per_host: tuple[int, int], inside: str) -> list[dict]:
    if inside == "shm" and (why := shm.available()):
        pytest.skip(why)
    report = folder / "report"
    source = Path(sys.modules["phalanx"].__file__).parents[1]
    ends = bed.torchrun(
        [str(Path(__file__)), str(report), inside], per_host=per_host, seconds=150.0, env={"PYTHONPATH": str(source)}
    )
    assert [end.code for end in ends] == [0, 0], "\n".join(end.err for end in ends)
    return [json.loads(Path(f"{report}.{rank}").read_text()) for rank in range(4)]


def test_nothing_is_left_of_hosts_whose_work_does_not_end() -> None:
    names = []

    def stuck() -> None:
        with load("hosts", HERE.parent / "hosts.py").two_hosts() as bed:
            names.extend(host.name for host in bed.hosts)
            bed.run([["sh", "-c", "echo I began; sleep 1000"]] * 2, seconds=0.5)

    with pytest.raises(TimeoutError, match=r"0\.5 s\nout0: I began"):
        stuck()
    assert len(names) == 2
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in names if name in listed]


def test_where_hosts_are_not_permitted_the_test_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(pytest.skip.Exception, match="ip is not installed"), load("hosts", HERE.parent / "hosts.py").two_hosts():
        pass


@pytest.mark.timeout(180)
def test_two_hosts(two_hosts: Bed, tmp_path: Path) -> None:
    """The suite over shared memory and Gloo, and what really crossed, by the counters of the interfaces: no clock is involved."""
    for told in on_two_hosts(two_hosts, tmp_path, (2, 2), "shm"):
        assert told["hosts"] == [0, 0, 1, 1]
        assert told["passed"] == 3 * len(cases.CASES)
        assert told["same"]
        assert 2e7 < told["link"] < 1.3e8, "tbf lets 1.25e8 bytes per second through, less the headers"
        # a ring of four ranks puts 1.5 S on each direction, two levels S; headers are 4 percent, acknowledgements under 2
        assert 1.5 <= told["sent"]["flat"] < 1.65
        for scheme in ("columns", "leader"):
            assert 1.0 <= told["sent"][scheme] < 1.1


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize("inside", ["shm", "gloo"])
def test_two_uneven_hosts(inside: str, two_hosts: Bed, tmp_path: Path) -> None:
    for told in on_two_hosts(two_hosts, tmp_path, (1, 3), inside):
        assert told["hosts"] == [0, 1, 1, 1]
        assert told["passed"] == 3 * len(cases.CASES)
        assert told["same"]
        assert 1.0 <= told["sent"]["columns"] < 1.1


TEXT = "".join(f"{number} squared is {number * number}.\n" for number in range(4000))
TRAINED = {"model": "llama-tiny", "mesh": "dp=2,tp=2", "steps": 3, "batch": 4, "seq": 16, "checkpoint_every": 0}


def options(config: dict) -> list[str]:
    return [word for name, value in config.items() for word in (f"--{name}", str(value))]


def sums_of(folder: Path, rank: int) -> dict[str, int]:
    """{group: all_reduce calls} of a rank, of the groups over Gloo: its ring, under the names that the transport gave."""
    view = parse((folder / "flight" / f"rank{rank}.ring").read_bytes())
    counted = dict.fromkeys((group.axis for group in view.groups.values()), 0)
    for op in view.ops:
        counted[view.groups[op.group].axis] += op.op == "all_reduce"
    return counted


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same training on threads."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "text").write_text(TEXT)
    config = TrainConfig(**TRAINED, data=(str(folder / "text"),), out=folder / "run")
    with local(config.parsed_mesh()) as world:
        train(config, world)
    return losses(folder / "run")


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("wires", ["usual", pytest.param("measured", marks=pytest.mark.nightly)])
def test_training_over_two_hosts(wires: str, two_hosts: Bed, on_one_host: list[float], tmp_path: Path) -> None:
    """tp inside, dp between. A step ends with a sum of 32 bytes over all ranks: by the usual wires a handover is cheaper than four of
    the six steps of a ring, by those of this profile, between which nothing takes time, it is not."""
    if why := shm.available():
        pytest.skip(why)
    (tmp_path / "text").write_text(TEXT)
    given = {**TRAINED, "data": tmp_path / "text", "out": tmp_path / "run"}
    if wires == "measured":
        given["profile"] = tmp_path / "profile.json"
        line = Line("direct", 0.0, 0.0, (0.0, 0.0), (0.0, 0.0))
        links = tuple(Fit("sendrecv", axis, backend, 2, line) for axis, backend in (("dp", "gloo"), ("tp", "shm")))
        Profile("a machine", "cpu", 4, {}, (), (), links).save(given["profile"])
    source = Path(sys.modules["phalanx"].__file__).parents[1]
    ends = two_hosts.torchrun(["-P", "-m", "phalanx", "train", *options(given)], seconds=150.0, env={"PYTHONPATH": str(source)})
    assert [end.code for end in ends] == [0, 0], "\n".join(end.err for end in ends)
    # float32 sums in another order: some 1e3 additions of 6e-8 each
    assert losses(tmp_path / "run") == pytest.approx(on_one_host, rel=1e-4)
    for rank in range(4):
        counted = sums_of(tmp_path / "run", rank)
        place = rank % 2
        # tp stays inside, where it is not watched; of dp every host has one rank, which is a column by itself
        assert set(counted) - {"default_pg"} == {
            f"dp@{place}", f"dp@{place}/column0", "world@0", f"world@0/column{place}"
        }  # fmt: skip
        assert counted[f"dp@{place}"] + counted[f"dp@{place}/column0"] == 21
        two_levels = (counted["world@0"], counted[f"world@0/column{place}"])
        assert two_levels == ((0, 5) if wires == "usual" else (5, 0))  # 3 steps, and 2 of the start
    assert doctor.main([str(tmp_path / "run")]) == 0


@pytest.mark.timeout(180)
def test_ranks_that_are_alone_on_their_hosts_take_gloo(two_hosts: Bed, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ALONE)
    source = Path(sys.modules["phalanx"].__file__).parents[1]
    ends = two_hosts.torchrun([str(script)], per_host=(1, 1), seconds=120.0, env={"PYTHONPATH": str(source)})
    assert [end.code for end in ends] == [0, 0], "\n".join(end.err for end in ends)
    assert [end.out for end in ends] == ["C10dTransport gloo [3.0, 3.0]\n"] * 2
    if shm.available() is None:
        assert (
            ends[0].err.count("CPU ranks communicate over Gloo, not through shared memory: every rank is on a host of its own")
            == 1
        )


ALONE = """
import torch, phalanx as phx
with phx.init(phx.Mesh(dp=2)) as world:
    x = torch.full((2,), 1.0 + world.rank)
    world.transport.all_reduce(x, world.group("dp")).wait()
    wires = world.transport.inner
    print(type(wires).__name__, wires.backend, x.tolist())
"""


def sent_bytes() -> int:
    """By the network interface of this host, headers included."""
    rows = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(counts.split()[8]) for name, counts in rows if name.strip() != "lo")


def _main(report: str, backend: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    hosts = hosts_of(store, rank, size, node=node_from(os.environ))
    told = {"hosts": hosts, "passed": 0, "sent": {}, "link": link_rate(store, rank, 0, hosts.index(1), 16 << 20)}
    inside = C10dTransport(torch.device("cpu"), backend=backend, timeout=30.0)
    between = C10dTransport(torch.device("cpu"), backend="gloo", timeout=30.0, owns_default=True)
    x, results = torch.arange(2 << 20, dtype=torch.float32), []
    for scheme in ("flat", "columns", "leader"):
        t = HierarchicalTransport(inside, between, hosts, scheme=scheme, wires=Wires(chunk_bytes=24))
        t.group = _under(scheme, t)
        everybody = t.group("all", range(size))
        for case in cases.CASES.values():
            case(t, everybody)
            told["passed"] += 1
        t = HierarchicalTransport(inside, between, hosts, scheme=scheme, wires=Wires(chunk_bytes=1 << 20))
        everybody = t.group(f"large {scheme}", range(size))
        results.append(x + rank)
        dist.barrier()
        before = sent_bytes()
        dist.barrier()  # nobody starts before everybody has read the counter
        t.all_reduce(results[-1], everybody).wait()
        dist.barrier()
        told["sent"][scheme] = (sent_bytes() - before) / (4 * len(x))
    told["same"] = all(torch.equal(result, 4 * x + 6) for result in results)  # whole numbers below 2**24: exact
    t.close()
    Path(f"{report}.{rank}").write_text(json.dumps(told))


def _under(prefix: str, t: HierarchicalTransport) -> Callable:
    """Opens groups under a name of this scheme, since the cases of every scheme open the same ones."""
    plain = t.group
    return lambda name, ranks, p2p=False: plain(f"{prefix} {name}", ranks, p2p=p2p)


if __name__ == "__main__":
    _main(*sys.argv[1:])
