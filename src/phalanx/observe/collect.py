"""This host as a Machine: GPUs from NVML, everything else from /sys. Reads only; judges nothing.

A library, driver or file that is missing is a note in the Machine, not an error: a laptop has a topology too.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from phalanx.observe.machine import Cache, Gpu, Machine, Nic, NumaNode, NvLinks

T = TypeVar("T")


def collect(sys: Path = Path("/sys"), proc: Path = Path("/proc"), nvml: Any = None, host: str | None = None) -> Machine:
    """The machine that this runs on. `nvml` is a module with the functions of pynvml, by default pynvml itself."""
    notes: list[str] = []
    gpus = _gpus(nvml, sys, notes)
    cpu = sys / "devices/system/cpu"
    cpus = cpu_list(_text(cpu / "online") or "")
    places = {(_number(cpu / f"cpu{n}/topology/physical_package_id"), _number(cpu / f"cpu{n}/topology/core_id")) for n in cpus}
    numa = _numa(sys, cpu)
    if not cpus:
        notes.append(f"no CPU topology: {cpu / 'online'} is not there")
    return Machine(
        host=host if host is not None else platform.node(),
        processor=_processor(proc),
        sockets=len({package for package, _ in places}) or 1,
        cores=len(places) or os.cpu_count() or 1,
        threads=len(cpus) or os.cpu_count() or 1,
        caches=_caches(cpu, cpus),
        numa=numa,
        gpus=gpus,
        nics=_nics(sys),
        notes=tuple(notes),
    )


# Processors and memory.


def cpu_list(text: str) -> list[int]:
    """`0-3,8` → [0, 1, 2, 3, 8], the kernel's way to write sets of CPUs and nodes."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _processor(proc: Path) -> str:
    for line in (_text(proc / "cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _numa(sys: Path, cpu: Path) -> tuple[NumaNode, ...]:
    nodes = []
    folder = sys / "devices/system/node"
    for number in cpu_list(_text(folder / "online") or ""):
        here = folder / f"node{number}"
        cpus = _text(here / "cpulist") or ""
        first = next(iter(cpu_list(cpus)), None)  # a node may be memory alone, as on CXL
        socket = None if first is None else _number(cpu / f"cpu{first}/topology/physical_package_id")
        kilobytes = next((line.split()[3] for line in (_text(here / "meminfo") or "").splitlines() if "MemTotal" in line), "0")
        distances = tuple(int(word) for word in (_text(here / "distance") or "").split())
        nodes.append(NumaNode(number, socket or 0, cpus, int(kilobytes) * 1024, distances))
    return tuple(nodes)


def _caches(cpu: Path, cpus: list[int]) -> tuple[Cache, ...]:
    """Every cache once, though each of its CPUs lists it; instruction caches left out."""
    found = set()
    for number in cpus:
        for index in (cpu / f"cpu{number}/cache").glob("index*"):
            kind, size = _text(index / "type") or "", _text(index / "size") or ""
            if kind != "Instruction" and size:
                found.add((_number(index / "level") or 0, kind.lower(), _cache_bytes(size), _text(index / "shared_cpu_list")))
    counts = Counter((level, kind, size) for level, kind, size, _ in found)
    return tuple(Cache(level, kind, size, count) for (level, kind, size), count in sorted(counts.items()))


def _cache_bytes(text: str) -> int:
    units = {"K": 1024, "M": 1024**2, "G": 1024**3}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


# The PCI tree and the network.


def pci_path(device: Path) -> tuple[str, ...]:
    """What lies above a device in the PCI tree, from its host bridge down to itself; empty if it is not on PCI."""
    parts = Path(os.path.realpath(device)).parts
    roots = [place for place, part in enumerate(parts) if part.startswith("pci") and ":" in part]
    if not roots:
        return ()
    return (parts[roots[0]], *(part for part in parts[roots[0] + 1 :] if part.count(":") == 2 and "." in part))


def _nics(sys: Path) -> tuple[Nic, ...]:
    """InfiniBand and RoCE devices by their verbs name, then the other network interfaces that have hardware."""
    nics = []
    for here in sorted((sys / "class/infiniband").glob("*")):
        port = here / "ports/1"
        layer = (_text(port / "link_layer") or "InfiniBand").lower()
        rate = (_text(port / "rate") or "").split()
        nics.append(
            Nic(
                name=here.name,
                kind="infiniband" if layer == "infiniband" else "ethernet",
                up="ACTIVE" in (_text(port / "state") or ""),
                gbits_per_s=float(rate[0]) if rate else None,
                numa=_node(here / "device"),
                path=pci_path(here / "device"),
            )
        )
    seen = {nic.path for nic in nics if nic.path}
    for here in sorted((sys / "class/net").glob("*")):
        path = pci_path(here / "device")
        if not (here / "device").exists() or path in seen:
            continue
        megabits = _number(here / "speed")  # -1 where nobody knows, as on virtual machines
        nics.append(
            Nic(
                name=here.name,
                kind="ethernet" if _number(here / "type") == 1 else "infiniband",
                up=_text(here / "operstate") == "up",
                gbits_per_s=megabits / 1000 if megabits and megabits > 0 else None,
                numa=_node(here / "device"),
                path=path,
            )
        )
    return tuple(nics)


def _node(device: Path) -> int | None:
    node = _number(device / "numa_node")
    return None if node is None or node < 0 else node


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # not there, or, for the speed of an interface that is down, not readable
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else None


# GPUs.

NVLINK_GBYTES = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
"""Payload of one link one way by NVLink generation, NVIDIA's figures. NVML reports the line rate, encoding included: 26.6 for 25."""
GENERATIONS = {6: 1, 7: 2, 8: 3, 9: 4, 10: 5}
"""NVLink generation by compute capability. Drivers differ in how they number what nvmlDeviceGetNvLinkVersion returns."""
P2P_READ = 0
"""pynvml's own NVML_P2P_CAPS_INDEX_READ is a tuple, by a comma too many."""
FABRIC_COMPLETED = 3


def _gpus(nvml: Any, sys: Path, notes: list[str]) -> tuple[Gpu, ...]:
    if nvml is None:
        try:
            import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

            nvml = pynvml
        except ImportError:
            notes.append("no GPU was looked for: pynvml is not installed; pip install 'phalanx[nvml]'")
            return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        notes.append(f"no GPU is visible: NVML says {error}")
        return ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        addresses = [_address(nvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
        return tuple(_gpu(nvml, index, handles, addresses, sys) for index in range(len(handles)))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, handles: list[Any], addresses: list[str], sys: Path) -> Gpu:
    handle, device = handles[index], sys / "bus/pci/devices" / addresses[index]
    name = nvml.nvmlDeviceGetName(handle)
    no_p2p = []
    for other, peer in zip(addresses, handles, strict=True):
        status = (
            None if other == addresses[index] else _asked(nvml, lambda p=peer: nvml.nvmlDeviceGetP2PStatus(handle, p, P2P_READ))
        )
        if status not in (None, nvml.NVML_P2P_STATUS_OK):
            no_p2p.append(other)
    return Gpu(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        address=addresses[index],
        path=pci_path(device),
        numa=_node(device),
        pcie_generation=_asked(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        pcie_lanes=_asked(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        nvlinks=_nvlinks(nvml, handle, addresses),
        fabric=_asked(nvml, lambda: _fabric(nvml, handle)),
        no_p2p=tuple(no_p2p),
    )


def _nvlinks(nvml: Any, handle: Any, addresses: list[str]) -> tuple[NvLinks, ...]:
    ends: Counter[str] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _asked(nvml, lambda k=link: nvml.nvmlDeviceGetNvLinkState(handle, k)) != nvml.NVML_FEATURE_ENABLED:
            continue
        remote = _asked(nvml, lambda k=link: _address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, k).busId))
        # What is not a GPU of this host is a switch; through it every GPU on it is reached.
        ends[remote if remote in addresses else "switch"] += 1
    if not ends:
        return ()
    capability = _asked(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    generation = GENERATIONS.get(capability[0]) if capability else None
    rates = [rate for rate in (NVLINK_GBYTES.get(generation or 0), _line_rate(nvml, handle)) if rate]
    return tuple(NvLinks(peer, count, generation, min(rates, default=None)) for peer, count in sorted(ends.items()))


def _line_rate(nvml: Any, handle: Any) -> float | None:
    """GB/s of one link one way with its encoding: slower than the generation's payload on workstation bridges."""
    field = nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
    values = _asked(nvml, lambda: nvml.nvmlDeviceGetFieldValues(handle, [field]))
    if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return float(values[0].value.uiVal) / 1000 or None


def _fabric(nvml: Any, handle: Any) -> str | None:
    """Cluster and clique of a GPU whose NVLinks leave the host (NVL72); None for all others, whose cluster is all zeros."""
    if not hasattr(nvml, "c_nvmlGpuFabricInfo_t"):  # nvidia-ml-py before 12.535
        return None
    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    cluster = bytes(info.clusterUuid).hex()
    if info.state != FABRIC_COMPLETED or not cluster.strip("0"):
        return None
    return f"{cluster}/{info.cliqueId}"


def _address(bus_id: bytes | str) -> str:
    """`00000000:1B:00.0`, as NVML writes it, → `0000:1b:00.0`, as /sys does."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _asked(nvml: Any, question: Callable[..., T]) -> T | None:
    """The answer, or None where this driver or GPU has none."""
    try:
        return question()
    except nvml.NVMLError:
        return None
