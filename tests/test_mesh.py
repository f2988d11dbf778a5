"""Ranks, coordinates and groups."""

from __future__ import annotations

import pytest

from phalanx.mesh import Mesh


def test_the_last_axis_varies_fastest() -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    assert mesh.size == 8
    assert mesh.coordinates(3) == {"pp": 0, "dp": 1, "tp": 1}
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(8)] == list(range(8))


def test_groups() -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    assert mesh.group(5, ["tp"]) == (4, 5)
    assert mesh.group(5, ["dp"]) == (5, 7)
    assert mesh.group(5, ["pp", "tp"]) == (0, 1, 4, 5)
    assert mesh.group(5, []) == (5,)
    assert mesh.groups(["dp", "tp"]) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_text() -> None:
    assert Mesh.parse("pp=2, dp=3") == Mesh(pp=2, dp=3)
    assert Mesh.parse("") == Mesh()
    assert Mesh.parse(str(Mesh(a=2, b=1))) == Mesh(a=2, b=1)
    assert Mesh(a=2, b=3) != Mesh(b=3, a=2)  # the order of axes is part of the shape


@pytest.mark.parametrize("text", ["dp", "dp=", "=2", "dp=two", "dp=-1", "d p=2", "dp=2,dp=2"])
def test_wrong_text(text: str) -> None:
    with pytest.raises(ValueError, match="mesh"):
        Mesh.parse(text)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_wrong_size(size: int) -> None:
    with pytest.raises(ValueError, match=r"axis 'dp' has size"):
        Mesh(dp=size)


def test_a_rank_outside() -> None:
    with pytest.raises(ValueError, match=r"rank 4 is outside .* 4 ranks"):
        Mesh(dp=4).coordinates(4)
