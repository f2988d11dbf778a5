"""The links between the devices of one or several Machines: what kind each is, and what it can carry at most.

Kinds have the names of `nvidia-smi topo -m`. A rate is that of the narrowest part that is known, one way, before any protocol:
an upper bound. Measured rates are the business of `phalanx doctor links`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.observe.machine import Gpu, Machine, Nic

KINDS = {
    "NV": "NVLink: # links directly, or through NVSwitches",
    "MEM": "memory of one NUMA node",
    "PIX": "PCIe through one switch",
    "PXB": "PCIe through several switches, without a host bridge",
    "PHB": "PCIe through one host bridge (the CPU)",
    "NODE": "PCIe through several host bridges of one NUMA node",
    "SYS": "between NUMA nodes: the link between sockets, or a part of it",
    "NET": "between hosts, over the network",
}
"""From the closest to the farthest: the order is what links are judged by."""
ORDER = {kind: order for order, kind in enumerate(KINDS)}

PCIE_LANE_GBYTES = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""One lane one way after line coding, by PCIe generation (PCI Express base specifications)."""


@dataclass(frozen=True)
class Link:
    """How two devices reach each other.

    nvlinks       how many NVLinks, of what `generation`; 0 for other kinds
    gbytes_per_s  one way, None if unknown
    p2p           False where the driver refuses peer-to-peer, so that copies go through host memory
    """

    kind: str
    nvlinks: int = 0
    generation: int | None = None
    switched: bool = False
    gbytes_per_s: float | None = None
    p2p: bool = True

    @property
    def symbol(self) -> str:
        return f"NV{self.nvlinks}" if self.kind == "NV" else self.kind

    @property
    def distance(self) -> tuple[int, float]:
        """Smaller is better: by kind, then by rate."""
        return ORDER[self.kind], -(self.gbytes_per_s or 0.0)

    def __str__(self) -> str:
        rate = "rate unknown" if self.gbytes_per_s is None else f"{self.gbytes_per_s:.4g} GB/s"
        return f"{self.symbol} ({rate}{'' if self.p2p else ', no peer-to-peer'})"


@dataclass(frozen=True)
class Device:
    """What a rank runs on: GPU `index` of a host or, on a host without GPUs, its NUMA node at that position."""

    host: int
    index: int


@dataclass(frozen=True)
class Uplink:
    """The network port that a GPU uses, how it gets there, and its part of the port's rate: others may use the same."""

    nic: Nic
    kind: str
    gbytes_per_s: float | None


class Wiring:
    """The links of some hosts, listed in the order of their ranks."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = tuple(machines)
        self.uplinks = [uplinks(machine) for machine in machines]

    def link(self, a: Device, b: Device) -> Link:
        """Between two devices of these hosts."""
        here, there = self.machines[a.host], self.machines[b.host]
        if not here.gpus or not there.gpus:
            return Link("MEM" if a == b else "SYS") if a.host == b.host else self._network(a, b)
        first, second = here.gpus[a.index], there.gpus[b.index]
        if a.host == b.host:
            return _between_gpus(here, first, second)
        if first.fabric is not None and first.fabric == second.fabric:
            return _switched(first, second)
        return self._network(a, b)

    def _network(self, a: Device, b: Device) -> Link:
        rates = [self._to_network(device) for device in (a, b)]
        return Link("NET", gbytes_per_s=None if None in rates else min(rate for rate in rates if rate is not None))

    def _to_network(self, device: Device) -> float | None:
        """GB/s between a GPU, or a host without GPUs, and the network."""
        machine = self.machines[device.host]
        if machine.gpus:
            port = self.uplinks[device.host][device.index]
            return None if port is None else port.gbytes_per_s
        return max((nic.gbits_per_s / 8 for nic in machine.nics if nic.up and nic.gbits_per_s), default=None)


def to_nic(machine: Machine, gpu: Gpu, nic: Nic) -> str:
    """Kind of the way from a GPU to a port."""
    return _pci_kind(machine, gpu.path, nic.path, gpu.numa, nic.numa)


def uplinks(machine: Machine) -> list[Uplink | None]:
    """The port of each GPU: among the fastest that are up the nearest, then the one that fewest other GPUs use."""
    up = [nic for nic in machine.nics if nic.up]
    fastest = max((nic.gbits_per_s or 0.0 for nic in up), default=0.0)
    candidates = [nic for nic in up if (nic.gbits_per_s or 0.0) == fastest]
    if not candidates:
        return [None] * len(machine.gpus)
    users: Counter[str] = Counter()
    chosen = []
    for gpu in machine.gpus:
        nic = min(candidates, key=lambda nic: (ORDER[to_nic(machine, gpu, nic)], users[nic.name]))
        users[nic.name] += 1
        chosen.append((gpu, nic))
    return [
        Uplink(nic, to_nic(machine, gpu, nic), nic.gbits_per_s / 8 / users[nic.name] if nic.gbits_per_s else None)
        for gpu, nic in chosen
    ]


def visible(machine: Machine, devices: str | None) -> Machine:
    """The machine as a process sees it: the GPUs of CUDA_VISIBLE_DEVICES, in its order. None is all of them.

    As CUDA does, stops at the first entry that is not the number of a GPU; a UUID gives a note instead.
    """
    if devices is None or not machine.gpus:
        return machine
    entries = [entry.strip() for entry in devices.split(",") if entry.strip()]
    if any(not entry.removeprefix("-").isdecimal() for entry in entries):
        note = f"CUDA_VISIBLE_DEVICES={devices} names GPUs by UUID; shown are all of them, in NVML's order"
        return replace(machine, notes=(*machine.notes, note))
    gpus: list[Gpu] = []
    for entry in entries:
        if not 0 <= int(entry) < len(machine.gpus):
            break
        gpus.append(machine.gpus[int(entry)])
    note = f"CUDA_VISIBLE_DEVICES={devices}: {len(gpus)} of {len(machine.gpus)} GPUs"
    return replace(machine, gpus=tuple(gpus), notes=(*machine.notes, note))


def _between_gpus(machine: Machine, a: Gpu, b: Gpu) -> Link:
    p2p = b.address not in a.no_p2p and a.address not in b.no_p2p
    for links in a.nvlinks:
        if links.peer == b.address:
            rate = links.count * links.gbytes_per_s if links.gbytes_per_s else None
            return Link("NV", links.count, links.generation, gbytes_per_s=rate, p2p=p2p)
    if _to_switch(a) and _to_switch(b):
        return replace(_switched(a, b), p2p=p2p)
    kind = _pci_kind(machine, a.path, b.path, a.numa, b.numa)
    rates = [rate for rate in map(pcie_gbytes, (a, b)) if rate is not None]
    return Link(kind, gbytes_per_s=min(rates, default=None), p2p=p2p)


def _to_switch(gpu: Gpu) -> int:
    return sum(links.count for links in gpu.nvlinks if links.peer == "switch")


def _switched(a: Gpu, b: Gpu) -> Link:
    """Through NVSwitches a pair may use all links of the GPU that has fewer."""
    fewer = min(a, b, key=_to_switch)
    links = next(links for links in fewer.nvlinks if links.peer == "switch")
    rate = links.count * links.gbytes_per_s if links.gbytes_per_s else None
    return Link("NV", links.count, links.generation, switched=True, gbytes_per_s=rate)


def _pci_kind(machine: Machine, a: Sequence[str], b: Sequence[str], a_numa: int | None, b_numa: int | None) -> str:
    """By where two ways up the PCI tree meet."""
    if not a or not b or a[0] != b[0]:
        one_node = len(machine.numa) <= 1 or (a_numa is not None and a_numa == b_numa)
        return "NODE" if one_node else "SYS"
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    if shared == 1:
        return "PHB"
    # Under one switch each way has its own port of the switch, then the device.
    return "PIX" if max(len(a), len(b)) - shared <= 2 else "PXB"


def pcie_gbytes(gpu: Gpu) -> float | None:
    """GB/s of a GPU's PCIe slot, one way."""
    lane = PCIE_LANE_GBYTES.get(gpu.pcie_generation or 0)
    return lane * gpu.pcie_lanes if lane is not None and gpu.pcie_lanes else None
