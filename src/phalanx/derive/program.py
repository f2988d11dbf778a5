"""The Program: what every rank computes and what it must exchange, the same for all ranks.

A Program is data. It is made by `derive` and read by `schedule`, `run`, `plan` and `explain`; it holds no weights and no rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from phalanx.mesh import Mesh
from phalanx.spec import Spec


@dataclass(frozen=True)
class Source:
    """Where an input of a segment comes from: a value cut from the segment before, a table, or the batch."""

    kind: Literal["cut", "table", "batch"]
    name: str


@dataclass(frozen=True)
class Value:
    """Shape and place of a tensor that crosses a boundary."""

    name: str
    shape: tuple[int, ...]
    """Global shape; for cuts and batch entries that of one microbatch."""
    dtype: torch.dtype
    spec: Spec
    requires_grad: bool = False


@dataclass(frozen=True)
class IndexBound:
    """Valid values of an integer batch entry: 0 to size - 1, and `ignored` if that is not None."""

    size: int
    ignored: int | None = None

    def holds(self, indices: torch.Tensor) -> torch.Tensor:
        """Which entries are valid."""
        valid = (indices >= 0) & (indices < self.size)
        return valid if self.ignored is None else valid | (indices == self.ignored)


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer of the user's model, by its first name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor (tied weights)."""
    trainable: bool = True
    stored: torch.dtype | None = None
    """Dtype of the values that the user gives and gets back, if they are computed with in another; None is `dtype`."""
    valid: tuple[int, ...] | None = None
    """Shape of the values that the user gives and gets back, if `shape` is padded, with zeros at the end; None is `shape`."""

    @property
    def given(self) -> tuple[int, ...]:
        """Shape of the values that the user gives and gets back."""
        return self.shape if self.valid is None else self.valid

    def padded(self, value: Tensor) -> Tensor:
        """A value of the shape `given` with zeros at the end, in the padded shape; itself if nothing is padded."""
        if self.valid is None:
            return value
        long = value.new_zeros(self.shape)
        long[tuple(slice(size) for size in self.valid)].copy_(value)
        return long

    def narrowed(self, value: Tensor) -> Tensor:
        """A value of the padded shape without its padding, in memory of its own; itself if nothing is padded."""
        return value if self.valid is None else value[tuple(slice(size) for size in self.valid)].clone()


@dataclass(frozen=True)
class Piece:
    """A segment before any mesh: one slice of the captured graph, on global shapes.

    graph: placeholders in the order params, buffers, inputs; its output is a tuple of the values named in `outputs`.
    Every node's meta has "val" (a meta or fake tensor), "module" (dotted path of the innermost module) and "source" (file:line).
    """

    name: str
    graph: fx.GraphModule
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[Source, ...]
    outputs: tuple[str, ...]
    key: str
    """Equal for pieces that compute the same function of their placeholders (canonical graph, shapes, dtypes, constants)."""


@dataclass(frozen=True)
class Captured:
    """A model and its loss as pieces, before any mesh.

    pieces   prologue, blocks, epilogue in order; the last one outputs ("loss",), a summed scalar
    tables   values that depend on no parameter and no batch entry, or per microbatch if `tables_read_batch`; None if there are none
    count    the number of valid tokens (or samples) as a function of the batch only; outputs ("count",)
    """

    pieces: tuple[Piece, ...]
    tables: Piece | None
    tables_read_batch: bool
    count: Piece
    parameters: dict[str, Parameter]
    """By first name. Specs are replicated here."""
    buffers: dict[str, Parameter]
    batch: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Batch entries that some graph reads: global shape of one microbatch."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Origin:
    """What a Program was lowered from, for whoever wants a part of it lowered again. It holds no weights."""

    captured: Captured
    outputs: dict[str, Spec]
    """Declared states of module outputs, by module path."""
    device: torch.device
    """Where its graphs run."""


@dataclass(frozen=True)
class Graphs:
    """The executable graphs of one segment class, on local shapes. `run` is the four arguments world, step, microbatch, salt.

    Every callable takes ONE list, which it empties, so that values die at their last use:
    F [*run, *params, *buffers, *inputs]                    -> (outputs tuple, saved tuple)
    B [*run, *params, *buffers, *saved, *grad_outputs]      -> (grad_inputs tuple, grads tuple)
    I [*run, *params, *buffers, *saved, *grad_outputs]      -> (grad_inputs tuple, pending tuple)
    W [*run, *params, *buffers, *saved_for_w, *pending]     -> grads tuple
    E [*run, *params, *buffers, *inputs]                    -> outputs tuple (forward only, nothing saved)
    grad_outputs: one per output that requires grad. grad_inputs: one per input that requires grad. grads: one per param that is
    trainable (None where the graph does not use it).
    `saved_for_w` are the indices into saved that W still needs, so the executor can drop the others after I.
    """

    F: fx.GraphModule
    B: fx.GraphModule
    I: fx.GraphModule  # noqa: E741 - the schedule's letter
    W: fx.GraphModule
    E: fx.GraphModule
    saved_for_w: tuple[int, ...]
    saved_bytes: int
    flops: dict[str, float]
    """Of F, B, I and W, counted on local shapes (2 per multiply-add)."""
    bytes: dict[str, int]
    """Read plus written by the nodes of each graph, without cache reuse."""
    BA: fx.GraphModule | None = None
    """B that writes its parameter gradients itself: [*B's arguments, fresh, *accumulators] -> grad_inputs tuple. One accumulator per
    trainable param: its shape, contiguous, in the wider of float32 and its dtype. fresh: one bool each, True overwrites, False adds."""
    WA: fx.GraphModule | None = None
    """W likewise: [*W's arguments, fresh, *accumulators] -> ()."""


@dataclass(frozen=True)
class SegmentClass:
    """What equal segments share: one lowered graph and what was traced from it.

    params, buffers, inputs and outputs have Specs and global shapes; their names are those of the first segment of the class, and
    a Segment has its own.
    """

    key: str
    lowered: fx.GraphModule
    """Local forward with pair collectives: placeholders world, step, microbatch, salt, params, buffers, inputs; the autograd oracle."""
    params: tuple[Value, ...]
    buffers: tuple[Value, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    deferred: tuple[frozenset[str], ...]
    """Per param: axes over which its gradient is left partial, to be summed by REDUCE."""
    notes: tuple[dict[str, Any], ...] = ()
    """Operators without a rule that run whole on every rank: {"node", "module", "source", "bytes", "why"}."""
    graphs: Graphs | None = None


@dataclass(frozen=True)
class Segment:
    """An instance of a class: its own parameters and bindings."""

    index: int
    name: str
    cls: SegmentClass
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[Source, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """What a training step computes on a mesh, whichever rank asks: segments in order, and where everything lives.

    A rank runs the segments of its stage on its own shards; a Schedule says when. Nothing here changes after `derive`.
    """

    mesh: Mesh
    microbatches: int
    segments: tuple[Segment, ...]
    """Prologue, blocks, epilogue; the outputs of each are the cut that the next one reads."""
    parameters: dict[str, Parameter]
    """By first name, with the Spec that the names and the layout give."""
    buffers: dict[str, Parameter]
    batch: dict[str, Value]
    """Batch entries that some graph reads; shapes are global, of one microbatch."""
    tables: Segment | None
    """Values that several segments need and no parameter decides (rotary tables, masks), made where they are used: never sent."""
    tables_read_batch: bool
    """Then they are made once per microbatch, otherwise once per Program."""
    count: Segment
    """The number of valid tokens of one microbatch, of the batch only; partial over `batch_axes`."""
    batch_axes: tuple[str, ...]
    """Axes that split the batch: COUNT sums over them."""
    warnings: tuple[str, ...] = ()
    report: list[dict[str, Any]] = field(default_factory=list)
    """Operators without a rule that run whole on every rank, as in SegmentClass.notes, with their segment."""
    bounds: dict[str, IndexBound] = field(default_factory=dict)
    """Of the batch entries that are indices."""
    origin: Origin | None = None
    """None for a Program that was written by hand."""

    def hosts(self, parameter: str) -> tuple[int, ...]:
        """Indices of the segments that use a parameter."""
        return tuple(s.index for s in self.segments if parameter in s.params)

    def reduce_axes(self, parameter: str) -> frozenset[str]:
        """Axes over which the gradient of a parameter is summed after the backward of all its segments."""
        axes: frozenset[str] = frozenset()
        for segment in self.segments:
            for name, deferred in zip(segment.params, segment.cls.deferred, strict=True):
                if name == parameter:
                    axes |= deferred
        return axes
