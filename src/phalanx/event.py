"""What happened, where and when: the record that real runs and simulations both emit. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One action or collective on one lane of one rank. Times in seconds on that rank's monotonic clock."""

    rank: int
    lane: str
    name: str
    start: float
    end: float
    axis: str | None = None
    bytes: int = 0
    """Payload of the call on this rank: the larger of local input and output."""
    segment: str | None = None
    microbatch: int | None = None
    source: str | None = None
    """The user's source line that the work comes from, as `file:line`."""
