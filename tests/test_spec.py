"""Cutting and joining: the definition that collectives are tested against, tested against indexing."""

from __future__ import annotations

import random

import pytest
import torch

from phalanx.mesh import Mesh
from phalanx.spec import Spec, dim_ranges, owner, shard, unshard


def test_a_shard_is_the_indexed_slice() -> None:
    mesh = Mesh(dp=2, tp=3)
    value = torch.arange(24).view(4, 6)
    spec = Spec((("dp",), ("tp",)))
    assert shard(value, spec, mesh, mesh.rank({"dp": 1, "tp": 2})).tolist() == value[2:4, 4:6].tolist()


def test_two_axes_on_one_dimension_are_ordered() -> None:
    mesh = Mesh(a=2, b=2)
    value = torch.arange(8)
    at = mesh.rank({"a": 1, "b": 0})
    assert shard(value, Spec((("a", "b"),)), mesh, at).tolist() == [4, 5]
    assert shard(value, Spec((("b", "a"),)), mesh, at).tolist() == [2, 3]


def test_a_fused_dimension_is_cut_part_by_part() -> None:
    """Of q (4), k (2) and v (2), rank 1 of 2 holds the second half of each."""
    value = torch.arange(8)
    spec = Spec((("tp",),), parts=((0, (4, 2, 2)),))
    assert shard(value, spec, Mesh(tp=2), 1).tolist() == [2, 3, 5, 7]
    assert dim_ranges(spec, (8,), Mesh(tp=2), 1, 0) == ((2, 2), (5, 1), (7, 1))


def test_partial_shards_add_up() -> None:
    mesh = Mesh(tp=3)
    spec = Spec((), frozenset({"tp"}))
    assert unshard([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0)], spec, mesh) == 7
    assert [float(shard(torch.tensor(5.0), spec, mesh, rank)) for rank in range(3)] == [5, 0, 0]


def test_each_element_has_one_owner() -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    assert [r for r in range(8) if owner(Spec((("tp",),)), mesh, r)] == [0, 1]
    assert [r for r in range(8) if owner(Spec.replicated(1), mesh, r)] == [0]


def test_join_undoes_cut() -> None:
    rng = random.Random(0)
    for _ in range(200):
        mesh = Mesh(a=rng.choice([1, 2, 3]), b=rng.choice([2, 4]))
        dims: list[tuple[str, ...]] = [(), ()]
        for axis in rng.sample(mesh.names, rng.randint(0, 2)):
            dim = rng.randrange(2)
            dims[dim] = (*dims[dim], axis)
        partial = frozenset(axis for axis in mesh.names if axis not in dims[0] + dims[1] and rng.random() < 0.3)
        parts = ((0, (24, 48)),) if rng.random() < 0.5 else ()
        spec = Spec((dims[0], dims[1]), partial, parts)
        value = torch.randn(72, 24, dtype=torch.float64)
        assert torch.equal(unshard([shard(value, spec, mesh, rank) for rank in range(mesh.size)], spec, mesh), value)


def test_uneven_shards_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"dimension 1 of size 6 in shape \(4, 6\) does not divide over tp, which has 4 ranks"):
        Spec(((), ("tp",))).local_shape((4, 6), Mesh(tp=4))
    with pytest.raises(ValueError, match=r"dimension 0 of size 3 .* 2 ranks"):
        Spec((("tp",),), parts=((0, (4, 3)),)).check((7,), Mesh(tp=2))


def test_an_axis_is_used_once() -> None:
    with pytest.raises(ValueError, match="uses one mesh axis twice"):
        Spec((("tp",), ("tp",)))
    with pytest.raises(ValueError, match="uses one mesh axis twice"):
        Spec((("tp",),), frozenset({"tp"}))
