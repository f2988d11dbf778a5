"""A run that stops and goes on is the same run, bit for bit; one that would be another is refused in one line.

What a command line says, on threads of this process. Real processes are in test_kill.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

from phalanx.cli import train as command
from phalanx.cli.options import defaults
from phalanx.comm.local import local
from phalanx.train.batches import Batches
from phalanx.train.checkpoint import Saved, find
from phalanx.train.checkpoint.blocks import Place
from phalanx.train.checkpoint.save import Checkpoints
from phalanx.train.config import TrainConfig
from phalanx.train.loop import Summary, train

LLAMA = "--model llama-tiny --data text.txt --seq 8 --batch 4 --dtype float64"
MLP = "--model mlp --batch 4 --dtype float64"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, word in (("text.txt", "squared"), ("other.txt", "doubled")):
        Path(name).write_text("".join(f"{number} {word} is {number * number}.\n" for number in range(4000)))
    return tmp_path


def phalanx_train(text: str) -> Summary:
    """`phalanx train TEXT` with threads in place of processes."""
    args = text.split()
    config = tyro.cli(command.Options, args=args, default=command.Options(run=defaults(args, TrainConfig()))).run
    config.check()
    command.check_files(config)
    with local(config.parsed_mesh()) as world:
        return train(config, world)


def rows(folder: str) -> list[dict[str, Any]]:
    """metrics.jsonl without times."""
    found = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in row.items() if "second" not in name} for row in found]


def events(folder: str, kind: str) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, Path(folder, "events.jsonl").read_text().splitlines()) if row["kind"] == kind]


def newest(folder: str) -> Saved:
    return Saved(find(folder)[0][0])


def assert_same_state(one: Saved, other: Saved) -> None:
    """Weights, moments and counters."""
    assert one.kinds == other.kinds
    for key, kind in one.kinds.items():
        values = [torch.empty(kind.shape, dtype=kind.dtype) for _ in range(2)]
        for saved, value in zip((one, other), values, strict=True):
            saved.fill([piece(key, value)])
        assert torch.equal(*values), key
    assert one.manifest.numbers == other.manifest.numbers
    assert {n: x for n, x in one.facts.items() if n != "config"} == {n: x for n, x in other.facts.items() if n != "config"}


def piece(key: str, value: torch.Tensor) -> Any:
    from phalanx.run.pieces import Piece

    return Piece(key, (0,) * value.dim(), value)


SETTINGS = {
    "dropout": f"{MLP} --mesh dp=2 --dropout 0.2",
    "fp16": "--model mlp --batch 4 --mesh tp=2 --precision fp16",
    "zero": f"{MLP} --mesh dp=2 --zero 3",
    "no barrier": f"{MLP} --mesh dp=2 --no-barrier --optimizer.max-norm 0.5",
    "documents": f"{LLAMA} --mask-documents --held-out 1 --eval-every 4",
}
NIGHTLY = {
    "llama dropout": f"{LLAMA} --mesh dp=2 --dropout 0.2",
    "llama fp16": "--model llama-tiny --data text.txt --seq 8 --batch 4 --precision fp16 --mesh tp=2",
    "llama zero": f"{LLAMA} --mesh dp=2 --zero 3",
    "llama pipeline": f"{LLAMA} --mesh pp=2 --microbatches 2",
    "llama no barrier": f"{LLAMA} --mesh dp=2 --zero 1 --no-barrier --optimizer.max-norm 0.5",
}
"""What takes half a minute to derive three times."""
CASES = [*((name, ()) for name in SETTINGS), *((name, pytest.mark.nightly) for name in NIGHTLY)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in CASES])
def test_a_run_that_goes_on_is_the_same_run(name: str) -> None:
    settings = (SETTINGS | NIGHTLY)[name]
    phalanx_train(f"{settings} --steps 12 --out whole")
    # The learning rate is that of a run of twelve steps from the first: it is told to stop, not made shorter.
    with asking(at=6):
        assert phalanx_train(f"{settings} --steps 12 --out parts").stopped == signal.SIGTERM
    # Without a barrier a step is under way when all ranks know.
    ended = 7 if "no barrier" in name else 6
    assert newest("parts").step == len([row for row in rows("parts") if "loss" in row]) == ended
    phalanx_train("--resume parts")
    assert rows("parts") == rows("whole")
    assert_same_state(newest("parts"), newest("whole"))
    [resumed] = events("parts", "resume")
    assert (resumed["step"], resumed["changed"]) == (ended, {})


class asking:
    """Sends this process a signal as step `at` begins, or as its checkpoint does."""

    def __init__(self, *, at: int, number: signal.Signals = signal.SIGTERM, saving: bool = False) -> None:
        self.patch, self.at, self.number, self.saving = pytest.MonkeyPatch(), at, number, saving

    def __enter__(self) -> None:
        training, save = Batches.training, Checkpoints.save

        def asks_first(batches: Batches, cursor: int) -> Any:
            if cursor // batches.size + 1 == self.at:
                os.kill(os.getpid(), self.number)
            return training(batches, cursor)

        def saves_and_asks(checkpoints: Checkpoints, number: int, facts: Any) -> None:
            save(checkpoints, number, facts)
            if number == self.at:
                os.kill(os.getpid(), self.number)

        if self.saving:
            self.patch.setattr(Checkpoints, "save", saves_and_asks)
        else:
            self.patch.setattr(Batches, "training", asks_first)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def test_signals_while_saving_after_the_last_step_and_of_a_person() -> None:
    phalanx_train(f"{MLP} --steps 5 --out whole")
    with asking(at=3, saving=True):
        stopped = phalanx_train(f"{MLP} --steps 5 --checkpoint-every 3 --out saving")
    assert (stopped.stopped, newest("saving").step) == (signal.SIGTERM, 4)
    with asking(at=1, number=signal.SIGINT):
        assert phalanx_train(f"{MLP} --steps 5 --out person").stopped == signal.SIGINT
    assert newest("person").step == 1
    with asking(at=5):
        assert phalanx_train(f"{MLP} --steps 5 --out last").stopped is None  # there was nothing left to stop
    for folder in ("saving", "person"):
        [told] = events(folder, "signal")
        assert told["step"] == newest(folder).step
        phalanx_train(f"--resume {folder}")
    for folder in ("saving", "person", "last"):
        assert rows(folder) == rows("whole")
        assert_same_state(newest(folder), newest("whole"))


def test_a_run_that_goes_on_elsewhere_takes_the_samples_that_come_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the mesh and the batch: no sample twice, none left out."""
    taken: list[tuple[int, list[list[float]]]] = []
    training = Batches.training

    def notes(batches: Batches, cursor: int) -> Any:
        batch = training(batches, cursor)
        taken.append((cursor, batch["tokens"].tolist()))
        return batch

    monkeypatch.setattr(Batches, "training", notes)
    phalanx_train(f"{LLAMA} --steps 3 --out parts")
    phalanx_train("--resume parts --mesh dp=2,tp=2 --batch 2 --steps 7")
    ours = [sample for _, batch in taken for sample in batch]
    assert [cursor for cursor, _ in taken] == [0, 4, 8, 12, 14, 16, 18]
    taken.clear()
    phalanx_train(f"{LLAMA} --batch 10 --steps 2 --out whole")
    assert ours == [sample for _, batch in taken for sample in batch]
    assert len(ours) == 20
    assert newest("parts").facts["cursor"] == 20
    [resumed] = events("parts", "resume")
    assert resumed["changed"] == {"mesh": ["", "dp=2,tp=2"], "batch": [4, 2], "steps": [3, 7]}


def test_what_would_be_another_run_is_refused(here: Path) -> None:
    phalanx_train(f"{LLAMA} --steps 2 --out run")
    Path("empty").mkdir()
    before = files(here)
    for args, said in REFUSED.items():
        with pytest.raises(ValueError, match=said) as refused:
            phalanx_train(args)
        assert "\n" not in str(refused.value), args
    # Whoever is refused leaves the run as it was.
    assert files(here) == before


def files(folder: Path) -> dict[Path, bytes]:
    """Of runs that are not called new; the file of a lock is empty and stays."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "new" not in path.parts}


REFUSED = {
    "--resume run --steps 3 --seed 7": r"is of a run with seed 0, which --resume goes on with; to begin a new run with 7",
    "--resume run --steps 3 --model mlp": r"is of a run with model 'llama-tiny', which --resume goes on with; .* with 'mlp'",
    "--resume run --steps 3 --seq 16": r"is of a run with seq 8, .* 16",
    "--resume run --steps 3 --dtype float32": r"is of a run with dtype 'float64', .* 'float32'",
    "--resume run --steps 3 --data other.txt": r"was learning from other data \(--data text.txt",
    "--resume run": r"the run has taken all its 2 steps; ask for more with --steps",
    "--resume run --steps 1": r"the run has taken all its 2 steps; ask for more with --steps",
    "--resume empty": r"empty has no checkpoint: none is in it",
    "--resume nowhere": r"nowhere has no checkpoint: there is no such folder",
    f"{LLAMA} --init-from empty --out new": r"empty has no checkpoint",
    "--resume run --init-from run": r"resume goes on with a run and init_from begins a new one",
}


def test_weights_of_another_model_are_refused_with_names_and_sizes() -> None:
    phalanx_train(f"{MLP} --steps 1 --out mlp")
    with pytest.raises(ValueError, match=r"does not fit:\n  model\.") as refused:
        phalanx_train(f"{LLAMA} --steps 1 --init-from mlp --out new")
    assert re.search(r"\n  model\.embed_tokens\.weight \(\d+, \d+\) is not in it", str(refused.value))


def test_a_new_run_begins_with_the_weights_of_a_run_or_of_one_checkpoint() -> None:
    phalanx_train(f"{MLP} --steps 4 --checkpoint-every 2 --out old")
    addresses = find("old")[0]
    assert [Saved(address).step for address in addresses] == [4, 2]
    for address, taken in ((addresses[0], "old"), (addresses[1], addresses[1])):
        # A rate of nearly nothing: the weights stay what they were.
        phalanx_train(f"{MLP} --mesh tp=2 --init-from {taken} --steps 1 --optimizer.lr 1e-300 --out new")
        ours, theirs = newest("new"), Saved(address)
        assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in theirs.model)
        assert ours.manifest.numbers["optimizer.step"] == 1
        assert (ours.facts["step"], ours.facts["cursor"]) == (1, 4)
        assert len(rows("new")) == 1


def test_a_new_run_may_keep_the_moments_but_not_the_place_in_the_schedule() -> None:
    phalanx_train(f"{MLP} --steps 4 --out old")
    phalanx_train(f"{MLP} --steps 1 --out fresh --init-from old")
    phalanx_train(f"{MLP} --steps 1 --out kept --init-from old --init-optimizer kept")
    fresh, kept = newest("fresh"), newest("kept")
    assert (fresh.manifest.numbers["optimizer.step"], kept.manifest.numbers["optimizer.step"]) == (1, 5)
    assert rows("kept")[0]["lr"] == rows("fresh")[0]["lr"] == rows("old")[0]["lr"]
    assert rows("kept")[0]["loss"] == rows("fresh")[0]["loss"] != rows("old")[0]["loss"]
    # The first update of Adam's is of the size of the rate, whatever the gradient; with moments it is not.
    assert not torch.equal(fresh.tensor("head.weight"), kept.tensor("head.weight"))


def test_of_two_runs_in_one_folder_the_second_is_refused_and_the_first_unharmed() -> None:
    with meanwhile(f"{MLP} --steps 4 --checkpoint-every 2 --out run", at=3) as tried:
        phalanx_train(f"{MLP} --steps 4 --checkpoint-every 2 --out run")
    assert re.fullmatch(r"run is being written by process \d+ on host .*: wait for it, .* another folder with --out", tried[0])
    phalanx_train(f"{MLP} --steps 4 --out alone")
    assert rows("run") == rows("alone")
    assert_same_state(newest("run"), newest("alone"))


def test_of_two_runs_with_one_place_for_checkpoints_the_older_one_stops() -> None:
    """It completes none any more, and the younger one's are whole and its own."""
    with (
        meanwhile(f"{MLP} --seed 1 --steps 4 --checkpoint-every 2 --checkpoints shared --out second", at=4) as tried,
        pytest.raises(ValueError, match=r"taken over by another run, on .*: two runs cannot keep") as told,
    ):
        phalanx_train(f"{MLP} --steps 9 --checkpoint-every 3 --checkpoints shared --out first")
    assert tried == [""]
    assert "\n" not in str(told.value)
    phalanx_train(f"{MLP} --seed 1 --steps 4 --checkpoints apart --out alone")
    assert_same_state(newest("shared"), newest("apart"))
    ours = [Saved(address) for address in find("shared")[0]]
    assert [(saved.step, saved.config.seed) for saved in ours] == [(4, 1), (2, 1)]
    # Go on with each: the second has its checkpoints; of the first there is none left, which is said.
    phalanx_train("--resume second --steps 5")
    assert newest("shared").step == 5
    with pytest.raises(ValueError, match="is of a run with seed 1, which --resume goes on with"):
        phalanx_train("--resume first")


def test_a_run_that_is_taken_over_while_it_writes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is gone from under its hands; that is not what a person is told."""
    make, others = Place.make, iter([f"{MLP} --steps 1 --checkpoints shared --out second"])

    def makes_and_waits(place: Place) -> None:
        make(place)
        if place.path.rpartition("/")[2].startswith("step-") and (args := next(others, "")):
            phalanx_train(args)

    monkeypatch.setattr(Place, "make", makes_and_waits)
    with pytest.raises(ValueError, match="taken over by another run"):
        phalanx_train(f"{MLP} --steps 2 --checkpoint-every 1 --checkpoints shared --out first")
    assert [Saved(address).step for address in find("shared")[0]] == [1]
    assert [path.name for path in Path("shared").iterdir() if path.is_dir()] == [Path(find("shared")[0][0]).name]


@contextmanager
def meanwhile(args: str, *, at: int) -> Iterator[list[str]]:
    """As step `at` of the run within begins, `phalanx train ARGS` runs from its beginning to its end; its error, or nothing."""
    training, told = Batches.training, list[str]()
    steps = itertools.count(1)

    def runs_first(batches: Batches, cursor: int) -> Any:
        if next(steps) == at:
            try:
                phalanx_train(args)
                told.append("")
            except ValueError as error:
                told.append(str(error))
        return training(batches, cursor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "training", runs_first)
        yield told


def test_a_run_that_replaces_another_does_not_go_on_with_its_checkpoints() -> None:
    """It ends before it has any of its own: going on is beginning again."""
    phalanx_train(f"{MLP} --steps 4 --checkpoint-every 2 --out run")
    replaced = find("run")[0]
    args = f"{MLP} --steps 5 --checkpoint-every 2 --optimizer.lr 1e-2 --out run"
    with failing(at=2):
        phalanx_train(args)
    with pytest.raises(
        ValueError, match=r"those in it are of an earlier run there; to go on with that one, say which, as in --resume"
    ):
        phalanx_train("--resume run")
    assert [Saved(address).step for address in replaced] == [4, 2]  # nothing is lost
    phalanx_train(f"{args} --resume auto")
    phalanx_train(args.replace("--out run", "--out alone"))
    assert rows("run") == rows("alone")
    assert_same_state(newest("run"), newest("alone"))


def test_a_run_that_goes_back_leaves_what_came_after() -> None:
    phalanx_train(f"{MLP} --steps 6 --checkpoint-every 2 --keep 0 --out run")
    assert [Saved(address).step for address in find("run")[0]] == [6, 4, 2]
    with failing(at=4):
        phalanx_train(f"--resume {find('run')[0][2]}")
    assert [Saved(address).step for address in find("run")[0]] == [2]
    assert [row["step"] for row in rows("run")] == [1, 2, 3]
    phalanx_train("--resume run")
    assert [row["step"] for row in rows("run")] == [1, 2, 3, 4, 5, 6]
    assert [Saved(address).step for address in find("run")[0]] == [6, 4, 2]


@contextmanager
def failing(*, at: int) -> Iterator[None]:
    """The run within is lost as step `at` begins."""
    training = Batches.training

    def fails(batches: Batches, cursor: int) -> Any:
        if cursor // batches.size + 1 == at:
            raise ZeroDivisionError
        return training(batches, cursor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "training", fails)
        try:
            yield
        except ZeroDivisionError:
            return
    raise AssertionError(f"step {at} did not begin")


def test_a_run_whose_checkpoints_are_elsewhere_goes_on_by_its_folder() -> None:
    phalanx_train(f"{MLP} --steps 2 --checkpoints away --out run")
    assert not Path("run", "checkpoints").exists()
    phalanx_train("--resume run --steps 4")
    assert [row["step"] for row in rows("run")] == [1, 2, 3, 4]
    assert newest("away").step == 4


def test_a_checkpoint_whose_manifest_is_damaged_takes_no_other_ones_place() -> None:
    phalanx_train(f"{MLP} --steps 2 --out run")
    manifest = Path(find("run")[0][0], "phalanx.json")
    phalanx_train("--resume run --steps 3 --keep 1")
    [last] = find("run")[0]
    manifest = Path(last, "phalanx.json")
    good = manifest.read_bytes()
    Path("run", "checkpoints", "step-00000009-00000000").mkdir()
    Path("run", "checkpoints", "step-00000009-00000000", "phalanx.json").write_bytes(good[:-1])
    phalanx_train("--resume run --steps 4 --keep 1")
    assert [Saved(address).step for address in find("run")[0]] == [4]


@pytest.mark.parametrize("resume", [None, "auto", "old"])
def test_ranks_that_are_started_again_go_on_with_the_newest(resume: str | None) -> None:
    """Or begin as they did the first time, as long as there is no checkpoint."""
    phalanx_train(f"{MLP} --steps 2 --out old")
    config = TrainConfig(out=Path("run"), resume=resume)
    assert command.started_again(config).resume == (resume or "auto")
    phalanx_train(f"{MLP} --steps 1 --out run")
    assert command.started_again(config).resume == "auto"
    with pytest.raises(ValueError, match="without --out nobody knows in which folder"):
        command.started_again(replace(config, out=None))
