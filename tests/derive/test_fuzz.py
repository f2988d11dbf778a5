"""Random legal placements: whatever lives where, loss and gradients are those of one process."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import phalanx.comm.collectives as collectives
from phalanx.derive import capture, derive_placed
from phalanx.derive.dims import infer_parts
from phalanx.derive.names import Placements
from phalanx.derive.program import Captured, Parameter, Value
from phalanx.hf import capture_context
from phalanx.mesh import Mesh
from phalanx.spec import Spec

from .parity import Result, on_mesh, one_process, values, worst

MESHES = (Mesh(dp=2, tp=2), Mesh(tp=4), Mesh(tp=2), Mesh(a=2, b=2), Mesh(dp=2))
# float64 sums in another order; a missing or doubled term is at least 1e-2
TOLERANCE = 1e-12


def token_loss(outputs, batch):  # type: ignore[no-untyped-def]
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    target = batch["labels"]
    summed = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    return summed, (target != -100).sum()


class DeepMLP(nn.Module):
    """Residual blocks with a normalisation, an embedding-free input and a bias everywhere."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.out = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def square_loss(outputs, batch):  # type: ignore[no-untyped-def]
    return ((outputs - batch["y"]) ** 2).sum(), torch.ones_like(batch["y"][:, 0]).sum()


class Case:
    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        if name == "mlp":
            module: nn.Module = DeepMLP().double()
            self.batch = {"x": torch.randn(8, 16, dtype=torch.float64), "y": torch.randn(8, 8, dtype=torch.float64)}
            self.captured = capture(module, self.batch, square_loss)
            self.outputs = ["layers.0.3", "layers.1.1", "out"]
        else:
            module = small_transformer(name)
            ids = torch.randint(0, 64, (4, 8))
            labels = torch.randint(0, 64, (4, 8))
            labels[0, :3] = -100
            key = "tokens" if name == "llama" else "input_ids"
            self.batch = {key: ids, "labels": labels}
            self.captured = capture(module, self.batch, token_loss, prepare=None if name == "llama" else capture_context)
            stem = "transformer.h.1" if name == "gpt2" else "layers.1" if name == "llama" else "model.layers.1"
            inner = ("attn.c_proj", "mlp.c_proj") if name == "gpt2" else ("self_attn.o_proj", "mlp.down_proj")
            self.outputs = [f"{stem}.{path}" for path in inner]
        self.params, self.buffers = values(module, self.captured)
        self.reference = one_process(self.captured, self.params, self.buffers, self.batch)
        self.parts = infer_parts(self.captured)


def small_transformer(name: str) -> nn.Module:
    if name == "llama":
        from phalanx.models.llama import Llama, LlamaConfig

        config = LlamaConfig(vocab=64, hidden=32, inner=48, layers=3, heads=4, kv_heads=2, tied=True)
        return Llama(config).double()
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        vocab_size=64, n_positions=8, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).double()


@pytest.fixture(scope="module", params=["mlp", "llama", "gpt2"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def random_spec(
    rng: random.Random, shape: tuple[int, ...], mesh: Mesh, parts: dict[int, tuple[int, ...]], density: float = 0.5
) -> Spec:
    """Each axis on a random dimension that it divides, or nowhere; several axes may share a dimension, in either order."""
    dims: list[tuple[str, ...]] = [()] * len(shape)
    axes = [axis for axis in mesh.names if rng.random() < density]
    rng.shuffle(axes)
    fused = {dim: sizes for dim, sizes in parts.items() if rng.random() < 0.7}
    for axis in axes:
        if not shape:
            break
        dim = rng.randrange(len(shape))
        ranks = mesh.extent((*dims[dim], axis))
        if all(size % ranks == 0 for size in fused.get(dim, (shape[dim],))):
            dims[dim] = (*dims[dim], axis)
    return Spec(tuple(dims), parts=tuple((dim, sizes) for dim, sizes in sorted(fused.items()) if dims[dim]))


def random_placements(rng: random.Random, case: Case, mesh: Mesh) -> Placements:
    captured: Captured = case.captured

    def parameter(p: Parameter) -> Parameter:
        return replace(p, spec=random_spec(rng, p.shape, mesh, case.parts.get(p.name, {})))

    shapes = {path: shape for path in case.outputs if (shape := output_shape(captured, path))}
    return Placements(
        {n: parameter(p) for n, p in captured.parameters.items()},
        dict(captured.buffers),
        {k: Value(k, shape, dtype, random_spec(rng, shape, mesh, {})) for k, (shape, dtype) in captured.batch.items()},
        {path: random_spec(rng, shape, mesh, {}) for path, shape in shapes.items() if rng.random() < 0.5},
    )


def output_shape(captured: Captured, path: str) -> tuple[int, ...] | None:
    shapes = [
        tuple(node.meta["val"].shape)
        for piece in captured.pieces
        for node in piece.graph.graph.nodes
        if path in node.meta.get("modules", ())
    ]
    return shapes[-1] if shapes else None


def run(case: Case, seed: int, how: str) -> tuple[float, str]:
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    program = derive_placed(case.captured, mesh, random_placements(rng, case, mesh), graphs=how != "eager")
    result: Result = on_mesh(program, case.params, case.buffers, case.batch, how=how)
    return worst(result, case.reference)


@pytest.mark.parametrize("batch_of_seeds", range(4))
def test_any_legal_placement_gives_the_gradients_of_one_process(case: Case, batch_of_seeds: int) -> None:
    for seed in range(25 * batch_of_seeds, 25 * (batch_of_seeds + 1)):
        how = ("eager", "eager", "graphs", "eager", "split")[seed % 5]
        error, name = run(case, seed, how)
        assert error <= TOLERANCE, f"{case.name} seed {seed} ({how}): {name} is off by {error:.1e}"


@pytest.mark.nightly
@pytest.mark.parametrize("batch_of_seeds", range(4, 12))
def test_more_placements(case: Case, batch_of_seeds: int) -> None:
    test_any_legal_placement_gives_the_gradients_of_one_process(case, batch_of_seeds)


# For each row of the move table, a backward (or forward) that has the right shape and the wrong meaning.
WRONG = {
    "reduce": ("all_reduce", "all_reduce"),
    "vary": ("identity", "identity"),
    "reduce_scatter": ("shard", "all_gather"),
    "gather": ("all_gather", "reduce_scatter"),
    "gather_vary": ("all_gather", "shard"),
    "shard": ("shard", "all_gather_wrong"),
    "exchange": ("all_to_all", "all_to_all_wrong"),
    "keep_first": ("identity", "identity"),
}


@pytest.mark.parametrize("row", sorted(collectives.PAIRS))
def test_the_fuzz_notices_a_wrong_row(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # biases are what makes R -> P happen
    subject = Case("mlp" if row == "keep_first" else "gpt2" if row == "gather" else "llama")
    wrong = WRONG[row]
    if wrong[1].endswith("_wrong"):
        # slices in the wrong order: rank i's slice lands where another's belongs
        right = collectives.PAIRS[row][1]
        apply = collectives._apply
        monkeypatch.setattr(
            collectives, "_apply",
            lambda primitive, x, *where: apply(right, x, *where).flip(where[3]) if primitive == wrong[1] else apply(primitive, x, *where),
        )  # fmt: skip
    monkeypatch.setitem(collectives.PAIRS, row, wrong)
    noticed = sum(run(subject, seed, "eager")[0] > TOLERANCE for seed in range(12))
    assert noticed >= 1, f"12 random placements did not notice that {row} is wrong"


def test_the_table_has_the_rows_of_the_design() -> None:
    assert set(WRONG) == set(collectives.PAIRS)
