"""What a graph cannot hold is refused with the line that does it. The lines in question end in `# refused`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.derive.capture import capture

from .capture_models import Apply, square_loss, x_and_y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def custom_function(x: Tensor, module: nn.Module) -> Tensor:
    return Doubled.apply(x) + 1  # refused


def reentrant_checkpoint(x: Tensor, module: nn.Module) -> Tensor:
    return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True)  # refused


def tensor_hook(x: Tensor, module: nn.Module) -> Tensor:
    x.register_hook(lambda grad: grad * 2)  # refused
    return x


def branch_on_data(x: Tensor, module: nn.Module) -> Tensor:
    if x.sum() > 0:  # refused
        return x
    return -x


def item(x: Tensor, module: nn.Module) -> Tensor:
    return x * x.max().item()  # refused


def boolean_index(x: Tensor, module: nn.Module) -> Tensor:
    return x - x[x > 0].mean()  # refused


def nonzero(x: Tensor, module: nn.Module) -> Tensor:
    return x + x.nonzero().sum()  # refused


def autocast(x: Tensor, module: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module.linear(x)  # refused


def buffer_update(x: Tensor, module: nn.Module) -> Tensor:
    module.scale.mul_(0.9)  # refused
    return x * module.scale


def buffer_update_through_a_view(x: Tensor, module: nn.Module) -> Tensor:
    module.scale.view(2, 2).add_(1)  # refused
    return x


def parameter_update(x: Tensor, module: nn.Module) -> Tensor:
    with torch.no_grad():
        module.linear.bias.clamp_(min=0)  # refused
    return x


def write_through_a_view(x: Tensor, module: nn.Module) -> Tensor:
    y = x * 2
    y[:, 0].add_(1)  # refused
    return y


def write_outside_no_grad(x: Tensor, module: nn.Module) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.add_(1)  # refused
    return y


REFUSED = {
    custom_function: r"Doubled .*torch\.library",
    reentrant_checkpoint: r"CheckpointFunction .*use_reentrant=False",
    tensor_hook: r"register_hook .*torch\.library",
    branch_on_data: r"only at run time.*torch\.where",
    item: "only at run time",
    boolean_index: "only at run time",
    nonzero: "only at run time",
    autocast: r"autocast.*bfloat16",
    buffer_update: r"mul_.*buffer 'scale' in place",
    buffer_update_through_a_view: r"add_.*buffer 'scale' in place",
    parameter_update: r"clamp_.*parameter 'linear.bias' in place",
    write_through_a_view: r"add_.*another view",
    write_outside_no_grad: r"add_.*under no_grad",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_refused_with_its_line(function: Callable[..., Tensor]) -> None:
    first = function.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number in range(first, len(lines)) if lines[number - 1].endswith("# refused"))
    with pytest.raises(ValueError, match=re.compile(REFUSED[function], re.DOTALL)) as caught:
        capture(Apply(function).double(), x_and_y(), square_loss)
    assert f"{__file__}:{line}" in str(caught.value)


def test_batch_norm_in_training_is_refused_and_in_evaluation_is_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    batch = {"input": x_and_y()["x"], "y": x_and_y()["y"]}
    with pytest.raises(ValueError, match=r"in 1 at .*'1.num_batches_tracked' in place.*BatchNorm: eval mode"):
        capture(model, batch, square_loss)
    capture(model, batch, square_loss, train=False)
    model[1] = nn.BatchNorm1d(4, momentum=0.1, track_running_stats=False).double()
    capture(model, batch, square_loss)


def test_running_statistics_without_a_counter_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    model[1].num_batches_tracked = None
    with pytest.raises(ValueError, match="updates its running statistics"):
        capture(model, {"input": x_and_y()["x"], "y": x_and_y()["y"]}, square_loss)


def test_parameter_gradient_hook_is_refused() -> None:
    model = Apply(lambda x, module: x).double()
    model.linear.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(ValueError, match=r"'linear\.weight' has a gradient hook"):
        capture(model, x_and_y(), square_loss)


def test_a_function_that_no_gradient_passes_is_allowed() -> None:
    capture(Apply(lambda x, module: x + Doubled.apply(module.scale)).double(), x_and_y(), square_loss)


def test_a_parameter_outside_the_module_is_refused() -> None:
    stray = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="requires grad but is no parameter"):
        capture(Apply(lambda x, module: x * stray).double(), x_and_y(), square_loss)


def test_a_meta_attribute_that_is_no_buffer_is_refused() -> None:
    model = Apply(lambda x, module: x).double()
    model.linear.table = torch.ones(4, device="meta")
    with pytest.raises(ValueError, match=r"linear\.table is a meta tensor but no buffer"):
        capture(model, x_and_y(), square_loss)


def test_a_lazy_module_is_refused() -> None:
    with pytest.raises(ValueError, match="'weight' has no shape yet"):
        capture(nn.LazyLinear(4), {"input": torch.ones(2, 4), "y": torch.ones(2, 4)}, square_loss)


def test_batch_must_fit_the_forward() -> None:
    model = Apply(lambda x, module: x).double()
    with pytest.raises(ValueError, match=r"Apply\.forward takes x and the batch has z, y: x is missing"):
        capture(model, {"z": x_and_y()["x"], "y": x_and_y()["y"]}, square_loss)
    with pytest.raises(ValueError, match="'y' is a list"):
        capture(model, {"x": x_and_y()["x"], "y": [1.0]}, square_loss)  # type: ignore[dict-item]
