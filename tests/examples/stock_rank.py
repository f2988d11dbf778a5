"""One rank of a stock script, in a process that has torch already. Started by test_mistakes.py with JOB set."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile


def _main(command: list[str], environment: dict[str, str], source: str) -> None:
    os.environ.update(environment)
    sys.path.insert(0, source)
    sys.argv = command
    tempfile.tempdir = environment["PHALANX_RUN_DIR"]
    os.makedirs(tempfile.tempdir, exist_ok=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the ranks say is in the rings too
    runpy.run_path(command[0], run_name="__main__")


if "JOB" in globals():
    _main(*globals()["JOB"])
