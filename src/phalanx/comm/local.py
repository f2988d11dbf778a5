"""A whole mesh in one process: one World per rank, each run in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from typing import Any, TypeVar

from phalanx.comm.threads import Delay, Fabric
from phalanx.comm.transport import CommError
from phalanx.comm.world import World
from phalanx.mesh import Mesh

T = TypeVar("T")


WAKE_SECONDS = 0.5
"""A signal that comes just before the caller blocks is only handled when it wakes up again."""


class LocalWorld:
    """Every rank of a mesh, as threads. Use it any number of times, then close it (or use it in a `with`).

    After a rank has failed the wires are replaced under the same Worlds, whose epoch goes up by one: objects that hold them
    keep working, and what was in flight is lost. See Fabric for rendezvous, delay and timeout.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        rendezvous: bool = False,
        delay: Delay | None = None,
        timeout: float = 60.0,
        stage_sets: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.mesh = mesh
        self.fabric = Fabric(mesh.size, rendezvous=rendezvous, delay=delay, timeout=timeout)
        self.worlds = [World(mesh, rank, self.fabric.transport(rank), stage_sets=stage_sets) for rank in range(mesh.size)]
        self._running = Lock()
        self._closed = False

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., T], *per_rank: Sequence[Any]) -> list[T]:
        """[fn(world, *own arguments) of each rank], every rank in its own new thread.

        A sequence in `per_rank` has one argument for each rank. A new thread starts with gradients on, whatever the caller has
        set. The first exception ends all ranks and is raised again with its rank in a note.
        """
        for argument in per_rank:
            if len(argument) != self.mesh.size:
                raise ValueError(f"an argument has {len(argument)} values, one is needed for each of {self.mesh.size} ranks")
        if self._closed:
            raise ValueError(f"the local world of mesh {self.mesh} is closed")
        if not self._running.acquire(blocking=False):
            raise ValueError("this local world is already running; its ranks cannot be in two places")
        try:
            return self._run(fn, per_rank)
        finally:
            self._running.release()

    def close(self) -> None:
        """Unregister the worlds; idempotent."""
        self._closed = True
        for world in self.worlds:
            world.close()

    def _run(self, fn: Callable[..., T], per_rank: Sequence[Sequence[Any]]) -> list[T]:
        results: list[Any] = [None] * self.mesh.size
        failures: list[tuple[int, BaseException]] = []  # in the order in which they happened

        everybody_is_here, called_off = Event(), Event()
        # In place of `join`, which in Python 3.11 takes a thread for ended once an interrupt has come while it waited for it.
        left = [Event() for _ in range(self.mesh.size)]

        def body(rank: int) -> None:
            everybody_is_here.wait()
            try:
                if not called_off.is_set():
                    work(rank)
            finally:
                left[rank].set()

        def work(rank: int) -> None:
            try:
                results[rank] = fn(self.worlds[rank], *(argument[rank] for argument in per_rank))
            except BaseException as error:  # noqa: BLE001 - the caller gets it, even if it would end the process
                failures.append((rank, error))
                self.fabric.abort(error)

        threads = [Thread(target=body, args=(rank,), name=f"phx-rank-{rank}", daemon=True) for rank in range(self.mesh.size)]
        try:
            for thread in threads:
                thread.start()
            everybody_is_here.set()
            for event in left:
                while not event.wait(WAKE_SECONDS):
                    pass
        except BaseException as error:  # an interrupt of the waiting caller
            if not everybody_is_here.is_set():
                called_off.set()  # a thread that is only just coming must not run in the world as it will be by then
                everybody_is_here.set()
            self.fabric.abort(error)
            for thread, event in zip(threads, left, strict=True):
                if thread.ident is not None:
                    event.wait()
            self._rebuild()
            raise
        for thread in threads:
            thread.join()
        if failures:
            self._rebuild()
            raise _first(failures)
        return results

    def _rebuild(self) -> None:
        self.fabric.reset()
        for rank, world in enumerate(self.worlds):
            world.reconnect(self.fabric.transport(rank))


def local(
    mesh: Mesh,
    *,
    rendezvous: bool = False,
    delay: Delay | None = None,
    timeout: float = 60.0,
    stage_sets: Sequence[tuple[int, ...]] = (),
) -> LocalWorld:
    """All ranks of `mesh` as threads of this process."""
    return LocalWorld(mesh, rendezvous=rendezvous, delay=delay, timeout=timeout, stage_sets=stage_sets)


def _first(failures: Sequence[tuple[int, BaseException]]) -> BaseException:
    """The failure that came first, with a note that says where; others that are not its consequences are noted too."""
    rank, first = failures[0]
    alike = sorted(other for other, error in failures[1:] if repr(error) == repr(first))
    also = f", and likewise on {', '.join(map(str, alike))}" if alike else ""
    first.add_note(f"raised on rank {rank}{also}")
    for other, error in failures[1:]:
        if other not in alike and not isinstance(error, CommError):
            first.add_note(f"rank {other} failed with {error!r}")
    return first
