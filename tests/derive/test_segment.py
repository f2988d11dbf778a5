"""Pieces: where a graph is cut, what crosses a cut, what is a table, and which pieces are equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from phalanx.derive.capture import capture, check_capture
from phalanx.derive.program import Captured, Source

from .capture_models import Block, Decoder, decoder_loss, square_loss, tokens_and_labels

EXACT = 1e-12  # composed pieces run the operators of the eager module


def x_and_y(dim: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(4, dim, dtype=torch.float64), "y": torch.randn(4, dim, dtype=torch.float64)}


def captured_exactly(
    model: nn.Module, batch: dict[str, Tensor], loss: Callable[..., object], blocks: str | None = None
) -> Captured:
    """Capture, and prove that the pieces together are the module."""
    captured = capture(model, batch, loss, blocks=blocks)
    assert check_capture(model, captured, batch, loss) <= EXACT
    for piece in captured.pieces:
        piece.graph.graph.lint()
        kinds = [node.meta["kind"] for node in piece.graph.graph.nodes if node.op == "placeholder"]
        wanted = ["parameter"] * len(piece.params) + ["buffer"] * len(piece.buffers) + ["input"] * len(piece.inputs)
        assert kinds == wanted
    made = set()
    for piece in captured.pieces:
        assert {source.name for source in piece.inputs if source.kind == "cut"} <= made
        made = set(piece.outputs)  # a piece sees the cut before it only
    return captured


def names(captured: Captured) -> list[str]:
    return [piece.name for piece in captured.pieces]


def test_decoder_pieces() -> None:
    captured = captured_exactly(Decoder().double(), tokens_and_labels(), decoder_loss)
    assert names(captured) == ["prologue", "layers.0", "layers.1", "layers.2", "epilogue"]
    prologue, first, second, third, epilogue = captured.pieces
    assert first.key == second.key == third.key
    assert len({prologue.key, first.key, epilogue.key}) == 3
    # only the hidden state crosses; the rotary tables do not
    assert [len(piece.outputs) for piece in captured.pieces] == [1] * 5
    assert epilogue.outputs == ("loss",)
    assert captured.tables is not None
    assert [source for source in second.inputs if source.kind == "table"] == [
        Source("table", n) for n in captured.tables.outputs
    ]
    assert len(captured.tables.outputs) == 2
    assert captured.tables.buffers == ("inv_freq",)
    assert captured.tables.params == ()
    assert not captured.tables_read_batch
    assert epilogue.inputs[-1] == Source("batch", "labels")
    assert captured.count.outputs == ("count",)
    assert captured.count.inputs == (Source("batch", "labels"),)


def test_sequential_has_a_block_for_each_child_with_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    captured = captured_exactly(model, {"input": x_and_y()["x"], "y": x_and_y()["y"]}, square_loss)
    assert names(captured) == ["0", "2", "4", "epilogue"]
    # the first block's input needs no gradient, and the last has no ReLU
    assert len({piece.key for piece in captured.pieces}) == 4
    assert captured.pieces[0].params == ("0.weight", "0.bias")
    assert captured.pieces[0].inputs == (Source("batch", "input"),)


class Looped(nn.Module):
    """The same block twice, after one that is used once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x).relu()).relu()
        return self.blocks[1](self.blocks[0](x).relu())


def test_a_block_that_runs_twice_is_two_pieces() -> None:
    captured = captured_exactly(Looped().double(), x_and_y(), square_loss)
    assert names(captured) == ["blocks.0", "blocks.1", "blocks.0@1", "blocks.1@1", "epilogue"]
    assert captured.pieces[1].key == captured.pieces[2].key  # linear and relu of a cut value
    assert captured.pieces[0].params == captured.pieces[2].params


class Skips(nn.Module):
    """The embedding is added again after every block, and the first block's output at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embed(x)
        first = None
        h = embedded
        for block in self.blocks:
            h = block(h).tanh() + embedded
            first = h if first is None else first
        return h + first


def test_values_used_later_are_handed_through() -> None:
    captured = captured_exactly(Skips().double(), x_and_y(), square_loss)
    assert names(captured) == ["prologue", "blocks.0", "blocks.1", "blocks.2", "epilogue"]
    prologue, first, second, third, _ = captured.pieces
    embedded = prologue.outputs[0]
    assert embedded in first.outputs
    assert embedded in second.outputs
    # what follows the last block, here its tanh and sum, is the epilogue
    assert embedded in third.outputs
    assert set(first.outputs) - {embedded} < set(second.outputs)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.between = nn.LayerNorm(4)
        self.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = layer(memory).relu()
        memory = self.between(memory)
        h = x
        for layer in self.decoder:
            h = layer(h + memory).relu()
        return h


def test_two_containers() -> None:
    captured = captured_exactly(EncoderDecoder().double(), x_and_y(), square_loss)
    assert names(captured) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "epilogue"]
    assert "between.weight" in captured.pieces[1].params


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x).sin()
        return x


def test_outer_repetition_wins_and_patterns_override() -> None:
    model = Nested().double()
    assert names(captured_exactly(model, x_and_y(), square_loss)) == ["stages.0", "stages.1", "epilogue"]
    finer = captured_exactly(model, x_and_y(), square_loss, blocks="stages.*.0, stages.*.2")
    assert names(finer) == ["stages.0.0", "stages.0.2", "stages.1.0", "stages.1.2", "epilogue"]
    with pytest.raises(ValueError, match=r"blocks='layers\.\*' matches no module that ran; indexed modules are .*stages\.\*"):
        capture(model, x_and_y(), square_loss, blocks="layers.*")


def test_a_model_without_repetition_is_one_piece() -> None:
    model = nn.Sequential()
    model.add_module("a", nn.Linear(4, 4))
    model.add_module("b", nn.Tanh())
    captured = captured_exactly(model.double(), {"input": x_and_y()["x"], "y": x_and_y()["y"]}, square_loss)
    assert names(captured) == ["epilogue"]
    assert captured.tables is None


class Positions(nn.Module):
    """A table that is made from the batch, one that one block alone uses, and a random value that no table may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        table, single, noise = shift.cos() * 2, shift.sin(), torch.rand_like(shift)
        left, right = shift.exp().chunk(2, -1)
        for index, block in enumerate(self.blocks):
            x = block(x) + table + noise
            if index == 1:
                x = x * single * left.sum()
        return x + right.sum()


def test_tables_from_the_batch_and_values_of_one_piece() -> None:
    batch = {**x_and_y(), "shift": torch.randn(4, 4, dtype=torch.float64)}
    captured = captured_exactly(Positions().double(), batch, square_loss)
    assert captured.tables is not None
    assert captured.tables_read_batch
    assert captured.tables.inputs == (Source("batch", "shift"),)
    # the halves of one result are needed by one piece each: the table holds the halves, never the pair
    shapes = [tuple(node.meta["val"].shape) for node in captured.tables.graph.graph.output_node().all_input_nodes]
    assert sorted(shapes) == [(4, 2), (4, 2), (4, 4)]
    operators = {
        piece.name: [str(n.target) for n in piece.graph.graph.nodes if n.op == "call_function"] for piece in captured.pieces
    }
    assert [name for name, ops in operators.items() if "aten.sin.default" in ops] == ["blocks.1"]
    assert [name for name, ops in operators.items() if "aten.rand_like.default" in ops] == ["prologue"]


class Scaled(nn.Module):
    def __init__(self, scales: list[object], widths: tuple[int, ...] = (4, 4, 4)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for scale, wide in zip(scales, widths, strict=True):
            block = nn.Sequential(nn.Linear(4, wide), nn.Linear(wide, 4))
            block.scale = scale  # type: ignore[assignment]
            self.blocks.append(ScaledBlock(block, scale))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ScaledBlock(nn.Module):
    def __init__(self, inner: nn.Module, scale: object) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.relu()) * self.scale


def last_keys_equal(model: nn.Module) -> bool:
    captured = captured_exactly(model.double(), x_and_y(), square_loss)
    assert names(captured)[-3:] == ["blocks.1", "blocks.2", "epilogue"]
    return captured.pieces[-3].key == captured.pieces[-2].key


def test_keys_see_constants_shapes_and_what_is_trained() -> None:
    assert last_keys_equal(Scaled([1.5, 2.5, 2.5]))
    assert not last_keys_equal(Scaled([1.5, 2.5, 3.5]))
    assert not last_keys_equal(Scaled([1.5, 2.5, 2.5], widths=(4, 4, 8)))
    same, other = (torch.tensor([1.0, 2.0, 3.0, v], dtype=torch.float64) for v in (4.0, 5.0))
    assert last_keys_equal(Scaled([same, same.clone(), same.clone()]))
    assert not last_keys_equal(Scaled([same, same.clone(), other]))
    frozen = Scaled([1.5, 2.5, 2.5])
    frozen.blocks[2].inner[0].weight.requires_grad_(False)
    assert not last_keys_equal(frozen)


def test_keys_see_a_parameter_that_is_bound_twice() -> None:
    model = Scaled([1.5, 1.5, 1.5])
    model.blocks[2].inner[1].weight = model.blocks[2].inner[0].weight
    assert not last_keys_equal(model)


def test_what_depends_on_parameters_alone_is_made_in_every_piece_that_uses_it() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            turned = self.weight.t()
            for block in self.blocks:
                x = block(x) @ turned
            return x

    captured = captured_exactly(Transposed().double(), x_and_y(), square_loss)
    assert names(captured) == ["blocks.0", "blocks.1", "epilogue"]
    # the product after the last block runs outside any block
    assert ["weight" in piece.params for piece in captured.pieces] == [True, False, True]
    assert [len(piece.outputs) for piece in captured.pieces] == [1, 1, 1]


def test_one_block_may_be_named_in_a_small_model() -> None:
    captured = captured_exactly(Decoder(layers=1).double(), tokens_and_labels(), decoder_loss, blocks="layers.*")
    assert names(captured) == ["prologue", "layers.0", "epilogue"]
    assert isinstance(Decoder().layers[0], Block)
