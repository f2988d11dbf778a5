"""One run at a time writes a folder, whatever a kill leaves behind can be read, and nothing secret gets in."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.train import folder as folders
from phalanx.train.config import OptimizerConfig, TrainConfig
from phalanx.train.environment import command_line, describe, revision, variables, without_password
from phalanx.train.folder import (
    LineWriter,
    Rewound,
    RunFolder,
    json_line,
    read_lines,
    read_settings,
    replace_file,
    run_folder,
    told,
)
from phalanx.train.settings import load

SOURCE = Path(__file__).parents[2] / "src"


# The folder


def test_folders_are_named_for_model_and_mesh_and_not_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(model="hf-tiny:gpt2", mesh="dp=2,tp=2")
    assert [str(RunFolder.create(config).path) for _ in range(2)] == [
        "runs/hf-tiny-gpt2-dp2-tp2",
        "runs/hf-tiny-gpt2-dp2-tp2.2",
    ]
    assert run_folder(TrainConfig(model="hf:../my models/x")) == Path("runs/hf-..-my-models-x")  # no folder of its own
    mine = TrainConfig(out=Path("deep/mine"))
    assert run_folder(mine) == run_folder(mine) == Path("deep/mine")


def test_what_a_folder_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (RunFolder.create(TrainConfig(model="mlp")) for _ in range(2))
    assert (first.made, second.made) == ((Path("runs/mlp"), Path("runs")), (Path("runs/mlp.2"),))
    deep = TrainConfig(out=Path("deep/mine"))
    assert RunFolder.create(deep).made == (Path("deep/mine"), Path("deep"))
    Path("deep/mine/notes").touch()
    again = RunFolder.create(deep)
    assert (again.made, again.before) == ((), {"notes"})
    with pytest.raises(ValueError, match="the name is too long: choose a shorter one"):
        RunFolder.create(TrainConfig(out=Path("x" * 300)))


def test_places_in_the_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.checkpoints == f"{tmp_path}/checkpoints"
    assert run.log(3) == tmp_path / "logs" / "rank_3.txt"


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("")
    with pytest.raises(ValueError, match="cannot write taken: a file has the name of the folder: move it away, or choose"):
        run_folder(TrainConfig(out=Path("taken")))
    with pytest.raises(ValueError, match="cannot write taken/below: a file is in the place of a folder"):
        run_folder(TrainConfig(out=Path("taken/below")))
    Path("runs").write_text("")
    with pytest.raises(ValueError, match="cannot write runs: a file has the name of the folder"):
        run_folder(TrainConfig())
    for number, said in ((errno.EROFS, "file system is read-only"), (errno.EACCES, "this user may not write there")):
        with pytest.raises(ValueError, match=f"^cannot write x: .*{said}.*choose a folder elsewhere$"), told(Path("x")):
            raise OSError(number, os.strerror(number))
    with pytest.raises(ValueError, match=r"^cannot write x: Input/output error$"), told(Path("x")):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    said = r"cannot write .*metrics\.jsonl: the disk is full: make room"
    with LineWriter(tmp_path / "metrics.jsonl", fresh=True) as writer, pytest.raises(ValueError, match=said):
        writer.write({"step": 1})


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    replace_file(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="the disk is full"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# The lock


def test_the_second_run_is_told_who_the_first_is(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert not run.is_locked
    with run.lock():
        assert run.is_locked
        said = rf"is being written by process {os.getpid()} on host {socket.gethostname()} since \d{{4}}-.*Z: wait for it"
        with pytest.raises(ValueError, match=said), RunFolder(tmp_path).lock():
            pass
        assert run.is_locked
    assert not run.is_locked
    with run.lock():
        pass


def test_a_killed_run_leaves_nothing_to_clean(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from phalanx.train.folder import RunFolder
with RunFolder(Path({str(tmp_path)!r})).lock():
    print("held", flush=True)
    sys.stdin.read()
"""
    run = RunFolder(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match=f"written by process {holder.pid} on host"), run.lock():
                pass
        finally:
            holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (tmp_path / "lock.json").exists()  # it could not tidy up
    assert not run.is_locked
    with run.lock():
        assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()


def test_a_look_does_not_keep_a_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that holds the shared lock for an instant: the run tries again until it lets go."""
    run, tries = RunFolder(tmp_path), []
    with run.lock():
        pass
    import fcntl

    reader = (tmp_path / "lock").open("rb")
    fcntl.flock(reader, fcntl.LOCK_SH)
    real = fcntl.flock

    def flock(file: int, how: int) -> None:
        tries.append(how)
        if len(tries) == 2:
            real(reader, fcntl.LOCK_UN)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with run.lock():
        assert len(tries) >= 2
    reader.close()


# What is written


def test_configuration_and_what_changed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    config = TrainConfig(mesh="dp=2", steps=30, out=tmp_path, resume="auto", data=("a", "b"))
    assert run.write_config(config) == {}
    assert load(run.config, TrainConfig()) == replace(config, out=None, resume=None)
    changed = replace(config, mesh="tp=4", optimizer=OptimizerConfig(lr=1e-3))
    assert run.write_config(changed) == {"mesh": ("dp=2", "tp=4"), "optimizer.lr": (0.003, 0.001)}


def test_settings_of_a_newer_or_broken_version_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: mlp\nhyperspeed: 9\noptimizer:\n  lr: 0.5\n  nesterov: true\n")
    found = read_settings(path)
    assert (found.values["model"], found.values["optimizer.lr"], found.values["hyperspeed"]) == ("mlp", 0.5, 9)
    assert found.values["steps"] == TrainConfig().steps
    assert found.problems == (
        "config.yaml has the setting 'hyperspeed', which this version does not know",
        "config.yaml has the setting 'optimizer.nesterov', which this version does not know",
    )
    for content, said in (
        (b"model: [", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"just text", "holds no settings"),
    ):
        path.write_bytes(content)
        found = read_settings(path)
        assert found.values == {}
        assert said in found.problems[0]
    path.unlink()
    assert read_settings(path).problems == ("config.yaml cannot be read: No such file or directory",)


def test_events_keep_their_order_when_the_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    for time, kind in (("2026-05-01T00:00:00.000Z", "start"), ("2020-01-01T00:00:00.000Z", "checkpoint")):
        monkeypatch.setattr(folders, "now", lambda time=time: time)
        run.event(kind, 5, why="x")
    with run.events.open("ab") as file:
        file.write(b'{"order": 3, "kind": "sta')  # a full disk
    run.event("end", 6, loss=float("inf"), nested={"losses": [1.0, float("nan")]})
    found = read_lines(run.events)
    assert not found.broken
    assert not found.is_cut
    assert [(row["order"], row["kind"]) for row in found.rows] == [(1, "start"), (2, "checkpoint"), (3, "end")]
    assert list(found.rows[0]) == ["order", "time", "kind", "step", "why"]
    assert found.rows[2]["nested"] == {"losses": [1.0, None]}
    with pytest.raises(ValueError, match=r"no event 'chekpoint'; .*did you mean 'checkpoint'"):
        run.event("chekpoint", 1)


def test_rewinding_forgets_later_steps_and_cut_lines(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.rewind(3) == Rewound(0, 0, 0)
    with LineWriter(run.metrics) as writer:
        for step in (1, 2, 3, 4):
            writer.write({"step": step, "loss": 1.5 if step != 2 else float("nan")})
            if step in (2, 4):
                writer.write({"step": step, "held_out_loss": 2.5})
    with run.metrics.open("ab") as file:
        file.write(b'\x00\x00garbage\n{"step": 5, "lo')
    assert run.rewind(3, why="resume") == Rewound(kept=4, dropped=2, broken=2)
    kept = read_lines(run.metrics)
    assert [(row["step"], row.get("loss"), row.get("held_out_loss")) for row in kept.rows] == [
        (1, 1.5, None),
        (2, None, None),
        (2, None, 2.5),
        (3, 1.5, None),
    ]
    assert kept.rows[1]["not_finite"] == {"loss": "nan"}
    [event] = read_lines(run.events).rows
    assert {key: event[key] for key in ("kind", "step", "dropped", "broken", "why")} == {
        "kind": "rewind",
        "step": 3,
        "dropped": 2,
        "broken": 2,
        "why": "resume",
    }
    assert run.rewind(3) == Rewound(4, 0, 0)
    assert len(read_lines(run.events).rows) == 1  # nothing was dropped: nothing to tell


def test_a_cut_line_of_any_length_is_removed_before_the_next(tmp_path: Path) -> None:
    for whole in (b"", b'{"a": 1}\n', b'{"a": 1}\n' * 20000):
        for cut in (b"", b'{"b": 2}', b"x" * 65536, b"x" * 200000):
            path = tmp_path / "lines"
            path.write_bytes(whole + cut)
            with LineWriter(path) as writer:
                writer.write({"c": 3})
            assert path.read_bytes() == whole + b'{"c": 3}\n'


def test_what_is_no_number_is_null_and_named() -> None:
    line = json_line({"step": 3, "loss": float("nan"), "grad_norm": float("-inf"), "lr": 0.5})
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "lr": 0.5,
        "not_finite": {"loss": "nan", "grad_norm": "-inf"},
    }


# The environment


def test_the_environment_says_what_ran_and_no_secret(tmp_path: Path) -> None:
    env = {
        "OMP_NUM_THREADS": "2",
        "NCCL_DEBUG": "INFO",
        "SLURM_JOB_ID": "77",
        "TORCH_LOGS": "x",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": "/home/me",
        "HF_TOKEN": "hidden-1",
        "AWS_SECRET_ACCESS_KEY": "hidden-2",
        "WANDB_API_KEY": "hidden-3",
        "PHALANX_PASSWORD": "hidden-4",
        "TORCH_AUTH_TOKEN": "hidden-5",
        "NCCL_KEY": "hidden-6",
        "TORCH_PROXY": "http://me:hidden-7@proxy/",
        "TOKENIZERS_PARALLELISM": "false",
    }
    argv = ["phalanx", "train", "--checkpoints", "s3://me:hidden-8@bucket/x", "--api-key", "hidden-9", "--token=hidden-10"]
    found = describe(argv=[*argv, "--tokenizer", "shown"], env=env, mesh="dp=2", launcher="torchrun", gpus=["H200"])
    text = json.dumps(found, allow_nan=False)
    assert "hidden" not in text
    assert set(found["variables"]) == {
        *("OMP_NUM_THREADS", "NCCL_DEBUG", "SLURM_JOB_ID", "TORCH_LOGS", "CUDA_VISIBLE_DEVICES", "TORCH_PROXY"),
        "TOKENIZERS_PARALLELISM",
    }
    assert found["command"][-5:] == ["--api-key", "…", "--token=…", "--tokenizer", "shown"]
    assert found["command"][3] == "s3://…@bucket/x"
    assert found["versions"]["python"].count(".") == 2
    assert found["machine"]["host"] == socket.gethostname()
    assert found["machine"]["memory_bytes"] > 2**28
    assert (found["launcher"], found["mesh"], found["machine"]["gpus"]) == ("torchrun", "dp=2", ["H200"])


def test_secrets_by_shape() -> None:
    assert without_password("https://host/x?X-Amz-Signature=abc&y=1") == "https://host/x?…"
    assert without_password("a@b and c://d/e@f") == "a@b and c://d/e@f"
    assert command_line(["--secret", "--steps", "3"]) == ["--secret", "--steps", "3"]
    assert variables({"OMP_TOKENS": "x", "OMP_PLACES": "cores"}) == {"OMP_PLACES": "cores"}


def test_git_revision_and_uncommitted_changes(tmp_path: Path) -> None:
    assert revision(tmp_path) is None
    (nobodys := tmp_path / "no config").write_text("")
    env = {**os.environ, "GIT_CONFIG_GLOBAL": str(nobodys), "GIT_CONFIG_SYSTEM": str(nobodys)}

    def git(*args: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "x")
    assert revision(tmp_path) == {"commit": git("rev-parse", "HEAD"), "is_dirty": False}
    (tmp_path / "file").write_text("2")
    found = revision(tmp_path)
    assert found is not None
    assert found["is_dirty"]


def test_the_environment_of_the_run_before_a_resume_is_kept(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for mesh in ("dp=2", "dp=2", "dp=4", "tp=4"):
        run.write_environment({"mesh": mesh})
    meshes = {path.name: json.loads(path.read_text())["mesh"] for path in tmp_path.glob("environment*")}
    assert meshes == {"environment.json": "tp=4", "environment.1.json": "dp=2", "environment.2.json": "dp=4"}
