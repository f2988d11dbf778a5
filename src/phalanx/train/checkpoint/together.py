"""What every rank must come to the same end of, though each works with its own disk and one may take long, or fail."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from phalanx.run.executor import Executor
from phalanx.run.step import Step
from phalanx.train.checkpoint.blocks import Damaged

LOOK_SECONDS = 5.0
"""Ranks that wait for one another's disks meet so often: a transport gives a rank up that does not come for a minute."""
DAMAGED, FAILED = 1, 2


def first_failing(step: Step, severity: int) -> tuple[int, int] | None:
    """(first rank that reports more than 0, the worst of all reports); None if every rank reports 0. Collective."""

    def ask(executor: Executor) -> list[int]:
        world = executor.world
        numbers = torch.tensor([world.rank if severity else world.mesh.size, -severity], device=world.device)
        if world.mesh.size > 1:
            world.transport.all_reduce(numbers, world.group(world.mesh.names), "min").wait()
        found: list[int] = numbers.tolist()
        return found

    first, worst = step.each(ask)[0]
    return (first, -worst) if worst else None


def raise_together(step: Step, error: BaseException | None, what: str) -> None:
    """Raise on every rank if any has an error: the own one, or whose it is. Damaged on all, or on none. Collective."""
    severity = 0 if error is None else DAMAGED if isinstance(error, Damaged) else FAILED
    found = first_failing(step, severity)
    if found is None:
        return
    first, worst = found
    if error is None or severity < worst:
        kind = Damaged if worst == DAMAGED else ValueError
        raise kind(f"{what}: rank {first} could not, and says why") from error
    raise error


def wait_together(step: Step, end: threading.Event) -> None:
    """Until `end` is set on every rank, however far apart. Collective."""
    while first_failing(step, 0 if end.wait(LOOK_SECONDS) else FAILED) is not None:
        pass


def run_together(step: Step, work: Callable[[], object], what: str) -> None:
    """Do a work of each process's own, and raise on every rank if one of them fails. Collective."""
    ended, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            with torch.no_grad():
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                work()
                if device.type == "cuda":
                    torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            errors.append(error)
        finally:
            ended.set()

    device = step.executors[0].world.device
    threading.Thread(target=run, name="phx-together", daemon=True).start()
    wait_together(step, ended)
    raise_together(step, errors[0] if errors else None, what)
