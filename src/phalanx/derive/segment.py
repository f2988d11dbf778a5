"""The captured graph cut into pieces: prologue, blocks, epilogue with the loss, plus what depends on no parameter.

Blocks are the indexed children of a container (`model.layers.0`, `.1`, ...) in the order in which they run. A value used beyond
the next piece is handed through every piece between. Values that depend on no parameter are computed where they are used, or by
`tables` if more than one piece uses them. Pieces with equal keys compute the same function of their placeholders.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from phalanx.derive.canonical import is_random
from phalanx.derive.program import Captured, Piece, Source

LEAST_COVERAGE = 1 / 3
"""Share of the uses of parameters that must be inside the repeated blocks of a container for them to be taken unasked."""

Label = tuple[str, int]
"""A block's module path and which call of it."""


@dataclass(frozen=True)
class Cut:
    """A segmented graph: what `Captured` holds of it."""

    pieces: tuple[Piece, ...]
    tables: Piece | None
    tables_read_batch: bool
    count: Piece


def segment(graph: fx.Graph, blocks: str | None = None) -> Cut:
    """Cut a canonical graph whose output is (sum, count). Placeholders carry meta "kind" and "name".

    blocks: patterns of module paths, as in "model.layers.*"; None finds the repeated blocks. Raises ValueError for a pattern
    that matches no module that ran.
    """
    losses, count = cast(tuple[fx.Node, fx.Node], graph.output_node().args[0])
    alone, dependent = _dependence(graph)
    home, names = _place(dependent, alone, _block_paths(graph, blocks), merge_empty=blocks is None)
    last = len(names) - 1
    assert home[losses] == last, f"the loss is in piece {home[losses]} of {len(names)}"
    needed = _needed_by(graph, home, alone)
    tables = {node for node, pieces in needed.items() if len(pieces) > 1 and not _is_scalar_constant(node)}
    tables |= {node for node in needed if node.target is operator.getitem and node.args[0] in tables}
    last_use = {
        node: last if node is losses else max((home[user] for user in node.users if user in home), default=home[node])
        for node in home
    }
    pieces = []
    for index, name in enumerate(names):
        outputs = [losses] if index == last else [n for n in home if home[n] <= index < last_use[n]]
        builder = _Builder(graph, tables, {node for node in home if home[node] < index})
        pieces.append(builder.piece(name, outputs, ("loss",) if index == last else tuple(n.name for n in outputs)))
    shown = [node for node in graph.nodes if node in tables and any(user not in tables for user in node.users)]
    table_piece = _Builder(graph, (), ()).piece("tables", shown, tuple(n.name for n in shown)) if shown else None
    return Cut(
        pieces=tuple(pieces),
        tables=table_piece,
        tables_read_batch=table_piece is not None and any(source.kind == "batch" for source in table_piece.inputs),
        count=_Builder(graph, (), ()).piece("count", [count], ("count",)),
    )


def run_pieces(
    captured: Captured, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """(sum, count) of one microbatch on global tensors: the pieces composed, differentiable in `params`.

    params and buffers by first name, batch in the captured shapes. Raises ValueError for a batch of another shape.
    """
    for name, (shape, _) in captured.batch.items():
        if name not in batch or tuple(batch[name].shape) != shape:
            found = tuple(batch[name].shape) if name in batch else "missing"
            raise ValueError(f"batch entry {name!r} is {found}, but the microbatch was captured as {shape}")
    device = next(iter([*params.values(), *batch.values()])).device
    values: dict[Source, Tensor] = {Source("batch", name): value for name, value in batch.items()}

    def run(piece: Piece) -> tuple[Tensor, ...]:
        graph = piece.graph.to(device)
        arguments = [params[n] for n in piece.params] + [buffers[n] for n in piece.buffers] + [values[s] for s in piece.inputs]
        with torch.device(device):
            return graph(*arguments)  # type: ignore[no-any-return]

    if captured.tables is not None:
        values |= zip((Source("table", n) for n in captured.tables.outputs), run(captured.tables), strict=True)
    for piece in captured.pieces:
        values |= zip((Source("cut", n) for n in piece.outputs), run(piece), strict=True)
    return values[Source("cut", "loss")], run(captured.count)[0]


def _block_paths(graph: fx.Graph, blocks: str | None) -> set[str]:
    """Paths of the modules that become blocks."""
    paths = {path for node in graph.nodes for path in node.meta.get("modules", ())}
    if blocks is not None:
        chosen = set()
        for pattern in re.split(r"[\s,]+", blocks.strip()):
            matched = {path for path in paths if _path_matches(path, pattern)}
            if not matched:
                indexed = sorted({re.sub(r"\.\d+$", ".*", path) for path in paths if re.search(r"(^|\.)\d+$", path)})
                raise ValueError(
                    f"blocks={pattern!r} matches no module that ran; indexed modules are {', '.join(indexed) or 'absent'}"
                )
            chosen |= matched
        nested = [path for path in chosen if any(path.startswith(other + ".") for other in chosen)]
        return chosen.difference(nested)
    return _repeated_children(graph)


def _path_matches(path: str, pattern: str) -> bool:
    steps, wanted = path.split("."), pattern.split(".")
    return len(steps) == len(wanted) and all(map(fnmatchcase, steps, wanted))


def _repeated_children(graph: fx.Graph) -> set[str]:
    """Children of the container, or disjoint containers, whose repeated, indexed children use most of the parameters."""
    sizes: dict[str, Counter[str]] = defaultdict(Counter)  # container → child → uses of parameters
    types: dict[str, str] = {}
    total = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        uses = any(source.meta.get("kind") == "parameter" for source in node.all_input_nodes)
        total += uses
        for path, _, kind in node.meta["calls"]:
            container, _, child = path.rpartition(".")
            if child.isdecimal():
                sizes[container][path] += uses
                types[path] = kind
    covered: dict[str, int] = {}
    children: dict[str, set[str]] = {}
    for container, sized in sizes.items():
        alike = Counter(types[path] for path in sized)
        children[container] = {path for path in sized if alike[types[path]] > 1}
        covered[container] = sum(sized[path] for path in children[container])
    best = max(covered.values(), default=0)
    if best == 0 or best < LEAST_COVERAGE * total:
        return set()
    chosen: list[str] = []
    for container in sorted(covered, key=lambda c: (-covered[c], c)):
        nested = any(_within(container, other) or _within(other, container) for other in chosen)
        if not nested and covered[container] >= best / 4:  # an encoder beside a decoder, not a small head beside a trunk
            chosen.append(container)
    return set().union(*(children[container] for container in chosen))


def _within(path: str, container: str) -> bool:
    return container == "" or path == container or path.startswith(container + ".")


def _dependence(graph: fx.Graph) -> tuple[set[fx.Node], list[fx.Node]]:
    """What depends on parameters alone, and the calls that have one home: those that depend on more as well, or on chance.

    What depends on parameters alone (a transpose, a cast) is made again by every piece that uses it.
    """
    alone: set[fx.Node] = set()
    dependent: dict[fx.Node, None] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.meta.get("kind") == "parameter":
            alone.add(node)
        elif node.op == "call_function":
            if sources and not is_random(node) and alone.issuperset(sources):
                alone.add(node)
            elif is_random(node) or any(source in alone or source in dependent for source in sources):
                dependent[node] = None
    return alone, list(dependent)


def _place(
    dependent: list[fx.Node], alone: Collection[fx.Node], blocks: set[str], merge_empty: bool
) -> tuple[dict[fx.Node, int], list[str]]:
    """The piece of every node in `dependent`, and the names of the pieces in order.

    Nodes are in the order in which the model ran, so a new piece starts wherever another block does. What runs between two
    blocks belongs to the first; what runs after the last block is the epilogue. Without blocks there is one piece.
    """
    if not blocks:
        return dict.fromkeys(dependent, 0), ["epilogue"]
    starts: list[Label] = []
    home: dict[fx.Node, int] = {}
    ran_last = -1
    for position, node in enumerate(dependent):
        label = _label(node, blocks)
        if label is not None:
            ran_last = position
            if not starts or label != starts[-1]:
                starts.append(label)
        home[node] = len(starts)
    for node in dependent[ran_last + 1 :]:
        home[node] = len(starts) + 1
    for node in dependent:  # the parts of one result stay with the call that makes them
        if node.target is operator.getitem:
            home[node] = home[node.args[0]]  # type: ignore[index]
    names = ["prologue", *_names(starts), "epilogue"]
    with_parameters = {piece for node, piece in home.items() if any(source in alone for source in node.all_input_nodes)}
    kept: list[str] = []
    index: dict[int, int] = {}
    for piece in sorted(set(home.values())):
        # A ReLU that is a block of a Sequential joins the Linear before it.
        joins = merge_empty and kept and piece not in with_parameters and names[piece] != "epilogue"
        if not joins:
            kept.append(names[piece])
        index[piece] = len(kept) - 1
    return {node: index[piece] for node, piece in home.items()}, kept


def _label(node: fx.Node, blocks: set[str]) -> Label | None:
    return next(((path, call) for path, call, _ in node.meta["calls"] if path in blocks), None)


def _names(labels: list[Label]) -> Iterator[str]:
    """A block that runs again is `path@1`, `path@2` and so on."""
    runs: Counter[str] = Counter()
    for path, _ in labels:
        yield path if runs[path] == 0 else f"{path}@{runs[path]}"
        runs[path] += 1


def _needed_by(graph: fx.Graph, home: Mapping[fx.Node, int], alone: Collection[fx.Node]) -> dict[fx.Node, set[int]]:
    """The pieces that need each parameter-free call. The count does not: it makes what it needs itself."""
    needed: dict[fx.Node, set[int]] = {}
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node not in home and node not in alone:
            needed[node] = {home[user] for user in node.users if user in home}
            needed[node] |= set().union(*(needed.get(user, set()) for user in node.users))
    return needed


def _is_scalar_constant(node: fx.Node) -> bool:
    """Cheaper to make again than to hand over."""
    value = node.meta["val"]
    return not node.all_input_nodes and isinstance(value, Tensor) and value.dim() == 0


class _Builder:
    """Copies what some outputs need into a graph of its own, down to placeholders, tables and values of earlier pieces."""

    def __init__(self, graph: fx.Graph, tables: Collection[fx.Node], earlier: Collection[fx.Node]) -> None:
        self.graph, self.tables, self.earlier = graph, tables, earlier

    def piece(self, name: str, outputs: list[fx.Node], output_names: tuple[str, ...]) -> Piece:
        body = self._needed(outputs)
        leaves = [n for n in _in_order_of_use(body, outputs) if self._source(n) is not None or n.op == "placeholder"]
        params = [n for n in leaves if n.meta.get("kind") == "parameter"]
        buffers = [n for n in leaves if n.meta.get("kind") == "buffer"]
        inputs = [n for n in leaves if self._source(n) is not None]
        made = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for kind, nodes in (("parameter", params), ("buffer", buffers), ("input", inputs)):
            for node in nodes:
                prefix = {"parameter": "p", "buffer": "b"}.get(kind) or self._source(node).kind  # type: ignore[union-attr]
                label = re.sub(r"\W", "_", node.meta.get("name", node.name))
                env[node] = made.placeholder(f"{prefix}_{label}")
                env[node].meta = _placeholder_meta(node, kind)
        constants: dict[str, Tensor] = {}
        for node in body:
            if node in env:
                continue
            copy = made.node_copy(node, lambda old: env[old])
            if node.op == "get_attr":
                copy.target = f"constant_{len(constants)}"
                constants[copy.target] = node.meta["constant"]
            env[node] = copy
        result = made.output(tuple(env[node] for node in outputs))
        result.meta["val"] = tuple(node.meta["val"] for node in outputs)
        sources = tuple(source for node in inputs if (source := self._source(node)) is not None)
        return Piece(
            name=name,
            graph=fx.GraphModule(constants, made),
            params=tuple(node.meta["name"] for node in params),
            buffers=tuple(node.meta["name"] for node in buffers),
            inputs=sources,
            outputs=output_names,
            key=graph_key(made),
        )

    def _source(self, node: fx.Node) -> Source | None:
        if node in self.tables:
            return Source("table", node.name)
        if node in self.earlier:
            return Source("cut", node.name)
        return Source("batch", node.meta["name"]) if node.meta.get("kind") == "batch entry" else None

    def _needed(self, outputs: Iterable[fx.Node]) -> list[fx.Node]:
        """Leaves and calls that the outputs need, in the order of the whole graph."""
        found: set[fx.Node] = set()
        stack = list(outputs)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                if self._source(node) is None:
                    stack.extend(node.all_input_nodes)
        return [node for node in self.graph.nodes if node in found]


def _in_order_of_use(body: list[fx.Node], outputs: list[fx.Node]) -> list[fx.Node]:
    inside = set(body)
    used = [source for node in body for source in node.all_input_nodes if source in inside]
    return list(dict.fromkeys([*used, *outputs]))


def _placeholder_meta(node: fx.Node, kind: str) -> dict[str, Any]:
    return {
        "val": node.meta["val"],
        "module": "",
        "modules": (),
        "source": "",
        "kind": kind,
        "name": node.meta.get("name", node.name),
        "requires_grad": node.meta["requires_grad"],
    }


def graph_key(graph: fx.Graph) -> str:
    """Canonical hash: ops, arguments by position, constants by value, and shapes, dtypes and kinds of placeholders."""
    index = {node: position for position, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            lines.append(f"{node.meta['kind']} {tuple(value.shape)} {value.dtype} {node.meta['requires_grad']}")
        elif node.op == "get_attr":
            constant = node.meta["constant"]
            content = constant.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            lines.append(f"constant {tuple(constant.shape)} {constant.dtype} {hashlib.sha256(content).hexdigest()}")
        else:
            arguments = map_aggregate((node.args, node.kwargs), lambda a: f"%{index[a]}" if isinstance(a, fx.Node) else a)
            lines.append(f"{node.target} {arguments!r}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]
