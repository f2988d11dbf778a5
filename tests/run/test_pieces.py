"""Boxes of global tensors, against brute force: of all ranks' boxes every element is written once, and what a rank reads is its shard.

The Programs are random and compute nothing; a case is a function of its seed. Every value is a number that no other element has.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import phalanx as phx
from phalanx.comm.dry import DryTransport
from phalanx.comm.world import World
from phalanx.derive.program import Parameter, Program, Segment, SegmentClass
from phalanx.mesh import Mesh
from phalanx.run import pieces
from phalanx.run.optimizer import Optimizer, groups
from phalanx.run.parameters import Parameters
from phalanx.run.pieces import Kind, Piece, State, flat_boxes, kinds_of, state_of
from phalanx.run.torch_optimizer import optimizer_of
from phalanx.schedule.actions import Storage
from phalanx.spec import Spec, shard

SEEDS = range(30)
Placement = tuple[tuple[int, ...], ...]
"""pp coordinates that host each segment."""


# Runs of elements as boxes


def shapes() -> Iterator[tuple[int, ...]]:
    for dims in range(5):
        yield from itertools.product((1, 3) if dims > 3 else (1, 2, 4), repeat=dims)


def box(values: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        values = values.narrow(dim, start, length)
    return values


def test_every_run_of_every_small_shape_is_its_boxes_in_order() -> None:
    runs = 0
    for shape in shapes():
        numel = math.prod(shape)
        whole = torch.arange(numel).view(shape)
        for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
            found = flat_boxes(shape, start, stop)
            elements = [x for offsets, sizes, _ in found for x in box(whole, offsets, sizes).flatten().tolist()]
            assert elements == list(range(start, stop)), (shape, start, stop)
            assert all(first == int(box(whole, offsets, sizes).flatten()[0]) for offsets, sizes, first in found)
            assert len(found) <= max(1, 2 * len(shape) - 1), (shape, start, stop, found)
            runs += 1
    assert runs > 10_000


def test_what_has_no_elements_has_no_boxes() -> None:
    assert flat_boxes((0, 3), 0, 0) == flat_boxes((2, 0), 0, 0) == flat_boxes((), 1, 1) == []


# Random layouts


@dataclass(frozen=True)
class Case:
    program: Program
    places: Placement
    storage: Storage | None
    optimizer: Any
    values: Mapping[str, Tensor]
    """Global, of the parameters and buffers, by name."""

    @property
    def persistent(self) -> tuple[str, ...]:
        return tuple(name for name in self.values if not name.startswith("made"))


def axes_of(rng: random.Random) -> dict[str, int]:
    sizes = {
        "pp": rng.choice((1, 2, 4)),
        "rep": rng.choice((1, 1, 2)),
        "dp": rng.choice((1, 2, 3)),
        "cp": rng.choice((1, 1, 2)),
        "tp": rng.choice((1, 2, 4)),
    }
    while math.prod(sizes.values()) > 16:
        sizes[rng.choice(list(sizes))] = 1
    kept = [name for name, size in sizes.items() if size > 1 or rng.random() < 0.2]
    rng.shuffle(kept)
    return {name: sizes[name] for name in kept}


def placed(rng: random.Random, pp: int) -> Placement:
    """In order, round and round, to the end and back, or on two ranks each."""
    count = pp * rng.choice((1, 2))
    how = rng.choice(("blocks", "rounds", "vee", "two copies"))
    if how == "blocks":
        return tuple((k * pp // count,) for k in range(count))
    if how == "rounds":
        return tuple((k % pp,) for k in range(count))
    there_and_back = [k % (2 * pp) for k in range(count)]
    at = [k if k < pp else 2 * pp - 1 - k for k in there_and_back]
    return tuple((k,) if how == "vee" else tuple(sorted({k, pp - 1 - k})) for k in at)


def tensor_of(rng: random.Random, name: str, mesh: Mesh, shardable: Sequence[str], dtype: torch.dtype) -> Parameter:
    """Of up to three dimensions, with several axes on one, fused parts, or padding at its end."""
    free = [axis for axis in shardable if rng.random() < 0.5]
    dims, shape, valid, parts = [], [], [], []
    for dim in range(rng.choice((0, 1, 1, 2, 2, 3))):
        axes = tuple(free.pop(rng.randrange(len(free))) for _ in range(min(len(free), rng.choice((0, 1, 1, 2)))))
        ranks, size = mesh.extent(axes), 0
        if rng.random() < 0.3:
            fused = tuple(ranks * rng.choice((1, 2, 3)) for _ in range(rng.choice((2, 3))))
            parts.append((dim, fused))
            size = sum(fused)
        else:
            size = ranks * rng.choice((1, 2, 5))
        is_fused = bool(parts) and parts[-1][0] == dim
        dims.append(axes)
        shape.append(size)
        valid.append(size if is_fused or rng.random() < 0.6 else rng.randint(1, size))
    true = tuple(valid) if valid != shape else None
    return Parameter(name, tuple(shape), dtype, Spec(tuple(dims), parts=tuple(parts)), valid=true)


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    mesh = Mesh(**axes_of(rng))
    places = placed(rng, mesh.extent(("pp",)))
    batch_axes = tuple(axis for axis in ("rep", "dp", "cp") if axis in mesh.names)
    whole = rng.random() < 0.2
    """For an optimizer that takes parameters which are whole on a rank."""
    shardable = [] if whole else [axis for axis in mesh.names if axis in ("cp", "tp")]
    used: list[list[str]] = [[] for _ in places]
    held: list[list[str]] = [[] for _ in places]
    deferred: dict[str, frozenset[str]] = {}
    parameters, buffers = {}, {}
    narrow = rng.choice((None, torch.bfloat16, torch.float32))
    for number in range(rng.randint(1, 8)):
        name = f"weight{number}"
        made = tensor_of(rng, name, mesh, shardable, torch.float64 if narrow is None else torch.bfloat16)
        parameters[name] = Parameter(
            name, made.shape, made.dtype, made.spec, (f"tied{number}",), rng.random() < 0.8,
            torch.float32 if narrow == torch.float32 else None, made.valid,
        )  # fmt: skip
        # What no axis splits may still be summed over it, as key and value heads are that fewer ranks could split.
        free = [axis for axis in mesh.names if axis != "pp" and axis not in made.spec.sharded]
        deferred[name] = frozenset(axis for axis in free if axis in batch_axes or rng.random() < 0.5)
        for host in rng.sample(range(len(places)), min(len(places), rng.choice((1, 1, 2, 3)))):
            used[host].append(name)
    for number in range(rng.randint(0, 3)):
        name = rng.choice(("buffer", "made")) + str(number)
        buffers[name] = tensor_of(rng, name, mesh, shardable, torch.int64)
        for host in rng.sample(range(len(places)), rng.choice((0, 1, min(2, len(places))))):
            held[host].append(name)
    tables = [name for name in buffers if rng.random() < 0.3]
    program = Program(
        mesh=mesh,
        microbatches=1,
        segments=tuple(segment(k, used[k], held[k], deferred) for k in range(len(places))),
        parameters=parameters,
        buffers=buffers,
        batch={},
        tables=segment(-1, [], tables, {}) if tables else None,
        tables_read_batch=False,
        count=segment(-1, [], [], {}),
        batch_axes=batch_axes,
    )
    level = 0 if whole else rng.choice((0, 1, 2, 3))
    over = tuple(axis for axis in batch_axes if rng.random() < 0.8)
    storage = Storage(level, over) if level and over else None
    kind = phx.optimizer(torch.optim.Adafactor) if whole else rng.choice((phx.adamw(), phx.sgd(momentum=0.9), phx.sgd()))
    values = {name: numbered(p.given, p.stored or p.dtype) for name, p in {**parameters, **buffers}.items()}
    return Case(program, places, storage, kind, values)


def segment(index: int, params: list[str], buffers: list[str], deferred: Mapping[str, frozenset[str]]) -> Segment:
    cls = SegmentClass(
        "", fx.GraphModule({}, fx.Graph()), (), (), (), (), deferred=tuple(deferred[name] for name in params)
    )  # fmt: skip
    return Segment(index, f"segment{index}", cls, tuple(params), tuple(buffers), (), ())


def numbered(shape: Sequence[int], dtype: torch.dtype, first: int = 1) -> Tensor:
    """No two elements are equal, as far as the dtype can tell, and none is zero, as padding is."""
    return torch.arange(first, first + math.prod(shape), dtype=torch.float64).view(tuple(shape)).to(dtype)


def sharded(value: Tensor, parameter: Parameter, world: World) -> Tensor:
    return shard(parameter.padded(value), parameter.spec, world.mesh, world.rank)


@dataclass(frozen=True)
class Rank:
    world: World
    parameters: Parameters
    optimizer: Optimizer
    state: State


def rank_of(case: Case, rank: int) -> Rank:
    program = case.program
    world = World(program.mesh, rank, DryTransport(rank, program.mesh.size))

    def first(parameter: Parameter) -> Tensor:
        return sharded(case.values[parameter.name], parameter, world)

    parameters = Parameters(program, world, case.places, first, groups(case.optimizer, program), case.storage)
    optimizer = optimizer_of(case.optimizer, parameters)
    optimizer.resume({"step": 1})
    return Rank(world, parameters, optimizer, state_of(parameters, optimizer, case.persistent))


def check_writes(ranks: Sequence[Rank], case: Case) -> None:
    """Every element of every tensor once, and with its value."""
    kinds = ranks[0].state.kinds
    assert all(rank.state.kinds == kinds for rank in ranks)
    hosted = [name for name, p in case.program.parameters.items() if case.program.hosts(name)]
    kept = {f"model.{name}" for name in (*hosted, *case.program.buffers) if name in case.persistent}
    assert kept == {key for key in kinds if key.startswith("model.")}
    written = {key: torch.zeros(kind.shape, dtype=torch.int64) for key, kind in kinds.items()}
    for rank in ranks:
        for piece in rank.state.writes:
            box(written[piece.key], piece.offsets, piece.value.shape).add_(1)
            assert piece.value.dtype == kinds[piece.key].dtype, piece.key
            if piece.key.startswith("model."):
                value = case.values[piece.key.removeprefix("model.")]
                assert torch.equal(piece.value, box(value, piece.offsets, piece.value.shape)), piece.key
    for key, times in written.items():
        assert bool((times == 1).all()), f"{key} was written {sorted(set(times.flatten().tolist()))} times"


def check_reads(rank: Rank, case: Case) -> None:
    """What is filled from global tensors is, in every place where the rank holds some of it, its shard of them."""
    world, parameters, optimizer = rank.world, rank.parameters, rank.optimizer
    news = {key: numbered(kind.shape, kind.dtype, 1000 * k) for k, (key, kind) in enumerate(rank.state.kinds.items(), 2)}
    fill(rank.state.reads, news)
    for name, value in parameters.buffers.items():
        if name in case.persistent:
            assert torch.equal(value, sharded(news[f"model.{name}"], case.program.buffers[name], world)), name
    for unit in parameters.units:
        for place, own, part in unit.pieces():
            name = place.parameter.name

            def wanted(key: str, p: Parameter = place.parameter, part: slice = part) -> Tensor:
                return sharded(news[key], p, world).reshape(-1)[part]

            value = wanted(f"model.{name}")
            assert torch.equal(unit.own_values[own], value.to(unit.dtype)), name
            if unit.master is not None:
                master = f"optimizer.{name}.master"
                assert torch.equal(unit.master[own], (wanted(master) if master in news else value).to(unit.accumulator)), name
            for moment in case.optimizer.moments if place.parameter.trainable else ():
                assert torch.equal(optimizer.own(unit, moment)[own], wanted(f"optimizer.{name}.{moment}")), (name, moment)
            for state in optimizer.whole_states.get(name, {}):
                assert torch.equal(optimizer.whole(name, state), news[f"optimizer.{name}.{state}"]), (name, state)
        for place in unit.places:
            name = place.parameter.name
            if not unit.sliced:
                value = sharded(news[f"model.{name}"], place.parameter, world)
                assert torch.equal(parameters.views[name], value.to(unit.dtype)), name


def fill(reads: Sequence[Piece], news: Mapping[str, Tensor]) -> None:
    for piece in reads:
        piece.value.copy_(box(news[piece.key], piece.offsets, piece.value.shape))


def check(seed: int) -> None:
    case = case_of(seed)
    ranks = [rank_of(case, rank) for rank in range(case.program.mesh.size)]
    check_writes(ranks, case)
    for rank in ranks:
        check_reads(rank, case)


def check_all(seeds: range) -> None:
    for seed in seeds:
        try:
            check(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(len(SEEDS), 400), marks=pytest.mark.nightly)], ids=["", "nightly"])
@pytest.mark.parametrize("shared_bytes", [0, 24, pieces.SHARED_BYTES])
def test_of_any_layout_every_element_is_written_once_and_a_rank_reads_its_shard(
    shared_bytes: int, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With copies that all ranks write parts of, some of them, and one rank in turn."""
    monkeypatch.setattr(pieces, "SHARED_BYTES", shared_bytes)
    check_all(seeds)


def test_the_cases_have_one_of_everything() -> None:
    cases = [case_of(seed) for seed in SEEDS]
    tensors = [p for case in cases for p in case.program.parameters.values()]
    assert any(len(p.spec.parts) and p.spec.sharded for p in tensors)
    assert any(len(axes) > 1 for p in tensors for axes in p.spec.dims)
    assert any(p.valid is not None and p.spec.sharded for p in tensors)
    assert any(p.valid is not None and p.stored is not None for p in tensors)
    assert {case.storage.level for case in cases if case.storage} == {1, 2, 3}
    assert any(len(place) == 2 for case in cases for place in case.places)
    tied = [(case, case.program.hosts(p)) for case in cases for p in case.program.parameters]
    assert any(len({case.places[host] for host in hosts}) > 1 for case, hosts in tied)
    assert any(
        case.program.tables and {*case.program.tables.buffers} & {*s.buffers} for case in cases for s in case.program.segments
    )
    assert any(isinstance(case.optimizer, type(phx.optimizer(torch.optim.Adafactor))) for case in cases)


# Mistakes that the checks above must see


def late_start(shape: Sequence[int], start: int, stop: int) -> list[Any]:
    return flat_boxes(shape, start + 1 if stop - start > 3 else start, stop)


def early_stop(shape: Sequence[int], start: int, stop: int) -> list[Any]:
    return flat_boxes(shape, start, stop - 1 if stop - start > 3 else stop)


def moved(ranges: Any, offset: int, size: int, end: int, real: Any = pieces._pieces) -> Any:
    return [(begin, length, max(0, place - 1)) for begin, length, place in real(ranges, offset, size, end)]


def with_padding(ranges: Any, offset: int, size: int, end: int, real: Any = pieces._pieces) -> Any:
    return real(ranges, offset, size, end + 1)


def unfused(ranges: Any, offset: int, size: int, end: int, real: Any = pieces._pieces) -> Any:
    start, total = ranges[0][0], sum(length for _, length in ranges)
    return real([(start, total)], offset, size, end)


def everybody(spec: Spec, split: Any, stages: Any, world: World, real: Any = pieces._copy) -> tuple[int, int]:
    return 0, real(spec, split, stages, world)[1]


def without_stages(spec: Spec, split: Any, stages: Any, world: World, real: Any = pieces._copy) -> tuple[int, int]:
    return real(spec, (*split, "pp"), stages, Without(world))


class Without:
    """A world whose mesh has no stages."""

    def __init__(self, world: World) -> None:
        shape = {name: size for name, size in world.mesh.shape.items() if name != "pp"}
        self.mesh, self.coordinates = Mesh(**shape), world.coordinates


MUTATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "an element less at the start": ("flat_boxes", late_start),
    "an element less at the end": ("flat_boxes", early_stop),
    "a box one place off": ("_pieces", moved),
    "a row of the padding": ("_pieces", with_padding),
    "fused parts in a row": ("_pieces", unfused),
    "every copy writes": ("_copy", everybody),
    "every stage that shares a weight writes": ("_copy", without_stages),
    "values that were rounded": ("precise", lambda unit: unit.own_values),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, wrong = MUTATIONS[name]
    monkeypatch.setattr(pieces, where, wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        check_all(SEEDS)


def test_before_the_first_update_only_what_exists_is_kept() -> None:
    """torch's optimizers that keep a state per whole parameter have none yet; moments in slices are zeros from the start."""
    for seed in SEEDS:
        case = case_of(seed)
        rank = rank_of(case, 0)
        before = kinds_of(rank.parameters, rank.optimizer, case.persistent, 0)
        after = kinds_of(rank.parameters, rank.optimizer, case.persistent, 1)
        assert {key: kind for key, kind in after.items() if key in before} == before
        assert after.keys() - before.keys() == {
            f"optimizer.{name}.{state}" for name, states in rank.optimizer.whole_states.items() for state in states
        }
        assert {key.split(".")[0] for key in kinds_of(rank.parameters, None, case.persistent, 1)} <= {"model"}
        assert all(isinstance(kind, Kind) for kind in after.values())
