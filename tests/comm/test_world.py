"""Worlds: which groups they open and in which order, how they are found, and all ranks of one as threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.cli.doctor import run as doctor
from phalanx.comm import CommError, DryTransport, Fabric, World, find_world, init, local
from phalanx.comm.connect import Terms, agree
from phalanx.comm.launch import Launch, check_mesh, first_host, launch_from, nearest_meshes
from phalanx.comm.watch.monitor import Options, options_from
from phalanx.comm.watch.watch import Watch
from phalanx.comm.wires import Wire, Wires
from phalanx.comm.world import _cosets
from phalanx.mesh import Mesh

LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class Opening(DryTransport):
    """Writes down the groups that are opened."""

    def group(self, name, ranks, *, p2p=False):
        self.opened = [*getattr(self, "opened", []), (name, tuple(ranks), p2p)]
        return super().group(name, ranks, p2p=p2p)


@pytest.mark.parametrize("text", ["", "dp=1", "dp=4", "pp=2,dp=3,tp=2", "a=2,b=1,c=3,d=2", "pp=4,ep=2,cp=2,tp=2"])
def test_groups_are_the_meshs_groups_opened_in_one_order(text: str) -> None:
    mesh = Mesh.parse(text)
    orders = []
    for rank in range(mesh.size):
        transport = Opening(rank, mesh.size)
        with World(mesh, rank, transport) as world:
            orders.append(getattr(transport, "opened", []))
            for name in mesh.names:
                assert world.group(name).ranks == mesh.group(rank, (name,))
                assert world.place(name) == (world.group(name), mesh.coordinates(rank)[name])
            assert world.group(mesh.names).ranks == tuple(range(mesh.size))
            assert world.group("+".join(mesh.names[:2]) if mesh.names else ()).ranks == mesh.group(rank, mesh.names[:2])
            assert world.group(()).ranks == (rank,)
    assert all(order == orders[0] for order in orders)
    names = [name for name, _, _ in orders[0]]
    assert len(set(names)) == len(names)


def test_cosets_are_what_the_mesh_says() -> None:
    mesh = Mesh(a=2, b=3, c=1, d=2)
    for axes in [(), ("a",), ("d",), ("a", "d"), ("b", "c"), ("a", "b", "c", "d")]:
        assert _cosets(mesh, axes) == mesh.groups(axes)


def test_only_a_pipeline_opens_channels_unless_told() -> None:
    transport = Opening(0, 4)
    World(Mesh(pp=2, dp=2), 0, transport).close()
    assert {name.split("@")[0]: p2p for name, _, p2p in transport.opened} == {"world": False, "pp": True, "dp": False}
    transport = Opening(0, 4)
    World(Mesh(pp=2, dp=2), 0, transport, p2p=("dp",)).close()
    assert {name.split("@")[0]: p2p for name, _, p2p in transport.opened} == {"world": False, "pp": False, "dp": True}


def test_stage_groups() -> None:
    mesh = Mesh(pp=4, dp=2)
    orders = []
    for rank in range(8):
        transport = Opening(rank, 8)
        with World(mesh, rank, transport, stage_sets=[(3, 0), (0, 1, 2, 3)]) as world:
            world.open_stages([(0, 3), (1, 2, 3)])
            orders.append(transport.opened)
            dp, pp = rank % 2, rank // 2
            assert world.stage_group((0, 3)).ranks == (dp, 6 + dp)
            assert world.stage_group((3, 2, 1)).ranks == (2 + dp, 4 + dp, 6 + dp)
            assert world.stage_group(range(4)) == world.group("pp")
            assert world.stage_group((pp,)).ranks == (rank,)
            with pytest.raises(ValueError, match=r"no group was opened for the stages \(0, 1\)"):
                world.stage_group((0, 1))
            with pytest.raises(ValueError, match=r"stages \(2, 4\) are outside a pipeline of 4"):
                world.open_stages([(2, 4)])
    assert all(order == orders[0] for order in orders)
    assert [name for name, _, _ in orders[0]][-4:] == ["pp[0,3]@0", "pp[0,3]@1", "pp[1,2,3]@2", "pp[1,2,3]@3"]


def test_a_world_is_found_by_its_name_until_it_is_closed() -> None:
    mesh = Mesh(dp=2)
    worlds = [World(mesh, 0, DryTransport(0, 2)) for _ in range(2)]
    assert worlds[0].name != worlds[1].name
    for world in worlds:
        assert find_world(world.name) is world
        world.close()
        world.close()
        with pytest.raises(ValueError, match="no world is called"):
            find_world(world.name)
    with pytest.raises(ValueError, match="mesh dp=2 has 2 ranks, but the transport has 3"):
        World(mesh, 0, DryTransport(0, 3))
    with World(mesh, 0, DryTransport(0, 2)) as world, pytest.raises(ValueError, match="mesh dp=2 has no axis 'tp'"):
        world.group("tp")


def test_run_returns_in_rank_order_with_arguments_of_each_rank() -> None:
    with local(Mesh(dp=2, tp=2)) as world:
        names = world.run(
            lambda w, a, b: (w.rank, w.coordinates["tp"], a, b, threading.current_thread().name), "abcd", range(4)
        )
        assert names == [(r, r % 2, "abcd"[r], r, f"phx-rank-{r}") for r in range(4)]
        with pytest.raises(ValueError, match="3 values, one is needed for each of 4"):
            world.run(lambda w, a: None, [1, 2, 3])
        assert len({w.generator for w in world.worlds}) == 4
        draws = world.run(lambda w: torch.rand(1, generator=w.generator).item())
        assert len(set(draws)) == 4


def test_a_new_thread_starts_with_gradients_on() -> None:
    with torch.no_grad(), local(Mesh(dp=2)) as world:
        assert world.run(lambda w: torch.is_grad_enabled()) == [True, True]


def test_a_local_world_survives_a_failure_with_a_new_epoch() -> None:
    """Also when ranks were in the middle of different calls, whose handles fail rather than wait for ever."""

    def broken(w):
        handles.append(w.transport.recv(torch.zeros(1), (w.rank + 1) % 3, w.group("dp")))
        if w.rank == 1:
            raise LookupError("once")
        w.transport.all_reduce(torch.zeros(1), w.group("dp")).wait()

    before = threading.active_count()
    with local(Mesh(dp=3)) as world:
        names = [w.name for w in world.worlds]
        for epoch in range(3):
            handles: list = []
            assert [w.epoch for w in world.worlds] == [epoch] * 3
            with pytest.raises(LookupError, match="once") as caught:
                world.run(broken)
            assert caught.value.__notes__ == ["raised on rank 1"]
            for handle in handles:
                with pytest.raises(CommError, match="once"):
                    handle.wait()

            def sums(w):
                x = torch.ones(1)
                w.transport.all_reduce(x, w.group("dp")).wait()
                return x.item()

            assert world.run(sums) == [3.0] * 3
        assert [w.name for w in world.worlds] == names
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="is closed"):
        world.run(lambda w: None)


def test_independent_failures_are_noted() -> None:
    turn = threading.Barrier(2)

    def body(w):
        turn.wait()
        raise LookupError(f"of {w.rank}")

    with local(Mesh(dp=2)) as world, pytest.raises(LookupError) as caught:
        world.run(body)
    first = int(str(caught.value.args[0])[-1])
    assert caught.value.__notes__ == [f"raised on rank {first}", f"rank {1 - first} failed with LookupError('of {1 - first}')"]


def test_a_local_world_runs_once_at_a_time() -> None:
    with local(Mesh()) as world, pytest.raises(ValueError, match="already running"):
        world.run(lambda w: world.run(lambda w: None))


def test_an_interrupt_while_ranks_start_runs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, the first ranks would run on, in a world whose wires are replaced under them."""
    ran = []
    started = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "phx-rank-2":
            raise KeyboardInterrupt
        started(thread)

    before = threading.active_count()
    with local(Mesh(dp=3)) as world:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                world.run(lambda w: ran.append(w.rank))
        assert ran == [] and threading.active_count() == before
        assert world.run(lambda w: w.epoch) == [1, 1, 1]


def test_init_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    with init(Mesh(dp=1, tp=1), device="cpu") as world:
        assert (world.rank, world.size, world.epoch) == (0, 1, 0)
        x = torch.ones(3)
        world.transport.all_reduce(x, world.group("dp"), "mean").wait()
        assert torch.ops.phx.all_gather(x, world.name, "tp", 1, 0).tolist() == [1.0] * 3
    with pytest.raises(ValueError, match=r"mesh dp=2,tp=4 has 8 ranks, but this is 1 process.*--nproc-per-node 8.*phx.local"):
        init(Mesh(dp=2, tp=4), device="cpu")


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],x1",
    "SLURM_JOB_ID": "123",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def test_launchers_are_read() -> None:
    assert launch_from({}) is None
    assert launch_from(TORCHRUN) == Launch("torchrun", 3, 8, 1)
    assert launch_from({**TORCHRUN, **SRUN, "TORCHELASTIC_RESTART_COUNT": "2"}) == Launch("torchrun", 3, 8, 1, restarts=2)
    srun = launch_from(SRUN)
    assert (srun.rank, srun.size, srun.local_rank) == (3, 8, 1)
    assert srun.rendezvous.startswith("tcp://gpu07:")
    assert srun.rendezvous == launch_from({**SRUN, "SLURM_PROCID": "0"}).rendezvous
    assert launch_from({**SRUN, "MASTER_ADDR": "b", "MASTER_PORT": "77"}).rendezvous == "tcp://b:77"
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "123"}
    assert launch_from(batch_script) is None, "a batch script is one process, not rank 0 of its allocation"
    mpi = launch_from({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"})
    assert (mpi.rank, mpi.size, mpi.local_rank) == (3, 8, 1)
    assert mpi.rendezvous.startswith("tcp://127.0.0.1:")
    assert launch_from({**OPEN_MPI, "MASTER_ADDR": "b", "MASTER_PORT": "7"}).rendezvous == "tcp://b:7"
    pmi = launch_from({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"})
    assert (pmi.rank, pmi.size, pmi.local_rank) == (2, 4, 2)


def test_what_a_launcher_forgot_is_named() -> None:
    with pytest.raises(ValueError, match="torchrun set some of its variables but not MASTER_ADDR, MASTER_PORT"):
        launch_from({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="RANK='zero'"):
        launch_from({**TORCHRUN, "RANK": "zero"})
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        launch_from({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1-3]", "n1"), ("n[007,9]", "n007"), ("a,n[1-3]", "a"), ("r[2-3]-gpu,x", "r2-gpu")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_mesh_of_another_size_names_both_and_the_nearest_that_fit() -> None:
    message = r"mesh dp=2,tp=2 has 4 ranks, but torchrun started 8; nearest that fit: dp=4,tp=2, or dp=2,tp=4"
    with pytest.raises(ValueError, match=message):
        check_mesh(Mesh(dp=2, tp=2), Launch("torchrun", 0, 8, 0))
    check_mesh(Mesh(dp=4, tp=2), Launch("torchrun", 0, 8, 0))
    assert nearest_meshes(Mesh(dp=4, tp=3), 7) == [Mesh(dp=7, tp=1)]
    assert nearest_meshes(Mesh(), 3) == [Mesh(dp=3)]


def test_a_fabric_of_one_needs_no_partner() -> None:
    with World(Mesh(), 0, Fabric(1).transport(0)) as world:
        x = torch.ones(2)
        world.transport.all_reduce(x, world.group(())).wait()
        assert x.tolist() == [1.0, 1.0]


def test_leaving_a_world_with_an_exception_tells_the_other_ranks() -> None:
    fabric = Fabric(2)
    here, there = (World(Mesh(dp=2), rank, fabric.transport(rank)) for rank in range(2))
    waiting = here.transport.all_reduce(torch.ones(1), here.group("dp"))
    with pytest.raises(LookupError), there:
        raise LookupError("lost")
    with pytest.raises(CommError, match="lost"):
        waiting.wait()
    here.close()


def test_the_terms_are_those_of_rank_0() -> None:
    """Turn by turn, through a store that outlives a world; nobody waits for a rank that comes late."""
    wires = Wires(inside=Wire(0.0, float("inf")), between=Wire(1e-4, 3e8), chunk_bytes=1 << 10)
    decided = [Terms(wires, "/run", ("gloo",)), Terms(), Terms(watch="/other")]
    store = dist.HashStore()
    assert [agree(store, 0, terms, 1.0) for terms in decided] == decided
    for rank in (1, 2):
        assert [agree(store, rank, Terms(watch="/mine", watched=("shm",)), 1.0) for _ in decided] == decided
    with pytest.raises(dist.DistError):
        agree(store, 1, Terms(), 0.05)


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(ValueError, match=r"watched has 'mpi', which is none of gloo, nccl, shm"):
        init(Mesh(), watch="somewhere", watched=("gloo", "mpi"))


def test_a_watched_world_leaves_its_rings_and_a_rank_that_hangs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over Gloo. What the survivor raises, what it prints before and what the doctor reads afterwards is one verdict."""
    script = Path(__file__).with_name("watched_world.py")
    command = [sys.executable, "-P", "-m", "phalanx", "run", "--ranks", "2", str(script), str(tmp_path)]
    source = Path(__file__).parents[2] / "src"
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env={**os.environ, "PYTHONPATH": str(source)}, check=False
    )
    assert ended.returncode == 1
    lines = script.read_text().splitlines()
    pause = next(number for number, line in enumerate(lines, 1) if "signal.pause()" in line)
    verdict = (
        r"rank 1 has not called all_reduce 1 of group '\d+' \(dp@0\): rank 0 waits in all_reduce\(sum\) of 4 float32 at "
        rf"watched_world\.py:{pause + 1} in main; rank 1 is at watched_world\.py:{pause} in main"
    )
    assert len(re.findall(rf"^\[rank 0\] {verdict}$", ended.stderr, re.MULTILINE)) == 1, ended.stderr
    assert re.search(rf"CommError: rank 0: {verdict}$", ended.stderr, re.MULTILINE), ended.stderr
    assert sorted(path.name for path in (tmp_path / "well" / "flight").iterdir()) == ["rank0.ring", "rank1.ring"]
    assert doctor.main([str(tmp_path / "well")]) == 0
    assert capsys.readouterr().out.startswith("nothing is wrong with what the ranks recorded\n")
    assert doctor.main([str(tmp_path / "hangs")]) == doctor.WRONG
    assert re.match(verdict, capsys.readouterr().out)


def test_what_the_environment_says_of_a_watch(tmp_path: Path) -> None:
    usual = Options(patience=3.0)
    assert options_from({}, usual) == usual
    said = options_from({"PHALANX_RUN_DIR": str(tmp_path), "PHALANX_PATIENCE": "0.5"}, usual)
    assert (said.run_dir, said.patience) == (tmp_path, 0.5)
    with pytest.raises(ValueError, match="PHALANX_PATIENCE='soon'; expected a number of seconds"):
        options_from({"PHALANX_PATIENCE": "soon"}, usual)


def test_a_watch_whose_folder_cannot_be_made_is_kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run folder of rank 0 may be nowhere on another host; a run must not fail for that."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    taken = tmp_path / "taken"
    taken.touch()
    watch = Watch(dist.HashStore(), 0, 1, Options(run_dir=taken, say=said.append))
    assert watch.ring.path.is_relative_to(tmp_path)
    assert watch.ring.path.exists()
    assert said == [f"[rank 0] no flight rings in {taken} (Not a directory); they go to {watch.folder}"]
    watch.close()
    assert list(tmp_path.iterdir()) == [taken]  # all is well, and nobody asked for them there
