"""One host as plain data: processors, GPUs, network ports, and what of their wiring the system tells. No torch, no judgement.

`collect` makes one of the machine it runs on; a JSON file holds one, so that a cluster can be read on a laptop.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

VERSION = 1
"""Of the JSON form; goes up when a field changes its meaning."""


@dataclass(frozen=True)
class Cache:
    """One kind of cache. `count` of them in the machine, `bytes` each."""

    level: int
    type: str
    bytes: int
    count: int


@dataclass(frozen=True)
class NumaNode:
    """Memory with the CPUs next to it. `cpus` as the kernel writes lists, `0-3,8`; `distances` to every node, 10 is local."""

    id: int
    socket: int
    cpus: str
    bytes: int
    distances: tuple[int, ...] = ()


@dataclass(frozen=True)
class NvLinks:
    """The active NVLinks of a GPU that end at one place: `peer` is the PCI address of another GPU, or "switch".

    gbytes_per_s  of one link, one way; None if unknown
    """

    peer: str
    count: int
    generation: int | None
    gbytes_per_s: float | None


@dataclass(frozen=True)
class Gpu:
    """One GPU, in NVML's order.

    address     PCI, as in /sys: 0000:1b:00.0
    path        what lies above it in the PCI tree, from the host bridge (`pci0000:16`) down to the device itself
    numa        the NUMA node next to it, None if unknown
    fabric      the NVLink domain across hosts that it belongs to, None if it ends at the host's doors
    no_p2p      addresses of the GPUs that it cannot read directly
    """

    index: int
    name: str
    address: str
    path: tuple[str, ...]
    numa: int | None
    pcie_generation: int | None
    pcie_lanes: int | None
    nvlinks: tuple[NvLinks, ...] = ()
    fabric: str | None = None
    no_p2p: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nic:
    """A network port with hardware behind it. `gbits_per_s` is None if it does not say; kind is infiniband or ethernet."""

    name: str
    kind: str
    up: bool
    gbits_per_s: float | None
    numa: int | None
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """One host. `notes` say what could not be seen, and why."""

    host: str
    processor: str
    sockets: int
    cores: int
    threads: int
    caches: tuple[Cache, ...]
    numa: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    notes: tuple[str, ...] = ()

    def socket(self, numa: int | None) -> int | None:
        """The socket of a NUMA node; None if that is unknown."""
        return next((node.socket for node in self.numa if node.id == numa), None)

    def as_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}


def machine_from(data: object, where: str) -> Machine:
    """The Machine that `as_json` wrote. `where` is named in the ValueError for anything else."""
    if not isinstance(data, dict) or "host" not in data:
        raise ValueError(f"{where} does not describe a machine: it has no key 'host'")
    if data.get("version") != VERSION:
        raise ValueError(
            f"{where} has version {data.get('version')!r} of a machine, this program reads {VERSION}; record it anew"
        )
    return _made(Machine, {key: value for key, value in data.items() if key != "version"}, where)


def load_machines(path: Path) -> list[Machine]:
    """All machines of a JSON file, or of the JSON files in a folder in the order of their names.

    A file holds one machine, or an object with several under `machines`, as `phalanx doctor topology --json` writes it.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} has no .json file that could describe a machine")
    machines = []
    for file in files:
        try:
            data = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not JSON: {error}") from None
        found = data["machines"] if isinstance(data, dict) and isinstance(data.get("machines"), list) else [data]
        machines += [machine_from(item, str(file)) for item in found]
    return machines


T = TypeVar("T")


def _made(cls: type[T], data: object, where: str) -> T:
    """A dataclass out of what its asdict gave, with lists made tuples again."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: {cls.__name__} is {data!r}, not an object with keys")
    declared = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    unknown = [key for key in data if key not in declared]
    if unknown:
        raise ValueError(f"{where}: {cls.__name__} has no {unknown[0]!r}; it has {', '.join(declared)}")
    missing = [key for key, field in declared.items() if key not in data and field.default is MISSING]
    if missing:
        raise ValueError(f"{where}: {cls.__name__} lacks {', '.join(map(repr, missing))}")
    hints = get_type_hints(cls)
    return cls(**{key: _value(hints[key], value, f"{where}: {cls.__name__}.{key}") for key, value in data.items()})


def _value(hint: Any, value: object, where: str) -> object:
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} is {value!r}, not a list")
        return tuple(_value(get_args(hint)[0], item, where) for item in value)
    if is_dataclass(hint):
        return _made(cast("type[Any]", hint), value, where)
    # JSON writes a whole float without its point.
    if not isinstance(value, hint) and not (isinstance(value, int) and isinstance(1.0, hint)):
        raise ValueError(f"{where} is {value!r}, not of the type {getattr(hint, '__name__', hint)}")
    return value
