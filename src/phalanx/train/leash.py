"""Started in the place of a rank, and becomes it: `python leash.py LAUNCHER_PID COMMAND...`.

Before that it asks Linux to end the rank when the launcher ends, however that happens: a launcher that is killed cannot end its
ranks itself. Elsewhere than on Linux nobody can be asked. Imports nothing but the standard library, so that it costs no time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2). What it sets outlives execv, and is about the thread that started this process."""


def main() -> None:
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            error = ctypes.get_errno()
            raise OSError(error, f"prctl: {os.strerror(error)}")
        if os.getppid() != launcher:  # it ended before it could be asked
            sys.exit(f"the launcher, process {launcher}, is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
