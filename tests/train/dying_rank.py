"""`phalanx` whose ranks get signals where a test says: `python dying_rank.py PLAN ARGS...`, in the place of `phalanx ARGS...`.

PLAN is a JSON file: {"told": a file, "blows": [Blow...]}. Each blow is written to that file as it falls, so that a test knows that it
did. The library has no hook for this: the process patches itself.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Blow:
    """A signal that a rank sends, to itself or to its launcher, at a call of a function.

    start   how often the ranks have been started before
    at      module:function that the rank calls; "" before anything is imported
    call    at which call of it, counted from 1, among those with `word` in an argument
    after   the call has returned, or it is about to be made
    delay   seconds from there, for moments that nobody chose
    """

    phase: str
    start: int = 0
    rank: int = 0
    at: str = ""
    call: int = 1
    word: str = ""
    after: bool = False
    delay: float = 0.0
    number: int = 9
    launcher: bool = False


def write_plan(path: Path, told: Path, blows: list[Blow]) -> Path:
    path.write_text(json.dumps({"told": str(told), "blows": [asdict(blow) for blow in blows]}))
    return path


def fall(blow: Blow, told: str) -> None:
    line = f"{json.dumps({'phase': blow.phase, 'start': blow.start, 'rank': blow.rank, 'pid': os.getpid()})}\n"
    file = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)
    os.kill(os.getppid() if blow.launcher else os.getpid(), blow.number)


def arm(blow: Blow, told: str) -> None:
    """Put the blow around the function, wherever it is called from: an attribute of a class or of a module."""
    module, _, path = blow.at.partition(":")
    *outer, name = path.split(".")
    owner = reduce(getattr, outer, importlib.import_module(module))
    original: Callable[..., Any] = getattr(owner, name)
    lock, calls = threading.Lock(), 0

    def now() -> None:
        if blow.delay:
            threading.Timer(blow.delay, fall, (blow, told)).start()
        else:
            fall(blow, told)

    def patched(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        with lock:
            counts = any(blow.word in str(x) for x in (owner, *args) if not blow.word or isinstance(x, str | os.PathLike))
            calls += counts
            is_it = counts and calls == blow.call
        if is_it and not blow.after:
            now()
        result = original(*args, **keywords)
        if is_it and blow.after:
            now()
        return result

    setattr(owner, name, patched)


def main(plan: Path, args: list[str], environment: Mapping[str, str]) -> int:
    content = json.loads(plan.read_text())
    told = content["told"]
    blows = [Blow(**blow) for blow in content["blows"]]
    if "RANK" in environment:
        place = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)), int(environment["RANK"])
        mine = [blow for blow in blows if (blow.start, blow.rank) == place]
        for blow in mine:
            if not blow.at:
                fall(blow, told)
        for blow in mine:
            if blow.at:
                arm(blow, told)
    else:
        import phalanx.train.launch

        phalanx.train.launch.rank_command = lambda args: [sys.executable, "-P", "-u", __file__, str(plan), *args]
    from phalanx.cli import main

    return main(args)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:], os.environ))
