"""Programs written by hand: a tied language model whose segments are small functions, differentiated by autograd when run.

They obey the calling convention of Graphs, so the run time can be tested against one process without what derives Programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.derive.program import Graphs, Parameter, Program, Segment, SegmentClass, Source, Value
from phalanx.mesh import Mesh
from phalanx.run.executor import Executor
from phalanx.run.optimizer import Config, Optimizer, groups
from phalanx.run.parameters import Parameters
from phalanx.schedule import build, from_program
from phalanx.schedule.actions import Schedule
from phalanx.spec import Spec, shard

VOCAB, HIDDEN, BATCH, SEQ = 11, 6, 8, 3
IGNORED = -1

Function = Callable[[str, list[Tensor], list[Tensor]], tuple[Tensor, ...]]
"""(world, params, inputs) to outputs."""


@dataclass
class Tape:
    """What autograd keeps between F and B."""

    outputs: list[Tensor]
    inputs: list[Tensor]
    params: list[Tensor]


def graphs(fn: Function, params: int, grad_in: tuple[bool, ...], trainable: tuple[bool, ...]) -> Graphs:
    def split(arguments: list) -> tuple[str, list[Tensor], list]:
        world, values = arguments[0], arguments[4:]
        arguments.clear()
        return world, values[:params], values[params:]

    def forward(arguments: list) -> tuple[tuple, tuple]:
        world, weights, inputs = split(arguments)
        weights = [w.detach().requires_grad_(t) for w, t in zip(weights, trainable, strict=True)]
        inputs = [x.detach().requires_grad_(g) for x, g in zip(inputs, grad_in, strict=True)]
        with torch.enable_grad():
            outputs = fn(world, weights, inputs)
        tape = Tape(
            [y for y in outputs if y.requires_grad],
            [x for x in inputs if x.requires_grad],
            [w for w in weights if w.requires_grad],
        )
        return tuple(y.detach() for y in outputs), (tape,)

    def gradients(tape: Tape, grads: list[Tensor], wrt: list[Tensor]) -> tuple:
        if not wrt:
            return ()
        return torch.autograd.grad(tape.outputs, wrt, grads, retain_graph=True, allow_unused=True)

    def backward(arguments: list) -> tuple[tuple, tuple]:
        _, _, (tape, *grads) = split(arguments)
        both = gradients(tape, grads, [*tape.inputs, *tape.params])
        return both[: len(tape.inputs)], both[len(tape.inputs) :]

    def input_gradient(arguments: list) -> tuple[tuple, tuple]:
        _, _, (tape, *grads) = split(arguments)
        return gradients(tape, grads, tape.inputs), tuple(grads)

    def weight_gradient(arguments: list) -> tuple:
        _, _, (tape, *grads) = split(arguments)
        return gradients(tape, grads, tape.params)

    def evaluate(arguments: list) -> tuple:
        world, weights, inputs = split(arguments)
        return fn(world, weights, inputs)

    return Graphs(forward, backward, input_gradient, weight_gradient, evaluate, (0,), 0, {}, {})  # type: ignore[arg-type]


def embed(world: str, params: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return (params[0][inputs[0]],)


def block(world: str, params: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weight, bias, _ = params
    return (inputs[0] + torch.tanh(inputs[0] @ weight.T + bias),)


def head(world: str, params: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    logits = inputs[0] @ params[0].T
    return (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[1].flatten(), ignore_index=IGNORED, reduction="sum"),
    )


def count(world: str, params: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return ((inputs[0] != IGNORED).sum(),)


def program(
    mesh: Mesh,
    microbatches: int,
    *,
    blocks: int = 3,
    dtype: torch.dtype = torch.float64,
    frozen: tuple[str, ...] = (),
    head: Function = head,
    head_defers: tuple[str, ...] = (),
    loss_partial: tuple[str, ...] = (),
) -> Program:
    """Embedding, blocks, and a head tied to the embedding; the batch is split over dp."""
    rows = ("dp",) if "dp" in mesh.names else ()
    partial = frozenset(rows)
    shape = (BATCH // microbatches, SEQ)

    def value(name: str, kind: tuple[int, ...], dtype_: torch.dtype, *, grad: bool = False, split: bool = False) -> Value:
        spec = Spec((rows, *((),) * (len(kind) - 1))) if split else Spec.replicated(len(kind))
        return Value(name, kind, dtype_, spec, grad)

    parameters = {
        "embed.weight": Parameter("embed.weight", (VOCAB, HIDDEN), dtype, Spec.replicated(2), ("head.weight",)),
        **{
            f"blocks.{k}.{name}": Parameter(f"blocks.{k}.{name}", kind, dtype, Spec.replicated(len(kind)))
            for k in range(blocks)
            for name, kind in (("weight", (HIDDEN, HIDDEN)), ("bias", (HIDDEN,)), ("unused", (2,)))
        },
    }
    parameters = {name: replace(p, trainable=name not in frozen) for name, p in parameters.items()}

    def segment(
        index: int,
        name: str,
        fn: Function,
        params: tuple[str, ...],
        inputs: dict[Source, Value],
        outputs: tuple[Value, ...],
        deferred: frozenset[str] = partial,
    ) -> Segment:
        trainable = tuple(parameters[p].trainable for p in params)
        cls = SegmentClass(
            key=name,
            lowered=None,  # type: ignore[arg-type]
            params=tuple(value(p, parameters[p].shape, dtype, grad=t) for p, t in zip(params, trainable, strict=True)),
            buffers=(),
            inputs=tuple(inputs.values()),
            outputs=outputs,
            deferred=tuple(deferred for _ in params),
            graphs=graphs(fn, len(params), tuple(v.requires_grad for v in inputs.values()), trainable),
        )
        return Segment(index, name, cls, params, (), tuple(inputs), tuple(v.name for v in outputs))

    hidden = [value(f"hidden{k}", (*shape, HIDDEN), dtype, grad=True, split=True) for k in range(blocks + 1)]
    tokens, labels = (value(name, shape, torch.int64, split=True) for name in ("tokens", "labels"))
    loss = Value("loss", (), dtype, Spec((), partial | set(loss_partial)), True)
    total = Value("count", (), torch.int64, Spec((), partial), False)
    segments = [segment(0, "embed", embed, ("embed.weight",), {Source("batch", "tokens"): tokens}, (hidden[0],))]
    for k in range(blocks):
        names = tuple(f"blocks.{k}.{part}" for part in ("weight", "bias", "unused"))
        segments.append(segment(k + 1, f"blocks.{k}", block, names, {Source("cut", f"hidden{k}"): hidden[k]}, (hidden[k + 1],)))
    reads = {Source("cut", f"hidden{blocks}"): hidden[blocks], Source("batch", "labels"): labels}
    segments.append(segment(blocks + 1, "head", head, ("embed.weight",), reads, (loss,), partial | set(head_defers)))
    counter = segment(-1, "count", count, (), {Source("batch", "labels"): labels}, (total,))
    return Program(
        mesh, microbatches, tuple(segments), parameters, {}, {"tokens": tokens, "labels": labels}, None, False, counter, rows
    )


def weights(dtype: torch.dtype = torch.float64, blocks: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {name: p.shape for name, p in program(Mesh(), 1, blocks=blocks).parameters.items()}
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5).to(dtype) for name, shape in shapes.items()
    }


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Ignored labels are spread unevenly, so a mean of means would be wrong."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    labels = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    labels[0, :] = IGNORED
    labels[BATCH // 2, 1:] = IGNORED
    return {"tokens": tokens, "labels": labels}


def reference_loss(values: Mapping[str, Tensor], given: Mapping[str, Tensor], blocks: int = 3) -> Tensor:
    """The same model in one process: mean loss over the valid tokens."""
    x = values["embed.weight"][given["tokens"]]
    for k in range(blocks):
        x = x + torch.tanh(x @ values[f"blocks.{k}.weight"].T + values[f"blocks.{k}.bias"])
    logits = x @ values["embed.weight"].T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), given["labels"].flatten(), ignore_index=IGNORED)


def executor(
    made: Program,
    world: World,
    config: Config,
    *,
    values: Mapping[str, Tensor],
    schedule: str | Schedule = "1f1b",
    max_norm: float | None = None,
) -> Executor:
    if isinstance(schedule, str):
        schedule = build(from_program(made), schedule, made.mesh.extent(("pp",)), made.microbatches)

    def local(parameter: Parameter) -> Tensor:
        return shard(values[parameter.name], parameter.spec, world.mesh, world.rank)

    parameters = Parameters(made, world, schedule.places, local, groups(config, made))
    return Executor(made, schedule, world, parameters, Optimizer(config, parameters), max_norm=max_norm)


def on_every_rank(made: Program, fn: Callable[[Executor], object], config: Config, **options: object) -> list:
    """fn(executor) on every rank of the Program's mesh, as threads; sends complete only when they are received."""
    options.setdefault("values", weights(made.parameters["embed.weight"].dtype))
    with LocalWorld(made.mesh, rendezvous=True, timeout=20) as worlds:
        return worlds.run(lambda world: fn(executor(made, world, config, **options)))  # type: ignore[arg-type]
