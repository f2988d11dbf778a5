"""`step.watch`: the global value that leaves any module is the one that the untouched model computes, on any mesh."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm.local import LocalWorld
from phalanx.mesh import Mesh
from phalanx.run.step import Step, parallelize

pytestmark = pytest.mark.filterwarnings("ignore:replicated, since no name matches")  # norms, as meant

VOCAB, HIDDEN, BATCH, SEQ, LAYERS = 16, 8, 8, 4, 2
# Sums of float64 in another order, of numbers near 1.
EXACT = 1e-13


class Waves(nn.Module):
    """Two tensors that neither batch nor parameters decide, read by every block: tables."""

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        angle = torch.arange(length, dtype=torch.float64)[:, None] / 7
        return angle.cos(), angle.sin()


class MLP(nn.Module):
    def __init__(self, squash: nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.squash = squash
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.squash(self.squash(self.up(x))))


class Block(nn.Module):
    def __init__(self, squash: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = MLP(squash)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x + self.drop(self.mlp(self.norm(x) * cos + sin))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        squash = nn.Tanh()  # one module that runs four times
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.position = nn.Embedding(SEQ, HIDDEN)
        self.waves = Waves()
        self.blocks = nn.ModuleList(Block(squash) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        cos, sin = self.waves(tokens.shape[1])
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(x)


NAMES = {
    "embed.weight": "vocab embed",
    "blocks.*.mlp.up.weight": "mlp embed",
    "blocks.*.mlp.up.bias": "mlp",
    "blocks.*.mlp.down.weight": "embed mlp",
    "tokens": "batch seq",
    "labels": "batch seq",
}
LAYOUT = {"batch": "dp", "mlp": "tp", "vocab": "tp"}
MESHES = ["", "dp=2,tp=2", "pp=2,tp=2"]


@functools.cache
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@functools.cache
def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randint(VOCAB, (BATCH, SEQ), generator=generator) for name in ("tokens", "labels")}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


def parallel(world: LocalWorld, train: bool = False) -> Step:
    layout = {name: axis for name, axis in LAYOUT.items() if axis in world.mesh.names}
    return parallelize(
        model(), world, example=batch(0), names=NAMES if layout else None, layout=layout or None, loss=loss, microbatches=2,
        train=train,
    )  # fmt: skip


@functools.cache
def eager() -> dict[str, list[Tensor]]:
    """What the modules of the untouched model return, in the order of their calls."""
    seen: dict[str, list[Tensor]] = {}

    def look(name: str, returned: Tensor | tuple[Tensor, ...]) -> None:
        seen.setdefault(name, []).extend(returned if isinstance(returned, tuple) else [returned])

    hooks = [m.register_forward_hook(lambda m, args, out, name=name: look(name, out)) for name, m in model().named_modules()]
    model().eval()
    with torch.no_grad():
        model()(batch(1)["tokens"])
    model().train()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("mesh", MESHES)
def test_every_module_is_watched_as_eager_computes_it(mesh: str) -> None:
    """Split over tp (up), partial (down), made by several calls (squash), the same in every microbatch (position, waves)."""
    expected = {path: values for path, values in eager().items() if path and not path.endswith("drop")}  # nothing drops here
    every = expected.pop("blocks.0.mlp.squash")
    expected |= {"blocks.0.mlp.squash": every[:2], "blocks.1.mlp.squash": every[2:]}
    with LocalWorld(Mesh.parse(mesh), timeout=20) as world:
        step = parallel(world)
        before = step.program.segments
        for path, values in expected.items():
            watched = step.watch(path, batch(1))
            found = list(watched) if isinstance(watched, tuple) else [watched]
            torch.testing.assert_close(found, values, rtol=0, atol=EXACT, msg=lambda text, path=path: f"{path}: {text}")
        assert step.program.segments is before


def test_watching_changes_nothing_and_follows_the_weights() -> None:
    """The steps between are those of a run that is never watched, bit by bit; without a batch it is that of the last step."""
    with LocalWorld(Mesh(dp=2), timeout=20) as world:
        plain, step = parallel(world, train=True), parallel(world, train=True)
        seen: list[Tensor] = []
        for number in range(2):
            assert step(batch(number)) == plain(batch(number))
            mine = step.watch("blocks.1.mlp")
            assert isinstance(mine, Tensor)
            assert torch.equal(mine, step.watch("blocks.1.mlp", batch(number)))
            seen.append(mine)
        assert not torch.equal(*seen)


def test_dropout_is_watched_as_the_step_would_draw_it() -> None:
    """Equal on one rank and on four: half of the elements are zero, the others twice what comes in."""
    found = []
    for mesh in ("", "dp=2,tp=2"):
        with LocalWorld(Mesh.parse(mesh), timeout=20) as world:
            step = parallel(world, train=True)
            found.append((step.watch("blocks.0.drop", batch(0)), step.watch("blocks.0.mlp", batch(0))))
    dropped, whole = found[0]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=EXACT)
    kept = dropped != 0
    assert 0.4 < kept.double().mean() < 0.6  # 256 draws of one half: three deviations are 0.09
    torch.testing.assert_close(dropped, 2 * whole * kept, rtol=0, atol=EXACT)


def test_what_cannot_be_watched_is_named() -> None:
    with LocalWorld(Mesh(dp=2), timeout=20) as world:
        step = parallel(world)
        with pytest.raises(ValueError, match=r"no module 'block.0.mlp' computes anything .*did you mean 'blocks.0.mlp'\?"):
            step.watch("block.0.mlp", batch(0))
        with pytest.raises(ValueError, match=r"no module 'blocks.0.drop' computes anything .*hands its input through"):
            step.watch("blocks.0.drop", batch(0))
        with pytest.raises(ValueError, match="no step was taken yet: give the batch on which to watch 'head'"):
            step.watch("head")
