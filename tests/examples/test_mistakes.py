"""Each mistake shows what it claims: the wrong number is wrong, the right one is one process's, and the message names the cause."""

from __future__ import annotations

import pytest
import torch
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
