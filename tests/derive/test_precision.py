"""Under a precision the captured pieces are the module with its parameters cast by hand: loss and gradients bit for bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as phx
from phalanx.derive import capture, derive
from phalanx.derive.capture import check_capture
from phalanx.derive.evaluate import evaluation
from phalanx.derive.precision import COMPUTE
from phalanx.derive.segment import run_pieces
from phalanx.hf import capture_context
from phalanx.models import llama, mlp

TOKENS = {"tokens": torch.arange(32).view(4, 8) % 7, "targets": torch.arange(32).view(4, 8) % 5}
POINTS = {"x": torch.linspace(-1, 1, 32).view(4, 8), "targets": torch.linspace(-1, 2, 12).view(4, 3)}
CLASSES = {"x": POINTS["x"], "labels": torch.tensor([0, 2, 1, 2])}


class Classifier(nn.Module):
    """Its forward returns its loss, and scales by a buffer in the width of what it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.linspace(0.1, 1.3, 8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.first(x) * self.scale.to(x.dtype)), labels)


def small_llama() -> nn.Module:
    return llama.Llama(llama.LlamaConfig(vocab=16, hidden=16, inner=32, layers=2, heads=2, kv_heads=1, tied=True))


def small_mlp() -> nn.Module:
    return mlp.MLP(mlp.MLPConfig(inputs=8, hidden=8, inner=16, layers=2, outputs=3))


@functools.cache
def model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def cast(module: nn.Module, compute: torch.dtype) -> nn.Module:
    """A copy whose parameters, and no buffers, have the compute dtype."""
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(compute)
    return module


def by_hand(module: nn.Module, batch: Mapping[str, Tensor], loss: Any, compute: torch.dtype) -> Tensor:
    """The mean loss of a cast module, as a person would write it."""
    if loss is None:
        logits = module.second(module.first(batch["x"].to(compute)) * module.scale.to(compute))
        return F.cross_entropy(logits.float(), batch["labels"])
    outputs = module(batch["tokens"] if "tokens" in batch else batch["x"].to(compute))
    total, count = loss(outputs.float(), batch)
    return total / count


def squares(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sums in the dtype that it is given."""
    return outputs.square().sum(), torch.ones_like(batch["targets"][:, 0]).sum()


CASES = {
    "tied llama": (small_llama, TOKENS, llama.loss),
    "mlp": (small_mlp, POINTS, mlp.squared_error),
    "plain sum": (small_mlp, POINTS, squares),
    "loss in forward": (Classifier, CLASSES, None),
}


@pytest.mark.parametrize("precision", COMPUTE)
@pytest.mark.parametrize("case", CASES)
def test_pieces_are_the_module_cast_by_hand(case: str, precision: Any) -> None:
    make, batch, loss = CASES[case]
    compute, module = COMPUTE[precision], model(make)
    before = [(x, x.dtype, x.detach().clone()) for x in (*module.parameters(), *module.buffers())]
    captured = capture(module, batch, loss, precision=precision)
    twin = cast(module, compute)
    parameters = dict(twin.named_parameters())
    total, count = run_pieces(captured, parameters, dict(twin.named_buffers()), batch)
    expected = by_hand(twin, batch, loss, compute)
    assert total.dtype == torch.float32 and torch.equal(total / count, expected)
    ours, theirs = (torch.autograd.grad(x, list(parameters.values())) for x in (total / count, expected))
    for name, mine, other in zip(parameters, ours, theirs, strict=True):
        assert mine.dtype == compute and torch.equal(mine, other), name
    for x, (same, dtype, values) in zip((*module.parameters(), *module.buffers()), before, strict=True):
        assert x is same and x.dtype == dtype and torch.equal(x, values)


def test_the_program_says_what_is_stored_and_what_is_computed_with() -> None:
    program = derive(model(Classifier), phx.Mesh(dp=2), example=CLASSES, precision="bf16")
    for parameter in program.parameters.values():
        assert (parameter.dtype, parameter.stored) == (torch.bfloat16, torch.float32)
    scale = program.buffers["scale"]
    assert (scale.dtype, scale.stored) == (torch.float32, None)
    assert program.batch["x"].dtype == torch.float32  # cast inside the graph: the user's batch stays as it is
    assert program.segments[-1].cls.outputs[0].dtype == torch.float32
    plain = derive(model(Classifier), phx.Mesh(), example=CLASSES)
    assert {(p.dtype, p.stored) for p in plain.parameters.values()} == {(torch.float32, None)}
    narrow = derive(cast(model(Classifier), torch.bfloat16), phx.Mesh(), example=CLASSES, precision="bf16")
    assert {(p.dtype, p.stored) for p in narrow.parameters.values()} == {(torch.bfloat16, None)}


def test_deferred_modules_and_evaluation_are_captured_alike() -> None:
    keys = []
    for module in (phx.deferred_init(small_llama), model(small_llama)):
        program = derive(module, phx.Mesh(tp=2), example=TOKENS, loss=llama.loss, precision="fp16", microbatches=2)
        keys.append([segment.cls.key for segment in program.segments])
        cuts = [value.dtype for segment in evaluation(program).segments for value in segment.cls.outputs]
        assert cuts == [torch.float16] * 3 + [torch.float32]
    assert keys[0] == keys[1]


def test_the_check_compares_with_the_twin() -> None:
    """In the same width the pieces are exact; the float32 pieces differ from the bfloat16 twin by its rounding."""
    module = model(small_mlp)
    narrow, wide = (capture(module, POINTS, mlp.squared_error, precision=p) for p in ("bf16", None))
    assert check_capture(module, narrow, POINTS, mlp.squared_error, precision="bf16") == 0.0
    assert check_capture(module, wide, POINTS, mlp.squared_error) < 1e-6
    with pytest.raises((ValueError, RuntimeError), match="dtype"):
        check_capture(module, narrow, POINTS, mlp.squared_error)


def test_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    batch = {"input_ids": TOKENS["tokens"], "labels": TOKENS["tokens"].clone()}
    captured = capture(module, batch, prepare=capture_context, precision="bf16")
    twin = cast(module, torch.bfloat16)
    total, count = run_pieces(captured, dict(twin.named_parameters()), dict(twin.named_buffers()), batch)
    assert torch.equal(total / count, twin(**batch).loss)


class Mixed(nn.Module):
    """Meets a float32 buffer on its way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(8, 8), nn.Linear(8, 3), kind
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "attention":
            q = x[:, None, None]
            x = F.scaled_dot_product_attention(q * self.scale, q, q)[:, 0, 0]
        if self.kind == "linear":
            x = x * self.scale
        return self.second(x)


def narrow_sum(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return outputs.bfloat16().square().sum(), torch.ones_like(batch["x"][:, 0]).sum()


@pytest.mark.parametrize(
    ("make", "loss", "precision", "message"),
    [
        (lambda: small_mlp().double(), mlp.squared_error, "bf16", r"in_proj.weight is torch.float64.*float\(\) first"),
        (lambda: cast(small_mlp(), torch.bfloat16), mlp.squared_error, "fp16", "in_proj.weight is torch.bfloat16"),
        (small_mlp, mlp.squared_error, "half", "precision is 'half'; it is 'bf16' or 'fp16'"),
        (lambda: Mixed("attention"), mlp.squared_error, "bf16", r"test_precision.py:\d+: .*cos.to\(x.dtype\)"),
        (lambda: Mixed("linear"), mlp.squared_error, "bf16", r"second at .*test_precision.py:\d+ has operands of torch.bfloat16 and"),
        (lambda: Mixed(""), narrow_sum, "bf16", r"test_precision.py:\d+: the loss sum is torch.bfloat16"),
    ],
)  # fmt: skip
def test_what_cannot_be_narrowed_is_refused(make: Callable[[], nn.Module], loss: Any, precision: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        derive(make(), phx.Mesh(), example=POINTS, loss=loss, precision=precision)


def test_the_same_models_pass_in_their_own_dtype() -> None:
    """So that what is refused above is refused for its precision alone."""
    for kind in ("attention", "linear", ""):
        derive(Mixed(kind), phx.Mesh(), example=POINTS, loss=mlp.squared_error)
