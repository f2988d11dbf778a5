"""Our Llama out to a folder of transformers' and in again, and weights from one folder in the model of another."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx as phx
from phalanx.cli import main
from phalanx.hf.folder import Folder
from phalanx.hf.llama import LlamaFolder, hf_config
from phalanx.models.llama import PRESETS, LlamaConfig
from phalanx.run.initialize import deferred_init
from phalanx.run.step import Step
from phalanx.train.assembly import parallel_step
from phalanx.train.beginning import beginning
from phalanx.train.config import TrainConfig
from phalanx.train.loop import train
from phalanx.train.models import build

pytest.importorskip("transformers")

from tests.hf.folders import saved

CONFIG = TrainConfig(model="llama-tiny", mesh="dp=2,tp=2", batch=4, seq=16, steps=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, two steps of our Llama, and `out`, what was exported of it."""
    folder = tmp_path_factory.mktemp("trained")
    config = replace(CONFIG, out=folder / "run")
    with phx.local(config.parsed_mesh(), timeout=60) as world:
        train(config, world)
    assert main(["export", str(folder / "run"), "--out", str(folder / "out")]) == 0
    return folder


def begun(config: TrainConfig) -> Iterator[Step]:
    """The step that a run begins with."""
    model = build(config.model, config.dtype, dropout=config.dropout)
    with phx.local(config.parsed_mesh(), timeout=60) as world:
        start, module = beginning(config, world), deferred_init(model.factory)
        step = parallel_step(config, world, model, module, start.values(module))
        start.fill(step, config, print)
        yield step


def test_there_and_back(trained: Path) -> None:
    """The same weights bit for bit, on another mesh, and the same loss as from the checkpoint itself."""
    found = []
    for source in ("run", "out"):
        for step in begun(replace(CONFIG, mesh="pp=2,tp=2", init_from=str(trained / source))):
            weights = step.state_dict()
            loss = step(build(CONFIG.model, CONFIG.dtype).example(4, 16, 1)).loss
            found.append((weights, loss))
    (before, loss_before), (after, loss_after) = found
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert loss_before == loss_after


def test_tied_weights_come_by_either_name(tmp_path: Path) -> None:
    sizes = replace(PRESETS["tiny"], tied=True)
    folder = saved("llama", tmp_path / "in", torch.float32, **hf_config(sizes, 128).to_diff_dict())
    from phalanx import rules
    from phalanx.models.llama import Llama, loss

    model = Llama(sizes)
    example = build("llama-tiny", "float32").example(4, 16, 0)
    values = LlamaFolder(Folder(tmp_path / "in"), sizes).values
    with phx.local(phx.Mesh(tp=2), timeout=60) as world:
        step = phx.parallelize(
            model,
            world,
            names=rules.table_for(model, example),
            layout={"vocab": "tp"},
            loss=loss,
            example=example,
            values=values,
        )
        found = step.state_dict()
    assert torch.equal(found["lm_head.weight"], folder.lm_head.weight)
    assert torch.equal(found["embed_tokens.weight"], folder.lm_head.weight)
    assert torch.equal(found["layers.1.mlp.up_proj.weight"], folder.model.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06 there and 1e-05 in the model"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2 there and 4 in the model"),
        ({"num_attention_heads": 8, "head_dim": 16}, "num_attention_heads is 8 there and 4 in the model"),
        ({"head_dim": 16}, "head_dim is 16 there and 32 in the model"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True there and False in the model"),
        ({"attention_bias": True}, "attention_bias is True there and False in the model"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' there and 'silu' in the model"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, r"'rope_theta': 500000.0, .* there and .*10000.0"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            r"rope_parameters is .*linear.* there",
        ),
    ],
)
def test_another_llama_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved("llama", tmp_path / "in", **{**hf_config(PRESETS["tiny"], 128).to_diff_dict(), **changes})
    with pytest.raises(ValueError, match=said) as raised:
        LlamaFolder(Folder(tmp_path / "in"), LlamaConfig())
    assert f"--model hf:{tmp_path / 'in'}" in str(raised.value)


def test_another_family_is_refused(tmp_path: Path) -> None:
    saved("mistral", tmp_path / "in")
    with pytest.raises(ValueError, match=r"model:\n  model_type is 'mistral' there and 'llama' in the model\nto train"):
        LlamaFolder(Folder(tmp_path / "in"), LlamaConfig())
    with pytest.raises(ValueError, match="folder of Hugging Face's, whose mistral is no MLP"):
        next(begun(TrainConfig(model="mlp", mesh="dp=2", init_from=str(tmp_path / "in"))))


def hf(folder: Path, init_from: Path) -> TrainConfig:
    return TrainConfig(model=f"hf:{folder}", mesh="tp=2", batch=4, seq=16, steps=1, init_from=str(init_from))


@pytest.mark.parametrize("through", ["folder", "run"])
def test_weights_of_one_folder_in_the_model_of_another(through: str, tmp_path: Path) -> None:
    """By their names; of a run, those that it has come to."""
    saved("qwen3", tmp_path / "a", torch.float32)
    other = saved("qwen3", tmp_path / "b", torch.float32, initializer_range=0.1)
    expected, source = other.state_dict(), tmp_path / "b"
    assert not torch.equal(expected["lm_head.weight"], Folder(tmp_path / "a").module(torch.float32).lm_head.weight)
    if through == "run":
        source = tmp_path / "run"
        config = replace(hf(tmp_path / "b", tmp_path), init_from=None, mesh="dp=2", out=source)
        with phx.local(config.parsed_mesh(), timeout=60) as world:
            train(config, world)
        assert main(["export", str(source), "--out", str(tmp_path / "c")]) == 0
        expected = Folder(tmp_path / "c").module(torch.float32).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in begun(hf(tmp_path / "a", source)):
            found = step.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_settings_that_differ_between_folders_are_told(tmp_path: Path) -> None:
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    saved("llama", tmp_path / "a")
    saved("llama", tmp_path / "b", **theta)
    with pytest.warns(UserWarning, match=r"b come to a model with other settings: rope_parameters is .*7\.0.* there and"):
        next(begun(hf(tmp_path / "a", tmp_path / "b")))


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"num_hidden_layers": 2}, {}, r"b has model\.layers\.2\..*, which LlamaForCausalLM has not"),
        ({}, {"num_hidden_layers": 2}, r"b lacks model\.layers\.2\..*, which LlamaForCausalLM has"),
        ({"tie_word_embeddings": True}, {}, r"b has .*lm_head\.weight.* apart, which are one tensor in LlamaForCausalLM"),
        ({"intermediate_size": 64}, {}, r"gate_proj\.weight is \(128, 64\) in .*b and \(64, 64\) in the model"),
    ],
)
def test_a_folder_of_another_shape_is_refused(ours: dict[str, Any], theirs: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved("llama", tmp_path / "a", **ours)
    saved("llama", tmp_path / "b", **theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=said):
            next(begun(hf(tmp_path / "a", tmp_path / "b")))


def test_an_older_config_says_its_rotary_base_by_itself(tmp_path: Path) -> None:
    """As those of Llama 2 and 3 do."""
    saved("llama", tmp_path / "in", **hf_config(PRESETS["tiny"], 128).to_diff_dict())
    said = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**said, "rope_parameters": None, "rope_theta": 10000.0}))
    LlamaFolder(Folder(tmp_path / "in"), LlamaConfig())
