"""`phx.shard`: the derived model inside a loop of one's own. A call is one autograd function; the optimizer is yours.

No pipeline and no microbatches here: what needs a list of actions is `parallelize`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import current_thread
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import hf, random
from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.derive import Layout, derive
from phalanx.derive.capture import Loss
from phalanx.derive.evaluate import evaluation
from phalanx.derive.program import Parameter, Program, Segment, Value
from phalanx.run.arguments import check_arguments, warn_of_losses
from phalanx.run.batch import microbatches
from phalanx.run.gather import check_equal, gather
from phalanx.run.layout import contributes
from phalanx.run.operations import callable_of
from phalanx.run.parameters import squared_norm
from phalanx.run.sums import sum_over
from phalanx.run.values import initial_values, real_tensors


def shard(
    model: nn.Module,
    world: World | LocalWorld,
    *,
    layout: Layout | None = None,
    names: Mapping[str, str] | None = None,
    loss: Loss | None = None,
    example: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> Sharded | list[Sharded]:
    """The model as a module that holds this rank's shards; on a LocalWorld one for each rank, to be used in its `run`.

        m = phx.shard(model, world, layout={"batch": "dp", "mlp": "tp"}, example=batch)
        optimizer = torch.optim.AdamW(m.parameters())
        m(batch).backward(); m.sync_gradients(); optimizer.step(); optimizer.zero_grad()

    Arguments are those of `parallelize`; `example` is one call's global batch. Without it the model is captured at the first call, and
    has parameters from then on. The threads of a LocalWorld cannot capture: there `example` is needed.
    """
    check_arguments(model, world, example=example, names=names, layout=layout, loss=loss)
    if world.mesh.extent(("pp",)) > 1:
        raise ValueError(f"phx.shard runs no pipeline, but the mesh is {world.mesh}; use phx.parallelize, or leave out pp")
    device = "cpu" if isinstance(world, LocalWorld) else world.device.type
    prepare = hf.capture_context if hf.is_hf_model(model) else None

    def program(batch: Mapping[str, Tensor]) -> Program:
        derived = derive(
            model, world.mesh, example=batch, names=names, layout=layout, loss=loss, device=device, prepare=prepare
        )
        warn_of_losses(derived, world)
        return derived

    if isinstance(world, LocalWorld):
        if example is None:
            raise ValueError(
                "on a LocalWorld phx.shard needs example=, one call's global batch, since rank threads cannot capture"
            )
        derived = program(example)
        quiet = evaluation(derived)  # now, since rank threads cannot lower
        return [
            Sharded(lambda batch: derived, rank, initial_values(model, rank, seed), seed, example, quiet, threaded=True)
            for rank in world.worlds
        ]
    check_equal(real_tensors(model), world)
    return Sharded(program, world, initial_values(model, world, seed), seed, example)


class Sharded(nn.Module):
    """This rank's shards as parameters, under the model's first names. A call returns a loss that can be differentiated.

    After `eval()` it drops nothing, and the loss has no gradient; `train()` goes on where training was.
    """

    program: Program

    def __init__(
        self,
        derived: Callable[[Mapping[str, Tensor]], Program],
        world: World,
        values: Callable[[Parameter], Tensor],
        seed: int = 0,
        example: Mapping[str, Tensor] | None = None,
        quiet: Program | None = None,
        threaded: bool = False,
    ) -> None:
        super().__init__()
        self.world = world
        self._threaded = threaded
        """The ranks are threads of a local world."""
        self._quiet = quiet
        """The Program in evaluation mode, lowered at its first use if it was not before."""
        self._derived, self._values, self._seed = derived, values, seed
        self._calls = 0
        """Calls so far, which dropout is a function of."""
        self._tables: dict[str, Tensor] | None = None
        self._ready = False
        if example is not None:
            self._build(example)

    def _build(self, example: Mapping[str, Tensor]) -> None:
        program, world, values = self._derived(example), self.world, self._values
        self.program, self._ready = program, True
        for name, parameter in program.parameters.items():
            if program.hosts(name):
                value = values(parameter).to(world.device).clone()
                # Written to the table itself: register_parameter refuses the dots of the model's own names.
                self._parameters[name] = nn.Parameter(value, requires_grad=parameter.trainable)
        for name, buffer in program.buffers.items():
            self._buffers[name] = values(buffer).to(world.device).clone()
        self._trainable = tuple(name for name, p in self._parameters.items() if p is not None and p.requires_grad)

    def forward(self, batch: Mapping[str, Tensor], count: int | Tensor | None = None, local: bool = False) -> Tensor:
        """Global mean loss of this call, on every rank. Its backward adds to `grad`, partial until `sync_gradients`.

        Several calls before a step average by call if you divide by their number; with `count`, the number of valid tokens in
        all of them together, their losses add up to the exact mean over tokens.
        """
        if self._threaded and self.world.mesh.size > 1 and not current_thread().name.startswith("phx-rank-"):
            raise ValueError(
                f"this is the module of rank {self.world.rank} of {self.world.mesh.size}, and the others would never come: on a local "
                "world all call theirs together, as in world.run(lambda rank, m: m(batch).item(), modules)"
            )
        if not self._ready:
            self._build(batch)
        part = microbatches(batch, self.program, self.world, local=local)[0]
        if not self.training:
            return self._evaluated(part, count)
        loss: Tensor = _Loss.apply(self, part, count, *(self._parameters[name] for name in self._trainable))  # type: ignore[no-untyped-call]
        self._calls += 1
        return loss

    @torch.no_grad()
    def _evaluated(self, part: Mapping[str, Tensor], count: int | Tensor | None) -> Tensor:
        program = self._quiet = self._quiet or evaluation(self.program)
        tables, cut = self.tables(part), dict[str, Tensor]()
        for segment in program.segments:
            assert segment.cls.graphs is not None
            values = {"cut": cut, "table": tables, "batch": part}
            inputs = [values[source.kind][source.name] for source in segment.inputs]
            outputs = callable_of(segment.cls.graphs.E)([*self.arguments(segment), *inputs])
            cut = dict(zip(segment.outputs, outputs, strict=True))
        return self.mean(program, cut, part, count)[0]

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Sum the gradients over the axes that the layout leaves them partial on. Once per step, after the last backward."""
        handles = []
        for name in self._trainable:
            axes = sorted(self.program.reduce_axes(name))
            parameter = self._parameters[name]
            assert parameter is not None
            if self.world.mesh.extent(axes) == 1:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.contiguous()
            handles.append(sum_over(self.world, parameter.grad, axes))
        for handle in handles:
            handle.wait()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_, over the shards of all ranks; after `sync_gradients`. Returns the norm."""
        square = torch.zeros((), dtype=torch.float64, device=self.world.device)
        graded = [(name, p.grad) for name, p in self._parameters.items() if p is not None and p.grad is not None]
        for name, grad in graded:
            if contributes(self.program.parameters[name].spec, self.world):
                square += squared_norm(grad.contiguous().view(-1))
        self.world.transport.all_reduce(square, self.world.group(self.world.mesh.names)).wait()
        norm = square.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, grad in graded:
            grad.mul_(scale.to(grad.dtype))
        return norm

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Global values by first name and aliases, on every rank."""
        known = {**self.program.buffers, **self.program.parameters}
        state = {}
        for name, x in {**self._buffers, **self._parameters}.items():
            if x is not None:
                value = known[name].narrowed(gather(x.detach(), known[name].spec, self.world))
                state.update(dict.fromkeys((name, *known[name].aliases), value))
        return state

    # What the autograd function runs

    def arguments(self, segment: Segment) -> list[Any]:
        """Run arguments (one microbatch, calls for steps), parameters and buffers of a segment."""
        weights = [self._parameters[name] for name in segment.params]
        buffers = [self._buffers[name] for name in segment.buffers]
        return [
            self.world.name,
            self._calls,
            0,
            random.salt(self._seed, segment.index),
            *(w.detach() for w in weights if w is not None),
            *buffers,
        ]

    def tables(self, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
        segment = self.program.tables
        if segment is None:
            return {}
        if self._tables is None or self.program.tables_read_batch:
            assert segment.cls.graphs is not None
            inputs = [part[source.name] for source in segment.inputs]
            values = callable_of(segment.cls.graphs.E)([*self.arguments(segment), *inputs])
            self._tables = dict(zip(segment.outputs, values, strict=True))
        return self._tables

    def counted(self, part: Mapping[str, Tensor]) -> Tensor:
        """Valid tokens in the global batch of this call."""
        segment = self.program.count
        assert segment.cls.graphs is not None
        inputs = [part[source.name] for source in segment.inputs]
        total = callable_of(segment.cls.graphs.E)([*self.arguments(segment), *inputs])[0].double()
        return self.summed(total, segment.cls.outputs[0].spec.partial)

    def mean(
        self, program: Program, cut: Mapping[str, Tensor], part: Mapping[str, Tensor], count: int | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The mean loss on every rank, from the last segment's outputs, and what it was divided by."""
        [name], [final] = program.segments[-1].outputs, program.segments[-1].cls.outputs
        total = self.summed(cut[name], final.spec.partial)
        divisor = self.counted(part) if count is None else torch.as_tensor(count, dtype=torch.float64, device=total.device)
        return (total.double() / divisor).to(final.dtype), divisor

    def summed(self, x: Tensor, axes: Sequence[str] | frozenset[str]) -> Tensor:
        x = x.detach().clone()
        sum_over(self.world, x, sorted(axes)).wait()
        return x

    def missing(self, segment: Segment, index: int) -> bool:
        """True if this rank's gradient of a parameter repeats what another rank contributes to the sum (see Parameters)."""
        name, deferred = segment.params[index], segment.cls.deferred[index]
        return any(self.world.coordinates.get(axis, 0) for axis in self.program.reduce_axes(name) - deferred)


class _Loss(torch.autograd.Function):
    """All segments forward, and backward through their own graphs."""

    @staticmethod
    def forward(ctx: Any, module: Sharded, part: Mapping[str, Tensor], count: int | Tensor | None, *weights: Tensor) -> Tensor:
        program, tables = module.program, module.tables(part)
        cut: dict[str, Tensor] = {}
        tape = []
        for segment in program.segments:
            assert segment.cls.graphs is not None
            values = {"cut": cut, "table": tables, "batch": part}
            inputs = [values[source.kind][source.name] for source in segment.inputs]
            outputs, saved = callable_of(segment.cls.graphs.F)([*module.arguments(segment), *inputs])
            cut = dict(zip(segment.outputs, outputs, strict=True))
            tape.append(saved)
        mean, divisor = module.mean(program, cut, part, count)
        ctx.module, ctx.tape, ctx.divisor = module, tape, divisor
        return mean

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        module, tape = ctx.module, ctx.tape
        if tape is None:
            raise RuntimeError("this loss was already differentiated; what its backward needed has been freed")
        ctx.tape = None
        program: Program = module.program
        last = program.segments[-1]
        grads: dict[str, Tensor] = {last.outputs[0]: (outer[0].double() / ctx.divisor).to(last.cls.outputs[0].dtype)}
        total: dict[str, Tensor] = {}
        for segment in reversed(program.segments):
            graphs = segment.cls.graphs
            assert graphs is not None
            outputs = zip(segment.outputs, segment.cls.outputs, strict=True)
            wanted = [(name, value) for name, value in outputs if value.requires_grad]
            incoming = [grads[name] if name in grads else _zeros(value, module.world) for name, value in wanted]
            grad_inputs, grad_params = callable_of(graphs.B)([*module.arguments(segment), *tape.pop(), *incoming])
            sources = [s.name for s, value in zip(segment.inputs, segment.cls.inputs, strict=True) if value.requires_grad]
            grads = dict(zip(sources, grad_inputs, strict=True))
            trainable = [i for i, name in enumerate(segment.params) if program.parameters[name].trainable]
            for i, grad in zip(trainable, grad_params, strict=True):
                if grad is not None and not module.missing(segment, i):
                    name = segment.params[i]
                    total[name] = total[name] + grad if name in total else grad
        return (None, None, None, *(total.get(name) for name in module._trainable))


def _zeros(value: Value, world: World) -> Tensor:
    """The gradient of an output that nothing reads."""
    return torch.zeros(value.spec.local_shape(value.shape, world.mesh), dtype=value.dtype, device=world.device)
