"""An unmodified module and its loss as pieces of a plain graph, before any mesh.

The module is traced once by torch.export, on stand-ins that have shape and dtype but no memory, so a model of any size is
captured in seconds. Its values, hooks, attributes and training flags are as before afterwards. What a graph cannot hold raises
ValueError with the user's own line.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind

from phalanx.derive import precision as widths
from phalanx.derive import reject
from phalanx.derive.bounds import index_bounds
from phalanx.derive.canonical import canonicalise, is_random
from phalanx.derive.loss import loss_tensors, sum_and_count
from phalanx.derive.precision import Precision
from phalanx.derive.program import Captured, Parameter
from phalanx.derive.segment import run_pieces, segment
from phalanx.spec import Spec

Loss = Callable[[Any, dict[str, Tensor]], Any]
Arguments = tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]
"""Entries that go to forward by position and by name, and what is passed besides."""
Prepare = Callable[[nn.Module, Mapping[str, Tensor]], contextlib.AbstractContextManager[Any]]


def capture(
    module: nn.Module,
    example: Mapping[str, Tensor],
    loss: Loss | None = None,
    *,
    microbatch_of: int = 1,
    blocks: str | None = None,
    train: bool = True,
    prepare: Prepare | None = None,
    precision: Precision | None = None,
) -> Captured:
    """Trace `module` and `loss` on one microbatch of the global step batch `example` and cut the graph into pieces.

    example        entries (batch, ...); those whose keys `module.forward` accepts are passed to it. Values are not read
    loss           (outputs, batch) → (sum, count), or a scalar mean cross entropy; None if the module returns its loss
    microbatch_of  number of microbatches that the batch is split into along dimension 0
    blocks         patterns of the modules to cut at, as in "model.layers.*"; found if None
    train          capture in training or evaluation mode; submodules keep their own flags if the module is in that mode already
    prepare        a context to trace in, called with the module and the example, for what a model family needs
    precision      dtype to compute in if it is not the module's own, see `derive.precision`

    Raises ValueError, with the user's line where there is one, for what a static graph with exact gradients cannot express.
    """
    compute = widths.compute_dtype(precision)
    if compute is not None:
        widths.check_widths(module, compute)
    lost = reject.hook_warnings(module)
    _check_microbatches(example, microbatch_of)
    shapes = {name: _microbatch_shape(name, value, microbatch_of) for name, value in example.items()}
    names = _first_names(module)
    context = prepare(module, example) if prepare is not None else contextlib.nullcontext()
    with _stand_ins(module, names, compute) as fake, context:
        if module.training != train:
            module.train(train)
        device = _device(module)
        with fake:
            batch = {name: torch.empty(shapes[name], dtype=value.dtype, device=device) for name, value in example.items()}
        step = _Step(module, loss, _arguments(module, example), compute)
        changed: list[str] = []
        step.observe_changes = changed.extend
        exported, printed = _export(step, batch, fake)
    graph, regions = exported.graph_module.graph, exported.graph_module
    _annotate(exported, module, names, list(example))
    canonicalise(graph, regions)
    sum_and_count(graph)
    widths.check_graph(graph, compute)
    cut = segment(graph, blocks)
    lost += dict.fromkeys(changed)
    if printed:
        lost.append(f"the model printed while it was captured ({printed[:60]!r}...): it prints once, not in every step")
    pieces = [*cut.pieces, cut.count, *filter(None, [cut.tables])]
    read = {source.name for piece in pieces for source in piece.inputs if source.kind == "batch"}
    return Captured(
        pieces=cut.pieces,
        tables=cut.tables,
        tables_read_batch=cut.tables_read_batch,
        count=cut.count,
        parameters=_described(module.named_parameters(remove_duplicate=False), names, compute),
        buffers=_described(module.named_buffers(remove_duplicate=False), names),
        batch={name: (shapes[name], value.dtype) for name, value in example.items() if name in read},
        warnings=tuple(lost),
    )


CHECKED_PARAMETERS = 1 << 20
"""Models of up to this many are run once in eager mode to see that nothing was lost: a fraction of a second."""


def is_checkable(module: nn.Module, captured: Captured, example: Mapping[str, Tensor]) -> bool:
    """True if `module` is small and real, its forward has no side effects, and `example` holds values that it can be run on."""
    if captured.warnings:
        return False
    tensors = [*module.parameters(), *module.buffers()]
    entries = [example[name] for name in captured.batch]
    if not tensors or any(t.is_meta for t in (*tensors, *entries)) or sum(t.numel() for t in tensors) > CHECKED_PARAMETERS:
        return False
    bounds = index_bounds(captured.pieces)
    return all(bool(bounds[name].holds(example[name]).all()) for name in captured.batch if name in bounds)


def check_capture(
    module: nn.Module,
    captured: Captured,
    example: Mapping[str, Tensor],
    loss: Loss | None = None,
    *,
    microbatch_of: int = 1,
    train: bool = True,
    first_only: bool = False,
    precision: Precision | None = None,
) -> float:
    """Compare loss and gradients of the composed pieces, over all microbatches of `example`, with the eager module on the whole.

    Of a model with dropout, whose masks depend on the cut, or with `first_only` the first microbatch alone is compared. Returns the
    largest relative difference, NaN if the eager loss is not finite and nothing can be told. Raises ValueError naming the first
    tensor that differs by more than 1e-3 of its largest element (5e-2 if a parameter is narrower than float32): rounding stays far
    below, a wrong graph does not, nor does a number that was taken from the size of a microbatch.
    """
    compute = widths.compute_dtype(precision)
    parameters = widths.twin(module, compute)
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    narrow = any(p.is_floating_point() and p.element_size() < 4 for p in parameters.values())
    limit = 5e-2 if narrow else 1e-3
    rows = {name: _microbatch_shape(name, value, microbatch_of)[0] for name, value in example.items()}
    drawn = any(is_random(node) for piece in captured.pieces for node in piece.graph.graph.nodes)
    compared = 1 if drawn or first_only else microbatch_of
    device = next(iter(parameters.values())).device
    batch = {name: value[: rows[name] * compared].to(device) for name, value in example.items()}
    step = _Step(module, loss, _arguments(module, example), compute)
    accelerators = [device] if device.type == "cuda" else []
    with _flags(module), torch.random.fork_rng(accelerators), torch.enable_grad():
        if module.training != train:
            module.train(train)
        torch.manual_seed(0)
        parts = step(batch) if compute is None else _with_parameters(step, parameters, batch)
        expected = parts[0] if len(parts) == 1 else parts[0] / parts[1]
        if not math.isfinite(expected.detach()):
            return math.nan
        expected_grads = torch.autograd.grad(expected, list(trainable.values()), allow_unused=True)
        torch.manual_seed(0)
        sums = []
        for j in range(compared):
            part = {name: value[j * rows[name] : (j + 1) * rows[name]] for name, value in batch.items()}
            sums.append(run_pieces(captured, parameters, dict(module.named_buffers()), part))
        total, count = (torch.stack(values).sum() for values in zip(*sums, strict=True))
        grads = torch.autograd.grad(total / count, list(trainable.values()), allow_unused=True)
    pairs = [("loss", total / count, expected)]
    for (name, parameter), mine, eager in zip(trainable.items(), grads, expected_grads, strict=True):
        zero = torch.zeros_like(parameter)
        pairs.append((f"gradient of {name}", zero if mine is None else mine, zero if eager is None else eager))
    # A gradient that is zero but for rounding (the bias of k under softmax) has no scale of its own.
    floor = 1e-3 * max((float(eager.detach().abs().max()) for _, _, eager in pairs if eager.numel()), default=0.0)
    worst = 0.0
    for name, mine, eager in pairs:
        if not eager.numel():
            continue
        scale = max(float(eager.detach().abs().max()), floor)
        error = float((mine - eager).detach().abs().max()) / scale if scale else float((mine - eager).detach().abs().max())
        if not error <= limit:
            raise ValueError(
                f"the captured graph differs from the module in the {name}: by {error:.2e} of its size, allowed {limit:.0e}"
            )
        worst = max(worst, error)
    return worst


class _Step(nn.Module):
    """Forward and loss as one function of the batch: returns (sum, count), or (mean,)."""

    def __init__(self, module: nn.Module, loss: Loss | None, arguments: Arguments, compute: torch.dtype | None = None) -> None:
        super().__init__()
        self.module = module
        self.positional, self.keywords, self.fixed = arguments
        self.compute = compute
        self.loss = (loss,)  # in a tuple: a loss that is a module is not a part of the model
        self.observe: Callable[[tuple[Tensor, ...]], None] = lambda tensors: None
        self.observe_changes: Callable[[list[str]], None] = lambda sentences: None
        """Told what the forward changed on modules, which a graph does not."""

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        attributes = reject.Attributes(self.module)
        (loss,) = self.loss
        entries = [batch[n] for n in self.positional], {n: batch[n] for n in self.keywords} | self.fixed
        with widths.computing(self.compute):
            outputs = widths.call(self.module, *entries, self.compute)
            self.observe_changes(attributes.changed())
            if loss is not None:
                outputs = loss(widths.widened(outputs, self.compute), dict(batch))
        tensors = loss_tensors(outputs, explicit=loss is not None)
        self.observe(tensors)
        return tensors


def _export(step: _Step, batch: dict[str, Tensor], fake: FakeTensorMode) -> tuple[torch.export.ExportedProgram, str]:
    """The exported step and what it printed."""
    terminal, printed = sys.stdout, io.StringIO()
    custom: list[Any] = []
    step.observe = lambda tensors: custom.extend(reject.custom_functions(tensors))
    try:
        with contextlib.redirect_stdout(printed), fx.traceback.preserve_node_meta(), reject.Watch(), torch.enable_grad():
            exported = torch.export.export(step, (batch,), strict=False)
    except Exception as error:
        place = reject.line_of_error(error)
        if isinstance(error, torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode):
            raise ValueError(reject.data_dependent_message(place or "in an unknown line")) from None
        if isinstance(error, ValueError) and reject.raised_here(error):
            raise ValueError(str(error)) from None  # it says what is wrong; a hundred frames of tracing would hide that
        if place:
            error.add_note(f"while the model was captured, at {place}")
        raise
    terminal.write(printed.getvalue())
    if custom:

        def again() -> tuple[Tensor, ...]:
            with fake, torch.enable_grad(), contextlib.redirect_stdout(io.StringIO()):
                return step(batch)  # type: ignore[no-any-return]

        reject.refuse_custom_functions(again)
    return exported, printed.getvalue()


def _check_microbatches(example: Mapping[str, Tensor], microbatches: int) -> None:
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"microbatches is {microbatches!r}; it is a whole number of at least 1")
    samples = {name: value.shape[0] for name, value in example.items() if isinstance(value, Tensor) and value.dim()}
    if microbatches > 1 and len(set(samples.values())) > 1:
        sizes = ", ".join(f"{name} {size}" for name, size in samples.items())
        raise ValueError(
            f"batch entries differ along dimension 0, where {microbatches} microbatches would cut all of them: {sizes}"
        )


def _microbatch_shape(name: str, value: Tensor, microbatches: int) -> tuple[int, ...]:
    if not isinstance(value, Tensor):
        raise ValueError(f"batch entry {name!r} is a {type(value).__name__}; entries are tensors, dimension 0 the batch")
    if value.dim() == 0:
        raise ValueError(f"batch entry {name!r} is a single number; dimension 0 of every entry is the batch")
    if not value.numel():
        raise ValueError(f"batch entry {name!r} of shape {tuple(value.shape)} is empty")
    samples = value.shape[0]
    if samples % microbatches:
        works = [m for m in range(1, samples + 1) if samples % m == 0]
        nearest = [max(m for m in works if m < microbatches), *[m for m in works if m > microbatches][:1]]
        raise ValueError(
            f"batch entry {name!r} of shape {tuple(value.shape)} does not split into {microbatches} microbatches; "
            f"{' or '.join(map(str, nearest))} would"
        )
    return (value.shape[0] // microbatches, *value.shape[1:])


def _arguments(module: nn.Module, example: Mapping[str, Tensor]) -> Arguments:
    parameters = inspect.signature(module.forward).parameters
    kinds = inspect.Parameter
    positional = tuple(n for n, p in parameters.items() if p.kind is kinds.POSITIONAL_ONLY and n in example)
    by_name = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    keywords = tuple(n for n, p in parameters.items() if p.kind in by_name and n in example)
    named = [n for n, p in parameters.items() if p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]
    if not named and any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
        keywords = tuple(example)
    missing = [n for n in named if parameters[n].default is kinds.empty and n not in example]
    if missing or not (positional or keywords):
        raise ValueError(
            f"{type(module).__name__}.forward takes {', '.join(parameters)} and the batch has {', '.join(example) or 'nothing'}"
            + (f": {', '.join(missing)} is missing" if missing else "")
            + ". Entries are passed by name: name them as the forward does"
        )
    # A key-value cache is for generation, and cannot be an output of a graph.
    fixed = {"use_cache": False} if "use_cache" in parameters and "use_cache" not in example else {}
    return positional, keywords, fixed


def _first_names(module: nn.Module) -> dict[str, str]:
    """First name of the same tensor, for every name of every parameter and buffer."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            if nn.parameter.is_lazy(tensor):
                raise ValueError(f"{name!r} has no shape yet (a lazy module): run the model once before it is captured")
            names[name] = first.setdefault(id(tensor), name)
    return names


def _described(
    named: Iterator[tuple[str, Tensor]], names: Mapping[str, str], compute: torch.dtype | None = None
) -> dict[str, Parameter]:
    """Parameters or buffers by first name."""
    found: dict[str, Parameter] = {}
    for name, tensor in named:
        if names[name] == name:
            aliases = tuple(other for other, first in names.items() if first == name and other != name)
            spec = Spec.replicated(tensor.dim())
            dtype = widths.narrowed(tensor, compute)
            stored = tensor.dtype if tensor.dtype != dtype else None
            found[name] = Parameter(name, tuple(tensor.shape), dtype, spec, aliases, tensor.requires_grad, stored)
    return found


def _device(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _with_parameters(step: _Step, parameters: Mapping[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    named = {f"module.{name}": parameter for name, parameter in parameters.items()}
    result: tuple[Tensor, ...] = torch.func.functional_call(step, named, (batch,))
    return result


@contextlib.contextmanager
def _flags(module: nn.Module) -> Iterator[None]:
    """Restore every training flag."""
    flags = [(child, child.training) for child in module.modules()]
    try:
        yield
    finally:
        for child, training in flags:
            child.training = training


@contextlib.contextmanager
def _stand_ins(module: nn.Module, names: Mapping[str, str], compute: torch.dtype | None = None) -> Iterator[FakeTensorMode]:
    """Put memoryless tensors in the place of all parameters and buffers; on leaving, every attribute is as it was.

    Floating parameters have the dtype `compute`, unless that is None. All pretend to be on the device of the real ones, and on the
    CPU if those are meta, so that they mix with the constants that a forward makes.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    before = [(child, dict(child.__dict__), [dict(part) for part in _registered(child)]) for child in module.modules()]
    filled = [(v, v.copy()) for _, values, _ in before for v in values.values() if isinstance(v, list | dict | set)]
    made: dict[int, Tensor] = {}
    try:
        for path, child in module.named_modules():
            for tensors in _registered(child)[:2]:
                for name, tensor in tensors.items():
                    if tensor is not None:
                        if id(tensor) not in made:
                            made[id(tensor)] = _stand_in(tensor, fake, compute)
                        tensors[name] = made[id(tensor)]
            for name, value in child.__dict__.items():
                if isinstance(value, Tensor) and value.is_meta:
                    full = f"{path}.{name}" if path else name
                    raise ValueError(f"{full} is a meta tensor but no buffer, so it has no value: register_buffer it")
        yield fake
    finally:
        for child, attributes, registered in before:
            child.__dict__.clear()
            child.__dict__.update(attributes)
            for current, saved in zip(_registered(child), registered, strict=True):
                current.clear()
                current.update(saved)
        for container, content in filled:  # such as a list that the forward appends to
            if len(container) != len(content) or any(a is not b for a, b in zip(container, content, strict=True)):
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)


def _registered(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers, module._modules


def _stand_in(tensor: Tensor, fake: FakeTensorMode, compute: torch.dtype | None) -> Tensor:
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    dtype = widths.narrowed(tensor, compute) if isinstance(tensor, nn.Parameter) else tensor.dtype
    with fake:
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _annotate(exported: torch.export.ExportedProgram, module: nn.Module, names: Mapping[str, str], entries: list[str]) -> None:
    """Give nodes our meta in place of export's: val, module, modules, calls, source; placeholders kind and name.

    Constants become get_attr nodes, and the placeholders of a tied parameter become one.
    """
    graph = exported.graph_module.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    kinds = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.USER_INPUT: "batch entry"}
    trainable = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    batch = iter(entries)
    first: dict[tuple[str, str], fx.Node] = {}
    for region in [exported.graph_module, *_regions(exported.graph_module)]:
        for node in region.graph.nodes:
            node.meta = _meta(node)
    for spec in exported.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        kind = kinds.get(spec.kind)
        if kind is None:
            _as_constant(graph, node, exported.constants.get(spec.target or ""), spec.target or spec.arg.name)
            continue
        name = next(batch) if kind == "batch entry" else names[str(spec.target).removeprefix("module.")]
        node.meta |= {"kind": kind, "name": name, "trainable": kind == "parameter" and trainable[name]}
        original = first.setdefault((kind, name), node)
        if original is not node:
            node.replace_all_uses_with(original)
            graph.erase_node(node)


def _regions(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [child for name, child in module.named_modules() if name and isinstance(child, fx.GraphModule)]


def _as_constant(graph: fx.Graph, node: fx.Node, value: Any, name: str) -> None:
    own = name.removeprefix("module.")
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.is_meta:
        raise ValueError(f"the model uses {own!r}, which has no value when it is captured: make it a buffer or an input")
    if value.requires_grad:
        raise ValueError(f"the model uses {own!r}, a tensor that requires grad but is no parameter: register it")
    with graph.inserting_before(node):
        constant = graph.create_node("get_attr", name)
    constant.meta = {**node.meta, "constant": value.detach().clone()}
    node.replace_all_uses_with(constant)
    graph.erase_node(node)


def _meta(node: fx.Node) -> dict[str, Any]:
    calls = []
    for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
        if path.startswith("module."):
            call = key.rpartition("@")[2]
            calls.append((path.removeprefix("module."), int(call) if call.isdecimal() and "@" in key else 0, str(kind)))
    modules = tuple(path for path, _, _ in calls)
    return {
        "val": torch.utils._pytree.tree_map_only(Tensor, _meta_tensor, node.meta.get("val")),
        "module": modules[-1] if modules else "",
        "modules": modules,
        "calls": tuple(calls),
        "source": reject.line_of_node(node),
    }


def _meta_tensor(value: Tensor) -> Tensor:
    if any(isinstance(size, torch.SymInt) for size in value.shape):
        return value  # refused later, with its line
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
