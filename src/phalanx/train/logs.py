"""What ranks print, to the terminal and to a file for each rank: logs/rank_R.txt, which goes on where an earlier start ended.

Bytes are copied as they come, by one thread of the launcher. A rank whose output would have gone to a terminal still has one.
"""

from __future__ import annotations

import os
import re
import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import BinaryIO

OUT, ERR = 1, 2
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
"""What moves a terminal's cursor or colours its text (ECMA-48, control sequences); a file has no use for it."""


@dataclass(frozen=True)
class Streams:
    """Where ranks are to write, by rank: paths to open."""

    out: dict[int, str]
    err: dict[int, str]


@contextmanager
def copied(folder: Path, ranks: int, header: str) -> Iterator[Streams]:
    """Copy what is written to the streams to this process's own output, and to folder/rank_R.txt behind a `header` line.

    Leave it when the ranks have ended: what they have written is copied first. A file that can no longer be written (a full disk)
    is given up with a warning, and the terminal when nobody reads it any more: neither ends a run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writers: list[int] = []
    paths: dict[int, dict[int, str]] = {OUT: {}, ERR: {}}
    end, ended = os.pipe()
    with selectors.DefaultSelector() as selector:
        selector.register(end, selectors.EVENT_READ)
        logs = [Log(folder / f"rank_{rank}.txt") for rank in range(ranks)]
        for rank, log in enumerate(logs):
            log.write(f"{header}: rank {rank} of {ranks}\n".encode())
            for stream in (OUT, ERR):
                reader, writer = _channel(like=stream)
                writers.append(writer)
                paths[stream][rank] = f"/dev/fd/{writer}"
                selector.register(reader, selectors.EVENT_READ, Source(reader, stream, log))
        thread = Thread(target=_copy, args=(selector,), name="logs of ranks", daemon=True)
        thread.start()
        try:
            yield Streams(paths[OUT], paths[ERR])
        finally:
            os.close(ended)  # seen by the thread, which then copies what is there and ends
            thread.join()
            for key in list(selector.get_map().values()):
                os.close(key.fd)
            for writer in writers:
                os.close(writer)
            for log in logs:
                log.close()


@dataclass
class Log:
    """One rank's file, open to be written at its end."""

    path: Path
    _file: BinaryIO | None = field(init=False)

    def __post_init__(self) -> None:
        self._file = self.path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            os.write(ERR, f"phalanx: warning: {self.path} is not written any more: {error}\n".encode())
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass
class Source:
    """The reading end of what one rank writes to one of its streams."""

    reader: int
    terminal: int
    log: Log
    _line: bytes = b""
    """Of a terminal: the last line, which may still be drawn anew."""

    def copy(self) -> bool:
        """Copy what is there; False at the end of it."""
        try:
            data = os.read(self.reader, 1 << 16)
        except OSError:  # what Linux says of a terminal whose other side is closed
            return False
        if not data:
            return False
        rest = memoryview(data)
        with suppress(OSError):  # nobody reads what we print: the run and its files go on
            while rest:
                rest = rest[os.write(self.terminal, rest) :]
        self.log.write(data if not os.isatty(self.reader) else self._without_control(data))
        return True

    def finish(self) -> None:
        """Write the line that did not end."""
        if self._line:
            self.log.write(self._without_control(b"\n"))

    def _without_control(self, data: bytes) -> bytes:
        """Lines as they looked in the end: a progress line that was drawn a thousand times is one line."""
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[self._line.rfind(b"\r", 0, -1) + 1 :]
        return b"".join(CONTROL.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2]) + b"\n" for line in lines)


def _copy(selector: selectors.BaseSelector) -> None:
    """Until the end is told, which no source does: children of a rank may hold its streams open for ever."""
    told = False
    while True:
        ready = selector.select(timeout=0 if told else None)
        sources = [key for key, _ in ready if isinstance(key.data, Source)]
        told = told or len(sources) < len(ready)
        if told and not sources:
            break
        for key in sources:
            if not key.data.copy():
                selector.unregister(key.fd)
                os.close(key.data.reader)
                key.data.finish()
    for key in selector.get_map().values():
        if isinstance(key.data, Source):
            key.data.finish()


def _channel(like: int) -> tuple[int, int]:
    """(reading end, writing end): of a terminal as wide as `like` if that is one, else of a pipe."""
    if not os.isatty(like):
        return os.pipe()
    import tty

    reader, writer = os.openpty()
    tty.setraw(writer)  # the real terminal turns \n into \r\n
    with suppress(OSError):
        import termios

        termios.tcsetwinsize(writer, termios.tcgetwinsize(like))
    return reader, writer


def header(attempt: int) -> str:
    """The line that begins a start of the ranks; the first is attempt 0."""
    return f"--- {time.strftime('%Y-%m-%d %H:%M:%S %z')}, {os.uname().nodename}, start {attempt + 1}"
