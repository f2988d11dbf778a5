"""The Llama written here is Hugging Face's, by its own weights; and its loss is a sum and a count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.models.llama import PRESETS, Llama, LlamaConfig, loss
from phalanx.run.initialize import deferred_init

SMALL = LlamaConfig(vocab=64, hidden=32, inner=48, layers=2, heads=4, kv_heads=2)


def test_logits_equal_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    ours = Llama(SMALL).double()
    state = {name.removeprefix("model."): value * 5 for name, value in theirs.state_dict().items()}
    ours.load_state_dict(state)
    theirs.load_state_dict({name: value * 5 for name, value in theirs.state_dict().items()})
    tokens = torch.randint(64, (3, 17))
    expected = theirs(tokens).logits
    # Theirs computes norms and rotary angles in float32, whatever the parameters: 2^-24 of relative error per rounding
    torch.testing.assert_close(ours(tokens), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    assert expected.std() > 0.5  # logits near zero would agree whatever was computed


def test_attention_is_causal_and_knows_positions() -> None:
    torch.manual_seed(0)
    model = Llama(SMALL).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    tokens = torch.randint(64, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 64
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 8:], after[:, 8:])
    moved = model(torch.cat([tokens[:, 3:4], tokens[:, :3], tokens[:, 4:]], 1))
    assert not torch.allclose(moved[:, 5:], before[:, 5:])


def test_loss_adds_up_over_any_split_and_skips_what_is_ignored() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 6, 9, dtype=torch.float64), torch.randint(9, (4, 6))
    targets[0, 2:] = targets[3] = -100
    total, count = loss(logits, {"targets": targets})
    halves = [loss(logits[rows], {"targets": targets[rows]}) for rows in (slice(0, 1), slice(1, 4))]
    # Two sums of 14 float64 terms in different orders
    torch.testing.assert_close(halves[0][0] + halves[1][0], total, rtol=1e-14, atol=0)
    assert (halves[0][1] + halves[1][1], count) == (14, 14)
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(total / count, mean, rtol=1e-14, atol=0)
    assert loss(logits.bfloat16(), {"targets": targets})[0].dtype == torch.float32


@pytest.mark.parametrize(("name", "billions"), [("tiny", 0.00105), ("1b", 1.24), ("8b", 8.03), ("70b", 70.55)])
def test_presets_have_the_published_sizes(name: str, billions: float) -> None:
    module = deferred_init(lambda: Llama(LlamaConfig.preset(name)))
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)
    assert (module.lm_head.weight is module.embed_tokens.weight) == PRESETS[name].tied


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 query heads.*3 key"):
        LlamaConfig(heads=4, kv_heads=3)
    with pytest.raises(ValueError, match="130 over 4"):
        LlamaConfig(hidden=130)
    with pytest.raises(ValueError, match="tiny, 1b, 8b, 70b"):
        LlamaConfig.preset("7b")
    assert LlamaConfig.preset("tiny", dropout=0.1).dropout == 0.1


def test_residual_projections_start_smaller() -> None:
    torch.manual_seed(0)
    model = Llama(LlamaConfig())
    ratio = model.layers[0].mlp.up_proj.weight.std() / model.layers[0].mlp.down_proj.weight.std()
    # the deviation of 65,536 draws is known to 0.3 %
    assert ratio.item() == pytest.approx(8**0.5, rel=0.02)
