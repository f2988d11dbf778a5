"""`phx.parallelize`: from a model and a world to a callable training step. The user's end of this room."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from phalanx import hf
from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.derive import Layout, Recompute, derive
from phalanx.derive.capture import Loss, Prepare
from phalanx.derive.compile import compiled_program
from phalanx.derive.evaluate import evaluation
from phalanx.derive.precision import Precision
from phalanx.derive.program import Parameter, Program
from phalanx.derive.watch import Watched, watch
from phalanx.event import Event
from phalanx.mesh import Mesh
from phalanx.run.arguments import check_arguments, check_batch, warn_of_losses
from phalanx.run.executor import Evaluation, Executor, Out
from phalanx.run.gather import check_equal
from phalanx.run.initialize import initial_shard
from phalanx.run.late import LateExecutor, check_late
from phalanx.run.optimizer import AdamW, Config, groups
from phalanx.run.own_loop import Sharded, shard
from phalanx.run.parameters import Parameters
from phalanx.run.precision import LossScale, scale_for
from phalanx.run.torch_optimizer import optimizer_of
from phalanx.run.values import Values, initial_values, real_tensors
from phalanx.schedule import build, from_program
from phalanx.schedule.actions import Schedule, Storage
from phalanx.schedule.check import check
from phalanx.spec import Spec

__all__ = ["Evaluation", "Out", "Sharded", "Step", "parallelize", "shard"]

T = TypeVar("T")
Batch = Mapping[str, Tensor]


def parallelize(
    model: nn.Module,
    world: World | LocalWorld,
    *,
    example: Batch,
    names: Mapping[str, str] | None = None,
    layout: Layout | None = None,
    loss: Loss | None = None,
    optimizer: Config | None = None,
    microbatches: int = 1,
    schedule: str | Schedule = "1f1b",
    chunks: int | None = None,
    seconds: Mapping[str, float] | None = None,
    zero: int | Storage = 0,
    precision: Precision | None = None,
    loss_scale: LossScale | None = None,
    reduce_dtype: torch.dtype | None = None,
    compile: bool = False,
    max_norm: float | None = None,
    barrier: bool = True,
    blocks: str | None = None,
    train: bool = True,
    recompute: Recompute = "none",
    prepare: Prepare | None = None,
    batch_coupling: Literal["microbatch"] | None = None,
    values: Values | None = None,
    seed: int = 0,
) -> Step:
    """A training step of `model` on every rank of `world`, with all communication derived.

    model      plain PyTorch. Its values are kept, and must be the same on every rank; built by phx.deferred_init, each rank
               makes its own shards from `seed`, which dropout depends on as well
    example    the global batch of a step: shapes and dtypes are fixed by it, values are not read
    names      pattern of a parameter, input or `module:out` to the names of its dimensions: {"*.up_proj.weight": "mlp embed"}
    layout     name of a dimension to the mesh axis (or axes, the major first) that splits it, as in {"mlp": "tp"}
    loss       (outputs, batch) to (sum, count) of the loss; None if the model returns its mean cross entropy itself
    optimizer  phx.adamw(...) (the default), phx.sgd(...) or phx.optimizer(torch.optim.X, ...)
    schedule   name of a pipeline schedule, or a Schedule of one's own, which is proved free of deadlock like any other
    chunks     stages of each rank, for schedules that take any number of them
    seconds    measured, of F and backward of each segment by name, by which stages are balanced; None: by the work that is counted
    zero       1, 2 or 3: data ranks store the optimizer's state, and the gradients, and the parameters, once between them. A Storage
               says over which axes (the others hold copies), and how far ahead parameters are gathered. A Schedule of one's own
               has its storage already
    precision  "bf16" or "fp16": compute in it, from float32 parameters that are kept and updated
    loss_scale  of "fp16": where it starts and how it moves; a LossScale() if None
    reduce_dtype  dtype in which gradients travel between ranks; None: that in which they accumulate, float32 or wider
    compile    put what lies between the collectives of each class of segments through Inductor, once for all equal segments
    recompute  what the backward makes again instead of keeping: "none", "selective", "full", the most bytes that a segment may save
               ("64MiB"), or these by pattern of segment names
    max_norm   clip gradients to this global norm
    barrier    False: a rank updates and goes on to its next step before all ranks have ended this one. An update that turns out to
               be wrong (clipped, not finite) is taken back, and the next step runs twice. Costs a copy of what each rank
               updates and of the optimizer's state. The results arrive later (Step.__call__) and are the same, bit for bit
    blocks     pattern of the modules to cut at, if the repeated blocks are not to be found by themselves
    prepare    context to trace in; chosen for Hugging Face models if None
    batch_coupling  "microbatch" lets what mixes samples (batch statistics) see one microbatch at a time; without it, such a model
               is refused if there are several microbatches
    values     where the weights come from, if not from the module: (parameter, world) to the shard that the rank starts with

    On a World every rank calls this; on a LocalWorld it is called once for all. Raises ValueError, before any rank computes,
    for what does not fit together.
    """
    check_arguments(model, world, example=example, names=names, layout=layout, loss=loss, optimizer=optimizer)
    config = optimizer if optimizer is not None else AdamW()
    scale = scale_for(precision, loss_scale)
    if not barrier:
        check_late(config)
    if isinstance(schedule, Schedule) and schedule.late == barrier:
        raise ValueError(
            f"the schedule {schedule.name} was made {'without' if schedule.late else 'with'} a barrier before the optimizer, but "
            f"barrier={barrier}; give barrier={not barrier}, or build it from a View with late={not schedule.late}"
        )
    if isinstance(schedule, Schedule):
        given = [f"{name}={value!r}" for name, value in (("zero", zero or None), ("chunks", chunks)) if value is not None]
        if given:
            raise ValueError(f"the schedule {schedule.name} has stages and storage already: leave {' and '.join(given)} out")
    if reduce_dtype is not None and not (reduce_dtype.is_floating_point and reduce_dtype.itemsize > 1):
        raise ValueError(f"reduce_dtype is {reduce_dtype}; gradients travel as torch.bfloat16, torch.float16 or wider")
    if prepare is None and hf.is_hf_model(model):
        prepare = hf.capture_context
    local = isinstance(world, LocalWorld)
    program = derive(
        model, world.mesh, example=example, names=names, layout=layout, loss=loss, microbatches=microbatches, blocks=blocks,
        train=train, device="cpu" if isinstance(world, LocalWorld) else world.device.type, prepare=prepare, recompute=recompute,
        batch_coupling=batch_coupling, precision=precision,
    )  # fmt: skip
    warn_of_losses(program, world)
    storage = storage_of(zero, program) if isinstance(schedule, str) else schedule.storage
    view = from_program(program, storage, late=not barrier)
    if storage is not None and program.mesh.size > 1 and not any(segment.gathers for segment in view.segments):
        over = ", ".join(storage.axes) or "no axis"
        warnings.warn(f"zero={storage.level} divides nothing: no gradient is a sum over several ranks of {over}", stacklevel=2)
    pp = world.mesh.extent(("pp",))
    by_index = None if seconds is None else {s.index: seconds[s.name] for s in program.segments if s.name in seconds}
    planned = build(view, schedule, pp, microbatches, chunks, by_index) if isinstance(schedule, str) else schedule
    check(planned, view)
    if compile:
        used = {action.kind for actions in planned.ranks for action in actions} & {"F", "B", "I", "W"}
        program, _ = compiled_program(program, used)
    decay = groups(config, program)

    def executor(rank: World) -> Executor:
        if not local:
            check_equal(real_tensors(model), rank)
        own = initial_values(model, rank, seed)
        first = own if values is None else lambda p: values(p, rank) if p.name in program.parameters else own(p)
        parameters = Parameters(program, rank, planned.places, first, decay, planned.storage, reduce_dtype)
        return (Executor if barrier else LateExecutor)(
            program, planned, rank, parameters, optimizer_of(config, parameters), max_norm=max_norm, seed=seed, loss_scale=scale
        )

    return Step(model, world, program, planned, _on_ranks(world, executor), seed, values)


def storage_of(zero: int | Storage, program: Program) -> Storage | None:
    """What `zero` asks for: by default over all axes that split the batch."""
    if isinstance(zero, Storage):
        return zero
    return Storage(zero, program.batch_axes) if zero else None


class Step:
    """A training step. Call it with a global batch; every rank gets the same Out.

    On a LocalWorld one call runs every rank and returns one result; with `local=True` it takes a batch for each rank.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World | LocalWorld,
        program: Program,
        schedule: Schedule,
        ranks: Sequence[Executor],
        seed: int,
        values: Values | None = None,
    ) -> None:
        self.world, self.program, self.schedule = world, program, schedule
        self.executors = tuple(ranks)
        """Of the ranks of this process."""
        self._quiet: Program | None = None
        """In evaluation mode, once it is asked for."""
        self._watched: dict[str, Watched] = {}
        self._last: tuple[Batch | Sequence[Batch], bool] | None = None
        """The batch of the last step, for `watch`."""
        # The model itself is not kept, so that its memory is the user's to free.
        own, hosted = (
            model.state_dict(),
            {n for p in program.parameters.values() if program.hosts(p.name) for n in (p.name, *p.aliases)},
        )
        self.names = tuple(own)
        trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        here = self.executors[0].world
        self.unused = {
            name: _unused(model, name, value, seed, here, values if name in trained else None)
            for name, value in own.items()
            if name not in hosted
        }
        """Tensors of the model's state that no segment uses, which never change."""

    def __call__(self, batch: Batch | Sequence[Batch], local: bool = False) -> Out:
        """One training step; see Executor.step for what it raises.

        Without a barrier the Out is a LateOut: reading one of its numbers waits until all ranks have ended the step. The last update
        is complete after `settle`, which whatever looks at weights, gradients or the optimizer's state calls first.
        """
        self._last = batch, local
        return self._with_batches(batch, local, lambda executor, mine: executor.step(mine, local=local))

    def settle(self) -> None:
        """Complete the last update; every rank calls this. Nothing is left to do unless there is no barrier.

        Before it a step that has to be clipped makes the next one run twice; before a world is closed it leaves nothing in flight.
        """
        if self.schedule.late:
            self.each(lambda executor: executor.settle())

    def evaluate(self, batch: Batch | Sequence[Batch], local: bool = False) -> Evaluation:
        """Mean loss on a batch of the same shape, forward only and without dropout.

        That is all of evaluation mode: what a forward of one's own does only `if self.training`, it does here as well.
        """
        quiet = self._quiet = self._quiet or evaluation(self.program)
        return self._with_batches(batch, local, lambda executor, mine: executor.evaluate(mine, quiet, local=local))

    def watch(
        self, path: str, batch: Batch | Sequence[Batch] | None = None, local: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        """Global value, on every rank, of what the module at `path`, as in "layers.3.mlp", returns on a batch; forward only.

        Without a batch, on that of the last step, whose update is in the weights by then. A tuple if several tensors leave the
        module, or if it runs several times.
        """
        if batch is None:
            if self._last is None:
                raise ValueError(f"no step was taken yet: give the batch on which to watch {path!r}")
            batch, local = self._last
        if path not in self._watched:
            self._watched[path] = watch(self.program, path)
        watched = self._watched[path]
        values = self._with_batches(batch, local, lambda executor, mine: executor.watch(watched, mine, local=local))
        return values[0] if len(values) == 1 else values

    def gradients(self) -> dict[str, Tensor]:
        """Global gradients of the last step by first name, before clipping, on every rank."""
        return self.each(lambda executor: executor.gradients())[0]

    def state_dict(self) -> dict[str, Tensor]:
        """Global values under the names of `model.state_dict()`, on every rank."""
        self.settle()
        values = self.each(lambda executor: executor.parameters.state_dict())[0]
        return {name: values[name] if name in values else self.unused[name] for name in self.names}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take global values, whichever layout they come from. Raises ValueError for a missing tensor or another shape."""

        self.settle()

        def load(executor: Executor) -> None:
            executor.wait_until_read()
            executor.parameters.load_state_dict(state)
            executor.reloaded()

        self.each(load)

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Global moments as `name/moment`, the number of updates and the loss scale, on every rank."""
        self.settle()
        state = self.each(lambda executor: executor.optimizer.state_dict())[0]
        scale = self.executors[0].loss_scale
        return state if scale is None else {**state, **scale.state_dict()}

    def load_optimizer_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take what `optimizer_state_dict` returned on any layout, and go on at its step."""

        self.settle()

        def load(executor: Executor) -> None:
            executor.wait_until_read()
            executor.optimizer.load_state_dict(state)
            if executor.loss_scale is not None:
                executor.loss_scale = executor.loss_scale.loaded(state)
            skipped = 0 if executor.loss_scale is None else executor.loss_scale.skipped
            executor.seek(executor.optimizer.steps + skipped)

        self.each(load)

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Fills the list, when the block ends, with an Event for every action of this process's ranks inside it.

        Completes the last update when it begins and when it ends. What a step without a barrier has computed in vain is left out.
        """
        self.settle()
        found: list[Event] = []
        for executor in self.executors:
            executor.events.clear()
            executor.record = True
        try:
            yield found
            self.settle()
        finally:
            for executor in self.executors:
                executor.record = False
                found += executor.events

    def explain(self) -> str:
        """Why each communication exists and what it costs."""
        room = importlib.import_module("phalanx.schedule.explain")
        return str(room.explain(self.program, self.schedule))

    def _with_batches(self, batch: Batch | Sequence[Batch], local: bool, fn: Callable[[Executor, Batch], T]) -> T:
        if isinstance(batch, Mapping):
            if local and len(self.executors) > 1:
                raise ValueError(f"local=True on a local world takes one batch for each of its {len(self.executors)} ranks")
            return self.each(lambda executor: fn(executor, batch))[0]
        if not isinstance(batch, Sequence):
            check_batch(batch)
        if not local or len(batch) != len(self.executors):
            raise ValueError(
                f"{len(batch)} batches were given; a list is for local=True and has one for each of {len(self.executors)} ranks"
            )
        return self.each(lambda executor: fn(executor, batch[self.executors.index(executor)]))[0]

    def each(self, fn: Callable[[Executor], T]) -> list[T]:
        """fn of every rank of this process, which may communicate in it."""
        by_rank = {executor.world.rank: executor for executor in self.executors}
        return _on_ranks(self.world, lambda world: fn(by_rank[world.rank]))


def _unused(model: nn.Module, name: str, own: Tensor, seed: int, world: World, values: Values | None) -> Tensor:
    """A tensor of the model that no segment uses."""
    if values is not None:
        return values(Parameter(name, tuple(own.shape), own.dtype, Spec.replicated(own.dim())), world)
    if not own.is_meta:
        return own.detach().clone()  # the module is the user's, and so are its tensors
    return initial_shard(model, name, Spec.replicated(own.dim()), Mesh(), 0, seed)


def _on_ranks(world: World | LocalWorld, fn: Callable[[World], T]) -> list[T]:
    """fn on the ranks of this process."""
    return world.run(fn) if isinstance(world, LocalWorld) else [fn(world)]
