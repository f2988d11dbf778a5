"""Every row of PAIRS against the definition by shard and unshard, forward and backward, in float64; and the operators."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from phalanx.comm import PAIRS, LocalWorld, all_gather, all_reduce, all_to_all, broadcast, local, move, reduce_scatter, shard
from phalanx.mesh import Mesh
from phalanx.spec import Spec
from phalanx.spec import shard as shard_of
from phalanx.spec import unshard as unshard_of

MESH = Mesh(dp=2, cp=3, tp=2)
SHAPE = (6, 12, 18)
# pair: (state before, state after, state of the cotangent after, state of the cotangent before).
# The cotangent of S is S, of P is R, of R is R; of an R that a varying op consumes it is P.
STATES = {
    "reduce": ("P", "R", "R", "R"),
    "vary": ("R", "R", "P", "R"),
    "reduce_scatter": ("P", "S", "S", "R"),
    "gather": ("S", "R", "R", "S"),
    "gather_vary": ("S", "R", "P", "S"),
    "shard": ("R", "S", "S", "R"),
    "exchange": ("S", "S2", "S2", "S"),
    "keep_first": ("R", "P", "R", "R"),
}
# Sums of at most three float64 numbers of size about 1 in another order.
ROUNDING = {"rtol": 0.0, "atol": 3 * 4.5e-16}


@pytest.fixture(scope="module")
def world():
    with local(MESH, timeout=20.0) as world:
        yield world


def spec_of(state: str, axis: str, dim: int, dim2: int) -> Spec:
    spec = Spec.replicated(len(SHAPE))
    if state == "P":
        return spec.with_partial((axis,))
    return spec if state == "R" else spec.with_dim(dim if state == "S" else dim2, (axis,))


def held(value: Tensor, state: str, spec: Spec, axis: str) -> list[Tensor]:
    """What the ranks hold of a global value; a partial value is cut into random summands."""
    if state != "P":
        return [shard_of(value, spec, MESH, rank) for rank in range(MESH.size)]
    random = torch.Generator().manual_seed(1)
    size = MESH.shape[axis]
    summands = list(torch.randn((size - 1, *value.shape), generator=random, dtype=value.dtype))
    summands.append(value - sum(summands))
    return [summands[MESH.coordinates(rank)[axis]].clone() for rank in range(MESH.size)]


def assert_holds(locals_: list[Tensor], value: Tensor, state: str, spec: Spec) -> None:
    """The ranks together hold `value` in this state: all replicas and slices, or a sum that gives it."""
    if state == "P":
        torch.testing.assert_close(unshard_of(locals_, spec, MESH), value, **ROUNDING)
        return
    for rank, piece in enumerate(locals_):
        torch.testing.assert_close(piece, shard_of(value, spec, MESH, rank), **ROUNDING)


def check_pair(world: LocalWorld, pair: str, axis: str, dim: int, dim2: int) -> None:
    before, after, cotangent_after, cotangent_before = STATES[pair]
    random = torch.Generator().manual_seed(0)
    value, cotangent = torch.randn((2, *SHAPE), generator=random, dtype=torch.float64)

    def held_as(tensor: Tensor, state: str) -> list[Tensor]:
        return held(tensor, state, spec_of(state, axis, dim, dim2), axis)

    def body(rank_world, x, grad):
        x = x.requires_grad_()
        y = move(x, pair, rank_world, axis, dim, dim2)
        y.backward(grad)
        return y.detach(), x.grad

    results = world.run(body, held_as(value, before), held_as(cotangent, cotangent_after))
    outputs, gradients = map(list, zip(*results, strict=True))
    assert_holds(outputs, value, after, spec_of(after, axis, dim, dim2))
    assert_holds(gradients, cotangent, cotangent_before, spec_of(cotangent_before, axis, dim, dim2))


def test_the_table_has_the_rows_that_are_tested() -> None:
    assert set(PAIRS) == set(STATES)


@pytest.mark.parametrize("axis", MESH.names)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_is_the_definition(world: LocalWorld, pair: str, axis: str) -> None:
    for dim, dim2 in [(0, 1), (1, 2), (2, 0)]:
        check_pair(world, pair, axis, dim, dim2)


PRIMITIVES = sorted({primitive for row in PAIRS.values() for primitive in row})
MUTANTS = [(pair, side, other) for pair, row in PAIRS.items() for side in (0, 1) for other in PRIMITIVES if other != row[side]]


@pytest.mark.parametrize("pair", PAIRS)
def test_every_other_entry_in_the_table_turns_the_check_red(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong values fail the comparison; a wrong shape fails before. None passes."""
    with local(MESH, timeout=5.0) as world:
        for _, side, other in (mutant for mutant in MUTANTS if mutant[0] == pair):
            row = list(PAIRS[pair])
            row[side] = other
            with monkeypatch.context() as patch:
                patch.setitem(PAIRS, pair, tuple(row))
                with pytest.raises((AssertionError, ValueError, RuntimeError)):
                    check_pair(world, pair, "cp", 0, 1)
        check_pair(world, pair, "cp", 0, 1)  # red because of the mutation and nothing else


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("transposed", [False, True])
def test_primitives_along_every_dimension(world: LocalWorld, dim: int, transposed: bool) -> None:
    """Including inputs that are not contiguous."""
    parts = torch.randn((3, *SHAPE), generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def body(rank_world):
        index = rank_world.coordinates["cp"]
        x = parts[index]
        x = x.transpose(0, 2).contiguous().transpose(0, 2) if transposed else x
        assert x.is_contiguous() is not transposed
        slice_of = lambda whole: whole.tensor_split(3, dim)[index]  # noqa: E731
        torch.testing.assert_close(all_gather(x, rank_world, "cp", dim), torch.cat(list(parts), dim), rtol=0, atol=0)
        torch.testing.assert_close(reduce_scatter(x, rank_world, "cp", dim), slice_of(parts.sum(0)), **ROUNDING)
        torch.testing.assert_close(shard(x, rank_world, "cp", dim), slice_of(parts[index]), rtol=0, atol=0)
        for cat_dim in (0, 1, 2):
            got = all_to_all(x, rank_world, "cp", dim, cat_dim)
            torch.testing.assert_close(got, torch.cat([slice_of(part) for part in parts], cat_dim), rtol=0, atol=0)
        for got in (
            all_gather(x, rank_world, "cp", dim),
            reduce_scatter(x, rank_world, "cp", dim),
            shard(x, rank_world, "cp", dim),
        ):
            assert got.is_contiguous()

    world.run(body)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64])
def test_moving_works_on_every_dtype(world: LocalWorld, dtype: torch.dtype) -> None:
    def body(rank_world):
        index = rank_world.coordinates["tp"]
        both = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]]).to(dtype)
        assert torch.equal(all_gather(both[index], rank_world, "tp"), both.flatten())
        assert torch.equal(shard(both[index], rank_world, "tp"), both[index, 2 * index : 2 * index + 2])
        assert torch.equal(all_to_all(both[index], rank_world, "tp", 0, 0), both[:, 2 * index : 2 * index + 2].flatten())
        assert torch.equal(broadcast(both[index], rank_world, "tp", 1), both[1])

    world.run(body)


def test_all_reduce_knows_its_operations_and_leaves_its_input(world: LocalWorld) -> None:
    def body(rank_world):
        x = torch.tensor([float(rank_world.coordinates["cp"]), 5.0])
        results = {op: all_reduce(x, rank_world, "cp", op).tolist() for op in ("sum", "mean", "min", "max")}
        assert x.tolist() == [rank_world.coordinates["cp"], 5.0]
        return results

    for results in world.run(body):
        assert results == {"sum": [3.0, 15.0], "mean": [1.0, 5.0], "min": [0.0, 5.0], "max": [2.0, 5.0]}
    with pytest.raises(ValueError, match="'median'"):
        world.run(lambda w: all_reduce(torch.ones(1), w, "cp", "median"))


def test_an_axis_may_be_several(world: LocalWorld) -> None:
    """Over dp+tp a rank's slice is its position among the ranks of both, dp the slower."""

    def body(rank_world):
        mine = torch.tensor([rank_world.rank])
        return all_gather(mine, rank_world, "dp+tp").tolist(), shard(torch.arange(4), rank_world, "tp+dp").item()

    for rank, (gathered, slice_) in enumerate(world.run(body)):
        place = MESH.coordinates(rank)
        assert gathered == [MESH.rank({**place, "dp": dp, "tp": tp}) for dp, tp in itertools.product(range(2), range(2))]
        assert slice_ == 2 * place["dp"] + place["tp"]


def test_offset_take_and_put(world: LocalWorld) -> None:
    """Over an axis of 3 with groups of 2, positions 0 and 1 take the first piece and 2 the second."""
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def body(rank_world):
        index, ops, where = rank_world.coordinates["cp"], torch.ops.phx, (rank_world.name, "cp")
        start = [0, 0, 4][index]
        assert ops.offset(torch.tensor([7, 9]), *where, 4).tolist() == [7 - 4 * index, 9 - 4 * index]
        y = x.clone().requires_grad_()
        taken = ops.take(y, *where, 3, 1, 4, 2)
        assert torch.equal(taken, x[:, start : start + 4])
        grad = torch.ones(4, 4, dtype=torch.float64) * (index + 1)
        taken.backward(grad)
        want = torch.zeros_like(x)
        want[:, start : start + 4] = grad
        assert torch.equal(y.grad, want)
        assert torch.equal(ops.put(grad, *where, 3, 1, 4, 2, 10), want)

    world.run(body)


def test_on_an_axis_of_one_rank() -> None:
    """Values pass unchanged, and what a primitive returns shares no memory with its input."""
    x = torch.randn(4, 6, dtype=torch.float64)
    with local(Mesh(dp=2, tp=1)) as world:
        name, ops = world.worlds[1].name, torch.ops.phx
        for y in (
            ops.all_reduce(x, name, "tp", "mean"),
            ops.all_gather(x, name, "tp", 1, 1),
            ops.reduce_scatter(x, name, "tp", 1, 0),
            ops.shard(x, name, "tp", 1, 0),
            ops.all_to_all(x, name, "tp", 1, 0, 1),
            ops.keep_first(x, name, "tp"),
            ops.offset(x, name, "tp", 5),
            ops.take(x, name, "tp", 1, 0, 4, 1),
            ops.put(x, name, "tp", 1, 0, 4, 1, 4),
        ):
            assert torch.equal(y, x)
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        for pair in PAIRS:
            leaf = x.clone().requires_grad_()
            y = move(leaf, pair, world.worlds[1], "tp", 0, 1)
            y.backward(2 * x)
            assert y is not leaf
            assert torch.equal(y, x)
            assert torch.equal(leaf.grad, 2 * x)


def test_sizes_that_do_not_divide_are_refused_with_both_numbers(world: LocalWorld) -> None:
    ops, where = torch.ops.phx, (world.worlds[0].name, "cp", 3)
    for device in ("cpu", "meta"):
        x = torch.zeros(4, 6, device=device)
        for call in (
            lambda x: ops.shard(x, *where, 0),
            lambda x: ops.reduce_scatter(x, *where, 0),
            lambda x: ops.all_to_all(x, *where, 0, 1),
        ):
            with pytest.raises(ValueError, match="dimension 0 of size 4 does not divide over axis 'cp', which has 3 ranks"):
                call(x)
    with pytest.raises(ValueError, match=r"dimension 2 does not exist in shape \(4, 6\)"):
        ops.all_gather(torch.zeros(4, 6), *where, 2)
    with pytest.raises(ValueError, match="no pair is called 'gatherr'; the table has reduce"):
        move(torch.zeros(3), "gatherr", world.worlds[0], "cp")
    with pytest.raises(ValueError, match="no world is called 'nowhere'"):
        ops.shard(torch.zeros(3), "nowhere", "cp", 3, 0)


def test_meta_shapes_are_the_real_shapes(world: LocalWorld) -> None:
    ops = torch.ops.phx
    calls = {
        "all_reduce": ("cp", "sum"),
        "all_gather": ("cp", 3, 1),
        "reduce_scatter": ("cp", 3, 0),
        "shard": ("cp", 3, 2),
        "all_to_all": ("cp", 3, 0, 2),
        "keep_first": ("cp",),
        "offset": ("cp", 2),
        "take": ("cp", 3, 1, 4, 1),
        "put": ("cp", 3, 1, 12, 2, 24),
        "move": ("cp", 3, 0, 2),
    }

    def body(rank_world):
        for name, (axis, *rest) in calls.items():
            x = torch.zeros(SHAPE, dtype=torch.bfloat16).transpose(0, 1).contiguous().transpose(0, 1)
            pairs = [[pair] for pair in PAIRS] if name == "move" else [[]]
            for pair in pairs:
                real = getattr(ops, name)(x, *pair, rank_world.name, axis, *rest)
                meta = getattr(ops, name)(x.to("meta"), *pair, "no world needed", axis, *rest)
                assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride()), (name, pair)

    world.run(body)


EXPECTED_NODES = {"identity": "aten.alias.default", "all_to_all_back": "phx.all_to_all.default"}


@pytest.mark.parametrize("pair", PAIRS)
def test_tracing_sees_primitives_in_both_directions(pair: str) -> None:
    """With fake tensors and no world at all: names are text to a tracer."""

    def forward_and_backward(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.ops.phx.move(x * 2, pair, "later", "tp", 2, 0, 1)
        return y, torch.autograd.grad(y, x, grad)[0]

    with FakeTensorMode():
        x = torch.empty(4, 8, requires_grad=True)
        grad = torch.empty_like(torch.ops.phx.move(x.detach(), pair, "later", "tp", 2, 0, 1))
        graph = make_fx(forward_and_backward)(x, grad).graph
    nodes = [str(node.target) for node in graph.nodes if "phx" in str(node.target) or "alias" in str(node.target)]
    assert nodes == [EXPECTED_NODES.get(primitive, f"phx.{primitive}.default") for primitive in PAIRS[pair]]
    for node in graph.nodes:
        if "phx" in str(node.target):
            assert "later" in node.args


def test_a_traced_graph_runs_on_every_rank(world: LocalWorld) -> None:
    """One graph, with the world's name put in, gives what eager autograd gives."""

    def loss_and_gradient(x: Tensor, w: Tensor, name: str) -> tuple[Tensor, Tensor]:
        y = torch.ops.phx.move(x, "gather_vary", name, "tp", 2, 0, 0) @ torch.ops.phx.take(w, name, "tp", 2, 1, 3, 1)
        loss = torch.ops.phx.move(y.pow(2).sum(), "reduce", name, "tp", 2, 0, 0)
        return loss, torch.autograd.grad(loss, x)[0]

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 5, dtype=torch.float64, requires_grad=True)
        graph = make_fx(lambda x, w: loss_and_gradient(x, w, "later"))(x, torch.empty(5, 6, dtype=torch.float64))
    w = torch.randn(5, 6, dtype=torch.float64)
    graphs = [renamed(graph, rank_world.name) for rank_world in world.worlds]

    def body(rank_world, graph):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank_world.rank), dtype=torch.float64)
        with torch.no_grad():
            traced = graph(x, w)
        eager = loss_and_gradient(x.requires_grad_(), w, rank_world.name)
        for a, b in zip(traced, eager, strict=True):
            assert torch.equal(a, b)

    world.run(body, graphs)


def renamed(module: torch.fx.GraphModule, name: str) -> torch.fx.GraphModule:
    copied = copy.deepcopy(module)
    for node in copied.graph.nodes:
        node.args = tuple(name if isinstance(a, str) and a == "later" else a for a in node.args)
    copied.recompile()
    return copied


def test_operators_keep_torchs_rules() -> None:
    """Schema, fake tensors and autograd registration, by torch's own checker, where it can run: on an axis of one rank."""
    with local(Mesh(tp=1)) as world:
        name, x = world.worlds[0].name, torch.randn(4, 6, requires_grad=True)
        tests = ("test_schema", "test_faketensor")
        for op, rest in {
            "all_reduce": (name, "tp", "sum"),
            "all_gather": (name, "tp", 1, 0),
            "reduce_scatter": (name, "tp", 1, 1),
            "shard": (name, "tp", 1, 1),
            "all_to_all": (name, "tp", 1, 0, 1),
            "keep_first": (name, "tp"),
            "offset": (name, "tp", 2),
            "put": (name, "tp", 1, 0, 4, 1, 8),
        }.items():
            torch.library.opcheck(getattr(torch.ops.phx, op).default, (x.detach(), *rest), test_utils=tests)
        torch.library.opcheck(
            torch.ops.phx.take.default, (x, name, "tp", 1, 0, 2, 1), test_utils=(*tests, "test_autograd_registration")
        )
        torch.library.opcheck(
            torch.ops.phx.move.default, (x, "gather", name, "tp", 1, 0, 1), test_utils=(*tests, "test_autograd_registration")
        )
