"""A folder in: each rank gets its shard from its own bytes, under every name that from_pretrained knows; the rest is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.comm.local import local
from phalanx.derive.program import Parameter
from phalanx.hf import Folder
from phalanx.mesh import Mesh
from phalanx.run.initialize import deferred_init
from phalanx.spec import Spec, shard
from phalanx.train.models import build, check_name

transformers = pytest.importorskip("transformers")

from tests.hf.folders import logits, saved  # noqa: E402 - needs transformers

ONE = "1GB"
"""Shards of so much: a single file."""


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | changes).items() if v != "drop"}))


def test_a_module_without_memory_and_one_with(tmp_path: Path) -> None:
    model = saved("gemma2", tmp_path)
    folder = Folder(tmp_path)
    module = deferred_init(lambda: folder.module(torch.float64))
    assert folder.bytes_read == 0
    assert type(module) is type(model)
    assert module.training
    assert all(parameter.is_meta for parameter in module.parameters())
    stock = dict(model.named_buffers())
    assert stock.keys() == dict(module.named_buffers()).keys()
    assert all(torch.equal(buffer, stock[name]) for name, buffer in module.named_buffers())
    assert torch.equal(logits(folder.module(torch.float64)), logits(model))
    assert folder.bytes_read == sum(parameter.nbytes for parameter in model.parameters())


def parameter(name: str, value: Tensor, dims: str, **more: Any) -> Parameter:
    spec = Spec(tuple((axis,) if axis != "-" else () for axis in dims.split()))
    return Parameter(name, tuple(value.shape), more.pop("dtype", value.dtype), spec, **more)


def test_each_rank_reads_the_bytes_of_its_shard(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    mesh = Mesh(dp=2, tp=4)
    down = model.model.layers[1].mlp.down_proj.weight
    for dims in ("- tp", "tp -", "tp dp", "- -"):
        asked = parameter("model.layers.1.mlp.down_proj.weight", down, dims)
        with local(mesh) as world:
            for rank in world.worlds:
                folder = Folder(tmp_path)
                before = rchar()
                value = folder.values(asked, rank)
                moved = rchar() - before
                assert torch.equal(value, shard(down.detach(), asked.spec, mesh, rank.rank))
                assert folder.bytes_read == value.nbytes
                # what the kernel counts has the few hundred bytes of asking it as well
                assert value.nbytes <= moved <= value.nbytes + 1000


def rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_values_come_in_the_dtype_that_is_stored(tmp_path: Path) -> None:
    model = saved("llama", tmp_path, torch.bfloat16)
    norm = model.model.norm.weight
    with local(Mesh()) as world:
        (rank,) = world.worlds
        folder = Folder(tmp_path)
        wide = folder.values(parameter("model.norm.weight", norm, "-", dtype=torch.float64), rank)
        kept = folder.values(parameter("model.norm.weight", norm, "-", stored=torch.float32), rank)
    assert wide.dtype == torch.float64
    assert kept.dtype == torch.float32
    assert torch.equal(wide, norm.double())
    assert torch.equal(kept, norm.float())


def test_padded_rows_are_zero(tmp_path: Path) -> None:
    table = saved("llama", tmp_path, vocab_size=253).model.embed_tokens.weight
    mesh = Mesh(tp=8)
    asked = Parameter("model.embed_tokens.weight", (264, 64), table.dtype, Spec((("tp",), ())), valid=(253, 64))
    with local(mesh) as world:
        for rank in world.worlds:
            folder = Folder(tmp_path)
            assert torch.equal(folder.values(asked, rank), shard(asked.padded(table.detach()), asked.spec, mesh, rank.rank))
            assert folder.bytes_read == 64 * 8 * max(0, min(33, 253 - 33 * rank.rank))


@pytest.mark.parametrize("name", ["lm_head.weight", "transformer.wte.weight", "wte.weight"])
def test_tied_weights_under_either_name(name: str, tmp_path: Path) -> None:
    model = saved("gpt2", tmp_path, shards=ONE)
    rewrite(tmp_path, lambda state: {name if key.endswith("wte.weight") else key: value for key, value in state.items()})
    folder = Folder(tmp_path)
    assert torch.equal(logits(folder.module(torch.float64)), logits(model))
    table = model.transformer.wte.weight
    with local(Mesh()) as world:
        for own, other in (("transformer.wte.weight", "lm_head.weight"), ("lm_head.weight", "transformer.wte.weight")):
            value = folder.values(parameter(own, table, "- -", aliases=(other,)), world.worlds[0])
            assert torch.equal(value, table)


def test_a_tied_tensor_that_is_there_twice(tmp_path: Path) -> None:
    model = saved("gpt2", tmp_path, shards=ONE)
    rewrite(tmp_path, lambda state: state | {"lm_head.weight": state["transformer.wte.weight"].clone()})
    assert torch.equal(logits(Folder(tmp_path).module(torch.float64)), logits(model))
    rewrite(tmp_path, lambda state: state | {"lm_head.weight": state["transformer.wte.weight"] + 1})
    with pytest.raises(ValueError, match=r"weight is tied .* both with different values: set tie_word_embeddings to false"):
        Folder(tmp_path).module(torch.float64)
    edit_config(tmp_path, tie_word_embeddings=False)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(Folder(tmp_path).module(torch.float64)), logits(stock))


@pytest.mark.parametrize(("family", "prefix"), [("gpt2", "transformer."), ("gemma3_text", "model.")])
def test_the_prefix_of_a_model_without_head_may_be_missing(family: str, prefix: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path, shards=ONE)
    rewrite(tmp_path, lambda state: {key.removeprefix(prefix): value for key, value in state.items()})
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    assert torch.equal(logits(Folder(tmp_path).module(torch.float64)), logits(model))


def test_names_in_files_are_those_of_older_versions(tmp_path: Path) -> None:
    model = saved("gpt_neox", tmp_path, shards=ONE)
    assert "embed_out.weight" in load_file(tmp_path / "model.safetensors")
    assert torch.equal(logits(Folder(tmp_path).module(torch.float64)), logits(model))
    rewrite(tmp_path, lambda state: {key.replace("embed_out", "lm_head"): value for key, value in state.items()})
    assert torch.equal(logits(Folder(tmp_path).module(torch.float64)), logits(model))


def test_what_old_files_hold_beside_the_weights(tmp_path: Path) -> None:
    """The masks and frequencies that from_pretrained passes over, by the same patterns."""
    model = saved("gpt2", tmp_path, shards=ONE)
    rewrite(tmp_path, lambda state: state | {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8)})
    assert torch.equal(logits(Folder(tmp_path).module(torch.float64)), logits(model))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: {k: v for k, v in s.items() if k != "model.norm.weight"},
            r"lacks model\.norm\.weight \(64,\), which LlamaF",
        ),
        (lambda s: s | {"model.extra": torch.zeros(3)}, r"has model\.extra \(3,\), which LlamaForCausalLM has not"),
        (
            lambda s: s | {"model.norm.weight": torch.zeros(3)},
            r"model\.norm\.weight is \(3,\) in .*, and \(64,\) by its config",
        ),
        (
            lambda s: s | {"norm.weight": torch.zeros(64)},
            r"has model\.norm\.weight twice: as model\.norm\.weight and as norm\.w",
        ),
        (lambda s: s | {"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, "is of torch.int8.*floating-point"),
    ],
)
def test_tensors_that_are_not_the_models(change: Any, said: str, tmp_path: Path) -> None:
    saved("llama", tmp_path, shards=ONE)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=said):
        Folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "t5"}, "model_type 't5', which is no causal language model"),
        ({"model_type": "drop"}, "model_type 'None'"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "is of LlamaForSequenceClassification.*is LlamaForCausalLM",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantized .*gptq"),
        ({"hidden_size": "x"}, "makes no model: StrictDataclassFieldValidationError"),
        ({"num_attention_heads": 0}, "makes no model: ZeroDivisionError"),
        ({"architectures": 5}, "is of 5, no causal language model"),
        ({"intermediate_size": 32}, r"down_proj\.weight is \(64, 128\) in .*, and \(64, 32\) by its config"),
        ({"tie_word_embeddings": True, "num_hidden_layers": 4}, r"lacks model\.layers\.3\..* and 4 more"),
    ],
)
def test_configurations_of_something_else(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved("llama", tmp_path, shards=ONE)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=said):
        Folder(tmp_path)


def test_folders_that_are_none(tmp_path: Path) -> None:
    """Told by the name alone, before transformers is imported or any rank starts."""
    for path, said in [
        (
            tmp_path / "nowhere",
            "nowhere does not exist; hf: takes a local folder .*; if it has moved, say where with --model hf:FOLDER",
        ),
        (Path("meta-llama/Llama-3.2-1B"), "hf download meta-llama/Llama-3.2-1B --local-dir"),
        (tmp_path, "has no config.json"),
    ]:
        with pytest.raises(ValueError, match=said):
            check_name(f"hf:{path}")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        check_name(f"hf:{tmp_path}")
    saved("llama", tmp_path, shards=ONE)
    check_name(f"hf:{tmp_path}")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        check_name(f"hf:{tmp_path}")
    with pytest.raises(ValueError, match=r"no model 'hff'.*hf:FOLDER"):
        check_name("hff")


def test_the_model_of_a_folder(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    edit_config(tmp_path, attn_pdrop=0.1, resid_pdrop=0.1)
    model = build(f"hf:{tmp_path}", "float32")
    assert (model.batch, model.seq, model.tokens) == (8, 128, "input_ids")
    module = deferred_init(model.factory)
    assert (module.config.attn_pdrop, module.config.resid_pdrop) == (0.0, 0.0)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert model.values is not None
    module = deferred_init(build(f"hf:{tmp_path}", "float32", dropout=0.25).factory)
    assert (module.config.attn_pdrop, module.config.embd_pdrop) == (0.25, 0.25)
