"""Tokens are the bytes of the files; the order of samples depends on seed and cursor only; local parts make up the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.train.data import Loader, byte_tokens, split


def numbered(samples: int, seq: int) -> np.ndarray:
    """Tokens that say where they are."""
    return np.arange(samples * seq + 1, dtype=np.uint16)


def test_folder_is_read_in_order_and_cached(tmp_path: Path) -> None:
    text, cache = tmp_path / "text", tmp_path / "cache"
    (text / "b").mkdir(parents=True)
    (text / ".git").mkdir()
    (text / "b" / "two.md").write_text("zwei ü")
    (text / "a.txt").write_text("one")
    (text / "c.bin").write_bytes(b"\x01\x02")
    (text / ".git" / "d.txt").write_text("hidden")
    tokens = byte_tokens(text, cache)
    assert bytes(tokens) == b"one\0" + "zwei ü".encode()
    assert isinstance(tokens, np.memmap)
    assert len(list(cache.iterdir())) == 1
    assert bytes(byte_tokens(text, cache)) == bytes(tokens)
    assert len(list(cache.iterdir())) == 1
    (text / "a.txt").write_text("other")
    assert bytes(byte_tokens(text, cache)).startswith(b"other\0")
    assert bytes(byte_tokens(text / "a.txt", cache)) == b"other"


def test_token_file_is_mapped_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([1, 40000, 3], dtype=np.uint16))
    tokens = byte_tokens(tmp_path / "t.npy")
    assert tokens.tolist() == [1, 40000, 3]
    batch = Loader(tokens, 1, 2, seed=0).batch(0)
    assert (batch["tokens"].tolist(), batch["targets"].tolist()) == ([[1, 40000]], [[40000, 3]])


def test_unusable_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing"):
        byte_tokens(tmp_path / "missing", tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"none .*\.txt"):
        byte_tokens(tmp_path / "none", tmp_path)
    (tmp_path / "void.txt").touch()
    with pytest.raises(ValueError, match=r"void\.txt is empty"):
        byte_tokens(tmp_path / "void.txt", tmp_path)
    np.save(tmp_path / "real.npy", np.ones(3))
    with pytest.raises(ValueError, match=r"real\.npy holds float64"):
        byte_tokens(tmp_path / "real.npy")
    (tmp_path / "bad.npy").write_text("no array")
    with pytest.raises(ValueError, match=r"bad\.npy"):
        byte_tokens(tmp_path / "bad.npy")


def test_targets_are_the_next_tokens() -> None:
    batch = Loader(numbered(10, 4), 3, 4, seed=1).batch(5)
    assert batch["tokens"].shape == batch["targets"].shape == (3, 4)
    assert batch["tokens"].dtype == torch.int64
    assert torch.equal(batch["targets"], batch["tokens"] + 1)
    assert (batch["tokens"][:, 0] % 4 == 0).all()


def test_each_epoch_sees_every_sample_once_in_an_order_of_its_own() -> None:
    loader = Loader(numbered(10, 4), 4, 4, seed=1)
    seen = torch.cat([loader.batch(step)["tokens"][:, 0] // 4 for step in range(5)])  # two epochs; the third batch straddles
    first, second = seen[:10], seen[10:]
    assert torch.equal(first.sort().values, torch.arange(10))
    assert torch.equal(second.sort().values, torch.arange(10))
    assert not torch.equal(first, second)


def test_order_depends_on_seed_and_cursor_only() -> None:
    tokens = numbered(64, 4)
    loader = Loader(tokens, 8, 4, seed=1)
    wide = Loader(tokens, 16, 4, seed=1)
    assert torch.equal(wide.batch(1)["tokens"], torch.cat([loader.batch(2)["tokens"], loader.batch(3)["tokens"]]))
    assert not torch.equal(Loader(tokens, 8, 4, seed=2).batch(0)["tokens"], loader.batch(0)["tokens"])
    assert torch.equal(Loader(tokens, 8, 4, seed=1).batch(3)["tokens"], loader.batch(3)["tokens"])


@pytest.mark.parametrize(("microbatches", "parts"), [(1, 1), (1, 4), (2, 2), (4, 2), (2, 4)])
def test_local_parts_are_each_ranks_slice_of_each_microbatch(microbatches: int, parts: int) -> None:
    loader = Loader(numbered(64, 4), 16, 4, seed=1)
    whole = loader.batch(3)
    local = [loader.local(3, microbatches, part, parts) for part in range(parts)]
    for key in ("tokens", "targets"):
        chunks = [batch[key].chunk(microbatches) for batch in local]
        assert torch.equal(torch.cat([chunks[part][j] for j in range(microbatches) for part in range(parts)]), whole[key])


def test_sizes_that_do_not_fit_are_refused() -> None:
    loader = Loader(numbered(64, 4), 16, 4, seed=1)
    with pytest.raises(ValueError, match=r"16 .* 3 microbatches for 2"):
        loader.local(0, 3, 0, 2)
    with pytest.raises(ValueError, match=r"4 \+ 1 tokens .* 4 tokens"):
        Loader(np.zeros(4, np.uint8), 1, 4, seed=0)
    with pytest.raises(ValueError, match="held-out"):
        split(np.zeros(4, np.uint8), 0.0)


def test_held_out_part_is_disjoint() -> None:
    train, held = split(np.arange(100, dtype=np.uint8), 0.1)
    assert (train.tolist(), held.tolist()) == (list(range(90)), list(range(90, 100)))


def test_default_is_the_standard_library(tmp_path: Path) -> None:
    tokens = byte_tokens(cache=tmp_path)
    assert len(tokens) > 5_000_000
    assert b"import" in bytes(tokens[:20000])
