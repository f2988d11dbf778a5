"""Every rule, on its own: whatever state its operands are in on two ranks, results and gradients are those of the whole operator."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.derive.lower import differentiable, lower
from phalanx.derive.ops import RULES, rule_for
from phalanx.derive.ops.pointwise import pointwise
from phalanx.derive.ops.reduce import sum_
from phalanx.derive.program import Piece, SegmentClass, Source, Value
from phalanx.mesh import Mesh
from phalanx.spec import Spec, shard

from .op_examples import EXAMPLES, Example, T

aten = torch.ops.aten
# float64 sums in another order; a rule that is wrong is off by more than 1e-3
TOLERANCE = 1e-12
UNDEFINED = (aten.empty_like, aten.empty, aten.new_empty)
"""Values without a meaning: only shapes are compared."""
RANDOM = (aten.dropout,)
"""Their reference is the lowered graph on one rank, whose mask is the one of every layout."""


def operands_of(example: Example) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    fx.node.map_aggregate((example.args, example.kwargs), lambda a: found.append(a.make(generator)) if isinstance(a, T) else a)
    return found


def piece_of(example: Example, operands: Sequence[Tensor]) -> Piece:
    graph = fx.Graph()
    nodes = []
    for at, operand in enumerate(operands):
        nodes.append(graph.placeholder(f"x{at}"))
        nodes[-1].meta["val"] = operand.to("meta")
    given = iter(nodes)
    args, kwargs = fx.node.map_aggregate((example.args, example.kwargs), lambda a: next(given) if isinstance(a, T) else a)
    node = graph.call_function(example.target, args, kwargs)
    node.meta["val"] = fx.node.map_aggregate(call(example, operands), lambda v: v.detach().to("meta"))
    results = [node]
    if isinstance(node.meta["val"], (tuple, list)):
        results = []
        for at, value in enumerate(node.meta["val"]):
            results.append(graph.call_function(operator.getitem, (node, at)))
            results[-1].meta["val"] = value
    graph.output(tuple(results))
    sources = tuple(Source("cut", n.name) for n in nodes)
    return Piece("example", fx.GraphModule({}, graph), (), (), sources, tuple(n.name for n in results), "")


def call(example: Example, operands: Sequence[Tensor]):  # type: ignore[no-untyped-def]
    given = iter(operands)
    args, kwargs = fx.node.map_aggregate((example.args, example.kwargs), lambda a: next(given) if isinstance(a, T) else a)
    return example.target(*args, **kwargs)


def lowered(piece: Piece, operands: Sequence[Tensor], specs: Sequence[Spec], mesh: Mesh) -> SegmentClass:
    inputs = [
        Value(str(i), tuple(x.shape), x.dtype, spec, x.requires_grad)
        for i, (x, spec) in enumerate(zip(operands, specs, strict=True))
    ]
    return lower(piece, mesh, (), (), inputs, {})


def outputs_and_grads(outputs: Sequence[Tensor], leaves: Sequence[Tensor], seeds: Sequence[Tensor | None]):  # type: ignore[no-untyped-def]
    roots = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad and s is not None]
    wanted = [x for x in leaves if x.requires_grad]
    grads = [None] * len(wanted)
    if roots and wanted:
        grads = list(torch.autograd.grad([o for o, _ in roots], wanted, [s for _, s in roots], allow_unused=True))
    filled = (torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True))
    return [o.detach() for o in outputs], [next(filled) if x.requires_grad else None for x in leaves]


class Reference:
    """One example on whole tensors, forward and backward."""

    def __init__(self, example: Example) -> None:
        self.example, self.operands = example, operands_of(example)
        self.piece = piece_of(example, self.operands)
        leaves = self.leaves(self.operands)
        packet = example.target.overloadpacket
        self.random = packet in RANDOM or any(a == 0.5 for a in example.args if packet is aten.scaled_dot_product_attention)
        if self.random:
            whole = lowered(self.piece, self.operands, [Spec.replicated(x.dim()) for x in self.operands], Mesh())
            values = whole.lowered("", 0, 0, 7, *leaves)
        else:
            values = call(example, leaves)
        outputs = list(values) if isinstance(values, (tuple, list)) else [values]
        generator = torch.Generator().manual_seed(1)
        self.seeds = [
            torch.randn(o.shape, dtype=o.dtype, generator=generator) if differentiable(o.dtype) else None for o in outputs
        ]
        self.outputs, self.grads = outputs_and_grads(outputs, leaves, self.seeds)

    def leaves(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [x.detach().clone().requires_grad_(o.requires_grad) for x, o in zip(values, self.operands, strict=True)]

    def placements(self) -> Iterator[tuple[Spec, ...]]:
        """Every state of every operand on one axis: all combinations of two operands; of more, one at a time and some together."""
        states = [list(states_of(x)) for x in self.operands]
        if len(states) <= 2:
            yield from itertools.product(*states)
            return
        whole = tuple(mine[0] for mine in states)
        for at, mine in enumerate(states):
            yield from ((*whole[:at], state, *whole[at + 1 :]) for state in mine)
        rng = random.Random(0)
        yield from (tuple(rng.choice(mine) for mine in states) for _ in range(8))

    def check(self, specs_of_each: Sequence[tuple[Spec, ...]], mesh: Mesh) -> None:
        classes = [lowered(self.piece, self.operands, specs, mesh) for specs in specs_of_each]
        with LocalWorld(mesh) as world:
            world.run(lambda w: [self._on_rank(w, mesh, c, s) for c, s in zip(classes, specs_of_each, strict=True)])

    def _on_rank(self, world: World, mesh: Mesh, cls: SegmentClass, specs: Sequence[Spec]) -> None:
        local = [summand(x, s, mesh, world.rank) for x, s in zip(self.operands, specs, strict=True)]
        with torch.enable_grad():
            leaves = self.leaves(local)
            outputs = list(cls.lowered(world.name, 0, 0, 7, *leaves))
            seeds = [
                None if seed is None else shard(seed, value.spec, mesh, world.rank)
                for seed, value in zip(self.seeds, cls.outputs, strict=True)
            ]
            outputs, grads = outputs_and_grads(outputs, leaves, seeds)
        what = f"{self.example} of {', '.join(map(str, specs))} on rank {world.rank}"
        for at, (mine, value, whole) in enumerate(zip(outputs, cls.outputs, self.outputs, strict=True)):
            expected = shard(whole, value.spec, mesh, world.rank)
            assert mine.shape == expected.shape and mine.dtype == expected.dtype, f"{what}: result {at}"
            if self.example.target.overloadpacket not in UNDEFINED:
                assert close(mine, expected), f"{what}: result {at}"
        for at, (grad, spec, full) in enumerate(zip(grads, specs, self.grads, strict=True)):
            if full is not None:
                expected = shard(full, spec.with_partial(()), mesh, world.rank)
                assert close(grad, expected), f"{what}: gradient of operand {at}"


def states_of(x: Tensor) -> Iterator[Spec]:
    yield Spec.replicated(x.dim())
    for dim, size in enumerate(x.shape):
        if size % 2 == 0:
            yield Spec.replicated(x.dim()).with_dim(dim, ("a",))
    if x.dtype != torch.bool:
        yield Spec.replicated(x.dim()).with_partial({"a"})


def summand(x: Tensor, spec: Spec, mesh: Mesh, rank: int) -> Tensor:
    """A rank's piece of x. Of a partial value no rank holds zeros, or the value itself."""
    piece = shard(x, spec.with_partial(()), mesh, rank)
    ranks = mesh.extent(tuple(spec.partial))
    if ranks == 1:
        return piece
    first = all(mesh.coordinates(rank)[axis] == 0 for axis in spec.partial)
    if not differentiable(x.dtype):
        return piece - 3 * (ranks - 1) if first else torch.full_like(piece, 3)
    return piece * (1 + 0.3 * (ranks - 1)) if first else -0.3 * piece


def close(mine: Tensor, expected: Tensor) -> bool:
    if not differentiable(expected.dtype):
        return torch.equal(mine, expected)
    if mine.dtype == torch.float32:
        return torch.allclose(mine, expected, rtol=1e-6, atol=0)  # one rounding of a sum made in another order
    scale = expected.abs().max().clamp_min(1e-3) if expected.numel() else 1.0
    return bool(((mine - expected).abs() <= TOLERANCE * scale).all() | (mine == expected).all())


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_any_state_of_its_operands_gives_what_the_whole_operator_gives(example: Example) -> None:
    mesh = Mesh(a=2)
    reference = Reference(example)
    reference.check(list(reference.placements()), mesh)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.free], ids=str)
def test_what_a_rule_keeps_split_is_not_gathered(example: Example) -> None:
    reference = Reference(example)
    for at, dim in example.free:
        specs = [Spec.replicated(x.dim()) for x in reference.operands]
        specs[at] = specs[at].with_dim(dim, ("a",))
        cls = lowered(reference.piece, reference.operands, specs, Mesh(a=2))
        moves = [n.args[1] for n in cls.lowered.graph.nodes if n.target is torch.ops.phx.move.default]
        # a sum over what was split, which the cut at the end finishes, is the rule's own result
        assert not {"gather", "gather_vary", "exchange"} & set(moves), f"{specs}: {moves}"


def test_two_axes_in_any_places() -> None:
    mesh, rng = Mesh(a=2, b=2), random.Random(0)
    for example in EXAMPLES:
        if example.args and len(str(example)) % 8 == 0:
            reference = Reference(example)
            chosen = [tuple(random_spec(rng, x) for x in reference.operands) for _ in range(3)]
            reference.check(chosen, mesh)


def random_spec(rng: random.Random, x: Tensor) -> Spec:
    dims: list[tuple[str, ...]] = [()] * x.dim()
    partial = set()
    for axis in rng.sample(("a", "b"), 2):
        place = rng.randrange(-2, x.dim())
        if place == -1 and x.dtype != torch.bool:
            partial.add(axis)
        elif place >= 0 and x.shape[place] % (2 ** (len(dims[place]) + 1)) == 0:
            dims[place] = (*dims[place], axis)
    return Spec(tuple(dims), frozenset(partial))


WRONG = {
    aten.div.Tensor_mode: pointwise("first"),  # rounding is not linear
    aten.prelu: pointwise(),  # the slopes of channels would go with the last dimension
    aten.mean: sum_,  # a shard's own mean
    aten.softmax: pointwise(),  # a shard's own normalisation
    aten.tril: pointwise("first"),  # a shard's own triangle
}


@pytest.mark.parametrize("target", WRONG, ids=str)
def test_a_wrong_rule_is_noticed(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, target, WRONG[target])
    references = [Reference(e) for e in EXAMPLES if target in (e.target, e.target.overloadpacket)]
    noticed = 0
    for reference in references:
        try:
            reference.check(list(reference.placements()), Mesh(a=2))
        except (AssertionError, RuntimeError):
            noticed += 1
    assert noticed


def test_every_rule_has_an_example() -> None:
    covered = {e.target for e in EXAMPLES} | {e.target.overloadpacket for e in EXAMPLES}
    missing = sorted(str(target) for target in RULES if target not in covered)
    assert not missing, f"rules without an example in op_examples.py: {', '.join(missing)}"


def test_every_example_has_a_rule() -> None:
    for example in EXAMPLES:
        assert rule_for(fx.Graph().call_function(example.target)) is not None, example
