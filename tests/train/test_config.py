"""A configuration is read strictly: what is unknown or of the wrong kind is named, with the closest match."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.mesh import Mesh
from phalanx.train.config import OptimizerConfig, TrainConfig, parse_layout
from phalanx.train.settings import dump, load

DIMENSIONS = ("batch", "seq", "heads", "kv_heads", "mlp", "embed", "vocab", "residual_seq")


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_yaml_fills_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    config = load(
        written(tmp_path, "steps: 7\nmesh: {dp: 2, tp: 2}\noptimizer: {lr: 3e-4, betas: [0.8, 0.9]}\ndata: some/text\n"),
        TrainConfig(),
    )
    assert config == TrainConfig(
        steps=7, mesh="dp=2,tp=2", data=("some/text",), optimizer=OptimizerConfig(lr=3e-4, betas=(0.8, 0.9))
    )


def test_yaml_over_other_defaults(tmp_path: Path) -> None:
    otherwise = TrainConfig(steps=3, optimizer=OptimizerConfig(warmup=1))
    config = load(written(tmp_path, "optimizer: {lr: 1}"), otherwise)
    assert (config.steps, config.optimizer.warmup, config.optimizer.lr) == (3, 1, 1.0)
    assert load(written(tmp_path, ""), otherwise) == otherwise


def test_dump_and_load_agree(tmp_path: Path) -> None:
    config = TrainConfig(mesh="pp=2", data=("a",), dtype="bfloat16", optimizer=OptimizerConfig(max_norm=None))
    assert load(written(tmp_path, dump(config)), TrainConfig()) == config
    assert load(written(tmp_path, dump(TrainConfig())), TrainConfig()) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stepz: 7", "unknown key 'stepz'.*did you mean 'steps'"),
        ("optimizer: {weight_decai: 1}", "optimizer.unknown key 'weight_decai'.*did you mean 'weight_decay'"),
        ("steps: many", "steps is 'many', of type str; it is of type int"),
        ("steps: true", "steps is True, of type bool"),
        ("steps: 1.5", "steps is 1.5, of type float"),
        ("optimizer: {lr: fast}", "optimizer.lr is 'fast'; it is a number"),
        ("optimizer: 3", "optimizer is 3; it has keys of its own"),
        ("optimizer: {betas: [0.9]}", "betas is"),
        ("dtype: float23", "dtype is 'float23'.*did you mean 'float"),
        ("- steps", "holds a list"),
        ("steps: [", "is not YAML"),
    ],
)
def test_mistakes_in_a_file_are_named(text: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=said) as caught:
        load(path, TrainConfig())
    assert str(path) in str(caught.value)


def test_layout_text() -> None:
    mesh = Mesh(pod=2, dp=2, tp=2)
    assert parse_layout("batch=pod+dp, heads=tp", mesh) == {"batch": ("pod", "dp"), "heads": "tp"}
    for text, said in [
        ("batch", "'batch' is not of the form dimension=axis"),
        ("batch=", "not of the form"),
        ("batch=dp,batch=tp", "places 'batch' twice"),
        ("batch=bp", "on the axis 'bp'; mesh 'pod=2,dp=2,tp=2' has pod, dp, tp .did you mean '[dt]p'"),
    ]:
        with pytest.raises(ValueError, match=said):
            parse_layout(text, mesh)


def test_default_layout_follows_mesh_and_model() -> None:
    assert TrainConfig().parsed_layout(DIMENSIONS) == {}
    assert TrainConfig(mesh="dp=2").parsed_layout(DIMENSIONS) == {"batch": "dp"}
    both = TrainConfig(mesh="dp=2,tp=2")
    assert both.parsed_layout(DIMENSIONS) == {"batch": "dp", "heads": "tp", "mlp": "tp", "vocab": "tp"}
    assert both.parsed_layout(("batch", "mlp")) == {"batch": "dp", "mlp": "tp"}


def test_sequence_parallel_adds_the_residual_stream() -> None:
    config = TrainConfig(mesh="tp=2", sequence_parallel=True)
    assert config.parsed_layout(DIMENSIONS)["residual_seq"] == "tp"
    with pytest.raises(ValueError, match="mesh 'dp=2' does not have"):
        TrainConfig(mesh="dp=2", sequence_parallel=True).parsed_layout(DIMENSIONS)
    with pytest.raises(ValueError, match="residual_seq, which model 'mlp' does not have"):
        TrainConfig(model="mlp", mesh="tp=2", sequence_parallel=True).parsed_layout(("batch", "mlp"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (TrainConfig(steps=0), "steps is 0"),
        (TrainConfig(batch=-1), "batch is -1"),
        (TrainConfig(mesh="dp"), "not of the form axis=size"),
        (TrainConfig(layout="heads=tp"), "mesh '' has none"),
        (TrainConfig(dropout=1.0), "dropout is 1.0"),
        (
            TrainConfig(mesh="dp=2", batch=6, microbatches=2),
            "batch 6 does not divide into 2 microbatches over 2 data ranks; 4 or",
        ),
        (TrainConfig(mesh="dp=2", sequence_parallel=True), "axis tp, which mesh 'dp=2' does not have"),
        (TrainConfig(optimizer=OptimizerConfig(lr=0.0)), "optimizer.lr is 0.0"),
    ],
)
def test_check_raises_before_any_rank_starts(config: TrainConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config.check()


@pytest.mark.parametrize(
    ("config", "axis"),
    [(TrainConfig(mesh="ep=2"), "ep"), (TrainConfig(mesh="dp=2,tp=2", layout="batch=dp"), "tp")],
)
def test_an_axis_that_splits_nothing_is_refused(config: TrainConfig, axis: str) -> None:
    """Its ranks would repeat one another, and a run would look parallel and be none."""
    with pytest.raises(ValueError, match=f"has the axis '{axis}', which .* does not use: its 2 ranks would repeat"):
        config.check()
    TrainConfig(mesh="pp=2,ep=1,dp=2").check()
    TrainConfig(mesh="dp=2,tp=2", layout="batch=dp", sequence_parallel=True).check()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mesh": "tp=2", "zero": 3}, "zero 3 divides over data ranks, but no axis of mesh 'tp=2' splits the batch"),
        ({"mesh": "dp=2,tp=2", "zero": 2, "zero_axes": "tp"}, "the axes that split the batch are dp"),
        ({"mesh": "dp=2", "zero": 2, "zero_axes": "db"}, "mesh 'dp=2' has dp (did you mean 'dp'?)"),
        ({"mesh": "dp=2", "zero": 2, "zero_axes": "dp+dp"}, "each axis divides once"),
        ({"mesh": "dp=2", "zero_axes": "dp"}, "zero is 0: nothing is divided"),
        ({"mesh": "dp=2", "prefetch": 3}, "zero is 0: nothing is gathered"),
        ({"mesh": "dp=2", "zero": 3, "prefetch": -1}, "prefetch is -1"),
        ({"precision": "bf16", "dtype": "float64"}, "precision bf16 computes from float32 parameters"),
        ({"mesh": "pp=2", "schedule": "zbv"}, "did you mean 'zb-v'?"),
        ({"mesh": "pp=2", "schedule": "1f1b", "chunks": 2}, "1f1b has exactly 1 stage on each rank, not chunks=2"),
        ({"mesh": "pp=2", "schedule": "dualpipe", "microbatches": 2}, "at least 2 pp = 4"),
        ({"trace": 300}, "trace is 300; it is one of the steps 1 to 200"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_any_rank_starts(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        TrainConfig(**settings).check()
