"""Writing checkpoints while training goes on. Each rank writes its own boxes; a checkpoint is there when its manifest is.

    copy      a thread copies this rank's boxes; the step after may compute, but not update, until it has
    write     the thread writes them through DCP's FileSystemWriter, and then the part: what is where, and its hashes
    commit    rank 0's thread waits for the parts of all, and writes DCP's metadata and last the manifest

No rank waits for another one's disk before its own next checkpoint. What a killed run leaves has no manifest and is removed by the next.
"""

from __future__ import annotations

import json
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor

from phalanx.run.executor import Executor
from phalanx.run.pieces import Kind, Piece, State, state_of
from phalanx.run.step import Step
from phalanx.train.checkpoint.blocks import Place
from phalanx.train.checkpoint.manifest import (
    FOLDER,
    MANIFEST,
    METADATA,
    OWNER,
    Manifest,
    complete,
    hash_of,
    is_among,
    others_of,
)
from phalanx.train.checkpoint.part import dcp_writer, metadata_of, part_name, strips, write_part
from phalanx.train.checkpoint.together import raise_together, run_together, wait_together
from phalanx.train.environment import versions

POLL_SECONDS = 0.02
SEEN_SECONDS = 10
"""In which a file that one host has written is there for the others."""


@dataclass
class Saving:
    """A checkpoint that is being written, as this process sees it."""

    name: str
    step: int
    order: int
    facts: Mapping[str, Any]
    numbers: Mapping[str, float]
    states: Sequence[State]
    """Of the ranks of this process."""
    updated: torch.cuda.Event | None = None
    """On a GPU: when the last update has been made."""
    copied: threading.Event = field(default_factory=threading.Event)
    written: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    """This process does nothing for it any more."""
    given_up: threading.Event = field(default_factory=threading.Event)
    """Some rank could not write: do not wait for its part."""
    is_complete: bool = False
    error: BaseException | None = None
    thread: threading.Thread | None = None


class TakenOver(ValueError):
    """Another run writes into the folder now."""


class Checkpoints:
    """The checkpoints of one run in one folder. Every rank calls every method together, but `poll`.

    keep    newest ones that stay; 0 keeps all
    begins  the address of the checkpoint that the run goes on from, or "" of a run that begins anew. What is there now and newer is
            of other runs: `find` does not look at it any more, and it goes as newer ones come. None: it is all of this run
    told    called on rank 0, from the writing thread, with step, name and seconds when a checkpoint is complete
    """

    def __init__(
        self,
        step: Step,
        address: str,
        *,
        keep: int = 0,
        begins: str | None = None,
        told: Callable[[int, str, float], None] | None = None,
    ) -> None:
        self.step, self.place, self.keep = step, Place(address), keep
        self._told = told
        self._now: Saving | None = None
        self._staging: list[list[Tensor]] | None = None
        self._paused = 0.0
        here = step.executors[0].world
        self.is_first = any(executor.world.rank == 0 for executor in step.executors)
        self._count = 0
        self._order = 0
        self._nonce = secrets.randbits(62) if self.is_first else 0
        run_together(step, lambda: self._take_over(begins), f"{address} cannot hold checkpoints")
        numbers = torch.tensor([self._nonce, self._order], device=here.device)
        self._nonce, self._order = self._broadcast(numbers)
        run_together(step, self._look_for_owner, f"{address} is not one place")

    def save(self, number: int, facts: Mapping[str, Any]) -> None:
        """Begin to write the state after `number` steps. Raises what the checkpoint before it met, on every rank.

        facts  plain JSON that the run wants to know again
        """
        began = time.perf_counter()
        self.wait()
        self.step.settle()
        self._count += 1
        self._order += 1
        name = f"step-{number:08d}-{(self._nonce ^ self._count * 0x9E3779B97F4A7C15) & 0xFFFFFFFF:08x}"
        states = [state_of(e.parameters, e.optimizer, self.step.names) for e in self.step.executors]
        self._add_unused(states)
        now = Saving(name, number, self._order, dict(facts), numbers_of(self.step.executors[0]), states)
        if self.step.executors[0].world.device.type == "cuda":
            now.updated = torch.cuda.current_stream().record_event()
        for executor in self.step.executors:
            executor.reading = now.copied
        now.thread = threading.Thread(target=self._run, args=(now, began), name="phx-checkpoint", daemon=True)
        self._now = now
        now.thread.start()
        self._paused += time.perf_counter() - began

    @property
    def paused_seconds(self) -> float:
        """For which training has stood still so far: in `save`, and where an update has waited for what it changes to be copied."""
        return self._paused + max(executor.waited for executor in self.step.executors)

    def wait(self) -> None:
        """Until the last checkpoint is complete, or raise, on every rank, why it is not."""
        now = self._now
        if now is None:
            return
        assert now.thread is not None
        try:
            for end in (now.written, now.ended):
                wait_together(self.step, end)
                try:
                    raise_together(self.step, now.error, f"checkpoint {now.name} was not written")
                except BaseException:
                    self._give_up(now)
                    raise
        finally:
            now.given_up.set()
            now.thread.join()
            self._now = None

    def finish(self) -> None:
        """Let what is being written be written: for a run that all ranks end with the same error."""
        if self._now is not None and self._now.thread is not None:
            self._now.thread.join()

    def _give_up(self, now: Saving) -> None:
        """No rank writes any more: let rank 0 stop waiting, and free what was written."""
        now.given_up.set()
        if self.is_first and now.thread is not None:
            now.thread.join()
            if not now.is_complete:
                with suppress(ValueError):  # why it was not written is told already
                    self.place.remove(now.name)

    def poll(self) -> None:
        """Raise what this process has met while writing. Without communication, so only this rank raises."""
        if self._now is not None and self._now.error is not None:
            raise self._now.error

    def forget_after(self, order: int) -> None:
        """Remove the checkpoints that are newer than one, which a run goes back to."""
        self.wait()

        def remove() -> None:
            for name, manifest in complete(self.place) if self.is_first else ():
                if not isinstance(manifest, Manifest) or manifest.order > order:
                    _remove(self.place, name)

        run_together(self.step, remove, "newer checkpoints were not removed")

    # The writing thread

    def _run(self, now: Saving, began: float) -> None:
        try:
            try:
                staged = self._copy(now)
            finally:
                now.copied.set()
            place = self.place.at(now.name)
            with place.told(""):
                place.make()
                for executor, state, tensors in zip(self.step.executors, now.states, staged, strict=True):
                    write_part(place, executor.world.rank, state, tensors)
            now.written.set()
            if self.is_first:
                self._commit(place, now)
                if self._told is not None and not now.given_up.is_set():
                    self._told(now.step, now.name, time.perf_counter() - began)
        except Exception as error:  # noqa: BLE001 - raised by `wait` or `poll`, in the thread that can do something about it
            now.error = self._cause(error)
        finally:
            now.written.set()
            now.ended.set()

    def _copy(self, now: Saving) -> list[list[Tensor]]:
        """Copies of what is to be written, on the CPU, in memory that the next checkpoint uses again."""
        views = [[view for piece in state.writes for _, view in strips(piece)] for state in now.states]
        if self._staging is None or not _alike(self._staging, views):
            pinned = views[0][0].is_cuda if views and views[0] else False
            self._staging = [[torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) for x in row] for row in views]
        with _after(now.updated):
            for copies, row in zip(self._staging, views, strict=True):
                for copy, view in zip(copies, row, strict=True):
                    copy.copy_(view, non_blocking=True)
        return self._staging

    def _commit(self, place: Place, now: Saving) -> None:
        """Wait for every rank's part, then write what makes the folder a checkpoint."""
        ranks = range(self.step.executors[0].world.mesh.size)
        missing = list(ranks)
        while missing:
            if now.given_up.is_set():
                return
            missing = [rank for rank in missing if not place.exists(part_name(rank))]
            if missing:
                time.sleep(POLL_SECONDS if place.is_local else 1.0)
        contents = {part_name(rank): place.read(part_name(rank)) for rank in ranks}
        parts = {name: json.loads(content) for name, content in contents.items()}
        kinds = now.states[0].kinds
        metadata, results = metadata_of(kinds, list(parts.values()))
        writer, _ = dcp_writer(place)
        with place.told(METADATA):
            writer.finish(metadata, [results])
        contents[METADATA] = place.read(METADATA)
        self._check_owner()
        program, mesh = self.step.program, self.step.world.mesh
        manifest = Manifest(
            step=now.step,
            order=now.order,
            facts=now.facts,
            numbers=now.numbers,
            specs={f"model.{name}": str(p.spec) for name, p in program.parameters.items()},
            mesh=str(mesh),
            aliases={alias: name for name, p in {**program.parameters, **program.buffers}.items() for alias in p.aliases},
            versions=versions(),
            files={name: (len(content), hash_of(content)) for name, content in contents.items()},
            parts=tuple(parts),
        )
        place.write(MANIFEST, manifest.dumped())
        now.is_complete = True
        self.place.sync()
        if self.keep:
            others, whole = others_of(self.place), [e for e in complete(self.place) if isinstance(e[1], Manifest)]
            # What a run has left behind, going on from an older one, or found in its folder, is not what it goes on from next.
            whole.sort(key=lambda entry: is_among(entry[1], others))
            for name, _ in whole[self.keep :]:
                _remove(self.place, name)

    # The folder

    def _take_over(self, begins: str | None) -> None:
        """Make the folder this run's: from now on no other one completes a checkpoint in it. Removes what killed runs left."""
        if not self.is_first:
            return
        self.place.make()
        self._order = write_owner(self.place, self._nonce, begins)
        for name in self.place.folders():
            if FOLDER.match(name) and not self.place.exists(f"{name}/{MANIFEST}"):
                self.place.remove(name)

    def _look_for_owner(self) -> None:
        """Raise ValueError unless this process sees what rank 0 has written, which a shared file system may show late."""
        for _ in range(SEEN_SECONDS * 10):
            with suppress(ValueError):
                self._check_owner()
                return
            time.sleep(0.1)
        rank, host = self.step.executors[0].world.rank, platform.node()
        raise ValueError(
            f"rank {rank}, on {host}, does not see in {self.place.address} what rank 0 has written there: all hosts must share the "
            "folder of checkpoints. Name one that they share with --out or --checkpoints"
        )

    def _cause(self, error: Exception) -> Exception:
        """Another run that takes the folder over removes what is not complete in it, of which any error may come."""
        try:
            self._check_owner()
        except TakenOver as cause:
            return cause
        except ValueError:
            pass
        return error

    def _check_owner(self) -> None:
        try:
            owner = json.loads(self.place.read(OWNER))
            run, host = owner["run"], owner["host"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.place.address}/{OWNER}, which says whose checkpoints these are, cannot be read: {error}"
            ) from None
        if run != self._nonce:
            raise TakenOver(
                f"{self.place.address} was taken over by another run, on {host}: two runs cannot keep their checkpoints in one "
                "folder. Give one of them another --out or --checkpoints"
            )

    def _add_unused(self, states: list[State]) -> None:
        """Tensors of the model that no segment trains: rank 0 writes them, or nobody would."""
        for place, (executor, state) in enumerate(zip(self.step.executors, states, strict=True)):
            kinds, pieces = unused(self.step)
            mine = pieces if executor.world.rank == 0 else ()
            states[place] = State({**state.kinds, **kinds}, (*state.writes, *mine), (*state.reads, *pieces))

    # Together

    def _broadcast(self, numbers: Tensor) -> tuple[int, ...]:
        def send(executor: Executor) -> Tensor:
            mine = numbers.clone()
            executor.world.transport.broadcast(mine, 0, executor.world.group(executor.world.mesh.names)).wait()
            return mine

        return tuple(int(x) for x in self.step.each(send)[0])


def write_owner(place: Place, nonce: int, begins: str | None) -> int:
    """Say whose the checkpoints in a folder are from now on; returns the order of the newest.

    begins  the address from which the run goes on, "" of a new one: what is newer is another run's. None: all are its own
    """
    orders = {name: manifest.order for name, manifest in complete(place) if isinstance(manifest, Manifest)}
    newest = max(orders.values(), default=0)
    first = newest if begins is None else _order_of(place, begins, orders)
    others = others_of(place) if first else ()
    if first < newest:
        others = (*others, (first + 1, newest))
    owner = {"run": nonce, "host": platform.node(), "since": time.time(), "others": others}
    place.write(OWNER, json.dumps(owner).encode())
    return newest


def _order_of(place: Place, address: str, orders: Mapping[str, int]) -> int:
    """That of a checkpoint in this folder; 0 of one elsewhere."""
    name = PurePosixPath(address).name
    return orders[name] if name in orders and Place(address).path == place.of(name) else 0


def leave_behind(address: str, begins: str) -> None:
    """Before a run has started that is to keep its checkpoints at `address`: those of other runs there are not its own, however it
    ends. Nothing is done where there are none."""
    place = Place(address)
    if place.folders():
        write_owner(place, secrets.randbits(62), begins)


def unused(step: Step) -> tuple[dict[str, Kind], tuple[Piece, ...]]:
    """Tensors of the module's state_dict that no segment uses, as they are held on every rank."""
    found = {name: x for name, x in step.unused.items() if name not in step.program.buffers}
    kinds = {f"model.{name}": Kind(tuple(x.shape), x.dtype) for name, x in found.items()}
    return kinds, tuple(Piece(f"model.{name}", (0,) * x.dim(), x) for name, x in found.items())


def numbers_of(executor: Executor) -> dict[str, float]:
    """What is one number of the state of a run: updates, steps, the loss scale."""
    found = {f"optimizer.{name}": value for name, value in executor.optimizer.numbers().items()}
    found["step"] = executor.step_number
    if executor.loss_scale is not None:
        found.update({name: float(value) for name, value in executor.loss_scale.state_dict().items()})
    return found


def _alike(copies: Sequence[Sequence[Tensor]], views: Sequence[Sequence[Tensor]]) -> bool:
    """Whether copies fit: some optimizers keep nothing before their first update."""
    return [[(x.shape, x.dtype) for x in row] for row in copies] == [[(x.shape, x.dtype) for x in row] for row in views]


@contextmanager
def _after(updated: torch.cuda.Event | None) -> Iterator[None]:
    """Copies in it wait for the update, on a stream of their own beside what computes, and are made when it ends."""
    if updated is None:
        yield
        return
    stream = torch.cuda.Stream(updated.device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(updated.device), torch.cuda.stream(stream):
        stream.wait_event(updated)
        yield
        stream.synchronize()


def _remove(place: Place, name: str) -> None:
    """The manifest first: what is half removed is no checkpoint."""
    if place.exists(f"{name}/{MANIFEST}"):
        place.remove(f"{name}/{MANIFEST}")
    place.remove(name)
