"""The one place that decides which collective takes a value from the state it has to the state its consumer needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from phalanx.mesh import Mesh
from phalanx.spec import Spec


@dataclass(frozen=True)
class Step:
    """One collective: a row of the move table on one axis. `dim` (and `dim2` for exchange) are dimensions of the value.

    `parts` are the global part sizes of a fused `dim`, whose slices must be put back in order.
    """

    pair: str
    axis: str
    dim: int = 0
    dim2: int = 0
    parts: tuple[int, ...] | None = None


def steps(have: Spec, want: Spec, varying: frozenset[str], mesh: Mesh, differentiable: bool = True) -> list[Step]:
    """The collectives from `have` to `want` for an operator that varies over `varying`, cheapest first.

    An axis on which the value is, and stays, replicated while the operator varies over it gets `vary` (identity forward, all_reduce
    backward), first, so that it touches the value itself and can be deferred if that is a parameter. Then whatever makes
    the value smaller (reduce_scatter, slice), then exchanges, then whatever makes it larger.
    """
    first = [axis for axis in mesh.names if axis in varying and axis not in have.varying | want.varying]
    last = [axis for axis in mesh.names if axis in varying and axis in have.partial and axis not in want.varying]
    plan = [Step("vary", axis) for axis in first] if differentiable else []
    state = have
    while (step := _next(state, want, varying if differentiable else frozenset(), mesh)) is not None:
        plan.append(step)
        state = after(state, step)
    assert state == want, f"no path from {have} to {want}"
    return plan + ([Step("vary", axis) for axis in last] if differentiable else [])


def _next(state: Spec, want: Spec, varying: frozenset[str], mesh: Mesh) -> Step | None:
    backwards = tuple(reversed(mesh.names))
    entering = dict(_entering(state, want))
    leaving = dict(_leaving(state, want))
    rows: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ("reduce_scatter", lambda axis: axis in state.partial and axis in entering),
        ("shard", lambda axis: axis not in state.varying and axis in entering),
        ("exchange", lambda axis: axis in leaving and axis in entering and not (state.parts or want.parts)),
        ("reduce", lambda axis: axis in state.partial and axis not in want.varying),
        ("gather", lambda axis: axis in leaving),
        # partial, but the dimension that it shall split is still split otherwise: sum now, slice later
        ("reduce", lambda axis: axis in state.partial and axis not in want.partial),
        ("keep_first", lambda axis: axis in want.partial and axis not in state.varying),
    )
    for pair, applies in rows:
        for axis in backwards:
            if not applies(axis):
                continue
            if pair == "exchange":
                return Step(pair, axis, leaving[axis], entering[axis])
            if pair == "gather":
                pair = "gather_vary" if axis in varying and axis not in want.varying else "gather"
                return Step(pair, axis, leaving[axis], parts=state.part_sizes(leaving[axis]))
            if pair in ("reduce_scatter", "shard"):
                return Step(pair, axis, entering[axis], parts=want.part_sizes(entering[axis]))
            return Step(pair, axis)
    return None


def _entering(state: Spec, want: Spec) -> Iterator[tuple[str, int]]:
    """(axis, dimension) where the axis is the next, in order, that must come to split the dimension."""
    for dim, (now, then) in enumerate(zip(state.dims, want.dims, strict=True)):
        if len(then) > len(now) and then[: len(now)] == now and (not now or state.part_sizes(dim) == want.part_sizes(dim)):
            yield then[len(now)], dim


def _leaving(state: Spec, want: Spec) -> Iterator[tuple[str, int]]:
    """(axis, dimension) where the axis is the last, in order, that splits a dimension it must not split (so)."""
    for dim, (now, then) in enumerate(zip(state.dims, want.dims, strict=True)):
        stays = then[: len(now)] == now and state.part_sizes(dim) == want.part_sizes(dim)
        if now and not stays:
            yield now[-1], dim


def after(state: Spec, step: Step) -> Spec:
    """The state of a value once a step is done."""
    axis = step.axis
    if step.pair == "vary":
        return state
    if step.pair == "reduce":
        return state.with_partial(state.partial - {axis})
    if step.pair == "keep_first":
        return state.with_partial(state.partial | {axis})
    if step.pair in ("gather", "gather_vary"):
        return _split(state, step.dim, state.dims[step.dim][:-1], step.parts)
    if step.pair == "exchange":
        state = _split(state, step.dim, state.dims[step.dim][:-1], None)
        return _split(state, step.dim2, (*state.dims[step.dim2], axis), None)
    state = state.with_partial(state.partial - {axis})
    return _split(state, step.dim, (*state.dims[step.dim], axis), step.parts)


def _split(state: Spec, dim: int, axes: tuple[str, ...], parts: tuple[int, ...] | None) -> Spec:
    others = tuple(item for item in state.parts if item[0] != dim)
    mine = ((dim, parts),) if axes and parts else ()
    return Spec(state.with_dim(dim, axes).dims, state.partial, tuple(sorted(others + mine)))
