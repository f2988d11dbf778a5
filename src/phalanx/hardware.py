"""What a machine can do, as data: how fast it computes, the levels of its memory, and the latency and bandwidth of its links.

`phalanx bench hardware` measures a Profile and saves it; `predict` reads one and says what a collective costs, also over more or
fewer ranks than were measured. Pure: nothing here measures anything or imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1

Count = Callable[[int], float]


def _log2(ranks: int) -> float:
    return math.ceil(math.log2(ranks))


ALGORITHMS: Mapping[tuple[str, str], tuple[Count, Count]] = {
    # (operation, algorithm): (k, f). Over n ranks it takes k(n) link latencies, and f(n) times its size crosses the busiest link.
    # The size is that of nccl-tests: the larger of what a rank gives and gets, over all peers together.
    ("send", "direct"): (lambda n: 1, lambda n: 1),
    ("sendrecv", "direct"): (lambda n: 1, lambda n: 1),
    ("all_reduce", "ring"): (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    ("all_reduce", "doubling"): (_log2, _log2),
    ("all_reduce", "halving"): (lambda n: 2 * _log2(n), lambda n: 2 * (n - 1) / n),
    ("all_reduce", "one_shot"): (lambda n: 1, lambda n: n - 1),
    ("all_reduce", "two_shot"): (lambda n: 2, lambda n: 2 * (n - 1) / n),
    ("reduce_scatter", "ring"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("reduce_scatter", "one_shot"): (lambda n: 1, lambda n: (n - 1) / n),
    ("all_gather", "ring"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("all_gather", "one_shot"): (lambda n: 1, lambda n: (n - 1) / n),
    ("all_to_all", "pairwise"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("all_to_all", "one_shot"): (lambda n: 1, lambda n: (n - 1) / n),
    ("broadcast", "chain"): (lambda n: n - 1, lambda n: 1),
    ("broadcast", "tree"): (_log2, _log2),
    ("broadcast", "one_shot"): (lambda n: 1, lambda n: 1),
    ("reduce", "chain"): (lambda n: n - 1, lambda n: 1),
    ("reduce", "scatter_gather"): (lambda n: n, lambda n: 2 * (n - 1) / n),
    ("reduce", "one_shot"): (lambda n: 1, lambda n: n - 1),
    ("gather", "direct"): (lambda n: 1, lambda n: (n - 1) / n),
    ("scatter", "direct"): (lambda n: 1, lambda n: (n - 1) / n),
}

# Which of them a backend uses below and above its knee; "" is any other backend. Gloo's are read off its sources (broadcast.cc,
# reduce.cc, gather.cc), NCCL's are its rings. Shared memory reads straight from the peers.
_DIRECT = dict.fromkeys(("send", "sendrecv", "gather", "scatter"), ("direct", "direct"))
_RINGS = {"all_reduce": ("ring", "ring"), "reduce_scatter": ("ring", "ring"), "all_gather": ("ring", "ring")}
_RINGS |= {"all_to_all": ("pairwise", "pairwise"), "broadcast": ("chain", "chain"), "reduce": ("chain", "chain")} | _DIRECT
_SHARED = dict.fromkeys(_RINGS, ("one_shot", "one_shot")) | {"all_reduce": ("one_shot", "two_shot")} | _DIRECT
BACKENDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "": _RINGS,
    "gloo": {**_RINGS, "broadcast": ("tree", "tree"), "reduce": ("scatter_gather", "scatter_gather")},
    "shm": _SHARED,
    "threads": _SHARED,
}
OPERATIONS = tuple(_RINGS)


@dataclass(frozen=True)
class Line:
    """alpha and beta of t(S) = k(n) alpha + f(n) beta S, with k and f of the algorithm in ALGORITHMS: quantities of a link.

    Hockney 1994; Thakur, Rabenseifner and Gropp 2005. An interval is the 95% one of the bootstrap.
    """

    algorithm: str
    latency_seconds: float
    seconds_per_byte: float
    latency_interval: tuple[float, float]
    seconds_per_byte_interval: tuple[float, float]

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "seconds_per_byte"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a number of at least 0")

    @property
    def half_bytes(self) -> float:
        """alpha / beta: the message for which a link spends as long on latency as on bytes, and so half its bandwidth."""
        return self.latency_seconds / self.seconds_per_byte if self.seconds_per_byte else math.inf

    def seconds(self, op: str, ranks: int, size: float) -> float:
        """What the operation takes over this many ranks, `size` in bytes as in ALGORITHMS."""
        if (op, self.algorithm) not in ALGORITHMS:
            raise ValueError(
                f"{op} has no algorithm {self.algorithm!r}; there are {', '.join(a for o, a in ALGORITHMS if o == op)}"
            )
        latencies, volume = ALGORITHMS[op, self.algorithm]
        return latencies(ranks) * self.latency_seconds + volume(ranks) * self.seconds_per_byte * size


@dataclass(frozen=True)
class Point:
    """What was measured at one size: the seconds of every repetition, each that of the slowest rank."""

    bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Fit:
    """One operation along one axis: a line, or two with another algorithm from `knee_bytes` upwards.

    axis             as in `tp`, or `dp+tp` for several together; all its groups were measured at once
    error_by_decade  decade of the size in bytes ("3" is 1 to 10 kB): median of |predicted - measured| / measured
    points           the raw samples
    """

    op: str
    axis: str
    backend: str
    ranks: int
    below: Line
    above: Line | None = None
    knee_bytes: float | None = None
    error_by_decade: Mapping[str, float] = field(default_factory=dict)
    points: tuple[Point, ...] = ()

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"{self.op} along {self.axis} has {self.ranks} ranks; a link has at least 2 ends")
        if (self.above is None) != (self.knee_bytes is None):
            raise ValueError(f"{self.op} along {self.axis}: a second line and the size from which it holds come together")

    def line(self, size: float) -> Line:
        return self.below if self.above is None or self.knee_bytes is None or size < self.knee_bytes else self.above

    def seconds(self, ranks: int, size: float) -> float:
        return self.line(size).seconds(self.op, ranks, size)


@dataclass(frozen=True)
class Level:
    """A level of the memory hierarchy as one rank sees it; None is not known or not measured.

    bytes_per_second  read and written by a copy within the level, or sent by one between host and device
    latency_seconds   of one load that depends on the one before (registers: of one multiply-add)
    shared_by         cores that share it
    """

    name: str
    capacity_bytes: int | None
    bytes_per_second: float | None = None
    latency_seconds: float | None = None
    shared_by: int = 1

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "bytes_per_second", "latency_seconds"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"level {self.name}: {name} is {value}; it is a positive number or unknown")


@dataclass(frozen=True)
class Copy:
    """What copies within one working set reach: bytes read and written per second."""

    set_bytes: int
    bytes_per_second: float


@dataclass(frozen=True)
class Profile:
    """What was measured on one machine.

    machine     what it is, in words
    device      cpu or cuda
    at_once     ranks that were measured together: what those of a host share is shared between them
    arithmetic  multiplications and additions per second of a matrix product in one rank, by dtype
    memory      from registers outwards
    copies      bandwidth by working set, of which the levels are a few points
    links       fits of operations along axes
    """

    machine: str
    device: str
    at_once: int
    arithmetic: Mapping[str, float]
    memory: tuple[Level, ...]
    copies: tuple[Copy, ...] = ()
    links: tuple[Fit, ...] = ()

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read what `save` wrote. Raises ValueError, with the place in the file, if it is of another version or incomplete."""
        try:
            found = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(found, dict) or "version" not in found:
            raise ValueError(f"{path} is not a hardware profile: it has no version")
        if found["version"] != VERSION:
            raise ValueError(f"{path} is of version {found['version']}, this Phalanx reads {VERSION}; measure it again")
        del found["version"]
        try:
            return _profile(found)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def predict(
    profile: Profile, op: str, ranks: int, size: float, *, axis: str | None = None, backend: str | None = None
) -> float:
    """Seconds of an operation of `size` bytes over `ranks` ranks (nccl-tests' size, as in ALGORITHMS).

    Uses the fit of that operation on links of that axis and backend (any, if None) whose number of ranks is nearest: alpha and beta
    belong to the link, k and f to the number of ranks. An operation that was not measured there is predicted from its messages,
    `sendrecv` or else `send`, with the backend's usual algorithm. One rank costs nothing. Raises ValueError if nothing fits.
    """
    if op not in OPERATIONS:
        raise ValueError(f"there is no operation {op!r}; there are {', '.join(OPERATIONS)}")
    if ranks < 1 or size < 0:
        raise ValueError(f"{op} over {ranks} ranks with {size} bytes: there is at least 1 rank and no negative size")
    if ranks == 1:
        return 0.0
    there = [fit for fit in profile.links if axis in (None, fit.axis) and backend in (None, fit.backend)]
    for measured in (op, "sendrecv", "send"):
        fits = [fit for fit in there if fit.op == measured]
        if fits:
            fit = min(fits, key=lambda fit: abs(math.log(fit.ranks / ranks)))
            if measured == op:
                return fit.seconds(ranks, size)
            below, above = BACKENDS.get(fit.backend, BACKENDS[""])[op]
            link = fit.line(size / ranks)
            cost = [
                ALGORITHMS[op, a][0](ranks) * link.latency_seconds + ALGORITHMS[op, a][1](ranks) * link.seconds_per_byte * size
                for a in (below, above)
            ]
            return min(cost)
    known = sorted({f"{fit.op} on {fit.axis} over {fit.backend}" for fit in profile.links})
    place = f" on axis {axis}" * (axis is not None) + f" over {backend}" * (backend is not None)
    raise ValueError(f"the profile has neither {op} nor messages{place}; it has {', '.join(known) or 'no links'}")


# Reading back. Every key is asked for by name, so that a file that lacks one is told which, and where.


def _profile(found: dict[str, Any]) -> Profile:
    machine, device, at_once, arithmetic, memory, copies, links = _take(
        found, "the profile", "machine", "device", "at_once", "arithmetic", "memory", "copies", "links"
    )
    rates = {dtype: _number(rate, f"arithmetic.{dtype}") for dtype, rate in _table(arithmetic, "arithmetic").items()}
    levels = tuple(_level(level, f"memory[{i}]") for i, level in enumerate(_list(memory, "memory")))
    curve = tuple(_copy(copy, f"copies[{i}]") for i, copy in enumerate(_list(copies, "copies")))
    fits = tuple(_fit(fit, f"links[{i}]") for i, fit in enumerate(_list(links, "links")))
    return Profile(str(machine), str(device), int(_number(at_once, "at_once")), rates, levels, curve, fits)


def _copy(found: Any, where: str) -> Copy:
    size, rate = _take(found, where, "set_bytes", "bytes_per_second")
    return Copy(int(_number(size, f"{where}.set_bytes")), _number(rate, f"{where}.bytes_per_second"))


def _level(found: Any, where: str) -> Level:
    name, capacity, rate, latency, shared = _take(
        found, where, "name", "capacity_bytes", "bytes_per_second", "latency_seconds", "shared_by"
    )
    return Level(
        str(name),
        None if capacity is None else int(_number(capacity, f"{where}.capacity_bytes")),
        None if rate is None else _number(rate, f"{where}.bytes_per_second"),
        None if latency is None else _number(latency, f"{where}.latency_seconds"),
        int(_number(shared, f"{where}.shared_by")),
    )


def _fit(found: Any, where: str) -> Fit:
    op, axis, backend, ranks, below, above, knee, errors, points = _take(
        found, where, "op", "axis", "backend", "ranks", "below", "above", "knee_bytes", "error_by_decade", "points"
    )
    if op not in OPERATIONS:
        raise ValueError(f"{where}.op is {op!r}; there are {', '.join(OPERATIONS)}")
    return Fit(
        str(op),
        str(axis),
        str(backend),
        int(_number(ranks, f"{where}.ranks")),
        _line(below, f"{where}.below", op),
        None if above is None else _line(above, f"{where}.above", op),
        None if knee is None else _number(knee, f"{where}.knee_bytes"),
        {
            decade: _number(error, f"{where}.error_by_decade")
            for decade, error in _table(errors, f"{where}.error_by_decade").items()
        },
        tuple(_point(point, f"{where}.points[{i}]") for i, point in enumerate(_list(points, f"{where}.points"))),
    )


def _line(found: Any, where: str, op: str) -> Line:
    algorithm, alpha, beta, alphas, betas = _take(
        found, where, "algorithm", "latency_seconds", "seconds_per_byte", "latency_interval", "seconds_per_byte_interval"
    )
    if (op, algorithm) not in ALGORITHMS:
        raise ValueError(f"{where}.algorithm is {algorithm!r}; {op} has {', '.join(a for o, a in ALGORITHMS if o == op)}")
    return Line(
        str(algorithm),
        _number(alpha, f"{where}.latency_seconds"),
        _number(beta, f"{where}.seconds_per_byte"),
        _interval(alphas, f"{where}.latency_interval"),
        _interval(betas, f"{where}.seconds_per_byte_interval"),
    )


def _point(found: Any, where: str) -> Point:
    size, seconds = _take(found, where, "bytes", "seconds")
    times = tuple(_number(x, f"{where}.seconds") for x in _list(seconds, f"{where}.seconds"))
    return Point(int(_number(size, f"{where}.bytes")), times)


def _take(found: Any, where: str, *names: str) -> list[Any]:
    table = _table(found, where)
    missing, unknown = [name for name in names if name not in table], sorted(set(table) - set(names))
    if missing or unknown:
        wrong = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has unknown {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(f"{where} {' and '.join(wrong)}")
    return [table[name] for name in names]


def _table(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {found!r}; expected a table")
    return found


def _list(found: Any, where: str) -> list[Any]:
    if not isinstance(found, list):
        raise ValueError(f"{where} is {found!r}; expected a list")
    return found


def _number(found: Any, where: str) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise ValueError(f"{where} is {found!r}; expected a number")
    return float(found)


def _interval(found: Any, where: str) -> tuple[float, float]:
    ends = [_number(x, where) for x in _list(found, where)]
    if len(ends) != 2:
        raise ValueError(f"{where} has {len(ends)} numbers; an interval has 2")
    return ends[0], ends[1]
