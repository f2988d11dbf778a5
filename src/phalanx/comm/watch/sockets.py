"""Which connections a backend has opened, so that a wait in them can be ended.

Gloo has no abort: a rank that is blocked in it stays so until the backend's timeout, half an hour by default. Shutting its sockets
down lets every pending operation fail at once, on both ends.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress


def streams() -> dict[int, int]:
    """{file descriptor: inode} of this process's sockets."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is gone
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def shut_down(descriptors: dict[int, int]) -> None:
    """End the TCP connections among these descriptors that are still the sockets that they were."""
    for descriptor, inode in descriptors.items():
        with suppress(OSError):
            if os.fstat(descriptor).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    connection.getpeername()  # raises for one that listens
                    connection.shutdown(socket.SHUT_RDWR)
