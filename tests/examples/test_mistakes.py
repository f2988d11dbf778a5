"""Each mistake shows what it claims: the wrong number is wrong, the right one is one process's, and the message names the cause."""

from __future__ import annotations

import multiprocessing
import re
import runpy
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mistakes import (
    batchnorm,
    bias_counted_twice,
    both_send_first,
    forgotten_all_reduce,
    mean_of_means,
    missing_call,
    order,
)

import phalanx as phx
from phalanx.cli.doctor import run as doctor
from phalanx.schedule.check import ScheduleError, check
from phalanx.schedule.waits import CHANNELS

# Few operations on numbers near 1 in float64.
EXACT = 1e-12


def test_missing_call_names_the_rank() -> None:
    with phx.local(missing_call.MESH, timeout=0.3) as local:
        with pytest.raises(TimeoutError, match=r"all_reduce.*waited 0.3 s for rank 2, which did not arrive"):
            local.run(missing_call.wrong)
        assert local.run(missing_call.right) == [3.0 + 2.0] * 3


def test_order_alone_matches_messages() -> None:
    with phx.local(order.MESH, timeout=5) as local:
        assert order.run(local, order.RIGHT, order.EQUAL) == {"weights": [1.0, 1.0], "bias": [2.0, 2.0]}
        assert order.run(local, order.WRONG, order.EQUAL) == {"weights": [2.0, 2.0], "bias": [1.0, 1.0]}
        with pytest.raises(ValueError, match=r"disagree about call .* \(2,\) float32.*\(4,\) float32"):
            order.run(local, order.WRONG, order.DIFFERENT)


def test_both_send_first() -> None:
    with phx.local(both_send_first.MESH, rendezvous=True, timeout=0.3) as local:
        with pytest.raises(TimeoutError, match="did not arrive"):
            local.run(both_send_first.wrong)
        assert local.run(both_send_first.right) == [1.0, 0.0]
    with phx.local(both_send_first.MESH, timeout=5) as buffered:
        assert buffered.run(both_send_first.wrong) == [1.0, 0.0]  # why nobody notices on a laptop


def test_the_static_check_finds_it_and_proves_the_mended_list() -> None:
    wrong = both_send_first.schedule(both_send_first.RANK_0, both_send_first.RANK_1)
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        check(wrong, both_send_first.view(), "host")
    assert set(caught.value.cycle) == {"pp 0 SEND_F0.1", "pp 1 RECV_F0.1", "pp 1 SEND_B1.0", "pp 0 RECV_B1.0"}
    check(wrong, both_send_first.view(), "host", rendezvous=False)  # buffered sends hide it
    mended = both_send_first.schedule(both_send_first.RANK_0, both_send_first.MENDED)
    for channel in CHANNELS:
        check(mended, both_send_first.view(), channel)


def test_replicas_drift_apart() -> None:
    with phx.local(forgotten_all_reduce.MESH, timeout=5) as local:
        apart = local.run(lambda world: forgotten_all_reduce.train(world, False))[0]
        together = local.run(lambda world: forgotten_all_reduce.train(world, True))[0]
    assert 0 < apart[0] < apart[1] < apart[2]
    assert together == [0.0, 0.0, 0.0]


def test_mean_of_means() -> None:
    losses = torch.cat([mean_of_means.token_losses(rank) for rank in range(2)])
    with phx.local(mean_of_means.MESH, timeout=5) as local:
        assert local.run(mean_of_means.right) == pytest.approx([losses.mean().item()] * 2, rel=EXACT)
        assert local.run(mean_of_means.wrong) == [4.5, 4.5]


@pytest.mark.parametrize("mistake", [batchnorm, bias_counted_twice], ids=lambda module: module.__name__.split(".")[-1])
def test_right_is_one_process_and_wrong_is_not(mistake) -> None:  # type: ignore[no-untyped-def]
    truth = mistake.one_process()
    with phx.local(mistake.MESH, timeout=5) as local:
        for right, wrong in zip(local.run(mistake.right), local.run(mistake.wrong), strict=True):
            assert (right - truth).abs().max() < EXACT
            assert (wrong - truth).abs().max() > 0.1


# Stock scripts of torch.distributed, as processes.

HERE = Path(__file__).parent
STOCK = HERE.parents[1] / "examples" / "lecture" / "mistakes" / "stock"
SEND = r"rank 0 sends but rank 1 never receives: rank 0 waits in send of {} float32 to rank 1 at \S+, rank 1 waits in barrier"
# {name and arguments: (ranks, the doctor's line)}
MISTAKES = {
    "skipped_all_reduce": (
        2,
        r"^different operations in call 1 of group '0' \(default_pg\): "
        r"rank 0 called all_reduce\(sum\) of 1 float32 at skipped_all_reduce.py:\d+; "
        r"rank 1 called broadcast of 1 float32 with root 0 at skipped_all_reduce.py:\d+; "
        r"at skipped_all_reduce.py:\d+ rank 0 made 1 calls, rank 1 made 0 calls$",
    ),
    "send_without_receive 1": (2, "^deadlock, " + SEND.format("1")),
    "send_without_receive 16777216": (2, "^deadlock, " + SEND.format("16,777,216")),
    "swapped_sends": (2, r"^message size mismatch: rank 0 called send of 4 float32 to rank 1 .* recv of 2 float32 from rank 0"),
    "ring_of_sends": (
        3,
        r"^deadlock, every rank sends first and none receives: rank 0 .*to rank 1 .*rank 1 .*to rank 2 .*rank 2 ",
    ),
    "wrong_dtype": (2, r"^dtype mismatch in call 1 .*rank 0 called all_reduce\(sum\) of 4 float32 .*rank 1 .* of 4 int32 at"),
    "sum_against_max": (2, r"^reduce op mismatch in call 1 .*rank 0 called all_reduce\(sum\).*rank 1 called all_reduce\(max\)"),
    "rank_zero_only": (2, r"^rank 1 destroyed its process group without all_reduce 1 .*: rank 0 waits .*under `if rank == 0:`"),
    "uneven_batches": (
        2,
        r"^uneven: rank 1 made 3 calls of all_reduce at uneven_batches.py:\d+ and destroyed its process group; "
        r"rank 0 waits in all_reduce\(sum\) of 1 float32 at uneven_batches.py:\d+, call 4 there$",
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folders of all stock mistakes, which are made at the same time."""
    folder = tmp_path_factory.mktemp("mistakes")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch.testing", "pytest"])
    stores, processes = [], []
    for script, (ranks, _) in MISTAKES.items():
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores.append(store)
        for rank in range(ranks):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            environment |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
            environment |= {"PHALANX_RUN_DIR": str(folder / script), "PHALANX_PATIENCE": "0.5"}
            path, *rest = script.split()
            job = [f"{STOCK / path}.py", *rest], environment, str(STOCK.parents[3] / "src")
            processes.append(
                context.Process(
                    target=runpy.run_path, args=(str(HERE / "stock_rank.py"), {"JOB": job}, "__rank__"), daemon=True
                )
            )
            processes[-1].start()
    until = time.monotonic() + 90
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return folder


@pytest.mark.parametrize("script", MISTAKES)
def test_the_doctor_has_one_line_for_it(script: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([str(runs / script)]) == doctor.WRONG
    line = capsys.readouterr().out.splitlines()[0]
    assert re.search(MISTAKES[script][1], line), line
