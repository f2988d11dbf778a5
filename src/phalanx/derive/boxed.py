"""Executable graphs that take one list and empty it, so that a value dies at its last use whoever handed it over.

Graphs name operators; the generated code calls the quickest binding of the same kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import CodeGen, PythonCode

aten = torch.ops.aten

# torch's own Python bindings of these operators run the same kernel for positional arguments and cost 1.3 us a call where
# torch.ops costs 2.5 and its inner binding 1.7. `python -m tests.derive.split_speed` measures them.
BINDINGS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: Tensor.add_,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.mul_.Tensor: Tensor.mul_,
    aten.div.Tensor: torch.div,
    aten.neg.default: torch.neg,
    aten.rsqrt.default: torch.rsqrt,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.view.default: Tensor.view,
    aten.expand.default: Tensor.expand,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.cat.default: torch.cat,
}

_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


class Boxed(CodeGen):
    """`forward(self, args)`: args is a list, unpacked and cleared on entry."""

    def __init__(self) -> None:
        super().__init__()
        self.unused: tuple[str, ...] = ()

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [name.split(":")[0].strip() for name in free_vars if name != "self"]
        lines = [f"def {self._func_name}(self, args){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = args")
        lines.append("    args.clear()")
        # fx drops a value after its last use; one without any use would stay until the end.
        if self.unused:
            lines.append(f"    {' = '.join(self.unused)} = None")
        return "\n".join(lines)

    def _gen_python_code(self, nodes: Any, *args: Any, **kwargs: Any) -> PythonCode:
        self.unused = tuple(n.name for n in nodes if n.op == "placeholder" and not n.users)
        code: PythonCode = super()._gen_python_code(nodes, *args, **kwargs)  # type: ignore[no-untyped-call,unused-ignore]

        def bind(match: re.Match[str]) -> str:
            namespace, operator, overload = match.groups()
            op = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
            name = f"{namespace}_{operator}" if overload == "default" else f"{namespace}_{operator}_{overload}"
            code.globals[name] = BINDINGS.get(op, op._op)
            return f"{name}("

        code.src = _CALL.sub(bind, code.src)
        return code


def boxed(graph: fx.Graph, constants: dict[str, Tensor], name: str) -> fx.GraphModule:
    """An executable module of `graph`; call it with one list."""
    graph.set_codegen(Boxed())
    graph.lint()
    used = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
    return fx.GraphModule({key: value for key, value in constants.items() if key in used}, graph, class_name=name)
