"""A captured graph computes what the module computes, and capturing leaves no trace in the module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from phalanx.derive import derive
from phalanx.derive.capture import capture, check_capture
from phalanx.derive.program import Captured
from phalanx.derive.segment import run_pieces
from phalanx.mesh import Mesh

from .capture_models import Apply, Decoder, decoder_loss, square_loss, tokens_and_labels, x_and_y

# The same operators on the same numbers in the same order: only a fused kernel may choose another order of summing.
EXACT = 1e-12


def nodes(captured: Captured) -> list[fx.Node]:
    pieces = [*captured.pieces, captured.count, *filter(None, [captured.tables])]
    return [node for piece in pieces for node in piece.graph.graph.nodes]


def targets(captured: Captured) -> list[str]:
    return [str(node.target) for node in nodes(captured) if node.op == "call_function"]


def loss_and_grads(captured: Captured, module: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    params = dict(module.named_parameters())
    total, count = run_pieces(captured, params, dict(module.named_buffers()), batch)
    loss = total / count
    return loss, dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


def test_decoder_equals_eager_in_float64() -> None:
    torch.manual_seed(0)
    model, batch = Decoder().double(), tokens_and_labels()
    captured = capture(model, batch, decoder_loss)
    loss, grads = loss_and_grads(captured, model, batch)
    expected = decoder_loss(model(batch["tokens"]), batch)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=EXACT, atol=EXACT)
    assert check_capture(model, captured, batch, decoder_loss) <= EXACT


def test_meta_module_gives_the_same_pieces() -> None:
    batch = tokens_and_labels()
    with torch.device("meta"):
        meta = Decoder().double()
    on_meta = {name: value.to("meta") for name, value in batch.items()}
    keys = [
        [piece.key for piece in capture(m, b, decoder_loss).pieces] for m, b in ((Decoder().double(), batch), (meta, on_meta))
    ]
    assert keys[0] == keys[1]


def test_the_module_is_left_as_it_was() -> None:
    model, batch = Decoder(dropout=0.5), tokens_and_labels()
    model.layers[1].eval()
    model.note = "mine"  # type: ignore[assignment]
    before = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    attributes = [(list(child.__dict__), child.training, list(child._buffers)) for child in model.modules()]
    capture(model, batch, decoder_loss, train=False)
    for name, value in model.state_dict(keep_vars=True).items():
        assert id(value) == before[name][0]
        assert torch.equal(value, before[name][1])
    assert attributes == [(list(child.__dict__), child.training, list(child._buffers)) for child in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_module_is_left_as_it_was_when_capture_fails() -> None:
    def fail(x: Tensor, module: nn.Module) -> Tensor:
        module.leaked = x
        raise RuntimeError("broken model")

    model = Apply(fail).double()
    weight = model.linear.weight
    with pytest.raises(RuntimeError, match="broken model") as caught:
        capture(model, x_and_y(), square_loss, train=False)
    assert model.linear.weight is weight
    assert not hasattr(model, "leaked")
    assert model.training
    assert __file__ in "".join(caught.value.__notes__)


def test_captures_one_microbatch_of_the_global_shape() -> None:
    captured = capture(Decoder(), tokens_and_labels(batch=12), decoder_loss, microbatch_of=3)
    assert captured.batch == {"tokens": ((4, 6), torch.int64), "labels": ((4, 6), torch.int64)}
    with pytest.raises(ValueError, match=r"'tokens' of shape \(4, 6\) does not split into 3 microbatches"):
        capture(Decoder(), tokens_and_labels(batch=4), decoder_loss, microbatch_of=3)
    with pytest.raises(ValueError, match=r"'tokens' is \(12, 6\), but the microbatch was captured as \(4, 6\)"):
        run_pieces(captured, {}, {}, tokens_and_labels(batch=12))


def test_mode_decides_about_dropout() -> None:
    torch.manual_seed(0)
    model, batch = Decoder(dropout=0.5).double(), tokens_and_labels()
    training, evaluating = (capture(model, batch, decoder_loss, train=train) for train in (True, False))
    assert targets(training).count("aten.dropout.default") == 3
    assert "aten.dropout.default" not in targets(evaluating)
    # The operators draw in the order of the eager module, so that one seed gives the same masks.
    assert check_capture(model, training, batch, decoder_loss) <= EXACT
    assert check_capture(model, evaluating, batch, decoder_loss, train=False) <= EXACT


def test_submodules_keep_their_flags_in_a_module_that_is_in_the_mode() -> None:
    model = Decoder(dropout=0.5)
    model.layers[0].eval()
    assert targets(capture(model, tokens_and_labels(), decoder_loss)).count("aten.dropout.default") == 2


def test_composite_operators_stay_whole_and_without_device() -> None:
    captured = capture(Decoder(dropout=0.1), tokens_and_labels(), decoder_loss)
    assert {
        "embedding",
        "linear",
        "rms_norm",
        "scaled_dot_product_attention",
        "dropout",
        "silu",
        "cross_entropy_loss",
        "arange",
    } <= {target.split(".")[1] for target in targets(captured) if target.startswith("aten.")}
    assert not any({"device", "layout", "pin_memory"} & node.kwargs.keys() for node in nodes(captured))


def test_every_node_says_where_it_comes_from() -> None:
    captured = capture(Decoder(), tokens_and_labels(), decoder_loss)
    for piece in captured.pieces:
        for node in piece.graph.graph.nodes:
            assert "val" in node.meta
            assert {value.device.type for value in torch.utils._pytree.tree_leaves(node.meta["val"])} == {"meta"}
    block = captured.pieces[1].graph.graph
    norm = next(node for node in block.nodes if node.target is torch.ops.aten.rms_norm.default)
    assert norm.meta["module"] == "layers.0.norm"
    assert norm.meta["modules"] == ("layers.0", "layers.0.norm")
    path, _, line = norm.meta["source"].rpartition(":")
    assert "self.attention(self.norm(x), cos, sin)" in Path(path).read_text().splitlines()[int(line) - 1]
    loss = next(node for node in captured.pieces[-1].graph.graph.nodes if "cross_entropy" in str(node.target))
    assert loss.meta["module"] == ""
    assert "F.cross_entropy" in Path(path).read_text().splitlines()[int(loss.meta["source"].rpartition(":")[2]) - 1]


class Conv1D(nn.Module):
    """As in GPT-2: the weight is (in, out) and the leading dimensions are merged."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(wide, out)), nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


def test_conv1d_becomes_linear() -> None:
    model = nn.Sequential(Conv1D(4, 5), nn.GELU(), Conv1D(5, 4)).double()
    batch = {"input": torch.randn(2, 3, 4, dtype=torch.float64), "y": torch.randn(2, 3, 4, dtype=torch.float64)}

    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (outputs - batch["y"]).square().sum(), torch.ones_like(batch["y"][:, :, 0]).sum()

    captured = capture(model, batch, loss)
    assert targets(captured).count("aten.linear.default") == 2
    assert not any("addmm" in target or "view" in target for target in targets(captured))
    assert check_capture(model, captured, batch, loss) <= EXACT


def in_place_on_temporaries(x: Tensor, module: nn.Module) -> Tensor:
    y = F.dropout(x * 2, 0.0).relu_()
    y = y * 3
    y += x
    return y.view(-1).mul_(0.5).view_as(x)


def in_place_keeps_the_narrow_dtype(x: Tensor, module: nn.Module) -> Tensor:
    y = x.to(torch.float32) * 1
    y += x
    return y.double()


def without_gradient(x: Tensor, module: nn.Module) -> Tensor:
    with torch.no_grad():
        scale = x.square().mean()
        scale += 1
    return x * scale + x.detach()


def harmless_autocast(x: Tensor, module: nn.Module) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x * 2


def constants(x: Tensor, module: nn.Module) -> Tensor:
    return x * torch.tensor(0.5, dtype=torch.float64) + torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.ones(4, device=x.device)


def casts(x: Tensor, module: nn.Module) -> Tensor:
    y = x.to(x.device).to(x.dtype).contiguous().type_as(x).cpu()
    return y.float().double() + module.scale.new_zeros(4) + torch.zeros_like(y, device=x.device)


def split_and_index(x: Tensor, module: nn.Module) -> Tensor:
    a, b = x.split([1, 3], -1)
    return torch.cat([b, a], -1)[:, torch.tensor([3, 1, 0, 2])]


def checkpointed(x: Tensor, module: nn.Module) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda y: y.sin() * y, x, use_reentrant=False)  # type: ignore[no-any-return]


ODD = [
    in_place_on_temporaries, in_place_keeps_the_narrow_dtype, without_gradient, harmless_autocast, constants, casts,
    split_and_index, checkpointed,
]  # fmt: skip


@pytest.mark.parametrize("function", ODD, ids=lambda f: f.__name__)
def test_odd_forwards_equal_eager(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, batch = Apply(function).double(), x_and_y()
    captured = capture(model, batch, square_loss)
    assert check_capture(model, captured, batch, square_loss) <= EXACT
    for node in nodes(captured):
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable
        assert not isinstance(node.target, torch._ops.HigherOrderOperator)


def test_library_operators_survive_as_one_node() -> None:
    @torch.library.custom_op("phx_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: grad * 7, setup_context=lambda ctx, inputs, output: None)
    model, batch = Apply(lambda x, module: twice(x)).double(), x_and_y()
    captured = capture(model, batch, square_loss)
    assert targets(captured).count("phx_test.twice.default") == 1
    assert check_capture(model, captured, batch, square_loss) <= EXACT


def test_frozen_parameters_are_not_trainable() -> None:
    model = Decoder().double()
    model.tok.requires_grad_(False)
    captured = capture(model, tokens_and_labels(), decoder_loss)
    assert not captured.parameters["tok.weight"].trainable
    assert captured.parameters["norm.weight"].trainable
    assert check_capture(model, captured, tokens_and_labels(), decoder_loss) <= EXACT


def test_names_and_aliases() -> None:
    captured = capture(Decoder(), tokens_and_labels(), decoder_loss)
    assert captured.parameters["tok.weight"].aliases == ("head.weight",)
    assert "head.weight" not in captured.parameters
    assert [piece.name for piece in captured.pieces if "tok.weight" in piece.params] == ["prologue", "epilogue"]
    assert captured.buffers["inv_freq"].shape == (4,)


def test_check_capture_sees_a_wrong_graph() -> None:
    torch.manual_seed(0)
    model, batch = Decoder().double(), tokens_and_labels()
    captured = capture(model, batch, decoder_loss)
    for wrong, name in ((torch.ops.aten.relu.default, "loss"), (lambda x: F.silu(x.detach()), "gradient of tok.weight")):
        piece = captured.pieces[2]
        broken = copy.deepcopy(piece.graph)
        for node in broken.graph.nodes:
            if node.target is torch.ops.aten.silu.default:
                node.target = wrong
        broken.recompile()
        pieces = (*captured.pieces[:2], dataclasses.replace(piece, graph=broken), *captured.pieces[3:])
        with pytest.raises(ValueError, match=f"differs from the module in the {name}"):
            check_capture(model, dataclasses.replace(captured, pieces=pieces), batch, decoder_loss)


def test_warns_of_hooks_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def show(x: Tensor, module: nn.Module) -> Tensor:
        print("shape", tuple(x.shape))  # noqa: T201 - the side effect that is tested
        return x

    model = Apply(show)
    model.linear.register_forward_hook(lambda module, inputs, output: output * 2)
    model.linear.register_full_backward_hook(lambda module, inputs, output: None)
    batch = {name: value.float() for name, value in x_and_y().items()}
    captured = capture(model, batch, square_loss)
    text = "\n".join(captured.warnings)
    assert "module 'linear' has forward hooks" in text
    assert "module 'linear' has backward hooks" in text
    assert "printed while it was captured" in text
    assert capsys.readouterr().out == "shape (4, 4)\n"
    assert len(captured.warnings) == 3
    assert len(model.linear._forward_hooks) == 1
    # What a forward hook returns is in the graph.
    assert "aten.mul.Tensor" in targets(captured)


def test_no_warnings_for_a_plain_module() -> None:
    assert capture(Decoder(), tokens_and_labels(), decoder_loss).warnings == ()


class Doubled(nn.Module):
    """Computes twice as much when it is not being captured: what no rejection can see."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1.0 if torch.compiler.is_exporting() else 2.0)


def test_deriving_a_small_model_runs_it_once_to_see_that_nothing_was_lost() -> None:
    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    with pytest.raises(ValueError, match="the captured graph differs from the module in the loss"):
        derive(Doubled(), Mesh(), example=batch, loss=square_loss)
    # values that it cannot be run on, or a model without values, leave it unchecked
    with torch.device("meta"):
        meta = Doubled()
    derive(meta, Mesh(), example=batch, loss=square_loss)
    derive(Doubled(), Mesh(), example={key: value.to("meta") for key, value in batch.items()}, loss=square_loss)
    derive(Doubled(), Mesh(), example={key: value * float("nan") for key, value in batch.items()}, loss=square_loss)


def test_a_number_taken_from_the_size_of_a_microbatch_is_noticed() -> None:
    """Captured, `len(input)` is the constant 2, and each microbatch is divided by it instead of by 4."""

    def mean(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (outputs - batch["y"]).square().sum() / len(batch["input"]), torch.ones_like(batch["y"][:, 0]).sum()

    def total(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (outputs - batch["y"]).square().sum(), torch.ones_like(batch["y"][:, 0]).sum()

    batch = {"input": torch.randn(4, 4), "y": torch.randn(4, 4)}
    model = nn.Linear(4, 4)
    check_capture(model, capture(model, batch, mean), batch, mean)
    with pytest.raises(ValueError, match="differs from the module"):
        check_capture(model, capture(model, batch, mean, microbatch_of=2), batch, mean, microbatch_of=2)
    check_capture(model, capture(model, batch, total, microbatch_of=2), batch, total, microbatch_of=2)
