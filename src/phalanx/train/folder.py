"""The folder of a run: what lies where, who may write it, and files that a killed run leaves readable.

Lines are written whole and at once, other files are replaced atomically, and the lock is the kernel's: nothing has to be put right
by hand after a kill. What the folder says about the run is for `phalanx.observe.runs` to tell.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import yaml
from filelock import FileLock, Timeout

from phalanx.train.config import TrainConfig, closest
from phalanx.train.settings import dump

EVENTS = {
    "start": "the run began, with no step done",
    "resume": "it went on from a checkpoint",
    "checkpoint": "a checkpoint is complete",
    "rewind": "later steps were forgotten",
    "skip": "the update of a step was left out",
    "spike": "a loss far above those before it",
    "signal": "a signal asked it to end",
    "restart": "its ranks were started anew",
    "warning": "something beside the training failed",
    "end": "the run ended by itself; `why` says so if before its last step",
}
"""Kinds of lines in events.jsonl."""

REMEDIES = {
    errno.ENOSPC: "the disk is full: make room, or choose a folder on another one",
    errno.EDQUOT: "the disk quota is used up: make room, or choose a folder elsewhere",
    errno.EROFS: "the file system is read-only: choose a folder elsewhere",
    errno.EACCES: "this user may not write there: change its permissions, or choose a folder elsewhere",
    errno.EPERM: "this user may not write there: change its permissions, or choose a folder elsewhere",
    errno.EEXIST: "a file has the name of the folder: move it away, or choose another name",
    errno.ENOTDIR: "a file is in the place of a folder: move it away, or choose another name",
    errno.EISDIR: "a folder is in the place of a file: move it away, or choose another name",
    errno.ENAMETOOLONG: "the name is too long: choose a shorter one",
}

LAUNCHER = "launcher"
"""The lock of who starts ranks here, and starts them again: between two starts nobody holds that of the run."""
GLANCE_SECONDS = 0.25
"""How long a run tries to lock its folder: `phalanx runs` holds the lock for an instant to see whether anybody else does."""


@dataclass(frozen=True)
class RunFolder:
    """A folder that exists. Only the process that holds its lock may write it.

    made    folders that `create` had to make for it, the innermost first
    before  what was in it by then
    """

    path: Path
    made: tuple[Path, ...] = ()
    before: frozenset[str] = frozenset()

    @classmethod
    def create(cls, config: TrainConfig) -> Self:
        wanted = Path("runs/_") if config.out is None else config.out
        with told(wanted):
            missing = [folder for folder in wanted.parents if not folder.exists()]
            is_new = config.out is None or not config.out.exists()
        path = run_folder(config)
        return cls(path, (path, *missing) if is_new else (), frozenset(each.name for each in path.glob("*")))

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def checkpoints(self) -> str:
        """Where checkpoints go unless the configuration names another place."""
        return str(self.path / "checkpoints")

    @property
    def logs(self) -> Path:
        """What ranks print, a file for each: see `log`."""
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank}.txt"

    @contextmanager
    def lock(self, name: str = "lock") -> Iterator[None]:
        """Be the one run that writes here, or the one launcher of it (`LAUNCHER`). Raises ValueError naming the other one.

        The kernel drops the lock when its holder ends, however it ends. lock.json beside it says who that is.
        """
        holder, held = self.path / f"{name}.json", FileLock(self.path / name)
        with told(self.path):
            try:
                held.acquire(timeout=GLANCE_SECONDS, poll_interval=0.01)
            except Timeout:
                raise ValueError(
                    f"{self.path} is being written by {_holder(holder)}: wait for it, end it, or choose another folder with --out"
                ) from None
        try:
            us = {"pid": os.getpid(), "host": socket.gethostname(), "since": now()}
            replace_file(holder, json.dumps(us).encode() + b"\n")
            yield
        finally:
            with suppress(OSError):  # who held it is of no use to anyone once nobody does
                holder.unlink()
            held.release()

    @property
    def is_locked(self) -> bool:
        """Whether a run is writing here now."""
        try:
            with (self.path / "lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no lock file, or a file system without locks
            return False
        return False

    def steps(self) -> int:
        """The last step that metrics.jsonl tells of; 0 if there is none."""
        rows = read_lines(self.metrics).rows if self.metrics.exists() else []
        return max((row["step"] for row in rows if is_count(row.get("step"))), default=0)

    def write_config(self, config: TrainConfig) -> dict[str, tuple[Any, Any]]:
        """Write config.yaml: what a new run of the same settings is made from, so without --out and --resume.

        Returns the settings that an older config.yaml here had otherwise, as {name: (then, now)}.
        """
        before = read_settings(self.config).values
        replace_file(self.config, dump(replace(config, out=None, resume=None)).encode())
        if not before:
            return {}
        after = read_settings(self.config).values
        return {name: (before.get(name), value) for name, value in after.items() if before.get(name) != value}

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Write environment.json. One that differs, of the run before a resume, stays as environment.1.json and so on."""
        content = json.dumps(facts, indent=1, allow_nan=False).encode() + b"\n"
        with told(self.path):
            if self.environment.exists() and self.environment.read_bytes() != content:
                taken = {path.name for path in self.path.glob("environment.*.json")}
                number = next(n for n in range(1, len(taken) + 2) if f"environment.{n}.json" not in taken)
                self.environment.rename(self.path / f"environment.{number}.json")
        replace_file(self.environment, content)

    def event(self, kind: str, step: int, **facts: Any) -> None:
        """Add a line to events.jsonl: {"order", "time", "kind", "step", **facts}.

        `order` counts up whatever the clock does; `time` is UTC. `step` is the last one that had ended.
        """
        if kind not in EVENTS:
            raise ValueError(f"there is no event {kind!r}; there are {closest(kind, EVENTS)}")
        with LineWriter(self.events) as writer:
            # The launcher of local ranks writes here as well, about ranks that are gone.
            writer.wait_for_others()
            order = 1 + max((row["order"] for row in read_lines(self.events).rows if is_count(row.get("order"))), default=0)
            writer.write({"order": order, "time": now(), "kind": kind, "step": step, **facts})

    def rewind(self, step: int, **facts: Any) -> Rewound:
        """Forget what metrics.jsonl says after `step`; a line that a kill or a full disk cut off goes as well.

        Tells events.jsonl what was dropped, with `facts`, if anything was. Nobody may have the file open: see Recorder.rewind.
        """
        if not self.metrics.exists():
            return Rewound(0, 0, 0)
        found = read_lines(self.metrics)
        kept = [row for row in found.rows if is_count(row.get("step")) and row["step"] <= step]
        rewound = Rewound(len(kept), len(found.rows) - len(kept), len(found.broken) + found.is_cut)
        if rewound.dropped or rewound.broken:
            replace_file(self.metrics, b"".join(json_line(row) for row in kept))
            self.event("rewind", step, dropped=rewound.dropped, broken=rewound.broken, **facts)
        return rewound


@dataclass(frozen=True)
class Rewound:
    """Lines of metrics.jsonl that stayed, that were of later steps, and that were no lines."""

    kept: int
    dropped: int
    broken: int


def run_folder(config: TrainConfig) -> Path:
    """The folder of --out, or a new one under runs/ named for model and mesh. It exists afterwards."""
    if config.out is not None:
        with told(config.out):
            config.out.mkdir(parents=True, exist_ok=True)
        return config.out
    model = re.sub(r"[^\w.=-]+", "-", config.model).strip("-.")
    name = "-".join([model, *config.mesh.replace("=", "").split(",")]).rstrip("-")
    number = 1
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}.{number}")
        try:
            with told(folder.parent):
                folder.parent.mkdir(exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ValueError(_remedy(folder, error)) from None
        else:
            return folder


@contextmanager
def told(path: Path) -> Iterator[None]:
    """An OSError within becomes one line that a person can act on: ValueError with the path and what to do."""
    try:
        yield
    except OSError as error:
        raise ValueError(_remedy(path, error)) from None


def _remedy(path: Path, error: OSError) -> str:
    said = error.strerror or type(error).__name__
    return f"cannot write {path}: {REMEDIES.get(error.errno or 0, said)}"


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_bytes())
        return f"process {found['pid']} on host {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has just taken the lock, or just given it back
        return "another process"


def now() -> str:
    """UTC to the millisecond, as in 2026-01-31T12:00:00.000Z."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash at any point, finds the old one or the new one, whole."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with told(path):
        try:
            with fresh.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise


# Lines of JSON


class LineWriter:
    """Appends lines of JSON to a file; each is in it, whole, when `write` returns. A cut-off last line is removed first."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        with told(path):
            self._file = path.open("w+b" if fresh else "a+b", buffering=0)
            self._end_cut_line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, values: Mapping[str, Any]) -> None:
        line = json_line(values)
        with told(self.path):
            # One call of the system, so that a kill cannot cut it; a full disk can.
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def wait_for_others(self) -> None:
        """Until closed, be the only one who has called this for the file."""
        with suppress(OSError):  # a file system without locks: two writers in one instant may share an order number
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def close(self) -> None:
        self._file.close()

    def _end_cut_line(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        at = end
        while at:
            start = max(0, at - 65536)
            self._file.seek(start)
            newline = self._file.read(at - start).rfind(b"\n")
            at = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
        if at < end:
            self._file.truncate(at)
            self._file.seek(at)


def json_line(values: Mapping[str, Any]) -> bytes:
    """One line of JSON. It has no NaN and no infinity: such a value is null, and `not_finite` says by name which it was."""
    odd = {name: str(value) for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    kept = {name: _finite(value) for name, value in values.items()} | ({"not_finite": odd} if odd else {})
    return json.dumps(kept, allow_nan=False, default=str).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Lines:
    """What a file of JSON lines holds: its objects, the numbers of lines that are none, and whether its last line was cut off."""

    rows: list[dict[str, Any]]
    broken: list[int]
    is_cut: bool


def read_lines(path: Path) -> Lines:
    """Every line that can be read. Raises OSError if the file cannot."""
    *whole, rest = path.read_bytes().split(b"\n")
    rows, broken = [], []
    for number, line in enumerate(whole, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken.append(number)
    return Lines(rows, broken, bool(rest))


# Settings


@dataclass(frozen=True)
class Settings:
    """What a config.yaml says, with dotted names, over the defaults; nothing if it cannot be read. And what was wrong with it."""

    values: dict[str, Any]
    problems: tuple[str, ...]


def read_settings(path: Path) -> Settings:
    """Never raises: a folder may be of a newer version, or half there. Unlike `load`, which makes a run of the file."""
    defaults = _flat(yaml.safe_load(dump(TrainConfig())))
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        return Settings({}, (f"{path.name} cannot be read: {said}",))
    if not isinstance(content, dict):
        return Settings({}, (f"{path.name} holds no settings",))
    found = _flat(content)
    unknown = [
        f"{path.name} has the setting {name!r}, which this version does not know" for name in found if name not in defaults
    ]
    return Settings(defaults | found, tuple(unknown))


def _flat(content: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{str(key).replace('-', '_')}"
        # Only these are records of their own; `mesh: {dp: 2}` is a value.
        values |= _flat(value, f"{name}.") if name == "optimizer" and isinstance(value, dict) else {name: value}
    return values
