"""In what order each rank does what: schedules made, proved, timed and drawn.

A Schedule is data; this room makes it from a View of the Program and never runs it.
"""

from __future__ import annotations

from phalanx.schedule.actions import COMPUTE, Action, Schedule, Storage
from phalanx.schedule.lower import build
from phalanx.schedule.view import View, from_program

__all__ = ["COMPUTE", "Action", "Schedule", "Storage", "View", "build", "from_program"]
