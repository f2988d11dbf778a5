"""What one training run is: a frozen record that a YAML file fills and the command line overrides.

Says nothing about how it is run. Every value is plain text or a number, so that the record can be written back as it was read.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from phalanx.mesh import Mesh
from phalanx.schedule.actions import Storage

Config = TypeVar("Config", bound="TrainConfig")

DEFAULT_LAYOUT = {"batch": "dp", "heads": "tp", "mlp": "tp", "vocab": "tp"}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning rate over the run."""

    lr: float = 3e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases (fewer than two dimensions) get none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    warmup: int = 20
    """Steps in which the rate rises linearly from near 0 to its peak."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls from its peak to `final` at the last step."""
    final: float = 0.1
    """Rate at the last step as a fraction of the peak."""
    max_norm: float | None = 1.0
    """Global gradient norm above which gradients are scaled down; None never does."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    model: str = "llama-tiny"
    """mlp, llama-tiny, llama-1b, llama-8b, llama-70b; hf: and a Hugging Face folder, as in hf:models/qwen3; or hf-tiny: and a family
    of Hugging Face's, small and random, as in hf-tiny:qwen3."""
    mesh: str = ""
    """Axes and their numbers of ranks, the last varying fastest, as in pp=2,dp=2,tp=2. Empty is one rank."""
    layout: str | None = None
    """Which axis splits which named dimension. Left out: batch=dp,heads=tp,mlp=tp,vocab=tp, as far as mesh and model have them."""
    sequence_parallel: bool = False
    """Split the residual stream between blocks over tp as well: adds residual_seq=tp to the layout."""
    microbatches: int = 1
    """Parts that a step's batch is cut into, one after another through the model."""
    schedule: str = "1f1b"
    """Order of the work under a pipeline (mesh axis pp): a name of `phalanx schedule --list`, or auto, which plans one by the work that is
    counted in each block."""
    chunks: int | None = None
    """Stages of each rank, for schedules that take any number of them (interleaved, looped-bfs)."""
    balance: Path | None = None
    """The trace.json of a run with --trace, on any mesh: stages are balanced by what its blocks took. Left out: by the work that is counted
    in each block."""
    zero: Literal[0, 1, 2, 3] = 0
    """What data ranks store once between them instead of once each: 1 the optimizer's state, 2 and the gradients once they are summed,
    3 and the parameters, gathered for each block when it computes."""
    zero_axes: str | None = None
    """Mesh axes that --zero divides over, joined with +; the other data axes hold copies, as in --mesh rep=2,dp=4 --zero-axes dp.
    Left out: all that split the batch."""
    prefetch: int = 1
    """Blocks whose parameters --zero gathers ahead of the one that computes."""
    precision: Literal["bf16", "fp16"] | None = None
    """Compute in this dtype from float32 parameters, which are kept and updated; fp16 scales the loss."""
    reduce_dtype: Literal["bfloat16"] | None = None
    """Dtype in which gradients travel between ranks. Left out: that in which they add up, float32 or wider."""
    recompute: str = "none"
    """What the backward computes again instead of keeping: none; selective (what is cheap for its bytes, as in attention and
    activations); full (all but the inputs of each block); or the most bytes that a block may keep for each microbatch, as in 64MiB."""
    compile: bool = False
    """Put the graphs of each kind of block through torch.compile."""
    barrier: bool = True
    """Without it a rank updates and starts its next step before all ranks have ended this one; an update that turns out to be wrong
    (clipped, not finite) is made again and the next step runs twice. The same numbers, and one more copy of what a rank updates."""
    steps: int = 200
    """Optimizer steps in all, those before --resume included."""
    batch: int | None = None
    """Sequences in one step over all ranks; the model's own default if left out."""
    seq: int | None = None
    """Tokens in a sequence; the model's own default if left out."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of parameters and computation."""
    device: Literal["cpu", "cuda"] | None = None
    """Where ranks compute. Left out: on the GPUs if there are any (over NCCL), else on the CPU (through shared memory, or over Gloo)."""
    seed: int = 0
    """Decides initial weights, the order of samples and dropout, the same on every mesh."""
    dropout: float = 0.0
    """Dropout probability, for models that have it."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: tuple[str, ...] = ()
    """What to learn from: text files or folders of them (read as bytes), or token folders of `phalanx data pack`. Several are blended by
    weight, as in --data wiki=0.7 code=0.3. Left out: the Python standard library's own sources."""
    mask_documents: bool = False
    """Let no token attend to another document packed into the same sequence, nor predict the first token of the next one."""
    held_out: int = 0
    """Batches of held-out samples (the last twentieth of the text) to evaluate after the last step, and every --eval-every."""
    eval_every: int | None = None
    """Steps between evaluations of the held-out batches, which tell loss and perplexity. Left out: after the last step only."""
    resume: str | None = None
    """Go on with a run: its folder (its newest good checkpoint), one checkpoint, or auto: the run in --out if it has a checkpoint, else a
    new one. Settings are those of the run; the command line overrides them, --mesh for example."""
    init_from: str | None = None
    """Start a new run from these weights: a checkpoint, a run folder, or a Hugging Face folder."""
    init_optimizer: Literal["fresh", "kept"] = "fresh"
    """Of --init-from a checkpoint: forget the optimizer's state, or keep it."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, which are written while training goes on. Left out: one after the last step; 0: none at all."""
    keep: int = 2
    """Newest checkpoints that stay in the folder; 0 keeps all."""
    checkpoints: str | None = None
    """Where checkpoints go: a folder, or any address that fsspec writes to. Left out: the folder checkpoints of the run folder."""
    restarts: int = 0
    """Times that the ranks are started anew, from the newest good checkpoint, after one of them has died. With ranks that another launcher
    starts, this is the launcher's to say."""
    on_non_finite: Literal["stop", "skip", "rewind"] = "stop"
    """When a loss or gradient is not finite: stop with an error; skip the update; or go back to the newest checkpoint and on past the
    samples of that step."""
    on_spike: Literal["ignore", "stop", "skip", "rewind"] = "ignore"
    """The same when a step's loss is far above those before it (--spike-factor), or ignore it."""
    spike_factor: float = 6.0
    """A loss is a spike if it is above the median of the last 64 by this many times their median absolute deviation."""
    check_replicas: int | None = None
    """Steps between checks that what ranks hold copies of is equal on all of them. Left out: never."""
    tensorboard: bool = False
    """Write TensorBoard's event files into the run folder as well."""
    wandb: str | None = None
    """Tell Weights & Biases as well, under this project."""
    trace: int | None = None
    """A step to record, counted from 1: when every action of every rank began and ended, on one clock, into trace.json of the run
    folder, which `phalanx schedule --run` shows. Left out: none."""
    out: Path | None = None
    """Run folder: config.yaml and metrics.jsonl, which replace older ones there unless --resume goes on with them. Left out: a new folder
    under runs/."""
    watch: bool | None = None
    """Write what every rank calls into the folder flight of the run folder, and say why when the run hangs. Left out: over Gloo only.
    Shared memory checks its calls itself; over NCCL a watch must be asked for until it has run on a GPU."""
    profile: Path | None = None
    """A file of `phalanx bench hardware --out`: collectives across hosts are chosen by its links. Only rank 0 needs the file. Left out:
    by links of 1 Gbit/s."""

    def parsed_mesh(self) -> Mesh:
        return Mesh.parse(self.mesh)

    def parsed_layout(self, dimensions: Iterable[str]) -> dict[str, str | tuple[str, ...]]:
        """The layout that was asked for, or the default as far as the mesh has the axis and `dimensions` the name."""
        mesh, known = self.parsed_mesh(), set(dimensions)
        if self.layout is None:
            layout: dict[str, str | tuple[str, ...]] = {
                name: axis for name, axis in DEFAULT_LAYOUT.items() if axis in mesh.names and name in known
            }
        else:
            layout = parse_layout(self.layout, mesh)
        if self.sequence_parallel:
            if "tp" not in mesh.names:
                raise ValueError(f"--sequence-parallel splits over the mesh axis tp, which mesh {self.mesh!r} does not have")
            if "residual_seq" not in known:
                raise ValueError(
                    f"--sequence-parallel needs a dimension named residual_seq, which model {self.model!r} does not have"
                )
            layout["residual_seq"] = "tp"
        return layout

    def storage(self) -> Storage | None:
        """What --zero and its axes ask for."""
        if not self.zero:
            return None
        axes = self._batch_axes() if self.zero_axes is None else tuple(self.zero_axes.split("+"))
        return Storage(self.zero, axes, prefetch=self.prefetch)

    def _batch_axes(self) -> tuple[str, ...]:
        axes = self.parsed_layout(("batch", "residual_seq")).get("batch", ())
        return (axes,) if isinstance(axes, str) else axes

    def check(self) -> None:
        """Raise ValueError for what can be known to be wrong before any rank starts."""
        mesh = self.parsed_mesh()
        for name in ("steps", "microbatches", "batch", "seq", "chunks", "eval_every", "check_replicas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it is a number of at least 1")
        if self.trace is not None and not 1 <= self.trace <= self.steps:
            raise ValueError(f"trace is {self.trace}; it is one of the steps 1 to {self.steps}")
        layout = self.parsed_layout(("batch", "residual_seq"))
        self._check_every_axis_is_used(mesh)
        axes = layout.get("batch", ())
        parts = self.microbatches * mesh.extent([axes] if isinstance(axes, str) else axes)
        if self.batch is not None and self.batch % parts:
            ranks = parts // self.microbatches
            raise ValueError(
                f"batch {self.batch} does not divide into {self.microbatches} microbatches over {ranks} data ranks; "
                f"{parts * max(1, self.batch // parts)} or another multiple of {parts} does"
            )
        self._check_storage(mesh)
        self.check_schedule()
        self._check_life()
        if self.precision is not None and self.dtype != "float32":
            raise ValueError(f"precision {self.precision} computes from float32 parameters; they are to be {self.dtype}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it is a probability of at least 0 and below 1")
        if self.optimizer.lr <= 0:
            raise ValueError(f"optimizer.lr is {self.optimizer.lr}; it is above 0")

    def _check_life(self) -> None:
        """What a run keeps, and what it does when something goes wrong."""
        for name in ("held_out", "keep", "restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a number of at least 0")
        every = self.checkpoint_every
        if every is not None and every < 0:
            raise ValueError(f"checkpoint_every is {every}; it is a number of steps, or 0 for no checkpoint at all")
        if every == 0 and self.checkpoints is not None:
            raise ValueError(f"checkpoints is {self.checkpoints!r}, but checkpoint_every is 0: none is written")
        if self.eval_every is not None and not self.held_out:
            raise ValueError(f"eval_every is {self.eval_every}, but held_out is 0: there is nothing to evaluate")
        if self.resume not in (None, "auto") and self.init_from is not None:
            raise ValueError("resume goes on with a run and init_from begins a new one: give one of them, or resume auto")
        if self.resume == "auto" and self.out is None:
            raise ValueError("resume is auto, which goes on with the run in --out: say which folder that is")
        if self.init_optimizer == "kept" and self.init_from is None:
            raise ValueError("init_optimizer is kept, but without init_from there is none to keep")
        if not 0 < self.spike_factor < math.inf:
            raise ValueError(f"spike_factor is {self.spike_factor}; it is a number above 0")
        if self.wandb == "":
            raise ValueError("wandb is empty; it is the name of a project")
        for name, default, without in (("spike_factor", 6.0, "on_spike"), ("keep", 2, "checkpoint_every")):
            if getattr(self, name) != default and getattr(self, without) in ("ignore", 0):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but {without} is {getattr(self, without)}: it would do nothing"
                )
        for name in ("init_from", "checkpoints"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty: name a path, or leave it out")
        if any(not source.strip() for source in self.data):
            raise ValueError("data has an empty name in it: name text files, folders of them or token folders, or leave it out")
        for name in ("on_non_finite", "on_spike"):
            value = getattr(self, name)
            if value == "rewind" and not every:
                raise ValueError(f"{name} is rewind, which goes back to a checkpoint: say how often with --checkpoint-every")
            if value not in ("stop", "ignore") and not self.barrier:
                raise ValueError(f"{name} is {value}, which is decided before the update: that needs the barrier")
        if self.on_spike == "stop" and not self.barrier:
            raise ValueError("on_spike is stop, which is decided before the update: that needs the barrier")

    def check_schedule(self) -> None:
        """Raise ValueError if the schedule does not exist or does not take these numbers."""
        from phalanx.schedule.pipeline import compute_order

        if self.schedule != "auto":
            compute_order(self.schedule, self.parsed_mesh().extent(("pp",)), self.microbatches, self.chunks)

    def _check_storage(self, mesh: Mesh) -> None:
        """--zero divides over axes whose ranks hold the same parameters: those that split the batch."""
        if self.zero_axes is not None and not self.zero:
            raise ValueError(f"zero_axes is {self.zero_axes!r}, but zero is 0: nothing is divided")
        if self.prefetch != 1 and not self.zero:
            raise ValueError(f"prefetch is {self.prefetch}, but zero is 0: nothing is gathered")
        storage, batch = self.storage(), self._batch_axes()
        for axis in storage.axes if storage else ():
            if axis not in mesh.names:
                raise ValueError(f"zero_axes has {axis!r}; mesh {self.mesh!r} has {closest(axis, mesh.names)}")
            if axis not in batch:
                raise ValueError(
                    f"zero_axes has {axis!r}, whose ranks hold different parameters or compute the same: the axes that split the "
                    f"batch are {', '.join(batch) or 'none'}"
                )
        if storage and self.zero_axes is None and not batch:
            raise ValueError(f"zero {self.zero} divides over data ranks, but no axis of mesh {self.mesh!r} splits the batch")

    def _check_every_axis_is_used(self, mesh: Mesh) -> None:
        """Ranks along an axis that splits nothing would all do the same work."""
        placed = DEFAULT_LAYOUT if self.layout is None else parse_layout(self.layout, mesh)
        used = {axis for axes in placed.values() for axis in ([axes] if isinstance(axes, str) else axes)} | {"pp"}
        if self.sequence_parallel:
            used.add("tp")
        for axis in mesh.names:
            if mesh.shape[axis] > 1 and axis not in used:
                whose = "the default layout" if self.layout is None else f"layout {self.layout!r}"
                raise ValueError(
                    f"mesh {self.mesh!r} has the axis {axis!r}, which {whose} does not use: its {mesh.shape[axis]} ranks would "
                    f"repeat one another. Say what it splits, as in --layout batch={axis}, or leave it out"
                )


def parse_layout(text: str, mesh: Mesh) -> dict[str, str | tuple[str, ...]]:
    """Read `batch=dp,heads=tp`; several axes on one dimension are joined with +, the major first: batch=pod+dp."""
    layout: dict[str, str | tuple[str, ...]] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, places = (piece.strip() for piece in item.partition("="))
        axes = tuple(axis.strip() for axis in places.split("+"))
        if not equals or not name or not all(axes):
            raise ValueError(f"layout {text!r}: {item!r} is not of the form dimension=axis, as in batch=dp,heads=tp")
        if name in layout:
            raise ValueError(f"layout {text!r} places {name!r} twice")
        for axis in axes:
            if axis not in mesh.names:
                raise ValueError(
                    f"layout {text!r} places {name!r} on the axis {axis!r}; mesh {str(mesh)!r} has {closest(axis, mesh.names)}"
                )
        layout[name] = axes[0] if len(axes) == 1 else axes
    return layout


def closest(word: str, known: Iterable[str]) -> str:
    """The part of an error message that offers what there is, the closest match first."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    listed = ", ".join(known) if known else "none"
    return f"{listed} (did you mean {close[0]!r}?)" if close else listed
