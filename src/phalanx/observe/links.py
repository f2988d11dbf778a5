"""Which rank, host or link is slow, out of what every link was measured at: a pure function of the numbers.

A link is slow against the usual link of its kind, inside a host or between hosts. Slow links are then explained by as few causes as
possible: a host of which all links to other hosts are slow, a rank of which all links are (or all in one direction), else the link.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich import box
from rich.table import Table

VERSION = 1
FACTORS = {"bandwidth": 1.5, "latency": 2.0}
"""A link must be slower than usual by this, however quiet the machine is: less is in nobody's way."""
DEVIATIONS = 5.0
"""And by this many standard deviations of the noise, estimated from the median absolute deviation."""
SCATTERED = 4.0
"""If the noise hides even a link this many times slower, nothing was found because nothing could be."""
CROWDED = 3.0
"""A ring in which each rank sends and receives at once may take twice as long as one message without anything being wrong."""
NEARLY_ALL = 0.8
"""Share of a rank's or host's links that must be slow for it to be the cause: one may look healthy by chance."""

Matrix = tuple[tuple[float, ...], ...]  # [from][to], the diagonal unused
Link = tuple[int, int]


@dataclass(frozen=True)
class Links:
    """What was measured between the ranks of a world.

    hosts             of every rank
    bytes             of the large message
    latency_seconds   of a small message, half its way there and back
    bytes_seconds     one way, what the bytes of the large message take on top of that
    ring_seconds      until every rank has sent the large message to its right while receiving one from its left
    """

    hosts: tuple[str, ...]
    bytes: int
    latency_seconds: Matrix
    bytes_seconds: Matrix
    ring_seconds: float

    def __post_init__(self) -> None:
        n = len(self.hosts)
        if n < 2:
            raise ValueError(f"links need at least 2 ranks, there are {n}")
        for name in ("latency_seconds", "bytes_seconds"):
            matrix: Matrix = getattr(self, name)
            if [len(row) for row in matrix] != [n] * n:
                raise ValueError(f"{name} has rows of {[len(row) for row in matrix]} numbers for {n} ranks; expected {n} × {n}")
            for a, b in self.pairs():
                if not 0 < matrix[a][b] < math.inf:
                    raise ValueError(f"{name} from rank {a} to rank {b} is {matrix[a][b]}; expected a positive number")

    def pairs(self) -> Iterator[Link]:
        """Every ordered pair of different ranks."""
        return ((a, b) for a in range(len(self.hosts)) for b in range(len(self.hosts)) if a != b)

    def crosses(self, link: Link) -> bool:
        """Whether it leaves a host."""
        return self.hosts[link[0]] != self.hosts[link[1]]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}) + "\n")

    @classmethod
    def load(cls, path: Path) -> Links:
        """Read what `save` wrote; ValueError if it is of another version or lacks something."""
        try:
            found = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(found, dict) or found.get("version") != VERSION:
            version = found.get("version") if isinstance(found, dict) else None
            raise ValueError(f"{path} has version {version}, this Phalanx reads links of version {VERSION}; measure them again")
        if missing := [name for name in cls.__dataclass_fields__ if name not in found]:
            raise ValueError(f"{path} lacks {', '.join(missing)}")
        try:
            latency, message = (
                tuple(tuple(float(x) for x in row) for row in found[name]) for name in ("latency_seconds", "bytes_seconds")
            )
            return cls(tuple(map(str, found["hosts"])), int(found["bytes"]), latency, message, float(found["ring_seconds"]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


Kind = Literal["host", "rank", "sender", "receiver", "link", "direction"]


@dataclass(frozen=True)
class Finding:
    """One cause: what is slow, by which measure, how many times slower than usual, and the links that it explains."""

    kind: Kind
    name: str
    measure: Literal["bandwidth", "latency"]
    factor: float
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Verdict:
    """What is slow, and one line that says it. `noise` is the standard deviation of the healthy links' times, relative."""

    findings: tuple[Finding, ...]
    line: str
    noise: Mapping[str, float]


def judge(links: Links) -> Verdict:
    """The causes of all slow links. Bandwidth is judged first; latency adds only what it does not tell already."""
    findings: list[Finding] = []
    noise = {}
    for measure, matrix in (("bandwidth", links.bytes_seconds), ("latency", links.latency_seconds)):
        excess, noise[measure] = excesses(links, matrix)
        limit = max(math.log(FACTORS[measure]), DEVIATIONS * noise[measure])
        slow = {link for link, by in excess.items() if by > limit}
        told = {(finding.kind, finding.name) for finding in findings}
        for kind, name, own in causes(links, slow):
            if (kind, name) not in told:
                by = math.exp(statistics.median(excess[link] for link in own))
                findings.append(Finding(kind, name, measure, by, tuple(own)))  # type: ignore[arg-type]
    return Verdict(tuple(findings), "; ".join([*map(sentence, findings)] or [quiet(links, noise)]), noise)


def excesses(links: Links, matrix: Matrix) -> tuple[dict[Link, float], float]:
    """By how much each link is slower than usual for its kind, and the noise, both as logarithms of a ratio of times.

    The usual time is the median over ranks of the median over a rank's links, the lower one where there are two: with three ranks
    of which one is slow, two thirds of the links are, but two of three ranks have a healthy one. The noise is what is left when each
    link is explained by its slower end.
    """
    excess: dict[Link, float] = {}
    left: list[float] = []
    for crossing in (False, True):
        times = {(a, b): math.log(matrix[a][b]) for a, b in links.pairs() if links.crosses((a, b)) == crossing}
        if not times:
            continue
        of_rank = {
            rank: statistics.median_low([time for link, time in times.items() if rank in link])
            for rank in sorted({rank for link in times for rank in link})
        }
        usual = statistics.median_low(of_rank.values())
        for (a, b), time in times.items():
            excess[a, b] = time - usual
            left.append(abs(time - max(of_rank[a], of_rank[b])))
    return excess, 1.4826 * statistics.median_low(left)


def causes(links: Links, slow: set[Link]) -> Iterator[tuple[str, str, list[Link]]]:
    """(kind, name, slow links it explains), the one that explains most first, until every slow link is explained."""
    left = set(slow)
    while left:
        candidates = [
            (kind, name, sorted(left & own))
            for kind, name, own in suspects(links)
            if own & left and len(own & slow) >= NEARLY_ALL * len(own)
        ]
        kind, name, explained = max(candidates, key=lambda candidate: len(candidate[2]))
        yield kind, name, explained
        left -= set(explained)


def suspects(links: Links) -> Iterator[tuple[str, str, set[Link]]]:
    """Everything that can be a cause, with the links that are slow if it is; of equals the first is blamed.

    Two ranks have one link, so neither can be told from it; nor one of two hosts from the way between them.
    """
    pairs = list(links.pairs())
    n, hosts = len(links.hosts), list(dict.fromkeys(links.hosts))
    for rank in range(n) if n > 2 else ():
        yield "rank", f"rank {rank}", {link for link in pairs if rank in link}
    for host in hosts if len(hosts) > 2 else ():
        yield "host", f"host {host}", {link for link in pairs if links.crosses(link) and host in (links.hosts[i] for i in link)}
    for rank in range(n) if n > 2 else ():
        yield "sender", f"rank {rank}", {link for link in pairs if link[0] == rank}
        yield "receiver", f"rank {rank}", {link for link in pairs if link[1] == rank}
    for a, b in pairs:
        if a < b:
            yield "link", f"{a} ↔ {b}", {(a, b), (b, a)}
    for a, b in pairs:
        yield "direction", f"{a} → {b}", {(a, b)}


SENTENCES: Mapping[str, Callable[[Finding], str]] = {
    "host": lambda f: f"{f.name} is slow: {_slower(f)} between it and other hosts",
    "rank": lambda f: f"{f.name} is slow: {_slower(f)} on its links",
    "sender": lambda f: f"{f.name} sends slowly: {_slower(f)} on the way out",
    "receiver": lambda f: f"{f.name} receives slowly: {_slower(f)} on the way in",
    "link": lambda f: f"link {f.name} is slow: {_slower(f)} in both directions",
    "direction": lambda f: f"link {f.name} is slow: {_slower(f)} in this direction only",
}


def sentence(finding: Finding) -> str:
    return SENTENCES[finding.kind](finding)


def _slower(finding: Finding) -> str:
    what = "bytes" if finding.measure == "bandwidth" else "small messages"
    return f"{what} take {finding.factor:.1f} times as long as usual"


def quiet(links: Links, noise: Mapping[str, float]) -> str:
    """The line if no link is slow: what was looked for, or that more could not have been seen."""
    seen = max(FACTORS["bandwidth"], math.exp(DEVIATIONS * noise["bandwidth"]))
    message = f"no rank, host or link stands out among {len(links.hosts)} ranks"
    if seen > SCATTERED:
        return f"{message}, but their bandwidths scatter too much to tell: measure on a quieter machine or with larger --mib"
    message += f": no bandwidth is {seen:.1f} times below the usual"
    n = len(links.hosts)
    alone = max(
        links.latency_seconds[a][b] + links.bytes_seconds[a][b] for a, b in ((rank, (rank + 1) % n) for rank in range(n))
    )
    if links.ring_seconds > CROWDED * alone:
        message += (
            f", but all at once, in a ring, they take {links.ring_seconds / alone:.1f} times as long as the slowest alone, "
            "so they share something: cores, memory or a way out"
        )
    return message


def matrix_table(links: Links, findings: Iterable[Finding]) -> Table:
    """From each row's rank to each column's: GB/s and microseconds of latency; slow links have a star."""
    slow = {link for finding in findings for link in finding.links}
    several = len(set(links.hosts)) > 1
    ranks = range(len(links.hosts))
    title = f"GB/s of {links.bytes / 2**20:.3g} MiB and µs of latency, from row to column; * is slow"
    table = Table("from", *(str(rank) for rank in ranks), box=box.SIMPLE, title=title, title_justify="left")
    for a in ranks:
        cells = [cell(links, a, b, (a, b) in slow) for b in ranks]
        table.add_row(f"{a} {links.hosts[a]}" if several else str(a), *cells)
    return table


def cell(links: Links, a: int, b: int, slow: bool) -> str:
    if a == b:
        return "·"
    rate = links.bytes / links.bytes_seconds[a][b] / 1e9
    text = f"{rate:.3g} {links.latency_seconds[a][b] * 1e6:.0f}"
    return f"[bold red]{text}*[/bold red]" if slow else text
