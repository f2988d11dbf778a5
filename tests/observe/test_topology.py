"""`phalanx doctor topology`: naming links and judging meshes, on machines that are recorded in fixtures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.cli import main
from phalanx.cli.doctor import topology as command
from phalanx.mesh import Mesh
from phalanx.observe.machine import Gpu, Machine, NvLinks, load_machines
from phalanx.observe.placement import Judgement, _groups, judge, place, unhealthy
from phalanx.observe.topology import KINDS, Device, Link, Wiring, visible
from phalanx.observe.topology_table import topology_table

FIXTURES = Path(__file__).parent / "fixtures"
WORKSTATION = load_machines(FIXTURES / "workstation")
H100 = load_machines(FIXTURES / "h100" / "h100-0.json")
TWO_H100 = load_machines(FIXTURES / "h100")
NV18 = Link("NV", 18, 4, switched=True, gbytes_per_s=450.0)


def symbols(machines: list[Machine]) -> list[list[str]]:
    """The matrix of the first host."""
    wiring, gpus = Wiring(machines), range(len(machines[0].gpus))
    return [["X" if a == b else wiring.link(Device(0, a), Device(0, b)).symbol for b in gpus] for a in gpus]


def judged(machines: list[Machine], mesh: str) -> Judgement:
    return judge(machines, Mesh.parse(mesh))


def crossed(judgement: Judgement) -> dict[str, str]:
    return {crossing.axis: crossing.link.symbol for crossing in judgement.crossings}


# Links.


def test_links_of_a_workstation() -> None:
    # 0 and 1 each have a host bridge of their own; 2 to 5 share a switch.
    assert symbols(WORKSTATION) == [
        ["X" if a == b else "PIX" if min(a, b) >= 2 else "NODE" for b in range(6)] for a in range(6)
    ]
    wiring = Wiring(WORKSTATION)
    # PCIe 4 × 16 lanes of 1.969 GB/s
    assert wiring.link(Device(0, 2), Device(0, 3)).gbytes_per_s == pytest.approx(31.504)
    assert not wiring.link(Device(0, 0), Device(0, 1)).p2p
    assert wiring.link(Device(0, 0), Device(0, 2)).p2p
    assert [port.nic.name if port else None for port in wiring.uplinks[0]] == ["enp97s0"] * 6
    # Six GPUs share 10 Gbit/s.
    assert wiring.uplinks[0][0] is not None and wiring.uplinks[0][0].gbytes_per_s == pytest.approx(10 / 8 / 6)


def test_links_of_h100_hosts() -> None:
    wiring = Wiring(TWO_H100)
    for a in range(8):
        for b in range(8):
            assert a == b or wiring.link(Device(0, a), Device(0, b)) == NV18
            assert wiring.link(Device(0, a), Device(1, b)) == Link("NET", gbytes_per_s=50.0)
        port = wiring.uplinks[0][a]
        assert port is not None and (port.nic.name, port.kind, port.gbytes_per_s) == (f"mlx5_{a}", "PIX", 50.0)


def with_gpus(machine: Machine, change: Callable[[Gpu], Gpu]) -> Machine:
    return replace(machine, gpus=tuple(map(change, machine.gpus)))


def test_pcie_alone() -> None:
    """Without NVLink the two sockets show, and two GPUs of one host bridge."""
    bare = with_gpus(H100[0], lambda gpu: replace(gpu, nvlinks=()))
    assert symbols([bare])[0] == ["X", "NODE", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS"]
    first, second = bare.gpus[:2]
    beside = replace(second, path=(first.path[0], "0000:16:02.0", "0000:1f:00.0"))
    assert symbols([replace(bare, gpus=(first, beside))])[0][1] == "PHB"
    # A second switch below the first: its upstream port, its downstream port, the device.
    behind = replace(second, path=(*first.path[:3], "0000:18:02.0", "0000:1e:00.0", "0000:1f:00.0", "0000:20:00.0"))
    assert symbols([replace(bare, gpus=(first, behind))])[0][1] == "PXB"
    bridge = replace(second, path=(*first.path[:3], "0000:18:02.0", "0000:1e:00.0", "0000:1f:00.0"))
    assert symbols([replace(bare, gpus=(first, bridge))])[0][1] == "PXB"
    # A slower slot limits the pair.
    slow = replace(behind, pcie_generation=3, pcie_lanes=8)
    assert Wiring([replace(bare, gpus=(first, slow))]).link(Device(0, 0), Device(0, 1)).gbytes_per_s == pytest.approx(7.88)


def test_nvlinks_from_gpu_to_gpu() -> None:
    a, b, c, *_ = H100[0].gpus
    gpus = (
        replace(a, nvlinks=(NvLinks(b.address, 2, 2, 25.0), NvLinks(c.address, 1, 2, 25.0))),
        replace(b, nvlinks=(NvLinks(a.address, 2, 2, 25.0),)),
        replace(c, nvlinks=(NvLinks(a.address, 1, 2, 25.0),)),
    )
    bridged = replace(H100[0], gpus=gpus)
    assert symbols([bridged]) == [["X", "NV2", "NV1"], ["NV2", "X", "NODE"], ["NV1", "NODE", "X"]]
    # b and c meet through a: a ring of all three cannot avoid one NV1, but needs nothing slower.
    (tp,) = judged([bridged], "tp=3").crossings
    assert (tp.link, tp.ranks) == (Link("NV", 1, 2, gbytes_per_s=25.0), (0, 2))


def test_nvlink_that_leaves_the_host() -> None:
    hosts = [with_gpus(machine, lambda gpu: replace(gpu, fabric="ab/1")) for machine in TWO_H100]
    assert Wiring(hosts).link(Device(0, 0), Device(1, 7)) == NV18
    assert judged(hosts, "tp=16").warnings == ()
    other = [hosts[0], with_gpus(hosts[1], lambda gpu: replace(gpu, fabric="ab/2"))]
    assert Wiring(other).link(Device(0, 0), Device(1, 7)).kind == "NET"


def test_ports_are_shared_out() -> None:
    """Two ports for eight GPUs: each GPU has a quarter of the one on its socket; slower and dead ports do not count."""
    nics = (
        replace(TWO_H100[0].nics[0], up=False),
        replace(TWO_H100[0].nics[1], gbits_per_s=200.0),
        replace(TWO_H100[0].nics[5], gbits_per_s=200.0),
        TWO_H100[0].nics[8],
    )
    host = replace(TWO_H100[0], nics=nics)
    ports = [port for port in Wiring([host]).uplinks[0] if port]
    assert [(port.nic.name, port.gbytes_per_s) for port in ports] == [("mlx5_1", 6.25)] * 4 + [("mlx5_5", 6.25)] * 4
    # GPUs 1 and 2 have a port beside them, 0 and 3 take one each of two that are equally far.
    near = Wiring([replace(TWO_H100[0], nics=TWO_H100[0].nics[1:3])]).uplinks[0][:4]
    assert [port.nic.name for port in near if port] == ["mlx5_1", "mlx5_1", "mlx5_2", "mlx5_2"]
    # Between hosts the narrower end decides.
    assert Wiring([host, TWO_H100[1]]).link(Device(0, 0), Device(1, 0)) == Link("NET", gbytes_per_s=6.25)


def test_a_rate_that_is_not_known_is_not_invented() -> None:
    quiet = replace(TWO_H100[0], nics=())
    assert Wiring([quiet, TWO_H100[1]]).link(Device(0, 0), Device(1, 0)) == Link("NET")
    unnamed = with_gpus(WORKSTATION[0], lambda gpu: replace(gpu, pcie_generation=None))
    assert Wiring([unnamed]).link(Device(0, 2), Device(0, 3)) == Link("PIX")


# Meshes.


def test_placement() -> None:
    assert place(TWO_H100, Mesh(dp=2, tp=2)) == (Device(0, 0), Device(0, 1), Device(1, 0), Device(1, 1))
    assert place(TWO_H100, Mesh(dp=3), [1, 2]) == (Device(0, 0), Device(1, 0), Device(1, 1))
    cpus = replace(H100[0], gpus=())
    assert [device.index for device in place([cpus], Mesh(dp=4))] == [0, 0, 1, 1]


@pytest.mark.parametrize("shape", ["pp=2,dp=3,tp=4", "tp=5", "a=1,b=2,c=1"])
def test_groups_are_those_of_the_mesh(shape: str) -> None:
    mesh = Mesh.parse(shape)
    for axis in mesh.names:
        assert sorted(map(tuple, _groups(mesh, axis))) == mesh.groups([axis])


@pytest.mark.parametrize(
    ("machines", "mesh", "crossings"),
    [
        (H100, "dp=2,tp=4", {"dp": "NV18", "tp": "NV18"}),
        (TWO_H100, "dp=2,tp=8", {"dp": "NET", "tp": "NV18"}),
        (TWO_H100, "pp=2,dp=2,tp=4", {"pp": "NET", "dp": "NV18", "tp": "NV18"}),
        (TWO_H100, "pp=1,dp=16", {"dp": "NET"}),
        (WORKSTATION, "dp=2", {"dp": "NODE"}),
    ],
)
def test_meshes_with_nothing_to_say(machines: list[Machine], mesh: str, crossings: dict[str, str]) -> None:
    judgement = judged(machines, mesh)
    assert crossed(judgement) == crossings
    assert (judgement.warnings, judgement.advice, judgement.better) == ((), (), None)


def test_tp_over_the_network_is_warned_of_and_a_better_order_named() -> None:
    judgement = judged(TWO_H100, "tp=8,dp=2")
    assert crossed(judgement) == {"tp": "NET", "dp": "NV18"}
    assert judgement.warnings == (
        "tp talks in every layer but leaves the fastest links: ranks 0 and 8 meet over NET (50 GB/s), "
        "while the fastest here is NV18 (450 GB/s)",
    )
    assert judgement.better == Mesh(dp=2, tp=8)
    assert judgement.advice == ("order the axes as --mesh dp=2,tp=8: dp NV18 → NET, tp NET → NV18",)
    assert judged(TWO_H100, "sp=8,dp=2").better == Mesh(dp=2, sp=8)


def test_dp_goes_before_pp_to_the_fast_links() -> None:
    judgement = judged(TWO_H100, "dp=2,pp=2,tp=4")
    assert judgement.warnings == ()
    assert judgement.better == Mesh(pp=2, dp=2, tp=4)


def test_a_tp_that_is_too_large_for_any_order() -> None:
    judgement = judged(TWO_H100, "tp=16")
    assert judgement.better is None
    assert judgement.advice == (
        "no order of the axes keeps tp=16 on NV18: such links join sets of 8, 8 ranks; tp=8 or a divisor of it fits",
    )
    (tp,) = judgement.crossings
    assert tp.symbols == {"NET": 1}


def test_a_pair_without_peer_to_peer() -> None:
    judgement = judged(WORKSTATION, "dp=3,tp=2")
    (_, tp) = judgement.crossings
    assert (tp.symbols, tp.ranks) == ({"PIX": 2, "NODE": 1}, (0, 1))
    first, second = judgement.warnings
    assert "ranks 0 and 1 meet over NODE (31.5 GB/s, no peer-to-peer), while the fastest here is PIX" in first
    assert second == "tp: ranks 0 and 1 have no peer-to-peer, so what they exchange goes through host memory"
    assert judgement.advice == (
        "no order of the axes keeps tp=2 on PIX: such links join sets of 4, 1, 1 ranks; leave out the devices without such links",
    )
    chosen = [visible(WORKSTATION[0], "2,3,4,5")]
    assert judged(chosen, "dp=2,tp=2").warnings == ()


def test_links_that_are_down_and_ports_that_are_far() -> None:
    def damaged(gpu: Gpu) -> Gpu:
        return replace(gpu, nvlinks=(NvLinks("switch", 16, 4, 25.0),)) if gpu.index == 5 else gpu

    host = replace(with_gpus(TWO_H100[0], damaged), nics=TWO_H100[0].nics[:4])
    assert unhealthy(Wiring(TWO_H100)) == []
    found = unhealthy(Wiring([host, TWO_H100[1]]))
    assert found[1] == "h100-0: GPU 5 has 16 active NVLinks, another GPU has 18"
    assert found[0] == "h100-0: GPU 4 reaches the network only over mlx5_0 at another NUMA node"
    assert len(found) == 5
    assert unhealthy(Wiring([host])) == found[1:2]
    assert crossed(judged([host], "tp=8")) == {"tp": "NV16"}


@pytest.mark.parametrize(
    ("machines", "mesh", "message"),
    [
        (TWO_H100, "tp=3", "mesh tp=3 has 3 ranks, which do not divide over 2 hosts; use a multiple of 2"),
        (TWO_H100, "dp=4,tp=8", "puts 16 ranks on host h100-0, which shows 8 GPUs; use a mesh of 16 ranks, or more hosts"),
        ([H100[0], replace(H100[0], host="b", gpus=())], "dp=2", "host b shows no GPU, host h100-0 does"),
    ],
)
def test_meshes_that_do_not_fit(machines: list[Machine], mesh: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judged(machines, mesh)


def test_cpus_have_links_too() -> None:
    cpus = replace(H100[0], gpus=())
    judgement = judged([cpus], "dp=2,tp=2")
    assert crossed(judgement) == {"dp": "SYS", "tp": "MEM"}
    assert judged([cpus], "tp=2,dp=2").better == Mesh(dp=2, tp=2)
    assert crossed(judged([cpus, cpus], "dp=2,tp=2")) == {"dp": "NET", "tp": "SYS"}


# What a process may see.


def test_visible_devices() -> None:
    machine = WORKSTATION[0]
    assert visible(machine, None) == machine
    assert [gpu.index for gpu in visible(machine, "4,2").gpus] == [4, 2]
    assert [gpu.index for gpu in visible(machine, "3,-1,2").gpus] == [3]
    assert visible(machine, "").gpus == ()
    by_uuid = visible(machine, "GPU-3fa")
    assert by_uuid.gpus == machine.gpus and "by UUID" in by_uuid.notes[-1]


# The command.


def test_the_command_reads_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "topology.json"
    assert main(["doctor", "topology", "--from", str(FIXTURES / "h100"), "--mesh", "tp=8,dp=2", "--json", str(out)]) == 0
    first = capsys.readouterr().out
    known = json.loads(out.read_text())
    assert (len(known["devices"]), known["links"][0][8]["kind"]) == (16, "NET")
    assert known["mesh"]["better"] == "dp=2,tp=8"
    assert main(["doctor", "topology", "--from", str(out), "--mesh", "tp=8,dp=2"]) == 0
    assert capsys.readouterr().out == first


def test_the_command_on_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "topology"]) == 0
    assert "NUMA node 0" in capsys.readouterr().out


def test_hosts_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local rank 0 begins a host; the other ranks of a host have the same machine, and only rank 0 goes on."""
    a, b = TWO_H100
    everyone = [(0, a), (1, a), (0, b), (1, b), (2, b)]
    monkeypatch.setattr(command, "gathered", lambda machine, launch: everyone)
    for name, value in {"WORLD_SIZE": "5", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    assert command.here_and_elsewhere() == ([a, b], [2, 3])
    monkeypatch.setenv("RANK", "1")
    assert command.here_and_elsewhere() is None


@pytest.mark.nightly
def test_two_processes_show_their_host_once() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "-m", "phalanx", "doctor", "topology", "--mesh", "tp=2"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(FIXTURES.parents[2] / "src"), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("NUMA node 0 on socket") == 1
    assert "mesh tp=2: 2 ranks on CPUs, spread over the NUMA nodes, one host" in ended.stdout


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "topology", "--from", str(FIXTURES / "workstation"), "--mesh", "dp=7"]) == 2
    assert capsys.readouterr().err == (
        "phalanx: mesh dp=7 puts 7 ranks on host workstation, which shows 6 GPUs; use a mesh of 6 ranks, or more hosts\n"
    )


def drawn(machines: list[Machine], judgement: Judgement | None) -> list[str]:
    console = Console(width=200, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(topology_table(machines, judgement))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_table() -> None:
    lines = drawn(TWO_H100, judged(TWO_H100, "tp=8,dp=2"))
    assert "  GPUs 0 to 7: NVIDIA H100 80GB HBM3, PCIe 5 × 16 (63 GB/s), NVLink 4 × 18 to switches (450 GB/s)" in lines
    assert "GPU7 NV18 450 NV18 450 NV18 450 NV18 450 NV18 450 NV18 450 NV18 450        X" in lines
    assert "GPU4    SYS    SYS    SYS    SYS   PIX+   NODE   NODE   NODE  SYS" in lines
    assert "h100-1: as h100-0" in lines
    assert "  tp=8  2       NET (50 GB/s)    ranks 0 and 8  2 over NET" in lines
    assert "advice: order the axes as --mesh dp=2,tp=8: dp NV18 → NET, tp NET → NV18" in lines


def test_the_legend_explains_every_symbol_that_is_there() -> None:
    lines = drawn(WORKSTATION, judged(WORKSTATION, "dp=3,tp=2"))
    assert any("NODE 31.5*" in line for line in lines)
    explained = {line.split()[0] for line in lines if line.split()[1:2] and line.split()[0] in {*KINDS, "*", "+"}}
    assert explained == {"PIX", "NODE", "*", "+"}
