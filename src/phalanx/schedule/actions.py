"""The Schedule's vocabulary: one training step of one rank is a flat list of actions.

Pure data. What an action consumes and produces is in `values.py`; lists are made by `lower.py` and proved by `check.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "GATHER", "FREE", "REDUCE", "COUNT", "NORM", "OPT"]
COMPUTE = frozenset({"F", "B", "I", "W", "OPT"})


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does. A communication action means: issue it. Its index is its position in the rank's list.

    segment    segment index for F B I W GATHER FREE REDUCE; for SEND_F and RECV_F the segment that produces the value, for
               SEND_B and RECV_B the segment whose input gradient it is; None for COUNT NORM OPT
    microbatch None where there is none
    peer       pp coordinate of the other end of a SEND or RECV
    needs      indices in the same list of the actions that must be complete (not just issued) before this one starts. Actions
               on lane "compute" run one after another in list order, so only the latest such need is named
    lane       "compute", or the communicator and direction that it occupies: "pp:0>1:F", "reduce:dp", "world"
    releases   names of the buffers that are free once this action is complete: "cut:3:F:1" and the like
    """

    kind: Kind
    segment: int | None = None
    microbatch: int | None = None
    peer: int | None = None
    lane: str = "compute"
    needs: tuple[int, ...] = ()
    releases: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = self.kind if self.segment is None else f"{self.kind}{self.segment}"
        return name if self.microbatch is None else f"{name}.{self.microbatch}"

    @property
    def communicates(self) -> bool:
        """Issued here, complete later; every other action is complete before the next one of its rank starts."""
        return self.kind not in COMPUTE and self.kind != "FREE"


@dataclass(frozen=True)
class Storage:
    """ZeRO (Rajbhandari et al. 2020): what ranks that hold equal parameters store once between them instead of once each.

    level     1: the optimizer's state; 2: and the gradients once they are summed; 3: and the parameters
    axes      mesh axes whose ranks divide it; other axes over which a gradient is summed hold copies (hybrid sharding)
    by_microbatch  levels 2 and 3: scatter the gradients of every microbatch and add them up in slices. That is as many reduce_scatters
              as microbatches instead of one, and no rank holds more than the gradients of two segments whole
    prefetch  segments whose parameters are gathered ahead of the one that computes
    keep      level 3: segments of one rank that may be gathered at once, more than `prefetch`; None: with a pipeline all of its
              segments, each gathered once a step, otherwise one more than `prefetch`
    """

    level: int
    axes: tuple[str, ...]
    by_microbatch: bool = False
    prefetch: int = 1
    keep: int | None = None

    def __post_init__(self) -> None:
        if self.level not in (1, 2, 3):
            raise ValueError(f"zero is {self.level}; it is 0 (nothing is divided), 1, 2 or 3")
        if self.by_microbatch and self.level == 1:
            raise ValueError("by_microbatch adds gradients up in slices, which zero 1 does not have: take zero 2 or 3")
        if len(set(self.axes)) < len(self.axes):
            raise ValueError(f"axes are {', '.join(self.axes)}; each axis divides once")
        if self.keep is not None and self.level < 3:
            raise ValueError(f"keep is of zero 3, which frees what it gathers; zero {self.level} keeps whole parameters")
        if self.prefetch < 0:
            raise ValueError(f"prefetch is {self.prefetch}; it is a number of segments of at least 0")
        if self.keep is not None and self.keep <= self.prefetch:
            raise ValueError(
                f"keep is {self.keep} segments and prefetch {self.prefetch}: the one that computes and those that are gathered ahead "
                f"of it need {self.prefetch + 1}"
            )


@dataclass(frozen=True)
class Schedule:
    """Every rank's list for one step, with the placement that it was made for."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    """By pipeline coordinate: ranks at the same pp coordinate run the same list."""
    stages: tuple[tuple[int, ...], ...]
    """Segments of each stage, in order."""
    host: tuple[int, ...]
    """pp coordinate that hosts each stage."""
    microbatches: int
    copies: int = 1
    """2 if every stage is on two coordinates (bidirectional DualPipe): `stages` and `host` then list one whole model after another,
    and each takes its equal share of the microbatches."""
    storage: Storage | None = None
    """How parameters are stored between steps; None: whole on every rank that computes with them."""
    late: bool = False
    """OPT does not wait for NORM: the next step starts before all ranks have ended this one (see View.late)."""

    @property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """For each copy of the model, the pp coordinate that hosts each segment."""
        length = len(self.stages) // self.copies
        return tuple(
            tuple(
                at
                for stage, at in zip(self.stages[first : first + length], self.host[first : first + length], strict=True)
                for _ in stage
            )
            for first in range(0, len(self.stages), length)
        )

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """pp coordinates that host each segment, ascending: one, or two with two copies."""
        return places_of(self.chains)

    def at(self, segment: int, microbatch: int) -> int:
        """pp coordinate that computes a segment for a microbatch."""
        return self.chains[microbatch * self.copies // self.microbatches][segment]

    def __str__(self) -> str:
        """Every rank's list, a stage's run over neighbouring segments written as one: F0-4.1."""
        lines = [f"{self.name}: {len(self.stages)} stages on {len(self.ranks)} ranks, {self.microbatches} microbatches"]
        for at, actions in enumerate(self.ranks):
            segments = sorted({k for stage, where in zip(self.stages, self.host, strict=True) if where == at for k in stage})
            lines.append(f"pp {at} (segments {', '.join(_ranges(segments))}):")
            lines.extend(_wrapped(_runs(actions), width=118))
        return "\n".join(lines)


def places_of(chains: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(set(hosts))) for hosts in zip(*chains, strict=True))


def _runs(actions: Sequence[Action]) -> Iterator[str]:
    """Names of the actions, neighbouring segments of one kind and microbatch joined."""
    start = 0
    for end in range(1, len(actions) + 1):
        if end < len(actions) and _continues(actions[end - 1], actions[end]):
            continue
        first, last = actions[start], actions[end - 1]
        dot = "" if first.microbatch is None else f".{first.microbatch}"
        yield str(first) if first is last else f"{first.kind}{first.segment}-{last.segment}{dot}"
        start = end


def _continues(a: Action, b: Action) -> bool:
    if a.kind != b.kind or a.microbatch != b.microbatch or a.segment is None or b.segment is None:
        return False
    return b.segment - a.segment == (1 if a.kind in ("F", "GATHER") else -1)


def _ranges(numbers: Sequence[int]) -> list[str]:
    starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1), len(numbers)]
    spans = [(numbers[i], numbers[j - 1]) for i, j in pairwise(starts) if j > i]
    return [str(a) if a == b else f"{a}-{b}" for a, b in spans]


def _wrapped(words: Iterator[str], width: int) -> Iterator[str]:
    line = ""
    for word in words:
        if line and len(line) + 2 + len(word) > width:
            yield "  " + line
            line = ""
        line = f"{line}  {word}" if line else word
    if line:
        yield "  " + line
