"""What `phalanx bench peers` counts is exact, both sides do the same job, and a side on another transport than it claims is an error."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import phalanx as phx
from phalanx.bench.peers import cuda
from phalanx.bench.peers.audit import OPERATORS, SENT, Tracker, sent_bytes
from phalanx.bench.peers.compare import Refused, Row, assert_used, gap_closed, quartiles
from phalanx.bench.peers.frameworks import Stage, llama, parameter_groups, plain_step, schedule_of, stages_of
from phalanx.bench.peers.jobs import JAX_JOBS, JOBS, QUICK_SHAPES, SHAPES, WEIGHT_DECAY, Job, chosen
from phalanx.bench.peers.ours import Silent, our_step
from phalanx.bench.peers.report import plot, save, show
from phalanx.comm.world import World
from phalanx.mesh import Mesh
from phalanx.models.llama import LlamaConfig

QUICK = QUICK_SHAPES["quick"]
PARAMETERS = sum(p.numel() for p in llama(QUICK).parameters())


# What is counted


def test_peak_is_of_what_is_alive_at_once() -> None:
    before = torch.ones(1000)
    tracker = Tracker()
    kept = torch.ones(250)  # 1000 bytes
    with tracker:
        tracker.begin()
        assert tracker.peak_bytes == 1000
        a = kept + 1  # 2000
        b = a.view(10, 25)[:5] * 2  # a view costs nothing, its product 500
        assert tracker.peak_bytes == 2500
        del a, b
        c = torch.cat((kept, kept))  # 3000, above 2500 only if a and b still counted
        assert tracker.peak_bytes == 3000
        before.add_(1)  # somebody else's
        assert tracker.live_bytes() == 3000
        c.untyped_storage().resize_(0)
        assert tracker.live_bytes() == 1000
        c.untyped_storage().resize_(8000)  # as FSDP2 fills it again: no operator sees that, but the next one on it
        c.zero_()
        assert tracker.peak_bytes == 9000


def test_shared_memory_counts() -> None:
    from phalanx import shm

    if shm.available() is not None:
        pytest.skip("shared memory is not available here")
    tracker = Tracker()
    with tracker:
        x = shm.empty(100)
        x.zero_()
        assert tracker.live_bytes() == 400
        del x
        assert tracker.live_bytes() == 0


def test_a_dead_storage_hands_its_address_on() -> None:
    """The next tensor is likely to lie where a dead one, which was somebody else's, had lain."""
    others = [torch.ones(1000) for _ in range(50)]
    tracker = Tracker()
    others.clear()
    with tracker:
        mine = [torch.ones(1000) for _ in range(50)]
    assert tracker.live_bytes() == 4000 * len(mine)


def test_a_way_leaves_out_what_was_there_before_it() -> None:
    """Of a plain step: weights, gradients and both moments at least, and not twice as much with a second one beside it."""
    peaks = []
    steps = []
    for _ in range(2):
        tracker = Tracker()
        steps.append(plain_step(QUICK))
        with tracker:
            steps[-1]()
            tracker.begin()
            steps[-1]()
        peaks.append(tracker.peak_bytes)
    assert peaks[0] == peaks[1]
    logits = 4 * QUICK.tokens * QUICK.model.vocab
    assert peaks[0] > 3 * 4 * PARAMETERS + 2 * logits


def test_bytes_that_must_be_sent() -> None:
    assert [SENT[op](4) for op in ("all_reduce", "all_gather", "send", "recv")] == [1.5, 0.75, 1.0, 0.0]
    totals = {("dp", "all_reduce"): (2, 1000), ("pp", "send"): (1, 30), ("pp", "recv"): (1, 30), ("dp", "barrier"): (1, 0)}
    assert sent_bytes(totals, 4) == 1530
    assert {call.kind for call in OPERATORS.values()} <= set(SENT)


def test_an_operator_that_is_not_read_is_told() -> None:
    with pytest.raises(AssertionError, match="add how it is read to OPERATORS"):
        Tracker()._count("c10d::invented_", (), {})


def test_a_side_on_another_transport_is_an_error() -> None:
    assert_used("shm", {"shm": 1, "gloo": 0}, "ours")
    with pytest.raises(AssertionError, match="ours made no call on shm"):
        assert_used("shm", {"shm": 0, "gloo": 3}, "ours")
    with pytest.raises(AssertionError, match="is to be on gloo and made 2 calls on shm"):
        assert_used("gloo", {"shm": 2, "gloo": 3}, "ours")


# The jobs


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_stages_one_after_another_are_the_model(pp: int) -> None:
    """Cut as Phalanx cuts it."""
    model, x = llama(QUICK), QUICK.example()["tokens"]
    whole = model(x)
    cut = schedule_of(JOBS["1f1b"], QUICK, pp).stages
    assert len(cut) == pp
    parts = [Stage(model, stage) for stage in cut]
    for part in parts:
        x = part(x)
    assert torch.equal(x, whole)
    assert sum(p.numel() for part in parts for p in part.parameters()) == PARAMETERS


def test_stages_are_placed_in_a_loop_or_as_a_v() -> None:
    assert [stages_of("interleaved", rank, 4, 2) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [stages_of("zb-v", rank, 4, 2) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert stages_of("1f1b", 3, 4, 1) == (3,)


def test_matrices_decay_and_vectors_do_not() -> None:
    groups = parameter_groups(llama(QUICK).named_parameters())
    assert {(p.dim() > 1, group["weight_decay"]) for group in groups for p in group["params"]} == {
        (True, WEIGHT_DECAY),
        (False, 0.0),
    }


def test_unknown_names_offer_the_closest() -> None:
    assert chosen("peer", (), JOBS) == tuple(JOBS)
    with pytest.raises(ValueError, match="there is no peer 'fsdp'; did you mean 'fsdp2'"):
        chosen("peer", ("fsdp",), JOBS)
    with pytest.raises(ValueError, match="there is no shape 'compute'; did you mean 'compute-bound'"):
        chosen("shape", ("compute",), SHAPES)


def test_both_sides_have_the_same_losses_in_one_process() -> None:
    """The ranks of a world of one: what remains is model, data, loss, optimizer and decay."""
    theirs = plain_step(QUICK)
    with phx.init(phx.Mesh(dp=1), device="cpu") as world:
        ours = our_step(JOBS["ddp"], QUICK, world)
        for _ in range(3):
            loss = theirs()
            assert loss is not None
            # both sum 256 float32 terms, in orders of their own
            assert ours() == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(("peer", "rank"), [("ddp", 1), ("tp+sp", 0), ("1f1b", 1)])
def test_a_silent_world_computes_and_moves_nothing(peer: str, rank: int) -> None:
    job = JOBS[peer]
    mesh = Mesh(**{job.axis: 2})
    with World(mesh, rank, Silent(rank, 2)) as world:
        step = our_step(job, QUICK, world)
        assert all(math.isfinite(step()) for _ in range(2))
        inner = world.transport.inner
        assert isinstance(inner, Silent)
        assert inner.counts


def test_what_parallelize_lacks_is_refused_by_name() -> None:
    with (
        phx.init(phx.Mesh(), device="cpu") as world,
        pytest.raises(ValueError, match="parallelize has no parameter 'teleport'"),
    ):
        our_step(Job("x", "", "dp", {"teleport": 3}), QUICK, world)


# The rows


def test_gap_and_quartiles() -> None:
    assert gap_closed(peer=3.0, ours=1.5, alone=1.0) == 0.75
    assert gap_closed(peer=3.0, ours=3.5, alone=1.0) == -0.25
    assert gap_closed(peer=1.0, ours=0.9, alone=1.0) is None
    assert quartiles([5.0, 1.0, 2.0, 3.0, 4.0]) == 2.0
    assert quartiles([7.0]) == 0.0


def row(**changes: object) -> Row:
    fields = dict.fromkeys(Row.__dataclass_fields__, 1.0)
    names = {"peer": "ddp", "shape": "quick", "transport_peer": "gloo", "transport": "shm", "pairs": 3}
    return Row(**{**fields, **names, **changes})  # type: ignore[arg-type]


def test_a_row_without_some_numbers_is_shown_drawn_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row(),
        row(peer="jax-tp", gap_closed=None, peer_mib=None, peer_sent_mib=None),
        row(transport="gloo", ratio=2.5, ratio_high=3.0),
    ]
    show(rows, [Refused("zb-v", "quick", "for a reason")])
    told = capsys.readouterr().out
    assert JAX_JOBS["jax-tp"].what in told
    assert "zb-v, quick: left out: for a reason" in told
    save(rows, tmp_path / "rows.json")
    assert [each["ratio"] for each in json.loads((tmp_path / "rows.json").read_text())] == [1.0, 1.0, 2.5]
    pytest.importorskip("matplotlib")
    plot(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(300)
def test_two_ranks_end_to_end(tmp_path: Path) -> None:
    path, transport = tmp_path / "rows.json", "shm" if _has_shm() else "gloo"
    command = [sys.executable, "-P", "-m", "phalanx", "bench", "peers", "--quick", "--pairs", "2", "--json", str(path)]
    command += ["--peer", "ddp", "--peer", "1f1b", "--transport", transport]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(path.read_text())
    assert [(each["peer"], each["transport_peer"], each["transport"]) for each in rows] == [
        ("ddp", "gloo", transport),
        ("1f1b", "gloo", transport),
    ]
    for each in rows:
        # float32 in other orders of summation
        assert each["loss_diff"] < 1e-5
        assert min(each["peer_ms"], each["phalanx_ms"], each["no_comm_ms"], each["single_ms"]) > 0
        assert each["ratio_low"] <= each["ratio"] <= each["ratio_high"]
    data, pipeline = rows
    weights = 4 * PARAMETERS
    few = 8 * 8  # numbers that the ranks add up beside: loss, norm, count
    # Of two ranks each sends half of every gradient twice.
    assert data["peer_sent_mib"] * 2**20 == weights
    assert weights < data["phalanx_sent_mib"] * 2**20 <= weights + few
    assert min(data["peer_mib"], data["phalanx_mib"]) * 2**20 > 4 * weights
    # One stage sends activations and the other their gradients; the peer sums the norm of its stages.
    between = 4 * QUICK.tokens * QUICK.model.hidden
    assert pipeline["peer_sent_mib"] * 2**20 == between + 8
    assert between < pipeline["phalanx_sent_mib"] * 2**20 <= between + few


def _has_shm() -> bool:
    from phalanx import shm

    return shm.available() is None


# One GPU


def test_flops_of_a_step_are_palms() -> None:
    """By hand: a layer of hidden 8 and inner 24 with half as many kv heads has 8·8·(1 + ½ + ½ + 1) + 3·8·24 weights and 16 in norms."""
    model = LlamaConfig(vocab=32, hidden=8, inner=24, layers=2, heads=4, kv_heads=2)
    weights = 2 * (8 * 8 * 3 + 3 * 8 * 24 + 16) + 8 + 32 * 8
    per_token = 6 * weights + 12 * 2 * 8 * 16
    assert cuda.Setting(model, 3, 16, torch.device("cpu")).step_flops == 3 * 16 * per_token


def test_peak_by_the_beginning_of_a_name() -> None:
    assert cuda.peak_flops("NVIDIA H200") == 989e12
    assert cuda.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert cuda.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert cuda.peak_flops("Voodoo 3") is None


@pytest.mark.timeout(300)
def test_the_gpu_run_on_the_cpu(tmp_path: Path) -> None:
    """In a process of its own, which has a process group. FSDP2 only: compiling takes minutes on a busy CPU."""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-P", "-m", "phalanx.bench.peers.cuda", "--device", "cpu", "--preset", "tiny", "--batch", "2"]
    command += ["--seq", "16", "--pairs", "1", "--peer", "fsdp2", "--json", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(path.read_text())
    assert [each["peer"] for each in rows] == ["fsdp2"]
    # 8 bits of mantissa in weights and activations of both sides, about 5.5 the loss
    assert all(each["loss_diff"] < 0.05 for each in rows)
    assert re.search(r"executor on cpu, pp=2: \d+\.\d us for each of \d+ actions", ended.stdout)


# JAX


def test_jax_has_the_same_model() -> None:
    pytest.importorskip("jax", reason="needs jax")
    from phalanx.bench.peers.jax_process import jax_step

    theirs = plain_step(QUICK)
    with jax_step(QUICK, "tp", 2) as step:
        for _ in range(3):
            loss = theirs()
            assert loss is not None
            assert step() == pytest.approx(loss, rel=1e-5)
