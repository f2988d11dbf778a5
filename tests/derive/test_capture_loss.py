"""A loss becomes (sum, count), or is refused with a hint."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.derive.capture import capture, check_capture
from phalanx.derive.segment import run_pieces

from .capture_models import Apply, Decoder, square_loss, tokens_and_labels, x_and_y

EXACT = 1e-12  # the same operators, once with the mean taken by the kernel and once after it


def logits_and_labels(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return outputs.flatten(0, 1), batch["labels"].flatten()


def sum_and_count(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(*logits_and_labels(outputs, batch), reduction="sum")
    return losses, (batch["labels"] != -100).sum()


def mean(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(*logits_and_labels(outputs, batch))


def smoothed(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(*logits_and_labels(outputs, batch), label_smoothing=0.1)


def other_ignored(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(*logits_and_labels(outputs, batch | {"labels": batch["labels"].clamp(min=0)}), ignore_index=3)


def scaled(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (mean(outputs.float(), batch) * 0.5 / 3).double()


@pytest.mark.parametrize("loss", [sum_and_count, mean, smoothed, other_ignored], ids=lambda f: f.__name__)
def test_sum_over_count_is_the_loss(loss: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, batch = Decoder().double(), tokens_and_labels()
    captured = capture(model, batch, loss)
    assert captured.count.params == captured.count.buffers == ()
    assert check_capture(model, captured, batch, loss) <= EXACT


def test_a_scaled_mean_keeps_its_scale() -> None:
    torch.manual_seed(0)
    model, batch = Decoder().double(), tokens_and_labels()
    # the loss is computed in float32 here, with the factor before the division by the count instead of after it
    assert check_capture(model, capture(model, batch, scaled), batch, scaled) <= 1e-6


def test_microbatches_add_up_to_the_mean_of_the_whole() -> None:
    torch.manual_seed(0)
    model, batch = Decoder().double(), tokens_and_labels(batch=6)
    captured = capture(model, batch, mean, microbatch_of=3)
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    parts = [run_pieces(captured, params, buffers, {k: v[2 * j : 2 * j + 2] for k, v in batch.items()}) for j in range(3)]
    total, count = (torch.stack(part).sum() for part in zip(*parts, strict=True))
    assert count == (batch["labels"] != -100).sum()
    torch.testing.assert_close(total / count, mean(model(batch["tokens"]), batch), rtol=EXACT, atol=0)


class WithLoss(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.decoder, self.wrap = Decoder(), wrap

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.decoder(tokens)
        return self.wrap(mean(logits, {"labels": labels})) if labels is not None else SimpleNamespace(logits=logits)


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: SimpleNamespace(loss=x), lambda x: {"loss": x}], ids=["bare", "attr", "dict"]
)
def test_a_module_may_return_its_own_loss(wrap: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    model, batch = WithLoss(wrap).double(), tokens_and_labels()
    assert check_capture(model, capture(model, batch), batch) <= EXACT
    with pytest.raises(ValueError, match=r"without a loss \(no labels in the batch\?\)"):
        capture(model, {"tokens": batch["tokens"]})


def refused(loss: Callable[..., Any]) -> str:
    with pytest.raises(ValueError, match=r"\(sum, count\)") as caught:
        capture(Decoder().double(), tokens_and_labels(), loss)
    return str(caught.value)


def test_class_weights_are_refused() -> None:
    text = refused(lambda o, b: F.cross_entropy(*logits_and_labels(o, b), weight=torch.ones(20, dtype=torch.float64)))
    assert "divides by the summed weights" in text
    assert __file__ in text


def test_class_probabilities_are_refused() -> None:
    soft = torch.full((24, 20), 0.05, dtype=torch.float64)
    assert "class probabilities" in refused(lambda o, b: F.cross_entropy(o.flatten(0, 1), soft))


def test_a_bare_sum_is_refused() -> None:
    assert "not a mean" in refused(lambda o, b: F.cross_entropy(*logits_and_labels(o, b), reduction="sum"))


def test_another_mean_is_refused_with_its_line() -> None:
    text = refused(lambda o, b: o.square().mean())
    assert "aten.mean" in text
    assert __file__ in text


def test_a_sum_of_losses_is_refused() -> None:
    assert "aten.add" in refused(lambda o, b: mean(o, b) + 0.1 * o.square().mean())


def test_a_number_as_count_is_refused() -> None:
    assert "the count that the loss returned is 24, a number" in refused(
        lambda o, b: (sum_and_count(o, b)[0], b["labels"].numel())
    )


def test_a_constant_count_is_refused() -> None:
    assert "a constant" in refused(lambda o, b: (sum_and_count(o, b)[0], torch.tensor(24)))


def test_a_count_that_reads_a_parameter_is_refused() -> None:
    assert "count of the loss depends on the parameter" in refused(lambda o, b: (sum_and_count(o, b)[0], o.sum()))


def test_unreduced_losses_are_refused() -> None:
    assert "(tensor(24,))" in refused(lambda o, b: F.cross_entropy(*logits_and_labels(o, b), reduction="none"))


def test_a_loss_without_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
        capture(Apply(lambda x, module: x.detach()).double(), x_and_y(), square_loss)
