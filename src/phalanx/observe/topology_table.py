"""Machines, their links and a mesh on them, drawn for a terminal."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.observe.machine import Gpu, Machine, Nic
from phalanx.observe.placement import Judgement
from phalanx.observe.topology import KINDS, Device, Link, Wiring, pcie_gbytes, to_nic
from phalanx.train.metrics import bytes_text

STYLES = {"NV": "bold green", "MEM": "bold green", "PIX": "green", "PXB": "cyan", "PHB": "cyan", "NODE": "yellow"}
FAR = "magenta"
"""Symbols say everything; colours only repeat it."""


def topology_table(machines: Sequence[Machine], judgement: Judgement | None) -> RenderableType:
    """Each kind of host once, then the mesh, then what the symbols mean."""
    wiring = Wiring(machines)
    parts: list[RenderableType] = []
    symbols: set[str] = set()
    for host, machine in enumerate(machines):
        twin = next((k for k in range(host) if _alike(machines[k], machine)), None)
        if twin is not None:
            parts.append(Text(f"{machine.host}: as {machines[twin].host}"))
            continue
        parts += [*_head(machine), ""]
        if machine.gpus:
            parts += [_matrix(wiring, host, symbols), ""]
            parts += [_port_matrix(wiring, host, symbols), ""] if machine.nics else []
    if judgement is not None:
        symbols |= {crossing.link.kind for crossing in judgement.crossings}
        parts += _mesh(machines, judgement, symbols)
    parts += _legend(machines, symbols)
    return Group(*parts)


def _alike(a: Machine, b: Machine) -> bool:
    return replace(a, host="") == replace(b, host="")


def _head(machine: Machine) -> list[RenderableType]:
    title = Text.assemble((machine.host, "bold"), f": {machine.processor}, ", _count(machine.sockets, "socket"))
    title.append(f", {_count(machine.cores, 'core')}, {_count(machine.threads, 'thread')}")
    lines = [title]
    caches = [f"L{c.level}{c.type[0] if c.type != 'unified' else ''} {c.count} × {bytes_text(c.bytes)}" for c in machine.caches]
    if caches:
        lines.append(Text(f"  caches: {', '.join(caches)}"))
    for node in machine.numa:
        gpus = [str(gpu.index) for gpu in machine.gpus if gpu.numa == node.id]
        nics = [nic.name for nic in machine.nics if nic.numa == node.id]
        near = [f"CPUs {node.cpus or 'none'}", bytes_text(node.bytes)]
        near += [f"GPU {', '.join(gpus)}"] if gpus else []
        near += [f"ports {', '.join(nics)}"] if nics else []
        lines.append(Text(f"  NUMA node {node.id} on socket {node.socket}: {'; '.join(near)}"))
    lines += _together("port", [(nic.name, _port_text(nic)) for nic in machine.nics])
    lines += _together("GPU", [(str(gpu.index), _gpu_text(gpu)) for gpu in machine.gpus])
    lines += [Text(f"  note: {note}") for note in machine.notes]
    return list(lines)


def _together(what: str, described: Sequence[tuple[str, str]]) -> list[Text]:
    """One line for each run of neighbours that read the same."""
    lines = []
    for text, run in itertools.groupby(described, key=lambda item: item[1]):
        names = [name for name, _ in run]
        who = f"{what} {names[0]}" if len(names) == 1 else f"{what}s {names[0]} to {names[-1]}"
        lines.append(Text(f"  {who}: {text}"))
    return lines


def _port_text(nic: Nic) -> str:
    rate = "rate unknown" if nic.gbits_per_s is None else f"{nic.gbits_per_s:g} Gbit/s"
    return f"{nic.kind}, {rate}{'' if nic.up else ', down'}"


def _gpu_text(gpu: Gpu) -> str:
    pcie = pcie_gbytes(gpu)
    text = gpu.name if pcie is None else f"{gpu.name}, PCIe {gpu.pcie_generation} × {gpu.pcie_lanes} ({pcie:.3g} GB/s)"
    for links in gpu.nvlinks:
        to = "switches" if links.peer == "switch" else links.peer
        rate = "" if links.gbytes_per_s is None else f" ({links.count * links.gbytes_per_s:.4g} GB/s)"
        text += f", NVLink {links.generation or ''} × {links.count} to {to}{rate}"
    return text


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _matrix(wiring: Wiring, host: int, symbols: set[str]) -> Table:
    """GPUs against GPUs, with GB/s beside the kind."""
    machine = wiring.machines[host]
    table = _table("", *(f"GPU{gpu.index}" for gpu in machine.gpus))
    for row, gpu in enumerate(machine.gpus):
        ways = [None if row == k else wiring.link(Device(host, row), Device(host, k)) for k in range(len(machine.gpus))]
        symbols |= {way.kind for way in ways if way}
        table.add_row(f"GPU{gpu.index}", *map(_cell, ways))
    return table


def _port_matrix(wiring: Wiring, host: int, symbols: set[str]) -> Table:
    """GPUs against network ports."""
    machine = wiring.machines[host]
    table = _table("", *(nic.name for nic in machine.nics))
    for gpu, port in zip(machine.gpus, wiring.uplinks[host], strict=True):
        kinds = [to_nic(machine, gpu, nic) for nic in machine.nics]
        symbols |= set(kinds)
        used = [port is not None and port.nic == nic for nic in machine.nics]
        cells = [Text(f"{kind}{'+' * own}", style=_style(kind)) for kind, own in zip(kinds, used, strict=True)]
        table.add_row(f"GPU{gpu.index}", *cells)
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False)
    for title in titles:
        table.add_column(title, justify="right", overflow="fold")
    return table


def _style(kind: str) -> str:
    return STYLES.get(kind, FAR)


def _cell(way: Link | None) -> Text:
    if way is None:
        return Text("X", style="dim")
    rate = "" if way.gbytes_per_s is None else f" {way.gbytes_per_s:.3g}"
    return Text(f"{way.symbol}{rate}{'' if way.p2p else '*'}", style=_style(way.kind))


def _mesh(machines: Sequence[Machine], judgement: Judgement, symbols: set[str]) -> list[RenderableType]:
    mesh = judgement.mesh
    kind = "GPUs" if machines[0].gpus else "CPUs, spread over the NUMA nodes"
    counts = sorted(set(Counter(device.host for device in judgement.devices).values()))
    each = " or ".join(map(str, counts))
    per_host = f"{each} on each of {len(machines)} hosts" if len(machines) > 1 else "one host"
    lines: list[RenderableType] = [Text.assemble((f"mesh {mesh}", "bold"), f": {mesh.size} ranks on {kind}, {per_host}")]
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for title in ("  axis", "groups", "slowest link", "worst between", "all groups"):
        table.add_column(title)
    for crossing in judgement.crossings:
        every = ", ".join(f"{count} over {symbol}" for symbol, count in crossing.symbols.items())
        table.add_row(
            f"  {crossing.axis}={crossing.size}",
            str(crossing.groups),
            Text(str(crossing.link), style=_style(crossing.link.kind)),
            f"ranks {crossing.ranks[0]} and {crossing.ranks[1]}",
            every,
        )
    lines.append(table)
    lines += [Text(f"warning: {warning}", style="bold") for warning in judgement.warnings]
    lines += [Text(f"advice: {advice}") for advice in judgement.advice]
    return [*lines, ""]


def _legend(machines: Sequence[Machine], symbols: set[str]) -> list[RenderableType]:
    lines = [Text(f"{'NV#' if kind == 'NV' else kind:<5}{KINDS[kind]}", style="dim") for kind in KINDS if kind in symbols]
    if any(machine.gpus for machine in machines):
        lines.append(
            Text(
                "numbers: GB/s one way at most, of the narrowest part that is known; measure with phalanx doctor links",
                style="dim",
            )
        )
        if any(gpu.no_p2p for machine in machines for gpu in machine.gpus):
            lines.append(Text("*    no peer-to-peer: copies go through host memory", style="dim"))
        if any(machine.nics for machine in machines):
            lines.append(Text("+    the port that this GPU uses", style="dim"))
    return list(lines)
