"""From the user's names for dimensions and the layout that places names on axes, to Specs. Names go no further than this file.

names  = {"*.q_proj.weight": "heads embed", "*.o_proj:out": "batch residual_seq embed", "tokens": "batch seq"}
layout = {"batch": "dp", "heads": "tp"}
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import fx

from phalanx.derive.dims import head_counts, infer_parts
from phalanx.derive.program import Captured, Parameter, Value
from phalanx.mesh import Mesh
from phalanx.spec import Spec

Layout = Mapping[str, str | Sequence[str]]
_BLOCK = re.compile(r"\.\d+\.")
KV_HEADS = "kv_heads"
"""Goes where `heads` goes unless the layout places it. With fewer of them than ranks their projections stay replicated."""
COUNTED = ("heads", KV_HEADS)
"""Dimensions that are split between whole heads."""
PADDED = "vocab"
"""Dimensions of this name need not divide over their axes: parameters are padded with zeros, which `derive.padding` sees to."""


@dataclass(frozen=True)
class Placements:
    """What the names say: the Spec of every parameter, buffer and batch entry, and of declared module outputs by module path."""

    parameters: dict[str, Parameter]
    buffers: dict[str, Parameter]
    batch: dict[str, Value]
    outputs: dict[str, Spec] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def compile_names(captured: Captured, mesh: Mesh, names: Mapping[str, str] | None, layout: Layout | None) -> Placements:
    """Without names the first dimension of every batch entry is `batch`. Without a layout, batch is split over dp if the mesh has it.

    Raises ValueError for a pattern that matches nothing, a name or axis that is unknown or unused, placements that disagree, and a
    dimension that an axis does not divide: with the sizes and the closest match. Only `vocab` of a parameter is padded instead.
    """
    names = dict(names or {})
    if layout is None:
        layout = {"batch": "dp"} if "dp" in mesh.names else {}
    placed = _axes_of_names(layout, mesh)
    modules = _module_paths(captured)
    declared_outputs = {pattern[:-4]: dims for pattern, dims in names.items() if pattern.endswith(":out")}
    declared = {pattern: dims for pattern, dims in names.items() if not pattern.endswith(":out")}
    _check_patterns(declared, declared_outputs, captured, modules)
    _check_names_used(placed, names)

    parts = infer_parts(captured)
    heads = head_counts(captured, parts)
    parameters = {
        name: _place_parameter(p, declared, placed, mesh, parts.get(name, {}), heads) for name, p in captured.parameters.items()
    }
    buffers = {name: _place_parameter(b, declared, placed, mesh, {}, {}) for name, b in captured.buffers.items()}
    batch = {key: _place_batch(key, shape, dtype, declared, placed, mesh) for key, (shape, dtype) in captured.batch.items()}
    outputs: dict[str, Spec] = {}
    for pattern, dims in declared_outputs.items():
        for path in modules:
            if fnmatchcase(path, pattern):
                spec = Spec(tuple(placed.get(name, ()) for name in dims.split()))
                if outputs.setdefault(path, spec) != spec:
                    raise ValueError(f"two names for the output of {path} disagree: {outputs[path]} and {spec}")
    unnamed = [name for name in parameters if names and not any(_matches(name, parameters[name].aliases, p) for p in declared)]
    split_by_names = {axis for p in parameters.values() for axis in p.spec.varying}
    warnings = []
    if unnamed and mesh.extent(split_by_names) > 1:
        alike = dict.fromkeys(_BLOCK.sub(".*.", name) for name in unnamed)
        warnings.append(f"replicated, since no name matches: {', '.join(alike)}")
    placed_on = split_by_names.union(*(spec.varying for spec in (*outputs.values(), *(value.spec for value in batch.values()))))
    warnings += [
        f"mesh axis {axis} splits nothing, so its {size} ranks all do the same work{_offer(axis, placed)}"
        for axis, size in mesh.axes
        if size > 1 and axis != "pp" and axis not in placed_on
    ]
    return Placements(parameters, buffers, batch, outputs, tuple(warnings))


def _offer(axis: str, placed: Mapping[str, tuple[str, ...]]) -> str:
    here = ", ".join(f"{name}={'+'.join(axes)}" for name, axes in placed.items() if axes)
    return f"; the layout is {here}" if here else f"; without a layout only dp splits the batch: layout={{'batch': {axis!r}}}"


def _axes_of_names(layout: Layout, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    placed: dict[str, tuple[str, ...]] = {}
    for name, axes in layout.items():
        split = tuple(axes.split("+")) if isinstance(axes, str) else tuple(axes)
        for axis in split:
            if axis == "pp":
                raise ValueError(f"layout {name}={axis}: pp hosts stages of the model; it does not split dimensions")
            if axis not in mesh.names:
                raise ValueError(f"layout {name}={axis}: {mesh!r} has no axis {axis!r}{_closest(axis, mesh.names)}")
        if len(set(split)) != len(split):
            raise ValueError(f"layout {name}={'+'.join(split)} names an axis twice")
        placed[name] = split
    if "heads" in placed:
        placed.setdefault(KV_HEADS, placed["heads"])
    return placed


def _check_patterns(
    declared: Mapping[str, str], outputs: Mapping[str, str], captured: Captured, modules: Sequence[str]
) -> None:
    tensors = [name for p in (*captured.parameters.values(), *captured.buffers.values()) for name in (p.name, *p.aliases)]
    for pattern in declared:
        if pattern not in captured.batch and not any(fnmatchcase(name, pattern) for name in tensors):
            raise ValueError(
                f"the name pattern {pattern!r} matches no parameter or batch entry{_closest(pattern, (*tensors, *captured.batch))}"
            )
    for pattern in outputs:
        if not any(fnmatchcase(path, pattern) for path in modules):
            raise ValueError(f"the name pattern {pattern + ':out'!r} matches no module{_closest(pattern, modules)}")


def _check_names_used(placed: Mapping[str, tuple[str, ...]], names: Mapping[str, str]) -> None:
    known = {"batch", KV_HEADS} | {name for dims in names.values() for name in dims.split()}
    for name in placed:
        if name not in known:
            raise ValueError(
                f"layout places {name!r}, which names no dimension{_closest(name, sorted(known))}; names in use: {', '.join(sorted(known))}"
            )


def _place_parameter(
    p: Parameter, declared: Mapping[str, str], placed: Mapping[str, tuple[str, ...]], mesh: Mesh,
    parts: Mapping[int, tuple[int, ...]], heads: Mapping[tuple[str, int], int],
) -> Parameter:  # fmt: skip
    chosen: tuple[str, Spec] | None = None
    for pattern, dims in declared.items():
        if not _matches(p.name, p.aliases, pattern):
            continue
        names = dims.split()
        if len(names) != len(p.shape):
            raise ValueError(f"{pattern!r}: {dims!r} names {len(names)} dimensions, {p.name} has {len(p.shape)}: {p.shape}")
        spec = _spec(p, names, placed, mesh, parts, heads)
        if chosen is not None and chosen[1] != spec:
            raise ValueError(
                f"{p.name} is placed twice and differently: {chosen[0]!r} says {chosen[1]}, {pattern!r} says {spec}"
            )
        chosen = (pattern, spec)
    if chosen is None:
        return p
    ranks = [mesh.extent(axes) for axes in chosen[1].dims]
    shape = tuple(-(-size // n) * n for size, n in zip(p.shape, ranks, strict=True))
    return replace(p, spec=chosen[1], shape=shape, valid=None if shape == p.shape else p.shape)


def _spec(
    p: Parameter, names: Sequence[str], placed: Mapping[str, tuple[str, ...]], mesh: Mesh,
    parts: Mapping[int, tuple[int, ...]], heads: Mapping[tuple[str, int], int],
) -> Spec:  # fmt: skip
    dims: list[tuple[str, ...]] = []
    fused: list[tuple[int, tuple[int, ...]]] = []
    for dim, name in enumerate(names):
        axes = placed.get(name, ())
        ranks = mesh.extent(axes)
        count = heads.get((p.name, dim))
        if name in COUNTED and count is not None and ranks > 1:
            if name == KV_HEADS and ranks > count and ranks % count == 0:
                axes, ranks = (), 1
            elif count % ranks:
                raise ValueError(f"{p.name}: {count} {name} do not divide over {_axes(axes, ranks)}{_nearest(count, ranks)}")
        sizes = parts.get(dim, (p.shape[dim],))
        padded = name == PADDED and any(size % ranks for size in sizes)
        for size in () if padded else sizes:
            if size % ranks:
                raise ValueError(
                    f"{p.name}: dimension {dim} ({name}) of size {size} does not divide over {_axes(axes, ranks)}{_nearest(size, ranks)}"
                )
        dims.append(axes if ranks > 1 or axes else ())
        if axes and dim in parts and not padded:
            fused.append((dim, parts[dim]))
    try:
        return Spec(tuple(dims), parts=tuple(fused))
    except ValueError as error:
        raise ValueError(f"{p.name}: two of its dimensions {tuple(names)} are placed on one axis: {error}") from error


def _place_batch(
    key: str,
    shape: tuple[int, ...],
    dtype: object,
    declared: Mapping[str, str],
    placed: Mapping[str, tuple[str, ...]],
    mesh: Mesh,
) -> Value:
    names = declared[key].split() if key in declared else ["batch"] + [""] * (len(shape) - 1) if shape else []
    if len(names) != len(shape):
        raise ValueError(f"{key!r}: {declared[key]!r} names {len(names)} dimensions, the batch entry has {len(shape)}: {shape}")
    spec = Spec(tuple(placed.get(name, ()) for name in names))
    for dim, axes in enumerate(spec.dims):
        ranks = mesh.extent(axes)
        if shape[dim] % ranks:
            raise ValueError(
                f"batch entry {key!r}: dimension {dim} ({names[dim]}) of size {shape[dim]} in one microbatch does not divide over "
                f"{_axes(axes, ranks)}{_nearest(shape[dim], ranks)}"
            )
    return Value(key, shape, dtype, spec)  # type: ignore[arg-type]


def _matches(name: str, aliases: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(candidate, pattern) for candidate in (name, *aliases))


def _module_paths(captured: Captured) -> list[str]:
    graphs: list[fx.Graph] = [piece.graph.graph for piece in captured.pieces]
    return sorted({path for graph in graphs for node in graph.nodes for path in node.meta.get("modules", ())})


def _axes(axes: Sequence[str], ranks: int) -> str:
    return f"{'+'.join(axes)} of {ranks} ranks"


def _nearest(size: int, ranks: int) -> str:
    """The closest numbers of ranks that do divide."""
    works = [n for n in range(1, size + 1) if size % n == 0]
    below, above = max(n for n in works if n <= ranks), [n for n in works if n > ranks][:1]
    return f"; {' or '.join(str(n) for n in [below, *above])} would"


def _closest(word: str, candidates: Iterable[str]) -> str:
    """The closest candidate, for the end of a message; a pattern is compared with as many last components as it has."""
    word = word.lstrip("*.")
    depth = word.count(".") + 1
    ends: dict[str, str] = {}
    for candidate in candidates:
        ends.setdefault(".".join(candidate.split(".")[-depth:]), candidate)
    match = difflib.get_close_matches(word, ends, n=1, cutoff=0.3)
    return f"; the closest is {ends[match[0]]!r}" if match else ""
