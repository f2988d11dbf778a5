"""When a wait is too long: one daemon thread per process that sleeps, looks, and in the normal case sleeps again.

It speaks only when an operation has been waited for longer than `patience`. Then every rank is asked where it is, the views are
judged, and a verdict is printed once. A fatal one also disconnects the groups, so that whoever waits gets it as an exception.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.comm.watch import ring as rings
from phalanx.comm.watch.collect import Collector
from phalanx.comm.watch.finding import Verdict
from phalanx.comm.watch.sites import stack
from phalanx.comm.watch.snapshot import RankView
from phalanx.comm.watch.source import read_lines
from phalanx.comm.watch.verdict import verdict

EXPLAIN_SECONDS = 10.0
"""The longest that a failed operation is looked into: twice as long as a monitor may sleep before it answers for another host."""


def tell(text: str) -> None:
    """To standard error, in one write, so that ranks do not mix their lines."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to watch.

    patience  seconds that a wait may take before the ranks are asked; nothing is exchanged before
    run_dir   where the rings go and stay; None: a folder for temporary files, removed if the run ends well
    host      what tells hosts apart; None: boot and process namespace
    say       who gets the verdicts
    """

    patience: float = 5.0
    run_dir: Path | None = None
    host: str | None = None
    say: Callable[[str], None] = tell


def options_from(env: Mapping[str, str], otherwise: Options) -> Options:
    """`otherwise`, with what the person who starts a script says in PHALANX_RUN_DIR and PHALANX_PATIENCE."""
    folder, patience = env.get("PHALANX_RUN_DIR"), env.get("PHALANX_PATIENCE")
    if folder:
        otherwise = replace(otherwise, run_dir=Path(folder).resolve())
    if patience:
        try:
            otherwise = replace(otherwise, patience=float(patience))
        except ValueError:
            raise ValueError(f"PHALANX_PATIENCE={patience!r}; expected a number of seconds") from None
    return otherwise


class Monitor:
    """Judges on behalf of one rank. `disconnect` ends all communication of this process."""

    def __init__(
        self, collector: Collector, options: Options, disconnect: Callable[[], None], sweep: Callable[[], None]
    ) -> None:
        self.final: Verdict | None = None
        self._collector, self._options = collector, options
        self._disconnect, self._sweep = disconnect, sweep
        self._ring = collector.ring
        self._main = threading.main_thread().ident or 0
        self._interval = min(max(options.patience / 2, 0.02), 5.0)
        self._late = 0
        self._before: dict[int, RankView] = {}
        self._told: set[tuple[object, ...]] = set()
        self._suspected: tuple[object, ...] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self.look()
            except RuntimeError as error:  # the store is gone, and with it the rank that held it
                if self.final is None and self._late:
                    self._options.say(
                        f"[rank {self._ring.identity.rank}] the store at which ranks meet does not answer: {error}"
                    )
                return

    def look(self) -> None:
        """One look: answer who asks, and judge if this rank has waited too long."""
        self._sweep()
        if self._collector.asked():
            self.say_where()
        self._collector.answer_other_hosts()
        waited = self._ring.waited_since()
        if waited is None or time.monotonic_ns() - waited < self._options.patience * 1e9 or self.final is not None:
            self._late, self._before = 0, {}
            return
        self._late += 1
        if self._late == 1:
            self._collector.ask()
            self.say_where()
            self._before = self._collector.views()
            return
        views = self._collector.views()
        found = verdict(views, before=self._before, lines=read_lines, patience=self._options.patience)
        if found is not None:
            self._consider(found)
        if self._late % 4 == 0:  # whoever makes progress is asked again, and compared with where it was
            self._collector.ask()
            self._before = views

    def say_where(self) -> None:
        """Write the main thread's stack into the ring."""
        frames = stack(self._main)
        self._ring.write_area("stack", "\n".join(frames))
        self._ring.set_word(rings.ANSWERED, time.monotonic_ns())

    def _consider(self, found: Verdict) -> None:
        """Tell it once. What ends a run, or calls a rank gone, is believed when a second look confirms it.

        Views are not taken at one moment, and another host may answer only just after it was looked at.
        """
        if (found.fatal or found.kind == "died") and found.name != self._suspected:
            self._suspected = found.name
            return
        if found.fatal:
            self.conclude(found)
        else:
            self._say(found)

    def conclude(self, found: Verdict) -> Verdict:
        """This is what ends the run: tell it, keep it where `phalanx doctor run` finds it, and disconnect. The first one counts."""
        with self._lock:
            if self.final is not None:
                return self.final
            self.final = found
        self._ring.write_area("verdict", found.text)
        self._say(found)
        self._disconnect()
        return found

    def judge_now(self) -> Verdict | None:
        """The fatal verdict that the views give at this moment, concluded; None if they give none."""
        found = verdict(self._collector.views(), lines=read_lines)
        return self.conclude(found) if found is not None and found.fatal else self.final

    def explain(self, error: BaseException) -> Verdict | None:
        """Why an operation of this rank has just failed; None if the views do not say.

        Others may still be on their way out, so it looks more than once. Who has not come by the time-out, or at the end of that,
        has not come.
        """
        last = found = None
        out_of_time = "timed out" in str(error).lower()
        until = time.monotonic() + min(max(1.0, 2 * self._options.patience), EXPLAIN_SECONDS)
        asked = False
        while self.final is None and time.monotonic() < until:
            try:
                if not asked:
                    self._collector.ask()
                    asked = True
                views = self._collector.views()
            except RuntimeError:
                break
            found = verdict(views, lines=read_lines)
            if found is not None and found.fatal:
                if last == (found.kind, found.at) or found.kind in (
                    "died",
                    "op",
                    "size",
                    "dtype",
                    "reduction",
                    "root",
                    "branch",
                ):
                    return self.conclude(found)
                last = (found.kind, found.at)
            elif found is not None and out_of_time:
                return self.conclude(found)
            told = [(rank, view) for rank, view in sorted(views.items()) if view.verdict and rank != self._ring.identity.rank]
            if told and found is None:
                return self.conclude(Verdict("told", told[0][1].verdict))
            time.sleep(0.05)
        return self.conclude(found) if found is not None else self.final

    def _say(self, found: Verdict) -> None:
        if found.name in self._told:
            return
        self._told.add(found.name)
        self._options.say(f"[rank {self._ring.identity.rank}] {found}\n    phalanx doctor run {self._collector.folder}")
