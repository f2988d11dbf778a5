"""Small segments for the tests of split: a module, its inputs, and the lowered graph that capture and lowering would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from phalanx.derive.program import Graphs, Value
from phalanx.derive.split import split
from phalanx.mesh import Mesh
from phalanx.spec import Spec

RUN = ("a-world", 3, 1, 7)


@dataclass
class Case:
    """One segment with everything that a run of it needs."""

    module: nn.Module
    inputs: list[Tensor]
    lowered: fx.GraphModule
    params: list[Value]
    buffers: list[Value]
    input_values: list[Value]
    output_values: list[Value]
    grad_outputs: list[Tensor]

    def split(self, **options: object) -> Graphs:
        return split(self.lowered, self.params, self.buffers, self.input_values, self.output_values, Mesh(), "cpu", **options)  # type: ignore[arg-type]

    @property
    def arguments(self) -> list[Tensor]:
        return [p.detach() for p in self.module.parameters()] + list(self.module.buffers())

    def eager(self) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
        """outputs, grad_inputs, grads of the untouched module under autograd."""
        inputs = [
            x.detach().clone().requires_grad_(v.requires_grad) for x, v in zip(self.inputs, self.input_values, strict=True)
        ]
        outputs = self.module(*inputs)
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
        wrt = [x for x in inputs if x.requires_grad] + [p for p in self.module.parameters() if p.requires_grad]
        roots = [o for o in outputs if o.requires_grad]
        grads = torch.autograd.grad(roots, wrt, self.grad_outputs, allow_unused=True)
        count = sum(x.requires_grad for x in inputs)
        return [o.detach() for o in outputs], list(grads[:count]), list(grads[count:])  # type: ignore[arg-type]


def make_case(module: nn.Module, inputs: Sequence[Tensor], grads: Sequence[bool], dtype: torch.dtype) -> Case:
    """Export `module` and put the run arguments in front, as lowering on a mesh of one rank does."""
    module = module.to(dtype)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    exported = torch.export.export(module, tuple(inputs), strict=False)
    graph = exported.graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_module" or node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    with graph.inserting_before(next(iter(graph.nodes))):
        for name in ("world", "step", "microbatch", "salt"):
            graph.placeholder(name)
    lowered = fx.GraphModule(exported.graph_module, graph)
    with torch.no_grad():
        outputs = module(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    def value(name: str, x: Tensor, grad: bool) -> Value:
        return Value(name, tuple(x.shape), x.dtype, Spec.replicated(x.dim()), grad)

    generator = torch.Generator().manual_seed(1)
    return Case(
        module,
        list(inputs),
        lowered,
        [value(n, p, p.requires_grad) for n, p in module.named_parameters()],
        [value(n, b, False) for n, b in module.named_buffers()],
        [value(f"x{i}", x, g) for i, (x, g) in enumerate(zip(inputs, grads, strict=True))],
        [value(f"y{i}", y, y.is_floating_point()) for i, y in enumerate(outputs)],
        [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs if y.is_floating_point()],
    )


class MlpBlock(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class GeluBlock(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LlamaBlock(nn.Module):
    """Pre-norm attention with rotary embedding and grouped keys, then a gated MLP."""

    def __init__(self, hidden: int = 32, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.q = nn.Linear(hidden, heads * self.width, bias=False)
        self.k = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.v = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.o = nn.Linear(heads * self.width, hidden, bias=False)
        self.gate = nn.Linear(hidden, 3 * hidden, bias=False)
        self.up = nn.Linear(hidden, 3 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            proj(h).view(b, s, n, self.width).transpose(1, 2)
            for proj, n in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(b, s, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


class Prologue(nn.Module):
    """No input has a gradient; the ids pass through."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, hidden)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed(ids) * self.scale, ids


class Epilogue(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, 50, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


class Through(nn.Module):
    """Passes two inputs through, uses one of them, and has an unused input, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.randn(8, 8))
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (x @ self.used.tanh()) @ self.frozen.t(), x, y


def _llama_inputs() -> list[Tensor]:
    angles = torch.arange(16.0)[:, None] / 10.0 ** torch.arange(0, 1, 0.25)[None]
    angles = torch.cat((angles, angles), -1)
    return [torch.randn(2, 16, 32), angles.cos(), angles.sin()]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]], list[bool]]] = {
    "mlp": (MlpBlock, lambda: [torch.randn(2, 16, 32)], [True]),
    "gelu": (GeluBlock, lambda: [torch.randn(2, 16, 32)], [True]),
    "llama": (LlamaBlock, _llama_inputs, [True, False, False]),
    "prologue": (Prologue, lambda: [torch.randint(0, 50, (2, 16))], [False]),
    "epilogue": (Epilogue, lambda: [torch.randn(2, 16, 32), torch.randint(0, 50, (2, 16))], [True, False]),
    "through": (Through, lambda: [torch.randn(4, 8), torch.randn(4, 8), torch.randn(2)], [True, True, True]),
}


def case(name: str, dtype: torch.dtype = torch.float32) -> Case:
    torch.manual_seed(0)
    module, inputs, grads = CASES[name]
    return make_case(module(), inputs(), grads, dtype)
