"""Runs on the command line as people use them: begun again in the same folder, gone on with from elsewhere, and asked for wrongly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.cli.train import forget_unless_begun, tell_restart
from phalanx.train.checkpoint import find
from phalanx.train.config import TrainConfig
from phalanx.train.folder import LAUNCHER, RunFolder
from phalanx.train.launch import RankFailure

MLP = ("train", "--model", "mlp", "--batch", "4")
LLAMA = ("train", "--model", "llama-tiny", "--batch", "2", "--seq", "8")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "étude 1"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "500")
    return folder


def steps(folder: str) -> list[int]:
    return [json.loads(line)["step"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def test_a_new_run_in_the_folder_of_another_is_told_and_mixes_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MLP, "--steps", "3", "--out", "run"]) == 0
    assert "WARNING" not in capsys.readouterr().out
    assert main([*MLP, "--steps", "2", "--out", "run", "--checkpoint-every", "0"]) == 0
    assert "WARNING: run has a run of 3 steps: its metrics are replaced now" in capsys.readouterr().out
    assert steps("run") == [1, 2]
    # The newer one kept no checkpoint, so there is nothing of it to go on with.
    assert main(["train", "--resume", "run", "--steps", "4"]) == 2
    said = capsys.readouterr().err
    assert "run has no checkpoint: those in it are of an earlier run there" in said
    # The older one can still be gone on with, by name.
    (address,) = Path("run", "checkpoints").glob("step-00000003-*")
    assert main(["train", "--resume", str(address), "--steps", "4"]) == 0
    assert "WARNING" not in capsys.readouterr().out


def test_a_run_that_keeps_nothing_makes_no_folder_for_it() -> None:
    assert main([*MLP, "--steps", "1", "--out", "run", "--checkpoint-every", "0"]) == 0
    assert not Path("run", "checkpoints").exists()


def test_relative_paths_are_found_from_another_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a b.txt").write_text("one two three four five " * 40)
    Path("ü=").mkdir()
    Path("ü=", "c.txt").write_text("six seven eight nine ten " * 40)
    asked = ("--data", "a b.txt=0.5", "ü==0.5", "--checkpoints", "kept", "--out", "run")
    assert main([*LLAMA, "--steps", "1", *asked]) == 0
    assert "a b.txt" in Path("run", "config.yaml").read_text(encoding="utf-8")
    assert "ü=" in Path("run", "config.yaml").read_text(encoding="utf-8")
    capsys.readouterr()
    elsewhere = here.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["train", "--resume", "../étude 1/run", "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert f"of {here}/a b.txt (50.0% of samples)" in said
    assert steps("../étude 1/run") == [1, 2]
    assert [path.name for path in elsewhere.iterdir()] == []
    # Where they are now is written down, so the folder of the run may move.
    shutil.move(here / "run", elsewhere / "moved")
    assert main(["train", "--resume", "moved", "--steps", "3"]) == 0
    assert steps("moved") == [1, 2, 3]
    assert len(find(str(here / "kept"))[0]) == 2


def test_a_model_of_hugging_face_that_was_moved(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from tests.hf.folders import saved

    saved("llama", here / "modèle", num_hidden_layers=1)
    saved("llama", here / "other", num_hidden_layers=1, rms_norm_eps=1e-4)
    Path("modèle", "tokenizer.json").write_text("{}")
    sizes = ("--batch", "2", "--seq", "8")
    assert main(["train", "--model", "hf:modèle", *sizes, "--steps", "1", "--out", "run"]) == 0
    monkeypatch.chdir(here.parent)
    assert main(["train", "--resume", "étude 1/run", "--steps", "2"]) == 0
    assert f"model hf:modèle → hf:{here}/modèle, steps 1 → 2" in capsys.readouterr().out
    (here / "modèle").rename(here / "autre")
    assert main(["train", "--resume", "étude 1/run", "--steps", "3", "--model", "hf:étude 1/other"]) == 2
    assert "is of a run with model" in capsys.readouterr().err
    assert main(["train", "--resume", "étude 1/run", "--steps", "3", "--model", "hf:étude 1/autre"]) == 0
    assert main(["export", "étude 1/run", "--out", "out"]) == 0
    assert Path("out", "tokenizer.json").exists()
    shutil.rmtree(here / "autre")
    capsys.readouterr()
    assert main(["export", "étude 1/run", "--out", "without"]) == 0
    assert "étude 1/autre is not there, so its tokenizer files do not come along" in capsys.readouterr().err


def test_what_is_told_of_a_run_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MLP, "--steps", "2", "--out", "my run", "--mesh", "dp=1"]) == 0
    assert main(["train", "--resume", "my run", "--steps", "4", "--mesh", ""]) == 0
    assert ", mesh dp=1 → none, steps 2 → 4" in capsys.readouterr().out


WRONG: dict[tuple[str, ...], str] = {
    (*MLP, "--out", ""): "--out is empty, as a variable of the shell is that nobody has set",
    ("train", "--resume="): "--resume is empty",
    ("train", "--config", ""): "--config is empty",
    (*LLAMA, "--data"): "--data names nothing",
    (*LLAMA, "--data", "a.txt", ""): "data has an empty name in it",
    (*MLP, "--init-from", ""): "init_from is empty",
    (*MLP, "--checkpoints", ""): "checkpoints is empty",
    (*MLP, "--spike-factor", "3"): "spike_factor is 3.0, but on_spike is ignore",
    ("train", "--config", "folder"): "cannot read the configuration folder: Is a directory; name a file, such as config.yaml in it",
    ("train", "--config", "nowhere"): "cannot read the configuration nowhere: No such file or directory",
    ("train", "--config", "latin.yaml"): "latin.yaml is not YAML: ",
    ("train", "--resume", "a.txt"): "a.txt has no checkpoint: it is a file",
    ("train", "--resume", "nowhere"): "nowhere has no checkpoint: there is no such folder",
    ("train", "--resume", "folder"): "folder has no checkpoint: none is in it",
    (*MLP, "--mesh", "dp=2", "--init-from", "nowhere"): "nowhere has no checkpoint: there is no such folder",
    (*MLP, "--checkpoints", "a.txt"): "a.txt: File exists, and is no folder; choose another name with --checkpoints",
    ("launch", "slurm", "train", "--mesh", "dp=2"): "`--` stands before train: phalanx launch slurm -- train --mesh dp=2",
    (
        *("launch", "torchrun", "--hosts", "1", "--", "train", "--mesh", "dp=2", "--out", "x", "--checkpoint-every", "5"),
    ): "hosts has '1'; a host is a name or an address",
}  # fmt: skip


def test_wrong_requests_are_refused_in_a_line_and_leave_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.txt").write_text("text")
    Path("latin.yaml").write_bytes(b"model: \xff\n")
    Path("folder").mkdir()
    Path("folder", "config.yaml").write_text("steps: 1\n")
    for args, said in WRONG.items():
        assert main(list(args)) == 2, args
        told = capsys.readouterr().err
        assert f"phalanx: {said}" in told, (args, told)
    assert sorted(path.name for path in here.iterdir()) == ["a.txt", "folder", "latin.yaml"]
    assert {path.name for path in here.joinpath("folder").iterdir()} == {"config.yaml"}


def test_a_refused_run_leaves_what_it_has_not_made(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def left(config: TrainConfig, *made: str) -> list[str]:
        """What stays after a start that has made these in its folder and was then refused."""
        folder = RunFolder.create(config)
        with folder.lock(LAUNCHER):
            with folder.lock():
                pass
            for name in made:
                path = folder.path / name
                path.parent.mkdir(exist_ok=True)
                path.touch()
            forget_unless_begun(folder, config)
        return sorted(str(path.relative_to(here)) for path in here.rglob("*") if path.is_file() or not any(path.iterdir()))

    mine = TrainConfig(out=here / "deep" / "mine")
    monkeypatch.chdir(here)
    assert left(mine, "logs/rank_0.txt") == []
    assert list(here.iterdir()) == []
    assert left(TrainConfig(model="mlp"), "logs/rank_0.txt", "config.yaml") == []
    # A file of somebody's, and logs of a start before this one.
    (here / "deep" / "mine" / "logs").mkdir(parents=True)
    (here / "deep" / "mine" / "notes").touch()
    assert left(mine, "logs/rank_0.txt") == ["deep/mine/logs/rank_0.txt", "deep/mine/notes"]
    # A run that had begun, or has only now.
    stays = ["deep/mine/config.yaml", "deep/mine/launcher", "deep/mine/lock", "deep/mine/logs/rank_0.txt", "deep/mine/notes"]
    assert left(mine, "config.yaml") == stays
    assert left(mine) == stays
    # Another run holds the lock of the folder by the time that this one is refused.
    other = TrainConfig(out=here / "other")
    folder = RunFolder.create(other)
    with RunFolder(folder.path).lock():
        forget_unless_begun(folder, other)
        assert folder.is_locked


def test_what_is_said_of_a_restart_and_of_steps_that_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MLP, "--steps", "6", "--out", "run", "--checkpoint-every", "1", "--keep", "0"]) == 0
    folder = RunFolder(Path("run"))
    tell_restart(RankFailure("rank 1 died\nat once", 1), 1, 3, folder)
    event = json.loads(folder.events.read_text().splitlines()[-1])
    assert (event["kind"], event["step"], event["why"]) == ("restart", 6, "rank 1 died")
    for step, said in ((5, "; step 6 of"), (4, "; steps 5 and 6 of"), (1, "; steps 2 to 5 of")):
        (address,) = Path("run", "checkpoints").glob(f"step-{step:08}-*")
        capsys.readouterr()
        assert main(["train", "--resume", str(address), "--steps", str(step + 1)]) == 0
        told = capsys.readouterr().out
        assert f"{said} metrics.jsonl" in told, told
        assert steps("run") == list(range(1, step + 2))
    assert main(["train", "--resume", "run", "--steps", "3"]) == 0
    assert "metrics.jsonl" not in capsys.readouterr().out


def test_a_run_that_kept_nothing_cannot_be_gone_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MLP, "--steps", "1", "--out", "nock", "--checkpoint-every", "0"]) == 0
    assert main(["train", "--resume", "nock", "--steps", "2"]) == 2
    assert "phalanx: nock has no checkpoint: its run had checkpoint_every 0" in capsys.readouterr().err


def test_optimizer_state_is_not_kept_from_where_there_is_none(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    Path("model", "config.json").write_text("{}")
    assert main([*MLP, "--init-from", "model", "--init-optimizer", "kept", "--out", "run"]) == 2
    assert "model is a Hugging Face folder, which has no optimizer's state" in capsys.readouterr().err
