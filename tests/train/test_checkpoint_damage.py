"""Attacks on checkpoints: whatever a disk, a kill or a person does to the files, a run goes on with what was written or not at all.

The checkpoints are of two ranks with ZeRO 1, so each has files of its own.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from tests.run.test_replicas import Run, batch, running
from torch import Tensor

from phalanx.run.replicas import check_replicas
from phalanx.run.step import Step
from phalanx.train.checkpoint import Checkpoints, Damaged, Saved, find, load
from phalanx.train.checkpoint.manifest import MANIFEST

pytestmark = pytest.mark.filterwarnings("ignore:replicated, since no name matches")
RUN = Run("dp=2", {"zero": 1}, {})
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def step() -> Iterator[Step]:
    with running(RUN) as (step, _):
        step(batch(0))
        yield step


def save(step: Step, folder: Path, *numbers: int, keep: int = 0) -> Checkpoints:
    made = Checkpoints(step, str(folder), keep=keep)
    for number in numbers:
        made.save(number, {"cursor": number})
        made.wait()
    return made


def state(step: Step) -> State:
    weights = {f"model.{name}": x.clone() for name, x in step.state_dict().items()}
    return weights | {f"optimizer.{name}": x.clone() for name, x in step.optimizer_state_dict().items()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def newest(folder: Path) -> Path:
    return Path(find(str(folder))[0][0])


@pytest.fixture(scope="module")
def written(step: Step, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """A checkpoint, and the state that was written."""
    root = tmp_path_factory.mktemp("written")
    save(step, root, 1)
    return newest(root), state(step)


@pytest.fixture
def saved(written: tuple[Path, State], tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(written[0], tmp_path / written[0].name))


def files(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    assert {MANIFEST, ".metadata"} < {path.name for path in found}
    assert len([path for path in found if path.name.startswith("__")]) == 2
    return found


def refused(step: Step, folder: Path, name: str) -> str:
    """It must not be loaded, and the error must name the file."""
    with pytest.raises(ValueError, match=r".") as told:
        reopened(step, folder)
    assert name in str(told.value), told.value
    return str(told.value)


def reopened(step: Step, folder: Path | str) -> None:
    load(step, str(folder))


def flipped(step: Step, folder: Path, seed: int, count: int) -> None:
    """Every flip is refused, unless it changed nothing: 1e-05 is 1E-05."""
    generator, paths = random.Random(seed), files(folder)
    for number in range(count):
        path = paths[number % len(paths)]
        content = path.read_bytes()
        byte, bit = generator.randrange(len(content)), generator.randrange(8)
        changed = bytearray(content)
        changed[byte] ^= 1 << bit
        path.write_bytes(changed)
        if path.name == MANIFEST and bytes(changed).lower() == content.lower() and bit == 5:
            path.write_bytes(content)
            continue
        assert path.name in refused(step, folder, path.name), (path, byte, bit)
        path.write_bytes(content)


def test_a_bit_that_flips_anywhere_is_refused(step: Step, written: tuple[Path, State], saved: Path) -> None:
    flipped(step, saved, seed=0, count=30)
    reopened(step, saved)
    assert same(state(step), written[1])
    step.each(check_replicas)


@pytest.mark.nightly
def test_two_hundred_bits_that_flip_are_refused(step: Step, written: tuple[Path, State], saved: Path) -> None:
    flipped(step, saved, seed=1, count=200)
    reopened(step, saved)
    assert same(state(step), written[1])


def test_a_file_that_ends_early_is_refused(step: Step, saved: Path) -> None:
    generator = random.Random(2)
    for path in files(saved):
        content = path.read_bytes()
        for length in (0, 1, len(content) - 1, generator.randrange(len(content)), generator.randrange(len(content))):
            path.write_bytes(content[:length])
            refused(step, saved, path.name)
        path.write_bytes(content + b"\0")
        refused(step, saved, path.name)
        path.write_bytes(content)
    reopened(step, saved)


def test_a_file_that_is_missing_is_refused(step: Step, saved: Path) -> None:
    for path in files(saved):
        path.rename(path.with_suffix(".away"))
        refused(step, saved, path.name)
        path.with_suffix(".away").rename(path)
    reopened(step, saved)


def test_a_folder_or_garbage_in_place_of_a_file_is_refused(step: Step, saved: Path) -> None:
    for path in files(saved):
        content = path.read_bytes()
        for garbage in (b"\x80\x04N.", b"{}", b"[]", b"null", b"\xff\xfe", random.Random(3).randbytes(len(content))):
            path.write_bytes(garbage)
            refused(step, saved, path.name)
        path.unlink()
        path.mkdir()
        refused(step, saved, path.name)
        path.rmdir()
        path.write_bytes(content)
    reopened(step, saved)


def exchanged(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


@pytest.mark.parametrize("start", ["__", "part-"])
def test_files_of_two_ranks_that_are_exchanged_are_refused(step: Step, saved: Path, start: str) -> None:
    one, other = (path for path in files(saved) if path.name.startswith(start))
    exchanged(one, other)
    told = refused(step, saved, "")
    assert one.name in told or other.name in told
    exchanged(one, other)
    reopened(step, saved)


def test_files_of_another_checkpoint_are_refused(step: Step, written: tuple[Path, State], tmp_path: Path) -> None:
    """Each file of the same run's next checkpoint in place of this one's, which has the same name and mostly the same size."""
    reopened(step, written[0])
    step(batch(5))
    save(step, tmp_path / "later", 2)
    later = newest(tmp_path / "later")
    for path in files(written[0]):
        folder = Path(shutil.copytree(later, tmp_path / "mixed", dirs_exist_ok=True))
        shutil.copyfile(path, folder / path.name)
        if (folder / path.name).read_bytes() == (later / path.name).read_bytes():
            assert path.name == ".metadata"  # the same tensors in the same places
        elif path.name == MANIFEST:
            with pytest.raises(Damaged):
                reopened(step, folder)
        else:
            refused(step, folder, path.name)
        shutil.rmtree(folder)
    reopened(step, written[0])


@contextmanager
def nobody() -> Iterator[None]:
    """Without root's right to everything."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody may enter, as those of pytest may not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up the rights of root for a while")
def test_a_file_that_may_not_be_read_is_refused(step: Step, written: tuple[Path, State], public: Path) -> None:
    folder = Path(shutil.copytree(written[0], public / written[0].name))
    folder.chmod(0o755)
    for path in files(folder):
        path.chmod(0o644)
    with nobody():
        reopened(step, folder)
    for path in files(folder):
        path.chmod(0)
        with nobody():
            assert "ermission denied" in refused(step, folder, path.name)
        path.chmod(0o644)


# What is written


class Faulty(LocalFileSystem):
    """A local disk that is full once so many bytes are written to it, or that fails some reads."""

    protocol = "faulty"
    cachable = False
    room = 1 << 40
    fails_at = ""
    """Of names that contain it, reads fail."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def open(self, path: Any, mode: str = "rb", **options: Any) -> Any:
        file = Path(self._strip_protocol(path)).open(mode)  # noqa: SIM115 - who asks for it closes it
        if "w" in mode:
            return _Full(file)
        return _Broken(file) if Faulty.fails_at and Faulty.fails_at in str(path) else file

    def pipe_file(self, path: Any, value: bytes, **options: Any) -> None:
        with self.open(path, "wb") as file:
            file.write(value)


class _Wrapped:
    def __init__(self, file: Any) -> None:
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


class _Full(_Wrapped):
    def write(self, content: Any) -> int:
        Faulty.room -= len(content)
        if Faulty.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self.file.write(content))


class _Broken(_Wrapped):
    def read(self, *_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr(Faulty, "room", 1 << 40)
    monkeypatch.setattr(Faulty, "fails_at", "")


@pytest.mark.usefixtures("faulty")
def test_a_disk_that_is_full_at_any_byte_leaves_the_checkpoint_before(
    step: Step, written: tuple[Path, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reopened(step, written[0])
    kept = save(step, f"faulty://{tmp_path}", 1)  # type: ignore[arg-type]
    (good,) = find(str(tmp_path))[0]
    size = sum(path.stat().st_size for path in files(Path(good)))
    generator = random.Random(4)
    rooms = [0, size - 400, *(generator.randrange(size) for _ in range(8))]
    for number, room in enumerate(rooms, 2):
        monkeypatch.setattr(Faulty, "room", room)
        kept.save(number, {})
        with pytest.raises(ValueError, match="No space left on device; free some space"):
            kept.wait()
        assert find(str(tmp_path)) == ([good], "")
        step(batch(number))  # training may go on
    monkeypatch.setattr(Faulty, "room", 1 << 40)
    kept.save(99, {})
    kept.wait()
    assert len(find(str(tmp_path))[0]) == 2
    assert Saved(str(newest(tmp_path))).step == 99
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {Path(name).name for name in find(str(tmp_path))[0]}
    reopened(step, Path(good))
    assert same(state(step), written[1])


@pytest.mark.usefixtures("faulty")
def test_a_disk_that_fails_to_read_is_told(step: Step, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in files(saved):
        monkeypatch.setattr(Faulty, "fails_at", path.name)
        with pytest.raises(ValueError, match="Input/output error") as told:
            reopened(step, f"faulty://{saved}")
        assert path.name in str(told.value)


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode
    ):
        pytest.skip("cannot mount a small disk here")
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", folder], capture_output=True)
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_small_disk_fills_up_and_is_emptied(step: Step, tmp_path: Path) -> None:
    """A real one: of some checkpoints the last does not fit, and after one is removed the next does."""
    (tmp_path / "disk").mkdir()
    with mounted(tmp_path / "disk", "160k"):
        folder = tmp_path / "disk" / "checkpoints"
        kept = save(step, folder, 1)
        number = 2
        with pytest.raises(ValueError, match="No space left on device"):  # noqa: PT012 - one of these does not fit
            while number < 50:
                kept.save(number, {})
                kept.wait()
                number += 1
        found, bad = find(str(folder))
        assert bad == ""
        assert [Saved(name).step for name in found] == list(range(number - 1, 0, -1))
        for name in found:
            reopened(step, Path(name))
        for name in found[1:] or found:
            shutil.rmtree(name)
        kept.save(99, {})
        kept.wait()
        assert Saved(str(newest(folder))).step == 99


def test_a_folder_that_cannot_be_written_to_is_told(step: Step, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with mounted(tmp_path / "disk", "1m"):
        kept = save(step, tmp_path / "disk", 1)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "disk"], check=True)
        with pytest.raises(ValueError, match=r"Read-only file system; choose a folder that can be written to"):
            save(step, tmp_path / "disk", 2)
        kept.save(2, {})
        with pytest.raises(ValueError, match="Read-only file system"):
            kept.wait()
        reopened(step, newest(tmp_path / "disk"))


def test_a_file_in_place_of_the_folder_is_told(step: Step, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match="file"):
        save(step, tmp_path / "file", 1)


# Which one is taken


def test_a_half_written_checkpoint_is_never_taken(step: Step, tmp_path: Path) -> None:
    """Files are written in some order before the manifest; without it none of their subsets is a checkpoint."""
    save(step, tmp_path, 1)
    good = newest(tmp_path)
    paths = [path.name for path in files(good) if path.name != MANIFEST]
    for missing in (None, *paths):
        half = tmp_path / "step-00000009-00000001"
        shutil.copytree(good, half, ignore=lambda _, names, missing=missing: {MANIFEST, missing} & set(names))
        assert find(str(tmp_path)) == ([str(good)], "")
        shutil.rmtree(half)
    shutil.copytree(good, tmp_path / "step-00000009-00000001", ignore=lambda *_: {MANIFEST})
    save(step, tmp_path, 10)  # a run that takes the folder over removes it
    assert not (tmp_path / "step-00000009-00000001").exists()
    (tmp_path / "other" / "step-00000009-00000001").mkdir(parents=True)
    with pytest.raises(ValueError, match="half-written"):
        find(str(tmp_path / "other"))


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b""), lambda path: path.write_text("{}")])
def test_a_damaged_manifest_is_told_and_the_one_before_is_taken(
    step: Step, tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    save(step, tmp_path, 1, 2)
    (second, first), _ = find(str(tmp_path))
    damage(Path(second) / MANIFEST)
    good, bad = find(str(tmp_path))
    assert good == [first]
    assert Path(second).name in bad


def test_a_clock_that_jumps_backwards_changes_no_order(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    kept = Checkpoints(step, str(tmp_path))
    for number, jump in ((10, 0.0), (20, -1e6), (30, -1e9), (40, 1e6)):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        kept.save(number, {})
        kept.wait()
        path = newest(tmp_path)
        os.utime(path, (now + jump, now + jump))
        for file in files(path):
            os.utime(file, (now + jump, now + jump))
    assert [Saved(name).step for name in find(str(tmp_path))[0]] == [40, 30, 20, 10]


def test_a_run_that_went_back_is_newer_than_what_it_left(step: Step, tmp_path: Path) -> None:
    """A checkpoint of step 20 after a return to 10 is the newest, though one of step 30 was written before."""
    kept = save(step, tmp_path, 10, 30)
    kept.save(20, {})
    kept.wait()
    assert Saved(str(newest(tmp_path))).step == 20
    again = save(step, tmp_path, 5)  # another process that goes on in the folder
    assert Saved(str(newest(tmp_path))).step == 5
    assert again.place.address == str(tmp_path)


def test_two_runs_in_one_folder_are_told(step: Step, tmp_path: Path) -> None:
    first = save(step, tmp_path, 1)
    save(step, tmp_path, 2)
    first.save(3, {})
    with pytest.raises(ValueError, match="taken over by another run"):
        first.wait()
    assert [Saved(name).step for name in find(str(tmp_path))[0]] == [2, 1]
