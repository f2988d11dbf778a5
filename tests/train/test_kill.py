"""Runs that are killed or told to stop, at every moment that we could name and some that nobody chose: real processes.

Whatever ends them, the run that goes on leaves what one that nobody disturbed leaves: the same bits in the last checkpoint, each step
once in metrics.jsonl with the same loss, and nothing to clean.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.dying_rank import Blow, write_plan

from phalanx.comm.local import local
from phalanx.train.checkpoint import Saved, find
from phalanx.train.config import TrainConfig
from phalanx.train.folder import RunFolder
from phalanx.train.loop import train
from phalanx.train.settings import load

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("dying_rank.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
SAVE = "phalanx.train.checkpoint.save"
BLOCKS = "phalanx.train.checkpoint.blocks"

MOMENTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    # phase: a function, its calls in a start of ten steps or more with a checkpoint every 3, and how it is meant
    "start": ("", 1, {}),
    "joined": ("phalanx.comm.world:init", 1, {"after": True}),
    "loading": ("phalanx.train.checkpoint.load:Saved.fill", 1, {}),
    "loaded": ("phalanx.train.checkpoint.load:Saved.fill", 1, {"after": True}),
    "take over": (f"{SAVE}:Checkpoints._take_over", 1, {"after": True}),
    "between steps": ("phalanx.train.batches:Batches.training", 8, {}),
    "update": ("phalanx.run.optimizer:Optimizer._adamw", 8, {"after": True}),
    "collective": ("phalanx.comm.c10d:C10dTransport.all_reduce", 80, {"after": True}),
    "metrics": ("phalanx.train.metrics:Recorder.record", 8, {"after": True}),
    "copy": (f"{SAVE}:Checkpoints._copy", 2, {}),
    "write": (f"{BLOCKS}:HashedWriter.write", 40, {}),
    "part": ("os:replace", 2, {"word": "part-0"}),
    "before the manifest": ("os:replace", 2, {"word": "phalanx.json"}),
    "after the manifest": ("os:replace", 2, {"word": "phalanx.json", "after": True}),
    "removal": (f"{BLOCKS}:Place.remove", 1, {"word": "phalanx.json", "after": True}),
    "event": ("phalanx.train.folder:RunFolder.event", 3, {"after": True}),
}
"""When a rank dies."""
ONLY_FIRST = {"take over", "before the manifest", "after the manifest", "removal", "event"}
"""What rank 0 does alone."""


def moment(name: str, start: int, rank: int, call: int | None = None, **changes: Any) -> Blow:
    at, calls, how = MOMENTS[name]
    return Blow(**{"phase": name, "start": start, "rank": rank, "at": at, "call": call or calls} | how | changes)


class Command:
    """`phalanx train` with blows, started."""

    def __init__(self, folder: Path, args: list[str], blows: list[Blow], *, launcher: tuple[str, ...] = ()) -> None:
        self.told = folder / f"told-{len(list(folder.glob('told-*'))) + 1}"
        self.told.touch()
        plan = write_plan(self.told.with_suffix(".plan"), self.told, blows)
        self.process = subprocess.Popen(
            [sys.executable, "-P", *launcher, str(SCRIPT), str(plan), "train", *args],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )

    def fallen(self) -> list[str]:
        return [json.loads(line)["phase"] for line in self.told.read_text().splitlines()]

    def ends(self, code: int, *, blows: int | None = 0) -> tuple[str, str]:
        """Its output, once it has ended by itself with that exit code, and its ranks too; so many blows must have fallen."""
        try:
            out, err = self.process.communicate(timeout=1500)
        finally:
            with suppress(ProcessLookupError):
                self.process.kill()
        assert self.process.returncode == code, (self.process.returncode, out, err)
        assert blows is None or len(self.fallen()) == blows, (self.fallen(), err)
        assert not processes_of(str(self.told.with_suffix(".plan")))
        return out, err


def processes_of(word: str) -> list[str]:
    """Those with it in their command line. One that has been killed may take a moment to go."""
    deadline = time.monotonic() + 20
    while found := [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if word.encode() in _content(path)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has just ended
        return b""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def undisturbed(out: Path, folder: Path) -> Path:
    """The run whose settings are in `out`, on threads of this process: the order of sums is that of processes."""
    config = replace(load(out / "config.yaml", TrainConfig()), out=folder, restarts=0, checkpoints=None)
    with local(config.parsed_mesh()) as world:
        train(config, world)
    return folder


def assert_same_run(out: Path, other: Path) -> None:
    """Losses, norms, rates and weights, bit for bit."""
    told = ("step", "loss", "grad_norm", "lr", "tokens")
    rows = [[row[name] for name in told] for row in lines(out / "metrics.jsonl")]
    assert rows == [[row[name] for name in told] for row in lines(other / "metrics.jsonl")]
    assert [row[0] for row in rows] == list(range(1, len(rows) + 1))
    ours, theirs = (Saved(find(str(folder))[0][0]) for folder in (out, other))
    assert ours.step == theirs.step == len(rows)
    assert ours.model.keys() == theirs.model.keys()
    assert not [name for name in ours.model if not torch.equal(ours.tensor(name), theirs.tensor(name))]
    assert ours.manifest.numbers == theirs.manifest.numbers


def assert_nothing_to_clean(out: Path, keep: int) -> None:
    """Complete checkpoints only, no more than are kept, and nobody holds the folder."""
    folders = [path for path in (out / "checkpoints").iterdir() if path.is_dir()]
    assert all((path / "phalanx.json").exists() for path in folders)
    assert len(folders) <= keep
    assert not (out / "lock.json").exists()


MLP = ["--model", "mlp", "--mesh", "dp=2", "--batch", "4", "--dtype", "float64"]


@pytest.mark.timeout(600)  # six starts of two ranks: half a minute on two cores of one's own
def test_a_run_that_is_killed_five_times_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    blows = [
        moment("before the manifest", 0, rank=0),  # the second one, so that the checkpoint of step 3 is there
        moment("loading", 1, rank=1),
        moment("write", 2, rank=0, call=3),
        moment("collective", 3, rank=1, call=60),
        moment("removal", 4, rank=0),
    ]
    out = tmp_path / "run"
    run = Command(tmp_path, [*MLP, "--steps", "12", "--checkpoint-every", "3", "--restarts", "5", "--out", str(out)], blows)
    _, err = run.ends(0, blows=5)
    assert run.fallen() == [blow.phase for blow in blows]
    for blow in blows:
        assert f"rank {blow.rank} of 2 (process " in err
    assert err.count("was ended by SIGKILL (signal 9)") == 5
    assert err.count("starting the ranks again") == 5
    events = lines(out / "events.jsonl")
    assert [event["order"] for event in events] == list(range(1, len(events) + 1))
    kinds = Counter(event["kind"] for event in events)
    assert (kinds["start"], kinds["restart"], kinds["resume"], kinds["end"]) == (1, 5, 4, 1)
    *steps, third, last = (event["step"] for event in events if event["kind"] == "resume")
    # Whether the checkpoint of step 6 was complete when rank 1 died in step 7 is a matter of time.
    assert (steps, third in (3, 6), last) == ([3, 3], True, 9)
    assert_same_run(out, undisturbed(out, tmp_path / "other"))
    assert_nothing_to_clean(out, keep=2)


def wait_for_a_step(run: Command, out: Path) -> None:
    deadline = time.monotonic() + 200
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_bytes():
        assert run.process.poll() is None, run.process.communicate()
        assert time.monotonic() < deadline, "no step ended within 200 s"
        time.sleep(0.05)


@pytest.mark.nightly
@pytest.mark.timeout(600)  # three starts of two ranks
def test_a_run_that_is_told_to_stop_and_then_loses_its_launcher_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = [*MLP, "--steps", "1000000", "--optimizer.decay", "constant", "--checkpoint-every", "3", "--out", str(out)]
    first = Command(tmp_path, args, [])
    wait_for_a_step(first, out)
    # Meanwhile nobody else gets into the folder.
    _, err = Command(tmp_path, args, []).ends(2)
    assert re.fullmatch(rf"phalanx: {out} is being written by process \d+ on host .*: wait for it, .* with --out\n", err)
    first.process.send_signal(signal.SIGTERM)
    _, err = first.ends(128 + signal.SIGTERM)
    assert err.endswith("phalanx: the launcher was stopped by SIGTERM; its 2 ranks ended by themselves\n")
    stopped = Saved(find(str(out))[0][0]).step
    assert stopped == len(lines(out / "metrics.jsonl")) == lines(out / "events.jsonl")[-1]["step"]

    second = Command(tmp_path, ["--resume", str(out)], [moment("between steps", 0, rank=0, launcher=True)])
    second.ends(-signal.SIGKILL, blows=1)
    with RunFolder(out).lock():
        pass
    assert len(lines(out / "metrics.jsonl")) >= stopped + 7

    ends = str(stopped + 12)
    Command(tmp_path, [*args, "--resume", "auto", "--steps", ends], []).ends(0)
    assert [event["kind"] for event in lines(out / "events.jsonl")].count("resume") == 2
    assert_same_run(out, undisturbed(out, tmp_path / "other"))
    assert_nothing_to_clean(out, keep=2)


SIGNALS = {
    "first step": (moment("between steps", 0, rank=1, call=1, number=signal.SIGTERM), 143, 1),
    "while saving": (moment("copy", 0, rank=1, call=1, number=signal.SIGTERM), 143, None),
    "person": (moment("between steps", 0, rank=0, call=2, number=signal.SIGINT), 130, 2),
    "launcher, while saving": (moment("copy", 0, rank=1, call=1, number=signal.SIGTERM, launcher=True), 143, None),
    "launcher, person": (moment("between steps", 0, rank=0, call=1, number=signal.SIGINT, launcher=True), 130, None),
}
"""Who gets which signal, the exit code, and the last step if that does not depend on the time a signal takes."""


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SIGNALS)
def test_signals(name: str, tmp_path: Path) -> None:
    blow, code, step = SIGNALS[name]
    out = tmp_path / "run"
    args = [*MLP, "--steps", "1000000", "--optimizer.decay", "constant", "--checkpoint-every", "3", "--restarts", "3"]
    _, err = Command(tmp_path, [*args, "--out", str(out)], [blow]).ends(code, blows=1)
    assert "starting the ranks again" not in err
    stopped = Saved(find(str(out))[0][0]).step
    assert stopped == len(lines(out / "metrics.jsonl"))
    assert step in (None, stopped)
    # Ranks that are started again know the settings of the run that --resume names.
    again = Command(tmp_path, ["--resume", str(out), "--steps", str(stopped + 5)], [moment("metrics", 0, rank=1, call=2)])
    assert "(restart 1 of 3)" in again.ends(0, blows=1)[1]
    assert_same_run(out, undisturbed(out, tmp_path / "other"))


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_ranks_that_torchrun_starts_again_go_on(tmp_path: Path) -> None:
    out, blows = tmp_path / "run", [moment("after the manifest", 0, rank=0), moment("collective", 1, rank=1, call=50)]
    args = [*MLP, "--steps", "12", "--checkpoint-every", "3", "--out", str(out)]
    Command(tmp_path, args, blows, launcher=TORCHRUN).ends(0, blows=2)
    assert next(event["step"] for event in lines(out / "events.jsonl") if event["kind"] == "resume") == 6
    assert_same_run(out, undisturbed(out, tmp_path / "other"))
    assert_nothing_to_clean(out, keep=2)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_ranks_that_torchrun_tells_to_stop_keep_what_they_have(tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = [*MLP, "--steps", "1000000", "--optimizer.decay", "constant", "--checkpoint-every", "3", "--out", str(out)]
    run = Command(tmp_path, args, [], launcher=TORCHRUN)
    wait_for_a_step(run, out)
    run.process.send_signal(signal.SIGTERM)
    run.ends(1)
    stopped = Saved(find(str(out))[0][0]).step
    assert stopped == len(lines(out / "metrics.jsonl"))
    Command(tmp_path, [*args, "--resume", "auto", "--steps", str(stopped + 5)], [], launcher=TORCHRUN).ends(0)
    assert_same_run(out, undisturbed(out, tmp_path / "other"))


LLAMA = ["--model", "llama-tiny", "--data", "text.txt", "--seq", "8", "--batch", "4", "--dtype", "float64"]
LAYOUTS = [
    [*MLP],
    [*LLAMA, "--mesh", "dp=2", "--zero", "3"],
    [*LLAMA, "--mesh", "pp=2", "--microbatches", "2"],
    [*LLAMA, "--mesh", "tp=2"],
    [*MLP, "--no-barrier", "--zero", "1", "--dropout", "0.1"],
]
DEATHS = 10


def random_blows(seed: int) -> list[Blow]:
    """Ten deaths; the first one when there is a checkpoint."""
    generator = random.Random(seed)
    blows = [moment("removal", 0, 0)]
    while len(blows) < DEATHS:
        start, rank = len(blows), generator.randrange(2)
        phase = generator.choice([*MOMENTS, "any moment", "any moment of a step"])
        if phase == "any moment":
            blow = moment("joined", start, rank, phase=phase, delay=generator.uniform(0, 8))
        elif phase == "any moment of a step":
            blow = moment("between steps", start, rank, generator.randint(1, 12), phase=phase, delay=generator.uniform(0, 0.1))
        else:
            most = MOMENTS[phase][1]
            blow = moment(phase, start, 0 if phase in ONLY_FIRST else rank, generator.randint(1, most))
        blows.append(blow)
    return blows


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_deaths(seed: int, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{number} squared is {number * number}.\n" for number in range(4000)))
    out, blows = tmp_path / "run", random_blows(seed)
    args = [*LAYOUTS[seed % len(LAYOUTS)], "--steps", "100", "--checkpoint-every", "3", "--restarts", str(DEATHS)]
    run = Command(tmp_path, [*args, "--out", str(out)], blows)
    _, err = run.ends(0, blows=None)
    fallen = run.fallen()
    print(f"seed {seed}: {len(fallen)} deaths: {dict(Counter(fallen))}")  # noqa: T201 - which phases they hit, with -s
    # A death at a moment that nobody chose may come too late, when the run has ended.
    assert len(fallen) >= DEATHS - 3
    assert err.count("was ended by SIGKILL (signal 9)") == err.count("starting the ranks again") == len(fallen)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert_same_run(out, undisturbed(out, tmp_path / "other"))
    assert_nothing_to_clean(out, keep=2)
