"""A packed folder holds the documents of its sources, whoever packed it with how many workers; what went wrong leaves none."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from phalanx.train.data.folder import Folder, Writer, read_folder, smallest_dtype
from phalanx.train.data.pack import Progress, pack
from phalanx.train.data.tokenizer import open_tokenizer

BYTES = open_tokenizer("bytes")
SOURCE = Path(__file__).parents[2] / "src"
STORIES = [f"Story {number}: {'once upon a time ' * (number % 7)}ü" for number in range(300)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a BPE tokenizer that would add a beginning, cut at 8 tokens and pad, if it were asked to."""
    path = tmp_path_factory.mktemp("tokenizer")
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(STORIES, trainer)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    library.enable_truncation(8)
    library.enable_padding(length=8)
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return path


def documents(folder: Folder) -> list[list[int]]:
    starts = folder.documents.tolist()
    return [folder.tokens[begin:end].tolist() for begin, end in pairwise(starts)]


def packed_text(*sources: Path, out: Path) -> list[bytes]:
    pack(sources, out, BYTES)
    return [bytes(document) for document in documents(read_folder(out))]


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": at, "text": text}) + "\n" for at, text in enumerate(texts)))
    return path


def test_a_document_is_a_file_a_line_or_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.txt").write_text("file b\n")
    (folder / "a.md").write_text("file a")
    (folder / "empty.txt").touch()
    (folder / "image.png").write_bytes(b"\xff")
    (folder / "lines.jsonl").write_text(
        '{"text": "line 1 ü"}\n\n{"x": 1, "text": "line\\n2"}\n{"text": ""}\n{"text": "no newline"}'
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["row 1", "row 2", "", "row 4"]}), tmp_path / "t.parquet", row_group_size=3
    )
    found = packed_text(tmp_path / "t.parquet", folder, out=tmp_path / "out")
    texts = ["row 1", "row 2", "row 4", "file a", "file b\n", "line 1 ü", "line\n2", "no newline"]
    assert found == [text.encode() + b"\0" for text in texts]
    meta = read_folder(tmp_path / "out").meta
    assert (meta.tokenizer, meta.vocab, meta.eos, meta.dtype, meta.documents) == ("bytes", 256, 0, "uint8", 8)
    assert meta.text_bytes == sum(len(text.encode()) for text in texts) == meta.tokens - 8
    assert meta.largest == 0xC3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["documents.npy", "meta.json", "tokens.npy"]
    assert np.load(tmp_path / "out" / "documents.npy").dtype == np.int64


def test_a_document_that_holds_the_separator_is_not_cut_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("be\0fore")
    (tmp_path / "b.txt").write_text("after")
    assert packed_text(tmp_path / "a.txt", tmp_path / "b.txt", out=tmp_path / "out") == [b"be\0fore\0", b"after\0"]


def test_documents_are_what_the_tokenizer_makes_of_them_and_an_end(tmp_path: Path, tokenizer: Path) -> None:
    opened = open_tokenizer(str(tokenizer))
    assert (opened.name, opened.eos, opened.vocab) == (tokenizer.name, 1, 320)
    meta = pack([jsonl(tmp_path / "s.jsonl", STORIES)], tmp_path / "out", opened)
    folder = read_folder(tmp_path / "out")
    library = Library.from_file(str(tokenizer / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    assert documents(folder) == [[*library.encode(text, add_special_tokens=False).ids, 1] for text in STORIES]
    assert library.decode(documents(folder)[6][:-1]) == STORIES[6]
    assert (meta.dtype, meta.largest < 320, len(meta.tokenizer_digest)) == ("uint16", True, 32)
    # the file alone does not say what ends a document
    alone = tmp_path / "tokenizer.json"
    alone.write_text((tokenizer / "tokenizer.json").read_text())
    with pytest.raises(ValueError, match=r"does not say which token ends a document: give --eos TOKEN, or --eos none"):
        open_tokenizer(str(alone))
    assert open_tokenizer(str(alone), "<s>").eos == 0
    assert open_tokenizer(str(alone), "none").eos is None
    with pytest.raises(
        ValueError, match=r"has no token '<ende>' to end documents with; it has <end>, <s> \(did you mean '<end>'\?\)"
    ):
        open_tokenizer(str(alone), "<ende>")


def test_older_files_are_read_by_transformers(tmp_path: Path, tokenizer: Path) -> None:
    from transformers import GPT2Tokenizer

    (tmp_path / "old").mkdir()
    model = json.loads((tokenizer / "tokenizer.json").read_text())["model"]
    (tmp_path / "old" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "old" / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    config = {"tokenizer_class": GPT2Tokenizer.__name__, "eos_token": "<end>", "unk_token": "<end>", "bos_token": "<s>"}
    (tmp_path / "old" / "tokenizer_config.json").write_text(json.dumps(config))
    old, new = open_tokenizer(str(tmp_path / "old")), open_tokenizer(str(tokenizer))
    texts = [(text, text.encode()) for text in STORIES[:20]]
    assert [each.tolist() for each in old.encode()(texts)] == [each.tolist() for each in new.encode()(texts)]
    assert old.eos == new.eos


def test_the_output_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small chunks, whose ends lie at every place of a line; the workers get them as they are."""
    sources = [jsonl(tmp_path / "s.jsonl", STORIES), tmp_path / "t"]
    sources[1].mkdir()
    for at, text in enumerate(STORIES[:40]):
        (sources[1] / f"{at:02}.txt").write_text(text)
    told: list[Progress] = []
    alone = pack(sources, tmp_path / "alone", open_tokenizer(str(tokenizer)))
    for size in (1, 7, 50, 1000):
        monkeypatch.setattr("phalanx.train.data.read.CHUNK_BYTES", size)
        name = f"size-{size}"
        workers = 2 if size == 1000 else 1
        assert pack(sources, tmp_path / name, open_tokenizer(str(tokenizer)), workers=workers, progress=told.append) == alone
        for file in ("tokens.npy", "documents.npy", "meta.json"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "alone" / file).read_bytes()
    last = told[-1]
    assert (last.documents, last.text_bytes, last.done) == (340, alone.text_bytes, last.total)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", b"one\ntwo \xff\n", r"a\.txt, line 2: byte 0xff is not UTF-8 text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', r"a\.jsonl, line 2: byte 0xff is not UTF-8 text"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text"}\n', r"a\.jsonl, line 3: not JSON: Expecting ':' delimiter"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', r'a\.jsonl, line 2: a list; each line is an object, as in \{"text": \.\.\.\}'),
        ("a.jsonl", b'{"Text": "x"}\n', r"line 1: no key 'text'; it has Text \(did you mean 'Text'\?\)\. --text-key says"),
        ("a.jsonl", b'{"text": null}\n', r"line 1: 'text' is a NoneType, not text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"line 1: 'text' holds '\\ud800', half a character"),
        ("a.jsonl", b"\n \n", r"there is no text in \S*a\.jsonl: every document is empty"),
        ("a.txt", b"", r"there is no text in \S*a\.txt"),
        ("a.parquet", b"PAR1", r"cannot read \S*a\.parquet as parquet"),
        ("a.bin", None, r"cannot read \S*a\.bin: No such file"),
    ],
)
def test_what_cannot_be_packed_is_told_with_its_line(name: str, content: bytes | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "in" / name
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=told):
        pack([path], tmp_path / "out", BYTES)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


def test_lines_are_counted_through_all_chunks_and_told_by_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Path
) -> None:
    monkeypatch.setattr("phalanx.train.data.read.CHUNK_BYTES", 100)
    path = jsonl(tmp_path / "s.jsonl", STORIES)
    path.write_text(path.read_text() + "{}\n" + json.dumps({"text": "y" * 1000}))
    with pytest.raises(ValueError, match=r"s\.jsonl, line 301: no key 'text'; it has none"):
        pack([path], tmp_path / "out", open_tokenizer(str(tokenizer)), workers=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["s.jsonl"]


def test_rows_and_columns_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", "c", None], "count": [1, 2, 3, 4]}), path, row_group_size=3)
    for key, told in (
        ("text", r"t\.parquet, row 4: 'text' is null, not text"),
        ("count", r"t\.parquet, row 1: 'count' is a int, not text"),
        ("txt", r"t\.parquet has no column 'txt'; it has text, count \(did you mean 'text'\?\)"),
    ):
        with pytest.raises(ValueError, match=told):
            pack([path], tmp_path / "out", BYTES, text_key=key)


def test_sources_tokenizers_and_folders_that_do_not_exist_or_do_already(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("text")
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"none holds nothing to pack: no file in it ends in \.txt"):
        pack([tmp_path / "none"], tmp_path / "out", BYTES)
    with pytest.raises(
        ValueError, match=r"there is no tokenizer missing: --tokenizer is bytes, a tokenizer\.json, or a folder"
    ):
        open_tokenizer("missing")
    with pytest.raises(ValueError, match=r"cannot read the tokenizer \S*a\.txt"):
        open_tokenizer(str(text))
    with pytest.raises(ValueError, match=r"--eos 256: for bytes it is a number from 0 to 255, or none"):
        open_tokenizer("bytes", "256")
    with pytest.raises(ValueError, match="workers is 0"):
        pack([text], tmp_path / "out", BYTES, workers=0)
    pack([text], tmp_path / "out", BYTES)
    with pytest.raises(ValueError, match=r"out is there already; --overwrite replaces it"):
        pack([text], tmp_path / "out", BYTES)
    pack([text], tmp_path / "out", open_tokenizer("bytes", "none"), overwrite=True)
    assert bytes(read_folder(tmp_path / "out").tokens) == b"text"
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"out is no token folder, so it is not replaced"):
        pack([text], tmp_path / "out", BYTES, overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "precious"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.txt", "none", "out"]


def test_a_packed_folder_inside_a_source_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for name in ("one", "two"):
        assert packed_text(tmp_path, out=tmp_path / name) == [b"text\0"]


def test_the_smallest_dtype_that_holds_the_vocabulary() -> None:
    assert [smallest_dtype(vocab) for vocab in (1, 256, 257, 65536, 65537, 2**32)] == [
        np.dtype(name) for name in ("uint8", "uint8", "uint16", "uint16", "uint32", "uint32")
    ]
    with pytest.raises(ValueError, match="4294967297 tokens does not fit 32 bits"):
        smallest_dtype(2**32 + 1)


def test_a_token_above_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"token 300 is above the vocabulary, which ends at 299"),
        Writer(tmp_path / "out", tokenizer="t", tokenizer_digest="", vocab=300, eos=None) as writer,
    ):
        writer.write(np.array([299, 300], np.uint16), np.array([2]), 2)
    assert not list(tmp_path.iterdir())


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A write beyond fails, as on a full disk, with another number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "s.jsonl", ["x" * 1000] * 3000)
    with files_of_at_most(1 << 20), pytest.raises(ValueError, match=r"cannot write \S*out: File too large after [\d,]+ tokens"):
        pack([path], tmp_path / "out", BYTES)
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.jsonl"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end the workers")
def test_a_killed_pack_leaves_no_folder_and_no_process(tmp_path: Path, tokenizer: Path) -> None:
    path = jsonl(tmp_path / "s.jsonl", ["word " * 100_000] * 60)
    two = ("--workers", "2")
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "phalanx",
            "data",
            "pack",
            path,
            "--out",
            tmp_path / "out",
            "--tokenizer",
            tokenizer,
            *two,
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    deadline = time.monotonic() + 60
    # Once something is written, workers run.
    while not any(part.stat().st_size > 1000 for part in tmp_path.glob("out.partial-*/tokens.npy")):
        assert process.poll() is None
        assert time.monotonic() < deadline, "nothing was written within 60 s"
        time.sleep(0.02)
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) >= 2
    process.kill()
    process.wait()
    while alive := [pid for pid in children if is_running(pid)]:
        assert time.monotonic() < deadline, f"processes {alive} outlive the one that started them"
        time.sleep(0.02)
    assert not (tmp_path / "out").exists()
    [partial] = tmp_path.glob("out.partial-*")
    with pytest.raises(ValueError, match="no whole token folder"):
        read_folder(partial)


def is_running(pid: int) -> bool:
    """A zombie, which waits for whoever inherited it, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
