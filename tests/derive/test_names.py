"""Names and layouts: what they compile to, and every way in which they can be wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.derive import capture
from phalanx.derive.names import compile_names
from phalanx.derive.program import Captured
from phalanx.mesh import Mesh
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.rules import table_for

BATCH = {"tokens": torch.zeros(4, 16, dtype=torch.long), "targets": torch.zeros(4, 16, dtype=torch.long)}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Llama(LlamaConfig(vocab=64, hidden=48, inner=96, layers=2, heads=6, kv_heads=2))


@pytest.fixture(scope="module")
def captured(model: nn.Module) -> Captured:
    return capture(model, BATCH, loss)


@pytest.fixture(scope="module")
def names(model: nn.Module) -> dict[str, str]:
    return table_for(model, BATCH)


LAYOUT = {"batch": "dp", "heads": "tp", "mlp": "tp", "vocab": "tp"}


def test_names_compile_to_specs(captured: Captured, names: dict[str, str]) -> None:
    placed = compile_names(captured, Mesh(dp=2, tp=2), names, {**LAYOUT, "residual_seq": "tp"})
    assert placed.parameters["layers.0.self_attn.q_proj.weight"].spec.dims == (("tp",), ())
    assert placed.parameters["layers.1.mlp.down_proj.weight"].spec.dims == ((), ("tp",))
    assert placed.parameters["norm.weight"].spec.dims == ((),)
    assert placed.batch["tokens"].spec.dims == (("dp",), ())
    assert placed.outputs["layers.1.self_attn.o_proj"].dims == (("dp",), ("tp",), ())


def test_without_names_the_batch_is_split_over_dp(captured: Captured) -> None:
    placed = compile_names(captured, Mesh(dp=2, tp=2), None, None)
    assert all(not p.spec.varying for p in placed.parameters.values())
    assert placed.batch["targets"].spec.dims == (("dp",), ())


def test_kv_heads_follow_heads_and_stay_whole_when_there_are_too_few(captured: Captured, names: dict[str, str]) -> None:
    two = compile_names(captured, Mesh(tp=2), names, {"heads": "tp"})
    assert two.parameters["layers.0.self_attn.k_proj.weight"].spec.dims == (("tp",), ())
    six = compile_names(captured, Mesh(tp=6), names, {"heads": "tp"})
    assert six.parameters["layers.0.self_attn.q_proj.weight"].spec.dims == (("tp",), ())
    assert six.parameters["layers.0.self_attn.k_proj.weight"].spec.dims == ((), ())


def test_two_axes_on_one_dimension(captured: Captured, names: dict[str, str]) -> None:
    placed = compile_names(captured, Mesh(a=2, b=4), names, {"mlp": "a+b"})
    assert placed.parameters["layers.0.mlp.up_proj.weight"].spec.dims == (("a", "b"), ())


@pytest.mark.parametrize(
    ("mesh", "extra", "layout", "message"),
    [
        (Mesh(tp=2), {"*.q_prog.weight": "heads embed"}, LAYOUT, r"'\*\.q_prog\.weight' matches no parameter.*closest is '.*q_proj"),
        (Mesh(tp=2), {"*.o_prok:out": "batch seq embed"}, {"heads": "tp"}, r"'\*\.o_prok:out' matches no module.*closest is '.*o_proj"),
        (Mesh(tp=2), {}, {"haeds": "tp"}, r"layout places 'haeds', which names no dimension; the closest is 'heads'"),
        (Mesh(tp=2), {}, {"heads": "pt"}, r"no axis 'pt'; the closest is 'tp'"),
        (Mesh(pp=2, tp=2), {}, {"heads": "pp"}, r"pp hosts stages"),
        (Mesh(tp=2), {"*.q_proj.weight": "heads"}, {"heads": "tp"}, r"names 1 dimensions, layers\.0\.self_attn\.q_proj\.weight has 2"),
        (Mesh(tp=2), {"*.layers.0.self_attn.q_proj.weight": "embed heads", "layers.0.self_attn.q_proj.weight": "embed heads"},
         {"heads": "tp"}, r"matches no parameter"),
        (Mesh(tp=2), {"layers.0.*.q_proj.weight": "embed heads"}, {"heads": "tp"}, r"q_proj\.weight is placed twice and differently"),
        (Mesh(tp=4), {}, {"heads": "tp"}, r"6 heads do not divide over tp of 4 ranks; 3 or 6 would"),
        (Mesh(tp=5), {}, {"mlp": "tp"}, r"dimension 0 \(mlp\) of size 96 does not divide over tp of 5 ranks; 4 or 6 would"),
        (Mesh(dp=3), {}, {"batch": "dp"},
         r"dimension 0 \(batch\) of size 4 in one microbatch does not divide over dp of 3 ranks; 2 or 4 would"),
        (Mesh(tp=2), {}, {"heads": "tp", "embed": "tp"}, r"two of its dimensions \('heads', 'embed'\) are placed on one axis"),
        (Mesh(tp=2), {}, {"heads": "tp+tp"}, r"names an axis twice"),
    ],
)  # fmt: skip
def test_mistakes_are_named(
    captured: Captured, names: dict[str, str], mesh: Mesh, extra: dict[str, str], layout: dict[str, str], message: str
) -> None:
    layout = {name: axis for name, axis in layout.items() if axis != "dp" or "dp" in mesh.names}
    with pytest.raises(ValueError, match=message):
        compile_names(captured, mesh, {**names, **extra}, layout)


def test_what_no_name_matches_is_reported(captured: Captured) -> None:
    placed = compile_names(captured, Mesh(tp=2), {"*.up_proj.weight": "mlp embed"}, {"mlp": "tp"})
    assert "embed_tokens.weight" in placed.warnings[0]
