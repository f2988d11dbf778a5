"""Random numbers by counter: frozen values, exactness across layouts, and the statistics that training relies on.

Statistical bounds are 5 standard errors of the estimate under the null (a false alarm once in 1.7 million), and the streams are
fixed, so a pass is a pass for ever.
"""

from __future__ import annotations

import math

import pytest
import torch

from phalanx import random
from phalanx.mesh import Mesh
from phalanx.spec import Spec, shard

N = 1 << 18
INDEX = torch.arange(N)

FROZEN_KEY = 7261069530428867096
FROZEN_BITS = [4244973860462672942, -8117967126388488289, -2264538897558351552]
FROZEN_UNIFORM = [0.23012049408289037, 0.5599241202701846]
FROZEN_NORMAL = [-0.6777070343516456, 0.8422198614427517, 0.11064670427830864]
FROZEN_PERMUTATION = [9, 3, 2, 4, 0, 6, 8, 7, 1, 5]


def test_streams_are_frozen() -> None:
    """A change here changes every initial weight, mask and sample order: it may not happen by accident."""
    assert random.key("layers.0.weight", 7) == FROZEN_KEY
    assert random.bits(FROZEN_KEY, torch.tensor([0, 1, 2**40])).tolist() == FROZEN_BITS
    assert random.uniform(FROZEN_KEY, torch.arange(2), torch.float64).tolist() == FROZEN_UNIFORM
    assert random.normal(FROZEN_KEY, torch.arange(3), torch.float64).tolist() == FROZEN_NORMAL
    assert random.permutation(FROZEN_KEY, 10, torch.arange(10)).tolist() == FROZEN_PERMUTATION


def test_bits_follow_the_definition_in_python_integers() -> None:
    word = random.key("reference")
    second = random._second_word(word)
    for index in (0, 1, 12345, 2**62):
        z = (index * random.GAMMA + word) % 2**64
        z = ((z ^ (z >> 30)) * random.MIX_1 % 2**64) ^ second
        z = (z ^ (z >> 27)) * random.MIX_2 % 2**64
        z ^= z >> 31
        assert random.bits(word, torch.tensor([index])).item() % 2**64 == z


def test_keys_tell_types_order_and_boundaries_apart() -> None:
    parts: list[tuple[int | str, ...]] = [(1, "1"), ("1", 1), ("11",), (11,), ("1", "1"), ("", "11")]
    keys = [random.key(*part) for part in parts]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_every_bit_is_fair_and_bytes_are_uniform() -> None:
    bits = random.bits(random.key("fair"), INDEX)
    ones = torch.stack([(bits >> place) & 1 for place in range(64)]).double().mean(1)
    assert ((ones - 0.5).abs() < 5 * 0.5 / math.sqrt(N)).all()
    for place in (0, 24, 56):
        counts = torch.bincount((bits >> place) & 255, minlength=256).double()
        chi2 = ((counts - N / 256) ** 2 / (N / 256)).sum().item()
        assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255), f"byte at {place}: chi-square {chi2} with 255 degrees of freedom"


@pytest.mark.parametrize("lag", [1, 2, 64, 4096])
def test_neighbours_do_not_correlate(lag: int) -> None:
    u = random.uniform(random.key("lag"), INDEX, torch.float64) - 0.5
    assert abs((u[:-lag] * u[lag:]).mean().item()) * 12 < 5 / math.sqrt(N)


@pytest.mark.parametrize("other", [1, 2**32, random.GAMMA, 2**63])
def test_keys_do_not_correlate(other: int) -> None:
    """Nearby keys, and keys one step of the counter apart, which plain splitmix64 would read as one stream, shifted."""
    u, v = (random.uniform(k, INDEX, torch.float64) - 0.5 for k in (99, 99 + other))
    for a, b in ((u, v), (u[1:], v[:-1]), (u[:-1], v[1:])):
        assert abs((a * b).mean().item()) * 12 < 5 / math.sqrt(N)


def test_uniform_moments_and_range() -> None:
    u = random.uniform(random.key("moments"), INDEX, torch.float64)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean().item() - 1 / 2) < 5 * math.sqrt(1 / 12 / N)
    assert abs(u.var().item() - 1 / 12) < 5 * math.sqrt(1 / 180 / N)


@pytest.mark.parametrize(("dtype", "mantissa"), [(torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)])
def test_narrow_uniforms_are_the_wide_one_truncated(dtype: torch.dtype, mantissa: int) -> None:
    wide = random.uniform(3, INDEX, torch.float64)
    narrow = random.uniform(3, INDEX, dtype)
    assert torch.equal(narrow.double(), (wide * 2**mantissa).floor() / 2**mantissa)


def test_normal_moments_and_tails() -> None:
    z = random.normal(random.key("normal"), torch.arange(4 * N), torch.float64)
    n = z.numel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean().item() - moment) < 5 * math.sqrt(variance / n), f"moment {power}"
    for bound in (1.0, 2.0, 3.0, 4.0):
        inside = math.erf(bound / math.sqrt(2))
        assert abs((z.abs() < bound).double().mean().item() - inside) < 5 * math.sqrt(inside * (1 - inside) / n)
    assert abs((z[1:] * z[:-1]).mean().item()) < 5 / math.sqrt(n)


def test_own_logarithm_and_cosine_match_torch() -> None:
    """To the 1e-11 they promise: relative for the logarithm, absolute for the cosine."""
    u = random.uniform(5, INDEX, torch.float64)
    x = torch.cat([1 - u, torch.tensor([2.0**-53, 0.5, math.sqrt(0.5), 1 - 2.0**-53], dtype=torch.float64)])
    torch.testing.assert_close(random.log(x), torch.log(x), rtol=1e-11, atol=0)
    assert random.log(torch.ones(1, dtype=torch.float64)).item() == 0
    torch.testing.assert_close(random._cos_turns(u), torch.cos(2 * math.pi * u), rtol=0, atol=1e-11)


def test_values_do_not_depend_on_what_is_drawn_together() -> None:
    """Odd lengths leave a scalar remainder after the vector loops, where torch's log and cos differ in the last bit."""
    whole = random.normal(8, torch.arange(1000), torch.float64)
    for start, length in ((0, 1), (3, 7), (500, 61), (999, 1)):
        assert torch.equal(random.normal(8, torch.arange(start, start + length), torch.float64), whole[start : start + length])
    assert torch.equal(random.normal(8, torch.arange(1000).view(10, 100).t(), torch.float64), whole.view(10, 100).t())


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="int32"):
        random.uniform(0, INDEX, torch.int32)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_permutation_is_a_bijection_and_local(n: int) -> None:
    image = random.permutation(random.key("order", n), n, torch.arange(n))
    assert torch.equal(image.sort().values, torch.arange(n))
    some = torch.arange(n - 1, -1, -3)
    assert torch.equal(random.permutation(random.key("order", n), n, some), image[some])


def test_permutations_are_uniform() -> None:
    """All 24 orders of 4 over 4800 keys, and every place of 30 elements: chi-square within 5 standard deviations."""
    orders: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        order = tuple(random.permutation(random.key(seed), 4, torch.arange(4)).tolist())
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 24
    chi2 = sum((count - 200) ** 2 / 200 for count in orders.values())
    assert abs(chi2 - 23) < 5 * math.sqrt(2 * 23), chi2


def test_permutation_of_a_corpus_needs_no_table() -> None:
    image = random.permutation(1, 10**12, torch.tensor([0, 1, 10**12 - 1]))
    assert len(set(image.tolist())) == 3
    with pytest.raises(ValueError, match=r"\[0, 10\)"):
        random.permutation(1, 10, torch.tensor([10]))


LAYOUTS = [
    Spec(((), ())),
    Spec((("dp",), ("tp",))),
    Spec((("tp",), ())),
    Spec((("dp", "tp"), ())),
    Spec((("tp", "dp"), ())),
    Spec(((), ("tp",)), parts=((1, (4, 8, 4)),)),
    Spec((("tp",), ("dp",)), parts=((0, (8, 4)), (1, (8, 8)))),
]


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
def test_global_index_is_the_shard_of_all_indices(spec: Spec) -> None:
    mesh, shape = Mesh(dp=2, tp=2), (12, 16)
    every = torch.arange(12 * 16).view(shape)
    for rank in range(mesh.size):
        assert torch.equal(random.global_index(spec, shape, mesh, rank), shard(every, spec, mesh, rank))


@pytest.mark.parametrize(
    ("rows", "columns", "limit"),
    [(7, 5, 12), (1, 100, 16), (100, 1, 16), (3, 40, 16), (1, 1, 1), (0, 5, 8), (5, 0, 8)],
)
def test_blocks_cover_each_element_once(rows: int, columns: int, limit: int) -> None:
    seen = torch.zeros(rows, columns)
    for r, c in random.blocks(rows, columns, limit):
        assert seen[r, c].numel() <= limit
        seen[r, c] += 1
    assert (seen == 1).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_draws_the_same_bits() -> None:
    """Exactly rounded operations leave a device nothing to choose."""
    there = INDEX.cuda()
    assert torch.equal(random.bits(7, there).cpu(), random.bits(7, INDEX))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.equal(random.uniform(7, there, dtype).cpu(), random.uniform(7, INDEX, dtype))
        assert torch.equal(random.normal(7, there, dtype).cpu(), random.normal(7, INDEX, dtype))
    assert torch.equal(random.permutation(7, N - 1, there[:-1]).cpu(), random.permutation(7, N - 1, INDEX[:-1]))
