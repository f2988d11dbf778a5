"""What a rank gets of a batch, and what is said about a batch that does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.comm.local import LocalWorld
from phalanx.derive.program import IndexBound
from phalanx.mesh import Mesh
from phalanx.run.batch import microbatches
from phalanx.run.executor import Executor, Out
from phalanx.run.optimizer import SGD

from . import hand_made


def test_microbatches_are_contiguous_and_split_over_data_ranks() -> None:
    """Sample numbers: of 8 samples in 2 microbatches on 2 ranks, rank 1 gets 2, 3 and then 6, 7."""
    made = hand_made.program(Mesh(pp=2, dp=2), 2)
    samples = torch.arange(hand_made.BATCH)[:, None].expand(-1, hand_made.SEQ).contiguous()
    with LocalWorld(made.mesh) as worlds:
        for world in worlds.worlds:
            parts = microbatches({"tokens": samples, "labels": samples}, made, world)
            first = 2 * world.coordinates["dp"]
            assert [part["tokens"][:, 0].tolist() for part in parts] == [[first, first + 1], [first + 4, first + 5]]
            mine = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            again = microbatches(mine, made, world, local=True)
            assert all(torch.equal(a[name], b[name]) for a, b in zip(parts, again, strict=True) for name in a)


def test_local_slices_train_like_the_global_batch() -> None:
    made = hand_made.program(Mesh(dp=2), 2)

    def step(executor: Executor) -> tuple[Out, Out]:
        parts = microbatches(hand_made.batch(), made, executor.world)
        mine = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return executor.step(hand_made.batch()), executor.step(mine, local=True)

    for given_all, given_mine in hand_made.on_every_rank(made, step, SGD(lr=0.0)):
        assert given_all == given_mine


def test_what_is_wrong_is_said_with_the_numbers() -> None:
    made = hand_made.program(Mesh(dp=2), 2)
    good = hand_made.batch()
    with LocalWorld(made.mesh) as worlds:
        world = worlds.worlds[1]
        for bad, said in (
            ({"token": good["tokens"], "labels": good["labels"]}, r"no entry 'tokens'; it has .*did you mean 'token'"),
            (
                {**good, "tokens": good["tokens"][:6]},
                r"'tokens' has shape \(6, 3\); the global batch of this step is \(8, 3\): 2 micro",
            ),
            ({**good, "labels": good["labels"].int()}, r"'labels' is torch.int32; the model was captured with torch.int64"),
            ({**good, "labels": good["labels"].tolist()}, r"'labels' is a list"),
        ):
            with pytest.raises(ValueError, match=said):
                microbatches(bad, made, world)
        with pytest.raises(ValueError, match=r"rank 1's local batch of this step is \(4, 3\)"):
            microbatches(good, made, world, local=True)
        outside = {**good, "tokens": good["tokens"].clone().fill_(hand_made.VOCAB)}
        bounded = replace(made, bounds={"tokens": IndexBound(hand_made.VOCAB), "labels": IndexBound(hand_made.VOCAB, -100)})
        with pytest.raises(ValueError, match=r"'tokens' holds 11 at \[0, 0\]; valid are 0 to 10 \(24 of 24 are not\)"):
            microbatches(outside, bounded, world)
        unlabelled = {**good, "labels": good["labels"].clone().fill_(-100)}
        assert microbatches(unlabelled, bounded, world)
        unlabelled["labels"][1, 2] = -1
        with pytest.raises(ValueError, match=r"'labels' holds -1 at \[1, 2\]; valid are 0 to 10, or -100 to ignore one"):
            microbatches(unlabelled, bounded, world)
        assert microbatches({**good, "more": 1}, made, world)  # what no graph reads is the user's own
