"""PyTorch's own parallelism runs on shared memory as on Gloo, bit for bit, and on that group and no other."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx.shm

ROOT = Path(__file__).parents[3]
if __name__ == "__rank__":
    sys.path.insert(0, str(ROOT))

from tests.comm.shm.rank_set import Answers, Raised, rank_set, stand_by  # noqa: E402

from phalanx.bench import frameworks  # noqa: E402

pytestmark = pytest.mark.skipif(phalanx.shm.available() is not None, reason=str(phalanx.shm.available()))
STEPS = 3
HIDDEN, LAYERS, BATCH, SEQ = 32, 2, 2, 8


# What two ranks report of a backend: losses, and how many collectives its group ran meanwhile.


def trained(framework: str, backend: str) -> tuple[list[float], int]:
    group = dist.new_group(backend=backend)
    step = frameworks.step_of(framework, group, f"{framework}_{backend}", HIDDEN, LAYERS, BATCH, SEQ)
    losses = [step() for _ in range(STEPS)]
    return losses, group._get_sequence_number_for_group()


def pipelined(backend: str) -> tuple[list[float], int]:
    """1F1B of two stages and four microbatches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    group = dist.new_group(backend=backend)
    messages = messages_of(group) if backend == "shm" else []
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4)]
    x, target = torch.randn(8, 8), torch.randn(8, 4)
    stage = PipelineStage(stages[rank], rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stages[rank].parameters(), lr=0.1)
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        each: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=each)
        optimizer.step()
        losses += [loss.item() for loss in each]
    norms = [p.detach().double().norm().item() for p in stages[rank].parameters()]
    return losses + norms, group._get_sequence_number_for_group() + len(messages)


def messages_of(group: Any) -> list[str]:
    """What the group sends and receives from now on. Gloo counts messages with the collectives, ours collectives alone."""
    seen: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        call = getattr(group, name)

        def run(*arguments: Any) -> Any:
            seen.append(name)
            return call(*arguments)

        return run

    group.send, group.recv = counted("send"), counted("recv")
    return seen


def functional(backend: str) -> tuple[list[float], int]:
    """Functional collectives, which come from C++, with and without autograd."""
    from torch.distributed import _functional_collectives as funcol

    group = dist.new_group(backend=backend)
    rank = dist.get_rank(group)
    x = torch.arange(8.0) * (rank + 1)
    grown = x.clone().requires_grad_()
    results = [
        funcol.all_reduce(x, "sum", group),
        funcol.all_reduce(x, "avg", group) if backend == "shm" else funcol.all_reduce(x, "sum", group) / 2,
        funcol.all_gather_tensor(x, 0, group),
        funcol.reduce_scatter_tensor(x, "sum", 0, group),
        funcol.all_to_all_single(x, [4, 4], [4, 4], group),
        funcol.broadcast(x, 1, group),
        *funcol.all_reduce_coalesced([x, x + 1], "max", group),
        *funcol.all_gather_into_tensor_coalesced([x, x * 2], group),
        *funcol.reduce_scatter_tensor_coalesced([x, x * 3], "sum", [0, 0], group),
    ]
    gathered = funcol.all_gather_tensor_autograd(grown, 0, group)
    (gathered * torch.arange(16.0)).sum().backward()
    assert grown.grad is not None
    results.append(grown.grad)
    return torch.cat([torch.as_tensor(each).flatten() for each in results]).tolist(), group._get_sequence_number_for_group()


CASES: dict[str, Callable[[str], tuple[list[float], int]]] = {
    "ddp": lambda backend: trained("ddp", backend),
    "fsdp2": lambda backend: trained("fsdp2", backend),
    "tp": lambda backend: trained("tp", backend),
    "pipelining": pipelined,
    "functional": functional,
}
# Six calls, three of two tensors each, and all_gather with the reduce_scatter of its backward.
CALLS = {"functional": 6 + 3 * 2 + 2}


def both(name: str) -> dict[str, tuple[list[float], int]]:
    return {backend: CASES[name](backend) for backend in ("gloo", "shm")}


def mesh_of_four(_: str) -> dict[str, list[float]]:
    """A 2x2 mesh in a world of shared memory: FSDP2 over one axis of it, DTensor over both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    backends = [dist.get_backend(mesh.get_group(axis)) for axis in ("dp", "tp")]
    assert backends == ["shm", "shm"], backends
    sums = []
    for axis in ("dp", "tp"):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mesh.get_group(axis))
        sums.append(x.item())
    whole = torch.arange(16.0).reshape(4, 4)
    split = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    product = (split @ distribute_tensor(whole, mesh, [Shard(1), Shard(0)])).full_tensor()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["dp"])
    model(whole).square().sum().backward()
    assert model.weight.grad is not None
    return {"sums": sums, "product": product.flatten().tolist(), "grad": model.weight.grad.full_tensor().flatten().tolist()}


def serve(rank: int, size: int, folder: str, connection: Connection, meeting: Any, backend: str) -> None:
    stand_by(rank, folder)
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group(backend, f"file://{folder}/store", world_size=size, rank=rank)
    asked: dict[str, Callable[[str], Any]] = dict.fromkeys(CASES, both) | {"mesh": mesh_of_four}
    with contextlib.suppress(EOFError):
        while True:
            name = connection.recv()
            try:
                connection.send(asked[name](name))
            except Exception as error:  # noqa: BLE001 - told to the parent
                import traceback

                connection.send(Raised(f"{error}\n{traceback.format_exc()}"))


def asked(name: str, size: int, backend: str, folder: Path) -> Answers:
    with rank_set(Path(__file__), folder, size, backend=backend) as started:
        answers = started.ask(name, 60.0)
        assert answers.complete, answers.complaint
        return answers


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """Every case on two ranks that are started once."""
    with rank_set(Path(__file__), tmp_path_factory.mktemp("two"), 2, backend="gloo") as started:
        return {name: started.ask(name, 60.0) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_framework_computes_the_same_over_shm_as_over_gloo(name: str, two_ranks: dict[str, Answers]) -> None:
    """Two addends give one sum in either order, so not a bit may differ."""
    answers = two_ranks[name]
    assert answers.complete, answers.complaint
    for rank, told in answers.told.items():
        (gloo, gloo_calls), (shm, shm_calls) = told["gloo"], told["shm"]
        assert shm == gloo, f"rank {rank}"
        assert len(shm) >= STEPS or (name, rank) == ("pipelining", 0)
        # It ran on the group that it was given: as often as Gloo counts, which takes coalesced calls for one.
        assert shm_calls == CALLS.get(name, gloo_calls), f"rank {rank}"
        assert shm_calls > 0


def test_meshes_of_four_ranks(tmp_path: Path) -> None:
    answers = asked("mesh", 4, "shm", tmp_path)
    whole = torch.arange(16.0).reshape(4, 4)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model(whole).square().sum().backward()
    for rank, told in answers.told.items():
        dp, tp = divmod(rank, 2)
        assert told["sums"] == [float(tp + (2 + tp)), float(2 * dp + (2 * dp + 1))]
        assert told["product"] == (whole @ whole).flatten().tolist()  # whole numbers: exact
        # The mean of two equal gradients: the same numbers, summed and halved.
        torch.testing.assert_close(torch.tensor(told["grad"]), model.weight.grad.flatten(), rtol=0, atol=0)


if __name__ == "__rank__":
    serve(**JOB)  # type: ignore[name-defined]  # noqa: F821 - put there by the parent
