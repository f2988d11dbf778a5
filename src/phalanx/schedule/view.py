"""What a schedule needs to know of a Program, as plain numbers: the tensors that cross each cut, the sums that gradients need.

Pure: a View can be written by hand for a model that does not exist, and holds no tensor, no graph and no rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.mesh import Mesh

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
    """Of the full parameters on one rank: what GATHER makes."""
    saved_bytes: int = 0
    flops: Mapping[str, float] = field(default_factory=dict)
    """Of F, B, I and W."""


@dataclass(frozen=True)
class View:
    mesh: Mesh
    segments: tuple[SegmentView, ...]
    batch_axes: tuple[str, ...] = ()
    """Axes of more than one rank over which COUNT sums."""
    prologue: bool = True
    """The first segment is what comes before the blocks, not a block itself."""

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


def from_program(program: Program) -> View:
    """The View of a Program. Raises ValueError if a segment reads a cut that the segment before does not make."""
    mesh = program.mesh
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
                weights=tuple(_weight(program, name) for name in segment.params if program.parameters[name].trainable),
                param_bytes=sum(_message(mesh, value).bytes for value in segment.cls.params),
                saved_bytes=graphs.saved_bytes if graphs else 0,
                flops=dict(graphs.flops) if graphs else {},
            )
        )
    return View(mesh, tuple(segments), _shared(mesh, program.batch_axes), program.segments[0].name == "prologue")


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


def _weight(program: Program, name: str) -> Weight:
    parameter = program.parameters[name]
    numel = stored_numel(_numel(parameter.spec.local_shape(parameter.shape, program.mesh)), parameter.dtype.itemsize)
    # Gradients accumulate in the wider of float32 and the parameter's own dtype.
    size = numel * max(4, parameter.dtype.itemsize)
    return Weight(name, size, _shared(program.mesh, program.reduce_axes(name)), str(parameter.dtype).removeprefix("torch."))


ALIGNMENT_BYTES = 64


def stored_numel(numel: int, itemsize: int) -> int:
    """Elements that a parameter takes in flat storage: whole cache lines, which is also what vector loads on either device want."""
    step = max(1, ALIGNMENT_BYTES // itemsize)
    return -(-numel // step) * step


def _shared(mesh: Mesh, axes: frozenset[str] | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis, size in mesh.axes if axis in axes and size > 1)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
