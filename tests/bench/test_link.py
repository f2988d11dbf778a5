"""What the benchmark of overlap over a slow link measures: the tape is the step's communication, and the floors are arithmetic."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import phalanx as phx
from phalanx.bench import bed, link
from phalanx.bench.tape import Alone, Issued, Tape, replay
from phalanx.comm.ledger import Recorded
from phalanx.comm.threads import Fabric
from phalanx.comm.transport import Group
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.run.step import Step
from phalanx.schedule.explain import explain
from phalanx.schedule.view import from_program

CONFIG = LlamaConfig(vocab=32, hidden=16, inner=24, layers=3, heads=2, kv_heads=1)
GENERATOR = torch.Generator().manual_seed(0)
BATCH = {key: torch.randint(0, 32, (4, 8), generator=GENERATOR) for key in ("tokens", "targets")}


@contextmanager
def training(way: str):
    """A step on two ranks that has run twice, so that what is gathered once a step is."""
    torch.manual_seed(0)
    with phx.local(phx.Mesh(dp=2)) as world:
        step = phx.parallelize(Llama(CONFIG), world, loss=loss, example=BATCH, zero=link.storage(way), layout={"batch": "dp"})
        step(BATCH)
        step(BATCH)
        yield step


def on_each(step: Step, fn) -> list:
    by_rank = {executor.world.rank: executor for executor in step.executors}
    return step.world.run(lambda world: fn(by_rank[world.rank]))


def taped(executor) -> Tape:
    tape = Tape(executor.world.transport.inner)
    with tape.of(executor.world):
        executor.step(BATCH)
    return tape


@pytest.mark.parametrize("way", ["dp", "zero1", "zero2", "zero3", "zero3:2"])
def test_a_tape_has_the_calls_that_explain_lists_and_a_replay_makes_them_again(way: str) -> None:
    with training(way) as step:
        tapes = on_each(step, taped)
        said = sorted((row.op, row.bytes) for row in explain(step.program, step.schedule).rows for _ in range(row.count))
        for tape in tapes:
            assert sorted((issued.op, issued.bytes) for issued in tape.calls) == said
            waited = [move for move in tape.moves if isinstance(move, int)]
            assert sorted(waited) == list(range(len(tape.calls))) == sorted(tape.blocked)

        def replayed(executor) -> Tape:
            second = Tape(executor.world.transport.inner)
            with second.of(executor.world):
                replay(tapes[executor.world.rank], executor.world.transport)()
            return second

        again = on_each(step, replayed)
    for tape, second in zip(tapes, again, strict=True):
        assert [(i.op, i.group, i.bytes) for i in second.calls] == [(i.op, i.group, i.bytes) for i in tape.calls]
        assert [move for move in second.moves if isinstance(move, int)] == [m for m in tape.moves if isinstance(m, int)]
        assert second.crossing == tape.crossing


def test_the_ledger_is_the_worlds_own_again_after_a_tape() -> None:
    with training("dp") as step:
        before = [executor.world.ledger for executor in step.executors]
        on_each(step, taped)
        assert [executor.world.ledger for executor in step.executors] == before
        assert not any(ledger.enabled for ledger in before)


def test_bytes_that_cross() -> None:
    group = Group("dp", (0, 1, 2, 3))
    sizes = [Issued(op, group, 800, None).crossing for op in ("all_reduce", "all_gather", "reduce_scatter")]
    assert sizes == [1200, 600, 600]


@pytest.mark.parametrize("way", ["dp", "zero1", "zero3"])
def test_a_step_alone_sends_only_its_scalars(way: str) -> None:
    def alone(executor) -> tuple[list[int], float]:
        world, real = executor.world, executor.world.transport.inner
        tape = Tape(real)
        tape.start()
        with Alone(Recorded(real, tape)).of(world):
            out = executor.step(BATCH)
        assert world.transport.inner is real
        return [issued.bytes for issued in tape.calls], out.loss

    with training(way) as step:
        (first, loss_of_first), (second, loss_of_second) = on_each(step, alone)
    assert first == second == [8, 32]
    assert loss_of_first == loss_of_second and loss_of_first > 0


def test_what_alone_gives_back() -> None:
    group, wire = Group("dp", (0, 1)), Alone(Fabric(2).transport(1))
    out = torch.zeros(4)
    wire.all_gather(out, torch.tensor([1.0, 2.0]), group).wait()
    assert out.tolist() == [1, 2, 1, 2]
    own = torch.arange(40.0)[20:]
    wire.reduce_scatter(out[:2], torch.tensor([1.0, 2.0, 3.0, 4.0]), group).wait()
    assert out[:2].tolist() == [3, 4]
    whole = torch.arange(40.0)
    wire.reduce_scatter(whole[20:], whole, group).wait()  # in place, as a rank's slice of its own buffer
    assert torch.equal(whole[20:], own)
    wire.all_reduce(whole, group).wait()
    assert torch.equal(whole, torch.arange(40.0))


def test_the_floor_of_a_list() -> None:
    """Five segments of one second forward and two backward, and an update of one."""
    with training("dp") as step:
        view, schedule = from_program(step.program, None), step.schedule
        kinds = {"F": 1.0, "B": 2.0}
        seconds = {(a.kind, a.segment): kinds.get(a.kind, 1.0) for a in schedule.ranks[0] if a.kind in ("F", "B", "OPT")}
        total = sum(seconds.values())
        assert total == 16.0
        moved = [
            (a.segment, sum(w.bytes for w in view.segments[a.segment].weights)) for a in schedule.ranks[0] if a.kind == "REDUCE"
        ]
    assert [segment for segment, _ in moved] == [4, 3, 2, 1, 0]
    everything = sum(size for _, size in moved)
    # So slow that all is queued behind the first: what is left of it when the last backward ends, and the two messages of scalars.
    slow = link.Floor.of(schedule, view, seconds, 1000.0)
    assert slow.list_seconds == pytest.approx(7.0 + 1000.0 + 1.0, rel=0.01)
    assert slow.unhideable_seconds == pytest.approx(slow.list_seconds - total, abs=1e-6)
    # So fast that each is gone before the next is issued: the prologue's and the norm are left.
    fast = link.Floor.of(schedule, view, seconds, 0.5)
    assert fast.unhideable_seconds == pytest.approx(0.5 * (moved[-1][1] + 32) / (everything + 40), rel=1e-6)
    assert fast.list_seconds == pytest.approx(total + fast.unhideable_seconds, abs=1e-6)


def test_ratios_are_medians_of_rounds() -> None:
    samples = {"computation": [(2.0, 0), (4.0, 0), (1.0, 0)], "communication": [(1.0, 0), (1.0, 0), (3.0, 0)]}
    samples["step"] = [(3.0, 0), (4.0, 0), (6.0, 0)]
    found = link.Measured("dp", samples, link.Floor(0.0, 1.0), Tape(Fabric(1).transport(0)), 1.0)
    assert found.ratio(max) == 1.5  # of 1.5, 1 and 2
    assert found.ratio(lambda a, b: a + b) == 1.0  # of 1, 0.8 and 1.5
    assert found.median("step") == 4.0


@pytest.mark.parametrize("way", ["zero4", "dp:2", "zero3:x", ""])
def test_a_word_that_is_no_way(way: str) -> None:
    with pytest.raises(ValueError, match="is no way to train"):
        link.storage(way)


def test_without_the_right_to_make_hosts_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refused(rate: str):
        raise bed.NotPermitted("`ip netns add` failed: Operation not permitted")
        yield

    monkeypatch.setattr(link, "two_hosts", refused)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="Operation not permitted\nnetwork namespaces need root"):
        link.main(["--quick"])


@pytest.mark.nightly
def test_on_two_hosts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command. Bytes do not cross faster than the wire carries them, but for the burst that it lets pass at once."""
    monkeypatch.setenv("PYTHONPATH", str(Path(link.__file__).parents[2]))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    try:
        link.main(["--quick", "--hidden", "128", "--layers", "4", "--batch", "4", "--ways", "dp,zero3"])
    except SystemExit as refused:
        if isinstance(refused.__cause__, bed.NotPermitted):
            pytest.skip(str(refused))
        raise
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines() if line[0] != " "][1:] == ["dp", "zero3"]
    assert all(float(share) > 0.8 for share in re.findall(r"([\d.]+) of the wire's", said))
    assert len(re.findall(r"step / max\(both\) [\d.]+", said)) == 2
