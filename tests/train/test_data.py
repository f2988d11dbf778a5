"""What is learned from is what the files hold; which sample comes when depends on seed, weights and cursor only."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.train.data.ahead import Ahead
from phalanx.train.data.blend import BLOCK, Blend, block_slots
from phalanx.train.data.folder import Writer, read_folder
from phalanx.train.data.loader import Loader
from phalanx.train.data.source import Source, Stretch, byte_folder, open_sources, split


def source(tokens: np.ndarray, name: str = "t", weight: float | None = None, documents: Sequence[int] | None = None) -> Source:
    starts = None if documents is None else np.array(documents, np.int64)
    return Source(name, tokens, starts, None, None, name, weight)


def whole(of: Source) -> Stretch:
    return Stretch(of, 0, len(of.tokens))


def numbered(samples: int, seq: int, batch: int, seed: int = 1) -> Loader:
    """Tokens that say where they are."""
    return Loader([whole(source(np.arange(samples * seq + 1, dtype=np.uint16)))], batch, seq, seed)


def packed(path: Path, documents: Sequence[Sequence[int]], tokenizer: str = "bytes", vocab: int = 256) -> str:
    with Writer(path, tokenizer=tokenizer, tokenizer_digest="", vocab=vocab, eos=None) as writer:
        for document in documents:
            writer.write(np.array(document, writer.dtype), np.array([len(document)]), len(document))
        writer.finish()
    return str(path)


def test_text_is_its_bytes_in_order_and_cached(tmp_path: Path) -> None:
    text, cache = tmp_path / "text", tmp_path / "cache"
    (text / "b").mkdir(parents=True)
    (text / ".git").mkdir()
    (text / "b" / "two.md").write_text("zwei ü")
    (text / "a.txt").write_text("one")
    (text / "c.bin").write_bytes(b"\x01\x02")
    (text / "d.txt").touch()
    (text / ".git" / "d.txt").write_text("hidden")
    folder = byte_folder(text, cache)
    assert bytes(folder.tokens) == b"one\0" + "zwei ü\0".encode()
    assert folder.documents.tolist() == [0, 4, 12]
    assert isinstance(folder.tokens, np.memmap)
    assert byte_folder(text, cache).path == folder.path
    assert list(cache.iterdir()) == [folder.path]
    (text / "a.txt").write_text("other")
    assert bytes(byte_folder(text, cache).tokens).startswith(b"other\0")
    assert bytes(byte_folder(text / "a.txt", cache).tokens) == b"other\0"


def test_default_is_the_standard_library(tmp_path: Path) -> None:
    [library] = open_sources((), tmp_path)
    assert library.name == "the Python standard library"
    assert len(library.tokens) > 5_000_000
    assert b"import" in bytes(library.tokens[:20000])


def test_token_file_is_mapped_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([1, 40000, 3], dtype=np.uint16))
    [tokens] = open_sources((str(tmp_path / "t.npy"),))
    assert isinstance(tokens.tokens, np.memmap)
    batch = Loader([whole(tokens)], 1, 2, seed=0).batch(0)
    assert (batch["tokens"].tolist(), batch["targets"].tolist()) == ([[1, 40000]], [[40000, 3]])


def test_a_weight_is_what_follows_the_last_equals_sign(tmp_path: Path) -> None:
    a, b = packed(tmp_path / "a", [[1, 2]]), packed(tmp_path / "b=3", [[3]])
    assert [(each.name, each.weight) for each in open_sources((f"{a}=0.5", f"{b}=2"))] == [(a, 0.5), (b, 2.0)]
    assert [(each.name, each.weight) for each in open_sources((a, b))] == [(a, None), (b, None)]  # a path that exists is a path


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (("missing",), r"cannot read the text in \S*missing: .*; if it has moved, say where with --data"),
        (("x.parquet=1",), r"x\.parquet is not text: pack it first, phalanx data pack \S*x\.parquet --out FOLDER"),
        (("x.jsonl",), r"x\.jsonl is not text: pack it first, phalanx data pack \S*x\.jsonl --out FOLDER"),
        (("none",), r"none is no file and holds no text: no file in it ends in \.txt"),
        (("void.txt",), r"void\.txt is empty"),
        (("real.npy",), r"real\.npy holds float64 of shape \(3,\)"),
        (("bad.npy",), r"bad\.npy"),
        (("half",), r"half is no whole token folder: it has no meta\.json; pack it again"),
        (("short",), r"tokens\.npy holds 2 uint8; meta\.json says 3 uint8"),
        (("future",), r"meta\.json: its format is 2; this version reads format 1"),
        (("a=x",), r"--data \S*a=x: 'x' is no weight; a source is PATH or PATH=WEIGHT"),
        (("a=0",), r"the weight is 0\.0; it is above 0"),
        (("a=inf",), r"the weight is inf"),
        (("a=1", "b"), r"b has no weight, others have: give every source one, or none"),
        (
            ("a", "other"),
            r"different tokenizers cannot be blended: \S*a is of bytes with 256 tokens, \S*other is of mine with 300",
        ),
        (("a", "t.npy"), r"a is of bytes with 256 tokens, \S*t\.npy is of a tokenizer that nothing tells"),
    ],
)
def test_what_cannot_be_read_is_named(data: tuple[str, ...], told: str, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    for name in ("void.txt", "x.parquet", "x.jsonl"):
        (tmp_path / name).touch()
    np.save(tmp_path / "real.npy", np.ones(3))
    np.save(tmp_path / "t.npy", np.ones(3, np.uint8))
    (tmp_path / "bad.npy").write_text("no array")
    packed(tmp_path / "half", [[1]])
    (tmp_path / "half" / "meta.json").unlink()
    packed(tmp_path / "short", [[1, 2, 3]])
    np.save(tmp_path / "short" / "tokens.npy", np.ones(2, np.uint8))
    future = Path(packed(tmp_path / "future", [[1, 2, 3]])) / "meta.json"
    future.write_text(future.read_text().replace('"format": 1', '"format": 2'))
    packed(tmp_path / "a", [[1, 2, 3]])
    packed(tmp_path / "b", [[1, 2, 3]])
    packed(tmp_path / "other", [[1, 2, 3]], "mine", 300)
    with pytest.raises(ValueError, match=told):
        open_sources(tuple(str(tmp_path / name) for name in data), tmp_path / "cache")


def test_equal_content_has_one_digest_wherever_it_lies(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(100_000, dtype=np.uint32))
    np.save(tmp_path / "u.npy", np.arange(100_000, dtype=np.uint32)[::-1])
    digests = [
        open_sources((str(path),))[0].digest
        for path in (
            packed(tmp_path / "a", [[1, 2], [3]]),
            packed(tmp_path / "b", [[1, 2], [3]]),
            packed(tmp_path / "c", [[1], [2, 3]]),  # the same tokens in other documents
            tmp_path / "t.npy",
            tmp_path / "u.npy",
        )
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_held_out_part_is_the_end_and_no_part_of_training() -> None:
    training, held = split(source(np.arange(100, dtype=np.uint8)), 0.1)
    assert (training.begin, training.end, held.begin, held.end) == (0, 90, 90, 100)
    for stretch, begins in ((held, [90, 93, 96]), (training, list(range(0, 87, 3)))):
        loader = Loader([stretch], len(begins), 3, seed=0)
        assert sorted(loader.batch(0)["tokens"][:, 0].tolist()) == begins
        assert int(loader.batch(0)["targets"].max()) < stretch.end
    with pytest.raises(ValueError, match="held-out"):
        split(source(np.zeros(4, np.uint8)), 0.0)


def test_targets_are_the_next_tokens() -> None:
    batch = numbered(10, 4, 3).batch(5)
    assert set(batch) == {"tokens", "targets"}
    assert batch["tokens"].shape == batch["targets"].shape == (3, 4)
    assert batch["tokens"].dtype == torch.int64
    assert torch.equal(batch["targets"], batch["tokens"] + 1)
    assert (batch["tokens"][:, 0] % 4 == 0).all()


def test_each_epoch_sees_every_sample_once_in_an_order_of_its_own() -> None:
    loader = numbered(10, 4, 4)
    seen = torch.cat(
        [loader.batch(4 * step)["tokens"][:, 0] // 4 for step in range(5)]
    )  # two epochs; the third batch straddles
    first, second = seen[:10], seen[10:]
    assert torch.equal(first.sort().values, torch.arange(10))
    assert torch.equal(second.sort().values, torch.arange(10))
    assert not torch.equal(first, second)


def test_order_depends_on_seed_and_cursor_only() -> None:
    loader, wide = numbered(64, 4, 8), numbered(64, 4, 16)
    assert torch.equal(wide.batch(16)["tokens"], torch.cat([loader.batch(16)["tokens"], loader.batch(24)["tokens"]]))
    assert torch.equal(wide.batch(13)["tokens"][3:11], loader.batch(16)["tokens"])
    assert not torch.equal(numbered(64, 4, 8, seed=2).batch(0)["tokens"], loader.batch(0)["tokens"])
    assert torch.equal(numbered(64, 4, 8).batch(24)["tokens"], loader.batch(24)["tokens"])


@pytest.mark.parametrize(("microbatches", "parts"), [(1, 1), (1, 4), (2, 2), (4, 2), (2, 4)])
def test_local_parts_are_each_ranks_slice_of_each_microbatch(microbatches: int, parts: int) -> None:
    sources = [source(np.arange(begin, begin + 257, dtype=np.uint16), str(begin), 1.0, [0, 3, 257]) for begin in (0, 1000)]
    loader = Loader([whole(each) for each in sources], 16, 4, seed=1, mask_documents=True)
    everything = loader.batch(48)
    local = [loader.local(48, microbatches, part, parts) for part in range(parts)]
    for key in ("tokens", "targets", "positions"):
        chunks = [batch[key].chunk(microbatches) for batch in local]
        assert torch.equal(torch.cat([chunks[part][j] for j in range(microbatches) for part in range(parts)]), everything[key])


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"16 .* 3 microbatches for 2"):
        numbered(64, 4, 16).local(0, 3, 0, 2)
    with pytest.raises(ValueError, match=r"4 \+ 1 tokens .* 4 tokens of small"):
        Loader([whole(source(np.zeros(4, np.uint8), "small"))], 1, 4, seed=0)


def test_every_block_has_the_exact_proportions_and_no_sample_comes_twice_in_an_epoch() -> None:
    windows, slots = (1700, 450, 31), block_slots("abc", (0.7, 0.285, 0.015))
    assert slots == (700, 285, 15)
    blend = Blend(windows, slots, seed=3)
    which, sample = blend.at(torch.arange(6 * BLOCK))
    for block in which.view(6, BLOCK):
        assert torch.bincount(block, minlength=3).tolist() == [700, 285, 15]
    for number, count in enumerate(windows):
        taken = sample[which == number]
        epochs, rest = divmod(len(taken), count)
        # Which samples an epoch has had depends on how far blocks are through: after whole blocks all but the last are complete.
        seen = Counter(taken.tolist())
        assert sorted(set(seen.values())) in ([epochs], [epochs, epochs + 1])
        assert sum(each == epochs + 1 for each in seen.values()) == rest
        assert len(seen) == min(count, len(taken))
    # Alternation, not runs: 700 of 1,000 in a row would come by chance never.
    longest = max(len(run) for run in "".join(map(str, which.tolist())).replace("1", " ").replace("2", " ").split())
    assert longest < 40


def test_the_sample_at_a_cursor_needs_no_cursor_before_it() -> None:
    blend = Blend((1700, 450), (600, 400), seed=3)
    which, sample = blend.at(torch.arange(3 * BLOCK))
    for cursor in (0, 999, 1000, 2345):
        alone = blend.at(torch.tensor([cursor]))
        assert (int(alone[0]), int(alone[1])) == (int(which[cursor]), int(sample[cursor]))
    other = Blend((1700, 450), (600, 400), seed=4).at(torch.arange(3 * BLOCK))
    assert not torch.equal(which, other[0])
    far, at = blend.at(torch.tensor([10**15 + 7]))
    assert 0 <= int(at) < blend.windows[int(far)]


def test_without_weights_an_epoch_has_every_sample_of_every_source_once() -> None:
    which, sample = Blend((5, 70), None, seed=0).at(torch.arange(150))
    for epoch in (slice(0, 75), slice(75, 150)):
        pairs = list(zip(which[epoch].tolist(), sample[epoch].tolist(), strict=True))
        assert sorted(pairs) == [(0, at) for at in range(5)] + [(1, at) for at in range(70)]


def test_slots_are_rounded_by_largest_remainder() -> None:
    assert block_slots("ab", (7, 3)) == (700, 300)
    assert block_slots("abc", (1, 1, 1)) == (334, 333, 333)
    assert block_slots("ab", (0.0006, 0.9994)) == (1, 999)
    with pytest.raises(ValueError, match=r"a has 0\.0400% of the weight, less than one sample in 1,000"):
        block_slots("ab", (0.0004, 0.9996))


def test_samples_of_a_blend_come_from_their_sources() -> None:
    texts = [source(np.full(4001, value, np.uint8), str(value), weight) for value, weight in ((1, 0.75), (2, 0.25))]
    loader = Loader([whole(each) for each in texts], BLOCK, 4, seed=0)
    counted = Counter(loader.batch(0)["tokens"].flatten().tolist())
    assert counted == {1: 750 * 4, 2: 250 * 4}


def test_positions_count_from_documents_and_windows_and_ends_predict_nothing() -> None:
    # documents of 3, 1, 6 and 2 tokens; windows of 4 begin at 0, 4 and 8
    tokens = source(np.arange(13, dtype=np.uint8), documents=[0, 3, 4, 10, 13])
    loader = Loader([whole(tokens)], 3, 4, seed=0, mask_documents=True)
    batch = loader.batch(0)
    rows = {int(row[0]): at for at, row in enumerate(batch["tokens"])}
    found = {begin: (batch["positions"][at].tolist(), batch["targets"][at].tolist()) for begin, at in rows.items()}
    assert found == {
        0: ([0, 1, 2, 0], [1, 2, -100, -100]),  # 2 ends its document, 3 is one by itself
        4: ([0, 1, 2, 3], [5, 6, 7, 8]),
        8: ([0, 1, 0, 1], [9, -100, 11, 12]),  # begins inside a document
    }
    assert batch["positions"].dtype == torch.int64
    alone = Loader([whole(tokens)], 1, 4, seed=0, mask_documents=True)
    for cursor in range(3):
        for key, values in alone.batch(cursor).items():
            assert torch.equal(values[0], batch[key][cursor])
    with pytest.raises(ValueError, match=r"--mask-documents: nothing says where documents begin in raw"):
        Loader([whole(source(np.zeros(9, np.uint8), "raw"))], 1, 4, seed=0, mask_documents=True)


def test_masks_agree_with_a_count_token_by_token(tmp_path: Path) -> None:
    lengths = torch.randint(1, 12, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    folder = read_folder(Path(packed(tmp_path / "t", [[at % 200] * length for at, length in enumerate(lengths)])))
    of = [at for at, length in enumerate(lengths) for _ in range(length)]
    text = Source("t", folder.tokens, folder.documents, None, None, "", None)
    loader = Loader([whole(text)], 16, 8, seed=0, mask_documents=True)
    for cursor in range(0, 192, 16):
        batch = loader.batch(cursor)
        _, windows = loader.blend.at(torch.arange(16) + cursor)
        for row, window in enumerate(windows.tolist()):
            begin, position = window * 8, -1
            for at in range(8):
                here = of[begin + at]
                position = position + 1 if at and of[begin + at - 1] == here else 0
                assert int(batch["positions"][row, at]) == position
                assert int(batch["targets"][row, at]) == (here % 200 if of[begin + at + 1] == here else -100)


def test_the_next_batches_are_read_before_they_are_asked_for() -> None:
    asked: list[int] = []
    read = threading.Semaphore(0)

    def batch(cursor: int) -> dict[str, torch.Tensor]:
        asked.append(cursor)
        read.release()
        return {"x": torch.tensor(cursor)}

    ahead = Ahead(batch, stride=4, depth=2)
    assert int(ahead(8)["x"]) == 8
    for _ in range(3):
        assert read.acquire(timeout=60)  # three are read although one was asked for
    assert asked == [8, 12, 16]
    assert int(ahead(12)["x"]) == 12
    assert read.acquire(timeout=60)
    assert asked == [8, 12, 16, 20]  # and no more than two ahead
    assert int(ahead(100)["x"]) == 100  # as after a restart
    assert int(ahead(104)["x"]) == 104
    assert int(ahead(8)["x"]) == 8  # as after a rewind
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("phalanx-batches")]


def test_an_error_while_reading_reaches_whoever_asks_for_that_batch() -> None:
    def batch(cursor: int) -> dict[str, torch.Tensor]:
        if cursor == 4:
            raise ValueError("sample 4 cannot be read")
        return {"x": torch.tensor(cursor)}

    ahead = Ahead(batch, stride=4)
    assert int(ahead(0)["x"]) == 0
    with pytest.raises(ValueError, match="sample 4 cannot be read"):
        ahead(4)
    assert int(ahead(8)["x"]) == 8
    ahead.close()
    with pytest.raises(ValueError, match="0 batches of 4 samples"):
        Ahead(batch, stride=4, depth=0)
