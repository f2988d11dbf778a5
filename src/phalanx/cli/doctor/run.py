"""`phalanx doctor run`: reads the flight rings that a run left behind, or is writing, and says who stood where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from phalanx.comm.watch.collect import FLIGHT, host_identity, with_life
from phalanx.comm.watch.finding import Verdict, history
from phalanx.comm.watch.leftovers import leftovers
from phalanx.comm.watch.snapshot import RankView, parse
from phalanx.comm.watch.source import read_lines
from phalanx.comm.watch.verdict import verdict

WRONG = 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say why a run of watched process groups hung or failed: one line of verdict, then every rank."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The run's folder, with the rings in its `flight` folder."""
    last: int = 5
    """How many of its last operations to show for each rank that is to blame."""


def main(args: list[str]) -> int:
    """Exit code 0 if the rings show nothing wrong, 1 if there is a verdict."""
    options = tyro.cli(Options, args=args, prog="phalanx doctor run")
    views = read(options.run_dir)
    found = judge(views)
    rest = leftovers(views)
    print(found.text if found is not None else "nothing is wrong with what the ranks recorded")
    for line in found.details if found is not None else ():
        if not line.startswith((" ", "rank ")):
            print(f"    {line}")
    for other in rest:
        print(other.text)
    print()
    for _, view in sorted(views.items()):
        print(row(view))
    for rank in found.culprits if found is not None else ():
        if rank in views:
            print("\n" + "\n".join(history(views[rank], options.last)))
    return WRONG if found is not None or rest else 0


def read(folder: Path) -> dict[int, RankView]:
    """The rings of the job in `folder` that started last."""
    paths = sorted((folder / FLIGHT).glob("rank*.ring")) or sorted(folder.glob("rank*.ring"))
    if not paths:
        raise FileNotFoundError(
            f"no flight rings (rank*.ring) in {folder / FLIGHT}; run with a `watched:` backend and this run_dir"
        )
    views = [parse(path.read_bytes()) for path in paths]
    latest = max(views, key=lambda view: view.started_unix).job
    here = host_identity()
    return {
        view.rank: with_life(view)
        if view.host == here
        else replace(view, life="silent" if view.life == "running" else view.life)
        for view in views
        if view.job == latest
    }


def judge(views: dict[int, RankView]) -> Verdict | None:
    """What the run said at the time, when it could still ask the ranks; else what the rings give now."""
    found = verdict(views, lines=read_lines)
    told = next((view.verdict for _, view in sorted(views.items()) if view.verdict), None)
    if told is None:
        return found
    return replace(found, text=told) if found is not None else Verdict("told", told)


def row(view: RankView) -> str:
    """One rank in one line: how it is, how much it did, and where it was last."""
    lives = {"running": "runs", "died": "died", "ended": "ended", "closed": "closed", "silent": "unknown"}
    reason = view.reason if len(view.reason) < 80 else view.reason[:76] + " ..."
    how = lives[view.life] + (f" ({reason})" if reason else "")
    last = (
        f"last {view.ops[-1].op} {view.ops[-1].seq} of group {view.ops[-1].group!r} at {view.ops[-1].site}" if view.ops else ""
    )
    return f"rank {view.rank:<4} {view.host_name} pid {view.pid}  {how}; {len(view.ops)} operations recorded, {last}"
