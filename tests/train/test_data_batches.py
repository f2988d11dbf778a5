"""Batches by cursor: the same samples on every mesh and with every batch size, each rank its own, held-out ones always the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.test_data import packed

from phalanx.comm.local import local
from phalanx.mesh import Mesh
from phalanx.run.batch import microbatches
from phalanx.run.step import Step
from phalanx.train.assembly import parallel_step
from phalanx.train.batches import Batches
from phalanx.train.config import TrainConfig
from phalanx.train.models import Model, build

CONFIG = TrainConfig(mesh="dp=2", microbatches=2, batch=8, seq=16, held_out=2)


@pytest.fixture(scope="module")
def model() -> Model:
    return replace(build("llama-tiny", "float32"), positions="positions")


@pytest.fixture(scope="module")
def step(model: Model) -> Iterator[Step]:
    with local(Mesh(dp=2)) as world:
        yield parallel_step(CONFIG, world, model, model.factory())


@pytest.fixture
def text(tmp_path: Path) -> str:
    return packed(tmp_path / "text", [[at % 251 for at in range(begin, begin + 40)] for begin in range(0, 8000, 40)])


def starts(batch: Any) -> list[list[int]]:
    return batch["tokens"].tolist()


def test_cursor_counts_samples_whatever_the_batch(model: Model, step: Step, text: str) -> None:
    wide, narrow = (
        Batches(replace(CONFIG, data=(text,), batch=batch, microbatches=batch // 4), model, step) for batch in (8, 4)
    )
    assert (wide.size, narrow.size, wide.is_local) == (8, 4, False)
    assert starts(wide.training(16)) == starts(narrow.training(16)) + starts(narrow.training(20))
    assert starts(wide.training(24)) == starts(narrow.training(24)) + starts(narrow.training(28))
    assert starts(wide.training(16)) == starts(narrow.training(16)) + starts(narrow.training(20))  # back again
    unread = Batches(replace(CONFIG, data=(text,)), model, step, ahead=0)
    assert starts(unread.training(24)) == starts(wide.training(24))
    for batches in (wide, narrow, unread):
        batches.close()


@pytest.mark.parametrize("mask", [False, True])
def test_each_rank_reads_what_it_would_be_given_of_the_whole(model: Model, step: Step, text: str, mask: bool) -> None:
    config = replace(CONFIG, data=(text,), mask_documents=mask)
    whole = Batches(config, model, step, ahead=0).training(40)
    assert set(whole) == {"tokens", "targets", *(["positions"] if mask else [])}
    for world in step.world.worlds:
        mine = Batches(config, model, SimpleNamespace(world=world, program=step.program), ahead=0)
        assert mine.is_local
        given, read = whole, mine.training(40)
        for name, x in read.items():
            assert x.shape == (4, 16), name
        parts = microbatches(given, step.program, world), microbatches(read, step.program, world, local=True)
        for of_whole, own in zip(*parts, strict=True):
            for name, x in own.items():
                assert torch.equal(x, of_whole[name])


def test_positions_have_the_name_that_the_model_gives_them(model: Model, step: Step, text: str) -> None:
    config = replace(CONFIG, data=(text,), mask_documents=True)
    other = Batches(config, replace(model, positions="position_ids"), step, ahead=0).training(0)
    assert set(other) == {"tokens", "targets", "position_ids"}
    assert (other["targets"] == -100).any()
    with pytest.raises(ValueError, match="--mask-documents: model llama-tiny does not take the positions"):
        Batches(config, replace(model, positions=None), step)


def test_held_out_batches_are_the_same_at_every_evaluation_of_every_run(model: Model, step: Step, text: str) -> None:
    one, other = (Batches(replace(CONFIG, data=(text,), seed=seed), model, step, ahead=0) for seed in (0, 1))
    assert starts(one.training(0)) != starts(other.training(0))
    first = starts(one.held_out(0)) + starts(one.held_out(1))
    one.training(8)
    assert first == starts(one.held_out(0)) + starts(one.held_out(1)) == starts(other.held_out(0)) + starts(other.held_out(1))
    assert len(set(map(tuple, first))) == 16
    made_up = Batches(replace(CONFIG, model="mlp"), build("mlp", "float32"), step)
    assert torch.equal(made_up.held_out(1)["x"], made_up.held_out(1)["x"])
    assert not torch.equal(made_up.held_out(0)["x"], made_up.held_out(1)["x"])


def test_what_is_made_up_is_a_function_of_the_step(step: Step) -> None:
    model = build("mlp", "float32")
    batches = Batches(replace(CONFIG, model="mlp", seed=3), model, step)
    assert torch.equal(batches.training(8 * 5)["x"], model.example(8, 16, 3 * 1_000_003 + 5)["x"])
    assert (batches.source, batches.is_local) == ("random points", False)


def test_fingerprint_is_of_sources_weights_and_length_and_of_nothing_else(
    model: Model, step: Step, text: str, tmp_path: Path
) -> None:
    copy, other = (
        packed(tmp_path / "copy", [[at % 251 for at in range(begin, begin + 40)] for begin in range(0, 8000, 40)]),
        None,
    )
    other = packed(tmp_path / "other", [[7] * 4000])

    def fingerprint(*data: str, **settings: Any) -> str:
        return Batches(replace(CONFIG, data=data, held_out=0, **settings), model, step, ahead=0).fingerprint

    assert fingerprint(text) == fingerprint(copy) == fingerprint(text, seed=5, batch=4, microbatches=1, mesh="")
    assert fingerprint(f"{text}=7", f"{other}=3") == fingerprint(f"{text}=0.7", f"{other}=0.3")
    different = [
        fingerprint(text),
        fingerprint(other),
        fingerprint(text, other),
        fingerprint(other, text),
        fingerprint(f"{text}=7", f"{other}=3"),
        fingerprint(f"{text}=3", f"{other}=7"),
        fingerprint(text, seq=8),
        Batches(replace(CONFIG, model="mlp"), build("mlp", "float32"), step).fingerprint,
    ]
    assert len(set(different)) == len(different)


def test_what_is_learned_from_is_told(model: Model, step: Step, text: str, tmp_path: Path) -> None:
    wide = packed(tmp_path / "wide", [[7] * 2000], "mine", 300)
    told = [
        Batches(replace(CONFIG, data=data, held_out=0), model, step, ahead=0).source
        for data in ((text,), (f"{text}=1", f"{text}=3"), (wide,))
    ]
    assert told == [
        f"7,600 bytes of {text}",
        f"7,600 bytes of {text} (25.0% of samples), 7,600 bytes of {text} (75.0% of samples)",
        f"1,900 tokens of {wide}",
    ]


def test_held_out_batches_hold_no_sample_twice(model: Model, step: Step, text: str) -> None:
    with pytest.raises(ValueError, match=r"held_out is 4 batches of 8, but .* has 24 samples of 16 tokens: at most 3 batches"):
        Batches(replace(CONFIG, data=(text,), held_out=4), model, step, ahead=0)


def test_text_that_does_not_fit_the_model_is_refused(model: Model, step: Step, text: str, tmp_path: Path) -> None:
    wide = packed(tmp_path / "wide", [[7] * 2000, [299]], "mine", 300)
    with pytest.raises(
        ValueError, match=r"wide holds token 299 of mine with 300 tokens; the vocabulary of model llama-tiny ends at 255"
    ):
        Batches(replace(CONFIG, data=(wide,)), model, step)
    with pytest.raises(ValueError, match=r"--data \S*text: model mlp does not read text"):
        Batches(replace(CONFIG, data=(text,), model="mlp"), build("mlp", "float32"), step)
    with pytest.raises(ValueError, match=r"--mask-documents: model mlp does not read text"):
        Batches(replace(CONFIG, mask_documents=True, model="mlp"), build("mlp", "float32"), step)
    np.save(tmp_path / "t.npy", np.zeros(4000, np.uint8))
    with pytest.raises(ValueError, match=r"nothing says where documents begin in \S*t\.npy"):
        Batches(replace(CONFIG, data=(str(tmp_path / "t.npy"),), mask_documents=True), model, step)
