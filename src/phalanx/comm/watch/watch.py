"""The watch of one process: its ring, its monitor and the groups that it watches.

Made with the first watched group, over once the last one is destroyed. All ranks of a job agree on a name through the store.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.comm.watch import ring as rings
from phalanx.comm.watch.board import Board
from phalanx.comm.watch.collect import FLIGHT, Collector, host_identity, local_views, ring_path
from phalanx.comm.watch.finding import Verdict
from phalanx.comm.watch.leftovers import leftovers
from phalanx.comm.watch.monitor import Monitor, Options
from phalanx.comm.watch.ring import Ring, group_text
from phalanx.comm.watch.sites import Sites


class Watch:
    """What all watched groups of this process share. `store` reaches every rank of the job."""

    def __init__(self, store: Any, rank: int, world_size: int, options: Options) -> None:
        # A store may outlive a job (elastic restarts, destroy and init again): every turn has a name of its own.
        turn = store.add(f"phalanx/watch/turn/{rank}", 1)
        name = secrets.token_hex(8)
        self.job: str = store.compare_set(f"phalanx/watch/job/{turn}", "", name).decode()
        scratch = Path(tempfile.gettempdir()) / f"phalanx-{self.job}"
        self.folder = self._home(rank, options, scratch)
        self.options = options
        host = options.host or host_identity()
        self._boards = scratch / f"boards-{host}"
        self.ring = Ring(ring_path(self.folder, rank), self.job, rank, world_size, host)
        self.sites = Sites(lambda text: self.ring.text(rings.SITE, text))
        self.rank = rank
        self.is_open = True
        self._groups: dict[str, weakref.ref[Any]] = {}
        self._names: dict[str, int] = {}
        self._outstanding: list[tuple[int, Any]] = []
        collector = Collector(self.folder, self.ring, dist.distributed_c10d.PrefixStore(f"phalanx/watch/{self.job}", store))
        self.monitor = Monitor(collector, options, self.disconnect, self.sweep)
        self._pid = os.getpid()
        atexit.register(self._interpreter_ends)

    @staticmethod
    def _home(rank: int, options: Options, scratch: Path) -> Path:
        """Where the rings go. The folder of the run may not exist on every host; a run does not fail for want of a watch."""
        if options.run_dir is not None:
            try:
                (options.run_dir / FLIGHT).mkdir(parents=True, exist_ok=True)
                return options.run_dir
            except OSError as error:
                options.say(f"[rank {rank}] no flight rings in {options.run_dir} ({error.strerror}); they go to {scratch}")
        (scratch / FLIGHT).mkdir(parents=True, exist_ok=True)
        return scratch

    def open(self, name: str, axis: str, ranks: Sequence[int], device: str) -> tuple[int, str]:
        """Begin to watch a group: its id in the ring, and its name there, which is new even if the group's is not."""
        again = self._names[name] = self._names.get(name, 0) + 1
        unique = name if again == 1 else f"{name}#{again}"
        return self.ring.text(rings.GROUP, group_text(unique, axis, ranks, device)), unique

    def board(self, name: str, size: int, rank: int) -> Board:
        self._boards.mkdir(parents=True, exist_ok=True)
        return Board(self._boards / "".join(c if c.isalnum() else "-" for c in name), size, rank)

    def join(self, name: str, group: Any) -> None:
        self._groups[name] = weakref.ref(group)

    def expect(self, number: int, work: Any) -> None:
        """Look from time to time whether this has completed: nobody may ever say so."""
        self._outstanding.append((number, work))

    def sweep(self) -> None:
        """Write down which of the expected operations have completed."""
        expected, self._outstanding = self._outstanding, []
        for number, ref in expected:
            work = ref()
            if work is not None and not work.over():
                self._outstanding.append((number, ref))

    def disconnect(self) -> None:
        """Drop the connections of all watched groups, so that whoever waits in them stops waiting."""
        for ref in list(self._groups.values()):
            if (group := ref()) is not None:
                with suppress(RuntimeError):  # a communicator that is already broken has nothing left to drop
                    group.disconnect()

    def leave(self, name: str) -> bool:
        """A group is destroyed. True if it was the last: then the watch is over."""
        self._groups.pop(name, None)
        if self._groups:
            return False
        self.close()
        return True

    def close(self) -> None:
        """The end of a run that ended well, or at least by itself."""
        self.is_open = False
        self.monitor.stop()
        self.sweep()
        if self.ring.word(rings.STATE) == rings.RUNNING:
            self.ring.set_word(rings.STATE, rings.CLOSED)
        atexit.unregister(self._interpreter_ends)
        rest: list[Verdict] = []
        if self.monitor.final is None:
            rest = self._leftovers()
            for found in rest:
                self.options.say(f"[rank {self.rank}] {found}\n    phalanx doctor run {self.folder}")
        self._tidy(keep=bool(rest))

    def _leftovers(self) -> list[Verdict]:
        """Those that are this rank's to tell: what it never waited for, and what was sent to it in vain."""
        views = {view.rank: view for view in local_views(self.folder, self.job, self.ring.identity.host)}
        return [found for found in leftovers(views) if found.culprits[-1] == self.rank]

    def _tidy(self, keep: bool) -> None:
        """The last rank of this host removes what the user did not ask for; boards always, rings only if all is well."""
        views = list(local_views(self.folder, self.job, self.ring.identity.host))
        if any(view.life == "running" for view in views):
            return
        shutil.rmtree(self._boards, ignore_errors=True)
        if (
            self.folder != self.options.run_dir
            and not keep
            and all(view.life == "closed" and not view.verdict for view in views)
        ):
            for view in views:
                ring_path(self.folder, view.rank).unlink(missing_ok=True)
        for folder in (self.folder / FLIGHT, self._boards.parent):
            with suppress(OSError):  # not empty: rings that stay, or another host's
                folder.rmdir()

    def _interpreter_ends(self) -> None:
        """The script is over without destroy_process_group: say with what, so that nobody calls it dead."""
        if os.getpid() != self._pid:
            return  # a forked child has the same memory mapped
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.ring.write_area("reason", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300])
        self.ring.set_word(rings.STATE, rings.ENDED_STATE)
        self.monitor.stop()
        self._tidy(keep=True)
