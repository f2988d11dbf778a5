"""Local ranks: starts one process per rank through torch elastic and says which of them ended a run, and how.

There is no engine of our own here. Under torchrun, Slurm or MPI nothing is started: the launcher already did.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


class RankFailure(RuntimeError):
    """A rank ended the run. `exit_code` is what the command that started it should return."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launch(ranks: int, command: Sequence[str]) -> None:
    """Run `command` as `ranks` processes on this machine and wait for all of them.

    The first one that fails ends the others; raises RankFailure naming it. Nothing is restarted: a rank that comes back alone
    would find its world gone. On Linux the ranks also end if this process is killed.
    """
    # Imported here so that a command that only reads this file for its error type does not wait for torch.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Ranks with a thread per core stall one another. torchrun gives each one thread; here they share out the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # Elastic's account of a failure is a page long and names no signal; RankFailure says the same in a line. Each of its modules
    # has a level of its own.
    ours = "torch.distributed.elastic"
    logs = [logging.getLogger(name) for name in (ours, *logging.root.manager.loggerDict) if name.startswith(ours)]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix="phalanx_launch_") as log_dir:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=ranks,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                rdzv_configs={"timeout": 60},
                local_addr="localhost",
                max_restarts=0,
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=log_dir),
            )
            leash = Path(__file__).with_name("leash.py")
            elastic_launch(config, sys.executable)("-I", "-S", str(leash), str(os.getpid()), *command)
    except ChildFailedError as error:
        raise _failure(error.failures, ranks) from None
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        how = "interrupted" if error.sigval == signal.SIGINT else f"the launcher was stopped by {name}"
        raise RankFailure(f"{how}; its {ranks} ranks were ended", 128 + error.sigval) from None
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def rank_command(args: Sequence[str]) -> list[str]:
    """The command line of one rank of `phalanx ARGS`.

    -P, or a file of the user's in the current folder, a cuda.py say, would be taken for a module of torch's.
    """
    return [sys.executable, "-P", "-u", "-m", "phalanx", *args]


def write_failure(path: str, error: BaseException, *, with_traceback: bool, lost_a_peer: bool) -> None:
    """Leave an exception for the launcher, in the form that torch elastic reads.

    What it lacks is added: a time finer than whole seconds, and whether the rank only failed because another one was gone.
    """
    text = (
        "".join(traceback.format_exception(error))
        if with_traceback
        else "\n".join([str(error), *getattr(error, "__notes__", ())])
    )
    extra = {"py_callstack": text, "timestamp": str(int(time.time())), "time_ns": time.time_ns(), "lost_a_peer": lost_a_peer}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with open(path, "w") as file:
        json.dump({"message": message}, file)


def _failure(failures: Mapping[int, ProcessFailure], ranks: int) -> RankFailure:
    """The rank that failed first. Those that merely lost their peer, or that the launcher ended, failed because of it."""
    rank = min(failures, key=lambda rank: _order(failures[rank]))
    failure = failures[rank]
    if failure.exitcode < 0:
        number = -failure.exitcode
        message = f"rank {rank} of {ranks} (process {failure.pid}) was ended by {failure.signal_name()} (signal {number})"
        if number == signal.SIGKILL:
            message += "; if nobody sent it, the machine probably ran out of memory"
        return RankFailure(message, 128 + number)
    extra = _extra(failure)
    if "py_callstack" in extra:
        return RankFailure(f"rank {rank} of {ranks}: {extra['py_callstack'].rstrip()}", failure.exitcode)
    return RankFailure(
        f"rank {rank} of {ranks} (process {failure.pid}) ended with exit code {failure.exitcode}", failure.exitcode
    )


def _order(failure: ProcessFailure) -> tuple[int, int]:
    if failure.exitcode == -signal.SIGTERM:
        return 3, 0  # most likely ended by the launcher, after the cause
    if failure.exitcode < 0:
        return 0, 0
    extra = _extra(failure)
    return (2 if extra.get("lost_a_peer") else 1), int(extra.get("time_ns", failure.timestamp * 10**9))


def _extra(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    return message["extraInfo"] if isinstance(message, dict) else {}
