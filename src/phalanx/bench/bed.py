"""Two hosts on one machine: network namespaces with a link of limited rate between them. Needs Linux, iproute2 and root.

What runs in them sees two addresses and nothing else of the network; memory and files are shared, as on no two real hosts, so
which host a rank is on must come from its launcher (`node_from`).
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PORT = 29500
"""Of the launcher's store. A namespace is new and has all ports free."""


class NotPermitted(RuntimeError):
    """This machine does not let us make hosts; says why."""


@dataclass(frozen=True)
class Ended:
    """How the launcher of one host ended: its exit code, and what it and its ranks wrote."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Host:
    """A namespace, its one network interface and the address of that."""

    name: str
    interface: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def kill(self) -> None:
        """End every process on this host."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        for pid in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@dataclass(frozen=True)
class Bed:
    hosts: tuple[Host, Host]

    def run(
        self, commands: Sequence[Sequence[str]], *, seconds: float, env: Mapping[str, str] | None = None
    ) -> tuple[Ended, ...]:
        """One command on each host, at the same time.

        Past `seconds` everything on both hosts is killed and TimeoutError has what was written until then.
        """
        with tempfile.TemporaryDirectory() as folder:
            paths = [(Path(folder, f"out{at}"), Path(folder, f"err{at}")) for at in range(len(self.hosts))]
            running = []
            try:
                for host, command, (out, err) in zip(self.hosts, commands, paths, strict=True):
                    with out.open("wb") as out_file, err.open("wb") as err_file:
                        around = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": host.interface, **(env or {})}
                        running.append(subprocess.Popen(host.command(command), stdout=out_file, stderr=err_file, env=around))
                until = time.monotonic() + seconds
                codes = [process.wait(max(0.0, until - time.monotonic())) for process in running]
            except subprocess.TimeoutExpired as late:
                wrote = "\n".join(f"{path.name}: {path.read_text()}" for pair in paths for path in pair if path.exists())
                raise TimeoutError(f"not done after {seconds:g} s\n{wrote}") from late
            finally:
                for host in self.hosts:
                    host.kill()
                for process in running:
                    process.wait()
            return tuple(Ended(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, paths, strict=True))

    def torchrun(
        self,
        arguments: Sequence[str],
        *,
        per_host: tuple[int, int] = (2, 2),
        seconds: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> tuple[Ended, ...]:
        """Ranks under one torchrun per host; the first host has the first ranks. Arguments: of python, such as -m and a module."""
        commands = [
            [
                *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run"),
                *("--nnodes", str(len(self.hosts)), "--node-rank", str(at), "--nproc-per-node", str(per_host[at])),
                *("--master-addr", self.hosts[0].address, "--master-port", str(PORT), "--no-python"),
                *(sys.executable, *arguments),
            ]
            for at in range(len(self.hosts))
        ]
        return self.run(commands, seconds=seconds, env=env)


@contextmanager
def two_hosts(rate: str = "1gbit", burst: str = "256kb") -> Iterator[Bed]:
    """Two hosts with `rate` (as tc writes it) in each direction between them; nothing of them is left behind.

    Packets wait in the link's queue for up to 50 ms. Raises NotPermitted where namespaces or traffic control are not allowed.
    """
    unique = secrets.token_hex(4)
    hosts = (Host(f"phx{unique}a", f"phx{unique}a", "10.77.0.1"), Host(f"phx{unique}b", f"phx{unique}b", "10.77.0.2"))
    one, two = hosts
    made: list[Host] = []
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            made.append(host)
        peer = ("type", "veth", "peer", "name", two.interface, "netns", two.name)
        _ip("link", "add", one.interface, "netns", one.name, *peer)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "link", "set", host.interface, "up")
            tbf = ("root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")
            _must(host.command(["tc", "qdisc", "add", "dev", host.interface, *tbf]))
        yield Bed(hosts)
    finally:
        for host in made:
            host.kill()
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _must(["ip", *arguments])


def _must(command: Sequence[str]) -> None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NotPermitted(f"{command[0]} is not installed (iproute2 has it)") from error
    if ended.returncode:
        raise NotPermitted(f"`{' '.join(command)}` failed: {ended.stderr.strip()}")
