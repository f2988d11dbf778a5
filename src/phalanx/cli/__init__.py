"""The `phalanx` command: finds the sub-command, runs it, and turns what went wrong into one message and an exit code.

A command is a file of this folder with `main(args) -> int`. Nothing heavy is imported before a command is chosen.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

COMMANDS = {
    "train": "Train a model on a mesh; starts the local ranks itself.",
    "verify": "Compare a model on a mesh with the same model in one plain PyTorch process.",
    "data": "Pack text into the token folders that training reads.",
    "explain": "Say what every rank computes, exchanges and keeps, before any run.",
    "schedule": "Draw a pipeline schedule and say what it costs, or show a step that was recorded.",
    "export": "Write a checkpoint as the folder of a Hugging Face model.",
    "run": "Run your own script on several local ranks.",
    "launch": "Print a recipe for a run under Slurm, torchrun, mpirun or Kubernetes.",
    "runs": "List runs, compare them, or draw their losses.",
    "show": "Show a collective on small tensors: before, after, and who sent what to whom.",
    "bench": "Measure: collectives, or this machine's hardware.",
    "doctor": "Find what is wrong: topology, slow links, or a run that hung.",
}

# What a person can put right by asking for something else; any other exception is ours and shows its traceback.
MISTAKES = (ValueError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
USER_ERROR = 2
FAILURE = 1
NOT_FINITE = 3
"""A loss or gradient, or a loss that is far above those before it: to start again would lead there again."""
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. 2 is a mistake in what was asked, 3 a training whose numbers
    went wrong, 1 anything else that did."""
    args = list(sys.argv[1:] if argv is None else argv)
    # Everything behind a script's name is the script's own.
    with_traceback = "--traceback" in args and (args[:1] != ["run"] or "--traceback" in args[:2])
    if with_traceback:
        args.remove("--traceback")
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0
    if args[0] == "--version":
        from phalanx import __version__

        print(__version__)
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(COMMANDS)}"
        print(f"phalanx: there is no command {name!r}{hint}", file=sys.stderr)
        return USER_ERROR
    command = find_command(f"phalanx.cli.{name}")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(show_warning, warnings.showwarning)
            return command(rest)
    except KeyboardInterrupt:
        # The launcher of local ranks says it once for all of them.
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            print("phalanx: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads our output any more, as in `phalanx train --help | head`. Python flushes once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever it is, it is told
        return report(error, with_traceback)


def find_command(module: str) -> Callable[[list[str]], int]:
    """The `main` of a command's file."""
    command: Callable[[list[str]], int] = importlib.import_module(module).main
    return command


def choose(command: str, choices: dict[str, str], args: list[str]) -> int:
    """Run the sub-command that `args` begins with: a file of the folder of that name, with a `main` of its own."""
    if not args or args[0] in ("-h", "--help"):
        print(usage(f"phalanx {command}", choices))
        return 0
    if args[0] not in choices:
        close = difflib.get_close_matches(args[0], choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(choices)}"
        raise ValueError(f"{command} has no command {args[0]!r}{hint}")
    return find_command(f"phalanx.cli.{command}.{args[0]}")(args[1:])


def show_warning(
    otherwise: Callable[..., None], message: Warning | str, category: type[Warning], filename: str, *place: Any, **options: Any
) -> None:
    """A warning without the Python line that gave it, which nobody at a command line wrote; those of libraries as ever."""
    if category is UserWarning and not Path(filename).is_file():
        print(f"phalanx: warning: {message}", file=sys.stderr)
    else:
        otherwise(message, category, filename, *place, **options)


def usage(program: str = "phalanx", commands: dict[str, str] = COMMANDS) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {what}" for name, what in commands.items()]
    return "\n".join(
        [
            f"usage: {program} COMMAND [options]",
            "",
            *lines,
            "",
            f"{program} COMMAND --help lists the options of a command. --traceback shows where an error came from.",
        ]
    )


def report(error: Exception, with_traceback: bool) -> int:
    """Tell the person, once, what went wrong; returns the exit code.

    A rank under torch elastic writes to the error file that its launcher reads, so that one mistake on four ranks is told once.
    """
    from phalanx.train.launch import RankFailure, write_failure

    ours = not isinstance(error, (*MISTAKES, FloatingPointError, RankFailure, *of("run.replicas", "ReplicaError")))
    lost_a_peer = False
    if ours:
        from phalanx.comm.transport import CommError

        lost_a_peer = isinstance(error, CommError)
        ours = not lost_a_peer
    mistake = isinstance(error, MISTAKES) and not isinstance(error, of("train.checkpoint.blocks", "Unreachable"))
    code = USER_ERROR if mistake else NOT_FINITE if isinstance(error, FloatingPointError) else FAILURE
    if isinstance(error, RankFailure):
        code = error.exit_code
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        write_failure(error_file, error, with_traceback=with_traceback or ours, lost_a_peer=lost_a_peer)
        return code
    if with_traceback or ours:
        traceback.print_exception(error)
    else:
        print(f"phalanx: {described(error)}", file=sys.stderr)
    return code


def of(module: str, name: str) -> tuple[type[Exception], ...]:
    """A kind of error, if what raises it has been imported."""
    found = sys.modules.get(f"phalanx.{module}")
    return () if found is None else (getattr(found, name),)


def described(error: BaseException) -> str:
    """The message of an error with its notes, without its class for users' errors."""
    text = str(error) or type(error).__name__
    return "\n".join([text, *getattr(error, "__notes__", ())])
