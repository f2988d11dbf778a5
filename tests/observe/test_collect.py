"""Reading a machine: /sys as a tree of files, NVML as a module of functions, and the JSON that keeps what was read."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.observe.collect import collect, cpu_list
from phalanx.observe.machine import Cache, Gpu, Machine, Nic, NumaNode, NvLinks, load_machines, machine_from
from phalanx.observe.topology import Device, Link, Wiring

FIXTURES = Path(__file__).parent / "fixtures"
MACHINES = load_machines(FIXTURES / "workstation") + load_machines(FIXTURES / "h100")


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def pointing(root: Path, name: str, target: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).symlink_to(root / target)


PCI = "devices/pci0000:16/0000:16:01.0/0000:17:00.0"
GPU_AT, NIC_AT, LAN_AT = (
    f"{PCI}/0000:18:00.0/0000:1b:00.0",
    f"{PCI}/0000:18:01.0/0000:1c:00.0",
    "devices/pci0000:00/0000:00:1c.4",
)


@pytest.fixture
def sys_tree(tmp_path: Path) -> Path:
    """Two sockets of two cores with two threads each; one GPU and one InfiniBand port under a switch; three other interfaces."""
    root = tmp_path / "sys"
    write(root, {"devices/system/cpu/online": "0-7", "devices/system/node/online": "0-1"})
    for cpu in range(8):
        here, socket, core = f"devices/system/cpu/cpu{cpu}", cpu // 2 % 2, cpu % 2
        mates = f"{cpu % 4},{cpu % 4 + 4}"
        write(root, {f"{here}/topology/physical_package_id": socket, f"{here}/topology/core_id": core})
        write(
            root,
            {
                f"{here}/cache/index0/{k}": v
                for k, v in {"level": 1, "type": "Data", "size": "48K", "shared_cpu_list": mates}.items()
            },
        )
        kinds = {"level": 1, "type": "Instruction", "size": "32K", "shared_cpu_list": mates}
        write(root, {f"{here}/cache/index1/{k}": v for k, v in kinds.items()})
        shared = {"level": 3, "type": "Unified", "size": "105M", "shared_cpu_list": f"{2 * socket}-{2 * socket + 1}"}
        write(root, {f"{here}/cache/index2/{k}": v for k, v in shared.items()})
    for node in range(2):
        here = f"devices/system/node/node{node}"
        write(root, {f"{here}/cpulist": f"{2 * node}-{2 * node + 1},{2 * node + 4}-{2 * node + 5}"})
        write(
            root,
            {f"{here}/meminfo": f"Node {node} MemTotal:       1024 kB", f"{here}/distance": "10 21" if not node else "21 10"},
        )
    write(root, {f"{GPU_AT}/numa_node": 1, f"{NIC_AT}/numa_node": 1, f"{LAN_AT}/numa_node": -1})
    pointing(root, "bus/pci/devices/0000:1b:00.0", GPU_AT)
    pointing(root, "class/infiniband/mlx5_0/device", NIC_AT)
    port = "class/infiniband/mlx5_0/ports/1"
    write(root, {f"{port}/link_layer": "InfiniBand", f"{port}/rate": "400 Gb/sec (4X NDR)", f"{port}/state": "4: ACTIVE"})
    pointing(root, "class/net/ib0/device", NIC_AT)  # the same hardware as mlx5_0
    pointing(root, "class/net/eno1/device", LAN_AT)
    write(root, {"class/net/eno1/speed": 10000, "class/net/eno1/operstate": "down", "class/net/eno1/type": 1})
    pointing(root, "class/net/eth0/device", "devices/virtio0")
    write(
        root,
        {"devices/virtio0/vendor": 1, "class/net/eth0/speed": -1, "class/net/eth0/operstate": "up", "class/net/eth0/type": 1},
    )
    write(root, {"class/net/lo/operstate": "unknown"})  # no hardware
    write(tmp_path / "proc", {"cpuinfo": "processor\t: 0\nmodel name\t: Xeon 9"})
    return tmp_path


def read(tree: Path, nvml: Any) -> Machine:
    return collect(tree / "sys", tree / "proc", nvml, host="here")


class Refused(Exception):
    """In place of pynvml.NVMLError."""


class FakeNvml(SimpleNamespace):
    """Two GPUs: 12 NVLinks of each into a switch, of which one is down on GPU 1; no peer-to-peer from GPU 0."""

    NVMLError = Refused
    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED, NVML_P2P_STATUS_OK, NVML_SUCCESS = 18, 1, 0, 0
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90
    bus = ("00000000:1B:00.0", "00000000:5A:00.0")

    class c_nvmlGpuFabricInfo_t(ctypes.Structure):
        _fields_ = [
            ("clusterUuid", ctypes.c_uint8 * 16),
            ("status", ctypes.c_int),
            ("cliqueId", ctypes.c_uint32),
            ("state", ctypes.c_uint8),
        ]

    def __init__(
        self, *, capability: int = 8, megabytes: int = 25781, peer: str = "00000000:C4:00.0", cluster: int = 0
    ) -> None:
        self.capability, self.megabytes, self.peer, self.cluster = capability, megabytes, peer, cluster
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.bus[gpu].encode())

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return "NVIDIA A100-SXM4-80GB"

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, what: int) -> int:
        assert what == 0 and a != b
        return 4 if a == 0 else 0

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: int) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: int) -> int:
        if gpu == 1:
            raise Refused
        return 16

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        if link >= 12:
            raise Refused("Invalid Argument")
        return int((gpu, link) != (1, 3))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.peer if gpu == 0 else self.bus[0] if self.peer == self.bus[1] else self.peer)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: int) -> tuple[int, int]:
        return self.capability, 0

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[int]) -> list[SimpleNamespace]:
        assert fields == [90]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.megabytes))]

    def nvmlDeviceGetGpuFabricInfo(self, gpu: int, info: Any) -> None:
        info._obj.state, info._obj.cliqueId = 3, 7
        info._obj.clusterUuid[15] = self.cluster


def test_collect(sys_tree: Path) -> None:
    nvml = FakeNvml()
    machine = read(sys_tree, nvml)
    switch = ("pci0000:16", "0000:16:01.0", "0000:17:00.0")
    assert machine == Machine(
        host="here",
        processor="Xeon 9",
        sockets=2,
        cores=4,
        threads=8,
        caches=(Cache(1, "data", 48 * 1024, 4), Cache(3, "unified", 105 * 1024**2, 2)),
        numa=(NumaNode(0, 0, "0-1,4-5", 2**20, (10, 21)), NumaNode(1, 1, "2-3,6-7", 2**20, (21, 10))),
        gpus=(
            Gpu(
                index=0,
                name="NVIDIA A100-SXM4-80GB",
                address="0000:1b:00.0",
                path=(*switch, "0000:18:00.0", "0000:1b:00.0"),
                numa=1,
                pcie_generation=4,
                pcie_lanes=16,
                nvlinks=(NvLinks("switch", 12, 3, 25.0),),
                no_p2p=("0000:5a:00.0",),
            ),
            Gpu(1, "NVIDIA A100-SXM4-80GB", "0000:5a:00.0", (), None, 4, None, (NvLinks("switch", 11, 3, 25.0),)),
        ),
        nics=(
            Nic("mlx5_0", "infiniband", True, 400.0, 1, (*switch, "0000:18:01.0", "0000:1c:00.0")),
            Nic("eno1", "ethernet", False, 10.0, None, ("pci0000:00", "0000:00:1c.4")),
            Nic("eth0", "ethernet", True, None, None, ()),
        ),
    )
    assert nvml.open == 0
    way = Wiring([machine]).link(Device(0, 0), Device(0, 1))
    # 11 of the links, and one end that cannot read the other
    assert way == Link("NV", 11, 3, switched=True, gbytes_per_s=275.0, p2p=False)
    assert [port.kind for port in Wiring([machine]).uplinks[0] if port] == ["PIX", "SYS"]


def test_nvlinks_by_what_they_end_at(sys_tree: Path) -> None:
    first, second = read(sys_tree, FakeNvml(peer=FakeNvml.bus[1])).gpus
    assert first.nvlinks == (NvLinks("0000:5a:00.0", 12, 3, 25.0),)
    assert second.nvlinks == (NvLinks("0000:1b:00.0", 11, 3, 25.0),)


@pytest.mark.parametrize(
    ("capability", "megabytes", "expected"),
    [
        (9, 26562, (4, 25.0)),  # H100: the line rate has the encoding in it
        (10, 53125, (5, 50.0)),
        (8, 14062, (3, 14.062)),  # A40: a bridge slower than the generation's payload
        (8, 0, (3, 25.0)),  # a driver without the field
        (12, 0, (None, None)),
    ],
)
def test_rate_of_an_nvlink(sys_tree: Path, capability: int, megabytes: int, expected: tuple[int | None, float | None]) -> None:
    (links,) = read(sys_tree, FakeNvml(capability=capability, megabytes=megabytes)).gpus[0].nvlinks
    assert (links.generation, links.gbytes_per_s) == expected


def test_fabric_across_hosts(sys_tree: Path) -> None:
    assert read(sys_tree, FakeNvml()).gpus[0].fabric is None
    assert read(sys_tree, FakeNvml(cluster=0xAB)).gpus[0].fabric == "0" * 30 + "ab/7"


def test_a_driver_that_is_missing_is_a_note(sys_tree: Path) -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:
            raise Refused("NVML Shared Library Not Found")

    machine = read(sys_tree, NoDriver())
    assert (machine.gpus, machine.threads) == ((), 8)
    assert machine.notes == ("no GPU is visible: NVML says NVML Shared Library Not Found",)


def test_an_empty_system_is_no_error(tmp_path: Path) -> None:
    machine = read(tmp_path, FakeNvml())
    assert machine.gpus[0].path == () and machine.sockets == 1
    assert any("no CPU topology" in note for note in machine.notes)


def test_cpu_lists() -> None:
    assert cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert cpu_list("") == []


# Files.


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.host)
def test_json_round_trip(machine: Machine) -> None:
    assert machine_from(json.loads(json.dumps(machine.as_json())), "x") == machine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "x has version 2 of a machine, this program reads 1"),
        ({"sockets": "two"}, "x: Machine.sockets is 'two', not of the type int"),
        ({"gpus": {}}, "x: Machine.gpus is {}, not a list"),
        ({"colour": 1}, "x: Machine has no 'colour'; it has host, processor"),
        ({"caches": [{"level": 1, "type": "data"}]}, "x: Machine.caches: Cache lacks 'bytes', 'count'"),
    ],
)
def test_json_that_is_no_machine(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        machine_from({**MACHINES[0].as_json(), **change}, "x")


def test_files_that_hold_no_machine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no \.json file"):
        load_machines(tmp_path)
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match="does not describe a machine"):
        load_machines(tmp_path)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is not JSON"):
        load_machines(tmp_path)
