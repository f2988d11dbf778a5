"""The MLP trains, and both of its losses add up over any split of the batch."""

from __future__ import annotations

import torch

from phalanx.models.mlp import MLP, MLPConfig, loss, squared_error

SMALL = MLPConfig(inputs=6, hidden=16, inner=32, layers=3, outputs=5)


def test_losses_add_up_over_any_split() -> None:
    torch.manual_seed(0)
    model, x = MLP(SMALL).double(), torch.randn(8, 6, dtype=torch.float64)
    outputs = model(x)
    assert outputs.shape == (8, 5)
    classes = torch.randint(5, (8,))
    classes[2] = -100
    values = torch.randn(8, 5, dtype=torch.float64)
    for function, targets, expected in ((loss, classes, 7), (squared_error, values, 8)):
        total, count = function(outputs, {"targets": targets})
        parts = [function(outputs[rows], {"targets": targets[rows]}) for rows in (slice(0, 3), slice(3, 8))]
        assert count == expected
        assert parts[0][1] + parts[1][1] == count
        # Sums of at most 40 float64 terms in different orders
        torch.testing.assert_close(parts[0][0] + parts[1][0], total, rtol=1e-14, atol=0)


def test_it_fits_a_rule() -> None:
    """Which of five inputs is the largest: from chance (log 5 = 1.6) to below a quarter of it."""
    torch.manual_seed(0)
    model = MLP(SMALL)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        x = torch.randn(128, 6)
        total, count = loss(model(x), {"targets": x[:, :5].argmax(1)})
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert (total / count).item() < 0.4


def test_dropout_is_an_option() -> None:
    torch.manual_seed(0)
    model, x = MLP(MLPConfig(dropout=0.5)), torch.randn(4, 32)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
