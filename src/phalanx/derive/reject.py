"""What a capture would get silently wrong, found and refused with the user's own line.

Export traces the forward only: the backward of a custom `autograd.Function` and gradient hooks vanish from it, so both are
looked for while the model runs. Nothing here changes a model or a graph.
"""

from __future__ import annotations

import dis
import functools
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
LINE = "phalanx_line"
"""Key of the user's line in meta["custom"] of a traced node."""
_GRADIENT_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_GRAD_FN = vars(Tensor.__base__)["grad_fn"].__get__
_INSTEAD = (
    "Write the change of the gradient as an op with its own backward (torch.library.custom_op and register_autograd), or remove "
    "the hook"
)


def user_line(frames: Iterable[tuple[str, int]]) -> str:
    """`file:line` of the innermost frame that is neither torch's, ours nor the standard library's; "" if there is none."""
    found = ""
    for path, line in frames:
        if not is_internal(path):
            found = f"{path}:{line}"
    return found


def calling_line() -> str:
    """The user's line that is running now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame.f_back is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.cache
def is_internal(path: str) -> bool:
    """True for the code of torch, of this package and of the standard library: the lines that no user wrote."""
    if path.startswith("<") or path.startswith(_TORCH):
        return True
    if path.startswith(_OURS):
        return not path.startswith(_OURS + "models" + os.sep)
    return path.startswith(_STDLIB) and "site-packages" not in path


def line_of_node(node: fx.Node) -> str:
    """The user's line that made a traced node."""
    return str(node.meta.get("custom", {}).get(LINE) or _line_of_trace(node.meta.get("stack_trace", "")))


def _line_of_trace(text: str) -> str:
    return user_line((path, int(line)) for path, line in _FRAME.findall(text))


def raised_here(error: BaseException) -> bool:
    """True if this package raised it, not the user's code or torch."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("phalanx.")


def line_of_error(error: BaseException) -> str:
    """The user's line in the traceback of an exception or of what caused it."""
    cause: BaseException | None = error
    while cause is not None:
        line = user_line((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(cause.__traceback__))
        if line:
            return line
        cause = cause.__cause__ or cause.__context__
    return ""


def where(node: fx.Node) -> str:
    """How an error names the place of a node: op, module and the user's line."""
    module = node.meta.get("module") or "the model or loss"
    return f"{node.target} in {module} at {node.meta.get('source') or 'an unknown line'}"


class Watch(TorchFunctionMode):
    """Entered while the model is traced: notes the user's line with every node, and refuses hooks on tensors and their gradients.

    Export's own stack traces end at the innermost `forward`; a function called from there, or the loss, would have no line.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute such as .shape, which makes no node
            # Autograd shows no hooks of a node, so what asks for a node is refused. torch itself asks for its own ends.
            if func == _GRAD_FN and not is_internal(_asking_file()):
                raise ValueError(
                    f"{calling_line()} reads the grad_fn of an activation. A captured graph has no such nodes, so a hook on one "
                    f"would vanish and the gradients silently differ. {_INSTEAD}"
                )
            return func(*args, **(kwargs or {}))
        line = calling_line()
        if func in _GRADIENT_HOOKS:
            raise ValueError(
                f"{line or 'the model'} calls {name} on an activation. A captured graph has no tensor hooks, so its "
                "gradients would silently differ. " + _INSTEAD
            )
        _refuse_saved_tensor_hooks(line)
        with fx.traceback.annotate({LINE: line}):
            return func(*args, **(kwargs or {}))


def _asking_file() -> str:
    """The file of the code whose call came, through whatever modes are on, to the __torch_function__ that asks."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame.f_code.co_filename


def _refuse_saved_tensor_hooks(line: str) -> None:
    """Raise for a saved_tensors_hooks block of the user's; those of torch (checkpoint, save_on_cpu) change no values."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and not is_internal(getattr(hooks[0], "__code__", _refuse_saved_tensor_hooks.__code__).co_filename):
        raise ValueError(
            f"{line or 'the model'} runs under saved_tensors_hooks. A captured graph saves what it needs by itself, so what they "
            f"change would be lost and the gradients silently differ. {_INSTEAD}"
        )


class Attributes:
    """What the modules of a tree remember, to be compared after a forward: a captured graph remembers nothing."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = self._now()

    def changed(self) -> list[str]:
        """A sentence for each attribute that is no longer what it was. Raises ValueError for a buffer or parameter."""
        found = []
        for (path, name), new in self._now().items():
            old = self._before.get((path, name), _ABSENT)
            if _same(old, new):
                continue
            owner = self._module.get_submodule(path)
            place = f"module {path or type(owner).__name__!r}"
            line = _line_that_sets(owner, name)
            if name in owner._buffers or name in owner._parameters:
                kind = "buffer" if name in owner._buffers else "parameter"
                raise ValueError(
                    f"{place} gives its {kind} {name!r} a new value in its forward{line}, which a Program does not do: make it an "
                    "input, or leave it out"
                )
            found.append(
                f"{place} changes its attribute {name!r} in its forward{line}: it changed once, during capture, and every step "
                "computes as that one did"
            )
        return found

    def _now(self) -> dict[tuple[str, str], Any]:
        return {
            (path, name): tuple(value.items() if isinstance(value, dict) else value)
            if isinstance(value, list | dict | set)
            else value
            for path, child in self._module.named_modules()
            for name, value in (*child.__dict__.items(), *child._buffers.items(), *child._parameters.items())
            if name not in ("_buffers", "_parameters")
        }


_ABSENT = object()


def _same(old: Any, new: Any) -> bool:
    """Whether an attribute still holds what it held; tensors by identity, since their values are not known in a trace."""
    if old is new:
        return True
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    return isinstance(old, int | float | str | bytes) and type(old) is type(new) and bool(old == new)


def _line_that_sets(module: nn.Module, name: str) -> str:
    """The end of a sentence: where the module's own class, outside __init__, assigns an attribute; "" if it does nowhere."""
    for cls in type(module).__mro__:
        for method, function in vars(cls).items():
            code = getattr(function, "__code__", None)
            if code is None or method == "__init__" or is_internal(code.co_filename):
                continue
            for instruction in dis.get_instructions(code):
                if instruction.opname == "STORE_ATTR" and instruction.argval == name and instruction.positions is not None:
                    return f" at {code.co_filename}:{instruction.positions.lineno}"
    return ""


def custom_functions(outputs: Iterable[Tensor]) -> list[Any]:
    """Custom autograd Functions that the gradient of `outputs` passes through.

    Those of torch.library operators (captured whole) and of module backward hooks (warned of) do not count.
    """
    stack: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set()
    found = []
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            function = node._forward_cls  # type: ignore[attr-defined]
            if function.__module__ != "torch._library.autograd" and function.__name__ != "BackwardHookFunction":
                found.append(node)
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return found


def refuse_custom_functions(run: Callable[[], Iterable[Tensor]]) -> NoReturn:
    """Raise for the custom Functions of a model that has some; `run` is run once more to learn where they are called."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Anomaly mode is the one public way to ask autograd where a node was made; too slow to keep on for every capture.
        with torch.autograd.detect_anomaly(check_nan=False):
            functions = custom_functions(run())
    places = sorted({_place_of_function(function) for function in functions})
    hint = (
        "Only the forward of a custom autograd.Function is captured; its backward would be silently replaced by the derivative "
        "of its forward. Make it an op with torch.library.custom_op and register_autograd, which is captured whole"
    )
    if any("CheckpointFunction" in place for place in places):
        hint = "Reentrant checkpointing is such a Function: call checkpoint(..., use_reentrant=False), or do not checkpoint"
    raise ValueError(f"the model calls custom autograd Functions: {'; '.join(places)}. {hint}")


def _place_of_function(node: Any) -> str:
    lines = "".join(node.metadata.get("traceback_", []))
    return f"{node.name().removesuffix('Backward')} at {_line_of_trace(lines) or 'an unknown line'}"


def hook_warnings(module: nn.Module) -> list[str]:
    """What capture loses of the hooks on a module tree. Raises ValueError for gradient hooks on parameters."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks:
            raise ValueError(
                f"parameter {name!r} has a gradient hook (register_hook). A captured graph has no tensor hooks, so its "
                "gradient would silently differ: remove the hook"
            )
    lost = [
        f"parameter {name!r} has a post-accumulate gradient hook, which never runs"
        for name, parameter in module.named_parameters()
        if getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    for name, child in module.named_modules():
        place = f"module {name or type(child).__name__!r}"
        if child._forward_hooks or child._forward_pre_hooks:
            lost.append(
                f"{place} has forward hooks: they ran once, during capture; what they return is in the graph, nothing else is"
            )
        if child._backward_hooks or child._backward_pre_hooks:
            lost.append(f"{place} has backward hooks: they never run, and a gradient that they change is not changed")
    return lost


def refuse_data_dependent(graph: fx.Graph) -> None:
    """Raise ValueError for the first node whose value or shape is known only at run time."""
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, list | tuple) else (values,):
            symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
            if symbolic or (isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)):
                raise ValueError(data_dependent_message(where(node)))


def data_dependent_message(place: str) -> str:
    return (
        f"the model depends on values that are known only at run time: {place}. A Program has static shapes and no branches on "
        "data: use torch.where or masking instead of `if`, .item(), nonzero or boolean indexing"
    )
