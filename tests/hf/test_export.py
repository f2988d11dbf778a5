"""A checkpoint out: as save_pretrained would write it, with one tensor in memory, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from phalanx.cli import main
from phalanx.cli.export import parse_size
from phalanx.comm.local import local
from phalanx.hf import Folder, export
from phalanx.hf.llama import hf_config, hf_name
from phalanx.mesh import Mesh
from phalanx.models.llama import Llama, LlamaConfig
from phalanx.run.initialize import deferred_init
from phalanx.train.assembly import parallel_step
from phalanx.train.checkpoint import Checkpoints
from phalanx.train.config import TrainConfig
from phalanx.train.models import build
from phalanx.train.norms import rewrite_norms
from phalanx.train.settings import dump

transformers = pytest.importorskip("transformers")

from tests.hf.folders import logits, saved  # noqa: E402 - needs transformers

Kinds = list[tuple[str, tuple[int, ...], torch.dtype]]


def kinds(model: nn.Module) -> Kinds:
    return [(name, tuple(value.shape), value.dtype) for name, value in model.named_parameters()]


def written(model: Any, out: Path, **options: Any) -> list[str]:
    return export(model.config, kinds(model), model.get_parameter, out, **options)


@pytest.mark.parametrize("kilobytes", [30, 100, 10**6])
@pytest.mark.parametrize("family", ["gemma2", "gpt_neox"])
def test_files_are_those_of_save_pretrained(family: str, kilobytes: int, tmp_path: Path) -> None:
    """One tied, one renamed in files. A shard of 30 kB is smaller than some tensors."""
    model = saved(family, tmp_path / "theirs", torch.float32, shards=f"{kilobytes}KB")
    files = written(model, tmp_path / "ours", shard_bytes=1000 * kilobytes)
    assert files == sorted(path.name for path in (tmp_path / "theirs").iterdir())
    for name in files:
        ours, theirs = tmp_path / "ours" / name, tmp_path / "theirs" / name
        if name.endswith(".safetensors"):
            state, expected = load_file(ours), load_file(theirs)
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[key], expected[key]) for key in state)
        else:
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text()), name


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """What was read before is let go of before the next is asked for."""
    import weakref

    model = saved("llama", tmp_path / "in")
    alive: list[weakref.ref[Tensor]] = []

    def read(name: str) -> Tensor:
        assert sum(reference() is not None for reference in alive) <= 1
        value = model.get_parameter(name).detach().clone()
        alive.append(weakref.ref(value))
        return value

    export(model.config, kinds(model), read, tmp_path / "out")
    assert len(alive) == len(kinds(model))


def test_another_dtype(tmp_path: Path) -> None:
    model = saved("qwen3", tmp_path / "in")
    written(model, tmp_path / "out", dtype=torch.bfloat16)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert back.dtype == torch.bfloat16
    assert torch.equal(logits(back), logits(Folder(tmp_path / "in").module(torch.bfloat16)))


def test_what_lies_beside_the_weights_goes_along(tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "generation_config.json").write_text('{"temperature": 0.5}')
    (tmp_path / "in" / "secret.txt").write_text("no")
    files = written(model, tmp_path / "out", source=tmp_path / "in")
    assert "tokenizer.json" in files
    assert "secret.txt" not in files
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"temperature": 0.5}


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "in")
    out = tmp_path / "out"

    def broken(name: str) -> Tensor:
        if name.startswith("lm_head"):
            raise OSError("the disk is gone")
        value: Tensor = model.get_parameter(name)
        return value

    with pytest.raises(OSError, match="the disk is gone"):
        export(model.config, kinds(model), broken, out)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    written(model, out)
    before = sorted((path.name, path.read_bytes()) for path in out.iterdir())
    with pytest.raises(ValueError, match=r"out exists already.*--overwrite"):
        written(model, out)
    with pytest.raises(OSError, match="the disk is gone"):
        export(model.config, kinds(model), broken, out, overwrite=True)
    assert sorted((path.name, path.read_bytes()) for path in out.iterdir()) == before
    files = written(model, out, overwrite=True, shard_bytes=100_000)
    assert sorted(path.name for path in out.iterdir()) == files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_places_that_are_not_overwritten(tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "in")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="mine is not the folder of a model"):
        written(model, tmp_path / "mine", overwrite=True)
    with pytest.raises(ValueError, match="in is the folder that the model came from"):
        written(model, tmp_path / "in", overwrite=True, source=tmp_path / "in")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    Folder(tmp_path / "in")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found[1:], r"model\.embed_tokens\.weight \(256, 64\) of LlamaForCausalLM was not given"),
        (lambda found: [*found, ("extra", (3,), torch.float32)], r"LlamaForCausalLM has no extra \(3,\)"),
        (
            lambda found: [("model.embed_tokens.weight", (2, 64), torch.float32), *found[1:]],
            r"is \(2, 64\); Llama.*\(256, 64\)",
        ),
    ],
)
def test_tensors_that_do_not_fit(change: Any, said: str, tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "in")
    with pytest.raises(ValueError, match=said):
        export(model.config, change(kinds(model)), model.get_parameter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"out needs \d{6,} bytes; its disk has 1000 left"):
        written(saved("llama", tmp_path / "in"), tmp_path / "out")


class WideRotary(nn.Module):
    """Rotary tables in float64; transformers' are computed in float32 whatever the model's dtype."""

    def __init__(self, width: int, theta: float) -> None:
        super().__init__()
        self.width, self.theta = width, theta

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequency = self.theta ** (-torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)
        angle = position_ids[..., None].double() * frequency
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()


@pytest.mark.parametrize("tied", [False, True])
def test_our_llama_is_theirs(tied: bool, tmp_path: Path) -> None:
    """The same function: in float64, with what transformers rounds to float32 inside (norms, rotary) widened, to 1e-12. As it
    comes from from_pretrained, in float32, to 1e-5: its rounding and ours in another order."""
    torch.manual_seed(0)
    sizes = LlamaConfig(layers=2, tied=tied, theta=500000.0)
    model = Llama(sizes).double()
    named = {hf_name(name): value for name, value in model.named_parameters()}
    found = [(name, tuple(value.shape), value.dtype) for name, value in named.items()]
    export(hf_config(sizes, 128), found, named.__getitem__, tmp_path / "wide")
    tokens = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert type(theirs) is transformers.LlamaForCausalLM
    rewrite_norms(theirs)
    theirs.model.rotary_emb = WideRotary(sizes.hidden // sizes.heads, sizes.theta)
    with torch.no_grad():
        ours = model(tokens)
        assert (ours - theirs(tokens).logits).abs().max() < 1e-12 * ours.abs().max()
        export(hf_config(sizes, 128), found, named.__getitem__, tmp_path / "narrow", dtype=torch.float32)
        narrow = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "narrow")(tokens).logits
        difference = (model.float()(tokens) - narrow).abs().max()
    assert 0 < difference < 1e-5 * ours.abs().max()


def test_a_run_of_our_llama_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = TrainConfig(model="llama-tiny", mesh="dp=2,tp=2", batch=4, seq=16, zero=1)
    model = build(config.model, config.dtype)
    with local(Mesh(dp=2, tp=2)) as world:
        step = parallel_step(config, world, model, deferred_init(model.factory))
        step(model.example(4, 16, 0))
        checkpoints = Checkpoints(step, str(tmp_path / "run" / "checkpoints"))
        checkpoints.save(1, {"config": dump(config)})
        checkpoints.wait()
        trained = step.state_dict()
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--out", str(out)]) == 0
    assert (
        f"step 1 of llama-tiny is in {out}: config.json, generation_config.json, model.safetensors" in capsys.readouterr().out
    )
    found = load_file(out / "model.safetensors")
    assert found.keys() == {hf_name(name) for name in trained}
    assert all(torch.equal(found[hf_name(name)], value) for name, value in trained.items())
    assert main(["export", str(tmp_path / "run"), "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nothing"), "--out", str(out)]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "--out", str(out), "--shard-size", "5 apples"]) == 2
    assert "write a size such as 500MB" in capsys.readouterr().err


def test_sizes() -> None:
    assert [parse_size(text) for text in ("4096", "5GB", "2GiB", "500 MB", "1KiB")] == [
        4096, 5 * 10**9, 2 << 30, 500 * 10**6, 1024,
    ]  # fmt: skip
    for text in ("", "GB", "0", "1.5GB", "-1", "5XB", "5iB"):
        with pytest.raises(ValueError, match="write a size"):
            parse_size(text)
