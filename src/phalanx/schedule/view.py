"""What a schedule needs to know of a Program, as plain numbers: the tensors that cross each cut, the sums that gradients need.

Pure: a View can be written by hand for a model that does not exist, and holds no tensor, no graph and no rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.mesh import Mesh
from phalanx.schedule.actions import Storage

if TYPE_CHECKING:
    from phalanx.derive.program import Program, Segment, Value


@dataclass(frozen=True)
class Message:
    """One tensor that crosses a cut, as one rank holds it, for one microbatch."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Weight:
    """A trainable parameter of a segment and the sum that its gradient still needs."""

    name: str
    bytes: int
    """Of the gradient's accumulator on one rank, as it lies in flat storage."""
    axes: tuple[str, ...] = ()
    """Mesh axes of more than one rank over which the gradient is partial after the backward, in mesh order."""
    dtype: str = ""
    """Of the parameter: gradients of two dtypes do not share a message."""
    split: tuple[str, ...] = ()
    """Of `axes`, those whose ranks keep a slice of it each (ZeRO): its gradient is scattered over them, not copied."""
    itemsize: int = 4
    """Of the parameter."""


@dataclass(frozen=True)
class Gathered:
    """Parameters of a segment that one all_gather makes whole."""

    parameters: tuple[str, ...]
    bytes: int
    """Of the whole, as it lies in flat storage."""
    axes: tuple[str, ...]
    """In mesh order."""


@dataclass(frozen=True)
class SegmentView:
    """The boundary and the weights of a segment. Tensors travel in the order of the producer's outputs.

    inputs, outputs            the cut before and after this segment
    input_grads, output_grads  those of them that carry a gradient back; none at all means that no backward message exists
    """

    name: str
    inputs: tuple[Message, ...] = ()
    outputs: tuple[Message, ...] = ()
    input_grads: tuple[Message, ...] = ()
    output_grads: tuple[Message, ...] = ()
    weights: tuple[Weight, ...] = ()
    param_bytes: int = 0
    """Of the full parameters on one rank."""
    gathers: tuple[Gathered, ...] = ()
    """What GATHER makes whole: the parameters of which ranks store slices."""
    saved_bytes: int = 0
    flops: Mapping[str, float] = field(default_factory=dict)
    """Of F, B, I and W."""

    @property
    def gather_bytes(self) -> int:
        return sum(gathered.bytes for gathered in self.gathers)


@dataclass(frozen=True)
class View:
    mesh: Mesh
    segments: tuple[SegmentView, ...]
    batch_axes: tuple[str, ...] = ()
    """Axes of more than one rank over which COUNT sums."""
    storage: Storage | None = None
    late: bool = False
    """OPT follows a rank's own gradients and not NORM: it is taken back should NORM say later that it was wrong."""
    flops_per_byte: float = 100.0
    """What a byte that must move costs, in flops: H100, A100 and MI300 do 150 to 300 flops in bf16 in the time of a byte of their memory
    at their peak, and about half of that in practice; a CPU core does about 10."""

    @property
    def pp(self) -> int:
        return self.mesh.shape.get("pp", 1)

    @property
    def last(self) -> int:
        return len(self.segments) - 1

    def hosts(self, weight: str) -> tuple[int, ...]:
        """Segments that use a weight; more than one if it is tied."""
        return tuple(k for k, segment in enumerate(self.segments) if any(w.name == weight for w in segment.weights))

    def cut(self, kind: str, segment: int) -> tuple[Message, ...]:
        """What a SEND or RECV action of that segment carries, as its own end sees it."""
        match kind:
            case "SEND_F":
                return self.segments[segment].outputs
            case "RECV_F":
                return self.segments[segment + 1].inputs
            case "SEND_B":
                return self.segments[segment].input_grads
            case "RECV_B":
                return self.segments[segment - 1].output_grads
        raise ValueError(f"{kind} is not a message")


def from_program(program: Program, storage: Storage | None = None, *, late: bool = False) -> View:
    """The View of a Program, for schedules with that storage and, unless `late`, with a barrier before OPT.

    Raises ValueError if a segment reads a cut that the segment before does not make, or if `storage` divides over an axis that the
    mesh does not have.
    """
    mesh = program.mesh
    for axis in storage.axes if storage else ():
        if axis not in mesh.names:
            raise ValueError(
                f"parameters are to be divided over the axis {axis!r}, but the mesh {str(mesh)!r} has none of that name"
            )
    segments = []
    for k, segment in enumerate(program.segments):
        before = program.segments[k - 1] if k else None
        after = program.segments[k + 1] if k + 1 < len(program.segments) else None
        inputs, input_grads = _incoming(mesh, before, segment)
        outputs, output_grads = _outgoing(mesh, segment, after)
        graphs = segment.cls.graphs
        segments.append(
            SegmentView(
                name=segment.name,
                inputs=inputs,
                outputs=outputs,
                input_grads=input_grads,
                output_grads=output_grads,
                weights=tuple(_weight(program, name, storage) for name in segment.params if program.parameters[name].trainable),
                param_bytes=sum(_message(mesh, value).bytes for value in segment.cls.params),
                gathers=_gathers(program, segment, storage),
                saved_bytes=graphs.saved_bytes if graphs else 0,
                flops=dict(graphs.flops) if graphs else {},
            )
        )
    on_cpu = program.origin is not None and program.origin.device.type == "cpu"
    return View(mesh, tuple(segments), _shared(mesh, program.batch_axes), storage, late, 10.0 if on_cpu else 100.0)


def _incoming(mesh: Mesh, before: Segment | None, segment: Segment) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    values = {s.name: v for s, v in zip(segment.inputs, segment.cls.inputs, strict=True) if s.kind == "cut"}
    made = before.outputs if before else ()
    missing = [name for name in values if name not in made]
    if missing:
        raise ValueError(f"segment {segment.name!r} reads {missing}, but the segment before makes {list(made)}")
    ordered = {name: values[name] for name in made if name in values}
    return _messages(mesh, ordered)


def _outgoing(mesh: Mesh, segment: Segment, after: Segment | None) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    read = {source.name for source in after.inputs if source.kind == "cut"} if after else set()
    return _messages(mesh, {n: v for n, v in zip(segment.outputs, segment.cls.outputs, strict=True) if n in read})


def _messages(mesh: Mesh, values: Mapping[str, Value]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    messages = {name: _message(mesh, value, name) for name, value in values.items()}
    return tuple(messages.values()), tuple(messages[name] for name, value in values.items() if value.requires_grad)


def _message(mesh: Mesh, value: Value, name: str | None = None) -> Message:
    shape = value.spec.local_shape(value.shape, mesh)
    return Message(name or value.name, shape, str(value.dtype).removeprefix("torch."), _numel(shape) * value.dtype.itemsize)


def split_axes(program: Program, name: str, storage: Storage | None) -> tuple[str, ...]:
    """Axes whose ranks store a slice of a parameter each, in mesh order.

    They hold the same values: the gradient of a trained parameter is a sum over them, a frozen one is replicated. What tables and the
    count read stays whole, since they are no segments.
    """
    if storage is None or any(name in other.params for other in (program.count, program.tables) if other):
        return ()
    parameter = program.parameters[name]
    if not parameter.trainable and storage.level < 3:
        return ()
    alike = program.reduce_axes(name) if parameter.trainable else set(storage.axes) - parameter.spec.sharded
    return _shared(program.mesh, tuple(axis for axis in storage.axes if axis in alike))


def _gathers(program: Program, segment: Segment, storage: Storage | None) -> tuple[Gathered, ...]:
    alike: dict[tuple[str, bool, tuple[str, ...], str], list[str]] = {}
    for name in dict.fromkeys(segment.params):
        parameter, split = program.parameters[name], split_axes(program, name, storage)
        if split:
            alone = name if len(program.hosts(name)) > 1 else ""
            alike.setdefault((str(parameter.dtype), parameter.trainable, split, alone), []).append(name)
    found = []
    for (_, _, split, _), names in sorted(alike.items()):
        itemsize = program.parameters[names[0]].dtype.itemsize
        numel = padded_numel(sum(_stored(program, name) for name in names), program.mesh.extent(split), itemsize)
        found.append(Gathered(tuple(names), numel * itemsize, split))
    return tuple(found)


def _stored(program: Program, name: str) -> int:
    """Elements of a parameter's shard in flat storage."""
    parameter = program.parameters[name]
    return stored_numel(_numel(parameter.spec.local_shape(parameter.shape, program.mesh)), parameter.dtype.itemsize)


def _weight(program: Program, name: str, storage: Storage | None) -> Weight:
    parameter = program.parameters[name]
    # Gradients accumulate in the wider of float32 and the parameter's own dtype.
    itemsize = parameter.dtype.itemsize
    axes, split = _shared(program.mesh, program.reduce_axes(name)), split_axes(program, name, storage)
    size = _stored(program, name) * max(4, itemsize)
    return Weight(name, size, axes, str(parameter.dtype).removeprefix("torch."), split, itemsize)


ALIGNMENT_BYTES = 64


def stored_numel(numel: int, itemsize: int) -> int:
    """Elements that a parameter takes in flat storage: whole cache lines, which is also what vector loads on either device want."""
    step = max(1, ALIGNMENT_BYTES // itemsize)
    return -(-numel // step) * step


def padded_numel(numel: int, ranks: int, itemsize: int) -> int:
    """Elements of a range that divides into slices of whole cache lines for so many ranks."""
    step = ranks * max(1, ALIGNMENT_BYTES // itemsize)
    return -(-numel // step) * step


def _shared(mesh: Mesh, axes: frozenset[str] | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis, size in mesh.axes if axis in axes and size > 1)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
