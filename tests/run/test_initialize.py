"""Recorded initialisers: every shard of every layout is a piece of the one-process model, and means what torch means."""

from __future__ import annotations

import copy
import gc
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.mesh import Mesh
from phalanx.run.initialize import ATTRIBUTE, deferred_init, initial_shard, materialize
from phalanx.spec import Spec, shard


class Parts(nn.Module):
    """A parameter for every kind of record."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 16)
        self.embedding = nn.Embedding(12, 8, padding_idx=3)
        self.norm = nn.LayerNorm(8)
        self.truncated = nn.Parameter(torch.empty(12, 8))
        nn.init.trunc_normal_(self.truncated, std=0.5)
        self.scaled = nn.Parameter(torch.randn(16, 12) * 0.02 + 1)
        self.fused = nn.Parameter(torch.empty(24, 8))
        nn.init.normal_(self.fused[:8])
        with torch.no_grad():
            self.fused[8:].uniform_(-2, 2).exp_()
            self.fused[4:12, ::2] *= 3
            self.fused.t()[1:3].fill_(7)
        self.constant = nn.Parameter(torch.arange(16.0).log1p().repeat(2, 1))
        self.flat = nn.Parameter(torch.empty(4, 3, 2))
        nn.init.xavier_uniform_(self.flat.view(4, 6))
        self.narrow = nn.Parameter(torch.empty(16, 8, dtype=torch.bfloat16).normal_())
        self.tied = self.embedding.weight


def built(seed: int = 3) -> nn.Module:
    return materialize(deferred_init(Parts), seed)


MESH = Mesh(dp=2, tp=2)
SPECS = [
    Spec(((), ())),
    Spec((("tp",), ())),
    Spec(((), ("tp",))),
    Spec((("dp",), ("tp",))),
    Spec((("dp", "tp"), ())),
    Spec((("tp", "dp"), ())),
    Spec((("tp",), ()), partial=frozenset({"dp"})),
]
MATRICES = ["linear.weight", "embedding.weight", "tied", "truncated", "scaled", "fused", "narrow"]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_shards_are_pieces_of_the_whole(name: str, spec: Spec) -> None:
    deferred = deferred_init(Parts)
    whole = built().get_parameter(name).detach()
    for rank in range(MESH.size):
        assert torch.equal(initial_shard(deferred, name, spec, MESH, rank, seed=3), shard(whole, spec, MESH, rank))


def test_fused_parts_and_vectors() -> None:
    deferred, whole = deferred_init(Parts), built()
    for name, spec in (
        ("fused", Spec((("tp",), ()), parts=((0, (16, 4, 4)),))),
        ("scaled", Spec((("dp",), ("tp",)), parts=((0, (4, 12)), (1, (8, 4))))),
        ("linear.bias", Spec((("dp", "tp"),))),
        ("flat", Spec((("tp",), (), ("dp",)))),
    ):
        for rank in range(MESH.size):
            value = whole.get_parameter(name).detach()
            assert torch.equal(initial_shard(deferred, name, spec, MESH, rank, seed=3), shard(value, spec, MESH, rank))


def test_odd_shards_of_transcendental_recipes_are_bit_equal() -> None:
    """Shards of 14 elements: torch's pow and log2 round the remainder of a vector loop differently, the record must not."""
    module = deferred_init(lambda: _holder(torch.empty(210, 7).uniform_(0.1, 2).log2_().sigmoid_().pow_(1.3)))
    whole = initial_shard(module, "weight", Spec.replicated(2), Mesh(), 0, seed=1)
    mesh = Mesh(tp=105)
    shards = [initial_shard(module, "weight", Spec((("tp",), ())), mesh, rank, seed=1) for rank in range(mesh.size)]
    assert torch.equal(torch.cat(shards), whole)


def test_seed_and_name_decide() -> None:
    one, other = built(3), built(4)
    assert torch.equal(one.linear.weight, built(3).linear.weight)
    assert not torch.equal(one.linear.weight, other.linear.weight)
    pair = materialize(deferred_init(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), 0)
    assert not torch.equal(pair[0].weight, pair[1].weight)


def test_regions_follow_the_constructor() -> None:
    """Each constant that the constructor writes over random values is where eager execution puts it."""
    module = built()
    torch.manual_seed(0)
    eager = Parts()
    assert torch.equal(module.constant, eager.constant)
    assert torch.equal(module.fused[:, 1:3], eager.fused[:, 1:3])
    assert (module.embedding.weight[3] == 0).all()
    assert (module.embedding.weight[[2, 4]] != 0).all()
    assert torch.equal(module.norm.weight, torch.ones(8))
    # exp of uniform on (-2, 2), tripled in rows 8..11 at even columns
    plain, tripled = module.fused[12:, ::2], module.fused[8:12, ::2] / 3
    for values in (plain, tripled):
        assert values.min() > math.exp(-2)
        assert values.max() < math.exp(2)


DISTRIBUTIONS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda w: nn.init.normal_(w, 0.5, 2.0),
    "uniform_": lambda w: nn.init.uniform_(w, -1.0, 3.0),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, 0.1, 0.7, -1.0, 0.9),
    "trunc_normal_ far tail": lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 1.5, 3.0),
    "inverse error function": lambda w: w.uniform_(-0.9, 0.9).erfinv_().mul_(2.0).add_(1.0).clamp_(min=-1.0, max=2.5),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_are_those_of_torch(name: str) -> None:
    """Kolmogorov-Smirnov distance between our draws and torch's own, below its 1e-6 critical value sqrt(ln(2e6)/2 * 2/n)."""
    n = 40000

    def make() -> nn.Module:
        module = nn.Linear(200, n // 200, bias=False)
        with torch.no_grad():
            DISTRIBUTIONS[name](module.weight)
        return module

    torch.manual_seed(0)
    theirs = make().weight.detach().reshape(-1).sort().values
    ours = materialize(deferred_init(make), 0).weight.detach().reshape(-1).sort().values
    points = torch.cat([ours, theirs]).sort().values
    distance = (torch.searchsorted(ours, points, right=True) - torch.searchsorted(theirs, points, right=True)).abs().max() / n
    assert distance < math.sqrt(math.log(2e6) / 2 * 2 / n)
    assert abs(ours.min() - theirs.min()) < 1.5  # bounds and scale, which the distance does not see in the tails
    if "trunc" in name:
        assert ours.min() >= -1.0


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(0, 8, 2, device="meta").float() / 8))
        self.register_buffer("causal", torch.tril(torch.ones(4, 4, dtype=torch.bool)))
        table = torch.empty(6, 4)
        table[:, 0::2] = torch.sin(torch.arange(6.0)[:, None] * torch.ones(2))
        table[:, 1::2] = torch.cos(torch.arange(6.0)[:, None] * torch.ones(2))
        self.register_buffer("table", table)
        self.register_buffer("features", torch.randn(8, 3))
        self.plain = torch.full((3,), 2.5)
        self.rate = torch.linspace(0, 1, 3)[1].item()


def test_buffers_and_plain_tensors_are_real() -> None:
    module = deferred_init(Buffers)
    assert module.features.is_meta
    materialize(module, 0)
    assert torch.equal(module.frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert torch.equal(module.causal, torch.ones(4, 4).tril().bool())
    assert torch.equal(module.table[:, 0], torch.arange(6.0).sin())
    assert torch.equal(module.table[:, 3], torch.arange(6.0).cos())
    assert torch.equal(module.plain, torch.full((3,), 2.5))
    assert torch.equal(module.norm.running_var, torch.ones(5))
    assert module.norm.num_batches_tracked.item() == 0
    assert module.rate == 0.5
    spec = Spec((("tp",), ()))
    assert torch.equal(initial_shard(deferred_init(Buffers), "features", spec, Mesh(tp=2), 1, seed=0), module.features[4:])


def test_tied_and_copied_tensors_keep_their_relation() -> None:
    def make() -> nn.Module:
        module = nn.Module()
        module.first = nn.Linear(6, 6)
        module.tied = nn.Linear(6, 6)
        module.tied.weight = module.first.weight
        module.twin = copy.deepcopy(module.first)
        return module

    deferred = deferred_init(make)
    assert deferred.tied.weight is deferred.first.weight
    module = materialize(deferred, 5)
    assert module is deferred
    assert module.tied.weight is module.first.weight
    assert torch.equal(module.twin.weight, module.first.weight)
    assert module.twin.weight is not module.first.weight
    alias = initial_shard(module, "tied.weight", Spec((("tp",), ())), Mesh(tp=2), 1, seed=5)
    assert torch.equal(alias, module.first.weight[3:])


def test_dtype_is_a_cast_of_the_recorded_values() -> None:
    wide = materialize(deferred_init(Parts), 3, dtype=torch.float64)
    assert wide.linear.weight.dtype == torch.float64
    assert torch.equal(wide.linear.weight, built().linear.weight.double())


def test_parameter_attributes_and_flags_survive() -> None:
    def make() -> nn.Module:
        module = nn.Linear(4, 4)
        module.bias.requires_grad_(False)
        module.weight.role = "kept"  # type: ignore[attr-defined]
        module.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        module.scale.role = "real"  # type: ignore[attr-defined]
        return module

    module = deferred_init(make)
    assert all(p.is_meta for p in module.parameters())
    materialize(module, 0)
    assert (module.bias.requires_grad, module.weight.requires_grad) == (False, True)
    assert (module.weight.role, module.scale.role) == ("kept", "real")
    assert module.scale.tolist() == [1.0, 2.0]


def _holder(value: Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(value)
    return module


def test_what_is_not_a_function_of_position_is_refused_by_name_and_line() -> None:
    def orthogonal() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        nn.init.orthogonal_(module[1].weight)
        return module

    with pytest.raises(ValueError, match=r"1\.weight.*qr.*test_initialize\.py:\d+"):
        deferred_init(orthogonal)
    with pytest.raises(ValueError, match=r"weight cannot be recorded.*cumsum"):
        deferred_init(lambda: _holder(torch.randn(4).cumsum(0)))
    with pytest.raises(ValueError, match=r"weight cannot be recorded.*randint"):
        deferred_init(lambda: _holder(torch.randint(0, 9, (4,)).float()))
    with pytest.raises(ValueError, match=r"test_initialize\.py:\d+.*needs the value"):
        deferred_init(lambda: _holder(torch.full((2,), torch.rand(1).item())))

    def sparse() -> nn.Module:
        module = nn.Linear(8, 8)
        nn.init.sparse_(module.weight, 0.5)
        return module

    with pytest.raises(ValueError, match="weight cannot be recorded"):
        deferred_init(sparse)


def test_misuse_is_explained() -> None:
    module = deferred_init(Parts)
    with pytest.raises(ValueError, match=r"'linear\.wieght'.*closest is 'linear\.weight'"):
        initial_shard(module, "linear.wieght", Spec.replicated(2), Mesh(), 0, seed=0)
    with pytest.raises(ValueError, match="deferred_init"):
        initial_shard(nn.Linear(2, 2), "weight", Spec.replicated(2), Mesh(), 0, seed=0)
    with pytest.raises(ValueError, match=r"16.*5 ranks"):
        initial_shard(module, "linear.weight", Spec((("tp",), ())), Mesh(tp=5), 0, seed=0)
    unwritten = deferred_init(lambda: _holder(torch.empty(4)))
    with pytest.raises(ValueError, match="weight is never initialised"):
        initial_shard(unwritten, "weight", Spec.replicated(1), Mesh(), 0, seed=0)


def test_deterministic_writes_by_any_operation() -> None:
    """dirac_, eye_ and fill_diagonal_ hold nothing random: they run for real and equal torch's."""

    def make() -> nn.Module:
        module = nn.Conv2d(3, 4, 3)
        nn.init.dirac_(module.weight)
        module.eye = nn.Parameter(torch.empty(4, 6))
        nn.init.eye_(module.eye)
        module.diagonal = nn.Parameter(torch.zeros(3, 3).fill_diagonal_(2.0))
        return module

    ours, theirs = materialize(deferred_init(make), 0), make()
    for name in ("weight", "eye", "diagonal"):
        assert torch.equal(ours.get_parameter(name), theirs.get_parameter(name))


def test_hugging_face_models_record_their_own_initialisers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"bos_token_id": None, "eos_token_id": None}
    gpt2 = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, **special)
    llama = transformers.LlamaConfig(**sizes, **special, intermediate_size=48, num_key_value_heads=2, pad_token_id=5)
    for config in (gpt2, llama):
        module = deferred_init(lambda config=config: transformers.AutoModelForCausalLM.from_config(config))
        assert all(p.is_meta for p in module.parameters())
        eager = transformers.AutoModelForCausalLM.from_config(config)
        for name, buffer in eager.named_buffers():
            assert torch.equal(module.get_buffer(name), buffer), name
        materialize(module, 0)
        for name, parameter in eager.named_parameters():
            value = module.get_parameter(name)
            if parameter.unique().numel() <= 1:
                assert torch.equal(value, parameter), name
            else:
                # standard deviations of n normal draws differ by std / sqrt(n) from one draw to the next: 5 of these
                bound = 5 * parameter.std() / math.sqrt(parameter.numel())
                assert abs(value.std() - parameter.std()) < bound, name
        tokens = torch.arange(10)[None]
        assert module(tokens).logits.isfinite().all()
    assert (module.model.embed_tokens.weight[5] == 0).all()


def test_seventy_billion_parameters_take_no_memory() -> None:
    def make() -> nn.Module:
        def layer() -> nn.Module:
            shapes = [(8192, 8192), (8192, 1024), (8192, 1024), (8192, 8192), (8192, 28672), (8192, 28672), (28672, 8192)]
            return nn.ModuleList([nn.Linear(i, o, bias=False) for i, o in shapes])

        return nn.ModuleList([nn.Embedding(128256, 8192), *(layer() for _ in range(80)), nn.Linear(8192, 128256)])

    gc.collect()
    tracemalloc.start()
    module = deferred_init(make)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(p.numel() for p in module.parameters()) > 70e9
    assert all(p.is_meta for p in module.parameters())
    assert peak < 64e6  # bytes of Python objects; tensors have no storage
    assert len(getattr(module, ATTRIBUTE).recipes) == 80 * 7 + 3
    corner = initial_shard(module, "40.4.weight", Spec((("tp",), ("dp",))), Mesh(tp=7168, dp=64), 12345, seed=1)
    assert corner.shape == (4, 128)
    assert corner.abs().max() <= 1 / math.sqrt(8192)
