"""Local ranks: starts one process per rank through torch elastic and says which of them ended a run, and how.

A process that dies ends the run within seconds; a run that is told to stop has time to write a checkpoint. Under torchrun, Slurm
or MPI nothing is started: the launcher already did.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.train.logs import Streams, copied, header

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import SubprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of a rank that was told to stop, wrote what it had to, and ended: 143 and 130."""
ORPHANED_SECONDS = 10.0
"""Time to end for ranks of which one has died. Their transport tells them within a second or two; some are in code of others."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those that torch elastic handles, and leaves handled."""


class RankFailure(RuntimeError):
    """A rank ended the run.

    exit_code     what the command that started it should return
    rank, signal  the rank that failed first, and what ended it if that was a signal
    """

    def __init__(self, message: str, exit_code: int, *, rank: int | None = None, signal: int | None = None) -> None:
        super().__init__(message)
        self.exit_code, self.rank, self.signal = exit_code, rank, signal

    @property
    def is_final(self) -> bool:
        """Whether starting again would end the same way: the rank refused what it was asked (exit code 2), or a number of the
        training was not finite (3)."""
        return self.exit_code in (2, 3)


class Stopped(RankFailure):
    """The ranks were told to stop, and stopped: not a crash, and not to be started again. `exit_code` is 128 + the signal."""


def launch(
    ranks: int,
    command: Sequence[str],
    *,
    logs: Path | None = None,
    grace_seconds: float = 120.0,
    attempt: int = 0,
) -> None:
    """Run `command` as `ranks` processes on this machine and wait for all of them. Nothing is started again.

    logs           a folder for rank_0.txt and so on, which get what each rank prints as well; what is there stays
    grace_seconds  what ranks have to end by themselves, once this process gets SIGTERM or SIGINT and has passed it on to them;
                   a second signal ends them at once
    attempt        how often these ranks have been started before; they see it as the TORCHELASTIC_RESTART_COUNT of torchrun

    Raises Stopped if the ranks were told to stop, by this process or each by itself (exit codes 143 and 130). The first one that
    fails otherwise ends the others, within ORPHANED_SECONDS, and raises RankFailure naming it. On Linux the ranks also end if this
    process is killed.
    """
    # Imported here so that a command that only reads this file for its error type does not wait for torch.
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import SignalException

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    env = _environment(ranks, store.port, attempt)
    with ExitStack() as stack:
        stack.enter_context(_quiet_elastic())
        streams = None if logs is None else stack.enter_context(copied(logs, ranks, header(attempt)))
        stack.enter_context(_signals_restored())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx_launch_")))
        processes = _processes(ranks, command, env, folder, streams, grace_seconds)
        told: signal.Signals | None = None
        try:
            processes.start()
            result = processes.wait(period=0.1)
        except SignalException as first:
            told = signal.Signals(first.sigval)
            print(  # noqa: T201 - what a person who presses Ctrl-C waits for
                f"phalanx: {told.name}: the {ranks} ranks have up to {grace_seconds:g} s to end by themselves; once more ends them now",
                file=sys.stderr,
            )
            try:
                processes.close(told)
            except SignalException:
                processes.close(signal.SIGKILL)
            # Nothing there: it was told so early that no process is known yet, and the leash ends what there may be.
            result = processes.wait(period=0.1) if processes.subprocess_handlers else None
    failures = result.failures if result is not None else {}
    if told is not None:
        raise _stopped(failures, ranks, told)
    if failures:
        raise _failure(failures, ranks)


def _processes(
    ranks: int, command: Sequence[str], env: Mapping[str, str], folder: Path, streams: Streams | None, grace_seconds: float
) -> SubprocessContext:
    """The ranks as torch elastic's processes, not yet started; `folder` is for what they tell of their errors.

    torchrun's own agent would give the survivors of a dead rank and the ranks of a stopped run the same 30 s, and not say how
    those of a stopped run ended.
    """
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext
    from torch.distributed.launcher.api import LaunchConfig

    class Logs(LogsSpecs):
        root_log_dir = str(folder)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            terminal = dict.fromkeys(envs, "")
            errors = {rank: each["TORCHELASTIC_ERROR_FILE"] for rank, each in envs.items()}
            return LogsDest(streams.out if streams else terminal, streams.err if streams else terminal, {}, {}, errors)

    class Processes(SubprocessContext):
        def close(self, death_sig: signal.Signals | None = None, timeout: float = 0.0) -> None:
            """Elastic calls this as soon as one rank has ended badly; we do for a signal. The time is neither's to choose: ranks
            have the long one unless one of them has already ended as none does that was told to."""
            codes = {handler.proc.returncode for handler in self.subprocess_handlers.values()} - {None, 0, *STOPPED}
            super().close(death_sig, math.ceil(ORPHANED_SECONDS if codes else grace_seconds))

    logs = Logs()
    leash = Path(__file__).with_name("leash.py")
    args = ("-I", "-S", str(leash), str(os.getpid()), *command)
    return Processes(
        name="rank",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(ranks), args),
        envs={
            rank: {**env, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "TORCHELASTIC_ERROR_FILE": str(folder / f"{rank}.json")}
            for rank in range(ranks)
        },
        logs_specs=logs,
        # What torchrun does on a machine whose GPUs are one for each rank.
        numa_options=LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=ranks, logs_specs=logs).numa_options,
    )


def _environment(ranks: int, port: int, attempt: int) -> dict[str, str]:
    """What torchrun says to every rank, with a store of this process's at `port` as the place to meet."""
    said = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        # Ranks with a thread per core stall one another. torchrun gives each one thread; here they share out the cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // ranks)),
    }
    return {name: str(value) for name, value in said.items()}


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Elastic's account of a failure is a page long and names no signal; RankFailure says the same in a line."""
    ours = "torch.distributed.elastic"  # each of its modules has a level of its own
    logs = [logging.getLogger(name) for name in (ours, *logging.root.manager.loggerDict) if name.startswith(ours)]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Afterwards signals mean what they meant: elastic's handlers raise an error of its own wherever we are."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


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
    # At once: the launcher may end this rank while it writes, and reads what there is.
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        json.dump({"message": message}, file)
    os.replace(temporary, path)


def _stopped(failures: Mapping[int, ProcessFailure], ranks: int, told: signal.Signals) -> RankFailure:
    """How a run ended that this process was told to stop. What a rank wrote down of its end is a failure all the same.

    Without handlers of their own the ranks die of the signal, or of a peer that did.
    """
    wrong = {rank: failure for rank, failure in failures.items() if "py_callstack" in _extra(failure)}
    wrong = {rank: failure for rank, failure in wrong.items() if not _extra(failure).get("lost_a_peer")}
    if wrong:
        return _failure(wrong, ranks)
    killed = sorted(rank for rank, failure in failures.items() if failure.exitcode == -signal.SIGKILL)
    how = f"its {ranks} ranks were ended"
    if all(failure.exitcode in STOPPED for failure in failures.values()):
        how = f"its {ranks} ranks ended by themselves"
    elif killed:
        how = f"of its {ranks} ranks {', '.join(map(str, killed))} did not end in time and had to be killed"
    what = "interrupted" if told == signal.SIGINT else f"the launcher was stopped by {told.name}"
    return Stopped(f"{what}; {how}", 128 + told, signal=told)


def _failure(failures: Mapping[int, ProcessFailure], ranks: int) -> RankFailure:
    """The rank that failed first. Those that merely lost their peer, or that the launcher ended, failed because of it."""
    rank = min(failures, key=lambda rank: _order(failures[rank]))
    failure = failures[rank]
    if failure.exitcode in STOPPED:
        number = failure.exitcode - 128
        message = f"rank {rank} of {ranks} was told to stop by {signal.Signals(number).name}, and the others followed"
        return Stopped(message, failure.exitcode, rank=rank, signal=number)
    if failure.exitcode < 0:
        number = -failure.exitcode
        message = f"rank {rank} of {ranks} (process {failure.pid}) was ended by {failure.signal_name()} (signal {number})"
        if number == signal.SIGKILL:
            message += "; if nobody sent it, the machine probably ran out of memory"
        return RankFailure(message, 128 + number, rank=rank, signal=number)
    extra = _extra(failure)
    if "py_callstack" in extra:
        return RankFailure(f"rank {rank} of {ranks}: {extra['py_callstack'].rstrip()}", failure.exitcode, rank=rank)
    message = f"rank {rank} of {ranks} (process {failure.pid}) ended with exit code {failure.exitcode}"
    return RankFailure(message, failure.exitcode, rank=rank)


def _order(failure: ProcessFailure) -> tuple[int, int]:
    if failure.exitcode == -signal.SIGTERM:
        return 4, 0  # most likely ended by the launcher, after the cause
    if failure.exitcode in STOPPED:
        return 3, 0  # told to stop: no cause of what went wrong
    if failure.exitcode < 0:
        return 0, 0
    extra = _extra(failure)
    return (2 if extra.get("lost_a_peer") else 1), int(extra.get("time_ns", failure.timestamp * 10**9))


def _extra(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    return message["extraInfo"] if isinstance(message, dict) else {}
