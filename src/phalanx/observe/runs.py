"""What run folders hold, read and compared. Nothing is written, and a damaged folder is told, never raised.

A run is read as far as it can be: each thing that is wrong becomes a line of its `problems`.
"""

from __future__ import annotations

import difflib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from phalanx.train.folder import LAUNCHER, RunFolder, is_count, read_lines, read_settings

State = Literal["running", "finished", "interrupted", "unknown"]

MARKS = ("config.yaml", "metrics.jsonl", "events.jsonl", "lock", LAUNCHER)
"""A folder with one of these is a run, though it may have written nothing yet."""
DEPTH = 3
"""Levels of folders that are looked through for runs."""
SHOWN_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder.

    rows         lines of training steps in metrics.jsonl, by step; of a step that came again, the last one
    evaluations  lines of held-out batches, likewise
    events       lines of events.jsonl since the last start, in their own order
    """

    name: str
    path: Path
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    environment: Mapping[str, Any]
    is_running: bool
    problems: tuple[str, ...] = field(default=())

    @property
    def steps(self) -> int:
        """The last step that ended; 0 before the first."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def asked(self) -> int | None:
        steps = self.settings.get("steps")
        return steps if is_count(steps) else None

    @property
    def loss(self) -> float | None:
        """Of the last step; nan if it was not finite, None before the first step."""
        return number(self.rows[-1], "loss") if self.rows else None

    @property
    def best_held_out(self) -> float | None:
        losses = [number(row, "held_out_loss") for row in self.evaluations]
        return min((loss for loss in losses if not math.isnan(loss)), default=None)

    @cached_property
    def speeds(self) -> list[float]:
        """Tokens per second of each step, without the first step of each process, which pays for what no other does."""
        firsts = {event["step"] + 1 for event in self.events if event.get("kind") in ("resume", "start") and has_step(event)}
        kept = [row for at, row in enumerate(self.rows) if at and row["step"] not in firsts] or self.rows
        found = [number(row, "tokens_per_second") for row in kept]
        return [value for value in found if math.isfinite(value)]

    @property
    def tokens_per_second(self) -> float | None:
        """The median over steps."""
        return statistics.median(self.speeds) if self.speeds else None

    @property
    def state(self) -> State:
        if self.is_running:
            return "running"
        if self.asked is None or not (self.rows or self.events):
            return "unknown"
        return "finished" if self.steps >= self.asked else "interrupted"

    def count(self, kind: str) -> int:
        return sum(event.get("kind") == kind for event in self.events)

    @property
    def started(self) -> str | None:
        """UTC, as events.jsonl has it."""
        time = next((event.get("time") for event in self.events if event.get("kind") == "start"), None)
        return time if isinstance(time, str) else None

    @property
    def checkpoint(self) -> int | None:
        """Step of the newest checkpoint that was complete and that the run has not gone back behind."""
        newest = 0
        for event in self.events:
            if has_step(event) and event.get("kind") == "checkpoint":
                newest = event["step"]
            elif has_step(event) and event.get("kind") in ("resume", "rewind"):
                newest = min(newest, event["step"])
        return newest or None

    def as_json(self) -> dict[str, Any]:
        values = {
            "name": self.name,
            "path": str(self.path),
            "model": self.settings.get("model"),
            "mesh": self.settings.get("mesh"),
            "steps": self.steps,
            "asked": self.asked,
            "loss": self.loss,
            "best_held_out": self.best_held_out,
            "tokens_per_second": self.tokens_per_second,
            "state": self.state,
            "restarts": self.count("restart"),
            "resumes": self.count("resume"),
            "checkpoint": self.checkpoint,
            "started": self.started,
            "problems": list(self.problems),
        }
        return {name: finite(value) for name, value in values.items()}


def number(row: Mapping[str, Any], key: str) -> float:
    """A value of a line as float; nan if it is null, as metrics.jsonl writes what is not finite, or no number."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def finite(value: Any) -> Any:
    """JSON has no nan."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def has_step(row: Mapping[str, Any]) -> bool:
    return is_count(row.get("step"))


def read_run(path: Path, name: str | None = None) -> Run:
    """The run in a folder, whatever state the folder is in."""
    folder = RunFolder(path)
    is_running = folder.is_locked
    problems: list[str] = []
    if not any((path / mark).exists() for mark in MARKS):
        problems.append(f"no run folder: it has none of {', '.join(MARKS)}")
    settings = read_settings(folder.config)
    if not problems:
        problems += settings.problems
    lines = _lines(folder.metrics, is_running, problems) if (path / MARKS[0]).exists() or folder.metrics.exists() else []
    events = _lines(folder.events, is_running, problems) if folder.events.exists() else []
    begun = max((at for at, event in enumerate(events) if event.get("kind") == "start"), default=0)
    return Run(
        name=name if name is not None else str(path),
        path=path,
        settings=settings.values,
        rows=_by_step(lines, "loss"),
        evaluations=_by_step(lines, "held_out_loss"),
        events=events[begun:],
        environment=_environment(folder.environment, problems),
        is_running=is_running,
        problems=tuple(problems),
    )


def _lines(path: Path, is_running: bool, problems: list[str]) -> list[dict[str, Any]]:
    try:
        found = read_lines(path)
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return []
    if found.broken:
        where = ", ".join(map(str, found.broken[:3])) + (" and more" if len(found.broken) > 3 else "")
        problems.append(f"{path.name} has {len(found.broken)} lines that are not JSON objects: line {where}")
    if found.is_cut and not is_running:
        problems.append(f"{path.name} ends in a line that was cut off")
    if path.name == "metrics.jsonl":
        strange = sum(not has_step(row) or not {"loss", "held_out_loss"} & row.keys() for row in found.rows)
        if strange:
            problems.append(f"{path.name} has {strange} lines without a step, or without a loss")
        if not any(has_step(row) and "loss" in row for row in found.rows) and not is_running:
            problems.append(f"{path.name} has no step")
    return found.rows


def _by_step(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    last = {row["step"]: row for row in rows if key in row and has_step(row)}
    return [last[step] for step in sorted(last)]


def _environment(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        content = None
    if isinstance(content, dict):
        return content
    problems.append(f"{path.name} is not a JSON object")
    return {}


def age(started: str | None, at: datetime | None = None) -> str:
    """How long ago that was, in the largest unit: 3 h ago. What is no time is –."""
    try:
        then = datetime.fromisoformat(started or "")
    except ValueError:
        return "–"
    if then.tzinfo is None:
        return "–"
    seconds = ((at or datetime.now(UTC)) - then).total_seconds()
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size * (2 if unit == "days" else 1):
            return f"{int(seconds // size)} {unit} ago"
    return "just now"


# Which runs


def find_runs(places: Sequence[Path]) -> list[Run]:
    """The runs that `places` are or contain; a folder beside runs that is none is among them, with that as its problem.

    Names are paths below the place. Raises ValueError for a place that does not exist.
    """
    found: dict[Path, str] = {}
    for place in places:
        if not place.is_dir():
            raise ValueError(_missing(str(place), sorted(str(each) for each in _folders(place.parent))))
        for path in [place] if is_run(place) else _below(place, DEPTH):
            found.setdefault(path, str(path if path == place else path.relative_to(place)))
    return [read_run(path, name) for path, name in found.items()]


def named_runs(names: Sequence[str], places: Sequence[Path]) -> list[Run]:
    """Runs by name below `places`, or by path. Raises ValueError with the closest match for one that does not exist."""
    if len(set(names)) < len(names):
        raise ValueError(f"{' '.join(names)} names a run twice")
    known = {str(path.relative_to(place)): path for place in places if place.is_dir() for path in _below(place, DEPTH)}
    runs = []
    for name in names:
        path = known.get(name, Path(name))
        if not path.is_dir():
            raise ValueError(_missing(name, list(known)))
        if not is_run(path):
            raise ValueError(f"{path} is no run folder: it has none of {', '.join(MARKS)}")
        runs.append(read_run(path, name))
    return runs


def is_run(path: Path) -> bool:
    return any((path / mark).is_file() for mark in MARKS)


def _below(place: Path, depth: int) -> list[Path]:
    """Runs in a folder, and folders in which no run is found."""
    paths = []
    for folder in _folders(place):
        inside = [] if is_run(folder) or depth == 1 else [path for path in _below(folder, depth - 1) if is_run(path)]
        paths += inside or [folder]
    return paths


def _folders(place: Path) -> list[Path]:
    if not place.is_dir():
        return []
    return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))


def _missing(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"there is no run {name!r}; did you mean {close[0]!r}?"
    listed = ", ".join(known[:8]) + (" and more" if len(known) > 8 else "")
    return f"there is no run {name!r}; there are {listed}" if known else f"there is no run {name!r}, nor any other"


# Comparing


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs, the first of which the others are held against.

    settings      settings that are not the same in all: {dotted name: a value for each run}
    environment   the same of what they ran on
    losses        some of the steps that all have: {step: a loss for each run}, first and last among them
    common        how many steps all have
    first_apart   the first of them at which a loss is not equal to the bit, and the run's name; None if all are equal
    speeds        tokens per second of each run: 25th, 50th and 75th percentile over steps; None without steps
    """

    names: tuple[str, ...]
    settings: Mapping[str, tuple[Any, ...]]
    environment: Mapping[str, tuple[Any, ...]]
    losses: Mapping[int, tuple[float, ...]]
    common: int
    first_apart: tuple[int, str] | None
    tokens_alike: bool
    """Whether equal steps are equal numbers of tokens in all runs."""
    speeds: tuple[tuple[float, float, float] | None, ...]
    held_out: tuple[float | None, ...]

    @property
    def relative_speeds(self) -> tuple[float | None, ...]:
        """Median tokens per second over that of the first run."""
        first = self.speeds[0]
        return tuple(speed[1] / first[1] if speed and first and first[1] else None for speed in self.speeds)

    def as_json(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "settings": {name: list(values) for name, values in self.settings.items()},
            "environment": {name: list(values) for name, values in self.environment.items()},
            "losses": {str(step): [finite(loss) for loss in losses] for step, losses in self.losses.items()},
            "common_steps": self.common,
            "first_apart": self.first_apart and {"step": self.first_apart[0], "name": self.first_apart[1]},
            "tokens_alike": self.tokens_alike,
            "tokens_per_second": [speed and list(speed) for speed in self.speeds],
            "relative_speed": list(self.relative_speeds),
            "best_held_out": [finite(loss) for loss in self.held_out],
        }


def compare(runs: Sequence[Run]) -> Comparison:
    """Raises ValueError for fewer than two runs."""
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} run is nothing to compare; name two or more, as in --compare a b")
    curves = [{row["step"]: row for row in run.rows} for run in runs]
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    losses = {step: tuple(number(curve[step], "loss") for curve in curves) for step in common}
    apart = ((step, runs[at].name) for step, row in losses.items() for at, loss in enumerate(row) if not same(loss, row[0]))
    tokens = [{number(curve[step], "tokens") for curve in curves} for step in common]
    return Comparison(
        names=tuple(run.name for run in runs),
        settings=differing([run.settings for run in runs]),
        environment=differing([_told(run.environment) for run in runs]),
        losses={step: losses[step] for step in spread(common, SHOWN_STEPS)},
        common=len(common),
        first_apart=next(apart, None),
        tokens_alike=all(len(each) == 1 for each in tokens),
        speeds=tuple(_quartiles(run.speeds) for run in runs),
        held_out=tuple(run.best_held_out for run in runs),
    )


def same(a: float, b: float) -> bool:
    """Equal, or neither is a number."""
    return a == b or (math.isnan(a) and math.isnan(b))


def differing(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """The names whose values are not the same in all records; a record that lacks a name has None there."""
    names = dict.fromkeys(name for record in records for name in record)
    values = {name: tuple(record.get(name) for record in records) for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly spread, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (most - 1))] for at in range(most)]


def _told(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What of environment.json may explain a difference, by dotted name; the command line repeats the settings."""
    git, machine, versions, chosen = (
        each if isinstance(each := environment.get(key), dict) else {} for key in ("git", "machine", "versions", "variables")
    )
    found: dict[str, Any] = {"commit": git.get("commit"), "uncommitted changes": git.get("is_dirty")}
    found |= {name: machine.get(name) for name in ("host", "cpu", "cores_allowed", "gpus")}
    found |= {"launcher": environment.get("launcher")}
    # Where ranks met differs from launch to launch and changes nothing.
    varied = {
        name: value for name, value in chosen.items() if name.startswith(("OMP_", "MKL_", "NCCL_", "CUBLAS_", "PYTORCH_"))
    }
    return found | versions | varied


def _quartiles(values: Sequence[float]) -> tuple[float, float, float] | None:
    if len(values) < 2:
        return (values[0],) * 3 if values else None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
