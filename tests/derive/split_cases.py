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
        grads = torch.autograd.grad(roots, wrt, self.grad_outputs, allow_unused=True) if wrt else ()
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
    constants = {
        s.arg.name: exported.constants[s.target] for s in exported.graph_signature.input_specs if s.target in exported.constants
    }
    for node in [n for n in graph.nodes if n.name in constants]:
        with graph.inserting_after(node):
            attribute = graph.create_node("get_attr", node.name)
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
    lowered = fx.GraphModule(constants, graph)
    grad = any(grads) or any(p.requires_grad for p in module.parameters())
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
        [value(f"y{i}", y, grad and y.is_floating_point()) for i, y in enumerate(outputs)],
        [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs if grad and y.is_floating_point()],
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


class FusedBlock(nn.Module):
    """One projection for q, k and v, split, with an additive mask; a weight used twice, once transposed; a gate by sigmoid."""

    def __init__(self, hidden: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, hidden = x.shape
        parts = self.qkv(self.norm(x) * (1 + self.scale)).split(hidden, -1)
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, s, hidden)
        return (x + self.out(attended) * torch.sigmoid(x @ self.out.weight)).transpose(0, 1)


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.conv1(x))), 2)
        return F.silu(self.conv2(x)).mean((2, 3))


class Tables(nn.Module):
    """Reads neither parameters nor inputs."""

    def forward(self) -> tuple[Tensor, Tensor]:
        angles = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1])
        return angles.cos(), angles.sin()


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
    "fused": (FusedBlock, lambda: [torch.randn(2, 16, 32), torch.randn(16, 16)], [True, False]),
    "conv": (ConvBlock, lambda: [torch.randn(2, 3, 12, 12)], [True]),
    "tables": (Tables, list, []),
    "through": (Through, lambda: [torch.randn(4, 8), torch.randn(4, 8), torch.randn(2)], [True, True, True]),
}


def case(name: str, dtype: torch.dtype = torch.float32) -> Case:
    torch.manual_seed(0)
    module, inputs, grads = CASES[name]
    return make_case(module(), inputs(), grads, dtype)
