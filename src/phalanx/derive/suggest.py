"""Names for the dimensions of any module, read off its captured graph: a table to paste, edit and give to `phx.parallelize`.

Dimensions that go together get one name (`derive.together`), and `derive.groups` says which of them are worth splitting. What stays
whole has a name as well, so that a layout may say otherwise. Runs nothing, and needs no mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from phalanx.derive.capture import Loss, Prepare, capture
from phalanx.derive.groups import RESIDUAL, Group, Groups, choose
from phalanx.derive.hints import hints_by_node
from phalanx.derive.names import KV_HEADS
from phalanx.derive.patterns import collapsed, wildcard
from phalanx.derive.precision import Precision
from phalanx.derive.program import Captured
from phalanx.derive.reject import where
from phalanx.derive.together import Value
from phalanx.spec import Spec

USUAL_LAYOUT = {"batch": "dp", "heads": "tp", "mlp": "tp", "vocab": "tp"}
CONVOLUTIONS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("convolution", *(f"conv{way}{n}d" for way in ("", "_transpose") for n in (1, 2, 3)))
)
SHOWN = 8
"""Patterns, sizes and divisors that a comment lists."""


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One name: what it covers, and what splits it or why it stays whole."""

    name: str
    patterns: tuple[str, ...]
    """Of the parameters that have it."""
    sizes: tuple[int, ...]
    share: float
    """Of the bytes of all parameters, those of parameters that have it."""
    divides: tuple[int, ...] = ()
    """Numbers of ranks, above 1, that split it evenly; none if it stays whole."""
    why: str = ""
    """Why it stays whole."""

    def __str__(self) -> str:
        fit = f"splits over {_listed(self.divides)} ranks" if self.divides else f"stays whole: {self.why}"
        fit += ", whole on each of a multiple of them" if self.name == KV_HEADS else ""
        return (
            f"{self.name}: of size {_listed(self.sizes)}, in {self.share:.1%} of all parameter bytes, {fit}\n"
            f"    {_listed(self.patterns)}"
        )


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A table of names as `phx.parallelize` takes it, and what it rests on."""

    names: dict[str, str]
    dimensions: tuple[Dimension, ...]
    """Of parameters; those that can be split first, then by their share."""
    remarks: tuple[str, ...] = ()
    """What could not be split or told, and why."""

    @property
    def splittable(self) -> tuple[str, ...]:
        """Names that a layout may place on an axis of tensor parallelism."""
        return tuple(dimension.name for dimension in self.dimensions if dimension.divides)

    def layout(self) -> dict[str, str]:
        """The usual layout on axes dp and tp, as far as these names go."""
        known = {"batch", *self.splittable}
        return {name: axis for name, axis in USUAL_LAYOUT.items() if name in known}

    def __str__(self) -> str:
        """Python to paste, its braces YAML as well, with what it rests on as comments."""
        table = [f'    "{pattern}": "{dims}",' for pattern, dims in self.names.items()]
        layout = ", ".join(f'"{name}": "{axis}"' for name, axis in self.layout().items())
        told = [] if self.splittable else ["no dimension can be split over tensor-parallel ranks; why is said below", ""]
        told += [line for dimension in self.dimensions for line in str(dimension).split("\n")]
        told += ["", *self.remarks] if self.remarks else []
        comments = [f"# {line}".rstrip() for line in told]
        return "\n".join(["names = {", *table, "}", f"layout = {{{layout}}}", "", *comments])


def suggest(
    module: nn.Module,
    example: Mapping[str, Tensor],
    loss: Loss | None = None,
    *,
    blocks: str | None = None,
    train: bool = True,
    prepare: Prepare | None = None,
    precision: Precision | None = None,
) -> Suggestion:
    """A table of names for `module`, which is traced as in `derive.capture`: its arguments mean the same, and its errors are the same.

    Give an example of two samples or more, and of a sequence longer than one: a dimension of size 1 goes with nothing.
    """
    return suggestion(capture(module, example, loss, blocks=blocks, train=train, prepare=prepare, precision=precision))


def suggestion(captured: Captured) -> Suggestion:
    """The same for a captured model."""
    groups = Groups(captured)
    naming = _Naming(groups, choose(groups))
    dims = {name: [naming.of_parameter(name, dim) for dim in range(len(p.shape))] for name, p in groups.parameters.items()}
    buffers = {name for buffer in captured.buffers.values() for name in (buffer.name, *buffer.aliases)}
    patterns = collapsed(
        {name: " ".join(names) for name, names in dims.items() if names},
        avoid=buffers,
        aliases={name: parameter.aliases for name, parameter in captured.parameters.items()},
    )
    paths = {path for operation in groups.together.operations for path in operation.node.meta.get("modules", ())}
    outputs = dict(naming.outputs())
    exits = collapsed(outputs, avoid=paths - outputs.keys(), least=1)
    table = _interleaved(patterns, exits)
    table |= {n: " ".join(naming.of_entry(value, dim) for dim in range(len(value.shape))) for n, value in groups.batch.items()}
    dimensions = sorted(naming.dimensions(dims, patterns), key=lambda d: (not d.divides, -d.share))
    return Suggestion(
        names=table, dimensions=tuple(dimensions), remarks=tuple(_remarks(captured, groups, {d.why for d in dimensions}))
    )


class _Naming:
    """A name for every dimension, by what its group is."""

    def __init__(self, groups: Groups, chosen: Mapping[Group, str]) -> None:
        self.groups, self.chosen = groups, chosen
        self.batch = next((groups.of(value, 0) for value in groups.batch.values()), None)
        self.numbers: dict[object, int] = {}

    def of_parameter(self, name: str, dim: int) -> str:
        value = self.groups.parameters[name]
        if value.shape[dim] == 1:
            return "one"
        group, count = self.groups.of(value, dim), self.groups.head_counts.get((name, dim))
        if self.chosen.get(group) == "heads" and count is not None and dim not in value.parts and count < group.heads:
            return KV_HEADS
        if group not in self.chosen and count == 1 and "heads" in self.chosen.values():
            return KV_HEADS  # a single one, that all ranks read
        return self._of_group(group) or self._numbered(group)

    def of_entry(self, value: Value, dim: int) -> str:
        group = self.groups.of(value, dim)
        if dim == 0 or value.shape[dim] == 1:
            return "batch" if dim == 0 else "one"
        return self._of_group(group) or ("seq" if dim == 1 else f"{value.name}_{dim}")

    def outputs(self) -> Iterator[tuple[str, str]]:
        """Paths of the modules whose outputs are sums over a dimension that is split, with names for the dimensions of the output."""
        for group in self.chosen:
            for operation in group.summed:
                last = self._exit(operation.node)
                if last is not None:
                    value = self.groups.together.of_node[last]
                    names = [self._of_output(value, dim) for dim in range(len(value.shape))]
                    if "batch" in names:
                        yield last.meta["module"], " ".join(names)

    def dimensions(self, dims: Mapping[str, list[str]], patterns: Mapping[str, str]) -> Iterator[Dimension]:
        parameters = self.groups.parameters
        having: dict[str, list[tuple[str, int]]] = {}
        for parameter, names in dims.items():
            for dim, name in enumerate(names):
                having.setdefault(name, []).append((parameter, dim))
        having.pop("one", None)
        total = sum(_bytes(parameter) for parameter in parameters.values())
        for name, members in having.items():
            owned = sum(_bytes(parameters[parameter]) for parameter in {parameter for parameter, _ in members})
            groups = dict.fromkeys(self.groups.of(parameters[parameter], dim) for parameter, dim in members)
            split = name == KV_HEADS or any(self.chosen.get(group) == name for group in groups)
            divides = _divisors(math.gcd(*(self._unit(parameter, dim) for parameter, dim in members))) if split else ()
            yield Dimension(
                name=name,
                patterns=tuple(pattern for pattern, names in patterns.items() if name in names.split()),
                sizes=tuple(sorted({parameters[parameter].shape[dim] for parameter, dim in members})),
                share=owned / total,
                divides=divides,
                why="" if divides else next(filter(None, map(_why, groups)), "no weight makes it that another sums away"),
            )

    def _of_group(self, group: Group) -> str:
        """Of one that is nothing in particular, the name of what it comes from; "" if there is none either."""
        seen = {group}
        while not (name := self._own_name(group)) and (kin := self.groups.kin.get(group)) and kin not in seen:
            group = kin
            seen.add(group)
        return name or self._part_of_heads(group)

    def _own_name(self, group: Group) -> str:
        if group in self.chosen or group.residual:
            return self.chosen.get(group, "embed")
        if group.along_residual and group.of_batch:
            return "seq"
        if group.members and (group.looked_up or group.along_residual):
            return "types" if group.of_tokens else "positions"
        if group.members and group.of_batch:
            return "outputs" if group.made else "inputs"
        if group.whole and group.whole[0].packet in CONVOLUTIONS and any(dim > 1 for _, dim in group.members):
            return "kernel"
        return ""

    def _part_of_heads(self, group: Group) -> str:
        """The width of a head lies beside the heads in a value, and in no weight."""
        beside = any(self.chosen.get(other) == "heads" for other in group.beside)
        shapes = {name: len(self.groups.parameters[name].shape) for name, _ in group.members}
        return "head_dim" if beside and set(shapes.values()) == {1} else ""

    def _numbered(self, group: Group) -> str:
        """dim_1, dim_2 ...: one for groups that are alike but for the number of their block."""
        alike = frozenset((wildcard(name), dim) for name, dim in group.members)
        return f"dim_{self.numbers.setdefault(alike, len(self.numbers) + 1)}"

    def _of_output(self, value: Value, dim: int) -> str:
        group = self.groups.of(value, dim)
        if group is self.batch:
            return "batch"
        if not group.members or (group.along_residual and not group.residual):
            return "one" if value.shape[dim] == 1 else "residual_seq"
        return self._of_group(group) or self._numbered(group)

    def _exit(self, node: fx.Node) -> fx.Node | None:
        """The node that leaves the innermost module of `node`, if all between them is linear in one value."""
        path, graph = node.meta.get("module", ""), node.graph
        while path:
            if not any(path in user.meta.get("modules", ()) for user in node.users):
                rank = len(self.groups.together.of_node[node].shape)
                leaves = hints_by_node(graph, {path: Spec.replicated(rank)}).get(node)
                return node if leaves is not None and node.meta["module"] == path and rank > 1 else None
            users = list(node.users)
            operation = self.groups.together.maker.get(self.groups.together.of_node.get(users[0]))  # type: ignore[arg-type]
            if len(users) > 1 or operation is None or operation.form.linear == "none":
                return None
            if sum(value.of_batch for value in operation.operands) > 1:
                return None
            (node,) = users
        return None

    def _unit(self, name: str, dim: int) -> int:
        """Its divisors are the numbers of ranks over which a parameter's dimension can be split."""
        value, group = self.groups.parameters[name], self.groups.of(self.groups.parameters[name], dim)
        if self.chosen.get(group) in ("heads", None):
            return self.groups.head_counts.get((name, dim)) or math.gcd(value.shape[dim], *value.parts.get(dim, ()))
        return group.unit()


def _why(group: Group) -> str:
    if group.why or group.residual:
        return group.why or RESIDUAL
    if group.of_batch:
        return "a dimension of the batch"
    if group.looked_up:
        return "rows that are looked up: few, and what a split of them finds would be summed in every step"
    return group.needed_whole() if group.whole else ""


def _interleaved(patterns: Mapping[str, str], exits: Mapping[str, str]) -> dict[str, str]:
    """The patterns of module outputs, each behind the first pattern of a parameter of these modules."""
    table: dict[str, str] = {}
    for pattern, names in patterns.items():
        table[pattern] = names
        path = pattern.rpartition(".")[0]
        if path in exits:
            table[f"{path}:out"] = exits[path]
    return table | {f"{path}:out": names for path, names in exits.items()}


def _remarks(captured: Captured, groups: Groups, said: set[str]) -> Iterator[str]:
    read = {name for piece in captured.pieces for name in piece.params}
    unread = dict.fromkeys(wildcard(name) for name in groups.parameters if name not in read)
    if unread:
        yield f"nothing reads {_listed(tuple(unread))}"
    unruled = [o.node for o in groups.together.operations if not o.ruled and any(value.grad for value in o.operands)]
    yield from dict.fromkeys(f"{where(node)} has no rule, so all dimensions that it reads stay whole" for node in unruled)
    refused: dict[str, dict[str, None]] = {}
    for group in groups:
        if group.why and group.why not in said and not group.residual and not group.of_batch:
            refused.setdefault(group.why, {}).update(dict.fromkeys(f"{wildcard(n)}[{dim}]" for n, dim in group.members))
    yield from (f"{_listed(tuple(places))}: not split, {why}" for why, places in refused.items())


def _listed(items: tuple[object, ...]) -> str:
    return ", ".join(map(str, items[:SHOWN])) + (", ..." if len(items) > SHOWN else "")


def _bytes(value: Value) -> int:
    return math.prod(value.shape) * value.itemsize


def _divisors(size: int) -> tuple[int, ...]:
    return tuple(ranks for ranks in range(2, size + 1) if size % ranks == 0)
