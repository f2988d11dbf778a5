"""Suggested names: on a mesh they compute what one process does, and move no more bytes than the tables that people wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from phalanx import hf, rules
from phalanx.cli import main
from phalanx.comm.local import LocalWorld
from phalanx.derive import capture, derive_captured
from phalanx.derive.names import compile_names
from phalanx.derive.patterns import collapsed
from phalanx.derive.program import Captured, Program
from phalanx.derive.suggest import suggest, suggestion
from phalanx.mesh import Mesh
from phalanx.schedule import build, from_program
from phalanx.schedule.explain import explain
from phalanx.train import models, tiny
from phalanx.train.config import TrainConfig
from phalanx.train.verify import verify

from .parity import on_mesh, worst
from .users_models import MODELS, B, D, H, Model, Prepared, S, cross_entropy, floats, images, sequence, square, tokens

MESH = Mesh(dp=2, tp=2)
# float64 sums in another order; a missing or doubled term is at least 1e-2
TOLERANCE = 1e-12
KNOWN = ("mlp", "llama-tiny", "hf-tiny:gpt2", "hf-tiny:qwen3", "hf-tiny:gemma2")
EVERY = (*KNOWN, "hf-tiny:phi3", "hf-tiny:gpt_neox")
"""The last two have no table."""


def moved(program: Program) -> int:
    """Bytes of all collectives of a step, on one rank."""
    return sum(explain(program, build(from_program(program, None), "1f1b", 1, 1, None)).totals.values())


def held(program: Program) -> int:
    """Elements of the parameters of one rank."""
    return sum(math.prod(p.spec.local_shape(p.shape, program.mesh)) for p in program.parameters.values())


def named(name: str) -> models.Model:
    """A model by name, of float64, as if no table were written for it."""
    if not name.startswith("hf-tiny:"):
        return replace(models.build(name, "float64"), names={}, batch=4, seq=16)
    family = name.removeprefix("hf-tiny:")
    vocab = tiny.config(family).vocab_size
    return models.Model(
        name=name, factory=lambda: tiny.build(family, torch.float64), names={}, loss=models.token_loss, batch=4, seq=16,
        example=lambda *sizes: models.token_batch("input_ids", vocab, *sizes), tokens="input_ids",
    )  # fmt: skip


def captured_of(model: models.Model) -> tuple[Captured, nn.Module]:
    module = model.factory()
    prepare = hf.capture_context if hf.is_hf_model(module) else None
    return capture(module, model.example(4, 16, 0), model.loss, prepare=prepare), module


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_placed_as_by_tables_by_hand(name: str) -> None:
    """Equal Specs derive equal programs. The table of the MLP declares no outputs; what a suggested one declares moves no more."""
    captured, module = captured_of(named(name))
    found = suggestion(captured)
    assert found.layout() == {"batch": "dp", "mlp": "tp", **({} if name == "mlp" else {"heads": "tp", "vocab": "tp"})}
    layout = {**found.layout(), **({} if name == "mlp" else {"residual_seq": "tp"})}
    mine, theirs = (
        compile_names(captured, MESH, names, layout) for names in (found.names, rules.table_for(module, captured.batch))
    )
    assert (mine.parameters, mine.batch) == (theirs.parameters, theirs.batch)
    assert mine.outputs == theirs.outputs or name == "mlp"
    assert mine.warnings == theirs.warnings == ()


@pytest.mark.nightly
@pytest.mark.parametrize("name", KNOWN)
def test_no_more_is_moved_than_by_tables_by_hand(name: str) -> None:
    captured, module = captured_of(named(name))
    found = suggestion(captured)
    mine, theirs = (
        derive_captured(captured, MESH, names=names, layout=found.layout())
        for names in (found.names, rules.table_for(module, captured.batch))
    )
    assert moved(mine) <= moved(theirs)
    assert held(mine) <= held(theirs)


QUICK = ("hf-tiny:gpt_neox",)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.nightly) for n in EVERY])
def test_known_models_agree_with_one_process(name: str) -> None:
    """Trained with suggested names alone, sequence parallelism included."""
    model, parallel = named(name), name != "mlp"
    found = suggestion(captured_of(model)[0])
    config = TrainConfig(model="mlp", mesh="dp=2,tp=2", dtype="float64", steps=1, sequence_parallel=parallel)
    with LocalWorld(MESH, timeout=60) as world:
        outcome = verify(config, world, model=replace(model, names=found.names))
    assert outcome.layout == found.layout() | ({"residual_seq": "tp"} if parallel else {})
    assert outcome.passed, outcome.first_divergence


class Attention(nn.Module):
    """Separate projections, or one for all; by sdpa, or written out with a learned bias of relative positions."""

    def __init__(self, fused: bool = False, relative: bool = False) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(D, 3 * D)
        else:
            self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.o = nn.Linear(D, D)
        self.bias = nn.Embedding(2 * S - 1, H) if relative else None

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        if self.fused:
            q, k, v = self.qkv(x).view(batch, seq, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (project(x).view(batch, seq, H, D // H).transpose(1, 2) for project in (self.q, self.k, self.v))
        if self.bias is None:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            place = torch.arange(seq)
            bias = self.bias(place[:, None] - place[None, :] + S - 1).permute(2, 0, 1).unsqueeze(0)
            y = torch.softmax(q @ k.transpose(-1, -2) + bias, dim=-1) @ v
        return self.o(y.transpose(1, 2).reshape(batch, seq, D))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi_0, self.wi_1, self.wo = nn.Linear(D, 4 * D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(F.gelu(self.wi_0(x)) * self.wi_1(x))


class Layer(nn.Module):
    """x + f(norm(x)) for every f."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in inner)
        self.inner = nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        for norm, inner in zip(self.norms, self.inner, strict=True):
            x = x + inner(norm(x))
        return x


class PatchViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, D, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 4, D))
        self.layers = nn.ModuleList(Layer(Attention(), Gated()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, D)
        self.layers = nn.ModuleList(Layer(Attention(relative=True), Gated()) for _ in range(2))
        self.head = nn.Linear(D, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(Attention(fused=True)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Mixer(nn.Module):
    """Mixes tokens, of which there are S, and then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(self.mlp(width) for width in (S, D)) for _ in range(2))

    def mlp(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        for along, across in self.blocks:
            x = x + along(x.transpose(1, 2)).transpose(1, 2)
            x = x + across(x)
        return x


class Chain(nn.Sequential):
    """Nothing is added to: every other layer is split by its rows, those between by their columns."""

    def __init__(self) -> None:
        super().__init__(
            *(module for at in range(4) for module in (nn.Linear((D, 64, 32, 64)[at], (64, 32, 64, D)[at]), nn.ReLU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


NORMS = {f"*.norms.{at}.{of}": "embed" for at in (0, 1) for of in ("weight", "bias")}
SEPARATE = {f"*.{of}.weight": "heads embed" for of in "qkv"}
EXIT = {"*.o.weight": "embed heads", "*.o:out": "batch residual_seq embed", "*.o.bias": "embed"}
GATED = {
    **{f"*.wi_{at}.{of}": names for at in (0, 1) for of, names in (("weight", "mlp embed"), ("bias", "mlp"))},
    "*.wo.weight": "embed mlp", "*.wo:out": "batch residual_seq embed", "*.wo.bias": "embed",
}  # fmt: skip
OWN: dict[str, tuple[Model, dict[str, str], set[str]]] = {
    "vit": (
        Model(PatchViT, images, cross_entropy),
        {
            "position": "one positions embed", "patch.weight": "embed inputs kernel kernel", "patch.bias": "embed",
            **NORMS, **SEPARATE, **EXIT, **GATED,
            "norm.weight": "embed", "norm.bias": "embed", "head.weight": "classes embed", "head.bias": "classes",
            "x": "batch inputs x_2 x_3", "labels": "batch",
        },
        {"heads", "mlp", "classes"},
    ),
    "t5": (
        Model(T5, tokens, cross_entropy),
        {
            "embed.weight": "vocab embed", "embed:out": "batch residual_seq embed", "*.bias.weight": "positions heads",
            **NORMS, **SEPARATE, **EXIT, **GATED, "head.weight": "vocab embed", "tokens": "batch seq", "labels": "batch seq",
        },
        {"heads", "mlp", "vocab"},
    ),
    "fused qkv": (
        Model(Fused, sequence, square),
        {
            "*.norms.0.weight": "embed", "*.norms.0.bias": "embed", "*.qkv.weight": "heads embed", "*.qkv.bias": "heads", **EXIT,
            "x": "batch seq embed", "y": "batch seq embed",
        },
        {"heads"},
    ),
    "mixer": (
        Model(Mixer, sequence, square),
        {
            "blocks.*.0.0.weight": "mlp seq", "blocks.*.*.0.bias": "mlp",
            "blocks.*.0.2.weight": "seq mlp", "blocks.*.0.2:out": "batch embed residual_seq", "blocks.*.0.2.bias": "seq",
            "blocks.*.1.0.weight": "mlp embed",
            "blocks.*.1.2.weight": "embed mlp", "blocks.*.1.2:out": "batch residual_seq embed", "blocks.*.1.2.bias": "embed",
            "x": "batch seq embed", "y": "batch seq embed",
        },
        {"mlp"},
    ),
    "chain": (
        Model(Chain, sequence, square),
        {
            "0.weight": "mlp inputs", "0.bias": "mlp", "2.weight": "dim_1 mlp", "2:out": "batch residual_seq dim_1",
            "2.bias": "dim_1", "4.weight": "mlp dim_1", "4.bias": "mlp", "6.weight": "outputs mlp",
            "6:out": "batch residual_seq outputs", "6.bias": "outputs", "x": "batch seq inputs", "y": "batch seq outputs",
        },
        {"mlp"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_models_without_a_table(name: str) -> None:
    """The whole table, and with it the gradients of one process; every product with a weight is split."""
    model, names, splittable = OWN[name]
    ready = Prepared(model)
    assert max(ready.eager.values()) <= 1e-10, "the captured graph is not the eager module"
    found = suggestion(ready.captured)
    assert found.names == names
    assert set(found.splittable) == splittable
    program = derive_captured(ready.captured, MESH, names=found.names, layout=found.layout())
    error, where = worst(on_mesh(program, ready.params, ready.buffers, ready.batch), ready.reference)
    assert error <= TOLERANCE, f"{where} is off by {error:.1e}"
    whole = {n for n, p in program.parameters.items() if len(p.shape) == 2 and "tp" not in p.spec.varying}
    assert whole == ({"head.weight"} if name == "vit" else set()), "classes are not in the usual layout"


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_models_as_people_write_them(name: str) -> None:
    """No more moved than with the names that were written for these, unless more is split."""
    ready = Prepared(MODELS[name])
    found = suggestion(ready.captured)
    mine = derive_captured(ready.captured, MESH, names=found.names, layout=found.layout())
    error, where = worst(on_mesh(mine, ready.params, ready.buffers, ready.batch), ready.reference)
    assert error <= TOLERANCE, f"{where} is off by {error:.1e}"
    theirs = derive_captured(ready.captured, MESH, names=ready.model.names, layout=ready.layout(MESH))
    assert moved(mine) <= moved(theirs) or held(mine) < held(theirs)


class Odd(nn.Module):
    """Three heads of width 5, and an inner width of 7."""

    def __init__(self, width: int = 5, inner: int = 7) -> None:
        super().__init__()
        self.width = width
        self.qkv, self.o = nn.Linear(D, 9 * width), nn.Linear(3 * width, D)
        self.up, self.down = nn.Linear(D, inner), nn.Linear(inner, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(B, S, 3, 3, self.width).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.softmax(self.up(x), dim=-1))


def test_what_divides_and_what_does_not() -> None:
    found = suggest(Odd(), {"x": floats(B, S, D).float(), "y": floats(B, S, D).float()}, square)
    by_name = {dimension.name: dimension for dimension in found.dimensions}
    assert by_name["heads"].divides == (3,), "whole heads only, whatever their width"
    assert by_name["heads"].sizes == (15, 45)
    # 16 x 45 + 45 of qkv and 15 x 16 of o, of all 1292
    assert by_name["heads"].share == pytest.approx((720 + 45 + 240) / (720 + 45 + 240 + 16 + 112 + 7 + 112 + 16))
    inner = by_name["dim_1"]
    assert not inner.divides
    assert inner.why.startswith("aten.softmax.int in the model or loss at ")
    assert "needs it whole" in inner.why


def summed(out: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return out.square().sum(), torch.ones_like(batch["input"]).sum()


def test_where_nothing_can_be_split() -> None:
    found = suggest(nn.LayerNorm(D), {"input": floats(B, S, D).float()}, summed)
    assert found.splittable == ()
    assert found.layout() == {"batch": "dp"}
    assert "# no dimension can be split over tensor-parallel ranks" in str(found)
    assert "stays whole: no weight makes it that another sums away" in str(found)


def test_what_cannot_be_captured_is_refused_as_ever() -> None:
    with pytest.raises(ValueError, match="forward takes input and the batch has x"):
        suggest(nn.Linear(D, D), {"x": floats(B, D)}, square)


def table_in(printed: str) -> dict[str, str]:
    return dict(yaml.safe_load(printed[printed.index("{") : printed.index("}") + 1]))


def test_what_is_printed_can_be_pasted() -> None:
    found = suggestion(Prepared(OWN["t5"][0]).captured)
    pasted: dict[str, dict[str, str]] = {}
    exec(str(found), pasted)
    assert pasted["names"] == found.names == table_in(str(found))
    assert pasted["layout"] == found.layout()


OWN_FILE = """
import torch

def make():
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8))
    return net, {"input": torch.zeros(4, 8)}, lambda y, batch: (y.square().sum(), torch.ones_like(batch["input"]).sum())
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN_FILE)
    assert main(["explain", "--model", f"{path}:make", "--suggest-rules"]) == 0
    table = table_in(capsys.readouterr().out)
    assert (table["0.weight"], table["1.weight"]) == ("mlp inputs", "dim_1 mlp")
    assert main(["explain", "--model", f"{path}:mak", "--suggest-rules"]) == 2
    assert "has no function 'mak'; there are make" in capsys.readouterr().err
    assert main(["explain", "--model", "hf-tiny:stablelm", "--suggest-rules"]) == 0
    assert table_in(capsys.readouterr().out)["*.k_proj.weight"] == "kv_heads embed"


def test_patterns_never_match_more() -> None:
    names = {
        "layers.0.up.weight": "mlp embed", "layers.1.up.weight": "mlp embed", "layers.0.norm.weight": "embed",
        "other.up.weight": "embed mlp", "0.weight": "a b", "2.weight": "b a", "head.weight": "c",
    }  # fmt: skip
    assert collapsed(names) == {
        "layers.*.up.weight": "mlp embed", "*.norm.weight": "embed", "other.up.weight": "embed mlp",
        "0.weight": "a b", "2.weight": "b a", "head.weight": "c",
    }  # fmt: skip
    assert collapsed({"a.norm.weight": "embed"}, avoid=["b.norm.weight"]) == {"a.norm.weight": "embed"}
