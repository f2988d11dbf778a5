"""Every pair of states: the chosen collectives bring a value, and its cotangent, from one to the other."""

from __future__ import annotations

import itertools

import pytest
import torch

import phalanx.comm.collectives  # noqa: F401
from phalanx.comm.local import LocalWorld
from phalanx.derive.move import after, steps
from phalanx.mesh import Mesh
from phalanx.spec import Spec, shard, unshard

MESH = Mesh(a=2, b=2)
SHAPE = (8, 4)


def states() -> list[Spec]:
    """Every placement of two axes on two dimensions, in both orders on one, and every partial state."""
    found = []
    for place_a, place_b, swapped in itertools.product((None, 0, 1, "partial"), (None, 0, 1, "partial"), (False, True)):
        dims: list[tuple[str, ...]] = [(), ()]
        partial = set()
        for axis, place in (("b", place_b), ("a", place_a)) if swapped else (("a", place_a), ("b", place_b)):
            if place == "partial":
                partial.add(axis)
            elif isinstance(place, int):
                dims[place] = (*dims[place], axis)
        spec = Spec((dims[0], dims[1]), frozenset(partial))
        if spec not in found:
            found.append(spec)
    return found


def fused(spec: Spec) -> Spec:
    return Spec(spec.dims, spec.partial, ((0, (4, 4)),) if spec.dims[0] else ())


@pytest.mark.parametrize("parts", [False, True], ids=["plain", "fused"])
def test_values_and_cotangents_of_every_pair_of_states(parts: bool) -> None:
    """Forward: the global value is the same after the move. Backward: a cotangent S stays S, P and R both become R."""
    torch.manual_seed(0)
    value = torch.randn(SHAPE, dtype=torch.float64)
    cotangent = torch.randn(SHAPE, dtype=torch.float64)
    pairs = [(have, want) for have in states() for want in states()]
    if parts:
        pairs = [(fused(have), fused(want)) for have, want in pairs if have.dims[0] != want.dims[0]]
    assert len(pairs) > 100
    with LocalWorld(MESH) as world:
        for have, want in pairs:
            # an operator that varies exactly where its operand does
            plan = steps(have, want, want.varying, MESH)

            def rank(w, have=have, want=want, plan=plan):  # type: ignore[no-untyped-def]
                # a partial value whose pieces are all non-zero
                x = shard(value, have.with_partial(()), MESH, w.rank)
                for axis in have.partial:
                    x = x * (0.25 if w.coordinates[axis] == 0 else 0.75)
                x = x.requires_grad_()
                with torch.enable_grad():
                    y = _apply(x, plan, have, w)
                    # the cotangent of a partial value is replicated
                    (grad,) = torch.autograd.grad(y, x, shard(cotangent, want.with_partial(()), MESH, w.rank))
                return y.detach(), grad

            results = world.run(rank)
            moved = unshard([r[0] for r in results], want, MESH)
            back = [r[1] for r in results]
            assert torch.allclose(moved, value, atol=1e-15, rtol=1e-15), f"{have} -> {want} by {plan}"
            for r, grad in enumerate(back):
                expected = shard(cotangent, have.with_partial(()), MESH, r)
                assert torch.allclose(grad, expected, atol=1e-15, rtol=1e-15), (
                    f"cotangent of {have} -> {want} by {plan} on rank {r}"
                )


def _apply(x, plan, state, w):  # type: ignore[no-untyped-def]
    """What `lower` writes, for tests: with the reordering of fused dimensions."""
    from phalanx.derive.lower import reordered

    for step in plan:
        size = MESH.shape[step.axis]
        then = after(state, step)
        move = (step.pair, w.name, step.axis, size, step.dim, step.dim2)
        if step.parts and step.pair in ("shard", "reduce_scatter"):
            x = torch.cat(reordered(x, step, size, MESH.extent(state.dims[step.dim]), entering=True), step.dim)
        x = torch.ops.phx.move(x, *move)
        if step.parts and step.pair in ("gather", "gather_vary"):
            x = torch.cat(reordered(x, step, size, MESH.extent(then.dims[step.dim]), entering=False), step.dim)
        state = then
    return x


def test_the_rows_of_the_table_are_single_steps() -> None:
    mesh = Mesh(tp=4)
    r, s0, s1, p = Spec(((), ())), Spec((("tp",), ())), Spec(((), ("tp",))), Spec(((), ()), frozenset({"tp"}))
    vary = frozenset({"tp"})
    none: frozenset[str] = frozenset()
    rows = {
        (p, r, none): ["reduce"],
        (r, r, vary): ["vary"],
        (p, s0, none): ["reduce_scatter"],
        (s0, r, none): ["gather"],
        (s0, r, vary): ["gather_vary"],
        (r, s0, none): ["shard"],
        (s0, s1, none): ["exchange"],
        (r, p, none): ["keep_first"],
        (r, r, none): [],
        (p, p, vary): [],
    }
    for (have, want, varying), pairs in rows.items():
        assert [step.pair for step in steps(have, want, varying, mesh)] == pairs
    # without a gradient there is nothing to prepare for
    assert steps(r, r, vary, mesh, differentiable=False) == []
